"""Facts about a trace, as JSON."""

from __future__ import annotations

from typing import Any

from routetrace.client import TraceDescription, TraceStat
from routetrace.page.segments import exact
from routetrace.page.tiles import count_levels


def facts_of(description: TraceDescription, target: str) -> dict[str, Any]:
    """Return the facts about a trace, its incarnations and its course.

    Args:
        description: the description of one of its incarnations.
        target: the server, as this page's clients name it.
    """
    stat = description.stat
    layout = stat.layout
    versions = stat.min_weight_version, stat.max_weight_version
    return {
        "trace_id": stat.trace_id,
        "run": stat.run,
        "incarnation": stat.incarnation,
        "num_incarnations": stat.num_incarnations,
        "incarnations": [
            {
                "number": one.number,
                "state": one.state.value,
                "finish_reason": one.finish_reason.value if one.finish_reason else None,
                "num_tokens": one.num_tokens,
            }
            for one in description.incarnations
        ],
        "state": stat.state.value,
        "finish_reason": stat.finish_reason.value if stat.finish_reason else None,
        "num_tokens": stat.num_tokens,
        "num_rows": stat.num_rows,
        "prompt_len": stat.prompt_len,
        "num_attempts": stat.num_attempts,
        "coverage": stat.coverage,
        "missing_cells": dict(stat.missing_cells),
        "layer_ids": list(layout.layer_ids),
        "num_experts": layout.num_experts,
        "top_k": layout.top_k,
        "levels": count_levels(stat.num_rows),
        "weights": None if None in versions else [exact(version) for version in versions],
        "engines": list(stat.engine_ids),
        "stored_bytes": stat.stored_bytes,
        "labels": stat.labels,
        "expires": stat.expires_at.timestamp(),
        "created": stat.created_at.timestamp(),
        "updated": stat.updated_at.timestamp(),
        "timeline": _timeline(description),
        "python": _python(stat, target),
    }


def _timeline(description: TraceDescription) -> list[dict[str, Any]]:
    """Return the known moments, sorted by time."""
    several = description.num_reads > 1
    moments = (
        ("begun", description.begun_at),
        ("sampled", description.sampled_at),
        ("acknowledged", description.acknowledged_at),
        ("readable", description.readable_at),
        ("first read" if several else "read", description.first_read_at),
        ("last read", description.last_read_at if several else None),
    )
    known = [{"name": name, "at": at.timestamp()} for name, at in moments if at is not None]
    return sorted(known, key=lambda moment: moment["at"])


def _python(stat: TraceStat, target: str) -> str:
    """Return Python that reads the trace; ids may hold any character."""
    client = f"RouteClient({target!a}, run={stat.run!a})"
    read = f".get({stat.trace_id!a}, incarnation={stat.incarnation}, missing='mask')"
    return f"from routetrace.client import RouteClient\ntrace = {client}{read}\n"
