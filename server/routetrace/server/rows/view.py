"""View of an incarnation: the stored row of each cell, and the reasons of missing cells."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import NamedTuple

from routetrace.codec.records import Provenance
from routetrace.server.index.traces.lineage import Incarnation, Part, parts_of
from routetrace.server.index.traces.refs import ROW_BITS
from routetrace.server.index.traces.sources import Source
from routetrace.server.index.traces.spans import (
    FOREVER,
    Interval,
    Span,
    SpanList,
    intersect,
    merge,
    subtract,
)
from routetrace.v1 import routetrace_pb2 as pb

#: Holes of a view that are searched one by one in the rows of another request.
_MAX_TOUCHED = 8


@dataclass(frozen=True, slots=True)
class Selection:
    """Selected cells of an incarnation, and the rows that count."""

    start: int
    stop: int
    layers: tuple[int, ...]
    policy: int = pb.READ_POLICY_AS_SAMPLED
    weight_version: int | None = None
    """Weight version of the rows; None: any."""
    ranges: tuple[Interval, ...] = ()
    """Ascending, disjoint, from `start` to `stop`; if empty: all positions between."""

    def before(self, stop: int, start: int = 0) -> list[Interval]:
        """Return the selected positions in [start, stop)."""
        ranges = self.ranges or ((self.start, self.stop),)
        return [(max(a, start), min(b, stop)) for a, b in ranges if max(a, start) < min(b, stop)]


class Segment(NamedTuple):
    """Served span: rows of one source, disjoint in cells from all other segments."""

    source: int
    """Index in the trace."""
    attempt: int
    span: Span
    layers: tuple[int, ...] = ()
    """Layers that are served of it, ascending; empty: all selected ones of its source."""

    def column(self, sources: Sequence[Source]) -> Container[int]:
        """Return the layers that are served of it."""
        return self.layers or sources[self.source].layout.column


def view(incarnation: Incarnation, selection: Selection) -> list[Segment]:
    """Return the served segments of any weight version: ascending, no cell twice.

    A cell is served from the first part of its owner that has it.

    Args:
        incarnation: incarnation to read.
        selection: selected cells.
    """
    latest = selection.policy == pb.READ_POLICY_LATEST
    layers = frozenset(selection.layers)
    segments: list[Segment] = []
    for owned in incarnation.owned(latest=latest):
        # N tokens have N - 1 rows: rows beyond are not of this request.
        whole = selection.before(min(incarnation.num_rows, owned.stop), owned.start)
        if whole:
            segments += _rows_of(parts_of(owned, latest=latest), whole, layers)
    segments.sort(key=lambda s: s.span.position)
    return _joined(segments)


def _rows_of(
    parts: Iterable[Part],
    whole: list[Interval],
    layers: frozenset[int],
) -> Iterator[Segment]:
    """Yield the rows of selected positions, each cell of the first part that has it."""
    claimed: dict[frozenset[int], list[Interval]] = {}
    todo = whole
    for part in parts:
        if not todo:
            break
        for number, attempt, spans, confirmed, lost in _passes(part):
            held = layers.intersection(part.request.sources[number].layout.layer_ids)
            bounds = part.start, min(part.stop, confirmed)
            wanted = intersect(whole, [bounds])
            # A request that was repeated often has many attempts, most of which add nothing.
            if not held or not wanted or not _touches(spans, todo):
                continue
            taken = {
                group: merge(i for other, ii in claimed.items() if other & group for i in ii)
                for group in _divided(held, claimed)
            }
            index = part.request.members[number][0]
            new: list[Interval] = []
            for span in spans:
                row = span._replace(provenance=Provenance.HANDOFF) if part.given else span
                for start, stop in wanted:
                    if span.stop <= start or span.position >= stop:
                        continue
                    some = max(start, span.position), min(stop, span.stop)
                    new.append(some)
                    if lost:
                        continue
                    if not claimed:  # most traces have one source
                        yield Segment(index, attempt, row.cut(*some))
                        continue
                    free = {group: subtract(some, ii) for group, ii in taken.items()}
                    for a, b, given in by_layers(free):
                        yield Segment(index, attempt, row.cut(a, b), given)
            for group, ii in taken.items():
                claimed[group] = merge([*ii, *new])
            todo = _unclaimed(whole, layers, claimed)


def _touches(spans: SpanList, intervals: Sequence[Interval]) -> bool:
    """Whether spans may have positions in ascending intervals."""
    if len(intervals) > _MAX_TOUCHED:
        intervals = [(intervals[0][0], intervals[-1][1])]
    return any(spans.overlaps(a, b) for a, b in intervals)


def _unclaimed(
    whole: list[Interval],
    layers: frozenset[int],
    claimed: Mapping[frozenset[int], list[Interval]],
) -> list[Interval]:
    """Return the positions that are not claimed in all layers."""
    if not layers.issubset(chain.from_iterable(claimed)):
        return whole
    gaps = (gap for ii in claimed.values() for wanted in whole for gap in subtract(wanted, ii))
    return merge(gaps)


def _divided(
    held: frozenset[int], claimed: Mapping[frozenset[int], object]
) -> list[frozenset[int]]:
    """Divide layers into groups that every earlier claim holds as a whole, or not at all.

    Engines of one trace may divide the layers among their shards in different ways.
    """
    if all(held <= other or not held & other for other in claimed):
        return [held]
    groups: dict[tuple[bool, ...], set[int]] = {}
    for layer in held:
        groups.setdefault(tuple(layer in other for other in claimed), set()).add(layer)
    return [frozenset(group) for group in groups.values()]


def by_layers(
    free: Mapping[frozenset[int], list[Interval]],
) -> Iterator[tuple[int, int, tuple[int, ...]]]:
    """Yield (start, stop, layers) of the free intervals of layers, ascending and disjoint.

    Args:
        free: ascending, disjoint intervals by group of layers. Layers of all groups: yielded as ().
    """
    if len(free) == 1:
        yield from ((a, b, ()) for intervals in free.values() for a, b in intervals)
        return
    edges = {edge for intervals in free.values() for interval in intervals for edge in interval}
    for start, stop in pairwise(sorted(edges)):
        groups = [
            group
            for group, intervals in free.items()
            if any(a <= start and stop <= b for a, b in intervals)
        ]
        if groups:
            whole = len(groups) == len(free)
            yield start, stop, () if whole else tuple(sorted(frozenset().union(*groups)))


def _joined(segments: list[Segment]) -> list[Segment]:
    """Join adjacent parts of the same span."""
    joined: list[Segment] = []
    # By source, attempt, frame and layers.
    last: dict[tuple[int, int, int, tuple[int, ...]], int] = {}
    for segment in segments:
        span = segment.span
        key = segment.source, segment.attempt, span.ref >> ROW_BITS, segment.layers
        at = last.get(key)
        before = joined[at].span if at is not None else None
        if (
            at is not None
            and before
            and span
            == before._replace(
                position=before.stop, length=span.length, ref=before.ref + before.length
            )
        ):
            joined[at] = segment._replace(span=before._replace(length=before.length + span.length))
        else:
            last[key] = len(joined)
            joined.append(segment)
    return joined


def _passes(part: Part) -> Iterator[tuple[int, int, SpanList, int, bool]]:
    """Yield (index of the source in the request, attempt, spans, confirmed, lost) of a part.

    The first attempt of all shards, then the second of all: a context-parallel rank may compute in
    one attempt the rows that another rank computed before. What an attempt lost comes after its
    rows at all shards, and no other attempt supplies it.
    """
    for attempt in part.attempts:
        for number, source in enumerate(part.request.sources):
            if attempt < len(source.attempts):
                yield number, attempt, source.attempts[attempt], source.confirmed(attempt), False
        for number, source in enumerate(part.request.sources):
            if lost := source.lost_in(attempt):
                yield number, attempt, lost, FOREVER, True


def covered(sources: Sequence[Source], segments: list[Segment], layer: int) -> list[Interval]:
    """Return the positions of one layer that segments cover."""
    return merge((s.span.position, s.span.stop) for s in segments if layer in s.column(sources))


def covers(sources: Sequence[Source], segments: list[Segment], selection: Selection) -> bool:
    """Whether segments cover every selected cell."""
    wanted = selection.before(selection.stop)
    # Sources without segments do not count: an id that is reused often has many.
    groups = layer_groups(columns_of(sources, segments), selection.layers)
    return all(covered(sources, segments, group[0]) == wanted for group in groups)


def layer_groups(columns: Sequence[Container[int]], layers: Sequence[int]) -> list[list[int]]:
    """Group layers that are in the same columns: they have the same gaps."""
    distinct = list({id(column): column for column in columns}.values())
    if len(distinct) == 1:  # nearly all traces: in it, or not
        [column] = distinct
        held = [layer for layer in layers if layer in column]
        others = [] if len(held) == len(layers) else [i for i in layers if i not in column]
        groups_of_two = (held, others) if held[:1] == list(layers[:1]) else (others, held)
        return [group for group in groups_of_two if group]
    groups: dict[object, list[int]] = {}
    for layer in layers:
        groups.setdefault(tuple(layer in column for column in distinct), []).append(layer)
    return list(groups.values())


def columns_of(sources: Sequence[Source], segments: Iterable[Segment]) -> list[Container[int]]:
    """Return the layers of segments, each combination of a source once."""
    each = {(s.source, s.layers): s for s in segments}
    return [segment.column(sources) for segment in each.values()]
