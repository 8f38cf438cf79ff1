"""Calls leave no reference cycles.

`pauses` freezes the objects of running calls, and the garbage collector skips frozen objects.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from routetrace.server.testing import free_ports


def test_calls_of_any_method_and_end_are_freed_without_the_garbage_collector(
    tmp_path: Path,
) -> None:
    target = f"127.0.0.1:{free_ports(1)}"
    # A process of its own: there is one collector for all tests.
    command = [sys.executable, "-m", "support.garbage", target, str(tmp_path)]
    tests = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=tests, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    ends = {"OK", "INVALID_ARGUMENT", "NOT_FOUND", "DEADLINE_EXCEEDED", "CANCELLED", "reject"}
    assert found["ends"].keys() >= ends
    assert (found["open"], found["left"]) == (0, {})
