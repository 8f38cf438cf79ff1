"""Rows that stand in (docs/rows.md, section 6): those that another request computed.

A cell may be missing because nothing says which pass made its KV. Where it is known of which weight
version that KV is, and digests prove that a forward pass of another request of the run computed the
same tokens with that version, its row can be served instead, marked with its trace. Nothing is
stored: the result is recomputed when one of the traces changes, and the rows of a deleted trace are
no longer served.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from routetrace.codec.records import Provenance
from routetrace.common.layout import ModelLayout
from routetrace.server.index.traces.lineage import Request
from routetrace.server.index.traces.prefix_index import PrefixIndex
from routetrace.server.index.traces.sources import Source
from routetrace.server.index.traces.spans import Interval, Span, intersect, merge, subtract
from routetrace.server.index.traces.trace import Trace
from routetrace.server.rows.gaps import Holes
from routetrace.server.rows.view import Segment, by_layers
from routetrace.v1 import routetrace_pb2 as pb

#: Maximum traces that are looked at per digest.
MAX_LOOKED_AT = 256

_Row = tuple[Source, Span]


@dataclass(eq=False)
class StandIns:
    """Rows of other requests for an incarnation, at one moment."""

    segments: list[Segment] = field(default_factory=list)
    """By position; each `source` is an index of `sources`, each `attempt` one of `trace_ids`."""
    sources: list[Source] = field(default_factory=list)
    traces: list[tuple[Trace, int]] = field(default_factory=list)
    """Traces with rows, and their number of changes."""
    lasting: bool = False
    """Whether changes of further traces cannot change it."""

    @property
    def trace_ids(self) -> list[str]:
        """Ids of the traces with rows."""
        return [trace.key[1] for trace, _ in self.traces]


class _Candidate(NamedTuple):
    """Pass of a request that may have rows."""

    trace: Trace
    request: Request
    attempt: int
    stop: int
    """One past the last position at which its row is proven to be of the same tokens."""


def stand_ins(
    index: PrefixIndex, trace: Trace, holes: Mapping[Request, Holes], policy: int
) -> StandIns:
    """Find rows for the holes of an incarnation.

    Args:
        index: index of all traces.
        trace: trace of the incarnation.
        holes: holes by the owner of their positions.
        policy: PREFIX_ROWS_ANY or PREFIX_ROWS_UNIQUE.
    """
    found, unique, left = StandIns(), policy == pb.PREFIX_ROWS_UNIQUE, False
    for owner, some in holes.items():
        free = dict(some)
        proofs, holders, untold = _holders(index, trace, owner, free)
        passes: Iterable[tuple[Trace, list[_Row]]] = (
            (one.trace, [*_rows_of(one, owner)])
            for held in holders
            for one in _of_trace(index, trace, owner, held, proofs, free)
        )
        if unique:
            passes = [*passes]
            several = merge([*untold, *_of_several(rows for _, rows in passes)])
            for layers, intervals in free.items():
                free[layers] = _without(intervals, several)
        for other, rows in passes:
            _take(found, other, rows, free)
        left = left or any(free.values())
    found.lasting = not (left or unique)
    found.segments.sort(key=lambda s: s.span.position)
    return found


def _holders(
    index: PrefixIndex, trace: Trace, owner: Request, holes: Holes
) -> tuple[list[tuple[int, int]], list[npt.NDArray[Any]], list[Interval]]:
    """Find the traces that may have rows for holes of one owner.

    Returns:
        (position, digest) of the owner's prefixes, the longest first; HOLDERs of each trace in the
        order of section 6, whose `prefix` is an index of these; positions for which more than
        MAX_LOOKED_AT traces may have rows.
    """
    there = np.array(merge(one for intervals in holes.values() for one in intervals)).T
    proofs = [
        (position, digest)
        for position, digest in reversed(owner.digests.items())
        if there[0, 0] < position <= owner.prompt_len
    ]
    if not proofs:
        return [], [], []
    ends = np.array([position for position, _ in proofs])
    last = np.minimum(ends, there[1, np.searchsorted(there[0], ends) - 1]) - 1
    digests = [digest for _, digest in proofs]
    holders = index.holders(trace.key[0], digests, last, owner.kv_version)
    # Those before the reader's, and itself, the last one first, then those after it.
    serial, own = holders["serial"], trace.serial
    order = np.where(serial > own, serial, own - serial)
    chosen = np.lexsort((order, holders["prefix"]))
    holders, order = holders[chosen], order[chosen]
    prefix = holders["prefix"]
    far = np.arange(len(prefix)) - np.searchsorted(prefix, prefix) >= MAX_LOOKED_AT
    untold = [(first, proofs[i][0]) for i, _, first in holders[far].tolist()]
    holders, order = holders[~far], order[~far]
    chosen = np.lexsort((holders["prefix"], order))
    each = np.split(holders[chosen], np.flatnonzero(np.diff(order[chosen])) + 1)
    return proofs, each if len(holders) else [], untold


def _of_trace(
    index: PrefixIndex,
    trace: Trace,
    owner: Request,
    held: npt.NDArray[Any],
    proofs: Sequence[tuple[int, int]],
    free: Holes,
) -> Iterator[_Candidate]:
    """Yield the passes of one trace that may have rows, by request, then by attempt.

    Args:
        index: index of all traces.
        trace: trace of the owner.
        owner: owner of the holes.
        held: HOLDERs of the trace, by prefix.
        proofs: (position, digest) of the prefixes, the longest first.
        free: holes that are left.
    """
    first = int(held["first"].min())
    if not any(intervals and intervals[-1][1] > first for intervals in free.values()):
        return
    other = index.trace(int(held["serial"][0]))
    if other is None or other.key[0] != trace.key[0]:
        return
    join, stops = other.join, dict[Request, int]()
    for i in held["prefix"]:
        position, digest = proofs[i]
        for request in join.having(position, digest):
            stops.setdefault(request, position)
        if len(stops) == len(join.requests):
            break
    for request, stop in sorted(stops.items(), key=lambda one: one[0].number):
        if other is not trace or request.number != owner.number:
            for attempt in range(max(len(s.attempts) for s in request.sources)):
                yield _Candidate(other, request, attempt, min(stop, request.num_rows))


def _rows_of(candidate: _Candidate, owner: Request) -> Iterator[_Row]:
    """Yield the confirmed rows that a pass computed, where they may stand in for an owner's."""
    version, own, attempt = owner.kv_version, owner.sources[0], candidate.attempt
    for source in candidate.request.sources:
        if attempt >= len(source.attempts) or not source.model or source.model != own.model:
            continue  # an unset model proves nothing
        if not _same_layout(source.layout, own.layout):
            continue
        stop = min(candidate.stop, source.confirmed(attempt))
        for span in source.attempts[attempt].between(0, stop):
            if span.provenance == Provenance.FORWARD and span.weight_version == version:
                yield source, span


def _of_several(passes: Iterable[Sequence[_Row]]) -> list[Interval]:
    """Return the positions at which several passes have rows, of whichever layers."""
    once: list[Interval] = []
    several: list[Interval] = []
    for rows in passes:
        mine = merge((span.position, span.stop) for _, span in rows)
        several += intersect(once, mine)
        once = merge([*once, *mine])
    return several


def _take(found: StandIns, trace: Trace, rows: Sequence[_Row], holes: Holes) -> None:
    """Fill holes with rows of one pass; filled ones are removed."""
    number = next((n for n, (one, _) in enumerate(found.traces) if one is trace), -1)
    for source, span in rows:
        column = frozenset(source.layout.layer_ids)
        for layers in [layers for layers in holes if layers & column and not layers <= column]:
            intervals = holes.pop(layers)
            holes[layers & column], holes[layers - column] = intervals, intervals
        held = {layers: holes[layers] for layers in holes if layers <= column}
        some = [(span.position, span.stop)]
        free = {layers: intersect(some, intervals) for layers, intervals in held.items()}
        if not any(free.values()):
            continue
        if number < 0:
            number = len(found.traces)
            found.traces.append((trace, trace.changes))
        if not found.sources or found.sources[-1] is not source:
            found.sources.append(source)
        if others := column.difference(*free):
            free[others] = []
        for start, end, given in by_layers(free):
            part = span.cut(start, end)._replace(provenance=Provenance.PREFIX)
            found.segments.append(Segment(len(found.sources) - 1, number, part, given))
        for layers, intervals in held.items():
            holes[layers] = _without(intervals, free[layers])


def _without(intervals: list[Interval], others: list[Interval]) -> list[Interval]:
    """Return the parts of intervals that others do not cover."""
    return [rest for one in intervals for rest in subtract(one, others)]


def _same_layout(one: ModelLayout, other: ModelLayout) -> bool:
    """Whether rows of two shards are of the same layers of a model."""
    return one is other or (
        (one.moe_layer_ids, one.num_experts, one.top_k)
        == (other.moe_layer_ids, other.num_experts, other.top_k)
    )
