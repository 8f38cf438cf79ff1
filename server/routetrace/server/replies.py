"""What one ingest stream has to answer, in the order in which chunks came.

Chunks that become durable together are acknowledged together: one Ack says it for all that follow
each other by their numbers. A chunk that was sent twice has two answers, as before.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TypeAlias

from routetrace.server.record import Sums
from routetrace.server.wire import Chunk
from routetrace.v1 import routetrace_pb2 as pb

#: Why a stream ends; None: the agent ended it.
End: TypeAlias = Exception | None


class Answer:
    """The answer to one chunk, once it is known."""

    __slots__ = ("_replies", "known", "nbytes", "reject", "sequence", "sums")

    def __init__(self, replies: Replies, chunk: Chunk) -> None:
        self._replies = replies
        self.sequence = chunk.sequence
        self.sums = Sums(chunk.header_crc32, chunk.payload_crc32)
        self.nbytes = chunk.nbytes
        self.known = False
        self.reject: pb.ErrorDetail | None = None
        """None for an acknowledgement."""

    def give(self, reject: pb.ErrorDetail | None = None) -> None:
        """The answer is known; it is sent when those before it are."""
        self.reject = reject
        self.known = True
        self._replies.wake()


class Replies:
    """The answers of one stream. All calls belong to the event loop's thread.

    Args:
        most: chunks that may wait for their answer.
    """

    def __init__(self, most: int) -> None:
        self._queue: deque[Answer | tuple[End]] = deque()
        self._changed = asyncio.Event()
        self._room = asyncio.Semaphore(most)

    async def room(self) -> None:
        """Waits until one more may be expected."""
        await self._room.acquire()

    def expect(self, chunk: Chunk) -> Answer:
        """A chunk came in: here is what to answer it with."""
        answer = Answer(self, chunk)
        self._queue.append(answer)
        return answer

    def end(self, why: End = None) -> None:
        """The stream ends behind the answers that are expected by now."""
        self._queue.append((why,))
        self.wake()

    def wake(self) -> None:
        """Something may be ready to be sent."""
        self._changed.set()

    async def next(self) -> tuple[pb.IngestResponse, int] | None:
        """What to send next, and how many chunks it answers; None at the end.

        Raises:
            Exception: why the stream ends.
        """
        queue = self._queue
        while not queue or (isinstance(queue[0], Answer) and not queue[0].known):
            self._changed.clear()
            await self._changed.wait()
        first = queue.popleft()
        if isinstance(first, tuple):
            if first[0] is not None:
                raise first[0]
            return None
        if first.reject is not None:
            reject = pb.Reject(sequence=first.sequence, error=first.reject)
            return pb.IngestResponse(reject=reject), 1
        sequence, count = first.sequence, 1
        while queue and _follows(queue[0], sequence):
            queue.popleft()
            sequence, count = sequence + 1, count + 1
        return pb.IngestResponse(ack=pb.Ack(sequence=sequence)), count

    def sent(self, count: int) -> None:
        """So many chunks were answered."""
        for _ in range(count):
            self._room.release()


def _follows(item: Answer | tuple[End], sequence: int) -> bool:
    """Whether it is an acknowledgement, and of the next chunk."""
    return (
        isinstance(item, Answer)
        and item.known
        and item.reject is None
        and item.sequence == sequence + 1
    )
