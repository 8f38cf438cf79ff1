"""Sides of a trace that the server has: reports of trainers, incarnations, the last attempt."""

from __future__ import annotations

from typing import Any, NamedTuple

from routetrace.client import TraceStat
from routetrace.client.options import Policy
from routetrace.common.errors import NotFound
from routetrace.common.report_runs import report_run, reporter_of
from routetrace.page.backends import Backends
from routetrace.page.comparing import SideName, report_of
from routetrace.page.sessions import Caller

#: Most reporters of a run that are asked for a trace.
MAX_REPORTERS = 16


class Side(NamedTuple):
    """The other side of a comparison."""

    stat: TraceStat
    policy: Policy


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
    name = SideName.of(text)
    if name.latest:
        return Side(stat, "latest")
    if name.number:
        return Side(await backends.stat(caller, stat.run, stat.trace_id, name.number), policy)
    run = report_run(stat.run, name.reporter or "")
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
        found.append(report_of(report, reporter_of(run, stat.run) or ""))
    return found
