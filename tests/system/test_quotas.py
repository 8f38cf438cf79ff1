"""Quotas and shares of stored bytes: one for all runs of a token, at no cost to other tokens."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from routetrace.client import RouteClient, Security
from routetrace.codec.records import FinishReason, OpKind
from routetrace.common.errors import Overloaded, from_detail
from routetrace.common.layout import ModelLayout
from routetrace.server.testing import ServerProcess, run_server
from routetrace.v1 import routetrace_pb2 as pb
from support.agents.feeder import ChunkMaker, Feeder, Stream
from support.servers.guarded import entry
from support.waiting import wait_for

VICTIM, ATTACKER = Security(token="rt_victim"), Security(token="rt_attacker")
WIDE = ModelLayout(tuple(range(48)), 48, 128, 8)


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    path = tmp_path / "tokens"
    path.write_text(
        entry("rt_victim", "victim", runs=("victim",))
        + entry("rt_attacker", "attacker", runs=("attack-*",))
    )
    return path


def wide_rows() -> np.ndarray:
    """Return rows that take about 90 kB in the store."""
    rng = np.random.default_rng(0)
    return np.argsort(rng.random((256, 48, 128), np.float32), axis=2)[..., :8].astype(np.uint8)


def wide_chunk(rows: np.ndarray, sequence: int, *, ends: bool = True) -> pb.Chunk:
    """Return a chunk with a trace of its own."""
    chunk, name = ChunkMaker(WIDE), f"x{sequence}"
    chunk.begins.append(pb.RequestBegin(prompt_len=256))
    chunk.op(OpKind.BEGIN, name, value=sequence)
    chunk.op(OpKind.ROWS, name, count=256, frame=chunk.frame(rows), step=1)
    if ends:
        chunk.op(OpKind.FINISH, name, count=257, arg=FinishReason.STOP)
    return chunk.make(sequence)


def open_stream(server: ServerProcess, run: str, security: Security) -> Stream:
    return Stream(server.target, pb.Hello(run=run, engine_id="e", layout=WIDE.to_proto()), security)


def test_a_token_has_one_quota_for_all_its_runs(tokens: Path) -> None:
    rows = wide_rows()
    with run_server(tokens_file=tokens, token_quota="1MiB") as server:
        beside = open_stream(server, "victim", VICTIM)
        streams = [open_stream(server, f"attack-{i}", ATTACKER) for i in range(20)]
        refused = []
        for stream in streams:  # one trace in each run, which runs on: none may be evicted
            stream.send(wide_chunk(rows, 1, ends=False))
            reply = stream.receive()
            if reply.HasField("reject"):
                refused.append(from_detail(reply.reject.error))
        assert 0 < len(refused) < len(streams)
        assert {(type(error), error.field) for error in refused} == {(Overloaded, "token_quota")}
        assert all("stored bytes of token attacker" in str(error) for error in refused)
        beside.send(wide_chunk(rows, 1))
        assert beside.receive().ack.sequence == 1
        for stream in (*streams, beside):
            stream.close()


@pytest.mark.parametrize(
    ("limit", "size", "count"), [("token_quota", "1MiB", 25), ("store_capacity", "4MiB", 80)]
)
def test_where_room_is_short_the_largest_owner_loses_its_oldest_traces(
    tokens: Path, limit: str, size: str, count: int
) -> None:
    rows, settings = wide_rows(), {limit: size, "sweep_interval_seconds": "0.05"}
    with (
        run_server(tokens_file=tokens, **settings) as server,
        RouteClient(server.target, run="victim", security=VICTIM, timeout=60) as victim,
        RouteClient(server.target, run="attack-1", security=ATTACKER, timeout=60) as attacker,
    ):
        beside = open_stream(server, "victim", VICTIM)
        stream = open_stream(server, "attack-1", ATTACKER)
        for each, most in ((beside, 3), (stream, count)):
            for sequence in range(1, most + 1):

                def stored(each: Stream = each, sequence: int = sequence) -> bool:
                    each.send(wide_chunk(rows, sequence))
                    return each.receive().HasField("ack")

                wait_for(stored)
        names = [stat.trace_id for stat in attacker.find()]
        assert f"x{count}" in names
        assert "x1" not in names
        assert {stat.trace_id for stat in victim.find()} == {"x1", "x2", "x3"}
        for each in (stream, beside):
            each.close()


def test_a_token_has_one_share_of_the_store_for_all_its_runs(tokens: Path) -> None:
    rows = wide_rows()
    settings = {"store": "memory", "store_capacity": 4 << 20, "sweep_interval_seconds": 0.05}
    with (
        run_server(tokens_file=tokens, **settings) as server,
        RouteClient(server.target, run="victim", security=VICTIM, timeout=60) as client,
    ):
        feeder = Feeder(server.target, WIDE, run="victim", security=VICTIM)
        for name in ("a", "b", "c"):
            handle = feeder.begin(name, prompt_len=256)
            feeder.step(rows, [(handle, 0, 256)])
            feeder.finish(handle, 257)
            feeder.flush()
        for run in range(12):
            stream = open_stream(server, f"attack-{run}", ATTACKER)
            for sequence in range(1, 6):
                stream.send(wide_chunk(rows, sequence))
                if stream.receive().HasField("reject"):
                    break
            stream.close()
        for name in ("a", "b", "c"):
            assert np.array_equal(client.get(name).topk_ids, rows), "below its share"
