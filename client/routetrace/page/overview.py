"""The state of a run as JSON: traces, engines, the last minutes, and the store."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

from routetrace.client import AgentStat, AgentState, ServerInfo
from routetrace.page.minutes import ENGINE_STEPS, EngineMinutes, Minutes, last
from routetrace.page.mirrors import Mirror
from routetrace.page.segments import exact

#: Age of an unacknowledged chunk from which an engine is late, and steps in which drops are recent.
LATE_S = 5.0
_RECENT_STEPS = 30


def overview(
    mirror: Mirror, minutes: Minutes, agents: Sequence[AgentStat], info: ServerInfo
) -> dict[str, Any]:
    """Return the state of a run.

    Args:
        mirror: its traces.
        minutes: its last minutes.
        agents: its agents.
        info: the server.
    """
    return {
        "now": info.now.timestamp(),
        "whole": mirror.whole,
        "stale_since": mirror.stale_since,
        **mirror.table.totals(),
        "store": {
            "used": info.used_bytes,
            "capacity": info.capacity_bytes,
            "run": info.run_bytes,
            "run_quota": info.run_quota_bytes,
            "kind": info.store,
            "ack_mode": info.ack_mode,
        },
        "throughput": {
            "at": minutes.times(),
            "step_seconds": minutes.step_seconds,
            "rows": [*minutes.rows],
            "dropped": minutes.dropped(),
            "reads": [*minutes.reads],
        },
        "rows_per_second": minutes.rate(minutes.rows),
        "latency": _latency(minutes),
        "engines": engines(agents, minutes, info.now.timestamp()),
    }


def engines(agents: Sequence[AgentStat], minutes: Minutes, now: float) -> list[dict[str, Any]]:
    """Return the engines of a run, those with trouble first, then by name."""
    shards: dict[str, list[AgentStat]] = {}
    for agent in agents:
        shards.setdefault(agent.engine_id, []).append(agent)
    found = [_engine(name, shards[name], minutes, now) for name in sorted(shards)]
    return sorted(found, key=lambda engine: _STATES.index(engine["state"]))


_STATES = ("dropping", "late", "gone", "live", "closed")


def _engine(
    engine_id: str, agents: Sequence[AgentStat], minutes: Minutes, now: float
) -> dict[str, Any]:
    series = minutes.engines.get(engine_id, EngineMinutes())
    dropped: Counter[str] = Counter()
    for agent in agents:
        dropped.update(agent.dropped_rows)
    lag = max((a.lag_seconds for a in agents if a.state is not AgentState.CLOSED), default=0.0)
    shards: dict[AgentState, list[str]] = {state: [] for state in AgentState}
    for agent in sorted(agents, key=attrgetter("shard")):
        shards[agent.state].append(agent.shard)
    state = "live" if shards[AgentState.CONNECTED] else "closed"
    if shards[AgentState.GONE]:
        state = "gone"
    if state == "live" and lag > LATE_S:
        state = "late"
    if sum(last(series.dropped, _RECENT_STEPS)):
        state = "dropping"
    seen = [agent.seen_at.timestamp() for agent in agents if agent.seen_at]
    versions = [a.weight_version for a in agents if a.weight_version is not None]
    newest = agents[-1].attributes
    return {
        "engine": engine_id,
        "shards": shards[AgentState.CONNECTED],
        "shards_closed": shards[AgentState.CLOSED],
        "shards_gone": shards[AgentState.GONE],
        "state": state,
        "lag": lag,
        "rows_per_second": minutes.rate(series.rows),
        "series": last(series.rows, ENGINE_STEPS),
        "running_requests": max(agent.running_requests for agent in agents),
        "in_flight": sum(agent.in_flight_rows for agent in agents),
        "queued_bytes": sum(agent.queued_bytes for agent in agents),
        "spilled_bytes": sum(agent.spilled_bytes for agent in agents),
        "dropped": dict(dropped),
        "rows_recently": sum(last(series.rows, _RECENT_STEPS)),
        "dropped_recently": sum(last(series.dropped, _RECENT_STEPS)),
        "weight_version": exact(min(versions)) if versions else None,
        "weight_version_lag": max(agent.weight_version_lag for agent in agents),
        "agent": newest.get("routetrace", ""),
        "host": newest.get("host", ""),
        "last_seen": max(0.0, now - min(seen)) if seen else None,
    }


def _latency(minutes: Minutes) -> dict[str, Any]:
    """Return times within which chunks were committed, in seconds; None without chunks."""
    if minutes.latest is None:
        return {"commit_p50": None, "commit_p99": None}

    def seconds(share: float) -> float | None:
        found = None if minutes.latest is None else minutes.latest.commit_seconds(share)
        return None if found is None or math.isinf(found) else found

    return {"commit_p50": seconds(0.5), "commit_p99": seconds(0.99)}
