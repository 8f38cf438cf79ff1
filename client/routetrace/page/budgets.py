"""Bounds of work and memory: gates, shared calls, and a cache by bytes."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable
from contextlib import asynccontextmanager
from typing import Any, Generic, Protocol, TypeVar

from routetrace.page.errors import busy

_T = TypeVar("_T")


class Gate:
    """Lets a number of tasks through at a time.

    Args:
        most: tasks at a time.
        waiting: tasks that may wait.
        seconds: longest wait.
    """

    def __init__(self, most: int, waiting: int, seconds: float) -> None:
        self._free = asyncio.Semaphore(most)
        self._room = waiting
        self._seconds = seconds

    @asynccontextmanager
    async def enter(self) -> AsyncIterator[None]:
        """Hold one place.

        Raises:
            Overloaded: if too many wait, or none becomes free in time.
        """
        if self._free.locked():
            await self._wait()
        else:
            await self._free.acquire()
        try:
            yield
        finally:
            self._free.release()

    async def _wait(self) -> None:
        if not self._room:
            raise busy()
        self._room -= 1
        try:
            await asyncio.wait_for(self._free.acquire(), self._seconds)
        except (TimeoutError, asyncio.TimeoutError):
            raise busy() from None
        finally:
            self._room += 1


class Shared:
    """Calls in progress by key: who asks for the same gets the same answer."""

    def __init__(self) -> None:
        self._tasks: dict[Hashable, asyncio.Task[Any]] = {}

    async def call(self, key: Hashable, make: Callable[[], Awaitable[_T]]) -> _T:
        """Return the result of the call in progress for a key, or of a new one."""
        task = self._tasks.get(key)
        if task is None:
            task = self._tasks[key] = asyncio.ensure_future(_run(make))
            task.add_done_callback(lambda _: self._tasks.pop(key, None))
            task.add_done_callback(_seen)
        # Who gives up does not take the answer from the others.
        result: _T = await asyncio.shield(task)
        return result


class Sized(Protocol):
    """A value of a cache."""

    @property
    def nbytes(self) -> int:
        """Its bytes now; they may grow."""


_V = TypeVar("_V", bound=Sized)


class Cache(Generic[_V]):
    """Values by key, those used last, as many as fit.

    Args:
        most: bytes of all values; one larger than that is not kept.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._values: OrderedDict[tuple[Hashable, ...], _V] = OrderedDict()

    @property
    def nbytes(self) -> int:
        """Bytes of all values."""
        return sum(value.nbytes for value in self._values.values())

    def get(self, key: tuple[Hashable, ...]) -> _V | None:
        """Return the value of a key, None if there is none."""
        if key not in self._values:
            return None
        self._values.move_to_end(key)
        return self._values[key]

    def put(self, key: tuple[Hashable, ...], value: _V) -> None:
        """Keep a value, and drop others for it."""
        self._values[key] = value
        self._values.move_to_end(key)
        self.settle()

    def make_room(self, nbytes: int) -> None:
        """Drop the values used least lately, until a new one of so many bytes fits."""
        while self._values and self.nbytes + nbytes > self._most:
            self._values.popitem(last=False)

    def settle(self) -> None:
        """Drop values until the others fit; call it after one has grown."""
        self.make_room(0)

    def drop(self, owner: Hashable) -> None:
        """Drop the values whose key begins with `owner`."""
        for key in [key for key in self._values if key[0] == owner]:
            del self._values[key]


async def _run(make: Callable[[], Awaitable[_T]]) -> _T:
    return await make()


def _seen(task: asyncio.Task[Any]) -> None:
    """Retrieve the error of a task, which may have no waiting caller left."""
    if not task.cancelled():
        task.exception()
