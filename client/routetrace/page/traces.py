"""Traces that were read: their rows, rectangles and tiles, kept as long as they are current."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np

from routetrace.client import RowOrigin, Trace, TraceStat, TraceState
from routetrace.client.options import Policy
from routetrace.common.errors import InvalidArgument
from routetrace.page.backends import Backends
from routetrace.page.budgets import Cache, Gate, Shared
from routetrace.page.comparing import Compared, compared
from routetrace.page.errors import busy
from routetrace.page.segments import origins_of, segments_of, stamp_of
from routetrace.page.sessions import Caller
from routetrace.page.sides import Side
from routetrace.page.tiles import Levels, changed

_T = TypeVar("_T")

#: Bytes of decoded rows, levels and rectangles that are kept.
MAX_BYTES = 512 << 20
#: Heavy tasks at a time, and threads for them and for decoding.
MAX_HEAVY = 2
_MAX_WAITING_HEAVY = 16
_MAX_WAIT_S = 20.0
#: Bytes of a cell beside its ids: validity, and two for all levels; most bytes of rectangles.
_CELL_BYTES = 3
_SEGMENTS_BYTES = 2 << 20
#: Comparisons that are kept of a read.
_MAX_COMPARED = 4
#: Seconds after which rows of a trace that is not complete are read again, changed or not: its
#: state follows the agents, too.
_FRESH_S = 60.0


class ReadTrace:
    """One read of a trace, and what was worked out from it."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.stamp = stamp_of(trace)
        self.read_at = time.monotonic()
        self.segments: bytes | None = None
        self.changed: Levels | None = None
        self.compared: dict[Hashable, Compared] = {}
        """With other sides, by what they were."""

    @property
    def nbytes(self) -> int:
        """Bytes of rows, validity, rectangles and levels."""
        worked_out = len(self.segments or b"") + (self.changed.nbytes if self.changed else 0)
        worked_out += sum(one.nbytes for one in self.compared.values())
        return self.trace.topk_ids.nbytes + self.trace.valid.nbytes + worked_out

    def is_current(self, stat: TraceStat) -> bool:
        """Whether the trace has not changed since it was read."""
        if self.stamp != stamp_of(stat):
            return False
        complete = stat.state is TraceState.COMPLETE
        return complete or time.monotonic() - self.read_at < _FRESH_S


class Traces:
    """Reads of whole traces, by token, run, trace, incarnation and policy.

    Args:
        backends: the server.
        most: bytes that are kept.
    """

    def __init__(self, backends: Backends, most: int = MAX_BYTES) -> None:
        self._backends = backends
        self._most = most
        self._kept: Cache[ReadTrace] = Cache(most)
        self._coming = 0  # bytes of the reads under way
        self._work = Shared()
        self._heavy = Gate(MAX_HEAVY, _MAX_WAITING_HEAVY, _MAX_WAIT_S)

    def drop(self, caller: Caller) -> None:
        """Drop all that was read for a token."""
        self._kept.drop(caller.digest)

    async def segments(self, caller: Caller, stat: TraceStat, policy: Policy) -> bytes:
        """Return the rectangles of a trace as JSON.

        Raises:
            RouteTraceError: as a read.
        """
        read = await self._read(caller, stat, policy)
        if read.segments is None:
            described = await self._backends.describe(
                caller, stat.run, stat.trace_id, stat.incarnation, policy
            )
            work = partial(_json, read.trace, origins_of(described, read.trace))
            read.segments = await self._worked_out(read, "segments", work)
            self._kept.settle()
        return read.segments

    async def levels(self, caller: Caller, stat: TraceStat, policy: Policy) -> Levels:
        """Return the zoom levels of the changes from token to token.

        Raises:
            RouteTraceError: as a read.
        """
        read = await self._read(caller, stat, policy)
        if read.changed is None:
            read.changed = await self._worked_out(read, "changed", lambda: changed(read.trace))
            self._kept.settle()
        return read.changed

    async def compared(
        self, caller: Caller, stat: TraceStat, policy: Policy, other: Side
    ) -> Compared:
        """Return where another side of a trace differs.

        Raises:
            InvalidArgument: if the sides have nothing in common.
            RouteTraceError: as a read.
        """
        read = await self._read(caller, stat, policy)
        theirs = await self._read(caller, *other)
        key = (other.stat.run, other.policy, *theirs.stamp)
        found = read.compared.get(key)
        if found is None:
            work = partial(compared, read.trace, theirs.trace)
            found = await self._worked_out(read, f"compared {key}", work)
            while len(read.compared) >= _MAX_COMPARED:
                del read.compared[next(iter(read.compared))]
            read.compared[key] = found
            self._kept.settle()
        return found

    async def rows(
        self, caller: Caller, stat: TraceStat, policy: Policy, start: int, stop: int
    ) -> bytes:
        """Return the ids [n, layers, top_k] of positions, little-endian, then validity [n, layers].

        Raises:
            RouteTraceError: as a read.
        """
        stop = min(stop, stat.num_rows)
        if start >= stop:
            raise InvalidArgument(
                field="start", value=start, expected=f"less than the {stat.num_rows} rows"
            )
        kept = self._kept.get(_key(caller, stat, policy))
        if kept is not None and kept.is_current(stat):
            part = kept.trace.tokens(start, stop)
        else:
            part = await self._backends.read(caller, stat, policy, start, stop)
        ids = part.topk_ids
        ids = ids.astype(ids.dtype.newbyteorder("<"), copy=False)
        return ids.tobytes() + part.valid.astype(np.uint8).tobytes()

    async def _read(self, caller: Caller, stat: TraceStat, policy: Policy) -> ReadTrace:
        """Return a read of a whole trace that is current."""
        key = _key(caller, stat, policy)

        async def read() -> ReadTrace:
            size = self._size(stat)
            if self._coming + size > self._most:
                raise busy()
            self._coming += size
            try:
                self._kept.make_room(self._coming)
                found = ReadTrace(await self._backends.read(caller, stat, policy))
            finally:
                self._coming -= size
            self._kept.put(key, found)
            return found

        kept = self._kept.get(key)
        if kept is not None and kept.is_current(stat):
            return kept
        return await self._work.call((*key, stamp_of(stat)), read)

    def _size(self, stat: TraceStat) -> int:
        """Return the bytes of a trace that is read, with all that is worked out from it.

        Raises:
            InvalidArgument: if they are more than are kept.
        """
        layout = stat.layout
        cells = stat.num_rows * len(layout.layer_ids)
        size = cells * (layout.top_k * layout.dtype.itemsize + _CELL_BYTES) + _SEGMENTS_BYTES
        if size > self._most:
            raise InvalidArgument(
                f"trace {stat.trace_id!r} takes {size >> 20} MiB; expected at most "
                f"{self._most >> 20} MiB for the page; `routetrace get` reads it in parts",
                field="id",
                value=stat.trace_id,
                expected=f"a trace of at most {self._most >> 20} MiB",
            )
        return size

    async def _worked_out(self, read: ReadTrace, name: str, work: Callable[[], _T]) -> _T:
        """Return the result of heavy work in a thread; callers that ask meanwhile share it."""

        async def run() -> _T:
            async with self._heavy.enter():
                return await asyncio.get_running_loop().run_in_executor(None, work)

        return await self._work.call((name, id(read)), run)


def _json(trace: Trace, origins: Sequence[RowOrigin]) -> bytes:
    return json.dumps(segments_of(trace, origins), separators=(",", ":")).encode()


def _key(caller: Caller, stat: TraceStat, policy: Policy) -> tuple[Any, ...]:
    return caller.digest, stat.run, stat.trace_id, stat.incarnation, policy
