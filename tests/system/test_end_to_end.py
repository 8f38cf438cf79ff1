"""Agent, server and client together, over sockets, driven by an engine that knows the truth."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from routetrace.capture_agent import AgentConfig, AgentStats, CaptureAgent
from routetrace.client import AsyncRouteClient, RouteClient, Trace, TraceState
from routetrace.common.errors import DeadlineExceeded, Incomplete, InvalidArgument
from routetrace.common.layout import ModelLayout
from routetrace.server.store.disk.store import DiskStore
from routetrace.server.testing import free_ports, run_server
from routetrace.simulation.small_engine import SmallEngine, SmallRequest

LAYOUT = ModelLayout((1, 2, 4), 6, 300, 3)


@pytest.fixture(scope="module")
def server():
    with run_server() as process:
        yield process


def drive(agent: CaptureAgent, seed: int, num_requests: int = 30) -> SmallEngine:
    sim = SmallEngine(agent, LAYOUT, seed, num_blocks=16)
    prompts = [[sim.rng.randrange(4) for _ in range(14)] for _ in range(4)]
    for i in range(num_requests):
        prompt = prompts[i % 4][: sim.rng.randint(1, 14)]
        sim.submit(f"r{i}", prompt, sim.rng.randint(1, 12))
    while sim.step():
        pass
    return sim


def assert_nothing_lost(stats: AgentStats) -> None:
    """Rejected drafts may be dropped before they are sent, and nothing else."""
    assert stats.in_flight_rows == 0
    assert set(stats.dropped_rows) <= {"rewound"}
    assert stats.offered_rows == stats.acknowledged_rows + sum(stats.dropped_rows.values())


def compare(trace: Trace, request: SmallRequest, policy: str) -> int:
    """Compare a trace with the truth, cell by cell; return the cells."""
    truth = request.truth(policy)
    assert trace.num_tokens == len(request.tokens)
    assert trace.topk_ids.shape == (len(request.tokens) - 1, 3, 3)
    assert trace.topk_ids.dtype == np.uint16
    for position in range(len(request.tokens) - 1):
        entry = truth.get(position)
        assert trace.valid[position].all() == (entry is not None)
        if entry is not None:
            np.testing.assert_array_equal(trace.topk_ids[position], entry[0])
            version = next(v for a, b, v in trace.weight_versions if a <= position < b)
            assert version == entry[1]
    return trace.topk_ids.size


@pytest.mark.parametrize("mode", ["thread", "process"])
@pytest.mark.parametrize("seed", range(3))
def test_every_row_of_a_bad_engine_arrives_where_it_belongs(server, mode, seed):
    config = AgentConfig(
        target=server.target,
        run=f"{mode}-{seed}",
        engine_id="e0",
        layout=LAYOUT,
        block_size=4,
        num_blocks=16,
        background=mode,
        # Long enough that most rows linger until somebody needs them.
        linger_seconds=0.2,
        flush_interval_seconds=0.01,
    )
    with CaptureAgent(config) as agent:
        sim = drive(agent, seed)
        assert agent.flush(30)
        stats = agent.stats()
    assert stats.offered_rows == sim.counts["rows"]
    assert_nothing_lost(stats)
    compared = 0
    with RouteClient(server.target, run=f"{mode}-{seed}") as client:
        for policy in ("as_sampled", "latest"):
            names = [r.name for r in sim.done]
            traces = client.get_many(names, concurrency=4, missing="mask", policy=policy)
            for request, trace in zip(sim.done, traces, strict=True):
                compared += compare(trace, request, policy)
                whole = trace.valid.all()
                assert trace.state == (TraceState.COMPLETE if whole else TraceState.INCOMPLETE)
    assert compared > 1000


async def test_the_asynchronous_client_reads_the_same(server):
    config = AgentConfig(
        target=server.target, run="aio", engine_id="e0", layout=LAYOUT, block_size=4, num_blocks=16
    )
    with CaptureAgent(config) as agent:
        sim = drive(agent, 7, 10)
    async with AsyncRouteClient(server.target, run="aio") as client:
        for request in sim.done:
            trace = await client.get(request.name, wait_for="end", timeout=20, missing="mask")
            compare(trace, request, "as_sampled")
        labels = {"sample": sim.done[0].name}
        names = {stat.trace_id async for stat in client.find(labels=labels)}
    assert names == {sim.done[0].name}


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 1, 0, 2)])
def test_samples_that_start_in_one_step_share_what_it_computes(server, order):
    run = f"group {order}"
    config = AgentConfig(
        target=server.target, run=run, engine_id="e0", layout=LAYOUT, block_size=4, num_blocks=16
    )
    rows = np.argsort(np.random.default_rng(0).random((20, 3, 300)))[..., :3]
    with CaptureAgent(config) as agent, RouteClient(server.target, run=run) as client:
        # The first computes the prompt of 9 tokens; the others start on its two full blocks.
        blocks = [0, 1]
        handles = [agent.begin("s0", prompt_len=9, block_ids=[*blocks, 2])]
        cached = {"num_computed_tokens": 8, "prompt_len": 9}
        handles += [agent.begin(f"s{i}", block_ids=[*blocks, 2 + i], **cached) for i in (1, 2, 3)]
        parts = [(rows[:9], (handles[0], 0, 9))]
        parts += [(rows[8 + i : 9 + i], (handles[i], 8, 1)) for i in range(1, 4)]
        agent.step(np.concatenate([parts[i][0] for i in order]), [parts[i][1] for i in order])
        for handle in handles:
            agent.finish(handle, 10)
        for i in range(4):
            trace = client.get(f"s{i}", wait_for="end", timeout=20)
            np.testing.assert_array_equal(trace.topk_ids[:8], rows[:8])
            np.testing.assert_array_equal(trace.topk_ids[8], rows[8 + i])
        assert agent.flush(20)
        assert agent.stats().acknowledged_rows == 12


def test_a_follower_waits_for_a_request_that_is_not_known_yet(server):
    config = AgentConfig(target=server.target, run="early", engine_id="e0", layout=LAYOUT)
    rows = np.argsort(np.random.default_rng(0).random((9, 3, 300)))[..., :3]
    with RouteClient(server.target, run="early") as client:
        parts: list[Trace] = []
        follower = threading.Thread(
            target=lambda: parts.extend(client.follow("r", wait_for="rows", timeout=60))
        )
        follower.start()
        # One that does not wait long ends while the other one is still there.
        with pytest.raises(DeadlineExceeded, match=r"trace 'r' did not begin within 0\.2 s"):
            list(client.follow("r", wait_for="rows", timeout=0.2))
        assert follower.is_alive()
        with CaptureAgent(config) as agent:
            handle = agent.begin("r", prompt_len=9)
            agent.step(rows, [(handle, 0, 9)])
            agent.finish(handle, 10)
        follower.join(60)
    assert parts[-1].state == TraceState.COMPLETE
    np.testing.assert_array_equal(np.concatenate([p.topk_ids for p in parts]), rows)


def test_a_follower_sees_the_rows_of_a_running_request(server):
    config = AgentConfig(
        target=server.target,
        run="follow",
        engine_id="e0",
        layout=LAYOUT,
        linger_seconds=0.02,
        flush_interval_seconds=0.01,
    )
    rows = np.argsort(np.random.default_rng(0).random((40, 3, 300)))[..., :3]
    with CaptureAgent(config) as agent, RouteClient(server.target, run="follow") as client:
        handle = agent.begin("r", prompt_len=40)
        agent.step(rows[:10], [(handle, 0, 10)])
        assert agent.flush(20)
        parts = []
        for part in client.follow("r"):
            parts.append(part)
            done = part.token_stop
            if done < 40:
                agent.step(rows[done : done + 10], [(handle, done, 10)])
            elif part.state == TraceState.RUNNING:
                agent.finish(handle, 41)
        trace = client.get("r", wait_for="end", timeout=20)
    assert (parts[0].token_start, parts[0].token_stop) == (0, 10)
    assert (parts[-1].state, len(parts[-1].topk_ids)) == (TraceState.COMPLETE, 0)
    np.testing.assert_array_equal(np.concatenate([p.topk_ids for p in parts]), rows)
    np.testing.assert_array_equal(trace.topk_ids, rows)


@pytest.mark.parametrize("mode", ["thread", "process"])
def test_a_killed_server_comes_back_and_nothing_is_lost(tmp_path, mode):
    port = free_ports(1)
    config: dict = {"run": "crash", "engine_id": "e0", "layout": LAYOUT, "background": mode}
    config |= {
        "block_size": 4,
        "num_blocks": 16,
        "linger_seconds": 0.05,
        "flush_interval_seconds": 0.01,
    }
    with run_server(data_dir=tmp_path, port=port) as first:
        target = first.target
        with CaptureAgent(AgentConfig(target=target, **config)) as agent:
            sim = SmallEngine(agent, LAYOUT, 5, num_blocks=16)
            for i in range(20):
                sim.submit(f"r{i}", [sim.rng.randrange(4) for _ in range(9)], 12)
            for _ in range(25):
                sim.step()
            first.kill()
            for _ in range(10):
                sim.step()
            with run_server(data_dir=tmp_path, port=port):
                while sim.step():
                    pass
                assert agent.flush(60)
                stats = agent.stats()
                assert stats.offered_rows == sim.counts["rows"]
                assert_nothing_lost(stats)
                with RouteClient(target, run="crash") as client:
                    for request in sim.done:
                        trace = client.get(request.name, missing="mask")
                        compare(trace, request, "as_sampled")


def test_rows_whose_record_is_gone_are_missing_and_named(tmp_path):
    config: dict = {"run": "gone", "engine_id": "e0", "layout": LAYOUT, "background": "thread"}
    rows = np.argsort(np.random.default_rng(0).random((20, 3, 300)))[..., :3]
    with (
        run_server(data_dir=tmp_path) as server,
        CaptureAgent(AgentConfig(target=server.target, **config)) as agent,
    ):
        handle = agent.begin("r")
        for at in (0, 10):
            agent.step(rows[at : at + 10], [(handle, at, 10)])
            assert agent.flush(20)
        agent.finish(handle, 21)
    store = DiskStore(tmp_path, capacity_bytes=1 << 30, ack_mode="fsync")
    numbers = [number for number, _ in store.headers()]
    store.compact(None, [numbers[1]])  # the first chunk, behind the record of the epoch
    store.close()
    with run_server(data_dir=tmp_path) as server, RouteClient(server.target, run="gone") as client:
        with pytest.raises(Incomplete, match="corrupt"):
            client.get("r")
        trace = client.get("r", missing="mask")
        whole = trace.valid.all(axis=1)
        assert whole.any()
        assert not whole.all()
        np.testing.assert_array_equal(trace.topk_ids[whole], rows[whole])
        assert {m.reason for m in trace.missing} == {"corrupt"}


@pytest.mark.parametrize("mode", ["thread", "process"])
def test_rows_that_no_router_chose_are_missing_and_the_others_go_on(server, mode):
    config = AgentConfig(
        target=server.target, run=f"bad-{mode}", engine_id="e0", layout=LAYOUT, background=mode
    )
    rows = np.argsort(np.random.default_rng(0).random((12, 3, 300)))[..., :3]
    bad = rows.copy()
    bad[3, 1, 2] = 300  # an id out of range
    bad[4, 0, 1] = bad[4, 0, 0]  # an id twice
    bad[7] = -1  # a buffer that nobody wrote to
    with CaptureAgent(config) as agent:
        good, other = agent.begin("good"), agent.begin("other")
        for wrong, field in (
            (rows[:, :2], "rows"),
            (rows[..., :2], "rows"),
            (rows.astype(np.float32), "rows"),
        ):
            with pytest.raises(InvalidArgument) as caught:
                agent.step(wrong, [(good, 0, 12)])
            assert caught.value.field == field
        both = np.concatenate([rows, bad])
        agent.step(both, [(good, 0, 12), (other, 0, 12)])
        agent.finish(good, 13)
        agent.finish(other, 13)
        assert agent.flush(20)
        stats = agent.stats()
    assert stats.dropped_rows == {"invalid_ids": 3}
    assert stats.offered_rows == stats.acknowledged_rows + 3
    with RouteClient(server.target, run=f"bad-{mode}") as client:
        np.testing.assert_array_equal(client.get("good").topk_ids, rows)
        trace = client.get("other", missing="mask")
        with pytest.raises(Incomplete, match="invalid_ids"):
            client.get("other")
    assert trace.state == TraceState.INCOMPLETE
    assert [(m.start, m.stop, m.reason) for m in trace.missing] == [
        (3, 5, "invalid_ids"),
        (7, 8, "invalid_ids"),
    ]
    valid = trace.valid.all(axis=1)
    np.testing.assert_array_equal(trace.topk_ids[valid], rows[valid])
