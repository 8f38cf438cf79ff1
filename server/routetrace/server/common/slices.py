"""Long work on the event loop, in slices."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Generator,
    Iterable,
    Iterator,
    Sequence,
)
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from routetrace.codec.records import U32

#: Seconds that one slice runs before it yields to the event loop.
SLICE_SECONDS = 0.0015

#: Seconds of a slice of work that callers can cause at will: each step of others may wait for one.
TURN_SECONDS = 0.0005

#: Maximum share of the loop for this work of one owner while others are active. Callers that wait
#: for each answer use less of the loop the slower they become; this work must not take their part.
SHARE_BESIDE_OTHERS = 0.15

#: Numbers that are converted at a time.
_NUMBERS = 1 << 14

_T = TypeVar("_T")
_Part = TypeVar("_Part", bytes, npt.NDArray[np.uint32])


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


class Turns:
    """Slices of work that callers can cause at will, which together take a share of the loop.

    Args:
        step: coroutine function to await before each slice.
        alone: whether no other owner is active; if one is, the share is at most
            `SHARE_BESIDE_OTHERS`.
    """

    def __init__(
        self,
        step: Callable[[], Awaitable[None]] | None = None,
        alone: Callable[[], bool] = lambda: True,
    ) -> None:
        self._step = step
        self._alone = alone
        #: Time by the monotonic clock until which the slices so far take their share.
        self._free_at = 0.0
        #: Work that waits for a slice. Only the first one waits for `_free_at`, and nothing is
        #: reserved before a slice begins: a call that is cancelled until then leaves nothing.
        self._line: deque[asyncio.Future[None]] = deque()

    async def over(
        self, items: Iterable[_T], share: float = 0.5, *, waits: bool = False
    ) -> AsyncIterator[_T]:
        """Yield items, as `in_slices`.

        Args:
            items: the items.
            share: maximum share of the loop's time that this work takes alone.
            waits: whether the first slice waits for its turn, as all others do; short work need
                not wait.
        """
        begun, limit = await (self._turn(share) if waits else self._begin(share))
        try:
            for item in items:
                yield item
                if time.monotonic() - begun > TURN_SECONDS:
                    begun, limit = await self._turn(share)
        finally:
            left = TURN_SECONDS - (time.monotonic() - begun)
            self._free_at -= max(0.0, left) / limit

    def _limited(self, share: float) -> float:
        return share if self._alone() else min(share, SHARE_BESIDE_OTHERS)

    async def _turn(self, share: float) -> tuple[float, float]:
        """Wait for a slice, in order of arrival; begin it."""
        first: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._line.append(first)
        try:
            if self._line[0] is not first:
                await first
            await asyncio.sleep(max(0.0, self._free_at - time.monotonic()))
            return await self._begin(share)
        finally:
            self._line.remove(first)
            if self._line and not self._line[0].done():
                self._line[0].set_result(None)

    async def _begin(self, share: float) -> tuple[float, float]:
        """Begin a slice in a step of its owner; return its time, and the share that it takes."""
        if self._step is not None:
            await self._step()
        now, limit = time.monotonic(), self._limited(share)
        self._free_at = max(now, self._free_at) + TURN_SECONDS / limit
        return now, limit


#: Slices of work without an owner.
IN_TURNS = Turns()


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


def converted(
    items: _Part, size: int, convert: Callable[[_Part], Iterable[_T]]
) -> Generator[None, None, list[_T]]:
    """Convert bytes or an array to a list, `size` of its items at a step."""
    result: list[_T] = []
    for at in range(0, len(items), size):
        result += convert(items[at : at + size])
        yield
    return result


async def numbers_in_turns(
    numbers: Sequence[int], most: int, turns: Turns
) -> npt.NDArray[np.uint32]:
    """Return the first numbers of a repeated field, at most `most` of them."""
    array = np.empty(min(len(numbers), most), U32)
    async for at in turns.over(range(0, len(array), _NUMBERS)):
        part = array[at : at + _NUMBERS]
        part[:] = numbers[at : at + len(part)]
    return array
