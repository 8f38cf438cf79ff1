"""Reads of traces since the start of the server."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from routetrace.common.viewer import USER_AGENT
from routetrace.server.common.rpc import Context
from routetrace.server.index.journal import Clock
from routetrace.server.index.traces.sources import TraceKey
from routetrace.server.index.traces.trace import Trace

#: Maximum traces whose reads are kept, those read last.
MAX_TRACES = 100_000


class Reads(NamedTuple):
    """Reads of a trace, in Unix time."""

    first: float
    last: float
    times: int


class ReadLog:
    """First and last read of each trace. All calls belong to the event loop's thread."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._reads: OrderedDict[TraceKey, Reads] = OrderedDict()

    def note(self, trace: Trace, context: Context) -> None:
        """Note a read; one that only shows the trace to somebody does not count."""
        if is_viewer(context):
            return
        now, before = self._clock.now(), self.of(trace)
        reads = before._replace(last=now, times=before.times + 1) if before else Reads(now, now, 1)
        self._reads[trace.key] = reads
        self._reads.move_to_end(trace.key)
        if len(self._reads) > MAX_TRACES:
            self._reads.popitem(last=False)

    def of(self, trace: Trace) -> Reads | None:
        """Return the reads of a trace; None if none is known."""
        reads = self._reads.get(trace.key)
        # Earlier ones were of another trace with this id.
        return None if reads is None or reads.first < trace.created else reads


def is_viewer(context: Context) -> bool:
    """Whether the client of a call only shows traces."""
    for key, value in context.invocation_metadata() or ():
        if key == "user-agent":
            return str(value).startswith(USER_AGENT)
    return False
