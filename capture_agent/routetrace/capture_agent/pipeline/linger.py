"""Lingering rows, which wait for their frame to fill: consecutive positions of each request.

A decode step brings one row to each of hundreds of requests, so the state is columns: requests are
lanes, numbers from 0 that are reused, and a step is a handful of array operations.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]
Places = npt.NDArray[np.int32]

#: A handle is a lane and, above these bits, the number of uses of the lane.
LANE_BITS = 20
LANE_MASK = (1 << LANE_BITS) - 1

_FIRST_LANES = 64
_FIRST_ROWS = 256


class Linger:
    """Lingering rows by lane; positions [end - fill, end) linger.

    Args:
        row_bytes: bytes of a row.
        frame_rows: most rows of a lane.
    """

    def __init__(self, row_bytes: int, frame_rows: int) -> None:
        self.frame_rows = frame_rows
        self._row_bytes = row_bytes
        self.end: Ints = np.zeros(0, np.int64)  # next position
        self.fill: Ints = np.zeros(0, np.int64)  # lingering rows
        self.version: Ints = np.zeros(0, np.int64)  # their weight version
        self.step: Ints = np.zeros(0, np.int64)  # step of the last row
        self.prompt_len: Ints = np.zeros(0, np.int64)
        self.tentative: Ints = np.zeros(0, np.int64)  # last positions that may be rejected drafts
        self.sure: Ints = np.zeros(0, np.int64)  # no draft was emitted of a position below
        self.since: npt.NDArray[np.float64] = np.zeros(0)  # arrival of the first; inf: none
        self.open: npt.NDArray[np.bool_] = np.zeros(0, np.bool_)  # takes rows that continue it
        self._first: Ints = np.zeros(0, np.int64)  # scratch: a span of the lane in this step
        self._count: Ints = np.zeros(0, np.int64)  # 0, 1, 2, ...
        # Rows are in one arena, in any free place; `_places` names those of a lane. A row is one
        # item, which numpy moves twice as fast as a row of bytes.
        self._row = np.dtype((np.void, row_bytes))
        self._arena: npt.NDArray[np.void] = np.empty(0, self._row)
        self._places = np.empty((0, frame_rows), np.int32)
        self._free = np.empty(0, np.int32)  # a stack; the first `_num_free` are free
        self._num_free = 0
        self._add_lanes(_FIRST_LANES)

    @property
    def rows(self) -> int:
        """Number of lingering rows of all lanes."""
        return len(self._arena) - self._num_free

    @property
    def nbytes(self) -> int:
        """Bytes of lingering rows."""
        return self.rows * self._row_bytes

    @property
    def held_bytes(self) -> int:
        """Bytes of memory in use, free places included."""
        return self._arena.nbytes + self._places.nbytes

    def begin(self, lane: int, position: int, prompt_len: int) -> None:
        """Start to use a lane; its first row is at `position`."""
        if lane >= len(self.end):
            self._add_lanes(max(2 * len(self.end), lane + 1))
        self.end[lane], self.fill[lane], self.open[lane] = position, 0, True
        self.sure[lane] = position
        self.since[lane] = np.inf
        self.step[lane], self.prompt_len[lane], self.tentative[lane] = 0, prompt_len, 0

    def fits(self, lanes: Ints, positions: Ints, counts: Ints, version: int) -> Any:
        """Mark spans that just continue their lane and fit into its frame; bool [m]."""
        if len(lanes) > len(self._count):
            self._count = np.arange(2 * len(lanes))
        order = self._count[: len(lanes)]
        self._first[lanes] = order
        if (self._first[lanes] != order).any():  # a lane twice: one by one
            return np.zeros(len(lanes), np.bool_)
        fill = self.fill[lanes]
        good = self.open[lanes] & (positions == self.end[lanes])
        good &= (fill == 0) | (self.version[lanes] == version)
        good &= fill + counts <= self.frame_rows
        return good

    def extend(
        self,
        now: float,
        step: int,
        version: int,
        lanes: Ints,
        counts: Ints,
        rows: Bytes,
    ) -> None:
        """Append spans that fit.

        Args:
            now: time.
            step: number of the step.
            version: weight version that computed the rows.
            lanes: [m], each once.
            counts: [m] rows per lane.
            rows: [sum(counts), row_bytes], contiguous, in the order of the lanes.
        """
        self.enter(now, step, version, lanes, counts, self.store(rows), counts)

    def store(self, rows: Bytes) -> Places:
        """Copy rows into free places; return the places, for enter()."""
        n = len(rows)
        if n > self._num_free:
            self._add_rows(max(len(self._arena) // 4, n, _FIRST_ROWS))
        self._num_free -= n
        places = self._free[self._num_free : self._num_free + n].copy()
        self._arena[places] = rows.view(self._row)[:, 0]
        return places

    def enter(
        self,
        now: float,
        step: Ints | int,
        version: int,
        lanes: Ints,
        counts: Ints,
        places: Places,
        last: Ints | int,
    ) -> None:
        """Append stored rows, as extend(); `last` rows of each span belong to its last step."""
        n = len(places)
        fill = self.fill[lanes]
        if n == len(lanes):
            self._places[lanes, fill] = places
        else:
            # Row i of a span goes to fill + i.
            ahead = np.repeat(fill - np.cumsum(counts) + counts, counts)
            self._places[np.repeat(lanes, counts), ahead + np.arange(n)] = places
        fresh = lanes[fill == 0]
        self.since[fresh] = now
        self.version[fresh] = version
        self.fill[lanes] = fill + counts
        self.end[lanes] += counts - last
        self.advance(step, lanes, last)

    def advance(self, step: Ints | int, lanes: Ints | int, counts: Ints | int) -> None:
        """Move the end of lanes by `counts`, whether their rows arrived or not.

        Positions beyond the prompt may be rejected drafts, except the first of a step, whose token
        was sampled before. Several parts of a step count as one.
        """
        drafts = np.where(self.step[lanes] == step, self.tentative[lanes], -1) + counts
        self.end[lanes] += counts
        beyond = self.end[lanes] - self.prompt_len[lanes]
        self.tentative[lanes] = np.minimum(np.maximum(beyond, 0), drafts)
        self.step[lanes] = step

    def skip(self, lane: int, position: int) -> None:
        """Set the next position of a lane to `position`, after its end."""
        self.tentative[lane] += position - self.end[lane]
        self.end[lane] = position

    def take(self, lanes: Ints) -> Bytes:
        """Remove the rows of some lanes; return them lane by lane: [n, row_bytes], a copy."""
        fill = self.fill[lanes]
        most = int(fill.max(initial=0))
        places = self._places[lanes, :most]
        if int(fill.min(initial=most)) < most:
            places = places[np.arange(most) < fill[:, None]]
        places = places.reshape(-1)
        rows = self._arena.take(places)
        self._release(places)
        self.fill[lanes] = 0
        self.since[lanes] = np.inf
        return rows.view(np.uint8).reshape(-1, self._row_bytes)

    def cut(self, lane: int, position: int) -> int:
        """Drop the rows of a lane at and after `position`; return their number."""
        fill, end = int(self.fill[lane]), int(self.end[lane])
        self.tentative[lane] = max(0, self.tentative[lane] - max(0, end - position))
        keep = min(fill, max(0, position - (end - fill)))
        self._release(self._places[lane, keep:fill])
        self.fill[lane] = keep
        if not keep:
            self.since[lane] = np.inf
        if keep < fill:
            self.end[lane] = position
        return fill - keep

    @property
    def oldest(self) -> float:
        """Arrival of the first of all rows; inf without any."""
        return float(self.since.min())

    def expired(self, before: float) -> Ints:
        """Lanes whose first row arrived before that time."""
        return np.flatnonzero(self.since <= before)

    def full(self, lanes: Ints) -> Ints:
        """Return those of the lanes that hold a full frame."""
        full: Ints = lanes[self.fill[lanes] == self.frame_rows]
        return full

    def lingering(self) -> Ints:
        """Lanes that hold rows."""
        return np.flatnonzero(self.fill)

    def compact(self) -> None:
        """Return memory if rows take less than half of it."""
        rows = self.rows
        if len(self._arena) <= max(_FIRST_ROWS, 2 * rows):
            return
        lanes = np.flatnonzero(self.fill)
        places = self._places[lanes]
        used = np.arange(self.frame_rows) < self.fill[lanes, None]
        kept = self._arena[places[used]]
        places[used] = np.arange(rows)
        self._places[lanes] = places
        self._arena, self._num_free = kept, 0
        self._free = np.empty(rows, np.int32)
        self._add_rows(max(rows, _FIRST_ROWS))

    def _release(self, places: Places) -> None:
        self._free[self._num_free : self._num_free + len(places)] = places
        self._num_free += len(places)

    def _add_lanes(self, num_lanes: int) -> None:
        more = num_lanes - len(self.end)
        for name in (
            "end", "fill", "version", "step", "prompt_len", "tentative", "sure", "since", "open",
            "_first",
        ):  # fmt: skip
            column = getattr(self, name)
            setattr(self, name, np.concatenate([column, np.zeros(more, column.dtype)]))
        self.since[-more:] = np.inf
        more_places = np.empty((more, self.frame_rows), np.int32)
        self._places = np.concatenate([self._places, more_places])

    def _add_rows(self, more: int) -> None:
        old = len(self._arena)
        arena = np.empty(old + more, self._row)
        arena[:old] = self._arena
        self._arena = arena
        free = np.empty(old + more, np.int32)
        free[: self._num_free] = self._free[: self._num_free]
        # Descending, so that places are used in ascending order.
        free[self._num_free : self._num_free + more] = np.arange(old + more - 1, old - 1, -1)
        self._num_free += more
        self._free = free
