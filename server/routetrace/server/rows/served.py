"""Served rows in columns: computed once per change of a trace, cut for each read."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence, Sized
from copy import copy
from typing import Any, TypeVar, cast

import numpy as np

from routetrace.server.index.state import State
from routetrace.server.index.traces.lineage import Incarnation, Request
from routetrace.server.index.traces.spans import Interval, Span, subtract
from routetrace.server.index.traces.trace import Trace
from routetrace.server.index.traces.trace_index import TraceIndex
from routetrace.server.rows.gaps import Holes, unknown
from routetrace.server.rows.prefixes import StandIns, stand_ins
from routetrace.server.rows.view import (
    Segment,
    Selection,
    by_layers,
    covered,
    covers,
    view,
)
from routetrace.v1 import routetrace_pb2 as pb

#: Maximum cached records of all traces, and the overhead of an entry in records.
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
        ("layers", "O"),
    ],
    align=True,
)

#: Entry of a key that is not there; no trace has as few changes.
_NOTHING = -1, None

Served = np.ndarray[Any, np.dtype[Any]]

Row = tuple[int, int, int, int, int, int, int, tuple[int, ...]]
"""A record of SERVED as a tuple: most reads have a few, for which numpy's calls take longer."""

Found = TypeVar("Found", bound=Sized)


def served(segments: Iterable[Segment]) -> Served:
    """Convert segments to records."""
    return np.array(
        [
            (s.position, s.stop, s.ref, s.weight_version, source, attempt, s.provenance, layers)
            for source, attempt, s, layers in segments
        ],
        SERVED,
    )


def segments_of(rows: Served) -> list[Segment]:
    """Convert records to segments."""
    return [
        Segment(
            source,
            attempt,
            Span(position, stop - position, ref, version, provenance),
            layers,
        )
        for position, stop, ref, version, source, attempt, provenance, layers in rows.tolist()
    ]


def cut(rows: Served, ranges: Sequence[Interval]) -> Served:
    """Return the parts of ascending records that lie in ascending, disjoint ranges."""
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
    """View of an incarnation; valid until its trace or one whose rows stand in changes."""

    def __init__(self, trace: Trace, incarnation: Incarnation) -> None:
        self.trace = trace
        self.incarnation = incarnation
        layout = incarnation.request.sources[0].layout
        self.layout = layout.select(layout.moe_layer_ids)
        """Layout of all MoE layers of the model."""
        self.num_rows = incarnation.num_rows
        self.num_tokens = incarnation.num_tokens
        self.sources = [*trace.sources]
        """Sources that rows index."""
        whole = Selection(0, self.num_rows, self.layout.layer_ids)
        segments = view(incarnation, whole)
        self.rows = served(segments)
        """All rows of the policy `as_sampled`."""
        self.complete = self.num_tokens > 0 and covers(self.sources, segments, whole)
        """Whether no cell is missing."""
        self.holes: dict[Request, Holes] = {}
        """Cells for which rows of other requests may stand in, by owner."""
        if not self.complete:
            self.holes = unknown(self.sources, incarnation, segments, self.layout.layer_ids)
        self.given = StandIns()
        """Rows that stand in."""
        self._changes = 0
        self.info: pb.TraceInfo | None = None
        """Cached TraceInfo, without the fields that depend on time."""
        self.digests: bytes | None = None
        """Cached token digests in their wire form."""

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def answers(self) -> bool:
        """Whether a read that names no incarnation may take it before newer ones."""
        return self.complete and not self.incarnation.request.aborted

    def filled(self, given: StandIns, changes: int) -> Known:
        """Return a copy with rows that stand in, valid for this number of changes."""
        filled = copy(self)
        filled.sources = [*self.sources, *given.sources]
        filled.given, filled._changes = given, changes
        whole = Selection(0, self.num_rows, self.layout.layer_ids)
        segments = filled.with_given(segments_of(self.rows), whole)
        filled.rows = served(segments)
        filled.complete = self.num_tokens > 0 and covers(filled.sources, segments, whole)
        filled.info = None
        return filled

    def with_given(self, segments: list[Segment], selection: Selection) -> list[Segment]:
        """Add the segments that stand in for a selection; positions are not cut."""
        first = len(self.sources) - len(self.given.sources)
        given = [
            segment._replace(source=first + segment.source)
            for segment in self.given.segments
            if any(i in segment.column(self.given.sources) for i in selection.layers)
        ]
        if selection.policy == pb.READ_POLICY_LATEST:  # which may have rows of its own there
            given = [part for one in given for part in self._without(one, segments, selection)]
        return sorted([*segments, *given], key=lambda s: s.span.position)

    def _without(
        self, segment: Segment, segments: list[Segment], selection: Selection
    ) -> Iterator[Segment]:
        """Yield the parts of a segment whose cells no other segment has."""
        span = segment.span
        free: dict[tuple[Interval, ...], set[int]] = {}
        for layer in selection.layers:
            if layer in segment.column(self.sources):
                there = covered(self.sources, segments, layer)
                left = tuple(subtract((span.position, span.stop), there))
                free.setdefault(left, set()).add(layer)
        groups = {frozenset(layers): [*left] for left, layers in free.items()}
        for start, stop, layers in by_layers(groups):
            yield segment._replace(span=span.cut(start, stop), layers=layers or segment.layers)

    def holds(self, traces: TraceIndex) -> bool:
        """Whether the rows that stand in are unchanged."""
        return (self.given.lasting or self._changes == traces.changes) and all(
            traces.traces.get(trace.key) is trace and trace.changes == changes
            for trace, changes in self.given.traces
        )


class Memory:
    """Cache of views of traces that have not changed since.

    Args:
        state: state that the views are derived from.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self._found: OrderedDict[Hashable, tuple[int, Sized]] = OrderedDict()
        self._size = 0

    def known(
        self,
        trace: Trace,
        incarnation: Incarnation,
        prefix_rows: int = pb.PREFIX_ROWS_NEVER,
    ) -> Known:
        """Return the view of an incarnation under a PrefixRows policy."""
        kept: Known | None = self._found_for(trace, incarnation)
        own = self._keep(trace, incarnation, Known(trace, incarnation)) if kept is None else kept
        if not own.holes or prefix_rows == pb.PREFIX_ROWS_NEVER:
            return own
        traces = self._state.traces

        def fill() -> Known:
            given = stand_ins(traces.prefixes, trace, own.holes, prefix_rows)
            return own.filled(given, traces.changes)

        key = incarnation, prefix_rows
        return self._recall(trace, key, fill, lambda known: known.holds(traces))

    def served(self, known: Known, selection: Selection) -> Served:
        """Return the served rows of a view: ascending records, no cell twice."""
        version = selection.weight_version
        key = selection.layers, selection.policy, version
        rows = known.rows

        def look() -> Served:
            whole = Selection(0, known.num_rows, *key)
            segments = known.with_given(view(known.incarnation, whole), whole)
            return served([s for s in segments if version in (None, s.span.weight_version)])

        if key != (known.layout.layer_ids, pb.READ_POLICY_AS_SAMPLED, None):
            rows = self._recall(known.trace, (known, *key), look)
        wanted = selection.before(known.num_rows)
        return rows if wanted == [(0, known.num_rows)] else cut(rows, wanted)

    def _recall(
        self,
        trace: Trace,
        key: Hashable,
        make: Callable[[], Found],
        holds: Callable[[Found], bool] = lambda _: True,
    ) -> Found:
        found = self._found_for(trace, key)
        if found is not None and holds(found):
            return cast("Found", found)
        return self._keep(trace, key, make())

    def _found_for(self, trace: Trace, key: Hashable) -> Any:
        """Return what was kept under `key` since the trace changed last; None if nothing was."""
        changes, found = self._found.get(key, _NOTHING)
        if changes != trace.changes:
            return None
        self._found.move_to_end(key)
        return found

    def _keep(self, trace: Trace, key: Hashable, made: Found) -> Found:
        _, found = self._found.get(key, _NOTHING)
        self._size += _weight(made) - (_weight(found) if found is not None else 0)
        self._found[key] = trace.changes, made
        self._found.move_to_end(key)
        while self._size > MAX_REMEMBERED:
            _, (_, oldest) = self._found.popitem(last=False)
            self._size -= _weight(oldest)
        return made


def _weight(found: Sized) -> int:
    return _LEAST + len(found)
