"""Backgrounds of an agent are killed under load: every row that is served was said."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path
from unittest.mock import patch

import numpy as np

from faults.check import check, temporary
from faults.serving import Server
from routetrace.capture_agent import AgentConfig, CaptureAgent, supervisor
from routetrace.client import RouteClient, TraceState
from routetrace.common.errors import NotFound
from support.agents.pressure import LAYOUT, Load, Request, check_sample
from support.waiting import wait_for

_BATCH = 16


def run(seed: int, *, kills: int = 3) -> dict[str, float]:
    """Figures of a load whose background was killed so many times."""
    rng = random.Random(f"background {seed}")
    figures = dict.fromkeys(("requests", "complete", "incomplete", "gone", "agent_lost_rows"), 0.0)
    with (
        temporary() as path,
        Server(Path(path)) as server,
        patch.object(supervisor, "_DELAYS_S", (0.05, 0.2)),
        CaptureAgent(
            AgentConfig(
                server.target, "e0", LAYOUT, linger_seconds=0.05, flush_interval_seconds=0.02
            )
        ) as agent,
    ):
        load = Load(agent, _BATCH, seed)
        whole: set[int] = set()
        known = 0  # requests before the present background runs
        for _ in range(kills):
            before = agent.stats().acknowledged_rows
            load.steps(rng.randint(20, 1500))
            if rng.random() < 0.8:  # else it may be killed before it works
                wait_for(lambda before=before: agent.stats().acknowledged_rows > before)
            if rng.random() < 0.5:
                check(agent.flush(60), "an agent did not get through")
                whole |= _ended(load, known)
            load.steps(rng.randint(0, 300))
            pid = agent.worker_pid
            os.kill(pid, signal.SIGKILL)
            check_sample(agent.stats(), load.offered)
            load.steps(rng.randint(0, 300))
            wait_for(lambda pid=pid: agent.worker_pid != pid)
            known = len(load.requests)
        load.steps(1000)
        load.finish()
        check(agent.flush(60), "an agent did not get through")
        whole |= {request.number for request in load.requests[known:]}
        stats = agent.stats()
        check_sample(stats, load.offered)
        check(stats.in_flight_rows == 0, f"rows are in flight after a flush: {stats}")
        check({*stats.dropped_rows} <= {"agent_lost"}, f"other rows were dropped: {stats}")
        figures["agent_lost_rows"] = stats.dropped_rows.get("agent_lost", 0)
        with RouteClient(server.target) as client:
            for request in load.requests:
                figures["requests"] += 1
                figures[_read(client, load, request, request.number in whole)] += 1
        check(server.stop() == 0, "no clean end")
    return figures


def _ended(load: Load, known: int) -> set[int]:
    running = {request.number for request in load._running}
    return {request.number for request in load.requests[known:]} - running


def _read(client: RouteClient, load: Load, request: Request, whole: bool) -> str:
    """Compare a trace with what was said; return what it is."""
    try:
        trace = client.get(request.name, missing="mask")
    except NotFound:
        check(not whole, f"{request.name} is gone")
        return "gone"
    there = trace.valid.all(axis=1)
    truth = load.rows(request)[: len(there)]
    check(np.array_equal(trace.topk_ids[there], truth[there]), f"{request.name}: other rows")
    if trace.state is TraceState.COMPLETE:
        check(len(there) == request.num_tokens - 1, f"{request.name} is cut")
        return "complete"
    reasons = {gap.reason for gap in trace.missing}
    check(not whole and reasons <= {"agent_lost"}, f"{request.name}: {trace.state} {reasons}")
    return "incomplete"
