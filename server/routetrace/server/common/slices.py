"""Long work on the event loop, in slices."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Iterator, Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from routetrace.codec.records import U32

#: Seconds that one slice runs before it yields to the event loop.
SLICE_SECONDS = 0.0015

#: Numbers that are converted at a time.
_NUMBERS = 1 << 14

_T = TypeVar("_T")


#: Work that takes turns with other work.
_in_turns: set[object] = set()


async def in_slices(
    items: Iterable[_T], pause: Callable[[], float] = lambda: 0.0
) -> AsyncIterator[_T]:
    """Yield items, with pauses in which the event loop runs other tasks.

    Items that other tasks may remove must be in a copy.

    Args:
        items: the items.
        pause: returns the seconds of the next pause.
    """
    begun = time.monotonic()
    for item in items:
        yield item
        if time.monotonic() - begun > SLICE_SECONDS:
            await asyncio.sleep(pause())
            begun = time.monotonic()


async def in_turns(items: Iterable[_T]) -> AsyncIterator[_T]:
    """Yield items, as `in_slices`; all such work together takes at most half of the loop's time.

    For work that callers can cause at will.
    """
    work = object()
    _in_turns.add(work)
    try:
        async for item in in_slices(items, lambda: (2 * len(_in_turns) - 1) * SLICE_SECONDS):
            yield item
    finally:
        _in_turns.discard(work)


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
