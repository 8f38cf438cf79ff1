"""Census: completeness of all traces, for metrics.

A round visits every trace, as a sweep does. It looks at a trace anew only after a change, and never
at one whose newest request runs, so that it costs one view of each trace that has ended.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from routetrace.server.common.slices import in_slices
from routetrace.server.index.agents import Agents
from routetrace.server.index.journal import Clock
from routetrace.server.index.state import State
from routetrace.server.index.traces.trace import Counted, Trace
from routetrace.server.rows.reader import Reader
from routetrace.v1 import routetrace_pb2 as pb


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

    def __init__(self, state: State, reader: Reader, agents: Agents, clock: Clock) -> None:
        self._state = state
        self._reader = reader
        self._agents = agents
        self._clock = clock
        self.runs: Mapping[str, RunCount] = {}
        """By run, as of the last round."""

    async def count(self) -> None:
        """Count all traces."""
        runs: dict[str, RunCount] = {}
        async for trace in in_slices(self._state.traces.oldest_first()):
            if not trace.sources or self._state.traces.traces.get(trace.key) is not trace:
                continue
            run = runs.setdefault(trace.key[0], RunCount())
            counted = self._look(trace)
            run.traces[counted.state if counted else pb.TRACE_STATE_RUNNING] += 1
            if counted:
                run.cells += counted.cells
                for reason, cells in counted.missing:
                    run.missing[reason] += cells
        self.runs = runs

    def _look(self, trace: Trace) -> Counted | None:
        """Return the completeness of a trace that has ended; None if it runs."""
        if self._agents.running(trace.sources[-1]):
            return None
        counted = trace.counted
        if counted and counted.changes == trace.changes:
            return counted
        known = self._reader.find(*trace.key)
        state = self._reader.state_of(known)
        if state == pb.TRACE_STATE_RUNNING:
            return None
        cells = known.num_rows * len(known.layout.layer_ids)
        missing = self._reader.missing_cells(state, known)
        reasons = tuple((m.reason, m.cells) for m in missing)
        counted = Counted(trace.changes, state, cells, reasons)
        # Rows of another trace may still arrive and stand in, which is no change of this one.
        unknown = any(reason == pb.MISSING_REASON_KV_UNKNOWN for reason, _ in reasons)
        recent = self._clock.now() - trace.updated <= self._agents.timeout
        trace.counted = None if unknown and recent else counted
        return counted
