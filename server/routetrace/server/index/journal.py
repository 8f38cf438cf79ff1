"""Journal of changes: commit first, then apply.

A change is appended to the store; once it is as durable as the ack mode promises, it is applied to
the state, and only then acknowledged. Changes are applied in the order of the appends, in which a
restart replays them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import (
    AsyncIterator,
    Callable,
    Generator,
    Hashable,
    Iterator,
    Sequence,
    Set,
)
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

from routetrace.common.errors import Corrupt, Unavailable
from routetrace.server.common.slices import SLICE_SECONDS
from routetrace.server.index.apply import NO_FRAMES, apply_in_steps, apply_record, leave_out
from routetrace.server.index.chunk import ParsedChunk
from routetrace.server.index.records.format import UnsupportedFormat
from routetrace.server.index.state import State
from routetrace.server.store.interface import Record, Store
from routetrace.server.wire.checksums import Payload

_log = logging.getLogger(__name__)

#: Records that one start leaves out after they failed in the middle, each at the price of a replay.
MAX_LEFT_OUT = 16

#: Callback with the result of `apply_record`, or the error if it was not applied.
Done: TypeAlias = Callable[[Any, "Exception | None"], None]


class Clock:
    """Unix time that never steps: the wall clock at start, then the monotonic clock."""

    def __init__(self) -> None:
        self._offset = time.time() - time.monotonic()

    def now(self) -> float:
        """Return the time in seconds."""
        return time.monotonic() + self._offset


class Changes:
    """Wakes tasks that wait for a change."""

    def __init__(self) -> None:
        self._waiting: dict[Hashable, set[asyncio.Future[None]]] = {}
        self.listeners: list[Callable[[Set[Hashable]], object]] = []
        """Called with the keys of each change."""

    async def wait(self, key: Hashable, timeout: float) -> None:
        """Wait until `key` changes, at most `timeout` seconds."""
        loop = asyncio.get_running_loop()
        change: asyncio.Future[None] = loop.create_future()
        waiting = self._waiting.setdefault(key, set())
        waiting.add(change)
        timer = loop.call_later(timeout, _set, change)  # cheaper than the task of `wait_for`
        try:
            await change
        finally:
            timer.cancel()
            waiting.discard(change)
            if not waiting and self._waiting.get(key) is waiting:
                del self._waiting[key]

    def notify(self, key: Hashable) -> None:
        """Wake the tasks that wait for `key`."""
        for change in self._waiting.pop(key, ()):
            _set(change)

    def notify_any(self, keys: Set[Hashable]) -> None:
        """Wake the tasks that wait for any of the keys, of which there may be very many."""
        for key in self._waiting.keys() & keys:  # as long as the smaller one
            self.notify(key)
        for listener in self.listeners:
            listener(keys)

    def notify_all(self) -> None:
        """Wake all waiting tasks."""
        for key in list(self._waiting):
            self.notify(key)


def _set(change: asyncio.Future[None]) -> None:
    if not change.done():
        change.set_result(None)


@dataclass(slots=True)
class _Pending:
    number: int
    record: bytes
    chunk: ParsedChunk | None
    stored: Future[None]
    done: Done


class Journal:
    """Only way to change the state. All calls belong to the event loop's thread."""

    def __init__(
        self, store: Store, state: State, on_failure: Callable[[], None] = lambda: None
    ) -> None:
        self.store = store
        self.state = state
        self.failed = 0
        """Number of the record that could not be applied; 0: none."""
        self._on_failure = on_failure
        self.clock = Clock()
        self.changes = Changes()
        self._pending: deque[_Pending] = deque()
        self._steps: Generator[None, None, Any] | None = None
        """Rest of the first pending record, if a part of it is applied."""
        self._between: list[asyncio.Future[None]] = []
        self._number = 0
        self._woken = False
        self._still = False

    def recover(self) -> int:
        """Rebuild the state from the snapshot and the later records; return their number.

        A record that cannot be applied is logged and left out, as is a damaged snapshot. If it
        failed in the middle, the state is rebuilt from the start without it.

        Raises:
            UnsupportedFormat: if the snapshot or a record has another format.
            Corrupt: if more than `MAX_LEFT_OUT` records failed in the middle.
        """
        left_out: set[int] = set()
        while (count := self._replay(left_out)) is None:
            if len(left_out) > MAX_LEFT_OUT:
                raise Corrupt(f"records {sorted(left_out)} cannot be applied; expected few or none")
            self.state.replace(State(self.state.default_ttl, self.state.keeps))
        self._torn(False)
        for number in self.store.numbers():
            if number not in self.state.frames:  # its header is damaged: no index points into it
                self.state.hold(number, NO_FRAMES)
        # A number is used once, also that of a record that was left out.
        self._number = max(self.state.number, self.store.last_number())
        self.state.touched.clear()
        for _ in self.state.traces.clean():
            pass
        return count

    def _replay(self, left_out: set[int]) -> int | None:
        """Apply all records but those left out; return their number.

        None if one failed in the middle, which is added to those left out.
        """
        snapshot = self.store.load_snapshot()
        if snapshot:
            try:
                self.state.load(snapshot[1])
            except Corrupt as error:
                _log.error("records up to %d are lost: %s", snapshot[0], error)
        count = 0
        for number, record in self.store.headers(self.state.number):
            if record is None:
                self._torn(True)
                continue
            count += 1
            try:
                if number in left_out:
                    leave_out(self.state, number, record)
                else:
                    apply_record(self.state, number, record)
            except UnsupportedFormat:
                raise
            except Exception:
                _log.exception("record %d cannot be applied and is left out", number)
                if self.state.number >= number and number not in left_out:
                    left_out.add(number)
                    return None
                self._torn(True)
        return count

    @property
    def applied(self) -> int:
        """Number of the last record that is applied as a whole."""
        partly = self._steps is not None and self._pending[0].number == self.state.number
        return self.state.number - partly

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
        """Store a record, then apply it.

        Args:
            record: header of the record.
            done: called once the record is applied or could not be, in the order of the calls.
            payload: payload of the record.
            sums: running checksums of the payload, if known.
            chunk: parsed ChunkHeader of the record, if known.

        Raises:
            Overloaded, Unavailable: if the store refuses the record at once, so that no later
                record that builds on it is stored in vain. `done` is not called.
        """
        self.check()
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
        """Store a record without a payload, then apply it.

        Returns:
            Result of `apply_record`, or the error of the store.

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
        # Called in the store's thread; about once for all records of a commit.
        if not self._woken:
            self._woken = True
            loop.call_soon_threadsafe(self._apply_stored)

    async def settled(self) -> None:
        """Wait until all records appended so far are applied or have failed."""
        if not self._pending:
            return
        settled: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        last = self._pending[-1]
        before = last.done

        def done(result: Any, error: Exception | None) -> None:
            try:
                before(result, error)
            finally:
                if not settled.done():
                    settled.set_result(None)

        last.done = done
        await settled

    async def whole(self) -> None:
        """Wait until no record is applied in part; it is so until the next wait of the caller."""
        if self._steps is not None:
            between: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._between.append(between)
            await between

    def _apply_stored(self) -> None:
        """Apply stored records for the time of a slice; the event loop goes on with the rest."""
        self._woken = False  # before the check of what is stored
        if self._still:
            return
        until = time.monotonic() + SLICE_SECONDS
        while self._pending and self._pending[0].stored.done():
            pending = self._pending[0]
            error: Exception | None = pending.stored.exception()  # type: ignore[assignment]
            result: Any = None
            if error is None:
                try:
                    ended, result = self._apply(pending, until)
                except Unavailable as failure:
                    ended, error = True, failure
                if not ended:
                    break
            self._steps = None
            self._pending.popleft()
            try:
                pending.done(result, error)
            except Exception:  # later records need their callbacks
                _log.exception("the callback of record %d failed", pending.number)
            if self._between or time.monotonic() > until:
                break
        self.notify_touched()
        if self._steps is None:
            for between in self._between:  # their callbacks run before the next slice
                if not between.done():
                    between.set_result(None)
            self._between.clear()
        self._go_on()

    def notify_touched(self) -> None:
        """Wake the tasks that wait for a change of what was touched since the last call."""
        touched, self.state.touched = self.state.touched, set()
        self.changes.notify_any(touched)

    def _go_on(self) -> None:
        if not self._woken and self._pending and self._pending[0].stored.done():
            self._woken = True
            asyncio.get_running_loop().call_soon(self._apply_stored)

    def _apply(self, pending: _Pending, until: float) -> tuple[bool, Any]:
        """Apply a record, or the next part of it; return whether it ended, and its result."""
        self.check()
        try:
            if self._steps is None:
                self._steps = apply_in_steps(
                    self.state, pending.number, pending.record, pending.chunk
                )
            while time.monotonic() <= until:
                next(self._steps)
        except StopIteration as end:
            return True, end.value
        except Exception:
            # The state may hold a part of the record: no row of it is proven any more.
            _log.exception("record %d cannot be applied; the server stops", pending.number)
            self.failed = pending.number
            self._on_failure()
            self.check()
        return False, None

    def check(self) -> None:
        """Raise Unavailable if a record could not be applied: the state is not to be used."""
        if self.failed:
            raise Unavailable(
                f"record {self.failed} cannot be applied; the server stops", retry_after=1.0
            )

    @asynccontextmanager
    async def still(self) -> AsyncIterator[None]:
        """Apply no record while the context is open, nor leave one applied in part.

        Records are stored meanwhile, and wait.
        """
        await self.whole()
        assert not self._still, "held by another task"
        self._still = True
        try:
            yield
        finally:
            self._still = False
            self._go_on()

    def snapshot(self) -> Generator[None, None, tuple[int, Iterator[bytes]]]:
        """Return, step by step, the last record that a snapshot covers, and its pieces.

        No record may be applied between two steps, nor be applied in part; see `still`.

        Raises:
            Unavailable: if a record could not be applied.
        """
        self.check()
        assert self._steps is None, "a record is applied in part"
        return self.state.number, (yield from self.state.dump_in_steps())
