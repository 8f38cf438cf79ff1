"""The answers of an ingest stream: in order, never early, one Ack for what follows each other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from routetrace.common.errors import Unavailable
from routetrace.server.index.traces.sources import WriterKey
from routetrace.server.ingest.replies import Answer, Replies
from routetrace.server.ingest.service import IngestServicer
from routetrace.server.wire.messages import Chunk
from routetrace.v1 import routetrace_pb2 as pb


def expect(replies: Replies, *sequences: int) -> list[Answer]:
    return [replies.expect(Chunk(sequence, 0, 0, b"", b"")) for sequence in sequences]


async def ready(replies: Replies) -> list[tuple[str, int, int]]:
    """Return the replies that can be sent: (kind, sequence, chunks that it answers)."""
    found = []
    while True:
        following = asyncio.ensure_future(replies.next())
        for _ in range(3):
            await asyncio.sleep(0)
        if not following.done():
            following.cancel()
            return found
        reply = following.result()
        assert reply is not None
        response, count = reply
        kind = response.WhichOneof("message") or ""
        found.append((kind, getattr(response, kind).sequence, count))


async def test_one_ack_stands_for_chunks_that_follow_each_other():
    replies = Replies(32)
    answers = expect(replies, 4, 5, 6)
    assert await ready(replies) == []
    for answer in answers:
        answer.give()
    assert await ready(replies) == [("ack", 6, 3)]


async def test_no_answer_overtakes_one_that_is_not_known():
    replies = Replies(32)
    first, second, third = expect(replies, 1, 2, 3)
    second.give()
    assert await ready(replies) == []
    first.give()
    assert await ready(replies) == [("ack", 2, 2)]
    third.give()
    assert await ready(replies) == [("ack", 3, 1)]


async def test_what_came_twice_or_was_refused_is_answered_by_itself():
    replies = Replies(32)
    for answer in expect(replies, 1, 2, 2, 3, 1):
        answer.give()
    (refused,) = expect(replies, 2)
    refused.give(pb.ErrorDetail(kind=pb.ERROR_KIND_OUT_OF_SEQUENCE))
    for answer in expect(replies, 4, 5):
        answer.give()
    assert await ready(replies) == [
        ("ack", 2, 2),
        ("ack", 3, 2),
        ("ack", 1, 1),
        ("reject", 2, 1),
        ("ack", 5, 2),
    ]


async def test_the_end_comes_behind_what_was_expected_before():
    replies = Replies(32)
    (answer,) = expect(replies, 1)
    replies.end(Unavailable("draining"))
    assert await ready(replies) == []
    answer.give()
    assert await replies.next()
    with pytest.raises(Unavailable):
        await replies.next()
    replies.end()
    assert await replies.next() is None


async def test_room_is_for_so_many_that_are_not_answered():
    replies = Replies(2)
    await replies.room()
    await replies.room()
    third = asyncio.ensure_future(replies.room())
    await asyncio.sleep(0)
    assert not third.done()
    replies.sent(1)
    await third


async def test_a_fault_of_the_server_ends_the_stream() -> None:
    """Else the agent would wait for replies that never come, in place of connecting again."""
    writer = SimpleNamespace(key=WriterKey("run", "engine", ""))
    session = SimpleNamespace(closed=False, writer=writer)

    def broken(*_: object) -> None:
        raise RuntimeError("injected")

    servicer = SimpleNamespace(
        _fencing=SimpleNamespace(check_stream=lambda _: None),
        _access=SimpleNamespace(check=broken),
    )

    async def requests() -> AsyncIterator[object]:
        yield pb.Heartbeat()

    replies = Replies(1)
    read: Any = IngestServicer._read
    await read(servicer, session, requests(), replies, None)
    with pytest.raises(RuntimeError, match="injected"):
        await replies.next()
