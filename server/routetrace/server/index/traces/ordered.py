"""Traces in the order of their serial numbers, for going through them in slices.

A copy of all traces would take long to make, to walk by the garbage collector, and to free. Here
only a block is copied at a time, and the place of the next one is found by its serial number, so
that traces may come and go between two steps.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from operator import attrgetter

from routetrace.server.index.traces.trace import Trace

#: Maximum traces of a block.
BLOCK = 256

_serial = attrgetter("serial")


def _first(block: list[Trace]) -> int:
    return block[0].serial


def _last(block: list[Trace]) -> int:
    return block[-1].serial


class Ordered:
    """Traces by serial number."""

    def __init__(self) -> None:
        self._blocks: list[list[Trace]] = []  # none is empty
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def add(self, trace: Trace) -> None:
        """Add a trace that is newer than all others.

        Raises:
            ValueError: if it is not.
        """
        if self._blocks and trace.serial <= _last(self._blocks[-1]):
            raise ValueError(f"trace {trace.serial} comes after a newer one")
        if self._blocks and len(self._blocks[-1]) < BLOCK:
            self._blocks[-1].append(trace)
        else:
            self._blocks.append([trace])
        self._size += 1

    def remove(self, trace: Trace) -> None:
        """Remove a trace that was added."""
        at = bisect_left(self._blocks, trace.serial, key=_last)
        block = self._blocks[at]
        del block[bisect_left(block, trace.serial, key=_serial)]
        if not block:
            del self._blocks[at]
        self._size -= 1

    def oldest_first(self) -> Iterator[Trace]:
        """Yield the traces of the first step, oldest first; some of them may be removed by then."""
        after, newest = 0, _last(self._blocks[-1]) if self._blocks else 0
        while after < newest:
            at = bisect_right(self._blocks, after, key=_last)
            if at == len(self._blocks):  # the rest was removed
                return
            block = self._blocks[at]
            part = block[bisect_right(block, after, key=_serial) :]
            after = part[-1].serial
            yield from part[: bisect_right(part, newest, key=_serial)]

    def newest_first(self, before: int = 0) -> Iterator[Trace]:
        """Yield the traces below a serial number, newest first; as `oldest_first`.

        Args:
            before: the serial number; 0: all.
        """
        if not before and self._blocks:
            before = _last(self._blocks[-1]) + 1
        while at := bisect_left(self._blocks, before, key=_first):
            block = self._blocks[at - 1]
            part = block[: bisect_left(block, before, key=_serial)]
            before = part[0].serial
            yield from reversed(part)
