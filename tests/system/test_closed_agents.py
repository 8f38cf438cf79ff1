"""Agents that were closed: their state, and the requests for which finish() was never called."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from routetrace.capture_agent import AgentConfig, CaptureAgent
from routetrace.client import (
    AgentState,
    FinishReason,
    Incomplete,
    RouteClient,
    TraceState,
)
from routetrace.codec.records import OpKind
from routetrace.common.layout import ModelLayout
from routetrace.server.testing import ServerProcess, run_server
from routetrace.v1 import routetrace_pb2 as pb
from support.agents.feeder import Feeder
from support.agents.prefill_decode import reasons
from support.commands import commands
from support.reads import Reads
from support.scrape import Scraped
from support.servers.client_server import LAYOUT, rows_of
from support.waiting import wait_for

#: No read of this module waits as long as a silent agent counts as present [s].
AGENT_TIMEOUT_S = 1000
LAYERS = len(LAYOUT.layer_ids)


def serve(**settings) -> ServerProcess:
    return run_server(
        agent_timeout_seconds=AGENT_TIMEOUT_S, metrics_listen="127.0.0.1:0", **settings
    )


@pytest.fixture(scope="module")
def server():
    with serve() as process:
        yield process


def agent_of(server: ServerProcess, run: str, layout: ModelLayout = LAYOUT, **more) -> CaptureAgent:
    config = {"target": server.target, "run": run, "engine_id": "e", "layout": layout, **more}
    return CaptureAgent(AgentConfig(**config))


def feed(agent: CaptureAgent, name: str, prompt_len: int = 30) -> int:
    handle = agent.begin(name, prompt_len=prompt_len)
    agent.step(rows_of(LAYOUT, 30), [(handle, 0, 30)])
    return handle


def states(client: RouteClient) -> dict[str, str]:
    return {f"{agent.engine_id}{agent.shard}": agent.state for agent in client.agents()}


def reads_of(server: ServerProcess) -> float:
    """Reads under way; the stream of a watcher counts as several."""
    return Scraped(server.metrics_target).value("routetrace_reads")


def ended(client: RouteClient, name: str) -> None:
    """Check a trace of 30 rows whose agent was closed."""
    read = client.get(name, wait_for="end", missing="mask")
    assert (read.state, read.finish_reason) == (TraceState.INCOMPLETE, FinishReason.CLOSED)
    assert (read.num_tokens, read.num_rows, read.missing) == (None, 30, ())
    [listed] = [stat for stat in client.find() if stat.trace_id == name]
    assert (listed.state, listed.finish_reason) == (read.state, read.finish_reason)


def test_an_agent_is_closed_until_another_one_connects(server):
    with RouteClient(server.target, run="states") as client:
        agent = agent_of(server, "states")
        agent.finish(feed(agent, "r0"), 31)
        assert agent.flush(20)
        assert states(client) == {"e": AgentState.CONNECTED}
        agent.close()
        assert states(client) == {"e": "closed"}
        [found] = client.agents()
        assert not found.connected
        assert found.to_dict()["state"] == "closed"
        assert client.server_info().num_agents == 0
        with agent_of(server, "states") as again:
            feed(again, "r1")
            assert again.flush(20)
            assert states(client) == {"e": "connected"}


def test_an_agent_that_was_killed_is_gone(server):
    with RouteClient(server.target, run="killed") as client:
        agent = agent_of(server, "killed", background="process")
        feed(agent, "r0")
        assert agent.flush(20)
        os.kill(agent.worker_pid, signal.SIGSTOP)  # and killed, as close() runs out of time
        agent.close(timeout=0.5)
        wait_for(lambda: states(client) == {"e": AgentState.GONE})
        assert client.stat("r0").state is TraceState.RUNNING


def test_an_agent_of_the_version_before_is_gone(server):
    """It has no way to say that it was closed."""
    feeder = Feeder(server.target, LAYOUT, run="before")
    handle = feeder.begin("r0")
    feeder.step(rows_of(LAYOUT, 3), [(handle, 0, 3)])
    feeder.chunk.op(OpKind.LOST, "r0", position=3, arg=pb.MISSING_REASON_AGENT_LOST)
    feeder.close()
    with RouteClient(server.target, run="before") as client:
        wait_for(lambda: states(client) == {"e0": "gone"})
        assert client.stat("r0").state is TraceState.RUNNING


def _get(client: RouteClient) -> object:
    with pytest.raises(Incomplete) as caught:
        client.get("r0", wait_for="end", timeout=25)
    return caught.value.unknown_from, str(caught.value)


def _watched(client: RouteClient) -> object:
    for changes in client.watch():
        for one in changes.traces:
            if one.state is TraceState.INCOMPLETE:
                return one.finish_reason
    raise AssertionError("the stream ended")


WAITS: dict[str, tuple[Callable[[RouteClient], object], object]] = {
    "get": (
        _get,
        (
            30,
            "trace 'r0' has no reported end, as its agent was closed and finish() was never called "
            "for it: rows from 30 on are unknown; call finish() for each request before close(), "
            'or use missing="mask"',
        ),
    ),
    "rows": (
        lambda client: [
            (m.start, m.stop, m.reason)
            for m in client.get(
                "r0", token_stop=40, wait_for="rows", missing="mask", timeout=25
            ).missing
        ],
        [(30, 40, "agent_closed")],
    ),
    "follow": (
        lambda client: [*client.follow("r0", missing="mask")][-1].finish_reason,
        FinishReason.CLOSED,
    ),
    "watch": (_watched, FinishReason.CLOSED),
}


def test_who_waits_for_a_request_of_a_closed_agent_learns_at_once_that_it_has_no_end(server):
    agent = agent_of(server, "waits")
    feed(agent, "r0")
    assert agent.flush(20)
    with ThreadPoolExecutor() as threads, RouteClient(server.target, run="waits") as client:
        waits, reads = {}, 0.0
        try:
            for name, (call, _) in WAITS.items():
                waits[name] = threads.submit(call, client)
                wait_for(lambda: reads_of(server) > reads)  # noqa: B023
                reads = reads_of(server)
        finally:
            agent.close()
        assert {name: wait.result(30) for name, wait in waits.items()} == {
            name: expected for name, (_, expected) in WAITS.items()
        }
        said = client.explain("r0", 35)
        assert "finish() was never called" in said.evidence[0]
        assert "call finish() for each request before close()" in said.remedy


@pytest.mark.parametrize("snapshot", [False, True])
def test_a_closed_agent_stays_closed_over_a_restart_of_the_server(tmp_path: Path, snapshot: bool):
    with serve(data_dir=tmp_path, sweep_interval_seconds=0.1) as server:
        agent = agent_of(server, "default")
        agent.finish(feed(agent, "gone"), 31)
        assert agent.flush(20)
        feed(agent, "r0")
        agent.close()
        with RouteClient(server.target) as client:
            ended(client, "r0")
            if snapshot:  # which drops the chunk of a deleted trace
                client.delete("gone")
                dropped = "routetrace_dropped_chunks_total"
                wait_for(lambda: Scraped(server.metrics_target).value(dropped))
        server.kill()
    with serve(data_dir=tmp_path) as server, RouteClient(server.target) as client:
        assert states(client) == {"e": "closed"}
        ended(client, "r0")
        [found] = client.agents()
        assert found.running_requests == 0


def test_a_shard_that_is_closed_ends_no_request_that_others_go_on_with(server):
    stages = [LAYOUT.select(LAYOUT.layer_ids[:2]), LAYOUT.select(LAYOUT.layer_ids[2:])]
    with RouteClient(server.target, run="shards") as client:
        agents = [
            agent_of(server, "shards", layout, shard=f"pp{i}", boot_id="boot")
            for i, layout in enumerate(stages)
        ]
        rows = rows_of(LAYOUT, 30)
        columns = [rows[:, :2], rows[:, 2:]]
        handles = [agent.begin("r0", prompt_len=35, index=0) for agent in agents]
        for agent, handle, part in zip(agents, handles, columns, strict=True):
            agent.step(part, [(handle, 0, 30)])
            assert agent.flush(20)
        agents[1].close()
        assert states(client) == {"epp0": "connected", "epp1": "closed"}
        found = client.stat("r0")
        assert (found.state, found.finish_reason) == (TraceState.RUNNING, None)
        agents[0].step(columns[0][:5], [(handles[0], 30, 5)])
        agents[0].finish(handles[0], 36)
        agents[0].close()
        found = client.get("r0", wait_for="end", missing="mask")
        assert (found.state, found.finish_reason) == (TraceState.INCOMPLETE, FinishReason.STOP)
        assert (found.num_tokens, [*map(str, found.missing)]) == (
            36, ["positions [30, 35) of 3 layers 4..7: agent_closed"],
        )  # fmt: skip


def test_a_request_that_goes_on_at_an_agent_that_follows_waits_for_it(server):
    """An agent that another one replaces is not closed: the engine goes on."""
    with RouteClient(server.target, run="replaced") as client:
        first = agent_of(server, "replaced", boot_id="boot")
        handle = first.begin("r0", index=0)
        assert first.flush(20)
        second = CaptureAgent(first.config, predecessor=first)
        first.close()
        handle = second.begin("r0", index=0)
        second.step(rows_of(LAYOUT, 3), [(handle, 0, 3)])
        assert second.flush(20)
        found = client.stat("r0")
        assert (found.state, found.finish_reason) == (TraceState.RUNNING, None)
        assert states(client) == {"e": "connected"}
        second.finish(handle, 4)
        second.close()
        found = client.get("r0", wait_for="end", missing="mask")
        assert (found.finish_reason, found.num_tokens) == (FinishReason.STOP, 4)
        assert states(client) == {"e": "closed"}


def test_drafts_of_a_closed_agent_stay_unconfirmed(tmp_path: Path):
    with serve(data_dir=tmp_path) as server:
        feeder = Feeder(server.target, LAYOUT, block_size=4, num_blocks=8)
        handle = feeder.begin("r0", prompt_len=2, block_ids=[1, 2])
        feeder.step(rows_of(LAYOUT, 7), [(handle, 0, 7)], tentative=3)
        feeder.close(closed=True)
        with RouteClient(server.target) as client:
            assert client.get("r0", wait_for="end", missing="mask").num_rows == 4
    with serve(data_dir=tmp_path) as server, RouteClient(server.target) as client:
        assert client.get("r0", wait_for="end", missing="mask").num_rows == 4


def test_rows_that_were_lost_before_keep_their_reason(server):
    feeder = Feeder(server.target, LAYOUT, run="lost")
    for name, reason in (("full", "QUEUE_FULL"), ("lost", "AGENT_LOST"), ("untold", "")):
        handle = feeder.begin(name, prompt_len=9)
        feeder.step(rows_of(LAYOUT, 2), [(handle, 0, 2)])
        if reason:
            number = pb.MissingReason.Value(f"MISSING_REASON_{reason}")
            feeder.chunk.op(OpKind.LOST, name, position=2, arg=number)
    feeder.close(closed=True)
    with RouteClient(server.target, run="lost") as client:
        for name, reason in (
            ("full", "queue_full"),
            ("lost", "agent_closed"),
            ("untold", "agent_closed"),
        ):
            read = client.get(name, token_stop=9, wait_for="end", missing="mask")
            assert [(m.start, m.stop, m.reason) for m in read.missing] == [(2, 9, reason)]
            assert read.finish_reason is FinishReason.CLOSED


def test_nobody_waits_for_the_kv_of_a_request_without_an_end(server):
    """Rows of another engine, which may come, cannot make it complete."""
    feeder = Feeder(server.target, LAYOUT, run="kv")
    tokens = list(range(64))
    handle = feeder.begin(
        "r0", prompt_len=64, prompt_token_ids=tokens, num_computed_tokens=63,
        num_external_tokens=63, transfer_id="t",
    )  # fmt: skip
    feeder.step(rows_of(LAYOUT, 1), [(handle, 63, 1)])
    feeder.close(closed=True)
    # Not by a client, which takes what is there when its time is over.
    *_, last = Reads(server.target).stub.GetTrace(
        pb.GetTraceRequest(run="kv", trace_id="r0", wait_for=pb.WAIT_FOR_END), timeout=60
    )
    assert reasons(last.end) == [(0, 63, "kv_unknown")]


def test_metrics_count_closed_agents_apart_from_lost_ones():
    settings = {"agent_timeout_seconds": 0, "sweep_interval_seconds": 0.1}
    with run_server(metrics_listen="127.0.0.1:0", **settings) as server:
        agent = agent_of(server, "r")
        feed(agent, "r0")
        agent.close()
        feeder = Feeder(server.target, LAYOUT, run="r", engine_id="lost")
        feeder.begin("r1")
        feeder.close()

        def count(name: str) -> float:
            return Scraped(server.metrics_target).value(f"routetrace_agents_{name}_total")

        wait_for(lambda: count("lost"))
        assert (count("lost"), count("closed")) == (1, 1)


def test_commands_name_the_state(server, monkeypatch):
    with agent_of(server, "cli", engine_id="over") as agent:
        feed(agent, "r0", prompt_len=40)
    feeder = Feeder(server.target, LAYOUT, run="cli", engine_id="away")
    feeder.begin("r1")
    feeder.close()
    with RouteClient(server.target, run="cli") as client:
        wait_for(lambda: states(client) == {"away": "gone", "over": "closed"})
    cli = commands(monkeypatch, server.target, "cli")
    listed = cli("agents")
    since = {line.split()[0]: line.split()[1] for line in listed.stdout.splitlines()}
    assert {name: since[name] for name in ("away", "over")} == {"away": "gone", "over": "closed"}
    assert listed.stderr == "2 agents, 0 connected, 1 closed\n"
    assert "incomplete, closed" in cli("stat", "r0").stdout
    assert cli("tail", "r0", code=1).stdout.splitlines()[-1].startswith("incomplete, closed: ")
    assert " closed " in next(x for x in cli("list").stdout.splitlines() if x.startswith("r0"))
