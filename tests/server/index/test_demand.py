"""Demand of readers: passed to the streams that may satisfy it, at once; withdrawn later."""

from __future__ import annotations

import asyncio

import pytest

from routetrace.server.index import demand as module
from routetrace.server.index.demand import Demand
from routetrace.server.index.traces.sources import WriterKey
from routetrace.v1 import routetrace_pb2 as pb

NOTHING, ENDS, ROWS = pb.AWAITED_NOTHING, pb.AWAITED_ENDS, pb.AWAITED_ROWS
A, B, OTHER = WriterKey("run", "a", ""), WriterKey("run", "b", ""), WriterKey("other", "a", "")


@pytest.fixture(autouse=True)
def calm(monkeypatch):
    monkeypatch.setattr(module, "CALM_SECONDS", 0.05)


class Streams:
    """Streams of three writers, and the demands that they got."""

    def __init__(self) -> None:
        self.demand = Demand()
        self.got: dict[WriterKey, list[int]] = {A: [], B: [], OTHER: []}
        self._open = [self.demand.stream(key, got.append) for key, got in self.got.items()]
        assert [stream.__enter__() for stream in self._open] == [NOTHING] * 3

    def taken(self) -> list[list[int]]:
        """The demands of A, B and OTHER since the last call."""
        taken = [list(got) for got in self.got.values()]
        for got in self.got.values():
            got.clear()
        return taken


async def test_a_demand_reaches_its_writer_at_once_and_is_withdrawn_later():
    streams = Streams()
    with streams.demand.waiting([A], ENDS):
        assert streams.taken() == [[ENDS], [], []]
        with streams.demand.waiting([A], ROWS), streams.demand.waiting([A], ROWS):
            assert streams.taken() == [[ROWS], [], []]
        assert streams.taken() == [[], [], []], "a read that goes on withdraws nothing"
        await asyncio.sleep(0.1)
        assert streams.taken() == [[ENDS], [], []]
    assert streams.taken() == [[], [], []]
    await asyncio.sleep(0.1)
    assert streams.taken() == [[NOTHING], [], []]


async def test_a_trace_that_may_begin_anywhere_is_awaited_of_all_writers_of_its_run():
    streams = Streams()
    with streams.demand.waiting(["run"], ENDS), streams.demand.waiting([B], ROWS):
        assert streams.taken() == [[ENDS], [ENDS, ROWS], []]
        await asyncio.sleep(0.1)
        assert streams.taken() == [[], [], []], "it is awaited still"


async def test_reads_that_follow_each_other_are_one_demand():
    streams, now = Streams(), asyncio.get_running_loop().time
    begun = now()
    for _ in range(200):
        with streams.demand.waiting([A, B], ROWS):
            await asyncio.sleep(0)
        await asyncio.sleep(0)
    falls = 1 + int((now() - begun) / module.CALM_SECONDS)  # and not at the end of each read
    got = streams.taken()
    assert got[0][0] == got[1][0] == ROWS
    assert len(got[0]) + len(got[1]) <= 2 * (1 + 2 * falls)
    await asyncio.sleep(0.1)
    assert streams.demand.at(A) == streams.demand.at(B) == NOTHING


async def test_a_stream_that_opens_gets_the_demand_as_it_stands():
    demand = Demand()
    got: list[int] = []
    with demand.waiting([A], ROWS):
        with demand.stream(A, got.append) as first:
            assert first == ROWS
        # Replaced: its end must not take the entry of the newer one away.
        older, newer = demand.stream(A, [].append), demand.stream(A, got.append)
        older.__enter__()
        newer.__enter__()
        older.__exit__(None, None, None)
    await asyncio.sleep(0.1)
    assert got == [NOTHING]
    newer.__exit__(None, None, None)
    with demand.waiting([A], ROWS):
        assert got == [NOTHING]
