"""Two sides of a trace: reports of trainers, and where another side differs."""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

from routetrace.client import Trace, TraceStat
from routetrace.client.options import Policy
from routetrace.common.errors import InvalidArgument, NotFound, quoted
from routetrace.common.report_runs import report_run, reporter_of
from routetrace.page.backends import Backends
from routetrace.page.segments import exact
from routetrace.page.sessions import Caller
from routetrace.page.tiles import Levels, differing
from routetrace.trainers.comparison import MAX_WORST, Comparison, compare_traces

#: Most reporters of a run that are asked for a trace.
MAX_REPORTERS = 16

_SIDE = re.compile(r"#(?P<number>[1-9]\d{0,8})|(?P<latest>latest)|report:(?P<reporter>.+)", re.S)


class Side(NamedTuple):
    """The other side of a comparison."""

    stat: TraceStat
    policy: Policy


class Compared(NamedTuple):
    """Where two sides differ."""

    body: bytes
    """JSON."""
    levels: Levels
    """Share of the experts of the first side that the other one did not choose."""

    @property
    def nbytes(self) -> int:
        """Bytes of both."""
        return len(self.body) + self.levels.nbytes


async def side_of(
    backends: Backends, caller: Caller, stat: TraceStat, policy: Policy, text: str
) -> Side:
    """Return the side that a parameter names: "report:NAME", "#N" or "latest".

    Args:
        backends: the server.
        caller: whose token is sent.
        stat: the first side.
        policy: of the first side.
        text: the parameter.

    Raises:
        InvalidArgument: if it names none.
        RouteTraceError: as `AsyncRouteClient.stat`.
    """
    found = _SIDE.fullmatch(text)
    if found is None:
        raise InvalidArgument(
            field="against",
            value=quoted(text) if text else "not given",
            expected="report:NAME, #N for an incarnation, or latest",
        )
    if found["latest"]:
        return Side(stat, "latest")
    if found["number"]:
        number = int(found["number"])
        return Side(await backends.stat(caller, stat.run, stat.trace_id, number), policy)
    run = report_run(stat.run, found["reporter"])
    return Side(await backends.stat(caller, run, stat.trace_id, None), "as_sampled")


async def reports_of(backends: Backends, caller: Caller, stat: TraceStat) -> list[dict[str, Any]]:
    """Return the reports of a trace, as JSON.

    Raises:
        RouteTraceError: as `AsyncRouteClient.stat`.
    """
    info = await backends.info(caller, stat.run)
    runs = [run for run in info.runs if reporter_of(run, stat.run)][:MAX_REPORTERS]
    found = []
    for run in runs:
        try:
            report = await backends.stat(caller, run, stat.trace_id, None)
        except NotFound:
            continue
        found.append(
            {
                "reporter": reporter_of(run, stat.run),
                "step": report.labels.get("step"),
                # 0 is that of a report without one.
                "weight_version": exact(report.max_weight_version) or None,
                "reported_at": report.updated_at.timestamp(),
            }
        )
    return found


def compared(trace: Trace, other: Trace) -> Compared:
    """Compare two sides, as far as digests do not disprove that their tokens are the same.

    Raises:
        InvalidArgument: if they have nothing in common.
    """
    found = compare_traces(trace, other, worst=MAX_WORST)
    if found.other_tokens_from is not None:
        other = other.tokens(other.token_start, max(other.token_start, found.other_tokens_from))
    body = json.dumps(_json(found), separators=(",", ":")).encode()
    return Compared(body, differing(trace, other))


def _json(found: Comparison) -> dict[str, Any]:
    return {
        "start": found.start,
        "stop": found.stop,
        "cells": found.cells,
        "differing": found.differing,
        "tokens": found.tokens,
        "differing_tokens": found.differing_tokens,
        "overlap": found.overlap,
        "missing": found.missing,
        "other_tokens_from": found.other_tokens_from,
        "diagnosis": found.diagnosis,
        "cause": found.cause,
        "by_layer": [
            {"layer": layer, "cells": of.cells, "differing": of.differing}
            for layer, of in found.by_layer.items()
        ],
        "by_version": [
            {"version": str(version), "cells": of.cells, "differing": of.differing}
            for version, of in sorted(found.by_version.items())
        ],
        "worst": [
            {
                "position": one.position,
                "differing": one.differing,
                "layers": one.layers,
                "overlap": one.overlap,
                "weight_version": exact(one.weight_version),
            }
            for one in found.worst
        ],
    }
