"""How much is let in at a time, so that memory is bounded and nobody is cancelled.

What is over a limit is refused with Overloaded, which says when to come again, or left in the
socket. Reads that wait cost next to nothing, so there may be many; those that are sent rows hold a
message of some 0.5 MiB each, and take turns. A reader that is slow to take its message lends its
turn to another one after a while, as long as there are not too many of its kind.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress

from routetrace.server.config import ServerConfig
from routetrace.server.metrics import Metrics
from routetrace.v1.errors import Overloaded

#: Seconds after which a message that was not taken yet lends its turn, and how many may do so for
#: each turn that there is.
_SLOW_SECONDS = 2.0
_MOST_LENT = 3

_RETRY_SECONDS = 0.5

#: Writers that are remembered for each agent that may be connected: engines come back.
_WRITERS_PER_AGENT = 4


class Admission:
    """The limits of one server. All of it belongs to one event loop."""

    def __init__(self, config: ServerConfig, metrics: Metrics) -> None:
        self._config = config
        self._refused = metrics.overloaded
        #: Reads under way, those that wait for their trace or their turn included.
        self.reads = 0
        #: Reads that hold a message.
        self.sending = 0
        #: Bytes of chunks that wait for their commit.
        self.ingest_bytes = 0
        self._turns = config.max_sending_reads
        self._most_lent = _MOST_LENT * config.max_sending_reads
        self._lent = 0
        self._readers: deque[asyncio.Future[None]] = deque()
        self._writers: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def waiting(self) -> int:
        """Reads that hold no message: they wait for their trace or their turn."""
        return self.reads - self.sending

    @contextmanager
    def read(self) -> Iterator[None]:
        """For as long as a read lasts.

        Raises:
            Overloaded: if there are too many.
        """
        if self.reads >= self._config.max_reads:
            raise self._overloaded("reads", self._config.max_reads)
        self.reads += 1
        try:
            yield
        finally:
            self.reads -= 1

    def check_agents(self, count: int) -> None:
        """Raises Overloaded if there are too many agents for one more."""
        if count >= self._config.max_agents:
            raise self._overloaded("agents", self._config.max_agents)

    def check_writers(self, count: int) -> None:
        """Raises Overloaded if there are too many writers, connected or not, for one more."""
        if count >= _WRITERS_PER_AGENT * self._config.max_agents:
            raise self._overloaded("agents", self._config.max_agents)

    def _overloaded(self, what: str, most: int) -> Overloaded:
        self._refused.labels(what).inc()
        return Overloaded(
            f"there are max_{what} = {most} {what} already",
            field=f"max_{what}",
            retry_after=_RETRY_SECONDS,
        )

    # ------------------------------------------------------------------ turns to send

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """For as long as a message is fetched and sent; waits for its turn, first come first."""
        if not self._turns:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._readers.append(waiter)
            try:
                await waiter
            except BaseException:
                if waiter.done() and not waiter.cancelled():
                    self._pass_on()  # it was handed a turn at the moment in which it gave up
                else:
                    with suppress(ValueError):  # passed over since
                        self._readers.remove(waiter)
                raise
        else:
            self._turns -= 1
        self.sending += 1
        turn = _Turn(self)
        try:
            yield
        finally:
            self.sending -= 1
            turn.end()

    def _pass_on(self) -> None:
        """A turn is free."""
        while self._readers:
            waiter = self._readers.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return
        self._turns += 1

    def _lend(self) -> bool:
        if self._lent >= self._most_lent:
            return False
        self._lent += 1
        self._pass_on()
        return True

    def _lent_ended(self) -> None:
        self._lent -= 1

    # ------------------------------------------------------------------ chunks on their way in

    async def take_in(self, size: int) -> None:
        """Waits until chunks of `size` bytes may join those that wait for their commit."""
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
        """They are in, or refused."""
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


class _Turn:
    """One reader's turn, which is lent to another one if the reader is slow."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._is_lent = False
        self._timer = asyncio.get_running_loop().call_later(_SLOW_SECONDS, self._slow)

    def _slow(self) -> None:
        self._is_lent = self._admission._lend()

    def end(self) -> None:
        self._timer.cancel()
        if self._is_lent:
            self._admission._lent_ended()
        else:
            self._admission._pass_on()
