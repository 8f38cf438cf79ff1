"""Census: completeness of all traces, for metrics.

A round visits every trace. It computes a trace again only after a change; one of many requests that
changes faster than it can be computed in slices counts as it was before.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from routetrace.common.limited import LimitedLog
from routetrace.server.common.slices import Turns
from routetrace.server.index.state import State
from routetrace.server.rows.preparing import prepared
from routetrace.server.rows.summaries import Summaries

_failures = LimitedLog(logging.getLogger(__name__), "failed counts")

#: Maximum share of the event loop's time: the count is never urgent, and one tenant may change
#: thousands of traces in a round.
_SHARE = 0.1


@dataclass
class RunCount:
    """Completeness of the traces of one run."""

    traces: Counter[int] = field(default_factory=Counter)
    """Number of traces by TraceState."""
    cells: int = 0
    """Cells of the rows of ended traces, present or not."""
    missing: Counter[int] = field(default_factory=Counter)
    """Missing cells of ended traces by MissingReason."""


class Census:
    """Completeness of all traces at the last round. All calls belong to the event loop's thread."""

    def __init__(self, state: State, summaries: Summaries) -> None:
        self._state = state
        self._summaries = summaries
        self._turns = Turns()
        self.runs: Mapping[str, RunCount] = {}
        """By run, as of the last round."""

    async def count_every(self, seconds: float) -> None:
        """Count all traces after each pause, until cancelled."""
        while True:
            await asyncio.sleep(seconds)
            try:
                await self.count()
            except Exception as error:
                _failures.failed("a count of the traces", error)

    async def count(self) -> None:
        """Count all traces."""
        runs: dict[str, RunCount] = {}
        traces = prepared(self._state.traces.oldest_first(), self._summaries.prepare)
        async for trace in self._turns.over(traces, _SHARE):
            if (
                trace is None
                or not trace.sources
                or self._state.traces.traces.get(trace.key) is not trace
            ):
                continue
            summary = self._summaries.at_hand(trace) or trace.summary
            if summary is None:
                continue
            run = runs.setdefault(trace.key[0], RunCount())
            run.traces[summary.state] += 1
            run.cells += summary.cells
            for reason, cells in summary.missing:
                run.missing[reason] += cells
        self.runs = runs
