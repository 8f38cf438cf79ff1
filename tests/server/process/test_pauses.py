"""Pauses of the garbage collector, in a process of their own: it is one for all tests."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import asyncio, gc, weakref
from routetrace.server.process import pauses

class Node: pass

def ring():
    node = Node(); node.itself = node
    return weakref.ref(node)

async def main():
    collecting = asyncio.create_task(pauses.collect_garbage())
    await asyncio.sleep(0.05)
    start = gc.get_freeze_count()
    gone = ring()
    live = [Node() for _ in range(300_000)]
    for node in live:
        node.more = []
    assert gone() is not None, "collected within a callback"
    assert len(gc.get_objects()) > 600_000
    await asyncio.sleep(0.5)
    assert gone() is None, "garbage must not be frozen"
    frozen = gc.get_freeze_count() - start
    assert frozen > 600_000, frozen
    found = len(gc.get_objects())
    assert found < 10_000, found
    gone = ring()
    more = [[] for _ in range(5000)]
    await asyncio.sleep(0.5)
    assert gone() is None, "not collected again"

    kept = Node()
    gone = weakref.ref(kept)
    gc.freeze()
    kept.itself = kept
    del kept
    gc.collect()
    assert gone() is not None, "this test shows nothing"
    pauses.collect_frozen()
    assert gone() is None, "frozen garbage is not collected"
    collecting.cancel()
    await asyncio.wait([collecting])
    assert gc.isenabled()

asyncio.run(main())
"""


def test_garbage_is_collected_between_callbacks_and_survivors_are_walked_once() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
