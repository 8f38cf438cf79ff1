"""Entry of the pipeline: records of the ring in, ops and frames out.

The intake alone knows of held steps. Steps that continue the one before are stored at once, and
entered into their lanes many at a time (`held`). Every other call needs lanes that are up to date:
the intake settles first, then calls the framer. The engine's end of the same prediction, which
recognizes such steps, is `steady`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from routetrace.capture_agent.counters import Word
from routetrace.capture_agent.pipeline.chunks import Blocks, ChunkBuilder
from routetrace.capture_agent.pipeline.framer import Framer
from routetrace.capture_agent.pipeline.held import Held
from routetrace.capture_agent.pipeline.linger import LANE_MASK, Bytes, Ints, Linger
from routetrace.capture_agent.pipeline.pressure import Pressure
from routetrace.capture_agent.pipeline.window import Slots
from routetrace.codec.records import U32
from routetrace.common.layout import ModelLayout


class Intake:
    """Takes steps and events in order.

    Args:
        layout: columns of the rows.
        block_size: tokens per KV block; 0 if slots are not reported.
        num_blocks: blocks in the pool.
        frame_rows: rows that make a frame.
        out: ops and frames go here.
        drop: drop callback.
        follows: whether another intake took earlier records, and its state is lost.
    """

    def __init__(
        self,
        layout: ModelLayout,
        block_size: int,
        num_blocks: int,
        frame_rows: int,
        out: ChunkBuilder,
        drop: Callable[[Word, int], None],
        *,
        follows: bool = False,
    ) -> None:
        self._frame_rows = frame_rows
        self._drop = drop
        self._linger = Linger(layout.row_bytes, frame_rows)
        self._framer = Framer(
            layout, block_size, num_blocks, self._linger, out, drop, follows=follows
        )
        self._held = Held(frame_rows)
        self._spans: Ints = np.empty((3, 0), np.int64)  # of the last step, but for those held

    @property
    def pressure(self) -> Pressure:
        """Memory pressure."""
        return self._framer.pressure

    @pressure.setter
    def pressure(self, level: Pressure) -> None:
        self.settle()
        self._framer.pressure = level

    @property
    def nbytes(self) -> int:
        """Bytes of lingering rows."""
        return self._framer.nbytes

    @property
    def held_bytes(self) -> int:
        """Bytes of memory in use."""
        return self._framer.held_bytes

    @property
    def oldest(self) -> float:
        """Arrival of the first lingering row of the steps that are settled; inf without any."""
        return self._framer.oldest

    @property
    def slots_since(self) -> float:
        """Arrival of the first lingering row that came with slots alone; inf without any."""
        return self._framer.slots_since

    @property
    def all_ended(self) -> bool:
        """Whether requests began, and all of them have ended."""
        return self._framer.all_ended

    # ------------------------------------------------------------------ records

    def step(self, now: float, step: int, version: int, spans: Ints, rows: Bytes) -> None:
        """Take the rows of one forward pass.

        Args:
            now: time.
            step: its number.
            version: weight version that computed them.
            spans: [3, m] handles, positions and counts.
            rows: [n, row_bytes]; copied.
        """
        self.settle()
        self._spans = spans
        self._framer.step(now, step, version, spans, rows)

    def again(self, now: float, step: int, version: int, rows: Bytes) -> None:
        """Take a step whose spans each continue those of the last one."""
        if self._held.takes(version):
            self._held.add(step, self._linger.store(rows))
            return
        self.settle()
        handles, positions, counts = self._spans
        if not len(handles):  # the former intake took the step that it continues
            self._drop(Word.UNSEEN, len(rows))
            return
        spans = np.array([handles, positions + counts, counts])
        lanes = handles & LANE_MASK
        fits = self._linger.fits(lanes, spans[1], counts, version)
        if len(rows) > len(lanes) or self.pressure is not Pressure.NORMAL or not fits.all():
            self.step(now, step, version, spans, rows)
            return
        self._framer.flush_window()
        self._spans = spans
        self._held.begin(now, version, lanes)
        self._held.add(step, self._linger.store(rows))

    def step_slots(self, now: float, step: int, version: int, slots: Slots, rows: Bytes) -> None:
        """Take rows [n, row_bytes] of one forward pass at `slots` [n]."""
        self.settle()
        self._framer.step_slots(now, step, version, slots, rows)

    def add_blocks(self, handles: Ints, blocks: Ints | Blocks) -> None:
        """Take blocks that requests get: block i goes to handle i."""
        framer, lanes, block_ids = self._framer, handles & LANE_MASK, blocks.astype(U32)
        parts = [slice(None)]
        if len(set(block_ids.tolist())) < len(block_ids):
            # A block twice: the first request must release it before the second gets it.
            parts = [slice(i, i + 1) for i in range(len(block_ids))]
        for part in parts:
            # Held steps bring one row a lane, and seldom reach one of these blocks.
            if framer.reaches(block_ids[part], len(self._held)):
                self.settle()
                framer.flush_writers(block_ids[part])
            framer.add_blocks(lanes[part], block_ids[part])

    def event(self, name: str, *args: Any) -> None:
        """Take an event of the engine, see `Framer.events`."""
        self.settle()
        self._framer.events[name](*args)

    # ------------------------------------------------------------------ timers and memory

    def settle(self) -> None:
        """Enter the held steps into their lanes."""
        held, linger = self._held, self._linger
        if not held:
            return
        steps, places = held.take()
        n, lanes, facts = len(steps), held.lanes, (held.since, held.version)
        self._spans[1] += n - 1
        # Some lanes may complete a frame in between.
        first = np.minimum(n, self._frame_rows - linger.fill[lanes])
        mine = np.arange(n) < first[:, None]
        self._framer.enter(*facts, steps[first - 1], lanes, first, places[mine])
        late = first < n
        if late.any():
            self._framer.enter(*facts, steps[-1], lanes[late], n - first[late], places[~mine])

    def tick(self, before: float) -> None:
        """Flush rows that arrived before that time."""
        self.settle()
        self._framer.tick(before)

    def flush_slots(self) -> None:
        """Flush the rows that came with slots alone."""
        self.settle()
        self._framer.flush_window()

    def flush(self) -> None:
        """Flush all lingering rows."""
        self.settle()
        self._framer.flush()

    def report(self) -> None:
        """Flush all lingering rows, and report that slots changed, if that was not reported."""
        self.flush()
        self._framer.clear_unknown()

    def compact(self) -> None:
        """Return memory that rows no longer take."""
        self._linger.compact()

    def shed(self, nbytes: int) -> None:
        """Drop whole requests that have rows here, newest first, until `nbytes` are free."""
        self.settle()
        self._framer.shed(nbytes)

    def close(self) -> None:
        """Flush everything; report the agent's loss for live requests."""
        self.settle()
        self._framer.close()
