"""Memory: the process refuses chunks at its limit; traces go for their own bytes alone."""

from __future__ import annotations

import gc
import json
import tracemalloc
from collections.abc import Sequence
from contextlib import closing
from itertools import count
from pathlib import Path

import grpc
import numpy as np
import pytest

from routetrace.client import RouteClient
from routetrace.codec.records import FinishReason, OpKind
from routetrace.server.index.apply import apply_record
from routetrace.server.index.records.record import Sums, encode_chunk, encode_open
from routetrace.server.index.state import State
from routetrace.server.index.traces.memory import memory_of, memory_of_chunk
from routetrace.server.testing import run_server
from routetrace.v1 import routetrace_pb2 as pb
from support.agents.feeder import ChunkMaker, Stream
from support.scrape import Scraped
from support.servers.client_server import LAYOUT, rows_of
from support.waiting import wait_for

ROWS = rows_of(LAYOUT, 32)
SETTINGS = {
    "sweep_interval_seconds": 0.05, "metrics_listen": "127.0.0.1:0", "log_format": "json",
}  # fmt: skip
#: Least and greatest bytes that a trace of `fill` takes in the index, its chunk included.
LEAST, MOST = 1500, 6000


def add(
    chunk: ChunkMaker, request: str, number: int, *, spans: int = 1, digests: int = 0, **begin
) -> None:
    """Add a request that has ended, with all of its rows in so many spans."""
    each = len(ROWS) // spans
    chunk.begins.append(pb.RequestBegin(prompt_len=2, **begin))
    chunk.op(OpKind.BEGIN, request, arg=len(chunk.begins) - 1, value=number)
    for at in range(spans):
        frame = chunk.frame(ROWS[at * each : (at + 1) * each])
        chunk.op(OpKind.ROWS, request, position=at * each, count=each, frame=frame, step=at + 1)
    if digests:
        chunk.op(OpKind.DIGEST, request, row=len(chunk.digests), count=digests)
        values = np.random.default_rng(number).integers(1 << 62, size=digests).tolist()
        chunk.digests += [(at + 1, value) for at, value in enumerate(values)]
    chunk.op(OpKind.FINISH, request, count=len(ROWS) + 1, arg=int(FinishReason.STOP))


def send(target: str, run: str, trace_ids: Sequence[str]) -> None:
    """Send whole traces of one engine, each in a chunk of its own."""
    hello = pb.Hello(run=run, engine_id="e", boot_id="b", layout=LAYOUT.to_proto())
    with closing(Stream(target, hello)) as stream:
        for at, trace_id in enumerate(trace_ids):
            chunk = ChunkMaker(LAYOUT)
            add(chunk, trace_id, at)
            stream.send(chunk.make(stream.welcome.next_sequence + at))
            assert stream.receive().HasField("ack")


def fill(data_dir: Path, **traces: int) -> None:
    """Store so many traces of each run, the oldest ones first."""
    with run_server(data_dir=data_dir) as server:
        for run, number in traces.items():
            send(server.target, run, [f"t{at}" for at in range(number)])


def names(target: str, run: str) -> list[str]:
    with RouteClient(target, run=run) as client:
        return sorted((trace.trace_id for trace in client.find()), key=lambda name: int(name[1:]))


def swept(server) -> float:
    return Scraped(server.metrics_target).value("routetrace_sweep_seconds_count")


def warnings(server) -> list[str]:
    entries = [json.loads(line) for line in server.log.read_text().splitlines()]
    return [entry["event"] for entry in entries if entry["level"] == "warning"]


def test_memory_that_is_not_of_the_index_evicts_nothing_and_refuses_chunks(tmp_path):
    """The process itself is larger than the limit, whose half its traces do not reach."""
    fill(tmp_path, a=40)
    with run_server(data_dir=tmp_path, memory_limit=32 << 20, **SETTINGS) as server:
        wait_for(lambda: swept(server) > 20)
        with pytest.raises(
            grpc.RpcError, match=r"memory_limit is \d+; expected less than 33554432"
        ):
            send(server.target, "a", ["more"])
        assert names(server.target, "a") == [f"t{at}" for at in range(40)]
        [told] = warnings(server)
        assert "no trace is evicted for the rest" in told
        scraped = Scraped(server.metrics_target)
        assert 40 * LEAST < scraped.value("routetrace_index_bytes") < 40 * MOST


def test_near_the_half_of_the_limit_the_oldest_traces_of_the_largest_owner_go(tmp_path):
    fill(tmp_path, few=4, many=80)
    limit = 40 * MOST  # whose half is less than 80 traces take, and more than a few
    with run_server(data_dir=tmp_path, memory_limit=limit, **SETTINGS) as server:
        begun = swept(server)
        wait_for(lambda: len(names(server.target, "many")) < 80)
        wait_for(lambda: swept(server) > begun + 20)
        left = names(server.target, "many")
        assert left == [f"t{at}" for at in range(80 - len(left), 80)]
        assert names(server.target, "few") == [f"t{at}" for at in range(4)]
        # Down to three quarters of the half, and no further.
        least = 0.75 * limit / 2 - MOST
        assert least / MOST - 4 <= len(left) < 0.9 * limit / 2 / LEAST
        assert least < Scraped(server.metrics_target).value("routetrace_index_bytes")


KINDS = {
    "plain": {},
    "labels": {"labels": {"group": "g" * 20, "sample": "s" * 8, "session": "n" * 30}},
    "spans": {"spans": 16},
    "turns": {"turns": 4},
    "digests": {"digests": 32},
}


@pytest.mark.parametrize("joined", [False, True], ids=["", "joined"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_counted_memory_of_the_index_is_that_which_it_takes(kind, joined):
    chosen = dict(KINDS[kind])
    turns = chosen.pop("turns", 1)
    number = count()

    def record(trace: int) -> bytes:
        chunk = ChunkMaker(LAYOUT)
        for turn in range(turns):
            request = f"request-{kind}-{trace:08d}-{turn}"
            add(chunk, request, next(number), trace_id=f"trace-{kind}-{trace:08d}", **chosen)
        sealed = chunk.make(trace + 1)
        sums = Sums(sealed.header_crc32, sealed.payload_crc32)
        return encode_chunk(("r", "e", ""), 1, trace + 1, sums, 1.0, sealed.header)

    opened = encode_open(
        0, ("r", "e", ""), epoch=1, boot_id="b", layout=LAYOUT, block_size=0, num_blocks=0
    )
    records = [record(trace) for trace in range(400)]
    gc.collect()
    tracemalloc.start()
    try:
        state = State(1000.0)
        apply_record(state, 1, opened)
        for at, one in enumerate(records, 2):
            apply_record(state, at, one)
        if joined:
            for trace in state.traces.oldest_first():
                assert trace.join.requests
        gc.collect()
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    counted = sum(map(memory_of, state.traces.oldest_first()))
    counted += sum(memory_of_chunk(len(chunk.offsets)) for chunk in state.frames.values())
    assert len(state.traces.traces) == 400
    assert 0.75 < counted / taken < 1.35, (counted / 400, taken / 400)
