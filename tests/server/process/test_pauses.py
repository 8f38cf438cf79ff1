"""Pauses of the garbage collector, in a process of their own: it is one for all tests."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import gc, weakref
from routetrace.server.process import pauses

class Node: pass

pauses.shorten()
start = gc.get_freeze_count()
ring = Node(); ring.itself = ring
gone = weakref.ref(ring)
del ring
live = [Node() for _ in range(300_000)]
for node in live:
    node.more = []
assert gone() is None, "garbage must not be frozen"
frozen = gc.get_freeze_count() - start
assert frozen > 200_000, frozen
found = len(gc.get_objects())
assert found < 300_000, found  # of twice as many, with their lists
del live
gc.collect()
"""


def test_survivors_of_a_long_collection_are_not_walked_again() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
