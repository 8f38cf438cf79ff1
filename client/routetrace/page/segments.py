"""Rectangles of cells: those that are there, by version and origin, and the missing, by reason."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from routetrace.client import RowOrigin, Trace, TraceDescription
from routetrace.client._ranges import column_index
from routetrace.client.stat import TraceFacts, version_number
from routetrace.common.missing import MissingReason

#: Most rectangles of one answer, about 1 MB of JSON.
MAX_RECTANGLES = 20_000
#: Strips of equal cells that are merged at once; more are joined over tokens first.
_MAX_RUNS = 1_000_000

#: Reasons, the loudest last: that of a joined rectangle is the loudest of its cells.
LOUDNESS = (
    MissingReason.UNKNOWN,
    MissingReason.NOT_YET,
    MissingReason.OTHER_VERSION,
    MissingReason.ABORTED,
    MissingReason.NOT_PROVEN,
    MissingReason.AMBIGUOUS,
    MissingReason.KV_UNKNOWN,
    MissingReason.NOT_CAPTURED,
    MissingReason.INVALID_IDS,
    MissingReason.REJECTED,
    MissingReason.AGENT_CLOSED,
    MissingReason.AGENT_LOST,
    MissingReason.QUEUE_FULL,
    MissingReason.CORRUPT,
)
_LOUD = {reason: number for number, reason in enumerate(LOUDNESS)}
#: Origins of rows, the strongest last where pipeline stages differ.
_ORIGINS = {"forward": 0, "slot": 1, "handoff": 1}
#: Integers that a JavaScript number holds exactly.
_EXACT = 2**53

_Cells = npt.NDArray[np.unsignedinteger[Any]]


class Rectangles(NamedTuple):
    """Rectangles of equal cells, in columns, ordered by position, then layer; half open."""

    t0: npt.NDArray[np.int64]
    t1: npt.NDArray[np.int64]
    l0: npt.NDArray[np.int64]
    l1: npt.NDArray[np.int64]
    kind: npt.NDArray[np.int64]


class _Kind(NamedTuple):
    """Facts about cells that are there; the newest version is the greatest, none the smallest."""

    known: bool
    """Whether the version is known."""
    version: int
    origin: int
    """One of _ORIGINS."""
    source: int = -1
    """Index of the agent; -1: not known."""
    attempt: int = -1
    """Attempt of the engine request, from 0; -1: not known."""


class _Kinds(NamedTuple):
    """Cells of a trace as numbers; the higher one is shown where cells are joined."""

    cells: _Cells
    """[layers, tokens]: below `len(present)` those that are there, above the missing."""
    present: list[_Kind]
    """By number."""


def segments_of(
    trace: Trace, origins: Sequence[RowOrigin] = (), limit: int = MAX_RECTANGLES
) -> dict[str, Any]:
    """Return the rectangles of a trace: t positions, l columns of `layer_ids`, half open.

    Every cell is in exactly one of them. If there are more than `limit`, 2^z neighbouring tokens
    are joined, and `joined` is z: a joined cell is missing if one of its cells is, with the loudest
    reason; else it has the newest version, and the strongest origin of its rows.

    Where pipeline stages computed a position with different versions, cells without an origin have
    the newest.

    Args:
        trace: a whole trace, or part of one.
        origins: origins of its rows, as of the same moment.
        limit: most rectangles, at least the number of layers.
    """
    sources = {one[3:5]: number for number, one in enumerate({o[3:5]: o for o in origins}.values())}
    cells, present = _kinds(trace, origins, sources)
    joined, found = 0, _rectangles(cells, 1, limit)
    while found is None:
        if cells.shape[1] % 2:
            cells = np.concatenate([cells, cells[:, -1:]], axis=1)
        cells = np.maximum(cells[:, ::2], cells[:, 1::2])
        joined += 1
        found = _rectangles(cells, 1 << joined, limit)
    t0, t1 = (np.minimum(side, len(trace)) + trace.token_start for side in found[:2])
    there = found.kind < len(present)

    def sides(which: npt.NDArray[np.bool_]) -> dict[str, list[Any]]:
        columns = {"t0": t0, "t1": t1, "l0": found.l0, "l1": found.l1}
        return {name: column[which].tolist() for name, column in columns.items()}

    facts = [present[kind] for kind in found.kind[there].tolist()]
    details = {
        "source": [fact.source if fact.source >= 0 else None for fact in facts],
        "attempt": [max(0, fact.attempt) for fact in facts],
    }
    reasons = (found.kind[~there] - len(present)).tolist()
    return {
        "present": {
            **sides(there),
            "version": [exact(fact.version) if fact.known else None for fact in facts],
            "cached": [int(fact.origin > 0) for fact in facts],
            **(details if sources else {}),
        },
        "missing": {**sides(~there), "reason": [LOUDNESS[number].value for number in reasons]},
        "sources": [{"engine": engine, "shard": shard} for engine, shard in sources],
        "joined": joined,
    }


def stamp_of(facts: TraceFacts) -> tuple[Any, ...]:
    """Return what differs between two states of a trace."""
    return (
        facts.incarnation,
        facts.state,
        facts.num_rows,
        facts.num_tokens,
        facts.stored_bytes,
        facts.updated_at,
        facts.layout,
    )


def origins_of(description: TraceDescription, facts: TraceFacts) -> tuple[RowOrigin, ...]:
    """Return the origins of rows that were read; none if the trace has changed in between."""
    return description.origins if stamp_of(description.stat) == stamp_of(facts) else ()


def exact(number: int | None) -> int | str | None:
    """Return a number for JSON: a string where JavaScript would round it."""
    return number if number is None or -_EXACT < number < _EXACT else str(number)


def _kinds(
    trace: Trace, origins: Sequence[RowOrigin], sources: Mapping[tuple[str, str], int]
) -> _Kinds:
    tokens, at = len(trace), trace.token_start
    versions, known = np.zeros(tokens, np.int64), np.zeros(tokens, np.bool_)
    for start, stop, version in sorted(
        trace.weight_versions, key=lambda span: version_number(span[2])
    ):
        if version is not None:
            versions[start - at : stop - at], known[start - at : stop - at] = version, True
    strongest = np.zeros(tokens, np.int64)
    for start, stop, source in trace.provenance:
        part = strongest[start - at : stop - at]
        np.maximum(part, _ORIGINS.get(source, 0), out=part)
    facts = np.stack([known, versions, strongest], axis=1)
    different, number = np.unique(facts, axis=0, return_inverse=True)
    by_position = [_Kind(bool(k), version, origin) for k, version, origin in different.tolist()]
    by_origin = [
        _Kind(
            one.weight_version is not None,
            one.weight_version or 0,
            _ORIGINS.get(one.source, 0),
            sources[one.engine_id, one.shard],
            one.attempt - 1,
        )
        for one in origins
    ]
    # By version, so that the newest has the highest number; none is below all.
    present = sorted({*by_position, *by_origin})
    rank = {kind: rank for rank, kind in enumerate(present)}
    dtype = np.min_scalar_type(len(present) + len(LOUDNESS))
    valid = trace.valid.T
    ranks = np.array([rank[kind] for kind in by_position], dtype)[number.reshape(-1)]
    cells = np.broadcast_to(ranks, valid.shape).copy()
    column = {layer: index for index, layer in enumerate(trace.layer_ids)}
    columns: dict[tuple[int, ...], slice | list[int]] = {}

    def columns_of(layer_ids: tuple[int, ...]) -> slice | list[int]:
        if layer_ids not in columns:  # ranges of few patterns, of up to thousands of layers each
            columns[layer_ids] = column_index([column[i] for i in layer_ids if i in column])
        return columns[layer_ids]

    for one, kind in zip(origins, by_origin, strict=True):
        start, stop = max(one.start - at, 0), min(one.stop - at, tokens)
        if start < stop:
            cells[columns_of(one.layer_ids), start:stop] = rank[kind]
    cells[~valid] = len(present)
    for missing in trace.missing:
        where = columns_of(missing.layer_ids), slice(missing.start - at, missing.stop - at)
        loud = dtype.type(len(present) + _LOUD[missing.reason])
        cells[where] = np.where(valid[where], cells[where], np.maximum(cells[where], loud))
    return _Kinds(cells, present)


def _rectangles(cells: _Cells, width: int, limit: int) -> Rectangles | None:
    """Return the rectangles of equal cells; None if they are more than `limit`.

    Args:
        cells: [layers, columns].
        width: tokens of a column.
        limit: most rectangles.
    """
    layers, columns = cells.shape
    if not cells.size:
        return Rectangles(*(np.zeros(0, np.int64) for _ in range(5)))
    starts = np.flatnonzero((cells[:, 1:] != cells[:, :-1]).any(axis=0)) + 1
    starts = np.concatenate([[0], starts])
    ends = np.append(starts[1:], columns)
    # A strip is columns that are all equal; its runs are layers that are.
    strips = np.ascontiguousarray(cells[:, starts].T)
    first = np.ones(strips.shape, np.bool_)
    first[:, 1:] = strips[:, 1:] != strips[:, :-1]
    if np.count_nonzero(first) > max(_MAX_RUNS, limit):
        return None
    run = np.flatnonzero(first)
    strip, l0 = np.divmod(run, layers)
    kind = strips.reshape(-1)[run].astype(np.int64)
    next_l0 = np.append(l0[1:], 0)
    l1 = np.where(next_l0 == 0, layers, next_l0)
    order = np.lexsort((strip, kind, l1, l0))
    strip, l0, l1, kind = strip[order], l0[order], l1[order], kind[order]
    new = np.ones(len(run), np.bool_)
    new[1:] = (
        (l0[1:] != l0[:-1])
        | (l1[1:] != l1[:-1])
        | (kind[1:] != kind[:-1])
        | (strip[1:] != strip[:-1] + 1)
    )
    if np.count_nonzero(new) > limit:
        return None
    begin = np.flatnonzero(new)
    last = np.append(begin[1:], len(run)) - 1
    t0, t1 = starts[strip[begin]] * width, ends[strip[last]] * width
    l0, l1, kind = l0[begin], l1[begin], kind[begin]
    order = np.lexsort((l0, t0))
    return Rectangles(t0[order], t1[order], l0[order], l1[order], kind[order])
