"""An agent whose server is slow, gone, full or another one."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import numpy as np
import pytest

from routetrace.capture_agent import CaptureAgent, link
from routetrace.capture_agent.transport import stream
from routetrace.capture_agent.worker import Worker
from routetrace.common.errors import (
    Fenced,
    Overloaded,
    Unavailable,
)
from routetrace.simulation.small_engine import SmallEngine
from routetrace.v1 import routetrace_pb2 as pb
from support.agents.checked import BIG, FULL, LAYOUT, MODES, assert_kept, config_for, make_rows
from support.servers.ingest_server import IngestServer
from support.waiting import keeps_to, wait_for


def simulate(agent: CaptureAgent, seed: int, until=lambda sim: False) -> SmallEngine:
    """An engine with prefix caching, preemption and rejected drafts, until its work is done."""
    sim = SmallEngine(agent, LAYOUT, seed, num_blocks=24)
    for i in range(14):
        prompt = [sim.rng.randrange(3) for _ in range(sim.rng.randint(1, 14))]
        sim.submit(f"r{i}", prompt, sim.rng.randint(1, 10))
    while not until(sim) and sim.step():
        pass
    return sim


def assert_truth(server: IngestServer, sim: SmallEngine) -> None:
    assert {r.request_id for r in server.model.requests} == {r.name for r in sim.done}
    for request in sim.done:
        attempt = server.model.request(request.name).attempts[-1]
        rows = {**attempt.cached, **attempt.rows}
        truth = {
            p: entry and (entry[0].tobytes(), entry[1])
            for p, entry in request.attempts[-1].items()
            if p < len(request.tokens) - 1
        }
        assert rows == truth


def test_a_stream_that_breaks_again_and_again_loses_and_repeats_nothing(server):
    seen: list[int] = []

    def script(chunk: pb.Chunk):
        seen.append(chunk.sequence)
        if len(seen) % 3 == 0:
            return Unavailable("draining", retry_after=0.01)
        return pb.ErrorDetail(retry_after_ms=5) if len(seen) % 5 == 0 else None

    server.script = script
    config = config_for(
        server, block_size=4, num_blocks=24, flush_interval_seconds=0.001, linger_seconds=0
    )
    with CaptureAgent(config) as agent:
        sim = simulate(agent, 1, lambda sim: agent.flush(0.02) and False)
        assert agent.flush(20)
        stats = agent.stats()
    assert_kept(stats, **stats.dropped_rows)
    assert set(stats.dropped_rows) <= {"rewound"}
    assert stats.reconnects > 2
    assert len(seen) > len(server.chunks)
    assert_truth(server, sim)


def test_a_server_that_comes_late_and_goes_away(server):
    """Chunks that were stored but not acknowledged are not stored twice."""
    server.stop()
    config = config_for(server, block_size=4, num_blocks=24)
    with CaptureAgent(config) as agent:
        sim = simulate(agent, 2, lambda sim: len(sim.done) == 5)
        assert not agent.flush(0.05)
        assert agent.stats().in_flight_rows > 0
        server.start()
        assert agent.flush(20)
        server.stop()
        while sim.step():
            pass
        server.start()
        assert agent.flush(20)
        assert_truth(server, sim)
        assert agent.stats().in_flight_rows == 0


def test_a_server_that_lost_everything_is_told_who_lives(server):
    rows = make_rows(60)
    config = config_for(server, block_size=4, num_blocks=24, linger_seconds=0)
    with CaptureAgent(config) as agent:
        a = agent.begin("a", labels={"x": "y"}, prompt_len=20, block_ids=[0, 1])
        agent.add_blocks(a, [2, 3, 4])
        over = agent.begin("over")
        b = agent.begin("b", prompt_len=70, prompt_token_ids=range(70))
        agent.step(rows[:24], [(a, 0, 10), (b, 0, 10), (over, 0, 4)])
        agent.finish(over, 5)
        agent.preempt(b, 10)
        assert agent.flush(20)
        old = server.epoch
        server.stop()
        agent.add_blocks(a, [5])
        agent.step(rows[30:40], [(a, 10, 10)])
        c = agent.begin("c", num_computed_tokens=20, block_ids=[0, 1, 2, 3, 4])
        agent.step(rows[40:45], [(c, 20, 5)])
        server.forget()
        server.start()
        agent.resume(b, 0, block_ids=[7, 8])
        agent.step(rows[50:60], [(b, 0, 10)])
        agent.finish(a, 21)
        assert agent.flush(20)
        assert_kept(agent.stats())
    assert server.epoch != old
    model = server.model
    assert [r.request_id for r in model.requests] == ["a", "b", "c"]
    again, resumed, fresh = model.requests
    assert again.facts.labels == {"x": "y"}
    assert again.lost == [(0, 10, pb.MISSING_REASON_AGENT_LOST)]
    assert {p: row[0] for p, row in again.attempts[0].rows.items()} == {
        p: rows[20 + p].tobytes() for p in range(10, 20)
    }
    assert (again.num_tokens, resumed.num_tokens) == (21, -1)
    # As the other shards of the engine know them.
    assert [r.index for r in model.requests] == [0, 2, 3]
    assert set(resumed.digests) == {64, 70}
    # What it reuses of a was computed before, and after.
    assert [fresh.row(p) is not None for p in range(25)] == [False] * 10 + [True] * 15
    assert [resumed.row(p) for p in range(10)] == [r.tobytes() for r in rows[50:60]]


def test_a_server_whose_store_went_back_in_time(server):
    """As one that acknowledges from memory: what it forgot is gone, and what follows is not."""
    rows = make_rows(30)
    with CaptureAgent(config_for(server, linger_seconds=0)) as agent:
        handle = agent.begin("a")
        for p in range(0, 20, 10):
            agent.step(rows[p : p + 10], [(handle, p, 10)])
            assert agent.flush(20)
        server.stop()
        with server.changed:
            server.chunks.pop()
            server.next_sequence -= 1
        server.start()
        agent.step(rows[20:30], [(handle, 20, 10)])
        assert agent.flush(20)
    request = server.model.request("a")
    assert set(request.attempts[0].rows) == set(range(20, 30))
    assert (0, 20, pb.MISSING_REASON_AGENT_LOST) in request.lost


def test_a_refused_chunk_is_replaced_by_one_without_rows(server):
    rows = make_rows(30)
    refused: list[int] = []

    def script(chunk: pb.Chunk):
        if chunk.payload and not refused:
            refused.append(chunk.sequence)
            return pb.ErrorDetail(kind=pb.ERROR_KIND_INVALID_ARGUMENT, message="do not like it")
        return None

    server.script = script
    config = config_for(server, block_size=4, num_blocks=24)
    with CaptureAgent(config) as agent:
        handle = agent.begin("a", block_ids=[0, 1, 2, 3])
        agent.step(rows[:10], [(handle, 0, 10)])
        agent.step_slots(rows[10:20], np.arange(40, 50))
        assert agent.flush(20)
        agent.step(rows[20:], [(handle, 10, 10)])
        agent.finish(handle, 21)
        assert agent.flush(20)
        assert refused
        assert_kept(agent.stats(), rejected=20)
    request = server.model.request("a")
    assert request.lost_positions(pb.MISSING_REASON_REJECTED) == set(range(10))
    assert set(request.attempts[0].rows) == set(range(10, 20))
    assert set(server.model.slots) == {10, 11, 12, 13, 14, 15} & set(server.model.slots)


def test_a_server_that_refuses_everything_ends_the_agent(server):
    server.script = lambda chunk: pb.ErrorDetail(kind=pb.ERROR_KIND_INVALID_ARGUMENT)

    def close() -> float:
        with CaptureAgent(config_for(server)) as agent:
            handle = agent.begin("a")
            agent.step(make_rows(10), [(handle, 0, 10)])
            assert not agent.flush(20)
            agent.step(make_rows(10), [(handle, 10, 10)])
            assert_kept(agent.stats(), rejected=20)
            started = time.monotonic()
            assert agent.close().dropped_rows == {"rejected": 20}
            return time.monotonic() - started

    keeps_to(5, close)


@pytest.mark.parametrize("silent", ["twice", "one of two"])
def test_a_server_that_does_not_answer_the_hello_is_called_again(
    silent, server, monkeypatch, caplog
):
    monkeypatch.setattr(stream, "WELCOME_S", 0.3)
    held = threading.Event()
    hellos: list[str] = []
    unanswered = 1 if silent == "one of two" else 2

    def admit(hello, _):
        hellos.append(hello.engine_id)
        if len(hellos) == unanswered:  # the next call may take as long as a busy machine needs
            monkeypatch.setattr(stream, "WELCOME_S", 60)
        if silent == "one of two" or len(hellos) <= unanswered:
            held.wait(60)

    server.admit = admit
    with IngestServer() as other:
        targets = server.target + (f",{other.target}" if silent == "one of two" else "")
        config = replace(config_for(server), target=targets)
        with CaptureAgent(config) as agent:
            handle = agent.begin("a")
            agent.step(make_rows(10), [(handle, 0, 10)])
            agent.finish(handle, 11)
            assert agent.flush(30)
            assert_kept(agent.stats())
        held.set()
        model = (other if silent == "one of two" else server).model
        assert set(model.request("a").attempts[0].rows) == set(range(10))
        # More, if the last of these came so late that the next call had begun.
        assert len(hellos) >= (1 if silent == "one of two" else 3)
        assert caplog.text.count("no answer from") == 1
    server.stop()


def test_an_overloaded_server_gets_the_same_chunks_later(server):
    tries: list[bytes] = []

    def script(chunk: pb.Chunk):
        tries.append(chunk.SerializeToString())
        busy = Overloaded("busy", retry_after=0.02).to_detail()
        return busy if len(tries) < 4 else None

    server.script = script
    with CaptureAgent(config_for(server)) as agent:
        handle = agent.begin("a")
        agent.step(make_rows(10), [(handle, 0, 10)])
        assert agent.flush(20)
        assert_kept(agent.stats())
    assert len(set(tries[:4])) == 1


@MODES
def test_a_newer_epoch_ends_the_agent(server, mode):
    with CaptureAgent(config_for(server, background=mode)) as agent:
        handle = agent.begin("a")
        agent.step(make_rows(10), [(handle, 0, 10)])
        assert agent.flush(20)
        server.script = lambda chunk: Fenced(field="epoch", value=1, expected="2")
        agent.step(make_rows(10), [(handle, 10, 10)])
        assert not agent.flush(20)
        agent.step(make_rows(10), [(handle, 20, 10)])
        agent.finish(handle, 31)
        assert_kept(agent.stats(), fenced=20)
        report = agent.close()
    assert (report.acknowledged_rows, report.dropped_rows) == (10, {"fenced": 20})


@MODES
@pytest.mark.parametrize("waits", [True, False])
def test_an_agent_sends_after_the_end_of_the_one_that_it_replaces(server, mode, waits):
    """Else the older agent, where it connects last, would end the newer one."""
    refused: list[str] = []

    def admit(hello: pb.Hello, _):
        if hello.boot_id != "before" or len(refused) == 5:
            return None
        refused.append(hello.boot_id)
        return Overloaded("busy", retry_after=0.01)

    server.admit = admit
    sent: list[tuple[str, bool]] = []  # the boot, and whether the agent was closed
    server.script = lambda chunk: sent.append(
        (server.hello.boot_id, pb.ChunkHeader.FromString(chunk.header).closed)
    )
    agents: list[CaptureAgent] = []
    for name in ("before", "after"):
        config = config_for(server, background=mode, boot_id=name, close_timeout_seconds=60)
        agents.append(CaptureAgent(config, predecessor=agents[0] if agents else None))
        handle = agents[-1].begin(name)
        agents[-1].step(make_rows(10), [(handle, 0, 10)])
        agents[-1].finish(handle, 11)
    if waits:
        assert agents[1].flush(60)
    reports = [agent.close() for agent in reversed(agents)]
    rows = [(report.acknowledged_rows, report.dropped_rows) for report in reports]
    assert rows == [(10, {}), (10, {})]
    # One that is replaced is not closed: its engine goes on.
    assert sent[-1] == ("after", True)
    assert [boot for boot, closed in sent if closed] == ["after"]
    assert [*dict.fromkeys(boot for boot, _ in sent)] == ["before", "after"]
    assert (len(refused), server.welcomes) == (5, 2)


def test_an_agent_goes_on_from_the_count_of_the_one_that_it_replaces(server):
    """By it the server joins the shards of a boot, and knows what it has deleted."""
    agent, seen = None, []
    for number, boot_id in enumerate(("one", "one", "other")):
        agent = CaptureAgent(config_for(server, boot_id=boot_id), predecessor=agent)
        for name in "ab":
            agent.finish(agent.begin(f"{name}{number}"), 1)
        assert agent.flush(60)
        seen.append([r.index for r in server.model.requests])
    assert seen == [[0, 1], [2, 3], [0, 1]]
    for name, index in (("missed", 5), ("late", 4), ("counted", None)):
        agent.finish(agent.begin(name, index=index), 1)
    assert agent.flush(60)
    agent.close()
    assert [r.index for r in server.model.requests] == [0, 1, 5, 4, 6]


def test_memory_is_bounded_and_whole_requests_go_newest_first(server):
    server.stop()
    config = config_for(server, BIG, queue_bytes=1 << 20, frame_rows=64, linger_seconds=5)
    rows = make_rows(50, BIG)
    with CaptureAgent(config) as agent:
        first = agent.begin("first")
        agent.step(rows, [(first, 0, 50)])
        handles = []
        for i in range(150):
            handles.append(agent.begin(f"r{i}"))
            agent.step(rows, [(handles[-1], 0, 50)])
        agent.flush(0)
        wait_for(lambda: agent.stats().dropped_rows.get("queue_full", 0) > 50 * 50)
        agent.step(rows, [(first, 50, 50)])
        for handle in handles:
            agent.finish(handle, 51)
        agent.finish(first, 101)
        agent.flush(0)
        server.start()
        assert agent.flush(20)
        stats = agent.stats()
    requests = server.model.requests
    whole = [len(r.attempts[0].rows) == 50 for r in requests[1:]]
    told = [r.lost == [(0, 0, FULL)] for r in requests[1:]]
    assert all(a != b for a, b in zip(whole, told, strict=True))
    assert len(requests) == 151
    assert 10 < sum(whole) < 100
    dropped = 50 * sum(told) + (0 if len(requests[0].attempts[0].rows) == 100 else 50)
    assert_kept(stats, queue_full=dropped)


def test_even_events_are_bounded_while_the_server_is_away(server, monkeypatch):
    """Unreported rows leave slots unknown and count as dropped."""
    workers = []

    class Watched(Worker):
        def __init__(self, *args):
            super().__init__(*args)
            workers.append(self)

    monkeypatch.setattr(link, "Worker", Watched)
    rows = make_rows(30)
    config = config_for(server, queue_bytes=1 << 20, block_size=4, num_blocks=64)
    with CaptureAgent(config) as agent:
        kept = agent.begin("kept", block_ids=[0, 1, 2])
        agent.step(rows[:10], [(kept, 0, 10)])
        assert agent.flush(20)
        server.stop()
        for i in range(3000):
            # Computes into the block that was written for "kept".
            handle = agent.begin(f"r{i}", labels={"x": "y" * 1000}, block_ids=[0])
            agent.step(rows[20:24], [(handle, 0, 4)])
            agent.finish(handle, 5)
        ring = agent._link.ring
        wait_for(lambda: ring.read == ring.written)
        assert 0.9 * (1 << 20) < workers[0]._held() < 1.1 * (1 << 20)
        assert not agent.flush(0.5)
        server.start()
        assert agent.flush(20)
        agent.step(rows[10:12], [(kept, 10, 2)])
        late = agent.begin("late", num_computed_tokens=8, block_ids=[0, 1])
        agent.finish(late, 10)
        assert agent.flush(20)
        stats = agent.stats()
    *told, _ = server.model.requests
    assert len(told) < 1500
    assert len(told) + stats.unreported_requests == 3001
    assert all(len(r.attempts[0].rows) >= 4 or r.lost == [(0, 0, FULL)] for r in told)
    late_request = server.model.request("late")
    # The last agent that was named wrote the first block, if it was named after all were forgotten.
    assert all(late_request.row(p) in (None, rows[20 + p].tobytes()) for p in range(4))
    assert [late_request.row(p) for p in range(4, 8)] == [None] * 4
    assert_kept(stats, queue_full=stats.dropped_rows["queue_full"])


def test_a_chunk_is_never_larger_than_the_server_takes():
    with IngestServer(max_chunk_bytes=5000) as server:
        config = config_for(server, BIG)
        with CaptureAgent(config) as agent:
            handle = agent.begin("a")
            assert agent.flush(20)  # has heard of it
            agent.step(make_rows(600, BIG), [(handle, 0, 600)])
            assert agent.flush(20)
            assert_kept(agent.stats())
        assert len(server.chunks) > 30
