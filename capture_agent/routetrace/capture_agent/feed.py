"""The engine's end of the ring: records in order, whatever happens behind it.

What does not fit is not waited for. Rows are dropped, and what was dropped is remembered; events
must not get lost, and are remembered too. Both are written, in order, before anything else is.
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

from routetrace.capture_agent.checks import MAX_POSITION, Ints, Rows, wrong
from routetrace.capture_agent.ring import LINE, Ring
from routetrace.v1.layout import RoutingLayout

#: Kinds of record. STEP: runs [3, m] of int64 (handles, positions, counts), rows [n, row_bytes];
#: AGAIN: rows alone, of the runs of the last STEP or AGAIN, each going on where it ended; SLOTS:
#: slots [n] of uint64 and rows; EVENT: a pickled tuple (name, *arguments).
STEP, SLOTS, EVENT, AGAIN = 1, 2, 3, 4

#: kind, m, n, step, weight version; up to the end of a cache line.
RECORD = struct.Struct(f"=QIIQq{LINE - 40}x")

_PACK, _HEAD = RECORD.pack, RECORD.size
_EVENT_HEAD = RECORD.pack(EVENT, 0, 0, 0, 0)

#: Bytes of what is remembered, beyond which the other end counts as stuck.
MAX_BACKLOG_BYTES = 32 << 20
#: What Python takes for a span, a block and an event, beside its bytes.
_SPAN_BYTES, _BLOCK_BYTES, _EVENT_BYTES = 128, 96, 64
#: Spans and blocks of one record, so that it fits into the smallest ring.
_MAX_LOST = 1 << 12

_ARRAY, _INT64 = np.ndarray, np.dtype(np.int64)
_UNSIGNED = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}
_NONE: Ints = np.empty(0, np.int64)


@dataclass
class _Lost:
    """Rows that did not fit: spans of requests, and blocks that have slots of them."""

    # handle, [start, stop, why, step of the last]
    spans: list[tuple[int, list[int]]] = field(default_factory=list)
    blocks: set[int] = field(default_factory=set)

    @property
    def nbytes(self) -> int:
        return _SPAN_BYTES * len(self.spans) + _BLOCK_BYTES * len(self.blocks)

    def pickle(self) -> bytes:
        spans = [(handle, *span) for handle, span in self.spans]
        return pickle.dumps(("lost", spans, array("I", sorted(self.blocks)).tobytes()))


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
        "_dtype", "_expected", "_growth", "_left", "_runs", "_runs_shape", "_shape", "_told",
        "narrow", "num_rows", "number",
    )  # fmt: skip

    def __init__(self, rows: Rows, runs: Ints, narrow: bool, number: int) -> None:
        self.num_rows, self.narrow, self.number = len(rows), narrow, number
        self._shape, self._dtype = rows.shape, rows.dtype
        self._runs, self._runs_shape = runs, runs.shape[::-1]
        # What is expected next, once somebody asks: the same memory as numbers and as bytes.
        self._told, self._expected, self._growth = bytearray(), _NONE, _NONE
        self._left = 0

    def goes_on(self, rows: Any, runs: Any) -> bool:
        """Whether that is the step that comes next. To be asked once for each step."""
        if (
            type(rows) is not _ARRAY
            or type(runs) is not _ARRAY
            or rows.shape != self._shape
            or rows.dtype is not self._dtype
            or runs.shape != self._runs_shape
            or runs.dtype is not _INT64
        ):
            return False
        if not self._told:
            self._foresee()
        expected = self._expected
        expected += self._growth
        self._left -= 1
        told: bytes = runs.tobytes()
        return self._left >= 0 and told == self._told

    def _foresee(self) -> None:
        _, positions, counts = self._runs
        self._told = bytearray(self._runs.T.tobytes())
        self._expected = np.frombuffer(self._told, np.int64)
        self._growth = np.zeros_like(self._expected)
        self._growth[1::3] = counts
        # No position grows by more than there are rows.
        self._left = (MAX_POSITION - 1 - int(positions.max())) // self._shape[0]


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
        self._backlog: deque[bytes | _Lost] = deque()
        self._backlog_bytes = 0
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
        if not steady.narrow and self._has_bad(rows):
            return False
        head = _PACK(AGAIN, 0, steady.num_rows, step, version)
        number = self._put(head, _HEAD, rows, steady.narrow, None, steady.number)
        if number:
            steady.number, self.steady = number, steady
        return number > 0

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
        if not (self.drain() and self._write(data)):
            self._backlog.append(data)
            self._backlog_bytes += _EVENT_BYTES + len(data)

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
        while self._backlog:
            first = self._backlog[0]
            if not self._write(first.pickle() if isinstance(first, _Lost) else first):
                return False
            self._backlog.popleft()
            if isinstance(first, _Lost):
                self._backlog_bytes -= first.nbytes
                for handle, span in first.spans:
                    if self._spans.get(handle) is span:
                        del self._spans[handle]
            else:
                self._backlog_bytes -= _EVENT_BYTES + len(first)
        return True

    def clear(self) -> None:
        """Forgets what is remembered."""
        self.forget()
        self._backlog.clear()
        self._spans.clear()
        self._backlog_bytes = 0

    def _lost(self) -> _Lost:
        last = self._backlog[-1] if self._backlog else None
        if not isinstance(last, _Lost) or len(last.spans) + len(last.blocks) > _MAX_LOST:
            last = _Lost()
            self._backlog.append(last)
        return last

    def _write(self, data: bytes) -> bool:
        record = self._ring.reserve(len(_EVENT_HEAD) + len(data))
        if record is None:
            return False
        record[:] = _EVENT_HEAD + data
        self._ring.commit()
        return True

    def _put(
        self,
        head: bytes,
        start: int,
        rows: Rows,
        narrow: bool,
        bad: npt.NDArray[np.bool_] | None,
        after: int = 0,
    ) -> int:
        """Writes a record whose rows begin at `start`; returns its number, 0 if there is no room.

        Given `after`, also 0 if that is not the number of the last one.
        """
        ring = self._ring
        record = ring.reserve(start + len(rows) * self._row_bytes)
        if record is None:
            return 0
        try:
            if after and (after != self._number or self._backlog):
                ring.cancel()
                return 0
            record[: len(head)] = head
            if narrow and rows.flags.c_contiguous:
                # Unlike numpy's copy this keeps the GIL, and does not queue to get it back.
                record[start:] = rows.data.cast("B")
            else:
                out = np.frombuffer(record, self._dtype, rows.size, start).reshape(rows.shape)
                np.copyto(out, rows, casting="unsafe")
                if bad is not None:
                    out[bad] = 0 if rows.shape[2] > 1 else np.iinfo(self._dtype).max
        except BaseException:
            ring.cancel()
            raise
        self._number = number = self._number + 1
        ring.commit()
        return number
