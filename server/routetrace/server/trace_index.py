"""The trace index: which stored rows make up each request, position by position.

    Trace (run, trace id)
      Incarnation        everything recorded for one token sequence
        Source           one writer's view of one engine request
          Attempt        one pass over the positions; a resume after preemption starts the next
            spans        (position, length, ref, weight version, provenance), ascending

Several sources fill one incarnation when parts of an engine (pipeline stages, context-parallel
ranks) report the same request. Nothing here does I/O or knows the time; `apply.py` feeds it.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

from routetrace.server.refs import ROW_BITS, chunk_of
from routetrace.v1 import routetrace_pb2 as pb
from routetrace.v1.layout import RoutingLayout
from routetrace.v1.records import FinishReason

TraceKey = tuple[str, str]
"""(run, trace id)."""

FOREVER = 1 << 32
"""Past every position."""


class WriterKey(NamedTuple):
    """Who writes: one agent's part of one engine of one run."""

    run: str
    engine_id: str
    shard: str


class Span(NamedTuple):
    """`length` positions from `position` on, whose rows are `ref`, `ref + 1`, ..."""

    position: int
    length: int
    ref: int
    weight_version: int
    provenance: int

    @property
    def stop(self) -> int:
        """One past the last position."""
        return self.position + self.length

    def cut(self, start: int, stop: int) -> Span:
        """The part inside [start, stop)."""
        a, b = max(start, self.position), min(stop, self.stop)
        return self._replace(position=a, length=b - a, ref=self.ref + a - self.position)


class SpanList:
    """Spans of one attempt in ascending, disjoint positions; 40 bytes each."""

    __slots__ = ("_data",)
    _FIELDS = 5

    def __init__(self, data: bytes = b"") -> None:
        self._data = array("q", data)

    def __iter__(self) -> Iterator[Span]:
        data = self._data
        for i in range(0, len(data), self._FIELDS):
            yield Span(*data[i : i + self._FIELDS])

    def __len__(self) -> int:
        return len(self._data) // self._FIELDS

    @property
    def end(self) -> int:
        """One past the last position; 0 if empty."""
        return self._data[-5] + self._data[-4] if self._data else 0

    def append(self, span: Span) -> None:
        """Adds a span; positions at and after its first are dropped first."""
        data = self._data
        if span.position < self.end:
            self.truncate(span.position)
        if (
            data
            and data[-5] + data[-4] == span.position
            and data[-3] + data[-4] == span.ref
            and data[-2] == span.weight_version
            and data[-1] == span.provenance
            and span.ref >> ROW_BITS == data[-3] >> ROW_BITS
        ):
            data[-4] += span.length
        else:
            data.extend(span)

    def truncate(self, position: int) -> None:
        """Drops positions at and after `position`."""
        data = self._data
        while data and data[-5] >= position:
            del data[-5:]
        if data and data[-5] + data[-4] > position:
            data[-4] = position - data[-5]

    def remove(self, start: int, stop: int) -> None:
        """Drops the positions [start, stop)."""
        kept = [
            part
            for span in self
            for part in (span.cut(span.position, start), span.cut(stop, span.stop))
            if part.length > 0
        ]
        self._data = array("q", [number for span in kept for number in span])

    def tobytes(self) -> bytes:
        """For a snapshot."""
        return self._data.tobytes()


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
    layout: RoutingLayout
    attempts: list[SpanList] = field(default_factory=lambda: [SpanList()])
    blocks: list[int] = field(default_factory=list)
    """KV blocks that the request holds now."""
    ended: bool = False
    num_tokens: int = 0
    """Final token count; 0 while unknown."""
    finish_reason: int = 0
    lost: list[Lost] = field(default_factory=list)
    digests: list[tuple[int, int]] = field(default_factory=list)

    @property
    def end(self) -> int:
        """One past the last position that was reported in any way."""
        spans = max(attempt.end for attempt in self.attempts)
        return max([spans, *(m.stop for m in self.lost if m.stop < FOREVER)])


@dataclass(slots=True, eq=False)
class Incarnation:
    """Everything recorded under a trace id for one token sequence."""

    prompt_len: int
    sources: list[Source] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Final token count; 0 while unknown."""
        return max((s.num_tokens for s in self.sources if s.ended), default=0)

    @property
    def num_rows(self) -> int:
        """Positions 0 .. num_rows - 1 exist: N tokens have N - 1 rows."""
        if self.num_tokens:
            return self.num_tokens - 1
        return max((s.end for s in self.sources), default=0)

    def versions(self) -> tuple[int, int] | None:
        """Lowest and highest weight version of any row."""
        versions = [sp.weight_version for s in self.sources for a in s.attempts for sp in a]
        return (min(versions), max(versions)) if versions else None

    def chunks(self) -> Iterator[int]:
        """Chunks that hold rows of this incarnation; with repeats."""
        for source in self.sources:
            for attempt in source.attempts:
                for span in attempt:
                    yield chunk_of(span.ref)


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
    incarnations: list[Incarnation] = field(default_factory=list)
    changes: int = 0
    """Times that it changed since the server started."""


class Segment(NamedTuple):
    """A span as it is served: rows of one source, disjoint in cells from all other segments."""

    source: int
    attempt: int
    span: Span


Interval = tuple[int, int]


def subtract(span: Interval, claimed: list[Interval]) -> list[Interval]:
    """The parts of an interval that ascending, disjoint intervals do not cover."""
    start, stop = span
    rest = []
    for a, b in claimed:
        if b <= start:
            continue
        if a >= stop:
            break
        if a > start:
            rest.append((start, a))
        start = max(start, b)
    if start < stop:
        rest.append((start, stop))
    return rest


def merge(intervals: Iterable[Interval]) -> list[Interval]:
    """Ascending, disjoint intervals that cover the same positions."""
    merged: list[Interval] = []
    for a, b in sorted(intervals):
        if merged and a <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(b, merged[-1][1]))
        else:
            merged.append((a, b))
    return merged


def view(
    incarnation: Incarnation, start: int, stop: int, layers: frozenset[int], policy: int
) -> list[Segment]:
    """What a reader gets for positions [start, stop): ascending segments, no cell twice.

    As sampled, the first attempt that has a position gives it; with `latest`, the last one. Of
    several sources that hold the same layers (context-parallel ranks), the first that has it.
    """
    latest = policy == pb.READ_POLICY_LATEST
    claimed: dict[frozenset[int], list[Interval]] = {}
    segments = []
    for number, source in enumerate(incarnation.sources):
        held = layers.intersection(source.layout.layer_ids)
        if not held:
            continue
        attempts = list(enumerate(source.attempts))
        for attempt, spans in reversed(attempts) if latest else attempts:
            taken = merge(i for other, ii in claimed.items() if other & held for i in ii)
            new = []
            for span in spans:
                if span.stop <= start or span.position >= stop:
                    continue
                wanted = (max(start, span.position), min(stop, span.stop))
                for a, b in subtract(wanted, taken):
                    segments.append(Segment(number, attempt, span.cut(a, b)))
                    new.append((a, b))
            claimed[held] = merge([*claimed.get(held, ()), *new])
    segments.sort(key=lambda s: s.span.position)
    return segments


def covered(incarnation: Incarnation, segments: list[Segment], layer: int) -> list[Interval]:
    """Positions that the segments give for one layer."""
    sources = incarnation.sources
    return merge(
        (s.span.position, s.span.stop) for s in segments if layer in sources[s.source].layout.column
    )


def missing(
    incarnation: Incarnation,
    segments: list[Segment],
    start: int,
    stop: int,
    layers: tuple[int, ...],
    default: int,
) -> list[pb.MissingRange]:
    """Cells of [start, stop) x layers that the segments do not give, and why.

    Args:
        incarnation: where the segments come from.
        segments: what is served.
        start: first position.
        stop: one past the last.
        layers: absolute layer ids.
        default: the reason (a MissingReason) where no agent gave one.
    """
    # Layers that the same sources hold have the same gaps: work once per such group.
    groups: dict[tuple[int, ...], list[int]] = {}
    for layer in layers:
        holders = tuple(i for i, s in enumerate(incarnation.sources) if layer in s.layout.column)
        groups.setdefault(holders, []).append(layer)
    ranges = []
    for holders, group in groups.items():
        notes = [m for i in holders for m in incarnation.sources[i].lost]
        for gap in subtract((start, stop), covered(incarnation, segments, group[0])):
            for a, b, reason in _reasons(gap, notes, default):
                ranges.append(
                    pb.MissingRange(
                        start=a,
                        stop=b,
                        layer_ids=() if len(group) == len(layers) else group,
                        reason=reason,  # type: ignore[arg-type]
                    )
                )
    ranges.sort(key=lambda r: (r.start, list(r.layer_ids)))
    return ranges


def _reasons(gap: Interval, notes: list[Lost], default: int) -> Iterator[tuple[int, int, int]]:
    """Cuts a gap where the reason changes; the note that came first wins."""
    edges = sorted({*gap, *(e for m in notes for e in (m.start, m.stop) if gap[0] < e < gap[1])})
    last: tuple[int, int, int] | None = None
    for a, b in pairwise(edges):
        reason = next((m.reason for m in notes if m.start <= a and b <= m.stop), default)
        if last and last[2] == reason:
            last = (last[0], b, reason)
        else:
            if last:
                yield last
            last = (a, b, reason)
    if last:
        yield last


class TraceIndex:
    """All traces of all runs."""

    def __init__(self) -> None:
        self.traces: dict[TraceKey, Trace] = {}
        self._serial = 0

    def begin(
        self,
        key: TraceKey,
        source: Source,
        *,
        prompt_len: int,
        labels: Mapping[str, str],
        ttl: float,
        now: float,
        current: Callable[[Source], bool],
    ) -> Trace:
        """Adds a source that begins a request, to the incarnation that it belongs to.

        Sources of other shards of the same engine request join its incarnation; anything else under
        a known trace id is a new incarnation, since nothing proves that it has the same tokens.
        Where an id was used again, shards may be apart by a request: the oldest incarnation that
        lacks this shard is the one. None that a shard of an earlier boot reported takes it in:
        `current` tells whether a source is of its writer's newest epoch.
        """
        trace = self.traces.get(key)
        if trace is None:
            self._serial += 1
            trace = Trace(key, self._serial, dict(labels), ttl, now, now, now + ttl)
            self.traces[key] = trace
        trace.labels.update(labels)
        trace.ttl = ttl
        home = next((i for i in trace.incarnations if _same_request(i, source, current)), None)
        if home is None:
            home = Incarnation(prompt_len)
            trace.incarnations.append(home)
        home.sources.append(source)
        home.prompt_len = max(home.prompt_len, prompt_len)
        return trace

    def remove(self, key: TraceKey) -> bool:
        """Forgets a trace; False if it was not there."""
        return self.traces.pop(key, None) is not None

    def newest_first(self, run: str, before_serial: int = 0) -> Iterator[Trace]:
        """Traces of a run that appeared before a serial number (0: all)."""
        for trace in reversed(self.traces.values()):
            if trace.key[0] == run and not (before_serial and trace.serial >= before_serial):
                yield trace

    def chunks(self) -> set[int]:
        """Chunks that any trace points into."""
        return {c for t in self.traces.values() for i in t.incarnations for c in i.chunks()}

    def dump(self) -> dict[str, Any]:
        """For a snapshot."""
        layouts: dict[RoutingLayout, int] = {}
        traces = [
            {
                "key": t.key,
                "serial": t.serial,
                "labels": t.labels,
                "times": (t.ttl, t.created, t.updated, t.expires),
                "incarnations": [
                    {
                        "prompt_len": i.prompt_len,
                        "sources": [dump_source(s, layouts) for s in i.sources],
                    }
                    for i in t.incarnations
                ],
            }
            for t in self.traces.values()
        ]
        return {
            "serial": self._serial,
            "traces": traces,
            "layouts": [layout.to_proto().SerializeToString() for layout in layouts],
        }

    @classmethod
    def load(cls, data: dict[str, Any]) -> TraceIndex:
        """From a snapshot."""
        self = cls()
        self._serial = data["serial"]
        layouts = [
            RoutingLayout.from_proto(pb.RoutingLayout.FromString(b)) for b in data["layouts"]
        ]
        for t in data["traces"]:
            key = (t["key"][0], t["key"][1])
            trace = Trace(key, t["serial"], t["labels"], *t["times"])
            for i in t["incarnations"]:
                incarnation = Incarnation(i["prompt_len"])
                incarnation.sources = [load_source(s, layouts) for s in i["sources"]]
                trace.incarnations.append(incarnation)
            self.traces[key] = trace
        return self


def _same_request(
    incarnation: Incarnation, source: Source, current: Callable[[Source], bool]
) -> bool:
    """Whether a source is another part of the engine request that an incarnation holds."""
    return all(
        other.writer.engine_id == source.writer.engine_id
        and other.request_id == source.request_id
        and other.writer.shard != source.writer.shard
        and current(other)
        for other in incarnation.sources
    )


def dump_source(source: Source, layouts: dict[RoutingLayout, int]) -> dict[str, Any]:
    """For a snapshot; its layout is told by its number in `layouts`, which may grow."""
    return {
        "writer": tuple(source.writer),
        "epoch": source.epoch,
        "request_id": source.request_id,
        "layout": layouts.setdefault(source.layout, len(layouts)),
        "attempts": [a.tobytes() for a in source.attempts],
        "blocks": source.blocks,
        "ended": source.ended,
        "num_tokens": source.num_tokens,
        "finish_reason": source.finish_reason,
        "lost": [(m.start, m.stop, m.reason) for m in source.lost],
        "digests": source.digests,
    }


def load_source(data: dict[str, Any], layouts: list[RoutingLayout]) -> Source:
    """From a snapshot."""
    return Source(
        writer=WriterKey(*data["writer"]),
        epoch=data["epoch"],
        request_id=data["request_id"],
        layout=layouts[data["layout"]],
        attempts=[SpanList(a) for a in data["attempts"]],
        blocks=list(data["blocks"]),
        ended=data["ended"],
        num_tokens=data["num_tokens"],
        finish_reason=data["finish_reason"],
        lost=[Lost(*m) for m in data["lost"]],
        digests=[(p, v) for p, v in data["digests"]],
    )


def reason_name(finish_reason: int) -> str:
    """A FinishReason in the engine's words; "" if there is none."""
    return FinishReason(finish_reason).name.lower() if finish_reason else ""
