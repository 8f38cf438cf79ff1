"""How a trace came to be: a real server, agents spoken by hand, and the truth of each cell."""

from __future__ import annotations

import time
from datetime import datetime, timezone

import numpy as np
import pytest

from routetrace.capture_agent import AgentConfig, CaptureAgent
from routetrace.client import ClientConfig, NotFound, RouteClient, RowOrigin, TraceDescription
from routetrace.common.errors import InvalidArgument
from routetrace.common.layout import ModelLayout
from routetrace.common.viewer import USER_AGENT
from routetrace.server.common.slices import IN_TURNS, at_once
from routetrace.server.core import Core
from routetrace.server.index.apply import apply_record
from routetrace.server.read import describing
from routetrace.server.settings.config import ServerConfig
from routetrace.server.store.memory import MemoryStore
from routetrace.server.testing import run_server
from routetrace.v1 import routetrace_pb2 as pb
from support.agents.feeder import Feeder
from support.agents.recorder import Recorder
from support.servers.client_server import rows_of

LAYOUT = ModelLayout((1, 2, 4, 5), 6, 300, 3)
#: (engine, shard, attempt, weight version, source, other trace) of (position, layer).
Cells = dict[tuple[int, int], tuple[str, str, int | None, int, str, str]]


@pytest.fixture(scope="module")
def server():
    with run_server() as process:
        yield process


@pytest.fixture
def client(server, request):
    with RouteClient(server.target, run=request.node.name) as client:
        yield client


@pytest.fixture
def feeder(server, request):
    """Makes agents of the run of the test."""
    made: list[Feeder] = []

    def make(layout: ModelLayout = LAYOUT, **hello) -> Feeder:
        made.append(Feeder(server.target, layout, run=request.node.name, **hello))
        return made[-1]

    yield make
    for one in made:
        one.close()


def cells_of(description: TraceDescription) -> Cells:
    """The origin of each cell; a cell that is in two origins is an error."""
    cells: Cells = {}
    for one in description.origins:
        for position in range(one.start, one.stop):
            for layer in one.layer_ids:
                assert (position, layer) not in cells
                cells[position, layer] = one[3:]
    return cells


def cells(start: int, stop: int, layers=LAYOUT.layer_ids, engine="e0", shard="", attempt=1,
          version=0, source="forward") -> Cells:  # fmt: skip
    origin = engine, shard, attempt, version, source
    return {(p, layer): origin for p in range(start, stop) for layer in layers}


def now() -> float:
    return time.time()


def test_each_row_has_its_shard_attempt_and_weights(feeder, client):
    """Two pipeline stages; the request is preempted, and computed again with newer weights."""
    for shard, layers in (("pp0", (1, 2)), ("pp1", (4, 5))):
        layout = LAYOUT.select(layers)
        stage = feeder(layout, shard=shard)
        handle = stage.begin("r", prompt_len=4)
        stage.set_weight_version(7)
        stage.step(rows_of(layout, 6), [(handle, 0, 6)])
        stage.set_weight_version(8)
        stage.step(rows_of(layout, 2), [(handle, 6, 2)])
        stage.preempt(handle, 7 if shard == "pp0" else 5)
        stage.resume(handle, 0)
        stage.set_weight_version(8 if shard == "pp0" else 9)
        stage.step(rows_of(layout, 9), [(handle, 0, 9)])
        stage.finish(handle, 10)
        stage.flush()
    pp0 = cells(0, 6, (1, 2), shard="pp0", version=7) | cells(6, 7, (1, 2), shard="pp0", version=8)
    pp0 |= cells(7, 9, (1, 2), shard="pp0", version=8, attempt=2)
    pp1 = cells(0, 5, (4, 5), shard="pp1", version=7)
    pp1 |= cells(5, 9, (4, 5), shard="pp1", version=9, attempt=2)
    description = client.describe("r")
    assert cells_of(description) == pp0 | pp1
    assert not description.more_origins
    assert [*description.origins] == sorted(description.origins, key=lambda one: one.start)
    facts = client.describe("r", origins=False)
    assert facts.to_dict() == {**description.to_dict(), "origins": []}
    last = client.describe("r", policy="latest")
    assert cells_of(last) == {
        **cells(0, 9, (1, 2), shard="pp0", version=8, attempt=2),
        **cells(0, 9, (4, 5), shard="pp1", version=9, attempt=2),
    }


def test_rows_of_the_prefix_cache_and_never_of_another_trace(feeder, client):
    prompt = [int(t) for t in np.random.default_rng(3).integers(0, 50_000, 64)]
    first = feeder(engine_id="first", block_size=16, num_blocks=32)
    first.set_weight_version(4)
    handle = first.begin("lender", prompt_len=64, block_ids=range(5), prompt_token_ids=prompt)
    first.step(rows_of(LAYOUT, 70), [(handle, 0, 70)])
    first.finish(handle, 71)
    # The second one has 48 tokens in the prefix cache of the same engine.
    hit = first.begin("hit", prompt_len=64, num_computed_tokens=48, block_ids=[0, 1, 2, 6, 7])
    first.step(rows_of(LAYOUT, 20), [(hit, 48, 20)])
    first.finish(hit, 69)
    first.flush()
    # Another engine loads the KV of 64 tokens from elsewhere.
    second = feeder(engine_id="second", block_size=16, num_blocks=32)
    second.set_weight_version(4)
    loaded = second.begin(
        "borrower",
        prompt_len=66,
        num_computed_tokens=64,
        num_external_tokens=64,
        block_ids=range(5),
        prompt_token_ids=[*prompt, 1, 2],
    )
    second.step(rows_of(LAYOUT, 3), [(loaded, 64, 3)])
    second.finish(loaded, 68)
    second.flush()
    assert cells_of(client.describe("lender")) == cells(0, 70, engine="first", version=4)
    assert cells_of(client.describe("hit")) == {
        **cells(0, 48, engine="first", version=4, source="slot"),
        **cells(48, 68, engine="first", version=4),
    }
    assert cells_of(client.describe("borrower")) == cells(64, 67, engine="second", version=4)


def test_rows_of_an_engine_that_was_handed_a_prompt(feeder, client):
    """Both engines have one weight version, and the rows of one follow those of the other."""
    tokens = [int(t) for t in np.random.default_rng(4).integers(0, 50_000, 70)]
    prefill = feeder(engine_id="prefill")
    handle = prefill.begin("p", trace_id="t", prompt_len=64, prompt_token_ids=tokens[:64])
    prefill.step(rows_of(LAYOUT, 64), [(handle, 0, 64)])
    prefill.finish(handle, 65, reason="handoff", token_ids=tokens[:65], transfer_id="kv")
    prefill.flush()
    decode = feeder(engine_id="decode")
    handle = decode.begin(
        "d",
        trace_id="t",
        prompt_len=64,
        num_computed_tokens=64,
        num_external_tokens=64,
        prompt_token_ids=tokens[:64],
        ends=[65],
        transfer_id="kv",
    )
    decode.step(rows_of(LAYOUT, 5), [(handle, 64, 5)])
    decode.finish(handle, 70, token_ids=tokens)
    decode.flush()
    description = client.describe("t")
    assert cells_of(description) == {
        **cells(0, 64, engine="prefill", source="handoff"),
        **cells(64, 69, engine="decode"),
    }
    assert description.stat.state == "complete"


def test_another_request_with_the_same_tokens_fills_no_layers(feeder, client):
    """One pipeline stage of the first request is missing; the second one had the same prompt."""
    prompt = [int(t) for t in np.random.default_rng(5).integers(0, 50_000, 64)]
    for name, layers, tokens in (("a", (1, 2), 66), ("b", LAYOUT.layer_ids, 68)):
        layout = LAYOUT.select(layers)
        agent = feeder(layout, engine_id=name)
        handle = agent.begin(name, trace_id="t", prompt_len=64, prompt_token_ids=prompt)
        agent.step(rows_of(layout, tokens - 1), [(handle, 0, tokens - 1)])
        agent.finish(handle, tokens)
        agent.flush()
    assert cells_of(client.describe("t", incarnation=1)) == cells(0, 65, (1, 2), engine="a")


def test_incarnations_in_order_of_their_numbers(feeder, client):
    agent = feeder()
    before = now()
    for tokens, reason in ((9, "abort"), (12, "length"), (0, "")):
        handle = agent.begin(f"r{tokens}", trace_id="t", prompt_len=3)
        agent.step(rows_of(LAYOUT, 5), [(handle, 0, 5)])
        if tokens:
            agent.step(rows_of(LAYOUT, tokens - 6), [(handle, 5, tokens - 6)])
            agent.finish(handle, tokens, reason=reason)
        agent.flush()
    described = [client.describe("t", incarnation=n) for n in (None, 1, 3)]
    for description in described:
        assert [
            (one.number, one.state, one.finish_reason, one.num_tokens, one.num_rows)
            for one in description.incarnations
        ] == [
            (1, "complete", "abort", 9, 8),
            (2, "complete", "length", 12, 11),
            (3, "running", None, None, 5),
        ]
        begun = [one.begun_at.timestamp() for one in description.incarnations]
        assert begun == sorted(begun)
        assert before - 0.01 < begun[0] <= begun[-1] < now() + 0.01
    assert [description.stat.incarnation for description in described] == [2, 1, 3]
    running = described[-1]
    assert running.begun_at == running.incarnations[-1].begun_at
    ended = running.sampled_at, running.acknowledged_at, running.readable_at
    assert ended == (None, None, None)


def test_missing_cells_have_no_origin(feeder, client):
    agent = feeder()
    handle = agent.begin("t", prompt_len=3)
    for start, stop in ((0, 4), (9, 12)):
        agent.step(rows_of(LAYOUT, stop - start), [(handle, start, stop - start)])
    agent.finish(handle, 13)
    agent.flush()
    description = client.describe("t")
    assert cells_of(description) == cells(0, 4) | cells(9, 12)
    stat = client.stat("t")
    assert description.stat.missing == stat.missing
    assert description.stat.missing_cells == {"not_captured": 20} == stat.missing_cells
    assert description.stat.to_dict() == {**stat.to_dict(), "token_digests": []}


def test_times_of_two_shards(feeder, client):
    """The engine ended the request five minutes ago; the second shard reports that later."""
    ended_ms = int(1000 * (now() - 300))
    begun = now()
    acknowledged = []
    stages = []
    for shard, layers in (("pp0", (1, 2)), ("pp1", (4, 5))):
        layout = LAYOUT.select(layers)
        stage = feeder(layout, shard=shard)
        handle = stage.begin("r", prompt_len=1)
        stage.step(rows_of(layout, 3), [(handle, 0, 3)])
        stage.flush()
        stages.append((stage, handle))
    for number, (stage, handle) in enumerate(stages):
        assert client.describe("r").readable_at is None
        stage.finish(handle, 4, unix_ms=ended_ms - number)
        sent = now()
        stage.flush()
        acknowledged.append((sent, now()))
    description = client.describe("r")
    times = [
        description.begun_at,
        description.sampled_at,
        description.acknowledged_at,
        description.readable_at,
    ]
    at = [each.timestamp() for each in times]
    assert begun - 0.01 <= at[0] <= acknowledged[0][0] + 0.01
    assert at[1] == ended_ms / 1000
    for seconds, (sent, done) in zip(at[2:], acknowledged, strict=True):
        assert sent - 0.01 <= seconds <= done + 0.01
    assert at[2] < at[3]


def test_a_real_agent_tells_the_end_by_its_clock(server, client):
    """Not the moment at which it is reported: the agent sends nothing before flush()."""
    config = AgentConfig(
        target=server.target,
        engine_id="e0",
        layout=LAYOUT,
        run=client._config.run,
        flush_interval_seconds=30.0,
    )
    with CaptureAgent(config) as agent:
        handle = agent.begin("r", prompt_len=1)
        agent.step(rows_of(LAYOUT, 3), [(handle, 0, 3)])
        times = [now()]
        agent.finish(handle, 4)
        times.append(now())
        assert agent.flush(30)
    description = client.describe("r")
    assert times[0] - 0.01 <= description.sampled_at.timestamp() <= times[1] + 0.01
    assert description.sampled_at <= description.acknowledged_at


def test_a_clock_ahead_of_the_server_does_not_end_a_request_in_the_future(feeder, client):
    agent = feeder()
    for name, unix_ms in (("ahead", int(1000 * now()) + 3_600_000), ("old agent", 0)):
        handle = agent.begin(name, prompt_len=1)
        agent.step(rows_of(LAYOUT, 3), [(handle, 0, 3)])
        agent.finish(handle, 4, unix_ms=unix_ms)
        agent.flush()
    ahead = client.describe("ahead")
    assert ahead.sampled_at == ahead.acknowledged_at
    assert abs(ahead.sampled_at - datetime.now(timezone.utc)).total_seconds() < 60
    old = client.describe("old agent")
    assert old.sampled_at is None
    assert old.acknowledged_at is not None


def test_reads_count_but_those_of_the_web_page(server, feeder, client):
    agent = feeder()
    handle = agent.begin("t", prompt_len=1)
    agent.step(rows_of(LAYOUT, 3), [(handle, 0, 3)])
    agent.finish(handle, 4)
    agent.flush()
    shows = ClientConfig(
        target=server.target,
        run=client._config.run,
        grpc_options={"grpc.primary_user_agent": f"{USER_AGENT}/1"},
    )
    with RouteClient(config=shows) as page:
        page.get("t")
    unread = client.describe("t")
    assert (unread.num_reads, unread.first_read_at, unread.last_read_at) == (0, None, None)
    moments = [now()]
    for read in (
        lambda: client.get("t"),
        lambda: [*client.get_many(["t"])],
        lambda: [*client.follow("t")],
    ):
        read()
        client.stat("t")  # no read of rows
        moments.append(now())
    description = client.describe("t")
    assert description.num_reads == 3
    first, last = description.first_read_at.timestamp(), description.last_read_at.timestamp()
    assert moments[0] - 0.01 <= first <= moments[1] + 0.01
    assert moments[2] - 0.01 <= last <= moments[3] + 0.01


def test_reads_are_not_those_of_an_earlier_trace_with_the_id(feeder, client):
    agent = feeder()
    for count in (2, 1):
        handle = agent.begin("t", prompt_len=1)
        agent.step(rows_of(LAYOUT, 3), [(handle, 0, 3)])
        agent.finish(handle, 4)
        agent.flush()
        assert client.describe("t").num_reads == 0
        for _ in range(count):
            client.get("t")
        assert client.describe("t").num_reads == count
        client.delete("t")


def test_times_and_origins_survive_a_restart(tmp_path):
    with run_server(data_dir=tmp_path) as server:
        agent = Feeder(server.target, LAYOUT)
        handle = agent.begin("t", prompt_len=1)
        agent.step(rows_of(LAYOUT, 3), [(handle, 0, 3)])
        agent.finish(handle, 4, unix_ms=int(1000 * now()) - 5000)
        agent.close()
        with RouteClient(server.target) as client:
            before = client.describe("t")
    with run_server(data_dir=tmp_path) as server, RouteClient(server.target) as client:
        after = client.describe("t")
    assert before.origins == (RowOrigin(0, 3, LAYOUT.layer_ids, "e0", "", 1, 0, "forward"),)
    assert None not in (before.begun_at, before.sampled_at, before.readable_at)
    assert after.to_dict() == before.to_dict()


async def test_times_are_in_snapshots():
    store = MemoryStore()
    core = Core(store, ServerConfig())
    await core.start()
    recorder = Recorder()
    handle = recorder.begin("t", prompt_len=1)
    recorder.step(rows_of(recorder.layout, 3), [(handle, 0, 3)])
    recorder.finish(handle, 4)
    recorder.flush()
    for record in recorder.records:
        apply_record(core.state, core.state.number + 1, record)
    trace = core.state.traces.traces["run", "t"]
    trace.sources[0].sampled, trace.sources[0].reported = 17.25, 18.5
    trace.expires = core.journal.clock.now() + 3600
    core.state.changed(trace)
    number, data = at_once(core.journal.snapshot())
    store.compact((number, data), ())
    await core.stop()
    core = Core(store, ServerConfig())
    await core.start()
    [source] = core.state.traces.traces["run", "t"].sources
    assert (source.sampled, source.reported) == (17.25, 18.5)
    await core.stop()


async def test_an_answer_has_a_limit_of_origins(monkeypatch):
    core = Core(MemoryStore(), ServerConfig())
    await core.start()
    recorder = Recorder()
    handle = recorder.begin("t", prompt_len=1)
    for position in range(6):
        recorder.set_weight_version(position)
        recorder.step(rows_of(recorder.layout, 1), [(handle, position, 1)])
    recorder.finish(handle, 7)
    recorder.flush()
    for record in recorder.records:
        apply_record(core.state, core.state.number + 1, record)
    known = core.reader.find("run", "t")
    whole = core.reader.select(known, 0, 0, ())
    for most, more in ((4, True), (6, False)):
        monkeypatch.setattr(describing, "MAX_ORIGINS", most)
        response = await describing.described(core.reader, known, whole, None, IN_TURNS)
        assert len(response.origins) == most
        assert response.more_origins is more
    await core.stop()


def test_wrong_arguments_and_traces_that_are_not_there(feeder, client):
    feeder().begin("t")
    with pytest.raises(NotFound, match="'unknown'"):
        client.describe("unknown")
    with pytest.raises(InvalidArgument, match="policy"):
        client.describe("t", policy="newest")
    with pytest.raises(InvalidArgument, match="incarnation"):
        client.describe("t", incarnation=0)


def test_an_answer_that_contradicts_itself_is_refused():
    info = pb.TraceInfo(
        trace_id="t", state=pb.TRACE_STATE_COMPLETE, num_rows=3, layout=LAYOUT.to_proto()
    )
    right = pb.RowOrigin(start=0, stop=3)
    source = pb.RowSource(engine_id="e", layer_ids=[1])
    good = pb.DescribeTraceResponse(info=info, sources=[source], origins=[right])
    assert TraceDescription.from_proto(good).origins[0].layer_ids == (1,)
    for wrong in (
        pb.RowOrigin(start=0, stop=4),
        pb.RowOrigin(start=3, stop=3),
        pb.RowOrigin(start=0, stop=3, source=1),
        pb.RowOrigin(start=0, stop=3, choice=1),
    ):
        bad = pb.DescribeTraceResponse(info=info, sources=[source], origins=[wrong])
        with pytest.raises((LookupError, ValueError)):
            TraceDescription.from_proto(bad)
