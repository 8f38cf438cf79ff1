"""The engine's end of the ring: records in order, without waiting for room.

Records that do not fit go to a backlog: of rows only the fact that they were dropped, of events
all, as none may get lost. The backlog is written, in order, before anything else.
"""

from __future__ import annotations

import pickle
import struct
from array import array
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from routetrace.capture_agent.step_path.checks import Ints, Rows, wrong
from routetrace.capture_agent.step_path.ring import LINE, Ring
from routetrace.capture_agent.step_path.steady import Steady
from routetrace.common.layout import ModelLayout

#: Kinds of record. STEP: spans [3, m] of int64 (handles, positions, counts), rows [n, row_bytes];
#: AGAIN: rows alone, each span continues that of the last STEP or AGAIN; SLOTS: slots [n] of uint64
#: and rows; EVENT: a pickled tuple (name, *arguments); BLOCKS: pairs [m, 2] of int64 (handle, a
#: block that it gets).
STEP, SLOTS, EVENT, AGAIN, BLOCKS = 1, 2, 3, 4, 5

#: kind, m, n, step, weight version; padded to a cache line.
RECORD = struct.Struct(f"=QIIQq{LINE - 40}x")

_PACK_INTO, _HEAD = RECORD.pack_into, RECORD.size
_EVENT_HEAD = RECORD.pack(EVENT, 0, 0, 0, 0)

#: Bytes of the backlog above which the background counts as stuck.
MAX_BACKLOG_BYTES = 32 << 20
#: Bytes that Python takes for a span, a block and an event, beside their data.
_SPAN_BYTES, _BLOCK_BYTES, _EVENT_BYTES = 128, 96, 64
#: Most spans and blocks of one record, so that it fits into the smallest ring.
_MAX_ITEMS = 1 << 12

_ARRAY: Any = np.ndarray  # a buffer, as type checkers of Python 3.10 do not know
_UNSIGNED = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}


@dataclass
class _Lost:
    """Rows that did not fit: spans of requests, and blocks with their slots."""

    # handle, [start, stop, reason, step of the last]
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
    """Blocks that requests got, in one record, since most steps give blocks to many requests."""

    pairs: array[int]

    @property
    def nbytes(self) -> int:
        return _EVENT_BYTES + 8 * len(self.pairs)

    def record(self) -> bytes:
        head = RECORD.pack(BLOCKS, len(self.pairs) // 2, 0, 0, 0)
        return head + self.pairs.tobytes()


def rows_at(column_bytes: int) -> int:
    """Offset of the rows of a record, after a column of that size: a cache line."""
    return RECORD.size - -column_bytes // LINE * LINE


class Feed:
    """Writer of records into a ring.

    Args:
        ring: the producer's end.
        layout: columns of the rows.
        yields: whether copies of rows let other threads run.
    """

    def __init__(self, ring: Ring, layout: ModelLayout, yields: bool = False) -> None:
        self._ring = ring
        self._yields = yields
        self._dtype = layout.dtype
        self._row_bytes = layout.row_bytes
        self._num_experts = layout.num_experts
        self._backlog: deque[bytes | _Lost | _Blocks] = deque()
        self._backlog_bytes = 0
        self._draining = False
        self._spans: dict[int, list[int]] = {}  # by handle: spans in the backlog that may grow
        self._number = 0  # of the last step's record, or of a break after it
        #: The last step that was written, if the next one may continue it.
        self.steady: Steady | None = None

    @property
    def behind(self) -> bool:
        """Whether there is a backlog."""
        return bool(self._backlog)

    @property
    def stuck(self) -> bool:
        """Whether the backlog exceeds its limit."""
        return self._backlog_bytes > MAX_BACKLOG_BYTES

    def room(self, column_bytes: int) -> int:
        """Most rows of one record, beside a column of that size."""
        return (self._ring.max_record - rows_at(column_bytes)) // self._row_bytes

    def bad_cells(self, rows: Rows) -> npt.NDArray[np.bool_] | None:
        """Cells [n, L] whose ids do not fit into the narrow dtype; None without any.

        Ids that arrive in the narrow dtype are checked in the background.
        """
        if rows.dtype == self._dtype or not self._has_bad(rows):
            return None
        unsigned = rows.view(_UNSIGNED[rows.dtype.itemsize])
        bad: npt.NDArray[np.bool_] = np.any(unsigned >= self._num_experts, axis=2)
        return bad

    def _has_bad(self, rows: Rows) -> bool:
        # As unsigned integers negative ids are huge. Where caches are cold, as between the steps of
        # most engines, a reduction takes twice as long.
        unsigned = rows.view(_UNSIGNED[rows.dtype.itemsize])
        return bool(unsigned.item(unsigned.argmax()) >= self._num_experts)

    def again(self, steady: Steady, rows: Rows, step: int, version: int) -> bool:
        """Write the rows of a step that continues `steady`.

        Returns:
            False if there is no room, if cells have to be marked, or if `steady` is not the last
            step that was written: a signal handler may have run in between.
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
        self, spans: Ints, rows: Rows, step: int, version: int, bad: npt.NDArray[np.bool_] | None
    ) -> bool:
        """Write rows [n, L, K] with their spans [3, m]; return False if there is no room.

        Cells `bad` [n, L] are marked, so that the background takes them for missing.
        """
        head = RECORD.pack(STEP, spans.shape[1], len(rows), step, version) + spans.tobytes()
        narrow = rows.dtype == self._dtype
        start = rows_at(spans.nbytes)
        number = self._put(head, start, rows, narrow, bad) if self.drain() else 0
        self.steady = Steady(rows, spans, narrow, number) if number else None
        return number > 0

    def slots(
        self,
        slots: npt.NDArray[np.uint64],
        rows: Rows,
        step: int,
        version: int,
        bad: npt.NDArray[np.bool_] | None,
    ) -> bool:
        """Write rows [n, L, K] with their slots [n]; as step()."""
        head = RECORD.pack(SLOTS, 0, len(rows), step, version) + slots.tobytes()
        narrow, start = rows.dtype == self._dtype, rows_at(slots.nbytes)
        return self.drain() and self._put(head, start, rows, narrow, bad) > 0

    def interrupt(self) -> None:
        """Have no step continue the last one."""
        self._number += 1
        self.steady = None

    def event(self, name: str, *args: Any, handle: int = -1) -> None:
        """Write an event, of the request `handle` if it is given."""
        data = pickle.dumps((name, *args) if handle < 0 else (name, handle, *args))
        if RECORD.size + len(data) > self._ring.max_record:
            raise wrong("ring_bytes", self._ring.size, f"room for an event of {len(data)} bytes")
        self._spans.pop(handle, None)
        data = _EVENT_HEAD + data
        if not (self.drain() and self._write(data)):
            self._backlog.append(data)
            self._backlog_bytes += _EVENT_BYTES + len(data)

    def blocks(self, handles: Ints, blocks: Ints) -> None:
        """Add blocks that requests get, one each; they are written before the next record."""
        pairs = array("q", np.stack([handles, blocks], axis=1).tobytes())
        for handle in pairs[::2] if self._spans else ():
            self._spans.pop(handle, None)
        for at in range(0, len(pairs), _MAX_ITEMS):
            some = _Blocks(pairs[at : at + _MAX_ITEMS])
            self._backlog.append(some)
            self._backlog_bytes += some.nbytes

    def lose(self, handle: int, position: int, count: int, reason: int, step: int) -> None:
        """Add rows of a request that were not written to the backlog."""
        span = self._spans.get(handle)
        if span and span[0] <= position <= span[1] and span[2] == reason:
            span[1], span[3] = position + count, step
        else:
            span = self._spans[handle] = [position, position + count, reason, step]
            self._lost().spans.append((handle, span))
            self._backlog_bytes += _SPAN_BYTES

    def lose_blocks(self, blocks: list[int]) -> None:
        """Add blocks with slots whose rows were not written to the backlog."""
        lost = self._lost()
        self._backlog_bytes -= lost.nbytes
        lost.blocks.update(blocks)
        self._backlog_bytes += lost.nbytes

    def drain(self) -> bool:
        """Write the backlog; return whether all of it was written."""
        if self._draining:  # called by a signal handler; its records come after
            return False
        self._draining = True
        try:
            while self._backlog:
                # A record that is being written must not grow.
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
        """Move blocks at the front of the backlog into the same record."""
        while self._backlog:
            more = self._backlog[0]
            if not isinstance(more, _Blocks) or len(first.pairs) + len(more.pairs) > _MAX_ITEMS:
                return
            self._backlog.popleft()
            first.pairs.extend(more.pairs)
            self._backlog_bytes -= _EVENT_BYTES

    def clear(self) -> None:
        """Discard the backlog."""
        self.interrupt()
        self._backlog.clear()
        self._spans.clear()
        self._backlog_bytes = 0

    def _lost(self) -> _Lost:
        last = self._backlog[-1] if self._backlog else None
        if not isinstance(last, _Lost) or len(last.spans) + len(last.blocks) > _MAX_ITEMS:
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
        """Write a record whose rows begin at `start`; return its number, or 0 without room."""
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
        """Write rows at an offset, in the narrow dtype, and mark bad cells."""
        memory = self._ring.memory
        if narrow and not self._yields:
            try:
                # Unlike numpy's copy this keeps the GIL, and need not take it again.
                memory[at : at + rows.nbytes] = rows
                return
            except (ValueError, BufferError):  # they are not contiguous
                pass
        out = _ARRAY(rows.shape, self._dtype, memory, at)
        out[...] = rows
        if bad is not None:
            out[bad] = 0 if rows.shape[2] > 1 else np.iinfo(self._dtype).max
