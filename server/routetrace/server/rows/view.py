"""View of an incarnation: the stored row of each cell, and the reasons of missing cells."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import chain, islice, pairwise
from typing import NamedTuple

from routetrace.codec.records import UNKNOWN_VERSION, FinishReason, Provenance
from routetrace.server.index.traces.lineage import Incarnation, Owned, Part, Request, parts_of
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

_KV_UNKNOWN = pb.MISSING_REASON_KV_UNKNOWN

#: Holes of a view that are searched one by one in the rows of another request.
_MAX_TOUCHED = 8


Holes = dict[frozenset[int], list[Interval]]
"""Positions without rows, ascending and disjoint, by disjoint layers."""


class Note(NamedTuple):
    """Why positions [start, stop) have no rows: a MissingReason."""

    start: int
    stop: int
    reason: int


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
            if lost := source.lost.get(attempt):
                yield number, attempt, lost, FOREVER, True


def covered(sources: Sequence[Source], segments: list[Segment], layer: int) -> list[Interval]:
    """Return the positions of one layer that segments cover."""
    return merge((s.span.position, s.span.stop) for s in segments if layer in s.column(sources))


def covers(sources: Sequence[Source], segments: list[Segment], selection: Selection) -> bool:
    """Whether segments cover every selected cell."""
    wanted = selection.before(selection.stop)
    # Sources without segments do not count: an id that is reused often has many.
    groups = layer_groups(_columns(sources, segments), selection.layers)
    return all(covered(sources, segments, group[0]) == wanted for group in groups)


def missing(
    sources: Sequence[Source],
    incarnation: Incarnation,
    segments: list[Segment],
    others: list[Segment],
    selection: Selection,
    default: int,
) -> list[pb.MissingRange]:
    """Return the selected cells that segments do not cover, with reasons.

    Args:
        sources: sources of the trace, and of the traces whose rows stand in.
        incarnation: incarnation to read.
        segments: served segments.
        others: segments without the selection's weight version; empty if it has none.
        selection: selected cells.
        default: MissingReason where no agent gave one.
    """
    ranges = []
    # Sources with rows or notes only: an id that is reused often has many others.
    held = _columns(sources, chain(segments, others))
    latest = selection.policy == pb.READ_POLICY_LATEST
    owned = incarnation.owned(latest=latest)
    held += [s.layout.column for one in owned for s in one.owner.sources]
    unowned = () if latest else incarnation.ambiguous
    for group in layer_groups(held, selection.layers):
        notes = [Note(a, b, pb.MISSING_REASON_AMBIGUOUS) for a, b in unowned]
        notes += [
            Note(a, b, pb.MISSING_REASON_OTHER_VERSION)
            for a, b in covered(sources, others, group[0])
        ]
        notes = _resolve([*notes, *_notes(owned, group[0], latest)])
        there = covered(sources, segments, group[0])
        asked = selection.before(selection.stop)
        gaps = (gap for wanted in asked for gap in subtract(wanted, there))
        for a, b, reason in chain.from_iterable(_reasons(gap, notes, default) for gap in gaps):
            ranges.append(
                pb.MissingRange(
                    start=a,
                    stop=b,
                    layer_ids=() if len(group) == len(selection.layers) else group,
                    reason=reason,  # type: ignore[arg-type]
                )
            )
    ranges.sort(key=lambda r: (r.start, list(r.layer_ids)))
    return ranges


def unknown(
    sources: Sequence[Source],
    incarnation: Incarnation,
    segments: list[Segment],
    layers: Sequence[int],
) -> dict[Request, Holes]:
    """Return the cells for which rows of other requests may stand in, by the owner.

    Args:
        sources: sources of the trace.
        incarnation: incarnation to read.
        segments: segments of its own requests.
        layers: layers to search.
    """
    holes: dict[Request, Holes] = {}
    owned = [
        one._replace(stop=min(one.stop, one.owner.num_reused, incarnation.num_rows))
        for one in incarnation.owned()
        if any(source.unknown for source in one.owner.sources)
        if one.owner.kv_version != UNKNOWN_VERSION and not one.owner.first_that_sampled
    ]
    own = (s.layout.column for one in owned for s in one.owner.sources)
    groups = layer_groups([*own, *_columns(sources, segments)], layers) if owned else ()
    for group in groups:
        there = covered(sources, segments, group[0])
        for one in owned:
            notes = _resolve([*_notes([one], group[0], latest=False)])
            for gap in subtract((one.start, one.stop), there):
                for a, b, reason in _reasons(gap, notes, pb.MISSING_REASON_UNSPECIFIED):
                    if reason == _KV_UNKNOWN:
                        of_owner = holes.setdefault(one.owner, {})
                        of_owner.setdefault(frozenset(group), []).append((a, b))
    return holes


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


def _columns(sources: Sequence[Source], segments: Iterable[Segment]) -> list[Container[int]]:
    """Return the layers of segments, each combination of a source once."""
    each = {(s.source, s.layers): s for s in segments}
    return [segment.column(sources) for segment in each.values()]


def _notes(owned: Sequence[Owned], layer: int, latest: bool) -> Iterator[Note]:
    """Yield the missing positions of one layer that their owners reported, with reasons.

    Unknown KV comes last: a pass that computed the position, and was lost, came after it, at
    whichever context-parallel rank.
    """
    for owner, start, stop, _ in owned:
        sources = [source for source in owner.sources if layer in source.layout.column]
        attempts = range(max(len(source.attempts) for source in owner.sources))
        counted = attempts[::-1] if latest else attempts[owner.first_that_sampled :]
        notes = [
            Note(span.position, span.stop, span.provenance)
            for attempt in counted
            for source in sources
            for span in source.lost.get(attempt, ())
        ]
        notes += [
            Note(0, FOREVER, pb.MISSING_REASON_CORRUPT) for source in sources if not source.placed
        ]
        notes += [Note(a, b, _KV_UNKNOWN) for source in sources for a, b in source.unknown]
        for source in sources:
            if source.finish_reason == FinishReason.ABORT:
                held = [i for i in counted if i < len(source.attempts)]
                ends = (min(source.attempts[i].end, source.confirmed(i)) for i in held)
                notes.append(Note(max(ends, default=0), FOREVER, pb.MISSING_REASON_ABORTED))
        for note in notes:
            if note.start < stop and note.stop > start:
                yield Note(max(note.start, start), min(note.stop, stop), note.reason)


def _resolve(notes: list[Note]) -> list[Note]:
    """Return disjoint, ascending notes; where several overlap, the first one counts."""
    coming = sorted(range(len(notes)), key=lambda i: notes[i].start, reverse=True)
    here: list[int] = []  # started notes as a heap, the first one on top
    resolved = []
    for a, b in pairwise(sorted({edge for note in notes for edge in (note.start, note.stop)})):
        while coming and notes[coming[-1]].start <= a:
            heappush(here, coming.pop())
        while here and notes[here[0]].stop <= a:
            heappop(here)
        if here:
            resolved.append(Note(a, b, notes[here[0]].reason))
    return resolved


def _reasons(gap: Interval, notes: list[Note], default: int) -> Iterator[tuple[int, int, int]]:
    """Cut a gap where the reason changes; `notes` are disjoint."""
    start, stop = gap
    last = (start, start, default)
    first = bisect_right(notes, start, key=lambda note: note.stop)
    for note in chain(islice(notes, first, None), (Note(stop, stop, default),)):
        for until, reason in ((note.start, default), (note.stop, note.reason)):
            until = min(until, stop)  # noqa: PLW2901
            if until <= last[1]:
                continue
            if reason != last[2]:
                if last[1] > last[0]:
                    yield last
                last = (last[1], until, reason)
            else:
                last = (last[0], until, reason)
        if note.stop >= stop:
            break
    if last[1] > last[0]:
        yield last
