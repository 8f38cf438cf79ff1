"""The slot map: which stored row belongs to the KV entry in each slot of one engine.

It is what an engine-side table of rows by slot is, with a reference in place of the row. Writes are
applied in step order and later ones win; what was not written since the block was handed out is
unknown.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from routetrace.server.refs import CHUNK_SHIFT, ROW_BITS, UNKNOWN


class SlotRun(NamedTuple):
    """`length` positions from `position` on, whose rows are `ref`, `ref + 1`, ..."""

    position: int
    length: int
    ref: int
    weight_version: int


class SlotMap:
    """Slots of one writer epoch. `slot = block_id * block_size + offset`."""

    def __init__(self, block_size: int, num_blocks: int) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks
        num_slots = block_size * num_blocks
        # Zeros, which take no memory before they are written to.
        self._refs = np.zeros(num_slots, np.int64)
        self._versions = np.zeros(num_slots, np.int64)
        self._steps = np.zeros(num_slots, np.uint64)

    def slots(self, block_ids: Sequence[int], start: int, stop: int) -> npt.NDArray[np.int64]:
        """Slots of the positions [start, stop) of a request that holds `block_ids`.

        Positions beyond the blocks are left out.
        """
        stop = min(stop, len(block_ids) * self.block_size)
        if start >= stop:
            return np.empty(0, np.int64)
        first = start // self.block_size
        blocks = np.asarray(block_ids[first : -(-stop // self.block_size)], np.int64)
        slots = blocks[:, None] * self.block_size + np.arange(self.block_size)
        return slots.reshape(-1)[start - first * self.block_size : stop - first * self.block_size]

    def write(self, slots: npt.NDArray[Any], ref: int, weight_version: int, step: int) -> None:
        """The rows `ref`, `ref + 1`, ... now belong to `slots`; of a repeated slot, the last."""
        refs = np.arange(ref, ref + len(slots), dtype=np.int64)
        # numpy promises nothing about which of several assignments to one index stays.
        if len({*slots.tolist()}) != len(slots):
            slots, last = np.unique(slots[::-1], return_index=True)
            refs = refs[::-1][last]
        self._refs[slots] = refs
        self._versions[slots] = weight_version
        self._steps[slots] = step

    def write_run(self, block_ids: Sequence[int], run: SlotRun, step: int) -> None:
        """The rows of a run belong to a request that holds `block_ids`, now."""
        for index, start, stop in self._parts(block_ids, run.position, run.position + run.length):
            ref = run.ref + start - run.position
            refs = np.arange(ref, ref + stop - start, dtype=np.int64)
            self._by_block(self._refs)[index] = (
                refs.reshape(-1, self.block_size) if isinstance(index, np.ndarray) else refs
            )
            self._by_block(self._versions)[index] = run.weight_version
            self._by_block(self._steps)[index] = step

    def forget_run(self, block_ids: Sequence[int], start: int, stop: int) -> None:
        """Nobody reported what a request that holds `block_ids` has at [start, stop)."""
        for index, _, _ in self._parts(block_ids, start, stop):
            self._by_block(self._refs)[index] = UNKNOWN

    def _by_block(self, column: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return column.reshape(self.num_blocks, self.block_size)

    def _parts(
        self, block_ids: Sequence[int], start: int, stop: int
    ) -> Iterator[tuple[Any, int, int]]:
        """Where the positions [start, stop) are: (index into the blocks, start, stop) of each part.

        All whole blocks are one part. Positions beyond the blocks are left out.
        """
        size = self.block_size
        stop = min(stop, len(block_ids) * size)
        while start < stop:
            at, offset = divmod(start, size)
            whole = 0 if offset else (stop - start) // size
            blocks = block_ids[at : at + whole]
            if whole and len({*blocks}) == whole:
                end = start + whole * size
                yield np.array(blocks), start, end
            else:
                # One by one where a block is named twice, too: the last counts.
                end = min(start - offset + size, stop)
                yield (block_ids[at], slice(offset, offset + end - start)), start, end
            start = end

    def forget_blocks(self, block_ids: Sequence[int]) -> None:
        """Blocks that were handed out anew, or filled from elsewhere."""
        if len(block_ids) == 1:  # as a request grows; a tenth of what it costs for many
            at = block_ids[0] * self.block_size
            self._refs[at : at + self.block_size] = UNKNOWN
        elif len(block_ids):
            self._refs.reshape(self.num_blocks, self.block_size)[np.asarray(block_ids)] = UNKNOWN

    def forget_all(self) -> None:
        """The engine dropped its prefix cache."""
        self._refs = np.zeros_like(self._refs)

    def resolve(
        self, block_ids: Sequence[int], start: int, stop: int, last_step: int = 0
    ) -> list[SlotRun]:
        """Rows of the positions [start, stop) of a request that holds `block_ids`.

        Args:
            block_ids: blocks of the request, in order.
            start: first position.
            stop: one past the last.
            last_step: rows that were written in a later step count as unknown; 0: no limit.

        Returns:
            Runs in ascending order; positions in none of them are unknown.
        """
        slots = self.slots(block_ids, start, stop)
        refs = self._refs[slots]
        known = refs != UNKNOWN
        if last_step:
            known &= self._steps[slots] <= last_step
        versions = self._versions[slots]
        n = len(refs)
        if not n:
            return []
        # A run ends where the next row is not the next one of the same frame and version.
        breaks = (np.diff(refs) != 1) | (np.diff(refs >> ROW_BITS) != 0)
        breaks |= (np.diff(versions) != 0) | (known[1:] != known[:-1])
        edges = [0, *(np.flatnonzero(breaks) + 1).tolist(), n]
        return [
            SlotRun(start + a, b - a, int(refs[a]), int(versions[a]))
            for a, b in pairwise(edges)
            if known[a]
        ]

    def chunks(self) -> npt.NDArray[np.int64]:
        """Numbers of the chunks that live slots point into, each once."""
        live = self._refs[self._refs != UNKNOWN]
        return np.unique(live >> CHUNK_SHIFT)

    def dump(self) -> dict[str, Any]:
        """For a snapshot: only what is known."""
        at = np.flatnonzero(self._refs != UNKNOWN)
        return {
            "block_size": self.block_size,
            "num_blocks": self.num_blocks,
            "at": at.astype("<i8").tobytes(),
            "refs": self._refs[at].astype("<i8").tobytes(),
            "versions": self._versions[at].astype("<i8").tobytes(),
            "steps": self._steps[at].astype("<u8").tobytes(),
        }

    @classmethod
    def load(cls, data: dict[str, Any]) -> SlotMap:
        """From a snapshot."""
        self = cls(data["block_size"], data["num_blocks"])
        at = np.frombuffer(data["at"], "<i8")
        self._refs[at] = np.frombuffer(data["refs"], "<i8")
        self._versions[at] = np.frombuffer(data["versions"], "<i8")
        self._steps[at] = np.frombuffer(data["steps"], "<u8")
        return self
