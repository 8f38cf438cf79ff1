"""Commit first, then apply: the order in which the server changes.

A change is appended to the store; once that is as durable as the ack mode promises, it is applied
to the state, and only then does whoever asked for it hear of it. Changes are applied in the order
in which they were appended, which is the order in which a restart replays them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeAlias

from routetrace.server.apply import NO_FRAMES, apply_record
from routetrace.server.checksums import Payload
from routetrace.server.chunk import ParsedChunk
from routetrace.server.state import State
from routetrace.server.store import Record, Store
from routetrace.v1.errors import Corrupt

_log = logging.getLogger(__name__)

#: Takes what `apply_record` returned, or the error because of which it was not called.
Done: TypeAlias = Callable[[Any, "Exception | None"], None]


class Clock:
    """Unix time in seconds that never steps: the wall clock at start, then the monotonic one."""

    def __init__(self) -> None:
        self._offset = time.time() - time.monotonic()

    def now(self) -> float:
        """Seconds."""
        return time.monotonic() + self._offset


class Changes:
    """Wakes those who wait for something to change."""

    def __init__(self) -> None:
        self._waiting: dict[Hashable, set[asyncio.Event]] = {}

    async def wait(self, key: Hashable, timeout: float) -> None:
        """Returns when `key` changed, and after `timeout` seconds at the latest."""
        event = asyncio.Event()
        waiting = self._waiting.setdefault(key, set())
        waiting.add(event)
        try:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(event.wait(), timeout)
        finally:
            waiting.discard(event)
            if not waiting and self._waiting.get(key) is waiting:
                del self._waiting[key]

    def notify(self, key: Hashable) -> None:
        """`key` changed."""
        for event in self._waiting.pop(key, ()):
            event.set()

    def notify_all(self) -> None:
        """Everything changed."""
        for key in list(self._waiting):
            self.notify(key)


@dataclass(slots=True)
class _Pending:
    number: int
    record: bytes
    chunk: ParsedChunk | None
    stored: Future[None]
    done: Done


class Journal:
    """The one way to change the state. All calls belong to the event loop's thread."""

    def __init__(self, store: Store, state: State) -> None:
        self.store = store
        self.state = state
        self.clock = Clock()
        self.changes = Changes()
        self._pending: deque[_Pending] = deque()
        self._number = 0
        self._woken = False

    def recover(self) -> int:
        """Rebuilds the state from the snapshot and the records after it; returns their number.

        A record that cannot be applied is reported and skipped: its rows are missing. So is a
        snapshot that can not be read.

        Raises:
            InvalidArgument: if the snapshot is one of another version.
        """
        snapshot = self.store.load_snapshot()
        if snapshot:
            try:
                self.state.load(snapshot[1])
            except Corrupt as error:
                _log.error("what is older than record %d is lost: %s", snapshot[0] + 1, error)
        count = 0
        for number, record in self.store.headers(self.state.number):
            if record is None:
                self._torn(True)
                continue
            count += 1
            try:
                apply_record(self.state, number, record)
            except Exception:
                _log.exception("record %d cannot be applied and is left out", number)
                self._torn(True)
        self._torn(False)
        for number in self.store.numbers():
            if number not in self.state.frames:  # its header is damaged: nobody will ask for it
                self.state.hold(number, NO_FRAMES)
        # Not only what could be applied: a number is used once.
        self._number = max(self.state.number, self.store.last_number())
        self.state.touched.clear()
        return count

    def _torn(self, torn: bool) -> None:
        for writer in self.state.writers.values():
            writer.torn = torn

    def submit(
        self,
        record: bytes,
        done: Done,
        payload: Payload = b"",
        sums: Sequence[int] | None = None,
        chunk: ParsedChunk | None = None,
    ) -> None:
        """Stores a record, then applies it.

        Args:
            record: its header.
            done: called once it is applied, or was not stored; in the order of the calls.
            payload: what is stored with it.
            sums: the running checksums of the payload, where they are known.
            chunk: what the ChunkHeader in it holds, where that was parsed before.

        Raises:
            Overloaded, Unavailable: if the store refuses it at once. Whoever calls knows so before
                the next one, which would be stored in vain if it builds on this one. `done` is not
                called.
        """
        loop = asyncio.get_running_loop()
        self._number += 1
        stored = self.store.append(Record(self._number, record, payload, sums))
        if stored.done() and (refusal := stored.exception()):
            raise refusal
        self._pending.append(_Pending(self._number, record, chunk, stored, done))
        if not stored.done():
            stored.add_done_callback(lambda _: self._wake(loop))
        elif not self._woken:
            self._woken = True
            loop.call_soon(self._apply_stored)

    def append(self, record: bytes) -> asyncio.Future[Any]:
        """Stores a record without a payload, then applies it.

        Returns:
            What `apply_record` returned, or the store's error.

        Raises:
            Overloaded, Unavailable: as `submit`.
        """
        applied: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        def done(result: Any, error: Exception | None) -> None:
            if applied.cancelled():
                return
            if error is None:
                applied.set_result(result)
            else:
                applied.set_exception(error)

        self.submit(record, done)
        return applied

    def _wake(self, loop: asyncio.AbstractEventLoop) -> None:
        # In the store's thread: once for all records of a commit, as far as that can be known.
        if not self._woken:
            self._woken = True
            loop.call_soon_threadsafe(self._apply_stored)

    async def settled(self) -> None:
        """Returns when all that was appended before is applied, or has failed."""
        if not self._pending:
            return
        settled: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        last = self._pending[-1]
        before = last.done

        def done(result: Any, error: Exception | None) -> None:
            before(result, error)
            if not settled.done():
                settled.set_result(None)

        last.done = done
        await settled

    def _apply_stored(self) -> None:
        self._woken = False  # before the look at what is done
        while self._pending and self._pending[0].stored.done():
            pending = self._pending.popleft()
            error: Exception | None = pending.stored.exception()  # type: ignore[assignment]
            result: Any = None
            if error is None:
                try:
                    result = apply_record(self.state, pending.number, pending.record, pending.chunk)
                except Exception as bug:
                    _log.exception("record %d was stored but cannot be applied", pending.number)
                    error = bug
            try:
                pending.done(result, error)
            except Exception:  # those behind it must hear of theirs
                _log.exception("what waits for record %d failed", pending.number)
        touched, self.state.touched = self.state.touched, set()
        for key in touched:
            self.changes.notify(key)

    def snapshot(self) -> tuple[int, Iterator[bytes]]:
        """The state of this moment as a snapshot in pieces, and the last record that it covers."""
        return self.state.number, self.state.dump()
