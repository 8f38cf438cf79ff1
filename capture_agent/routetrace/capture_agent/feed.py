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
from typing import Any, cast

import numpy as np

from routetrace.capture_agent.checks import Rows, wrong
from routetrace.capture_agent.ring import Ring
from routetrace.v1.layout import RoutingLayout

#: Kinds of record. STEP: runs [3, m] of int64 (handles, positions, counts), rows [n, row_bytes];
#: SLOTS: slots [n] of uint64 and rows; EVENT: a pickled tuple (name, *arguments).
STEP, SLOTS, EVENT = 1, 2, 3

#: kind, m, n, step, weight version
RECORD = struct.Struct("=QIIQq")

#: Bytes of what is remembered, beyond which the other end counts as stuck.
MAX_BACKLOG_BYTES = 32 << 20
#: What Python takes for a span, a block and an event, beside its bytes.
_SPAN_BYTES, _BLOCK_BYTES, _EVENT_BYTES = 128, 96, 64
#: Spans and blocks of one record, so that it fits into the smallest ring.
_MAX_LOST = 1 << 12


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
        self._backlog: deque[bytes | _Lost] = deque()
        self._backlog_bytes = 0
        self._spans: dict[int, list[int]] = {}  # spans in the backlog that may still grow

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
        return (self._ring.max_record - RECORD.size - column_bytes) // self._row_bytes

    def rows(
        self, kind: int, column: Any, rows: Rows, step: int, version: int, bad: Any = None
    ) -> bool:
        """Writes rows [n, L, K] with their runs or slots; False if there is no room.

        Cells `bad` [n, L] are marked, so that the other end takes them for missing.
        """
        start = RECORD.size + column.nbytes
        size = start + len(rows) * self._row_bytes
        record = self._ring.reserve(size) if self.drain() else None
        if record is None:
            return False
        RECORD.pack_into(record, 0, kind, column.shape[-1], len(rows), step, version)
        record[RECORD.size : start] = memoryview(column).cast("B")
        if rows.dtype == self._dtype and rows.flags.c_contiguous:
            # Unlike numpy's copy this keeps the GIL, and does not queue to get it back.
            record[start:] = memoryview(cast("Any", rows)).cast("B")
        else:
            out = np.frombuffer(record, self._dtype, rows.size, start).reshape(rows.shape)
            np.copyto(out, rows, casting="unsafe")
            if bad is not None:
                out[bad] = 0 if rows.shape[2] > 1 else np.iinfo(self._dtype).max
        self._ring.commit()
        return True

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
        record = self._ring.reserve(RECORD.size + len(data))
        if record is None:
            return False
        RECORD.pack_into(record, 0, EVENT, 0, 0, 0, 0)
        record[RECORD.size :] = data
        self._ring.commit()
        return True
