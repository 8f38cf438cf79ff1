"""Ends of earlier requests by trace."""

from __future__ import annotations

from collections import OrderedDict
from itertools import chain

#: Traces that are remembered, and requests of each. A range takes 0.1 kB, whatever its length: with
#: trace ids of 30 characters, all of it is 2.7 MB at most.
MAX_TRACES, MAX_ENDS = 4096, 4

#: Maximum tokens that a caller did not get of an aborted request. With more, a try that was thrown
#: away would count as continued where the answer of another one begins with the same tokens.
MAX_CUT = 8


class TraceEnds:
    """Where earlier requests of a trace ended: a later one may prove that it continues there.

    A request that was aborted has several ends, as its caller may have got fewer tokens than the
    engine sampled.
    """

    def __init__(self) -> None:
        self._ends: OrderedDict[str, tuple[range, ...]] = OrderedDict()

    def of(self, trace_id: str) -> tuple[int, ...]:
        """Ends of the last requests of a trace."""
        return tuple(chain.from_iterable(self._ends.get(trace_id, ())))

    def add(self, trace_id: str, ends: range) -> None:
        """Add the ends of a request."""
        self._ends[trace_id] = (*self._ends.get(trace_id, ()), ends)[-MAX_ENDS:]
        self._ends.move_to_end(trace_id)
        if len(self._ends) > MAX_TRACES:
            self._ends.popitem(last=False)
