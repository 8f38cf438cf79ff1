"""Stand-in rows: rows that another trace of the run computed for the same tokens.

External KV has no rows. Where digests prove that a forward pass of another trace computed rows of
the same tokens, those are served instead, each marked with its trace. Nothing is stored: the result
is recomputed when one of the traces changes, and the rows of a deleted trace are no longer served.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain

from routetrace.codec.records import UNKNOWN_VERSION, Provenance
from routetrace.common.layout import ModelLayout
from routetrace.server.index.traces.lineage import Incarnation, Request
from routetrace.server.index.traces.prefix_index import PrefixIndex
from routetrace.server.index.traces.sources import Source
from routetrace.server.index.traces.spans import Interval, Span, intersect, merge, subtract
from routetrace.server.index.traces.trace import Trace
from routetrace.server.rows.view import Segment, by_layers
from routetrace.v1 import routetrace_pb2 as pb

#: Maximum traces that are searched per digest; usually all of them have rows.
MAX_LOOKED_AT = 8

#: Digests that are looked up at a time, last ones first.
_LOOKED_UP = 32

Holes = dict[int, list[Interval]]
"""Positions with unknown rows by layer, ascending and disjoint."""


@dataclass(eq=False)
class StandIns:
    """Rows of other traces for an incarnation, at one moment."""

    segments: list[Segment] = field(default_factory=list)
    """By position; each `source` is an index of `sources`, each `attempt` one of `trace_ids`."""
    sources: list[Source] = field(default_factory=list)
    traces: list[tuple[Trace, int]] = field(default_factory=list)
    """Traces with rows, and their number of changes."""
    whole: bool = True
    """Whether all holes are filled."""

    @property
    def trace_ids(self) -> list[str]:
        """Ids of the traces with rows."""
        return [trace.key[1] for trace, _ in self.traces]


def stand_ins(
    index: PrefixIndex, trace: Trace, incarnation: Incarnation, holes: Holes, policy: int
) -> StandIns:
    """Find rows for holes of an incarnation.

    The longest prefix comes first. Of several traces with the same prefix, those that appeared
    before the reader's come first, latest first, since their KV can have been restored; then the
    later ones, in order. So the result does not change as more traces arrive.

    Args:
        index: index of all traces.
        trace: trace of the incarnation.
        incarnation: incarnation to read.
        holes: holes of its prompt; filled ones are removed.
        policy: PrefixRows policy.
    """
    found = StandIns()
    request = incarnation.request
    version = None
    if policy != pb.PREFIX_ROWS_ANY_VERSION:
        version = first_version(request)
        if version is None:
            return found
    lowest = min(intervals[0][0] for intervals in holes.values() if intervals)
    proofs = [
        (position, digest)
        for position, digest in reversed(request.digests.items())
        if lowest < position <= request.prompt_len
    ]
    seen: set[Request] = set()
    for position, digest, serials in _holders(index, trace, proofs, version):
        looked_at = 0
        for other in _nearest(index, serials, trace):
            if looked_at == MAX_LOOKED_AT or not any(holes.values()):
                break
            alike = other.join.having(position, digest)
            new = [r for r in alike if r not in seen]
            looked_at += bool(new)
            seen.update(new)
            _take(found, other, new, position, request, holes, version)
        if not any(holes.values()):
            break
    found.whole = not any(holes.values())
    found.segments.sort(key=lambda s: s.span.position)
    return found


def _holders(
    index: PrefixIndex, trace: Trace, proofs: list[tuple[int, int]], version: int | None
) -> Iterator[tuple[int, int, list[int]]]:
    """Yield each proof with the traces that may hold rows, looked up lazily."""
    for i in range(0, len(proofs), _LOOKED_UP):
        some = proofs[i : i + _LOOKED_UP]
        holders = index.holders(trace.key[0], [digest for _, digest in some], version)
        for (position, digest), serials in zip(some, holders, strict=True):
            yield position, digest, serials


def first_version(request: Request) -> int | None:
    """Return the weight version of the first row that a request computed; None if unknown.

    It is known once its shards have reported all positions before that row, if it was given.
    """
    for i in range(max(len(s.attempts) for s in request.sources)):
        computed = [
            (span, source)
            for source in request.sources
            if i < len(source.attempts)
            for span in source.attempts[i]
            if span.provenance == Provenance.FORWARD
        ]
        if computed:
            first, _ = min(computed, key=lambda c: c[0].position)
            known = all(
                not subtract((0, first.position), merge(reported))
                for reported in _reported(request, i)
            )
            version = first.weight_version
            return version if known and version != UNKNOWN_VERSION else None
    return None


def _reported(request: Request, attempt: int) -> Iterable[list[Interval]]:
    """Return the positions that shards reported, as rows or as lost, by the layers they hold.

    Context-parallel ranks hold the same layers, and each reports positions of its own.
    """
    by_layers: dict[tuple[int, ...], list[Interval]] = {}
    for source in request.sources:
        reported = by_layers.setdefault(source.layout.layer_ids, [])
        if attempt < len(source.attempts):
            reported += [(span.position, span.stop) for span in source.attempts[attempt]]
        reported += [(note.start, note.stop) for note in source.lost]
    return by_layers.values()


def _nearest(index: PrefixIndex, serials: list[int], own: Trace) -> Iterator[Trace]:
    """Yield other traces of the run: those before `own`, latest first, then those after it."""
    middle = bisect(serials, own.serial)
    for serial in chain(reversed(serials[:middle]), serials[middle:]):
        trace = index.trace(serial)
        if trace and trace is not own and trace.key[0] == own.key[0]:
            yield trace


def _take(
    found: StandIns,
    other: Trace,
    requests: list[Request],
    position: int,
    reader: Request,
    holes: Holes,
    version: int | None,
) -> None:
    """Fill holes with rows of another trace's requests that share the tokens before a position."""
    own = reader.sources[0]
    number = len(found.traces)
    for request in requests:
        stop = min(position, request.num_rows)
        for source, span in _computed(request, version):
            if not source.model or source.model != own.model:
                continue  # an unset model proves nothing
            if not _same_layout(source.layout, own.layout):
                continue
            groups: dict[tuple[Interval, ...], set[int]] = {}
            for layer in source.layout.layer_ids:
                groups.setdefault(tuple(holes.get(layer, ())), set()).add(layer)
            some = [(span.position, min(span.stop, stop))]
            free = {frozenset(held): intersect(some, [*hole]) for hole, held in groups.items()}
            if not any(free.values()):
                continue
            if len(found.traces) == number:
                found.traces.append((other, other.changes))
            if not found.sources or found.sources[-1] is not source:
                found.sources.append(source)
            for start, end, layers in by_layers(free):
                part = span.cut(start, end)._replace(provenance=Provenance.PREFIX)
                found.segments.append(Segment(len(found.sources) - 1, number, part, layers))
            for held, filled in free.items():
                for layer in held & holes.keys():
                    holes[layer] = [r for hole in holes[layer] for r in subtract(hole, filled)]


def _computed(request: Request, version: int | None) -> Iterator[tuple[Source, Span]]:
    """Yield the confirmed rows that forward passes of a request computed, first attempts first.

    Args:
        request: request with the rows.
        version: weight version; None: any.
    """
    for i in range(max(len(s.attempts) for s in request.sources)):
        for source in request.sources:
            if i < len(source.attempts):
                confirmed = source.confirmed(i)
                for span in source.attempts[i]:
                    forward = span.provenance == Provenance.FORWARD
                    wanted = forward and version in (None, span.weight_version)
                    if wanted and span.position < confirmed:
                        yield source, span.cut(0, confirmed)


def _same_layout(one: ModelLayout, other: ModelLayout) -> bool:
    """Whether rows of two shards are of the same layers of a model."""
    return one is other or (
        (one.moe_layer_ids, one.num_hidden_layers, one.num_experts, one.top_k)
        == (other.moe_layer_ids, other.num_hidden_layers, other.num_experts, other.top_k)
    )
