"""Admission control: bounds memory without cancelling calls, and shares the limits.

Calls over a limit are refused with Overloaded and a retry time; chunks over a limit stay in the
socket. Waiting reads cost almost nothing, so many are admitted; streaming reads hold a message of
about 0.5 MiB each and take turns, and each message goes to gRPC when `pace.py` lets its owner. A
turn whose message the reader does not take in time is passed to another read, up to a bound, and a
read whose message is not taken for `stalled_read_seconds` ends.

Owners share each limit as `budget.py` says.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, asynccontextmanager, suppress

from google.protobuf.message import DecodeError, Message

from routetrace.server.access.budget import Budget
from routetrace.server.access.pace import SECONDS_PER_BYTE, Pace
from routetrace.server.common.metrics import Metrics
from routetrace.server.common.rpc import Unparsed, Unusable
from routetrace.server.settings.config import ServerConfig
from routetrace.server.wire.pieces import pieces

#: Seconds after which a read that is still sending a message gives up its turn, and the maximum of
#: such reads per turn.
_SLOW_SECONDS = 2.0
_MAX_SLOW = 3

#: Reads that a watch counts as, but at most a quarter of all.
_WATCH_READS = 64

#: Memory of a waiting read, most of it gRPC's (18 KB measured), and the number of reads that a
#: server accepts whatever its memory limit.
_READ_BYTES = 20 << 10
_LEAST_READS = 64


def _max_reads(config: ServerConfig) -> int:
    """Return `max_reads`, or fewer if these reads would take over a quarter of the memory limit.

    At the limit chunks are refused; reads of one tenant must not stop those of others.
    """
    if not config.memory_limit:
        return config.max_reads
    most = max(_LEAST_READS, config.memory_limit // 4 // _READ_BYTES)
    return min(config.max_reads, most)


class Admission:
    """Limits of one server. All calls belong to one event loop."""

    def __init__(self, config: ServerConfig, metrics: Metrics) -> None:
        self._config = config
        self._stalled = metrics.stalled_reads
        refused = metrics.overloaded
        self.max_reads = _max_reads(config)
        """Maximum concurrent reads."""
        lowered = self.max_reads < config.max_reads
        remedy = "memory_limit allows no more than this" if lowered else ""
        self._reads = Budget("max_reads", self.max_reads, refused, remedy=remedy)
        self._turns = Budget("max_streaming_reads", config.max_streaming_reads)
        #: Reads that are sending a message without a turn.
        self._slow = Budget("max_slow_reads", _MAX_SLOW * config.max_streaming_reads)
        self.agents = Budget("max_agents", config.max_agents, refused)
        """Open streams of agents."""
        self.binding = Budget("max_ingest_bytes", config.max_ingest_bytes, refused)
        """Bytes of requests that are being bound."""
        self.pace = Pace()
        """Time of the event loop by owner."""
        #: Bytes of chunks not committed yet.
        self.ingest_bytes = 0
        #: Reads that wait for a turn, by owner; the owner at the front is next.
        self._readers: dict[str, deque[asyncio.Future[None]]] = {}
        self._writers: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def reads(self) -> int:
        """Open reads, those that wait for their trace or their turn included."""
        return self._reads.used

    @property
    def sending(self) -> int:
        """Reads that hold a message."""
        return self._turns.used + self._slow.used

    @property
    def waiting(self) -> int:
        """Reads that wait for their trace or their turn."""
        return self.reads - self.sending

    def read(self, owner: str) -> AbstractContextManager[None]:
        """Count a read of an owner while it lasts.

        Raises:
            Overloaded: if the owner has its share of max_reads open.
        """
        return self._reads.hold(owner)

    def watch(self, owner: str) -> AbstractContextManager[None]:
        """Count a watch of an owner while it lasts, as many reads: it costs time as long.

        Raises:
            Overloaded: as `read`.
        """
        return self._reads.hold(owner, min(_WATCH_READS, max(1, self._reads.limit // 4)))

    def bind(self, owner: str, nbytes: int) -> AbstractContextManager[None]:
        """Count the bytes of a request of blocks while it waits or is built.

        A large one counts as a quarter of the limit, so that it is possible at all.

        Raises:
            Overloaded: if the owner has its share of max_ingest_bytes.
        """
        return self.binding.hold(owner, min(nbytes, max(1, self.binding.limit // 4)))

    async def parsed(self, owner: str, request: Unparsed) -> Message | Unusable:
        """Parse a long message in pieces, as long work of its owner.

        Raises:
            Overloaded: if the owner has its share of max_ingest_bytes.
        """
        self.pace.charge(owner, len(request.data) * SECONDS_PER_BYTE)
        if request.too_long:
            return request.unusable()
        with self.bind(owner, len(request.data)):
            message, turns = request.kind(), self.pace.turns(owner)
            try:
                async for piece in turns.over(pieces(request.data, request.kind), waits=True):
                    message.MergeFromString(piece)
            except DecodeError:
                return request.unusable()
            return message

    @property
    def budgets(self) -> list[Budget]:
        """Budgets of calls."""
        return [self._reads, self._turns, self.agents, self.binding]

    # ------------------------------------------------------------------ turns to send

    @asynccontextmanager
    async def turn(self, owner: str) -> AsyncIterator[Turn]:
        """Wait for a turn; hold it while a message is fetched and sent.

        Owners take turns; the reads of one owner are served in order of arrival.
        """
        if owner in self._readers or not self._turns.fits(owner):
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._readers.setdefault(owner, deque()).append(waiter)
            try:
                await waiter
            except BaseException:
                if waiter.done() and not waiter.cancelled():
                    self._end_turn(owner)  # cancelled just after it got a turn
                else:
                    self._leave(owner, waiter)
                raise
        else:
            self._turns.take(owner)
        turn = Turn(self, owner, self._config.stalled_read_seconds)
        try:
            yield turn
        finally:
            turn.end()

    def _leave(self, owner: str, waiter: asyncio.Future[None]) -> None:
        queue = self._readers.get(owner)
        if queue is not None:
            with suppress(ValueError):  # passed over since
                queue.remove(waiter)
            if not queue:
                del self._readers[owner]

    def _end_turn(self, owner: str) -> None:
        """Release a turn; give free turns to waiting reads, one owner after the other."""
        self._turns.release(owner)
        self._grant()

    def _grant(self) -> None:
        granted = True
        while granted:
            granted = False
            for owner in list(self._readers):
                if self._turns.fits(owner) and self._grant_one(owner):
                    granted = True

    def _grant_one(self, owner: str) -> bool:
        """Give a turn to the first waiting read of an owner, and move the owner to the end."""
        queue = self._readers.pop(owner)
        while queue:
            waiter = queue.popleft()
            if not waiter.done():
                self._turns.take(owner)
                waiter.set_result(None)
                if queue:
                    self._readers[owner] = queue
                return True
        return False

    def pass_on(self, owner: str) -> bool:
        """Pass on the turn of a slow read; return False if too many of its owner are slow."""
        if not self._slow.fits(owner):
            return False
        self._slow.take(owner)
        self._end_turn(owner)
        return True

    def end(self, owner: str, slow: bool) -> None:
        """End the turn of a read, passed on before if it was slow."""
        if slow:
            self._slow.release(owner)
        else:
            self._end_turn(owner)

    def count_stalled(self) -> None:
        """Count a read that ends because its reader does not take its message."""
        self._stalled.inc()

    # ------------------------------------------------------------------ chunks on their way in

    async def take_in(self, size: int) -> None:
        """Wait until `size` more bytes of uncommitted chunks are allowed."""
        if self._writers or (
            self.ingest_bytes and self.ingest_bytes + size > self._config.max_ingest_bytes
        ):
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._writers.append((size, waiter))
            try:
                await waiter
            except BaseException:
                if waiter.done() and not waiter.cancelled():
                    self.committed(size)
                else:
                    with suppress(ValueError):  # passed over since
                        self._writers.remove((size, waiter))
                    self._admit()
                raise
        else:
            self.ingest_bytes += size

    def committed(self, size: int) -> None:
        """Release the bytes of chunks that are committed or refused."""
        self.ingest_bytes -= size
        self._admit()

    def _admit(self) -> None:
        while self._writers:
            size, waiter = self._writers[0]
            if self.ingest_bytes and self.ingest_bytes + size > self._config.max_ingest_bytes:
                return
            self._writers.popleft()
            if not waiter.done():
                self.ingest_bytes += size
                waiter.set_result(None)


class Turn:
    """Turn of one read; passed on if the reader is slow, and ended if it stalls."""

    def __init__(self, admission: Admission, owner: str, stalled_seconds: float) -> None:
        self._admission = admission
        self._owner = owner
        self._stalled_seconds = stalled_seconds
        self._slow = False
        self._task = asyncio.current_task()
        self._timers: list[asyncio.TimerHandle] = []

    async def sending(self) -> None:
        """Wait until the owner may use the loop; send the message at once after it.

        The current task is cancelled if its turn lasts `stalled_read_seconds` from then on.
        """
        await self._admission.pace.step(self._owner)
        loop = asyncio.get_running_loop()
        self._timers = [
            loop.call_later(_SLOW_SECONDS, self._on_slow),
            loop.call_later(self._stalled_seconds, self._on_stalled),
        ]

    def charged(self, message: bytes) -> bytes:
        """Charge the owner for sending a message; return it."""
        self._admission.pace.charge(self._owner, len(message) * SECONDS_PER_BYTE)
        return message

    def _on_slow(self) -> None:
        self._slow = self._admission.pass_on(self._owner)

    def _on_stalled(self) -> None:
        # The reader takes nothing, so no error reaches it: its stream is reset.
        self._admission.count_stalled()
        if self._task is not None:
            self._task.cancel()

    def end(self) -> None:
        """End the turn."""
        for timer in self._timers:
            timer.cancel()
        self._admission.end(self._owner, self._slow)
