"""A trace: the sources under one trace id of a run."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from routetrace.common.layout import ModelLayout
from routetrace.server.index.traces.joins import Join, requests_of
from routetrace.server.index.traces.lineage import Request
from routetrace.server.index.traces.refs import chunk_of
from routetrace.server.index.traces.sources import Source, TraceKey, dump_source, load_source
from routetrace.stored import format5_pb2 as stored
from routetrace.v1 import routetrace_pb2 as pb

#: Number of sources from which on a join takes so long that other tasks go on meanwhile.
_MANY_SOURCES = 64

#: Maximum runs and layouts whose fields are kept serialized.
_MAX_SHARED = 1024

#: `Summary.growing` of one that stays until the trace changes.
FINAL = -1


class Summary(NamedTuple):
    """Summary of a trace, as `rows/summaries.py` worked it out."""

    changes: int
    """`Trace.changes` at that time."""
    growing: int
    """Further state that it depends on: bit 0, whether the trace was recent; bit i + 1, whether
    source i could grow; `FINAL`: nothing."""
    state: int
    """TraceState."""
    cells: int = 0
    """Cells of its rows, present or not; 0 if it runs."""
    missing: tuple[tuple[int, int], ...] = ()
    """(MissingReason, missing cells); none if it runs."""
    entry: bytes = b""
    """Its entry in lists, a serialized pb.TraceInfo without name, lease and `shared`; b"" if it
    runs and was not listed."""
    layout: ModelLayout | None = None
    """Layout of its rows; None without an entry."""
    shared: bytes = b""
    """Fields of the entry that many traces share, serialized."""
    told: bytes = b""
    """Message for watchers, a serialized pb.TraceSummary without name and lease; b"": none yet."""

    @classmethod
    def of(
        cls, changes: int, growing: int, run: str, info: pb.TraceInfo, layout: ModelLayout
    ) -> Summary:
        """Return that of a trace with this entry."""
        runs = info.state == pb.TRACE_STATE_RUNNING
        layout, shared = _shared(run, layout)
        return cls(
            changes,
            growing,
            info.state,
            0 if runs else info.num_rows * len(layout.layer_ids),
            () if runs else tuple([(m.reason, m.cells) for m in info.missing_cells]),
            info.SerializeToString(),
            layout,
            shared,
        )


@dataclass(slots=True, eq=False)
class Trace:
    """One trace."""

    key: TraceKey
    serial: int
    """Ascending in the order of first appearance."""
    ttl: float
    """Lease in seconds after the last change."""
    created: float
    updated: float
    expires: float
    sources: list[Source] = field(default_factory=list)
    """In order of arrival."""
    token: str = ""
    """Name of the token that began it; "" without one."""
    last_record: int = 0
    """Record of the last change, but of its lease alone."""
    changes: int = 0
    """Number of changes since the server started."""
    num_dropped: int = 0
    """Number of requests that were dropped, the oldest ones."""
    computed: dict[int, int] = field(default_factory=dict)
    """First position with a computed row, by weight version."""
    packed: bytes | None = None
    """Cached piece of a snapshot; None after a change, or a new entry in lists."""
    summary: Summary | None = None
    """Summary when it was last worked out."""
    held: tuple[object, ...] = ()
    """Chunks of other workers that its references name, which are known while it holds them."""
    _join: Join | None = None
    _rejoins: int = 0

    @property
    def join(self) -> Join:
        """Requests and incarnations of the sources."""
        if self._join is None:
            self._join = Join(self.sources, self.num_dropped)
        return self._join

    @property
    def has_many_sources(self) -> bool:
        """Whether its join takes so long that it is made in steps."""
        return len(self.sources) >= _MANY_SOURCES

    @property
    def has_join(self) -> bool:
        """Whether `join` is at hand."""
        return self._join is not None

    @property
    def is_joined(self) -> bool:
        """Whether `join` is at hand, or made in a moment."""
        return self._join is not None or not self.has_many_sources

    def has(self, join: Join) -> bool:
        """Whether a join is that of the trace as it is now."""
        return self._join is join

    def join_in_steps(self) -> Generator[None, None, None]:
        """Make the join of many sources step by step, unless it is at hand.

        It is not made if the trace changes between two steps.
        """
        if self.is_joined:
            return
        rejoins = self._rejoins
        join = yield from Join.in_steps([*self.sources], self.num_dropped)
        if self._rejoins == rejoins:
            self._join = join

    @contextmanager
    def joined_for_now(self) -> Iterator[None]:
        """Discard the join at the end, if it is not at hand at the begin: it takes much memory."""
        at_hand = self._join is not None
        try:
            yield
        finally:
            if not at_hand:
                self._join = None

    def rejoin(self) -> None:
        """Discard the join after a source began, ended, or got digests or other rows from slots."""
        self._join = self.packed = None
        self._rejoins += 1

    def drop_oldest(self) -> None:
        """Drop the oldest request, of all shards; the others keep their numbers."""
        name = self.sources[0].name
        alike = requests_of([source for source in self.sources if source.name == name])
        self.drop(alike[:1])
        self.num_dropped += 1

    def drop(self, requests: Sequence[Request]) -> list[Source]:
        """Drop requests; return their sources."""
        dropped = [source for request in requests for source in request.sources]
        for source in dropped:
            source.forgotten = True
        self.sources = [source for source in self.sources if source not in dropped]
        self.rejoin()
        return dropped

    def may_have(self, labels: Mapping[str, str]) -> bool:
        """Whether each label is one of some source, so that an incarnation may have them all."""
        return all(
            any(s.labels.get(key) == text for s in self.sources) for key, text in labels.items()
        )

    def chunks(self) -> Iterator[int]:
        """Yield chunks with rows of this trace, with repeats."""
        for source in self.sources:
            for attempt in source.attempts:
                yield from map(chunk_of, attempt.refs)


@lru_cache(maxsize=_MAX_SHARED)
def _shared(run: str, layout: ModelLayout) -> tuple[ModelLayout, bytes]:
    """Return what the summaries of a run's traces of one model share: layout, and fields."""
    return layout, pb.TraceInfo(run=run, layout=layout.to_proto()).SerializeToString()


def dump_trace(message: stored.Trace, trace: Trace, layouts: dict[ModelLayout, int]) -> None:
    """Set the stored form of a trace; layouts go by number."""
    message.run, message.trace_id = trace.key
    message.serial = trace.serial
    message.ttl, message.created = trace.ttl, trace.created
    message.updated, message.expires = trace.updated, trace.expires
    message.token, message.last_record = trace.token, trace.last_record
    message.num_dropped = trace.num_dropped
    for source in trace.sources:
        dump_source(message.sources.add(), source, layouts)


def dump_entry(message: stored.Trace, trace: Trace, number: Callable[[ModelLayout], int]) -> None:
    """Set the entry in lists in the stored form of a trace, if it stays until the trace changes.

    Args:
        message: the stored form.
        trace: the trace.
        number: returns the number of a layout.
    """
    kept = trace.summary
    if kept and kept.layout and kept.growing == FINAL and kept.changes == trace.changes:
        message.entry, message.entry_layout = kept.entry, number(kept.layout)


def load_trace(message: stored.Trace, layouts: Sequence[ModelLayout]) -> Trace:
    """Return the trace of a stored form."""
    run = message.run
    sources = [load_source(source, run, layouts) for source in message.sources]
    if message.labels:
        labels = dict(message.labels)
        for source in sources:
            source.labels = labels
    trace = Trace(
        (run, message.trace_id),
        message.serial,
        message.ttl,
        message.created,
        message.updated,
        message.expires,
        sources,
        message.token,
        message.last_record,
        num_dropped=message.num_dropped,
    )
    if message.entry:
        info, layout = pb.TraceInfo.FromString(message.entry), layouts[message.entry_layout]
        trace.summary = Summary.of(trace.changes, FINAL, run, info, layout)
    return trace
