"""Tombstones of deleted traces: late chunks must not revive a part of one.

The shards of an engine report a request independently, and a slow one may report it for the first
time after its trace was deleted. The request is recognized by its boot and by the number of
requests that the boot began before it, which is the same at all shards.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from itertools import islice
from sys import intern
from typing import NamedTuple

import numpy as np

from routetrace.server.index.traces.sources import Source, TraceKey
from routetrace.stored import format5_pb2 as stored

#: Maximum boots that are kept without a writer; the oldest are deleted.
MAX_BOOTS = 1024

#: Maximum intervals of one boot. Beyond it, the gap between the oldest requests, which all shards
#: reported long ago, is closed.
MAX_INTERVALS = 4096

#: Maximum traces with a stored fate; the oldest are deleted.
MAX_FATES = 1 << 14

#: Fates of one part of the stored form.
_DUMPED = 256

_EDGE = np.dtype("<i8")


class Boot(NamedTuple):
    """One boot of an engine."""

    run: str
    engine_id: str
    boot_id: str


class Fate(NamedTuple):
    """Deletion of a trace."""

    reason: str
    """"deleted", "retired", "expired", "quota", "capacity", "memory"."""
    time: float = 0.0
    """Unix time; 0: not known."""
    token: str = ""
    """Name of the token whose holder deleted it; "": none, or the server did."""


class Tombstones:
    """Deleted engine requests, and the fates of deleted traces; both in bounded memory."""

    def __init__(self) -> None:
        # By boot: begin indexes as disjoint intervals, start, stop, start, stop, ... Requests end
        # and are deleted in about the order in which they began, so there are few.
        self._edges: OrderedDict[Boot, list[int]] = OrderedDict()
        self._fates: OrderedDict[TraceKey, Fate] = OrderedDict()

    def add(self, key: TraceKey, sources: Iterable[Source], fate: Fate) -> None:
        """Add the tombstone of a trace."""
        self._fates[key] = fate
        self._fates.move_to_end(key)
        if len(self._fates) > MAX_FATES:
            self._fates.popitem(last=False)
        self.bury(sources)

    def bury(self, sources: Iterable[Source]) -> None:
        """Note that requests were deleted, for shards that have yet to report them."""
        for source in sources:
            if where := _begin_of(source):
                boot, index = where
                self._bury(self._edges.setdefault(boot, []), index)

    @staticmethod
    def _bury(edges: list[int], index: int) -> None:
        if bisect_right(edges, index) % 2:
            return
        for edge in (index, index + 1):  # an existing edge joins two intervals
            at = bisect_left(edges, edge)
            if edges[at : at + 1] == [edge]:
                del edges[at]
            else:
                edges.insert(at, edge)
        if len(edges) > 2 * MAX_INTERVALS:
            del edges[1:3]

    def hold(self, source: Source) -> bool:
        """Return whether the trace of a request was deleted before this shard reported it."""
        where = _begin_of(source)
        return where is not None and bisect_right(self._edges.get(where[0], ()), where[1]) % 2 == 1

    def fate(self, key: TraceKey) -> Fate | None:
        """Return the deletion of a trace; None if not known."""
        return self._fates.get(key)

    def prune(self, boots: Iterable[Boot]) -> None:
        """Forget the oldest boots beyond MAX_BOOTS, but none of those that still have a writer."""
        excess = len(self._edges) - MAX_BOOTS
        if excess > 0:
            standing = set(boots)
            for boot in [boot for boot in self._edges if boot not in standing][:excess]:
                del self._edges[boot]

    def dump(self) -> Iterator[stored.Piece]:
        """Yield the stored form in parts; nothing may be added meanwhile."""
        for (run, engine_id, boot_id), edges in self._edges.items():
            piece = stored.Piece()
            packed = np.array(edges, _EDGE).tobytes()
            piece.boots.add(run=run, engine_id=engine_id, boot_id=boot_id, edges=packed)
            yield piece
        fates = iter(self._fates.items())
        while part := [*islice(fates, _DUMPED)]:
            piece = stored.Piece()
            for (run, trace_id), fate in part:
                piece.deleted.add(run=run, trace_id=trace_id, **fate._asdict())
            yield piece

    def load(self, piece: stored.Piece) -> None:
        """Add the tombstones of a piece of a snapshot."""
        for boot in piece.boots:
            key = Boot(boot.run, boot.engine_id, boot.boot_id)
            self._edges[key] = np.frombuffer(boot.edges, _EDGE).tolist()
        for trace in piece.deleted:
            fate = Fate(trace.reason, trace.time, intern(trace.token))
            self._fates[trace.run, trace.trace_id] = fate


def _begin_of(source: Source) -> tuple[Boot, int] | None:
    """Return the boot and the begin index of a request that other shards may report, too."""
    boot_id, _, index = source.occurrence.rpartition("/")
    if not source.writer.shard or not boot_id:
        return None
    return Boot(source.writer.run, source.writer.engine_id, boot_id), int(index)
