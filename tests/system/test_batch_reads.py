"""Many reads in one stream, over sockets: each is what it is alone, whatever the others do."""

from __future__ import annotations

import asyncio
import itertools
import random
import threading
import time
from collections.abc import Iterator
from contextlib import asynccontextmanager, closing, nullcontext
from types import SimpleNamespace

import grpc
import numpy as np
import pytest

from routetrace.client import (
    AsyncRouteClient,
    ClientConfig,
    FetchPlan,
    MicroBatch,
    Rank,
    ReadOptions,
    RouteClient,
    Sample,
    Trace,
)
from routetrace.client._core import calls as _calls
from routetrace.client._core.batch import together
from routetrace.client._core.steps import Plan
from routetrace.common.errors import DeadlineExceeded, NotFound, RouteTraceError
from routetrace.common.layout import ModelLayout
from routetrace.server.common.slices import SLICE_SECONDS
from routetrace.server.read.batch import Batch
from routetrace.server.rows.sending import Piece
from routetrace.server.testing import free_ports, run_server
from routetrace.simulation.small_engine import SmallEngine
from routetrace.v1 import routetrace_pb2 as pb
from routetrace.v1 import routetrace_pb2_grpc as pb_grpc
from support.agents.feeder import Feeder
from support.scrape import Scraped
from support.waiting import wait_for

LAYOUT = ModelLayout((1, 2, 4), 6, 40, 3)
WIDE = ModelLayout(tuple(range(48)), 48, 256, 8)
GONE = 60


@pytest.fixture(scope="module")
def server():
    with run_server(agent_timeout_seconds=600) as process:
        yield process


@pytest.fixture(scope="module")
def filled(server) -> SmallEngine:
    """An engine whose requests end, are preempted and share blocks; one trace has two of them."""
    feeder = Feeder(server.target, LAYOUT, run="filled", block_size=4, num_blocks=24)
    sim = SmallEngine(feeder, LAYOUT, 5)
    prompts = [[sim.rng.randrange(4) for _ in range(14)] for _ in range(4)]
    for i in range(40):
        prompt = prompts[i % 4][: sim.rng.randint(1, 14)]
        sim.submit(f"r{i}", prompt, sim.rng.randint(1, 12))
    while sim.step():
        if sim.rng.random() < 0.2:
            feeder.flush()
    feeder.begin("running", trace_id="running", prompt_len=9)
    feeder.flush()
    yield sim
    feeder.close()


def said(outcome: Trace | RouteTraceError) -> object:
    """All that a caller sees of a read."""
    if isinstance(outcome, RouteTraceError):
        text = str(outcome).replace("request_id", "trace_id")  # the argument of `get`
        return type(outcome), text, getattr(outcome, "missing", None)
    facts = {
        name: value
        for name, value in vars(outcome).items()
        if not isinstance(value, np.ndarray) and name != "expires_at"
    }
    return facts, outcome.topk_ids.tobytes(), outcome.valid.tobytes()


def alone(client: RouteClient, name: str, **how: object) -> Trace | RouteTraceError:
    try:
        return client.get(name, **how)
    except RouteTraceError as error:
        return error


@pytest.mark.parametrize("seed", range(12))
def test_each_read_is_what_it_is_alone(server, filled, seed):
    rng = random.Random(seed)
    how: dict[str, object] = {
        "missing": rng.choice(("mask", "raise")),
        "policy": rng.choice(("as_sampled", "latest")),
        "prefix_rows": rng.choice(("unique", "any", "never")),
        "weight_version": rng.choice((None, None, 0, 1)),
        "layer_ids": rng.choice((None, (2,), (1, 4), (1, 3))),
        "token_start": rng.choice((0, 0, 3)),
        "token_stop": rng.choice((None, None, 4, 9)),
        "wait_for": rng.choice((None, None, "rows")),
        "timeout": 5.0,
    }
    if how["wait_for"]:
        how["timeout"] = 0.3
    names = [r.name for r in filled.done] + ["running", "unknown", "x" * 5000]
    names = rng.sample(names, len(names))[: 10 if how["wait_for"] else len(names)]
    if how["wait_for"]:
        # What lacks rows ends with a later state of the trace: say how long it waited, and no more.
        names = [n for n in names if n != "running"]
    with RouteClient(server.target, run="filled", timeout=GONE) as client:
        wanted = [said(alone(client, name, **how)) for name in names]
        for concurrency in (2, 7, 64):
            got = client.get_many(names, concurrency=concurrency, errors="return", **how)
            assert [said(outcome) for outcome in got] == wanted, (concurrency, how)

    async def with_tasks():
        async with AsyncRouteClient(server.target, run="filled", timeout=GONE) as other:
            many = other.get_many(iter(names), concurrency=16, errors="return", **how)
            return [said(outcome) async for outcome in many]

    assert asyncio.run(with_tasks()) == wanted


def test_rows_are_those_that_the_engine_computed(server, filled):
    names = [r.name for r in filled.done]
    with RouteClient(server.target, run="filled") as client:
        for policy in ("as_sampled", "latest"):
            many = client.get_many(names, missing="mask", policy=policy)
            for request, trace in zip(filled.done, many, strict=True):
                truth = request.truth(policy)
                for position in range(len(request.tokens) - 1):
                    row = truth.get(position)
                    assert trace.valid[position].all() == (row is not None)
                    if row is not None:
                        assert np.array_equal(trace.topk_ids[position], row[0])


@pytest.mark.parametrize("concurrency", [1, 3])
def test_a_fetch_of_many_requests_is_that_of_each(server, filled, concurrency):
    requests = [r for r in filled.done if len(r.tokens) > 2]
    samples = [Sample.of(r.name, len(r.tokens)) for r in requests]
    rank = Rank(layer_ids=(1, 4))
    options = ReadOptions(missing="mask", timeout=GONE)
    with RouteClient(server.target, run="filled") as client:
        plan = FetchPlan.make(LAYOUT, MicroBatch.packed(samples), rank)
        got = client.fetch(plan, options=options, concurrency=concurrency)
        at = 0
        for sample in samples:
            plan = FetchPlan.make(LAYOUT, MicroBatch.packed([sample]), rank)
            one = client.fetch(plan, options=options)
            part = slice(at, at + sample.num_tokens)
            at = part.stop
            assert np.array_equal(got.valid[:, part], one.valid)
            assert np.array_equal(got.topk_ids[:, part][one.valid], one.topk_ids[one.valid])
    assert at == got.valid.shape[1]


def rows(count: int, seed: int = 0, layout: ModelLayout = WIDE) -> np.ndarray:
    rng = np.random.default_rng(seed)
    shape = (count, len(layout.layer_ids), layout.num_experts)
    return rng.random(shape).argsort(axis=2)[:, :, : layout.top_k].astype(layout.dtype)


def test_a_read_that_waits_delays_no_other(server):
    feeder = Feeder(server.target, LAYOUT, run="waits")
    names = [f"w{i}" for i in range(6)]
    handles = {name: feeder.begin(name, prompt_len=3) for name in names}
    feeder.flush()
    ids = rows(4, layout=LAYOUT)
    got: list[Trace] = []
    came = threading.Semaphore(0)

    def end(name: str) -> None:
        feeder.step(ids, [(handles[name], 0, 4)])
        feeder.finish(handles[name], 5)
        feeder.flush()

    def read() -> None:
        with RouteClient(server.target, run="waits") as client:
            for trace in client.get_many(names, concurrency=12, wait_for="end", timeout=GONE):
                got.append(trace)
                came.release()

    thread = threading.Thread(target=read)
    thread.start()
    end("w0")
    assert came.acquire(timeout=GONE)  # handed out while the others wait
    for name in ("w5", "w2", "w4", "w3", "w1"):
        end(name)
    thread.join(GONE)
    assert [t.trace_id for t in got] == names
    assert all(t.valid.all() and np.array_equal(t.topk_ids, ids) for t in got)
    feeder.close()


def test_reads_that_waited_in_vain_say_how_far_they_were(server, filled):
    names = ["r0", "running", "r1", "never"]
    how = {"wait_for": "end", "timeout": 0.5, "missing": "mask", "concurrency": 8}
    with RouteClient(server.target, run="filled", timeout=GONE) as client:
        got = list(client.get_many(names, errors="return", **how))
    assert [type(g) for g in got] == [
        Trace, DeadlineExceeded, Trace, DeadlineExceeded,
    ]  # fmt: skip
    assert "did not end within" in str(got[1])
    assert "did not" in str(got[3])


@pytest.mark.slow
def test_a_restart_of_the_server_costs_no_read(tmp_path):
    ids = {f"t{i}": rows(200, i) for i in range(24)}
    port = free_ports(1)
    with run_server(data_dir=tmp_path, port=port) as first:
        feeder = Feeder(first.target, WIDE)
        for name, some in ids.items():
            handle = feeder.begin(name)
            feeder.step(some, [(handle, 0, len(some))])
            feeder.finish(handle, len(some) + 1)
            feeder.flush()
        feeder.close()
        with RouteClient(first.target, timeout=GONE) as client:
            many = client.get_many(list(ids) * 4, concurrency=8)
            with closing(many):
                got = [next(many)]
                first.kill()
                with run_server(data_dir=tmp_path, port=port):
                    got += many
    assert [t.trace_id for t in got] == list(ids) * 4
    assert all(np.array_equal(t.topk_ids, ids[t.trace_id]) for t in got)


@pytest.fixture(scope="module")
def long(server):
    """A server with 32 traces of 3,000 rows: more than sockets and gRPC hold back."""
    ids, names = rows(3000), [f"t{i}" for i in range(32)]
    with run_server(sweep_interval_seconds=0.05, metrics_listen="127.0.0.1:0") as own:
        feeder = Feeder(own.target, WIDE)
        for name in names:
            handle = feeder.begin(name)
            for start in range(0, len(ids), 500):
                feeder.step(ids[start : start + 500], [(handle, start, 500)])
            feeder.finish(handle, len(ids) + 1)
            feeder.flush()
        feeder.close()
        yield own, names, ids


def slowly(client: RouteClient, names: list[str]) -> Iterator[Trace | RouteTraceError]:
    """Reads of one stream, whose next message is taken when the next outcome is."""

    def plan(name: str) -> Plan[Trace]:
        return _calls.get(
            client._config, name, ReadOptions(), layer_ids=None, token_start=0, token_stop=None,
            incarnation=None, pin_memory=False,
        )  # fmt: skip

    return client._driver.run(together(client._config, map(plan, names)))


def test_closing_ends_the_stream(long):
    own, names, _ = long

    def open_reads() -> float:
        return Scraped(own.metrics_target).value("routetrace_reads")

    with RouteClient(own.target) as client:
        read = slowly(client, names)
        next(read)
        assert open_reads() == len(names)
        read.close()
        wait_for(lambda: open_reads() == 0)
        read = slowly(client, [*names, "never"])
        assert len([*itertools.islice(read, 5)]) == 5
    wait_for(lambda: open_reads() == 0)


def test_a_slow_reader_gets_what_it_began_with(long):
    """Traces are deleted while parts of them are under way: each is whole, or not there."""
    own, names, ids = long
    config = ClientConfig(target=own.target, grpc_options={"grpc.http2.bdp_probe": 0})
    with RouteClient(config=config) as client:
        read = slowly(client, names)
        got = [next(read)]
        for name in names:
            client.delete(name)
        got += read
    assert len(got) == len(names)
    whole = [isinstance(outcome, Trace) for outcome in got]
    assert whole == sorted(whole, reverse=True)
    assert not whole[-1]
    for outcome in got:
        if isinstance(outcome, Trace):
            assert np.array_equal(outcome.topk_ids, ids)
        else:
            assert isinstance(outcome, NotFound)
            assert "deleted" in str(outcome)


def test_a_server_that_admits_few_reads_serves_many_in_time():
    with run_server(max_reads=1) as own:
        feeder = Feeder(own.target, LAYOUT)
        ids = rows(4, layout=LAYOUT)
        names = [f"t{i}" for i in range(40)]
        for name in names:
            handle = feeder.begin(name)
            feeder.step(ids, [(handle, 0, 4)])
            feeder.finish(handle, 5)
        feeder.flush()
        feeder.close()
        with RouteClient(own.target, timeout=GONE) as client:
            got = list(client.get_many(names, wait_for="rows"))
    assert [t.trace_id for t in got] == names
    assert all(np.array_equal(t.topk_ids, ids) for t in got)


async def test_a_fault_of_a_waiting_read_ends_the_stream():
    async def later(read: pb.GetTraceRequest):
        await asyncio.sleep(0)
        raise ZeroDivisionError

    @asynccontextmanager
    async def turn():
        yield

    async def step():
        pass

    reads = [pb.GetTraceRequest(trace_id="t", wait_for=pb.WAIT_FOR_END)] * 2
    batch = Batch(reads, lambda _: None, later, nullcontext, turn, step)
    with pytest.raises(ZeroDivisionError):
        [m async for m in batch.messages()]


class Answered:
    """An answer without rows."""

    rows = None
    done = False

    async def next(self) -> Piece:
        self.done = True
        return Piece(end=pb.ReadEnd())


async def messages_of(reads: int, at_once, later=None) -> list[pb.GetTracesResponse]:
    @asynccontextmanager
    async def turn():
        yield SimpleNamespace(sending=step, charged=lambda message: message)

    async def step():
        pass

    asked = [pb.GetTraceRequest(trace_id=str(i)) for i in range(reads)]
    batch = Batch(asked, at_once, later, nullcontext, turn, step)
    return [pb.GetTracesResponse.FromString(m) async for m in batch.messages()]


async def test_only_reads_that_wait_are_answered_later():
    asked: list[str] = []

    async def later(read: pb.GetTraceRequest) -> Answered:
        asked.append(read.trace_id)
        return Answered()

    got = await messages_of(6, lambda read: Answered() if int(read.trace_id) % 3 else None, later)
    assert asked == ["0", "3"]
    assert sorted(part.read for message in got for part in message.parts) == list(range(6))
    assert [message.last for message in got] == [False] * (len(got) - 1) + [True]


async def test_a_long_batch_leaves_the_loop_to_others():
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    def at_once(_: pb.GetTraceRequest) -> Answered:
        time.sleep(2 * SLICE_SECONDS)
        return Answered()

    task = asyncio.create_task(others())
    await messages_of(10, at_once)
    task.cancel()
    assert turns >= 10


def test_what_is_no_batch_is_refused(server):
    with grpc.insecure_channel(server.target) as channel:
        stub = pb_grpc.TraceServiceStub(channel)
        many = pb.GetTracesRequest(run="filled", reads=[pb.GetTraceRequest(trace_id="r0")] * 1025)
        with pytest.raises(grpc.RpcError) as caught:
            list(stub.GetTraces(many, timeout=GONE))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        reads = [
            pb.GetTraceRequest(trace_id="r0", run="other"),
            pb.GetTraceRequest(trace_id="r0", follow=True),
            pb.GetTraceRequest(trace_id=""),
            pb.GetTraceRequest(trace_id="r0", policy=77),
        ]
        [message] = stub.GetTraces(pb.GetTracesRequest(run="filled", reads=reads), timeout=GONE)
        assert message.last
        assert [part.read for part in message.parts] == [0, 1, 2, 3]
        fields = [part.error.field for part in message.parts]
        assert fields == ["reads.run", "reads.follow", "trace_id", "policy"]
        assert not list(stub.GetTraces(pb.GetTracesRequest(run="filled"), timeout=GONE))
