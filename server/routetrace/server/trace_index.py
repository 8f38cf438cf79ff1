"""The trace index: what every agent reported of every request, position by position.

    Trace (run, trace id)
      Source           one writer's view of one engine request
        Attempt        one pass over the positions; a resume after preemption starts the next
          spans        (position, length, ref, weight version, provenance), ascending

It holds what was reported and concludes nothing: which sources make up one token sequence is
worked out by `joins.py`, which of their rows a reader gets by `view.py`. Nothing here does I/O or
knows the time; `apply.py` feeds it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from routetrace.server.joins import Join
from routetrace.server.refs import chunk_of
from routetrace.server.spans import FOREVER, SpanList
from routetrace.v1.layout import RoutingLayout
from routetrace.v1.records import DIGEST

#: Labels of a trace, at most; later ones are passed over.
MAX_TRACE_LABELS = 64

#: Notes of lost positions of one engine request, at most.
MAX_LOST = 4096

#: Engine requests of a trace, of all shards, at most; the oldest go.
MAX_SOURCES = 4096

TraceKey = tuple[str, str]
"""(run, trace id)."""


class WriterKey(NamedTuple):
    """Who writes: one agent's part of one engine of one run."""

    run: str
    engine_id: str
    shard: str


@dataclass(slots=True)
class Lost:
    """Positions [start, stop) will not come."""

    start: int
    stop: int
    reason: int


@dataclass(slots=True, eq=False)
class Source:
    """One writer's view of one engine request."""

    writer: WriterKey
    epoch: int
    request_id: str
    occurrence: str
    """What tells the request from others of the same engine and id; the same at all shards."""
    layout: RoutingLayout
    prompt_len: int = 0
    """Tokens that the request was given; 0 if untold."""
    attempts: list[SpanList] = field(default_factory=lambda: [SpanList()])
    tentative: int = 0
    """How many of the last rows of the last attempt are drafts that may still be rejected."""
    blocks: list[int] = field(default_factory=list)
    """KV blocks that the request holds now."""
    placed: bool = True
    """Whether `blocks` are all of its blocks: not, if nobody told how it began."""
    external: bool = False
    """Whether KV was loaded for it whose rows another engine may have."""
    ended: bool = False
    num_tokens: int = 0
    """Final token count; 0 while unknown."""
    finish_reason: int = 0
    lost: list[Lost] = field(default_factory=list)
    written: int = 0
    """One past the last position whose slot may be known."""
    _digests: npt.NDArray[Any] = field(default_factory=lambda: np.empty(0, DIGEST))
    _new_digests: list[npt.NDArray[Any]] = field(default_factory=list)

    @property
    def digests(self) -> npt.NDArray[Any]:
        """DIGEST by position, ascending."""
        if self._new_digests:
            # The last ones first, since of several at one position the first is taken.
            learned = np.concatenate([self._digests, *self._new_digests])[::-1]
            _, first = np.unique(learned["position"], return_index=True)
            self._digests, self._new_digests = learned[first], []
        return self._digests

    def confirmed(self, attempt: int) -> int:
        """One past the last position of an attempt that the engine can not take back any more."""
        if attempt < len(self.attempts) - 1 or not self.tentative:
            return FOREVER
        return self.attempts[attempt].end - self.tentative

    @property
    def end(self) -> int:
        """One past the last position that was reported in any way, and confirmed."""
        ends = [min(a.end, self.confirmed(i)) for i, a in enumerate(self.attempts)]
        return max(ends + [m.stop for m in self.lost if m.stop < FOREVER])

    def remove(self, start: int, stop: int) -> None:
        """Drops the positions [start, stop) of the last attempt."""
        spans = self.attempts[-1]
        confirmed = spans.end - self.tentative
        if stop >= spans.end:
            spans.truncate(start)
        else:
            spans.remove(start, stop)
        self.tentative = max(0, spans.end - confirmed)

    def lose(self, start: int, stop: int, reason: int) -> None:
        """Notes why positions will not come; of too many notes the last ones run together."""
        if len(self.lost) < MAX_LOST:
            self.lost.append(Lost(start, stop, reason))
        else:
            last = self.lost[-1]
            last.start, last.stop = min(last.start, start), max(last.stop, stop)

    def add_digests(self, digests: npt.NDArray[Any]) -> None:
        """Learns token digests; of two at one position the later holds."""
        self._new_digests.append(digests)


@dataclass(slots=True, eq=False)
class Trace:
    """One trace."""

    key: TraceKey
    serial: int
    """Ascending in the order of first appearance."""
    labels: dict[str, str]
    ttl: float
    """Seconds that it lives after its last change."""
    created: float
    updated: float
    expires: float
    sources: list[Source] = field(default_factory=list)
    """In order of arrival."""
    changes: int = 0
    """Times that it changed since the server started."""
    packed: bytes | None = None
    """As it stands in a snapshot; None where it has changed since the last one."""
    _join: Join | None = None

    @property
    def join(self) -> Join:
        """Which sources make up which token sequence."""
        if self._join is None:
            self._join = Join(self.sources)
        return self._join

    def rejoin(self) -> None:
        """A source began, ended, or got digests: what belongs together may have changed."""
        self._join = self.packed = None

    def chunks(self) -> Iterator[int]:
        """Chunks that hold rows of this trace; with repeats."""
        for source in self.sources:
            for attempt in source.attempts:
                yield from map(chunk_of, attempt.refs)


class TraceIndex:
    """All traces of all runs."""

    def __init__(self) -> None:
        self.traces: dict[TraceKey, Trace] = {}
        self.run_counts: Counter[str] = Counter()
        """Traces by run."""
        self.serial = 0
        """Of the trace that appeared last."""

    def begin(
        self, key: TraceKey, source: Source, *, labels: Mapping[str, str], ttl: float, now: float
    ) -> Trace:
        """Adds a source that begins a request."""
        trace = self.traces.get(key)
        if trace is None:
            self.serial += 1
            trace = Trace(key, self.serial, dict(labels), ttl, now, now, now + ttl)
            self.add(trace)
        for name, value in labels.items():
            if name in trace.labels or len(trace.labels) < MAX_TRACE_LABELS:
                trace.labels[name] = value
        trace.ttl = ttl
        trace.sources.append(source)
        if len(trace.sources) > MAX_SOURCES:
            del trace.sources[0]
        trace.rejoin()
        return trace

    def remove(self, key: TraceKey) -> bool:
        """Forgets a trace; False if it was not there."""
        if self.traces.pop(key, None) is None:
            return False
        self.run_counts[key[0]] -= 1
        if not self.run_counts[key[0]]:
            del self.run_counts[key[0]]
        return True

    def add(self, trace: Trace) -> None:
        """Takes in a trace that is new."""
        self.traces[trace.key] = trace
        self.run_counts[trace.key[0]] += 1

    def newest_first(self, run: str, before_serial: int = 0) -> Iterator[Trace]:
        """Traces of a run that appeared before a serial number (0: all)."""
        for trace in reversed(self.traces.values()):
            if trace.key[0] == run and not (before_serial and trace.serial >= before_serial):
                yield trace


def dump_trace(trace: Trace, layouts: dict[RoutingLayout, int]) -> dict[str, Any]:
    """For a snapshot; layouts are told by their numbers."""
    return {
        "key": trace.key,
        "serial": trace.serial,
        "labels": trace.labels,
        "times": (trace.ttl, trace.created, trace.updated, trace.expires),
        "sources": [dump_source(source, layouts) for source in trace.sources],
    }


def load_trace(data: dict[str, Any], layouts: list[RoutingLayout]) -> Trace:
    """From a snapshot."""
    run, trace_id = data["key"]
    trace = Trace((run, trace_id), data["serial"], data["labels"], *data["times"])
    trace.sources = [load_source(source, layouts) for source in data["sources"]]
    return trace


def dump_source(source: Source, layouts: dict[RoutingLayout, int]) -> dict[str, Any]:
    """For a snapshot; its layout is told by its number."""
    return {
        "writer": tuple(source.writer),
        "epoch": source.epoch,
        "request_id": source.request_id,
        "occurrence": source.occurrence,
        "layout": layouts[source.layout],
        "prompt_len": source.prompt_len,
        "attempts": [a.tobytes() for a in source.attempts],
        "tentative": source.tentative,
        "blocks": source.blocks,
        "placed": source.placed,
        "external": source.external,
        "ended": source.ended,
        "num_tokens": source.num_tokens,
        "finish_reason": source.finish_reason,
        "lost": [(m.start, m.stop, m.reason) for m in source.lost],
        "written": source.written,
        "digests": source.digests.tobytes(),
    }


def load_source(data: dict[str, Any], layouts: list[RoutingLayout]) -> Source:
    """From a snapshot."""
    return Source(
        writer=WriterKey(*data["writer"]),
        epoch=data["epoch"],
        request_id=data["request_id"],
        occurrence=data["occurrence"],
        layout=layouts[data["layout"]],
        prompt_len=data["prompt_len"],
        attempts=[SpanList(a) for a in data["attempts"]],
        tentative=data["tentative"],
        blocks=list(data["blocks"]),
        placed=data["placed"],
        external=data["external"],
        ended=data["ended"],
        num_tokens=data["num_tokens"],
        finish_reason=data["finish_reason"],
        lost=[Lost(*m) for m in data["lost"]],
        written=data["written"],
        _digests=np.frombuffer(data["digests"], DIGEST),
    )
