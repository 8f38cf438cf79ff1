"""Cells without rows: the reason of each."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from itertools import chain, islice, pairwise
from typing import NamedTuple

from routetrace.codec.records import UNKNOWN_VERSION, FinishReason
from routetrace.server.index.traces.lineage import Incarnation, Owned, Request, parts_of
from routetrace.server.index.traces.sources import Source
from routetrace.server.index.traces.spans import FOREVER, Interval, merge, subtract
from routetrace.server.rows.view import (
    Segment,
    Selection,
    columns_of,
    covered,
    layer_groups,
)
from routetrace.v1 import routetrace_pb2 as pb

_KV_UNKNOWN = pb.MISSING_REASON_KV_UNKNOWN

Holes = dict[frozenset[int], list[Interval]]
"""Positions without rows, ascending and disjoint, by disjoint layers."""


class Note(NamedTuple):
    """Why positions [start, stop) have no rows: a MissingReason."""

    start: int
    stop: int
    reason: int


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
    held = columns_of(sources, chain(segments, others))
    latest = selection.policy == pb.READ_POLICY_LATEST
    owned = incarnation.owned(latest=latest)
    held += [s.layout.column for one in owned for s in one.owner.sources]
    for group in layer_groups(held, selection.layers):
        notes = [Note(0, owned[0].start, pb.MISSING_REASON_AMBIGUOUS)]
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
    groups = layer_groups([*own, *columns_of(sources, segments)], layers) if owned else ()
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


def _notes(owned: Sequence[Owned], layer: int, latest: bool) -> Iterator[Note]:
    """Yield the missing positions of one layer that their owners reported, with reasons.

    Unknown KV comes last: a pass that computed the position, and was lost, came after it, at
    whichever context-parallel rank.
    """
    for one in owned:
        owner, start, stop, _ = one
        sources = [source for source in owner.sources if layer in source.layout.column]
        parts = [*parts_of(one, latest=latest)]
        counted = [i for part in parts if not part.given for i in part.attempts]
        notes = [
            Note(
                max(span.position, part.start),
                min(span.stop, part.stop),
                _KV_UNKNOWN if part.given else span.provenance,
            )
            for part in parts
            for attempt in part.attempts
            for source in part.request.sources
            if layer in source.layout.column
            for span in source.lost_in(attempt) or ()
        ]
        notes += [
            Note(0, FOREVER, pb.MISSING_REASON_CORRUPT) for source in sources if not source.placed
        ]
        notes += _unknown_kv(sources)
        for source in sources:
            if source.finish_reason == FinishReason.ABORT:
                held = [i for i in counted if i < len(source.attempts)]
                ends = (min(source.attempts[i].end, source.confirmed(i)) for i in held)
                notes.append(Note(max(ends, default=0), FOREVER, pb.MISSING_REASON_ABORTED))
        for a, b, reason in notes:
            if max(a, start) < min(b, stop):
                yield Note(max(a, start), min(b, stop), reason)


def _unknown_kv(sources: Sequence[Source]) -> Iterator[Note]:
    """Yield the unknown KV of a request that none of its sources has a row of in that attempt."""
    for attempt in sorted({attempt for source in sources for attempt in source.unknown}):
        held = merge(
            (span.position, span.stop)
            for source in sources
            if attempt < len(source.attempts)
            for span in source.attempts[attempt]
        )
        for source in sources:
            for interval in source.unknown.get(attempt, ()):
                for a, b in subtract(interval, held):
                    yield Note(a, b, _KV_UNKNOWN)


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
