"""Rectangles of cells: those that are there, by version and origin, and the missing, by reason."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from routetrace.client import Trace
from routetrace.client._ranges import column_index
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
    MissingReason.KV_UNKNOWN,
    MissingReason.NOT_CAPTURED,
    MissingReason.INVALID_IDS,
    MissingReason.REJECTED,
    MissingReason.AGENT_LOST,
    MissingReason.QUEUE_FULL,
    MissingReason.CORRUPT,
)
_LOUD = {reason: number for number, reason in enumerate(LOUDNESS)}
#: Origins of rows, the strongest last where pipeline stages differ.
_ORIGINS = {"forward": 0, "cached": 1, "prefix": 2}
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


class _Kinds(NamedTuple):
    """Cells of a trace as numbers; the higher one is shown where cells are joined."""

    cells: _Cells
    """[layers, tokens]: below `len(present)` those that are there, above the missing."""
    present: list[tuple[int | None, int]]
    """Version (None: unknown) and origin, by number."""


def segments_of(trace: Trace, limit: int = MAX_RECTANGLES) -> dict[str, Any]:
    """Return the rectangles of a trace: t positions, l columns of `layer_ids`, half open.

    Every cell is in exactly one of them. If there are more than `limit`, 2^z neighbouring tokens
    are joined, and `joined` is z: a joined cell is missing if one of its cells is, with the loudest
    reason; else it has the newest version, and the strongest origin of its rows.

    Where pipeline stages computed a position with different versions, it has the newest.

    Args:
        trace: a whole trace, or part of one.
        limit: most rectangles, at least the number of layers.
    """
    cells, present = _kinds(trace)
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
    reasons = (found.kind[~there] - len(present)).tolist()
    prefix = trace.prefix_sources
    return {
        "present": {
            **sides(there),
            "version": [exact(version) for version, _ in facts],
            "cached": [int(origin > 0) for _, origin in facts],
        },
        "missing": {**sides(~there), "reason": [LOUDNESS[number].value for number in reasons]},
        "prefix": {
            "t0": [span.start for span in prefix],
            "t1": [span.stop for span in prefix],
            "trace_id": [span.trace_id for span in prefix],
        },
        "joined": joined,
    }


def exact(number: int | None) -> int | str | None:
    """Return a number for JSON: a string where JavaScript would round it."""
    return number if number is None or -_EXACT < number < _EXACT else str(number)


def _kinds(trace: Trace) -> _Kinds:
    tokens, at = len(trace), trace.token_start
    versions, known = np.zeros(tokens, np.int64), np.zeros(tokens, np.bool_)
    for start, stop, version in sorted(trace.weight_versions, key=lambda span: span[2]):
        versions[start - at : stop - at], known[start - at : stop - at] = version, True
    origins = np.zeros(tokens, np.int64)
    for start, stop, source in trace.provenance:
        part = origins[start - at : stop - at]
        np.maximum(part, _ORIGINS.get(source, 0), out=part)
    # By version, so that the newest has the highest number; none is below all.
    pairs = np.stack([known, versions, origins], axis=1)
    kinds, number = np.unique(pairs, axis=0, return_inverse=True)
    present = [
        (version if is_known else None, origin) for is_known, version, origin in kinds.tolist()
    ]
    dtype = np.min_scalar_type(len(present) + len(LOUDNESS))
    valid = trace.valid.T
    cells = np.broadcast_to(number.reshape(-1).astype(dtype), valid.shape).copy()
    cells[~valid] = len(present)
    column = {layer: index for index, layer in enumerate(trace.layer_ids)}
    columns: dict[tuple[int, ...], slice | list[int]] = {}
    for missing in trace.missing:
        layer_ids = missing.layer_ids
        if layer_ids not in columns:  # ranges of few patterns, of up to thousands of layers each
            columns[layer_ids] = column_index([column[layer] for layer in layer_ids])
        where = columns[layer_ids], slice(missing.start - at, missing.stop - at)
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
