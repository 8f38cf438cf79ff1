"""`python -m faults.skewed FILE MODULE ARGS`: runs a module whose wall clock is off.

FILE holds how many seconds it is off at the moment. Only what Python code asks for is moved; the
monotonic clock goes on as it is, as that of a real machine does.
"""

from __future__ import annotations

import runpy
import sys
import time
from pathlib import Path

_time, _time_ns = time.time, time.time_ns


def skew(path: Path) -> None:
    """From now on, in this process."""

    def offset() -> float:
        try:
            return float(path.read_text())
        except (OSError, ValueError):  # it is being written
            return 0.0

    time.time = lambda: _time() + offset()
    time.time_ns = lambda: _time_ns() + int(offset() * 1e9)


if __name__ == "__main__":
    skew(Path(sys.argv[1]))
    sys.argv = sys.argv[2:]
    # The rest of the command line is that of `python -m MODULE`.
    assert sys.argv.pop(0) == "-m"
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
