"""Long work on the event loop, in slices."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Generator, Iterable, Iterator, Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from routetrace.codec.records import U32

#: Seconds that one slice runs before it yields to the event loop.
SLICE_SECONDS = 0.0015

#: Numbers that are converted at a time.
_NUMBERS = 1 << 14

_T = TypeVar("_T")


class _Turns:
    """Times of slices of work that takes turns."""

    def __init__(self) -> None:
        self._free_at = 0.0  # by the monotonic clock

    def reserve(self, share: float) -> float:
        """Reserve the next slice; return the seconds until it begins."""
        now = time.monotonic()
        begin = max(now, self._free_at)
        self._free_at = begin + SLICE_SECONDS / share
        return begin - now

    def give_back(self, seconds: float, share: float) -> None:
        """Give the rest of a slice back."""
        self._free_at -= seconds / share


_turns = _Turns()


async def in_slices(items: Iterable[_T]) -> AsyncIterator[_T]:
    """Yield items, with pauses in which the event loop runs other tasks.

    Items that other tasks may remove must be in a copy.
    """
    begun = time.monotonic()
    for item in items:
        yield item
        if time.monotonic() - begun > SLICE_SECONDS:
            await asyncio.sleep(0)
            begun = time.monotonic()


async def in_turns(
    items: Iterable[_T], share: float = 0.5, *, waits: bool = False
) -> AsyncIterator[_T]:
    """Yield items, as `in_slices`; all such work together takes at most half of the loop's time.

    For work that callers can cause at will.

    Args:
        items: the items.
        share: maximum share of the loop's time that this work takes alone.
        waits: whether the first slice waits for its turn, as all others do; short work need not.
    """
    pause = _turns.reserve(share)
    if waits:
        await asyncio.sleep(pause)
    begun = time.monotonic()
    try:
        for item in items:
            yield item
            if time.monotonic() - begun > SLICE_SECONDS:
                await asyncio.sleep(_turns.reserve(share))
                begun = time.monotonic()
    finally:
        left = SLICE_SECONDS - (time.monotonic() - begun)
        _turns.give_back(max(0.0, left), share)


def at_once(steps: Generator[None, None, _T]) -> _T:
    """Run all steps; return their result."""
    try:
        while True:
            next(steps)
    except StopIteration as end:
        result: _T = end.value
        return result


async def result_in_slices(steps: Generator[None, None, _T]) -> _T:
    """Run all steps, with pauses as in `in_slices`; return their result."""
    results: list[_T] = []

    def kept() -> Iterator[None]:
        results.append((yield from steps))

    async for _ in in_slices(kept()):
        pass
    return results[0]


async def numbers_in_turns(numbers: Sequence[int], most: int) -> npt.NDArray[np.uint32]:
    """Return the first numbers of a repeated field, at most `most` of them, as `in_turns`."""
    array = np.empty(min(len(numbers), most), U32)
    async for at in in_turns(range(0, len(array), _NUMBERS)):
        part = array[at : at + _NUMBERS]
        part[:] = numbers[at : at + len(part)]
    return array
