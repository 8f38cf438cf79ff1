"""Many reads in one stream: messages that hold parts of several answers."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, ExitStack
from time import monotonic

from routetrace.common.errors import RouteTraceError
from routetrace.server.access.admission import Turn
from routetrace.server.common.slices import SLICE_SECONDS
from routetrace.server.rows import answers
from routetrace.server.rows.sending import Answer
from routetrace.server.rows.served import Served
from routetrace.v1 import routetrace_pb2 as pb

#: Maximum reads of one stream.
MAX_READS = 1024


class Batch:
    """Reads of one GetTraces call, each answered as GetTrace would at its turn.

    A read that waits is answered as of the moment at which its wait ends, in any order.

    Args:
        reads: requests.
        at_once: checks a read and returns its answer; None: it is to be waited for.
        later: returns the answer to such a read, after waiting.
        pinned: keeps rows until they are sent.
        turn: is held while a message is fetched and sent.
        step: waits until the owner of the call may look a trace up.
    """

    def __init__(
        self,
        reads: Sequence[pb.GetTraceRequest],
        at_once: Callable[[pb.GetTraceRequest], Answer | None],
        later: Callable[[pb.GetTraceRequest], Awaitable[Answer]],
        pinned: Callable[[Served], AbstractContextManager[None]],
        turn: Callable[[], AbstractAsyncContextManager[Turn]],
        step: Callable[[], Awaitable[None]],
    ) -> None:
        self._at_once = at_once
        self._later = later
        self._pinned = pinned
        self._turn = turn
        self._step = step
        self._asked = deque(enumerate(reads))
        self._waiting: set[asyncio.Task[None]] = set()
        self._num_waiting = 0  # of them, those without an answer
        self._ready: deque[tuple[int, Answer | RouteTraceError]] = deque()
        self._pins: dict[int, ExitStack] = {}  # by read
        self._news = asyncio.Event()
        self._broken: BaseException | None = None

    async def messages(self) -> AsyncGenerator[bytes, None]:
        """Yield the messages."""
        try:
            while self._asked or self._ready or self._waiting or self._broken:
                if not (self._asked or self._ready):
                    self._news.clear()
                    await self._news.wait()
                if self._broken:
                    raise self._broken
                async with self._turn() as turn:
                    message = answers.Parts()
                    sent: list[int] = []
                    begun = monotonic()
                    while (self._asked or self._ready) and not message.full:
                        waits = await self._add(message, sent)
                        # A read that waits needs a turn of the loop to begin, and so do others.
                        if waits or monotonic() - begun > SLICE_SECONDS:
                            await asyncio.sleep(0)
                            await self._step()
                            begun = monotonic()
                    message.head.last = not (self._asked or self._ready or self._num_waiting)
                    if message.head.parts:
                        await turn.sending()
                        yield turn.charged(message.sealed())
                for number in sent:
                    self._pins.pop(number).close()
        finally:
            for task in self._waiting:
                task.cancel()
            await asyncio.gather(*self._waiting, return_exceptions=True)
            for pins in self._pins.values():
                pins.close()

    async def _add(self, message: answers.Parts, sent: list[int]) -> bool:
        """Add the next piece of an answer, or an error, or begin a read that waits.

        Args:
            message: takes it.
            sent: takes the numbers of reads that are answered.

        Returns:
            Whether a read was begun that waits.
        """
        if not self._ready:
            number, read = self._asked.popleft()
            if not self._begin(number, read):
                self._num_waiting += 1
                task = asyncio.create_task(self._wait(number, read))
                self._waiting.add(task)
                task.add_done_callback(self._waited)
                return True
        number, answer = self._ready[0]
        if isinstance(answer, RouteTraceError):
            message.add_error(number, answer)
        else:
            message.add(number, await answer.next())
            if not answer.done:
                return False
            sent.append(number)
        self._ready.popleft()
        return False

    def _begin(self, number: int, read: pb.GetTraceRequest) -> bool:
        """Answer a read; return False if it is to be waited for."""
        try:
            answer = self._at_once(read)
        except RouteTraceError as error:
            self._refuse(number, error)
            return True
        if answer is not None:
            self._keep(number, answer)
        return answer is not None

    async def _wait(self, number: int, read: pb.GetTraceRequest) -> None:
        """Answer a read after waiting."""
        try:
            answer = await self._later(read)
        except RouteTraceError as error:
            self._refuse(number, error)
        else:
            self._keep(number, answer)
        self._num_waiting -= 1

    def _refuse(self, number: int, error: RouteTraceError) -> None:
        """Keep an error until it is sent."""
        # Its traceback names frames that hold this batch: a cycle with the whole call in it.
        self._ready.append((number, error.with_traceback(None)))

    def _keep(self, number: int, answer: Answer) -> None:
        """Pin the rows of an answer until it is sent."""
        pins = self._pins[number] = ExitStack()
        pins.enter_context(self._pinned(answer.rows))
        self._ready.append((number, answer))

    def _waited(self, task: asyncio.Task[None]) -> None:
        self._waiting.discard(task)
        if not task.cancelled() and (error := task.exception()):
            self._broken = error
        self._news.set()
