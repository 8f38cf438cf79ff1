"""The engine's end of the ring: records in order, whatever happens behind it.

What does not fit is not waited for. Rows are dropped, and what was dropped is remembered; events
must not get lost, and are remembered too. Both are written, in order, before anything else is.
"""

from __future__ import annotations

import pickle
import struct
from array import array
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from routetrace.capture_agent.checks import MAX_POSITION, Ints, Rows, wrong
from routetrace.capture_agent.ring import LINE, Ring
from routetrace.v1.layout import RoutingLayout

#: Kinds of record. STEP: runs [3, m] of int64 (handles, positions, counts), rows [n, row_bytes];
#: AGAIN: rows alone, of the runs of the last STEP or AGAIN, each going on where it ended; SLOTS:
#: slots [n] of uint64 and rows; EVENT: a pickled tuple (name, *arguments); BLOCKS: pairs [m, 2] of
#: int64 (handle, a block that it gets).
STEP, SLOTS, EVENT, AGAIN, BLOCKS = 1, 2, 3, 4, 5

#: kind, m, n, step, weight version; up to the end of a cache line.
RECORD = struct.Struct(f"=QIIQq{LINE - 40}x")

_PACK_INTO, _HEAD = RECORD.pack_into, RECORD.size
_EVENT_HEAD = RECORD.pack(EVENT, 0, 0, 0, 0)

#: Bytes of what is remembered, beyond which the other end counts as stuck.
MAX_BACKLOG_BYTES = 32 << 20
#: What Python takes for a span, a block and an event, beside its bytes.
_SPAN_BYTES, _BLOCK_BYTES, _EVENT_BYTES = 128, 96, 64
#: Spans and blocks of one record, so that it fits into the smallest ring.
_MAX_TOLD = 1 << 12

_INT64 = np.dtype(np.int64)
_ARRAY: Any = np.ndarray  # a buffer, as type checkers of Python 3.10 do not know
_UNSIGNED = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}
_NONE = np.empty((0, 0, 3), np.int64)

#: Steps that are foreseen at a time, and bytes that all of them may take. One at a time would cost
#: as much as all the rest of a step; but as long as batches last a few steps only, so would many.
_FORESEEN, _FORESEEN_BYTES = 16, 1 << 16


@dataclass
class _Lost:
    """Rows that did not fit: spans of requests, and blocks that have slots of them."""

    # handle, [start, stop, why, step of the last]
    spans: list[tuple[int, list[int]]] = field(default_factory=list)
    blocks: set[int] = field(default_factory=set)

    @property
    def nbytes(self) -> int:
        return _SPAN_BYTES * len(self.spans) + _BLOCK_BYTES * len(self.blocks)

    def record(self) -> bytes:
        spans = [(handle, *span) for handle, span in self.spans]
        blocks = array("I", sorted(self.blocks)).tobytes()
        return _EVENT_HEAD + pickle.dumps(("lost", spans, blocks))


@dataclass
class _Blocks:
    """Blocks that requests got: told together, since most steps give some to many requests."""

    pairs: array[int]

    @property
    def nbytes(self) -> int:
        return _EVENT_BYTES + 8 * len(self.pairs)

    def record(self) -> bytes:
        head = RECORD.pack(BLOCKS, len(self.pairs) // 2, 0, 0, 0)
        return head + self.pairs.tobytes()


def rows_at(column_bytes: int) -> int:
    """Where the rows of a record begin, behind a column of that size: at a cache line."""
    return RECORD.size - -column_bytes // LINE * LINE


class Steady:
    """A step that was written, and the one that comes next if all its requests just go on.

    That one needs no other check than that it is the one.

    Args:
        rows: of the step.
        runs: of the step, [3, m].
        narrow: whether the rows' dtype is.
        number: of its record.
    """

    __slots__ = (
        "_at", "_dtype", "_end", "_foreseen", "_known", "_left", "_num_runs", "_runs", "_shape",
        "_size", "_told", "narrow", "num_rows", "number",
    )  # fmt: skip

    def __init__(self, rows: Rows, runs: Ints, narrow: bool, number: int) -> None:
        self.num_rows, self.narrow, self.number = len(rows), narrow, number
        self._shape, self._dtype = rows.shape, rows.dtype
        self._runs, self._num_runs, self._size = runs, runs.shape[1], runs.nbytes
        # What the next steps will tell, once somebody asks: the same memory as bytes and as numbers
        # [steps, m, 3]; where in it the next one is, and where those that are known end; how many
        # these are, and for how many more positions may grow.
        self._told, self._foreseen = bytearray(), _NONE
        self._at = self._end = self._known = self._left = 0

    def goes_on(self, rows: Any, runs: Any) -> bool:
        """Whether that is the step that comes next. To be asked once for each step."""
        if (
            type(rows) is not _ARRAY
            or type(runs) is not _ARRAY
            or rows.shape != self._shape
            or rows.dtype is not self._dtype
            or runs.dtype is not _INT64
            or runs.nbytes != self._size
            or len(runs) != self._num_runs
        ):
            return False
        at = self._at
        if at == self._end:
            if not self._foresee():
                return False
            at = self._at
        self._at = at + self._size
        try:  # unlike other comparisons of bytes this makes no copy of them
            return self._told.startswith(runs, at)
        except (ValueError, BufferError):  # they are not contiguous
            return False

    def _foresee(self) -> bool:
        """Fills in what more steps will tell, twice as many at most; False if some can not be."""
        _, positions, counts = self._runs
        known, more = self._known, max(1, self._known)
        if not known:
            # No position grows by more than there are rows.
            last: int = positions.item(positions.argmax())
            self._left = (MAX_POSITION - 1 - last) // self._shape[0]
            most = min(_FORESEEN, 1 << (_FORESEEN_BYTES // self._size).bit_length() >> 1) or 1
            self._told = bytearray(most * self._size)
            self._foreseen = _ARRAY((most, self._num_runs, 3), _INT64, self._told)
            self._foreseen[0] = self._runs.T
            self._foreseen[0, :, 1] += counts
            self._known = 1
        elif known < len(self._foreseen):
            new = self._foreseen[known : known + more]
            new[...] = self._foreseen[:known]
            new[:, :, 1] += counts * known
            self._known += more
        else:
            self._foreseen[:, :, 1] += counts * known
            self._at = 0
        self._end = self._known * self._size
        self._left -= more
        return self._left >= 0


class Feed:
    """Writes records into a ring.

    Args:
        ring: the producer's end.
        layout: columns of the rows.
    """

    def __init__(self, ring: Ring, layout: RoutingLayout) -> None:
        self._ring = ring
        self._dtype = layout.dtype
        self._row_bytes = layout.row_bytes
        self._num_experts = layout.num_experts
        self._backlog: deque[bytes | _Lost | _Blocks] = deque()
        self._backlog_bytes = 0
        self._draining = False
        self._spans: dict[int, list[int]] = {}  # spans in the backlog that may still grow
        self._number = 0  # of the last step's record, or of what came between
        #: The last step that was written, if it may go on.
        self.steady: Steady | None = None

    @property
    def behind(self) -> bool:
        """Whether something is remembered."""
        return bool(self._backlog)

    @property
    def stuck(self) -> bool:
        """Whether more is remembered than can be."""
        return self._backlog_bytes > MAX_BACKLOG_BYTES

    def room(self, column_bytes: int) -> int:
        """Rows that fit into one record, beside a column of that size."""
        return (self._ring.max_record - rows_at(column_bytes)) // self._row_bytes

    def bad_cells(self, rows: Rows) -> npt.NDArray[np.bool_] | None:
        """Cells [n, L] whose ids would not survive the narrow dtype; None if there are none.

        Ids that come in the narrow dtype are looked at in the background.
        """
        if rows.dtype == self._dtype or not self._has_bad(rows):
            return None
        unsigned = rows.view(_UNSIGNED[rows.dtype.itemsize])
        bad: npt.NDArray[np.bool_] = np.any(unsigned >= self._num_experts, axis=2)
        return bad

    def _has_bad(self, rows: Rows) -> bool:
        # As unsigned integers negative ids are huge.
        unsigned = rows.view(_UNSIGNED[rows.dtype.itemsize])
        return bool(np.maximum.reduce(unsigned, axis=None) >= self._num_experts)

    def again(self, steady: Steady, rows: Rows, step: int, version: int) -> bool:
        """Writes the rows of a step that goes on from `steady`.

        Returns:
            False if there is no room, or rows have to be looked at, or what was to go on did not
            write the last record of a step: a signal handler may have come in between.
        """
        if (self._backlog or self._draining) and not self.drain():
            return False
        if not steady.narrow and self._has_bad(rows):
            return False
        ring, n = self._ring, steady.num_rows
        at = ring.reserve(_HEAD + n * self._row_bytes)
        if not at:
            return False
        try:
            if steady.number != self._number or self._backlog:
                ring.cancel()
                return False
            _PACK_INTO(ring.memory, at, AGAIN, 0, n, step, version)
            self._fill(at + _HEAD, rows, steady.narrow)
        except BaseException:
            ring.cancel()
            raise
        steady.number = self._number = self._number + 1
        self.steady = steady
        ring.commit()
        return True

    def step(
        self, runs: Ints, rows: Rows, step: int, version: int, bad: npt.NDArray[np.bool_] | None
    ) -> bool:
        """Writes rows [n, L, K] with their runs [3, m]; False if there is no room.

        Cells `bad` [n, L] are marked, so that the other end takes them for missing.
        """
        head = RECORD.pack(STEP, runs.shape[1], len(rows), step, version) + runs.tobytes()
        narrow = rows.dtype == self._dtype
        start = rows_at(runs.nbytes)
        number = self._put(head, start, rows, narrow, bad) if self.drain() else 0
        self.steady = Steady(rows, runs, narrow, number) if number else None
        return number > 0

    def slots(
        self,
        slots: npt.NDArray[np.uint64],
        rows: Rows,
        step: int,
        version: int,
        bad: npt.NDArray[np.bool_] | None,
    ) -> bool:
        """Writes rows [n, L, K] with their slots [n]; as step()."""
        head = RECORD.pack(SLOTS, 0, len(rows), step, version) + slots.tobytes()
        narrow, start = rows.dtype == self._dtype, rows_at(slots.nbytes)
        return self.drain() and self._put(head, start, rows, narrow, bad) > 0

    def forget(self) -> None:
        """No step goes on from the last one."""
        self._number += 1
        self.steady = None

    def event(self, name: str, *args: Any, handle: int = -1) -> None:
        """Writes an event, of the request `handle` if one is named."""
        data = pickle.dumps((name, *args) if handle < 0 else (name, handle, *args))
        if RECORD.size + len(data) > self._ring.max_record:
            raise wrong("ring_bytes", self._ring.size, f"more, for an event of {len(data)} bytes")
        self._spans.pop(handle, None)
        data = _EVENT_HEAD + data
        if not (self.drain() and self._write(data)):
            self._backlog.append(data)
            self._backlog_bytes += _EVENT_BYTES + len(data)

    def blocks(self, handles: Iterable[int], blocks: Iterable[int]) -> None:
        """Requests get blocks, one each. Written before whatever is written next."""
        told = array("q", chain.from_iterable(zip(handles, blocks, strict=True)))
        for handle in told[::2] if self._spans else ():
            self._spans.pop(handle, None)
        for at in range(0, len(told), _MAX_TOLD):
            some = _Blocks(told[at : at + _MAX_TOLD])
            self._backlog.append(some)
            self._backlog_bytes += some.nbytes

    def lose(self, handle: int, position: int, count: int, reason: int, step: int) -> None:
        """Remembers rows of a request that were not written."""
        span = self._spans.get(handle)
        if span and span[0] <= position <= span[1] and span[2] == reason:
            span[1], span[3] = position + count, step
        else:
            span = self._spans[handle] = [position, position + count, reason, step]
            self._lost().spans.append((handle, span))
            self._backlog_bytes += _SPAN_BYTES

    def lose_blocks(self, blocks: list[int]) -> None:
        """Remembers blocks that have slots whose rows were not written."""
        lost = self._lost()
        self._backlog_bytes -= lost.nbytes
        lost.blocks.update(blocks)
        self._backlog_bytes += lost.nbytes

    def drain(self) -> bool:
        """Writes what is remembered; returns whether that was all of it."""
        """Writes what is remembered; returns whether that was all of it."""
        if self._draining:  # a signal handler came in between: what it tells comes after
            return False
        self._draining = True
        try:
            while self._backlog:
                # Nothing may be added to what is being written.
                first = self._backlog.popleft()
                if isinstance(first, _Blocks):
                    self._join(first)
                more = len(self._backlog)
                spans = first.spans if isinstance(first, _Lost) else []
                growing = {h: span for h, span in spans if self._spans.get(h) is span}
                for handle in growing:
                    del self._spans[handle]
                if not self._write(first if isinstance(first, bytes) else first.record()):
                    if len(self._backlog) == more:
                        self._spans.update(growing)
                    self._backlog.appendleft(first)
                    return False
                if isinstance(first, bytes):
                    self._backlog_bytes -= _EVENT_BYTES + len(first)
                else:
                    self._backlog_bytes -= first.nbytes
        finally:
            self._draining = False
        return True

    def _join(self, first: _Blocks) -> None:
        """Takes blocks that are told next out of the backlog, to be told with these."""
        while self._backlog:
            more = self._backlog[0]
            if not isinstance(more, _Blocks) or len(first.pairs) + len(more.pairs) > _MAX_TOLD:
                return
            self._backlog.popleft()
            first.pairs.extend(more.pairs)
            self._backlog_bytes -= _EVENT_BYTES

    def clear(self) -> None:
        """Forgets what is remembered."""
        self.forget()
        self._backlog.clear()
        self._spans.clear()
        self._backlog_bytes = 0

    def _lost(self) -> _Lost:
        last = self._backlog[-1] if self._backlog else None
        if not isinstance(last, _Lost) or len(last.spans) + len(last.blocks) > _MAX_TOLD:
            last = _Lost()
            self._backlog.append(last)
        return last

    def _write(self, record: bytes) -> bool:
        ring = self._ring
        at = ring.reserve(len(record))
        if not at:
            return False
        ring.memory[at : at + len(record)] = record
        ring.commit()
        return True

    def _put(
        self, head: bytes, start: int, rows: Rows, narrow: bool, bad: npt.NDArray[np.bool_] | None
    ) -> int:
        """Writes a record whose rows begin at `start`; its number, or 0 if there is no room."""
        ring = self._ring
        at = ring.reserve(start + len(rows) * self._row_bytes)
        if not at:
            return 0
        try:
            ring.memory[at : at + len(head)] = head
            self._fill(at + start, rows, narrow, bad)
        except BaseException:
            ring.cancel()
            raise
        self._number = number = self._number + 1
        ring.commit()
        return number

    def _fill(
        self, at: int, rows: Any, narrow: bool, bad: npt.NDArray[np.bool_] | None = None
    ) -> None:
        """Writes rows to where they belong, in the narrow dtype, and marks cells that are bad."""
        memory = self._ring.memory
        if narrow:
            try:
                # Unlike numpy's copy this keeps the GIL, and does not queue to get it back.
                memory[at : at + rows.nbytes] = rows
                return
            except (ValueError, BufferError):  # they are not contiguous
                pass
        out = _ARRAY(rows.shape, self._dtype, memory, at)
        out[...] = rows
        if bad is not None:
            out[bad] = 0 if rows.shape[2] > 1 else np.iinfo(self._dtype).max
