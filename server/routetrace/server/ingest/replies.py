"""Replies of one ingest stream, in the order in which chunks arrived.

Chunks that become durable together are acknowledged together: one Ack covers consecutive sequence
numbers. A chunk that was sent twice gets two replies.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TypeAlias

from routetrace.server.index.records.record import Sums
from routetrace.server.wire.messages import Chunk
from routetrace.v1 import routetrace_pb2 as pb

#: Error that ends a stream; None: the agent ended it.
End: TypeAlias = Exception | None


class Answer:
    """Reply to one chunk, once it is known."""

    __slots__ = ("_replies", "known", "nbytes", "reject", "sequence", "sums")

    def __init__(self, replies: Replies, chunk: Chunk) -> None:
        self._replies = replies
        self.sequence = chunk.sequence
        self.sums = Sums(chunk.header_crc32, chunk.payload_crc32)
        self.nbytes = chunk.nbytes
        self.known = False
        self.reject: pb.ErrorDetail | None = None
        """Error of a reject; None for an ack."""

    def give(self, reject: pb.ErrorDetail | None = None) -> None:
        """Set the reply; it is sent after the replies before it."""
        self.reject = reject
        self.known = True
        self._replies.wake()


class Replies:
    """Replies of one stream. All calls belong to the event loop's thread.

    Args:
        most: maximum chunks without a reply.
    """

    def __init__(self, most: int) -> None:
        self._queue: deque[Answer | tuple[End]] = deque()
        self._changed = asyncio.Event()
        self._awaited: int | None = None
        self._room = asyncio.Semaphore(most)

    async def room(self) -> None:
        """Wait until one more chunk may be taken."""
        await self._room.acquire()

    def expect(self, chunk: Chunk) -> Answer:
        """Queue and return the reply to a chunk."""
        answer = Answer(self, chunk)
        self._queue.append(answer)
        return answer

    def end(self, why: End = None) -> None:
        """End the stream after the replies queued so far."""
        self._queue.append((why,))
        self.wake()

    def pace(self, awaited: int) -> None:
        """Send a change of the demand, a pb.Awaited, before the next reply."""
        self._awaited = awaited
        self.wake()

    def wake(self) -> None:
        """Wake `next`."""
        self._changed.set()

    async def next(self) -> tuple[pb.IngestResponse, int] | None:
        """Wait for the next message; return it and its number of chunks, or None at the end.

        Raises:
            Exception: error that ends the stream.
        """
        queue = self._queue
        while self._awaited is None and (
            not queue or (isinstance(queue[0], Answer) and not queue[0].known)
        ):
            self._changed.clear()
            await self._changed.wait()
        if self._awaited is not None:
            awaited, self._awaited = self._awaited, None
            return pb.IngestResponse(pace=pb.Pace(awaited=pb.Awaited.ValueType(awaited))), 0
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
        """Note that `count` chunks were replied to."""
        for _ in range(count):
            self._room.release()


def _follows(item: Answer | tuple[End], sequence: int) -> bool:
    """Whether an item acknowledges the next sequence number."""
    return (
        isinstance(item, Answer)
        and item.known
        and item.reject is None
        and item.sequence == sequence + 1
    )
