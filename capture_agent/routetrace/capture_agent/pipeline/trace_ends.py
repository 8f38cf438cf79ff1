"""Ends of earlier requests by trace."""

from __future__ import annotations

from collections import OrderedDict

#: Traces that are remembered, and ends of each.
MAX_TRACES, MAX_ENDS = 4096, 4


class TraceEnds:
    """Where earlier requests of a trace ended: a later one may prove that it continues there."""

    def __init__(self) -> None:
        self._ends: OrderedDict[str, tuple[int, ...]] = OrderedDict()

    def of(self, trace_id: str) -> tuple[int, ...]:
        """Token counts of the last requests of a trace."""
        return self._ends.get(trace_id, ())

    def add(self, trace_id: str, num_tokens: int) -> None:
        """Add the end of a request."""
        self._ends[trace_id] = (*self.of(trace_id), num_tokens)[-MAX_ENDS:]
        self._ends.move_to_end(trace_id)
        if len(self._ends) > MAX_TRACES:
            self._ends.popitem(last=False)
