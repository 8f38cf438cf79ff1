"""The background of an agent is killed: what readers get of requests before, during and after."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from routetrace.capture_agent import AgentConfig, CaptureAgent
from routetrace.client import RouteClient, Trace, TraceState
from routetrace.common.errors import NotFound
from routetrace.common.layout import ModelLayout
from routetrace.server.testing import ServerProcess, run_server
from support.scrape import Scraped
from support.servers.client_server import rows_of
from support.waiting import wait_for

LAYOUT = ModelLayout((1, 2, 4), 6, 40, 3)
BLOCK = 4


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with run_server(metrics_listen="127.0.0.1:0", heartbeat_seconds=0.1) as process:
        yield process


#: Calls and rows stay in the background until a flush.
HOLDS = {"flush_interval_seconds": 60, "linger_seconds": 60}


@contextmanager
def agent_of(server: ServerProcess, run: str, **settings: Any) -> Iterator[CaptureAgent]:
    settings = {
        "layout": LAYOUT,
        "block_size": BLOCK,
        "num_blocks": 32,
        "flush_interval_seconds": 0.01,
        "linger_seconds": 0.01,
        **settings,
    }
    with CaptureAgent(AgentConfig(server.target, "e", run=run, **settings)) as agent:
        yield agent


def taken(agent: CaptureAgent) -> None:
    """Wait until the background has taken all calls out of the ring."""
    ring = agent._link.ring
    wait_for(lambda: ring.read == ring.written)


def kill(agent: CaptureAgent) -> None:
    """Kill the background, and wait until another one runs."""
    pid = agent.worker_pid
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: agent.worker_pid != pid)


def whole(agent: CaptureAgent, name: str, rows: np.ndarray, **facts: object) -> None:
    handle = agent.begin(name, prompt_len=1, **facts)  # type: ignore[arg-type]
    agent.step(rows, [(handle, 0, len(rows))])
    agent.finish(handle, len(rows) + 1)


def assert_whole(trace: Trace, rows: np.ndarray) -> None:
    assert trace.state is TraceState.COMPLETE
    assert np.array_equal(trace.topk_ids, rows)


def reasons(trace: Trace) -> dict[str, set[int]]:
    found: dict[str, set[int]] = {}
    for gap in trace.missing:
        found.setdefault(gap.reason, set()).update(range(gap.start, gap.stop))
    return found


def test_what_had_ended_stays_what_ran_is_incomplete_and_what_comes_later_is_whole(server):
    rows = rows_of(LAYOUT, 60)
    with RouteClient(server.target, run="ran") as client, agent_of(server, "ran") as agent:
        whole(agent, "ended", rows[:8], block_ids=[0, 1])
        live = agent.begin("live", prompt_len=1, block_ids=[2, 3, 4])
        agent.step(rows[8:16], [(live, 0, 8)])
        assert agent.flush(30)
        assert client.stat("live").state is TraceState.RUNNING
        # Whoever waits for its end learns at once that it does not come.
        kill(agent)
        trace = client.get("live", wait_for="end", timeout=60, token_stop=12, missing="mask")
        assert trace.state is TraceState.INCOMPLETE
        # Calls that were lost may have taken back any of its rows.
        assert reasons(trace) == {"agent_lost": set(range(12))}
        assert not trace.valid.any()
        agent.step(rows[16:17], [(live, 8, 1)])
        # The cache has KV of before, of which no slot is known any more.
        hit = agent.begin("hit", prompt_len=9, num_computed_tokens=8, block_ids=[0, 1, 5])
        agent.step(rows[20:23], [(hit, 8, 2), (live, 9, 1)])
        whole(agent, "later", rows[30:40], block_ids=[6, 7, 8])
        again = agent.begin("again", prompt_len=9, num_computed_tokens=8, block_ids=[6, 7, 9])
        agent.step(rows[40:42], [(again, 8, 2)])
        for handle in (hit, again):
            agent.finish(handle, 11)
        agent.finish(live, 11)
        assert agent.flush(30)
        assert_whole(client.get("ended"), rows[:8])
        assert_whole(client.get("later"), rows[30:40])
        assert_whole(client.get("again"), np.concatenate([rows[30:38], rows[40:42]]))
        trace = client.get("hit", missing="mask")
        assert reasons(trace) == {"kv_unknown": set(range(8))}
        assert np.array_equal(trace.topk_ids[8:], rows[20:22])
        assert client.get("live", token_stop=12, missing="mask").state is TraceState.INCOMPLETE
        stats = agent.stats()
        assert (stats.in_flight_rows, stats.dropped_rows) == (0, {"agent_lost": 2})

        def counted() -> bool:
            lost = {"run": "ran", "engine_id": "e", "shard": "", "reason": "agent_lost"}
            metrics = Scraped(server.metrics_target)
            restarts = metrics.value("routetrace_agents_restarted_total", run="ran")
            return (restarts, metrics.value("routetrace_agent_dropped_rows", **lost)) == (1, 2)

        wait_for(counted)


def test_rows_that_a_lost_call_took_back_are_not_served(server):
    """The engine computed other rows in their place, of which the server never hears."""
    rows = rows_of(LAYOUT, 40)
    with (
        RouteClient(server.target, run="back") as client,
        agent_of(server, "back", **HOLDS) as agent,
    ):
        live = agent.begin("live", prompt_len=1)
        agent.step(rows[:10], [(live, 0, 10)])
        assert agent.flush(30)
        agent.preempt(live, 0)
        agent.resume(live, 0)
        agent.step(rows[20:30], [(live, 0, 10)])
        taken(agent)
        kill(agent)
        agent.finish(live, 11)
        whole(agent, "later", rows[30:40])
        assert agent.flush(30)
        trace = client.get("live", token_stop=10, wait_for="end", timeout=60, missing="mask")
        assert reasons(trace) == {"agent_lost": set(range(10))}
        assert agent.stats().dropped_rows == {"agent_lost": 10}


def test_a_request_whose_begin_was_lost_gets_no_row(server):
    rows = rows_of(LAYOUT, 40)
    with RouteClient(server.target, run="begin") as client:
        with agent_of(server, "begin", **HOLDS) as agent:
            live = agent.begin("live", prompt_len=1)
            agent.step(rows[:10], [(live, 0, 10)])
            taken(agent)
            kill(agent)
            agent.step(rows[10:12], [(live, 10, 2)])
            agent.finish(live, 13)
            whole(agent, "later", rows[20:30])
            assert agent.flush(30)
            assert agent.stats().dropped_rows == {"agent_lost": 12}
        assert_whole(client.get("later"), rows[20:30])
        with pytest.raises(NotFound):
            client.get("live")


def test_a_shard_whose_background_dies_joins_the_others_again(server):
    """Layers of the other shard stay; later requests are whole."""
    rows = rows_of(LAYOUT, 40)
    with RouteClient(server.target, run="shards") as client:
        shards = [
            agent_of(
                server, "shards", shard=f"pp{i}", boot_id="b", layout=LAYOUT.select(ids), **HOLDS
            )
            for i, ids in enumerate(([1, 2], [4]))
        ]
        with shards[0] as first, shards[1] as second:
            both = (first, second)

            def begin(name: str) -> dict[CaptureAgent, int]:
                return {agent: agent.begin(name, prompt_len=1) for agent in both}

            def step(handles: dict[CaptureAgent, int], some: np.ndarray, position: int) -> None:
                for agent, columns in zip(both, ([0, 1], [2]), strict=True):
                    part = np.ascontiguousarray(some[:, columns])
                    agent.step(part, [(handles[agent], position, len(some))])

            def end(handles: dict[CaptureAgent, int], num_tokens: int) -> None:
                for agent in both:
                    agent.finish(handles[agent], num_tokens)

            live = begin("live")
            step(live, rows[:6], 0)
            assert all(agent.flush(30) for agent in both)
            # The second shard loses this one whole.
            gone = begin("gone")
            step(gone, rows[10:16], 0)
            end(gone, 7)
            taken(second)
            kill(second)
            later = begin("later")
            step(live, rows[6:8], 6)
            step(later, rows[20:26], 0)
            end(live, 9)
            end(later, 7)
            assert all(agent.flush(30) for agent in both)
            assert_whole(client.get("later", wait_for="end", timeout=60), rows[20:26])
            trace = client.get("live", wait_for="end", timeout=60, missing="mask")
            assert trace.state is TraceState.INCOMPLETE
            assert {(m.reason, tuple(m.layer_ids)) for m in trace.missing} == {("agent_lost", (4,))}
            assert np.array_equal(trace.topk_ids[:, :2], rows[:8, :2])
            assert not trace.valid[:, 2].any()
            trace = client.get("gone", missing="mask")
            assert trace.state is not TraceState.COMPLETE
            assert np.array_equal(trace.topk_ids[:, :2], rows[10:16, :2])
            assert 4 not in trace.layer_ids or not trace.valid[:, 2].any()
