"""Which stored row answers for which cell: what a reader gets, what it does not get, and why."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import chain, islice, pairwise
from typing import NamedTuple

from routetrace.server.joins import Incarnation, Part, Request
from routetrace.server.spans import FOREVER, Interval, Span, SpanList, merge, subtract
from routetrace.server.trace_index import Lost, Source
from routetrace.v1 import routetrace_pb2 as pb


@dataclass(frozen=True, slots=True)
class Selection:
    """Cells of an incarnation that are asked for, and which rows count."""

    start: int
    stop: int
    layers: tuple[int, ...]
    policy: int = pb.READ_POLICY_AS_SAMPLED
    weight_version: int | None = None
    """Only rows that it computed; None: those of any."""
    ranges: tuple[Interval, ...] = ()
    """Ascending and apart, the first from `start`, the last to `stop`; if empty: all of it."""

    def before(self, stop: int) -> list[Interval]:
        """The positions that are asked for, up to `stop`."""
        ranges = self.ranges or ((self.start, self.stop),)
        return [(a, min(b, stop)) for a, b in ranges if a < min(b, stop)]


class Segment(NamedTuple):
    """A span as it is served: rows of one source, disjoint in cells from all other segments."""

    source: int
    """Index in the trace."""
    attempt: int
    span: Span


def view(
    sources: Sequence[Source], incarnation: Incarnation, selection: Selection
) -> list[Segment]:
    """What a reader gets: ascending segments, no cell twice.

    Of the parts that have a row, as sampled the first one gives it, and of its attempts the first;
    with `latest` the attempts are looked through from the last.

    Args:
        sources: of the trace.
        incarnation: what is read.
        selection: what is asked for.
    """
    latest = selection.policy == pb.READ_POLICY_LATEST
    layers = frozenset(selection.layers)
    # N tokens have N - 1 rows: what an engine computed beyond is not this request's.
    whole = selection.before(incarnation.num_rows)
    claimed: dict[frozenset[int], list[Interval]] = {}
    segments = []
    for request, part_stop in incarnation.latest if latest else incarnation.as_sampled:
        if layers == {layer for held, ii in claimed.items() if ii == whole for layer in held}:
            break  # of a request that was run again and again there are many parts
        for number, attempt, spans, confirmed in _passes(request, latest):
            held = layers.intersection(sources[number].layout.layer_ids)
            wanted = selection.before(min(incarnation.num_rows, part_stop, confirmed))
            if not held or not wanted:
                continue
            taken = merge(i for other, ii in claimed.items() if other & held for i in ii)
            new = []
            for span in spans:
                if selection.weight_version not in (None, span.weight_version):
                    continue
                for start, stop in wanted:
                    if span.stop <= start or span.position >= stop:
                        continue
                    for a, b in subtract((max(start, span.position), min(stop, span.stop)), taken):
                        segments.append(Segment(number, attempt, span.cut(a, b)))
                        new.append((a, b))
            claimed[held] = merge([*claimed.get(held, ()), *new])
    segments.sort(key=lambda s: s.span.position)
    return segments


def _passes(request: Request, latest: bool) -> Iterator[tuple[int, int, SpanList, int]]:
    """The attempts of a request as (source, attempt, spans, confirmed), the first ones first.

    All shards' first, then all shards' second: a context-parallel rank may compute in one attempt
    what another one computed before.
    """
    rounds = range(max(len(s.attempts) for s in request.sources))
    for i in reversed(rounds) if latest else rounds:
        for index, source in request.members:
            if i < len(source.attempts):
                yield index, i, source.attempts[i], source.confirmed(i)


def covered(sources: Sequence[Source], segments: list[Segment], layer: int) -> list[Interval]:
    """Positions that the segments give for one layer."""
    return merge(
        (s.span.position, s.span.stop) for s in segments if layer in sources[s.source].layout.column
    )


def covers(sources: Sequence[Source], segments: list[Segment], selection: Selection) -> bool:
    """Whether segments give every selected cell."""
    wanted = selection.before(selection.stop)
    # Only those that gave segments count: of an id that is used again and again there are many.
    held = [sources[index] for index in sorted({s.source for s in segments})]
    groups = layer_groups(held, selection.layers)
    return all(covered(sources, segments, group[0]) == wanted for group in groups)


def missing(
    sources: Sequence[Source],
    incarnation: Incarnation,
    segments: list[Segment],
    selection: Selection,
    default: int,
) -> list[pb.MissingRange]:
    """Selected cells that the segments do not give, and why.

    Args:
        sources: of the trace.
        incarnation: what is read.
        segments: what is served.
        selection: what is asked for.
        default: the reason (a MissingReason) where no agent gave one.
    """
    others: list[Segment] = []
    if selection.weight_version is not None:
        others = view(sources, incarnation, replace(selection, weight_version=None))
    ranges = []
    # Those that gave rows, or notes; of an id that is used again and again there are many others.
    indexes = {s.source for s in chain(segments, others)}
    indexes.update(index for request, _ in _own(incarnation) for index, _ in request.members)
    held = [sources[index] for index in sorted(indexes)]
    for group in layer_groups(held, selection.layers):
        notes = [
            Lost(a, b, pb.MISSING_REASON_OTHER_VERSION)
            for a, b in covered(sources, others, group[0])
        ]
        notes = _resolve([*notes, *_notes(incarnation, group[0])])
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


def layer_groups(sources: Sequence[Source], layers: Sequence[int]) -> list[list[int]]:
    """Layers that the same sources hold: they have the same gaps."""
    groups: dict[tuple[bool, ...], list[int]] = {}
    for layer in layers:
        groups.setdefault(tuple(layer in s.layout.column for s in sources), []).append(layer)
    return list(groups.values())


def _notes(incarnation: Incarnation, layer: int) -> Iterator[Lost]:
    """What was said to be lost of one layer, by those whose rows it would have been."""
    for request, stop in _own(incarnation):
        for source in request.sources:
            if layer in source.layout.column:
                for note in source.lost:
                    if note.start < stop:
                        yield Lost(note.start, min(note.stop, stop), note.reason)


def _own(incarnation: Incarnation) -> list[Part]:
    """The parts whose rows its tokens were sampled by; others only fill holes."""
    return [*incarnation.continued, Part(incarnation.request, FOREVER)]


def _resolve(notes: list[Lost]) -> list[Lost]:
    """Notes that do not overlap, ascending; where several did, the one that came first."""
    coming = sorted(range(len(notes)), key=lambda i: notes[i].start, reverse=True)
    here: list[int] = []  # those that have started, as a heap: the first one on top
    resolved = []
    for a, b in pairwise(sorted({edge for note in notes for edge in (note.start, note.stop)})):
        while coming and notes[coming[-1]].start <= a:
            heappush(here, coming.pop())
        while here and notes[here[0]].stop <= a:
            heappop(here)
        if here:
            resolved.append(Lost(a, b, notes[here[0]].reason))
    return resolved


def _reasons(gap: Interval, notes: list[Lost], default: int) -> Iterator[tuple[int, int, int]]:
    """Cuts a gap where the reason changes; `notes` do not overlap."""
    start, stop = gap
    last = (start, start, default)
    first = bisect_right(notes, start, key=lambda note: note.stop)
    for note in chain(islice(notes, first, None), (Lost(stop, stop, default),)):
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
