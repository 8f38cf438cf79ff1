"""Completeness in the metrics: traces by state, coverage, missing cells, weight versions."""

from __future__ import annotations

import random

import pytest

from routetrace.client import RouteClient, TraceState
from routetrace.server.core import Core
from routetrace.server.index.apply import apply_record
from routetrace.server.rows.summaries import Summaries
from routetrace.server.settings.config import ServerConfig
from routetrace.server.store.memory import MemoryStore
from routetrace.server.testing import run_server
from routetrace.v1 import routetrace_pb2 as pb
from support.agents.feeder import Feeder
from support.agents.recorder import Recorder
from support.agents.simulated import drive
from support.scrape import Scraped
from support.servers.client_server import LAYOUT, rows_of
from support.waiting import wait_for

LAYERS = len(LAYOUT.layer_ids)


@pytest.fixture(scope="module")
def server():
    with run_server(
        metrics_listen="127.0.0.1:0", sweep_interval_seconds=0.05, agent_timeout_seconds=3600
    ) as process:
        yield process


def states(server, run: str) -> dict[str, float]:
    samples = Scraped(server.metrics_target).samples("routetrace_counted_traces", run=run)
    return {labels["state"]: value for labels, value in samples}


def missing(server, run: str) -> dict[str, float]:
    samples = Scraped(server.metrics_target).samples("routetrace_counted_missing_cells", run=run)
    return {labels["reason"]: value for labels, value in samples}


def test_states_and_missing_cells_follow_the_traces(server):
    feeder = Feeder(server.target, LAYOUT, run="count")
    running = feeder.begin("running")
    feeder.step(rows_of(LAYOUT, 20), [(running, 0, 20)])
    feeder.finish(feeder.begin("empty"), 1)
    whole = feeder.begin("whole")
    feeder.step(rows_of(LAYOUT, 9), [(whole, 0, 9)])
    feeder.finish(whole, 10)
    holes = feeder.begin("holes", num_computed_tokens=4, num_external_tokens=4)
    feeder.step(rows_of(LAYOUT, 3), [(holes, 4, 3)])
    feeder.finish(holes, 11)
    feeder.flush()
    wait_for(lambda: states(server, "count") == {"running": 1, "complete": 2, "incomplete": 1})
    cells = Scraped(server.metrics_target).value("routetrace_counted_cells", run="count")
    assert cells == (9 + 10) * LAYERS, "of ended traces alone"
    found = missing(server, "count")
    assert {k: v for k, v in found.items() if v} == {
        "kv_unknown": 4 * LAYERS,
        "not_captured": 3 * LAYERS,
    }
    assert set(found) == {
        "not_captured", "kv_unknown", "queue_full", "invalid_ids", "agent_lost", "rejected",
        "agent_closed", "corrupt", "aborted", "ambiguous",
    }  # fmt: skip

    feeder.finish(running, 21)
    feeder.flush()
    wait_for(lambda: states(server, "count") == {"running": 0, "complete": 3, "incomplete": 1})
    with RouteClient(server.target, run="count") as client:
        client.delete("holes")
    wait_for(lambda: states(server, "count") == {"running": 0, "complete": 3, "incomplete": 0})
    assert not any(missing(server, "count").values())
    feeder.close()


def test_it_says_what_find_says(server):
    """Of a simulated engine with prefix hits, preemption, rejected drafts and lost rows."""
    drive(server.target, 5, "found", num_blocks=14)
    with RouteClient(server.target, run="found") as client:
        found = list(client.find())
    wanted = {state.value: float(sum(f.state is state for f in found)) for state in TraceState}
    wait_for(lambda: states(server, "found") == wanted)
    cells: dict[str, float] = {}
    for one in found:
        for reason, number in one.missing_cells.items():
            cells[reason] = cells.get(reason, 0) + number
    assert {k: v for k, v in missing(server, "found").items() if v} == cells


def test_weight_versions_of_connected_agents(server):
    feeders = []
    for i, version in enumerate((7, 4)):
        feeder = Feeder(server.target, LAYOUT, run="weights", engine_id=f"e{i}")
        feeder.set_weight_version(version)
        handle = feeder.begin(f"r{i}")
        feeder.step(rows_of(LAYOUT, 1), [(handle, 0, 1)])
        feeder.finish(handle, 2)
        feeder.flush()
        feeders.append(feeder)

    def versions() -> dict[str, float]:
        scraped = Scraped(server.metrics_target)
        samples = scraped.samples("routetrace_agent_weight_version", run="weights")
        return {labels["engine_id"]: value for labels, value in samples}

    assert versions() == {"e0": 7, "e1": 4}
    feeders[0].close()
    wait_for(lambda: versions() == {"e1": 4})
    feeders[1].close()


async def test_a_trace_is_looked_at_once_after_a_change(monkeypatch):
    core = Core(MemoryStore(), ServerConfig(metrics_listen="127.0.0.1:0"))
    await core.start()
    looked: list[str] = []
    worked_out = Summaries._worked_out

    def counting(summaries, trace, **how):
        looked.append(trace.key[1])
        return worked_out(summaries, trace, **how)

    monkeypatch.setattr(Summaries, "_worked_out", counting)
    number = random.Random(1).randrange(3, 9)
    add(core, number)
    for _ in range(3):
        await core.census.count()
    assert sorted(looked) == [f"t{i}" for i in range(number)]
    assert core.census.runs["run"].traces == {pb.TRACE_STATE_COMPLETE: number}
    looked.clear()
    trace = core.state.traces.traces["run", "t1"]
    core.state.touch(trace, core.started)
    for _ in range(3):
        await core.census.count()
    assert looked == ["t1"]
    await core.stop()


async def test_nothing_is_counted_where_no_metrics_are_served():
    core = Core(MemoryStore(), ServerConfig())
    await core.start()
    add(core, 1)
    await core.count()
    assert not core.census.runs
    assert core.state.traces.traces["run", "t0"].summary is None
    await core.stop()


def add(core: Core, number: int) -> None:
    """Apply the records of an engine that has ended requests."""
    recorder = Recorder()
    for i in range(number):
        handle = recorder.begin(f"t{i}", prompt_len=1)
        recorder.step(rows_of(recorder.layout, 1), [(handle, 0, 1)])
        recorder.finish(handle, 2)
        recorder.flush()
    for record in recorder.records:
        apply_record(core.state, core.state.number + 1, record)
    for trace in core.state.traces.traces.values():
        trace.expires = core.journal.clock.now() + 3600
