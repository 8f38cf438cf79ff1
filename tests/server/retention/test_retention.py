"""Quotas, ceilings and signs of life: what goes when room is short, and what a reader is told."""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from contextlib import closing, suppress

import numpy as np
import pytest

from routetrace.client import RouteClient, TraceState
from routetrace.codec.records import FinishReason, OpKind
from routetrace.common.errors import Fenced, Incomplete, NotFound, Unavailable
from routetrace.common.layout import ModelLayout
from routetrace.server.core import Core
from routetrace.server.index.records.record import decode_record, encode_forget
from routetrace.server.settings.config import ServerConfig
from routetrace.server.store.disk.store import DiskStore
from routetrace.server.store.memory import MemoryStore
from routetrace.server.testing import run_server
from routetrace.v1 import routetrace_pb2 as pb
from support.agents.feeder import ChunkMaker, Feeder, Stream
from support.reads import Reads
from support.scrape import Scraped
from support.waiting import wait_for

LAYOUT = ModelLayout((0, 1, 2, 3), 4, 256, 8)
ROWS = 500
QUOTA = 400_000  # some 26 traces


def rows_of(seed: int, n: int = ROWS) -> np.ndarray:
    rng = np.random.default_rng(seed)
    first, stride = rng.integers(256, size=(2, n, 4, 1))
    return ((first + (2 * stride + 1) * np.arange(8)) % 256).astype(np.uint8)


class Writer:
    """Sends whole traces, one a chunk, and again what is refused for want of room."""

    def __init__(self, target: str, run: str) -> None:
        self.hello = pb.Hello(
            run=run, engine_id="e", boot_id="b", layout=LAYOUT.to_proto(), block_size=0
        )
        self.stream = Stream(target, self.hello)
        self.sequence = self.stream.welcome.next_sequence
        self.begun = 0
        self.refusals: list[pb.ErrorDetail] = []

    def put(self, name: str, seed: int, *, ends: bool = True, tries: int = 3000) -> bool:
        chunk = ChunkMaker(LAYOUT)
        chunk.begins.append(pb.RequestBegin())
        chunk.op(OpKind.BEGIN, name, value=self.begun)
        chunk.op(OpKind.ROWS, name, count=ROWS, frame=chunk.frame(rows_of(seed)), step=1)
        if ends:
            chunk.op(OpKind.FINISH, name, count=ROWS + 1, arg=FinishReason.STOP)
        message = chunk.make(self.sequence)
        for _ in range(tries):
            self.stream.send(message)
            answer = self.stream.receive()
            if answer.HasField("ack"):
                self.sequence += 1
                self.begun += 1
                return True
            self.refusals.append(answer.reject.error)
            time.sleep(0.02)
        return False

    def close(self) -> None:
        self.stream.close()


def whole(client: RouteClient, name: str, seed: int) -> bool:
    """Whether a trace is there, which must be all of it; if not, nothing of it is shown."""
    try:
        trace = client.get(name)
    except NotFound:
        return False
    np.testing.assert_array_equal(trace.topk_ids, rows_of(seed))
    assert trace.state is TraceState.COMPLETE
    return True


def test_over_its_quota_a_run_loses_its_oldest_finished_traces():
    with (
        run_server(run_quota=QUOTA, sweep_interval_seconds=0.05) as server,
        RouteClient(server.target, run="a") as a,
        RouteClient(server.target, run="b") as b,
    ):
        writers = {run: Writer(server.target, run) for run in "ab"}
        assert writers["b"].put("kept", 7)
        assert writers["a"].put("runs on", 8, ends=False)
        for i in range(120):
            assert writers["a"].put(f"t{i}", i), writers["a"].refusals[-1]
        there = [whole(a, f"t{i}", i) for i in range(120)]
        assert there[-1], "the newest stays"
        assert there == sorted(there), "the oldest go first"
        assert 3 < sum(there) < 30
        assert whole(b, "kept", 7), "another run's are its own"
        assert a.stat("runs on").state is TraceState.RUNNING
        info = a.server_info()
        assert info.run_bytes <= info.run_quota_bytes == QUOTA
        assert all(e.kind == pb.ERROR_KIND_OVERLOADED for e in writers["a"].refusals)
        for writer in writers.values():
            writer.close()


def test_an_eviction_is_logged_once_and_counted_by_age():
    line = re.compile(
        r"evicted (\d+) finished traces? of run 'a', the least recently changed: its run_quota, or "
        r"its owner's token_quota, is nearly used up"
    )
    settings = {"metrics_listen": "127.0.0.1:0", "log_format": "json"}
    with run_server(run_quota=QUOTA, sweep_interval_seconds=0.05, **settings) as server:
        writer = Writer(server.target, "a")
        for i in range(60):
            assert writer.put(f"t{i}", i)
        writer.close()

        def logged() -> float:
            entries = [json.loads(text) for text in server.log.read_text().splitlines()]
            about = [e for e in entries if e["event"].startswith(("evicted", "quota"))]
            assert {e["level"] for e in about} <= {"warning"}
            return sum(int(line.fullmatch(e["event"])[1]) for e in about)

        def told_the_same() -> bool:
            scraped = Scraped(server.metrics_target)
            evicted = scraped.value("routetrace_forgotten_traces_total", reason="quota")
            aged = scraped.value("routetrace_evicted_age_seconds_bucket", le="3600.0")
            assert aged <= evicted
            return 0 < evicted == aged == logged()

        wait_for(told_the_same)  # traces are evicted meanwhile


def test_a_run_has_the_quota_that_names_it():
    config = ServerConfig(store="memory", run_quota=10, run_quotas={"big": 1000, "free": 0})
    assert [config.quota_of(run) for run in ("small", "big", "free")] == [10, 1000, 0]


def test_workers_share_the_quota_of_a_run_that_lies_in_all():
    config = ServerConfig(
        store="memory", workers=3, spread_runs=["b*"], run_quota=10, run_quotas={"big": 1000}
    )
    quotas = {run: config.quota_of(run) for run in ("small", "big", "both")}
    assert quotas == {"small": 10, "big": 334, "both": 4}


def test_where_nothing_may_go_chunks_are_refused_until_there_is_room():
    with (
        run_server(run_quota=QUOTA, when_full="refuse", sweep_interval_seconds=0.05) as server,
        RouteClient(server.target, run="a") as client,
    ):
        writer = Writer(server.target, "a")
        names = []
        while writer.put(f"t{len(names)}", len(names), tries=1):
            names.append(f"t{len(names)}")
        error = writer.refusals[-1]
        assert (error.kind, error.field) == (pb.ERROR_KIND_OVERLOADED, "run_quota")
        assert error.retry_after_ms > 0
        assert all(whole(client, name, i) for i, name in enumerate(names)), "reads go on"
        for name in names[:10]:
            client.delete(name)
        assert writer.put("after", 99)
        assert whole(client, "after", 99)
        assert not whole(client, names[0], 0)
        writer.close()


@pytest.mark.slow
@pytest.mark.parametrize("store", ["memory", "disk"])
def test_a_full_store_makes_room_by_itself(tmp_path, store):
    settings = {"data_dir": tmp_path} if store == "disk" else {}
    with (
        run_server(store_capacity=4 << 20, sweep_interval_seconds=0.05, **settings) as server,
        RouteClient(server.target, run="a") as client,
    ):
        writer = Writer(server.target, "a")
        for i in range(450):  # some 7 MB
            assert writer.put(f"t{i}", i), writer.refusals[-1]
        there = [whole(client, f"t{i}", i) for i in range(450)]
        assert there[-1]
        assert there == sorted(there)
        assert sum(there) > 50
        writer.close()


@pytest.mark.parametrize("store", ["memory", "disk"])
def test_nothing_is_stored_that_builds_on_what_was_refused_at_the_door(tmp_path, store):
    """A smaller chunk fits after one that did not."""
    settings = {"data_dir": tmp_path} if store == "disk" else {}
    with run_server(store_capacity=4 << 20, when_full="refuse", **settings) as server:
        stream = Stream(server.target, pb.Hello(run="a", engine_id="e", layout=LAYOUT.to_proto()))
        kept = 0

        def chunk(at: int, rows: int) -> pb.Chunk:
            made = ChunkMaker(LAYOUT)
            made.begins.append(pb.RequestBegin())
            made.op(OpKind.BEGIN, f"t{at}", value=at)
            made.op(OpKind.ROWS, f"t{at}", count=rows, frame=made.frame(rows_of(at, rows)), step=1)
            return made.make(stream.welcome.next_sequence + at)

        while True:
            stream.send(chunk(kept, 20_000))
            if not stream.receive().HasField("ack"):
                break
            kept += 1
        # The first one fits; while it is on its way to the disk, the others come.
        burst = [chunk(kept + at, rows) for at, rows in enumerate([1, 20_000, *[1] * 18])]
        for message in burst:
            stream.send(message)
        assert stream.receive().HasField("ack")
        kept += 1
        kinds = [stream.receive().reject.error.kind for _ in range(19)]
        assert kinds == [pb.ERROR_KIND_OVERLOADED] + [pb.ERROR_KIND_OUT_OF_SEQUENCE] * 18
        # There was room for one of them all the time.
        stream.send(chunk(kept, 1))
        assert stream.receive().HasField("ack")
        kept += 1
        stream.close()
    if store == "disk":
        with closing(DiskStore(tmp_path, capacity_bytes=8 << 20)) as disk:
            records = [decode_record(header) for _, header in disk.headers() if header]
            stored = [record for record in records if record.HasField("chunk")]
        assert len(stored) == kept > 4


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_what_is_served_is_whole_whatever_was_forgotten(tmp_path, seed):
    """Puts, deletes, leases, retirements and evictions, over restarts."""
    rng = random.Random(seed)
    truth: dict[str, int] = {}
    for boot in range(3):
        with (
            run_server(data_dir=tmp_path, run_quota=QUOTA, sweep_interval_seconds=0.02) as server,
            RouteClient(server.target, run="a") as client,
        ):
            writer = Writer(server.target, "a")
            for i in range(60):
                name = f"t{boot}-{i}"
                truth[name] = rng.randrange(1 << 30)
                assert writer.put(name, truth[name])
                some = rng.choice(list(truth))
                action = rng.random()
                if action < 0.1:
                    with suppress(NotFound):
                        client.delete(some)
                    with pytest.raises(NotFound):
                        client.get(some)
                elif action < 0.2:
                    client.renew([some], ttl_seconds=1)
                elif action < 0.6:
                    whole(client, some, truth[some])
            writer.close()
            if rng.random() < 0.5:
                server.kill()
    with run_server(data_dir=tmp_path) as server, RouteClient(server.target, run="a") as client:
        there = [name for name, value in truth.items() if whole(client, name, value)]
        assert {trace.trace_id for trace in client.find()} == set(there)
        assert len(there) > 3


# ---------------------------------------------------------------------------- signs of life


async def test_an_agent_that_leaves_while_its_stream_opens_is_not_there(monkeypatch):
    core = Core(MemoryStore(), ServerConfig(store="memory"))
    await core.start()
    waits = asyncio.Event()

    async def settled() -> None:  # a slow disk
        waits.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(core.journal, "settled", settled)
    hello = pb.Hello(run="a", engine_id="e", layout=LAYOUT.to_proto())
    opening = asyncio.create_task(core._ingest._open(hello, ""))
    await waits.wait()
    assert len(core.agents.connected) == 1
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    assert core.agents.connected == []


async def test_agents_are_not_silent_before_a_server_can_be_reached(monkeypatch):
    """A server stands by for days, or reads a long log, before its first agent can connect."""
    store, config = MemoryStore(), ServerConfig(store="memory")
    first = Core(store, config)
    await first.start()
    hello = pb.Hello(run="a", engine_id="e", layout=LAYOUT.to_proto())
    writer = (await first._ingest._open(hello, "")).writer
    second = Core(store, config)
    days_later = first.journal.clock.now() + 1e6
    monkeypatch.setattr(second.journal.clock, "now", lambda: days_later)
    await second.start()
    assert second.agents.idle_seconds(writer.key) == 0
    await second.sweep()
    assert list(second.state.writers) == [writer.key]


async def test_an_agent_that_connects_during_a_sweep_is_there(monkeypatch):
    core = Core(MemoryStore(), ServerConfig(store="memory"))
    await core.start()
    started = core.journal.clock.now()
    append = core.journal.append

    async def append_before_a_sweep(record: bytes) -> object:
        writer = await append(record)
        await core.retention.sweep()  # the stream's coroutine has not gone on yet
        return writer

    monkeypatch.setattr(core.journal.clock, "now", lambda: started + 3600)
    monkeypatch.setattr(core.journal, "append", append_before_a_sweep)
    hello = pb.Hello(run="a", engine_id="e", layout=LAYOUT.to_proto())
    session = await core._ingest._open(hello, "")
    assert core.state.writers.get(session.writer.key) is session.writer


@pytest.mark.parametrize("forgotten", [False, True])
async def test_an_agent_whose_engine_is_forgotten_as_it_connects_comes_back(forgotten):
    core = Core(MemoryStore(), ServerConfig(store="memory"))
    await core.start()
    hello = pb.Hello(run="a", engine_id="e", layout=LAYOUT.to_proto())
    session = await core._ingest._open(hello, "")
    check = core._ingest._fencing.check_stream
    check(session)
    hello.epoch = session.writer.epoch
    if forgotten:
        await core.journal.append(encode_forget(core.journal.clock.now(), "a", "e"))
        with pytest.raises(Unavailable, match="connect again"):
            check(session)
    again = await core._ingest._open(hello, "")
    assert (again.writer.epoch > hello.epoch) is forgotten
    check(again)
    with pytest.raises(Fenced, match="connected later" if forgotten else "newest stream"):
        check(session)


def test_an_agent_that_goes_silent_is_lost_although_its_stream_stays_open():
    with (
        run_server(
            heartbeat_seconds=0.1, agent_timeout_seconds=0.4, sweep_interval_seconds=0.1
        ) as server,
        RouteClient(server.target) as client,
    ):
        feeder = Feeder(server.target, LAYOUT)
        assert feeder.stream.welcome.heartbeat_ms == 100
        handle = feeder.begin("r")
        feeder.step(rows_of(1, 10), [(handle, 0, 10)])
        beat = pb.IngestRequest(heartbeat=pb.Heartbeat(offered_rows=10, acknowledged_rows=10))
        feeder.flush()

        def running() -> bool:
            feeder.stream._out.put(beat)
            return client.stat("r").state is TraceState.RUNNING

        wait_for(running)
        trace = client.get("r", wait_for="end", timeout=60, missing="mask")
        assert trace.state is TraceState.INCOMPLETE
        with pytest.raises(Incomplete):
            client.get("r")
        # It was only slow: it goes on, and nothing is lost.
        feeder.stream._out.put(beat)
        feeder.step(rows_of(2, 5), [(handle, 10, 5)])
        feeder.finish(handle, 16)
        feeder.flush()
        trace = client.get("r")
        np.testing.assert_array_equal(
            trace.topk_ids, np.concatenate([rows_of(1, 10), rows_of(2, 5)])
        )
        feeder.close()


def test_a_stream_without_heartbeats_lives_as_long_as_it_is_open():
    with (
        run_server(agent_timeout_seconds=0.2, sweep_interval_seconds=0.1) as server,
        RouteClient(server.target) as client,
    ):
        feeder = Feeder(server.target, LAYOUT)
        handle = feeder.begin("r")
        feeder.step(rows_of(1, 10), [(handle, 0, 10)])
        feeder.flush()
        reads = Reads(server.target)
        time.sleep(0.5)
        assert client.stat("r").state is TraceState.RUNNING
        feeder.close()
        assert (
            client.get("r", wait_for="end", timeout=60, missing="mask").state
            is TraceState.INCOMPLETE
        )
        reads.close()
