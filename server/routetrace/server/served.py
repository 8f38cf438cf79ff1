"""What a reader gets, in columns: worked out once per change of a trace, cut for every read."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence, Sized
from typing import Any, TypeVar, cast

import numpy as np

from routetrace.server.joins import Incarnation
from routetrace.server.spans import Interval, Span
from routetrace.server.trace_index import Trace
from routetrace.server.view import Segment, Selection, covers, view
from routetrace.v1 import routetrace_pb2 as pb

#: Records that are remembered, of all traces together, and what an entry counts for beside its own.
MAX_REMEMBERED = 1 << 18
_LEAST = 64

#: A segment (view.py) as a record: rows `ref`, `ref + 1`, ... are positions [position, stop).
SERVED = np.dtype(
    [
        ("position", "i8"),
        ("stop", "i8"),
        ("ref", "i8"),
        ("weight_version", "i8"),
        ("source", "i4"),
        ("attempt", "i4"),
        ("provenance", "i4"),
    ],
    align=True,
)

Served = np.ndarray[Any, np.dtype[Any]]
Found = TypeVar("Found", bound=Sized)


def served(segments: Iterable[Segment]) -> Served:
    """Segments as records."""
    return np.array(
        [
            (s.position, s.stop, s.ref, s.weight_version, source, attempt, s.provenance)
            for source, attempt, s in segments
        ],
        SERVED,
    )


def segments_of(rows: Served) -> list[Segment]:
    """Records as segments."""
    return [
        Segment(source, attempt, Span(position, stop - position, ref, version, provenance))
        for position, stop, ref, version, source, attempt, provenance in rows.tolist()
    ]


def cut(rows: Served, ranges: Sequence[Interval]) -> Served:
    """The parts of ascending records that lie in ascending, disjoint ranges; ascending."""
    reach = np.maximum.accumulate(rows["stop"])
    parts = [rows[:0]]
    for start, stop in ranges:
        first, last = (
            np.searchsorted(reach, start, "right"),
            np.searchsorted(rows["position"], stop),
        )
        part = rows[first:last]
        part = part[part["stop"] > start]  # a copy
        skipped = np.maximum(start - part["position"], 0)
        part["position"] += skipped
        part["ref"] += skipped
        np.minimum(part["stop"], stop, out=part["stop"])
        parts.append(part)
    return np.concatenate(parts)


class Known:
    """What stays true of an incarnation until its trace changes."""

    def __init__(self, trace: Trace, incarnation: Incarnation) -> None:
        layout = incarnation.request.sources[0].layout
        self.layout = layout.select(layout.moe_layer_ids)
        """The columns of the whole model."""
        self.num_rows = incarnation.num_rows
        self.num_tokens = incarnation.num_tokens
        whole = Selection(0, self.num_rows, self.layout.layer_ids)
        segments = view(trace.sources, incarnation, whole)
        self.rows = served(segments)
        """All rows that `as_sampled` gives."""
        self.complete = self.num_tokens > 0 and covers(trace.sources, segments, whole)
        """Whether they are all that there can be."""
        self.info: pb.TraceInfo | None = None
        """What is to be said of it, but for what changes with time."""
        self.digests: bytes | None = None
        """Its token digests, as they are sent."""

    def __len__(self) -> int:
        return len(self.rows)


class Memory:
    """What was worked out last, of traces that have not changed since."""

    def __init__(self) -> None:
        self._found: OrderedDict[Hashable, tuple[int, Sized]] = OrderedDict()
        self._size = 0

    def known(self, trace: Trace, incarnation: Incarnation) -> Known:
        """What is known of an incarnation."""
        return self._recall(trace, incarnation, lambda: Known(trace, incarnation))

    def served(self, trace: Trace, incarnation: Incarnation, selection: Selection) -> Served:
        """What a reader gets: ascending records, no cell twice."""
        known = self.known(trace, incarnation)
        key = selection.layers, selection.policy, selection.weight_version
        rows = known.rows
        if key != (known.layout.layer_ids, pb.READ_POLICY_AS_SAMPLED, None):
            rows = self._recall(
                trace,
                (incarnation, *key),
                lambda: served(
                    view(trace.sources, incarnation, Selection(0, known.num_rows, *key))
                ),
            )
        wanted = selection.before(known.num_rows)
        return rows if wanted == [(0, known.num_rows)] else cut(rows, wanted)

    def _recall(self, trace: Trace, key: Hashable, make: Callable[[], Found]) -> Found:
        changes, found = self._found.get(key, (-1, None))
        if found is not None and changes == trace.changes:
            self._found.move_to_end(key)
            return cast("Found", found)
        made = make()
        self._size += _weight(made) - (_weight(found) if found is not None else 0)
        self._found[key] = trace.changes, made
        self._found.move_to_end(key)
        while self._size > MAX_REMEMBERED:
            _, (_, oldest) = self._found.popitem(last=False)
            self._size -= _weight(oldest)
        return made


def _weight(found: Sized) -> int:
    return _LEAST + len(found)
