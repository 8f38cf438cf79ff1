"""Reads over one GetTraces stream: order, resumption, and what a wrong server can send."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator

import grpc
import numpy as np
import pytest

from routetrace.client import RouteClient, Trace
from routetrace.common.errors import (
    Corrupt,
    DeadlineExceeded,
    NotFound,
    RouteTraceError,
    Unavailable,
)
from routetrace.v1 import routetrace_pb2 as pb
from support.servers.client_server import ScriptedServer, Truth, sealed, truth
from support.waiting import with_time

GONE = 60
NAMES = [f"r{i}" for i in range(6)]

Outcome = Trace | RouteTraceError


@pytest.fixture
def server():
    with ScriptedServer() as server:
        yield server


@pytest.fixture
def client(server):
    with RouteClient(server.target, timeout=GONE) as client:
        yield client


@pytest.fixture
def sources() -> dict[str, Truth]:
    return {n: truth(5 + i, rng=random.Random(i), trace_id=n) for i, n in enumerate(NAMES)}


def read(client: RouteClient, **how: object) -> list[Outcome]:
    """All of them, in one stream."""
    return [
        *client.get_many(NAMES, concurrency=2 * len(NAMES), missing="mask", errors="return", **how)
    ]


def parts_of(number: int, source: Truth, rng: random.Random) -> list[tuple[pb.TracePart, bytes]]:
    """The parts of a read, and their payloads."""
    parts = []
    for message in source.responses(rng=rng):
        payload = message.payload
        message.ClearField("payload")
        part = pb.TracePart(read=number, message=message, payload_bytes=len(payload))
        parts.append((part, payload))
    return parts


def joined(*parts: tuple[pb.TracePart, bytes]) -> pb.GetTracesResponse:
    return pb.GetTracesResponse(
        parts=[part for part, _ in parts], payload=b"".join(payload for _, payload in parts)
    )


def assert_right(outcome: Outcome, source: Truth) -> None:
    assert isinstance(outcome, Trace), outcome
    assert np.array_equal(outcome.valid, source.valid)
    assert np.array_equal(outcome.topk_ids[outcome.valid], source.ids[source.valid])


def test_reads_are_in_the_order_of_the_ids(client, server, sources):
    server.serve(*sources.values())
    for name, outcome in zip(NAMES, read(client), strict=True):
        assert_right(outcome, sources[name])
    [batch] = server.batches
    assert [r.trace_id for r in batch.reads] == NAMES
    assert batch.run == "default"
    assert not any(r.run for r in batch.reads)


def test_two_reads_and_one_more_are_a_batch_and_a_call(client, server, sources):
    server.serve(*sources.values())
    got = list(client.get_many(NAMES[:3], concurrency=4, missing="mask"))
    assert [t.trace_id for t in got] == NAMES[:3]
    assert [len(b.reads) for b in server.batches] == [2]
    assert server.counts["GetTrace"] == 3


@pytest.mark.parametrize("seed", range(8))
def test_after_a_break_only_what_is_left_is_read_again(client, server, sources, seed):
    rng = random.Random(seed)
    asked: list[list[str]] = []
    answered: set[str] = set()

    def handler(request, context) -> Iterator[pb.GetTracesResponse]:
        names = [r.trace_id for r in request.reads]
        asked.append(names)
        assert not answered & set(names)
        lanes = [parts_of(i, sources[name], rng) for i, name in enumerate(names)]
        for _ in range(rng.randint(0, 9)) if len(asked) < 4 else iter(int, 1):
            left = [lane for lane in lanes if lane]
            if not left:
                return
            some = [rng.choice(left).pop(0)]
            yield joined(*some)
            for part, _ in some:
                if part.message.HasField("end"):
                    answered.add(names[part.read])
        context.abort(grpc.StatusCode.UNAVAILABLE, "gone")

    server.serve(*sources.values())  # the last one comes alone, by GetTrace
    server.script["GetTraces"] = handler
    for name, outcome in zip(NAMES, read(client), strict=True):
        assert_right(outcome, sources[name])
    assert len(asked) > 1


def test_the_error_of_a_read_ends_it_alone(client, server, sources):
    del sources["r2"]
    server.serve(*sources.values())
    got = read(client)
    assert isinstance(got.pop(2), NotFound)
    for name, outcome in zip(sources, got, strict=True):
        assert_right(outcome, sources[name])


def test_a_draining_server_is_asked_again(client, server, sources):
    rng = random.Random(1)
    error = Unavailable("draining", retry_after=0.01).to_detail()
    calls = []

    def handler(request, context) -> Iterator[pb.GetTracesResponse]:
        calls.append([r.trace_id for r in request.reads])
        for number, read in enumerate(request.reads):
            if len(calls) == 1 and number % 2:
                yield pb.GetTracesResponse(parts=[pb.TracePart(read=number, error=error)])
            else:
                yield joined(*parts_of(number, sources[read.trace_id], rng))

    server.script["GetTraces"] = handler
    for name, outcome in zip(NAMES, read(client), strict=True):
        assert_right(outcome, sources[name])
    assert calls == [NAMES, NAMES[1::2]]


def test_the_deadline_ends_all_that_are_left(client, server, sources):
    rng = random.Random(1)

    def handler(request, context) -> Iterator[pb.GetTracesResponse]:
        yield joined(*parts_of(3, sources["r3"], rng))
        over = threading.Event()
        context.add_callback(over.set)
        over.wait(GONE)

    server.script["GetTraces"] = handler

    def late(seconds: float) -> list[Outcome]:
        got = read(client, timeout=seconds)
        if isinstance(got[3], DeadlineExceeded):
            raise got[3]
        return got

    got = with_time(late, 0.5)
    assert_right(got.pop(3), sources["r3"])
    assert {type(outcome) for outcome in got} == {DeadlineExceeded}


Damage = Callable[[list[tuple[pb.TracePart, bytes]]], pb.GetTracesResponse]


def _changed(parts: list[tuple[pb.TracePart, bytes]], number: int, **fields: int) -> None:
    for name, value in fields.items():
        setattr(parts[number][0], name, value)


def _of_an_unknown_read(parts: list[tuple[pb.TracePart, bytes]]) -> pb.GetTracesResponse:
    _changed(parts, 0, read=len(NAMES))
    return joined(*parts)


def _twice(parts: list[tuple[pb.TracePart, bytes]]) -> pb.GetTracesResponse:
    return joined(*parts, parts[-1])


def _of_too_many_bytes(parts: list[tuple[pb.TracePart, bytes]]) -> pb.GetTracesResponse:
    message = joined(*parts)
    message.payload += b"x"
    return message


def _of_nothing(parts: list[tuple[pb.TracePart, bytes]]) -> pb.GetTracesResponse:
    return pb.GetTracesResponse()


def _of_neither_kind(parts: list[tuple[pb.TracePart, bytes]]) -> pb.GetTracesResponse:
    parts[0][0].ClearField("message")
    return joined(*parts)


def _for_another_read(parts: list[tuple[pb.TracePart, bytes]]) -> pb.GetTracesResponse:
    for number in range(len(parts)):
        _changed(parts, number, read=1)
    return joined(*parts)


@pytest.mark.parametrize(
    "damage",
    [
        _of_an_unknown_read, _twice, _of_too_many_bytes, _of_nothing, _of_neither_kind,
        _for_another_read,
    ],
)  # fmt: skip
def test_wrong_parts_are_corrupt(client, server, sources, damage):
    def handler(request, context) -> Iterator[pb.GetTracesResponse]:
        rng = random.Random(1)
        yield damage(parts_of(0, sources["r0"], rng))
        for number, name in enumerate(NAMES[1:], 1):
            yield joined(*parts_of(number, sources[name], rng))

    server.script["GetTraces"] = handler
    got = read(client, timeout=2)
    assert any(isinstance(outcome, Corrupt) for outcome in got)
    for name, outcome in zip(NAMES, got, strict=True):
        if isinstance(outcome, Trace):
            assert_right(outcome, sources[name])


@pytest.mark.parametrize("seed", range(40))
def test_no_flipped_bit_makes_a_wrong_row(client, server, sources, seed):
    """Of the heads the seal sees each; of the payload the frames' own checksums."""
    rng = random.Random(seed)
    lanes = [parts_of(i, sources[name], rng) for i, name in enumerate(NAMES)]
    messages = [sealed(joined(*lane)) for lane in lanes]
    number = rng.randrange(len(messages))
    data = bytearray(messages[number])
    for _ in range(rng.randint(1, 3)):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    messages[number] = bytes(data)
    server.serve(*sources.values())
    server.script["GetTraces"] = lambda request, context: iter(messages)
    got = read(client, timeout=2)
    assert any(isinstance(outcome, Corrupt) for outcome in got)
    for name, outcome in zip(NAMES, got, strict=True):
        if isinstance(outcome, Trace):
            assert_right(outcome, sources[name])
