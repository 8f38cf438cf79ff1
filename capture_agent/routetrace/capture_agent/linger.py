"""Rows that wait for their frame to fill up: per request, a run of consecutive positions.

A decode step brings one row to each of hundreds of requests, so all of this is columns: requests
are lanes, numbers from 0 that are used again, and a step is a handful of array operations.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]
Places = npt.NDArray[np.int32]

#: A handle is a lane and, above these bits, how often the lane was handed out.
LANE_BITS = 20
LANE_MASK = (1 << LANE_BITS) - 1

_FIRST_LANES = 64
_FIRST_ROWS = 256


class Linger:
    """Runs of lingering rows by lane; positions [end - fill, end) linger.

    Args:
        row_bytes: bytes of a row.
        frame_rows: rows that a lane holds at most.
    """

    def __init__(self, row_bytes: int, frame_rows: int) -> None:
        self.frame_rows = frame_rows
        self._row_bytes = row_bytes
        self.end: Ints = np.zeros(0, np.int64)  # next position
        self.fill: Ints = np.zeros(0, np.int64)  # lingering rows
        self.version: Ints = np.zeros(0, np.int64)  # their weight version
        self.step: Ints = np.zeros(0, np.int64)  # step of the last row that came
        self.prompt_len: Ints = np.zeros(0, np.int64)
        self.tentative: Ints = np.zeros(0, np.int64)  # last positions that may be rejected drafts
        self.since: npt.NDArray[np.float64] = np.zeros(0)  # when the first came; inf without any
        self.open: npt.NDArray[np.bool_] = np.zeros(0, np.bool_)  # takes rows
        self._first: Ints = np.zeros(0, np.int64)  # scratch: some run of the lane in this step
        self._count: Ints = np.zeros(0, np.int64)  # 0, 1, 2, ...
        # Rows live in one arena, wherever there was room; a lane knows where its rows are. A row is
        # one item, which numpy moves twice as fast as it does a row of bytes.
        self._row = np.dtype((np.void, row_bytes))
        self._arena: npt.NDArray[np.void] = np.empty(0, self._row)
        self._places = np.empty((0, frame_rows), np.int32)
        self._free = np.empty(0, np.int32)  # a stack; the first `_num_free` are free
        self._num_free = 0
        self._add_lanes(_FIRST_LANES)

    @property
    def rows(self) -> int:
        """Rows that linger, of all lanes."""
        return len(self._arena) - self._num_free

    @property
    def nbytes(self) -> int:
        """Their bytes."""
        return self.rows * self._row_bytes

    @property
    def held_bytes(self) -> int:
        """Bytes of memory, whether rows are in it or not."""
        return self._arena.nbytes + self._places.nbytes

    def begin(self, lane: int, position: int, prompt_len: int) -> None:
        """A lane is handed out; its first row will be at `position`."""
        if lane >= len(self.end):
            self._add_lanes(max(2 * len(self.end), lane + 1))
        self.end[lane], self.fill[lane], self.open[lane] = position, 0, True
        self.since[lane] = np.inf
        self.step[lane], self.prompt_len[lane], self.tentative[lane] = 0, prompt_len, 0

    def fits(self, lanes: Ints, positions: Ints, counts: Ints, version: int) -> Any:
        """Which runs simply continue their lane and leave room in it; bool [m]."""
        if len(lanes) > len(self._count):
            self._count = np.arange(2 * len(lanes))
        order = self._count[: len(lanes)]
        self._first[lanes] = order
        if (self._first[lanes] != order).any():  # a lane twice: one after the other
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
        """Appends runs that fit.

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
        """Puts rows where there is room, and returns where; they are nobody's until enter()."""
        n = len(rows)
        if n > self._num_free:
            self._add_rows(max(len(self._arena), n, _FIRST_ROWS))
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
        """As extend(), of rows that were stored; `last` of each run are of its last step."""
        n = len(places)
        fill = self.fill[lanes]
        if n == len(lanes):
            self._places[lanes, fill] = places
        else:
            # Row i of a run goes to fill + i.
            ahead = np.repeat(fill - np.cumsum(counts) + counts, counts)
            self._places[np.repeat(lanes, counts), ahead + np.arange(n)] = places
        fresh = lanes[fill == 0]
        self.since[fresh] = now
        self.version[fresh] = version
        self.fill[lanes] = fill + counts
        self.end[lanes] += counts - last
        self.advance(step, lanes, last)

    def advance(self, step: Ints | int, lanes: Ints | int, counts: Ints | int) -> None:
        """Positions of lanes come, whether their rows do or not: `counts` of them each.

        Those beyond the prompt may be rejected drafts, but for the first of a step: its token was
        sampled before. What a step brings in several parts is one.
        """
        drafts = np.where(self.step[lanes] == step, self.tentative[lanes], -1) + counts
        self.end[lanes] += counts
        beyond = self.end[lanes] - self.prompt_len[lanes]
        self.tentative[lanes] = np.minimum(np.maximum(beyond, 0), drafts)
        self.step[lanes] = step

    def skip(self, lane: int, position: int) -> None:
        """The next position of a lane is `position`, behind its end."""
        self.tentative[lane] += position - self.end[lane]
        self.end[lane] = position

    def take(self, lanes: Ints) -> Bytes:
        """Takes the rows of some lanes out, one after the other: [n, row_bytes], a copy."""
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
        """Forgets the rows of a lane at and after `position`; returns how many there were."""
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
        """When the first of all the rows came; inf without any."""
        return float(self.since.min())

    def expired(self, before: float) -> Ints:
        """Lanes whose first row came before that time."""
        return np.flatnonzero(self.since <= before)

    def full(self, lanes: Ints) -> Ints:
        """Which of the lanes hold a whole frame."""
        full: Ints = lanes[self.fill[lanes] == self.frame_rows]
        return full

    def lingering(self) -> Ints:
        """Lanes that hold rows."""
        return np.flatnonzero(self.fill)

    def compact(self) -> None:
        """Gives memory back, if rows take less than a quarter of it."""
        rows = self.rows
        if len(self._arena) <= max(_FIRST_ROWS, 4 * rows):
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
            "end", "fill", "version", "step", "prompt_len", "tentative", "since", "open", "_first"
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
        # Downwards, so that rows are handed out upwards.
        free[self._num_free : self._num_free + more] = np.arange(old + more - 1, old - 1, -1)
        self._num_free += more
        self._free = free
