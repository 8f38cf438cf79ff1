"""Trace index: reports of all agents about all requests, position by position.

    Trace (run, trace id)
      Source           report of one writer about one engine request
        Attempt        one pass over the positions; a resume after preemption starts the next
          spans        (position, length, ref, weight version, provenance), ascending

It holds reports without conclusions: `joins.py` decides which sources make up one token sequence,
`view.py` which of their rows are served. `apply.py` writes it; no I/O, no clock.
"""

from __future__ import annotations

from collections.abc import Iterator

from routetrace.server.index.traces.ordered import Ordered
from routetrace.server.index.traces.prefix_index import PrefixIndex
from routetrace.server.index.traces.sharded import Sharded
from routetrace.server.index.traces.sources import Source, TraceKey
from routetrace.server.index.traces.token_index import TokenIndex
from routetrace.server.index.traces.trace import Trace

#: Maximum sources of a trace; the oldest requests are dropped.
MAX_SOURCES = 4096


class TraceIndex:
    """All traces of all runs."""

    def __init__(self) -> None:
        self.traces: Sharded[TraceKey, Trace] = Sharded()
        self._ordered = Ordered()
        self.of_run: dict[str, Ordered] = {}
        """The same by run."""
        self.serial = 0
        """Serial number of the newest trace."""
        self.changes = 0
        """Number of changes of all traces."""
        self.by_serial: Sharded[int, Trace] = Sharded()
        self.prefixes = PrefixIndex(self.by_serial)
        self.tokens = TokenIndex(self.by_serial)

    def begin(
        self, key: TraceKey, source: Source, *, ttl: float, now: float, token: str = ""
    ) -> Trace:
        """Add a source that begins a request; `token` is that of its writer, if any."""
        trace = self.traces.get(key)
        if trace is None:
            self.serial += 1
            trace = Trace(key, self.serial, ttl, now, now, now + ttl, token=token)
            self.add(trace)
        trace.ttl = ttl
        trace.sources.append(source)
        if len(trace.sources) > MAX_SOURCES:
            trace.drop_oldest()
        trace.rejoin()
        return trace

    def remove(self, key: TraceKey) -> list[Source] | None:
        """Remove a trace; return its sources, or None if it does not exist."""
        trace = self.traces.pop(key)
        if trace is None:
            return None
        self.changes += 1
        self.by_serial.pop(trace.serial)
        self.prefixes.remove(trace)
        self.tokens.remove(trace)
        self._ordered.remove(trace)
        of_run = self.of_run[key[0]]
        of_run.remove(trace)
        if not of_run:
            del self.of_run[key[0]]
            self.tokens.forget(key[0])
        for source in trace.sources:
            source.forgotten = True
        return trace.sources

    def add(self, trace: Trace) -> None:
        """Add a new trace."""
        self._ordered.add(trace)
        self.traces[trace.key] = trace
        self.of_run.setdefault(trace.key[0], Ordered()).add(trace)
        self.by_serial[trace.serial] = trace
        self.prefixes.add(trace)
        self.tokens.add(trace)

    def learn(self, trace: Trace, source: Source) -> None:
        """Index the digests that a source has got."""
        self.prefixes.learn(trace, source)
        self.tokens.learn(trace, source)

    def clean(self) -> Iterator[None]:
        """Tidy up the indexes step by step."""
        yield from self.prefixes.clean()
        yield from self.tokens.clean()

    def oldest_first(self) -> Iterator[Trace]:
        """Yield all traces, oldest first; see `Ordered.oldest_first`."""
        return self._ordered.oldest_first()

    def newest_first(self, run: str, before_serial: int = 0) -> Iterator[Trace]:
        """Yield the traces of a run below a serial number (0: all), newest first."""
        return self.of_run.get(run, Ordered()).newest_first(before_serial)

    def counts(self) -> dict[str, int]:
        """Return the number of traces by run."""
        return {run: len(traces) for run, traces in self.of_run.items()}
