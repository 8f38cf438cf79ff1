"""The window of a slot-only engine: rows and slots of some steps, in order."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from routetrace.capture_agent.counters import Word
from routetrace.capture_agent.pipeline.chunks import ChunkBuilder, Ids
from routetrace.codec.frame import invalid_rows
from routetrace.common.layout import ModelLayout

Slots = npt.NDArray[np.uint64]
Bytes = npt.NDArray[np.uint8]

#: Most rows of one frame.
WINDOW_ROWS = 1024


def as_ids(rows: Bytes, layout: ModelLayout) -> Ids:
    """View rows [n, row_bytes] as ids [n, L, K]."""
    ids: npt.NDArray[Any] = rows.view(layout.dtype)
    return ids.reshape(len(rows), len(layout.layer_ids), layout.top_k)


def last_bad(slots: Slots, bad: npt.NDArray[np.bool_]) -> Slots:
    """Return the slots of one step [n] whose last row is `bad` [n]."""
    found, last = np.unique(slots[::-1], return_index=True)
    return found[bad[::-1][last]]


class SlotWindow:
    """Lingering rows of steps that came with slots alone.

    Args:
        layout: columns of the rows.
        out: ops and frames go here.
        drop: drop callback.
    """

    def __init__(
        self, layout: ModelLayout, out: ChunkBuilder, drop: Callable[[Word, int], None]
    ) -> None:
        self._layout = layout
        self._out = out
        self._drop = drop
        self._clear()

    def _clear(self) -> None:
        #: Lingering rows.
        self.rows = 0
        #: Arrival of the first one; inf without any.
        self.since = math.inf
        self._version = 0
        self._steps: list[tuple[int, int]] = []  # (step, rows of it)
        self._slots: list[Slots] = []
        self._parts: list[Bytes] = []

    def add(self, now: float, step: int, version: int, slots: Slots, rows: Bytes) -> None:
        """Add the rows [n, row_bytes] of one step at `slots` [n]; both are copied."""
        if version != self._version:
            self.flush()
        most = min(WINDOW_ROWS, self._out.max_slot_rows)
        while len(rows):
            if not self.rows:
                self.since, self._version = now, version
            take = max(1, most - self.rows)
            self._slots.append(slots[:take].copy())
            self._parts.append(rows[:take].copy())
            self._steps.append((step, len(rows[:take])))
            self.rows += len(rows[:take])
            slots, rows = slots[take:], rows[take:]
            if self.rows >= most:
                self.flush()

    def flush(self) -> None:
        """Emit the lingering rows."""
        if not self.rows:
            return
        slots = np.concatenate(self._slots)
        ids = as_ids(np.concatenate(self._parts), self._layout)
        in_order, version = self._steps, self._version
        self._clear()
        bad = invalid_rows(ids, self._layout.num_experts)
        self._drop(Word.INVALID_IDS, int(bad.sum()))
        # A step with bad rows is emitted apart: slots whose last row is bad are unknown.
        part = row = 0
        steps: list[tuple[int, int]] = []
        for step, n in in_order:
            stop = row + n
            good = row + np.flatnonzero(~bad[row:stop])
            if len(good) < n:
                self._emit(ids[part:row], slots[part:row], steps, version)
                self._emit(ids[good], slots[good], [(step, len(good))], version)
                self._out.forget(last_bad(slots[row:stop], bad[row:stop]))
                part, steps = stop, []
            else:
                steps.append((step, n))
            row = stop
        self._emit(ids[part:], slots[part:], steps, version)

    def shed(self) -> None:
        """Drop the lingering rows."""
        if self.rows:
            self._drop(Word.QUEUE_FULL, self.rows)
            slots = np.concatenate(self._slots)
            self._clear()
            self._out.forget(np.unique(slots))

    def _emit(self, ids: Ids, slots: Slots, steps: list[tuple[int, int]], version: int) -> None:
        if len(ids):
            self._out.slot_rows(ids, slots, steps, version)
