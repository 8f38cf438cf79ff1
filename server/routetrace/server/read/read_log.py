"""Reads of traces that this worker answered since its start."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from routetrace.common.viewer import USER_AGENT
from routetrace.server.common.rpc import Context
from routetrace.server.index.journal import Clock
from routetrace.server.index.traces.sources import TraceKey
from routetrace.server.index.traces.trace import Trace

#: Maximum traces whose reads are kept, those read last.
MAX_TRACES = 100_000


@dataclass(frozen=True)
class Reads:
    """Reads of a trace."""

    first: float
    """Unix time."""
    last: float
    """Unix time."""
    count: int


class ReadLog:
    """First and last read of each trace. All calls belong to the event loop's thread."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._reads: OrderedDict[TraceKey, Reads] = OrderedDict()

    def note(self, trace: Trace, context: Context) -> None:
        """Count a read, unless the client only displays the trace."""
        if _is_viewer(context):
            return
        now, before = self._clock.now(), self.of(trace)
        first, count = (before.first, before.count) if before else (now, 0)
        self._reads[trace.key] = Reads(first, now, count + 1)
        self._reads.move_to_end(trace.key)
        if len(self._reads) > MAX_TRACES:
            self._reads.popitem(last=False)

    def of(self, trace: Trace) -> Reads | None:
        """Return the reads of a trace; None if none is known."""
        reads = self._reads.get(trace.key)
        # Reads before its creation were of a deleted trace with the same id.
        return None if reads is None or reads.first < trace.created else reads


def _is_viewer(context: Context) -> bool:
    """Whether the client of a call only displays traces."""
    for key, value in context.invocation_metadata() or ():
        if key == "user-agent":
            return str(value).startswith(USER_AGENT)
    return False
