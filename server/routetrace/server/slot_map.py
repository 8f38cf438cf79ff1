"""The slot map: which stored row belongs to the KV entry in each slot of one engine.

It is what an engine-side table of rows by slot is, with a reference in place of the row. Writes are
applied in step order and later ones win; what was not written since the block was handed out is
unknown.

Engines hand out whole blocks, and most of them hold consecutive rows of one run: such a block is
told by the run, and by its place in it. Only blocks with rows of several runs are kept slot by
slot.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from routetrace.server.refs import CHUNK_SHIFT, ROW_BITS, UNKNOWN

Array = npt.NDArray[Any]

_CELL = np.dtype([("ref", "<i8"), ("version", "<i8"), ("step", "<u8")])
_RUN = np.dtype([("position", "<i8"), ("length", "<i8"), *_CELL.descr])
#: A run for so many blocks: room for them before those that no block holds any more are dropped.
_BLOCKS_PER_RUN = 16


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
        # Of each block: the run whose rows it holds (0: none), and which block of the request it
        # was. Zeros, which take no memory before they are written to.
        self._run = np.zeros(num_blocks, np.int32)
        self._nth = np.zeros(num_blocks, np.int32)
        self._runs = np.zeros(max(64, num_blocks // _BLOCKS_PER_RUN), _RUN)
        self._next = 1
        # Blocks with rows of several runs, and where their slots are.
        self._mixed: dict[int, int] = {}
        self._cells = np.zeros((0, block_size), _CELL)
        self._free: list[int] = []

    @property
    def kept_slot_by_slot(self) -> int:
        """Blocks with rows of several runs."""
        return len(self._mixed)

    # ------------------------------------------------------------------ writing

    def write(self, slots: Array, ref: int, weight_version: int, step: int) -> None:
        """The rows `ref`, `ref + 1`, ... now belong to `slots`; of a repeated slot, the last."""
        refs = np.arange(ref, ref + len(slots), dtype=np.int64)
        # numpy promises nothing about which of several assignments to one index stays.
        if len({*slots.tolist()}) != len(slots):
            slots, last = np.unique(slots[::-1], return_index=True)
            refs = refs[::-1][last]
        self._write(slots, refs, weight_version, step)

    def _write(self, slots: Array, refs: Array, versions: Array | int, steps: Array | int) -> None:
        blocks, offsets = np.divmod(slots, self.block_size)
        named = blocks.tolist()
        for block in named:
            if block not in self._mixed:
                self._slot_by_slot(block)
        cells = np.array([self._mixed[block] for block in named], np.int64), offsets
        self._cells["ref"][cells] = refs
        self._cells["version"][cells] = versions
        self._cells["step"][cells] = steps

    def write_run(self, block_ids: Sequence[int], run: SlotRun, step: int) -> None:
        """The rows of a run belong to a request that holds `block_ids`, now."""
        if self._next == len(self._runs):
            self._drop_runs()
        number = self._next
        self._next += 1
        self._runs[number] = (*run, step)
        stop = run.position + run.length
        run_of, nth_of = self._run.data, self._nth.data
        for first, blocks, low, high in self._parts(block_ids, run.position, stop):
            block = blocks[0]
            if high - low < self.block_size and (block in self._mixed or run_of[block]):
                self._fill(self._slot_by_slot(block), first, number)
                continue
            self._give_back(blocks)
            # Of a block that is named twice, the last counts.
            for nth, block in enumerate(blocks, first):
                run_of[block], nth_of[block] = number, nth

    def _fill(self, cells: Array, nth: int, number: int) -> None:
        """The slots of the nth block of a request get the rows of a run that are for them."""
        position, length, ref, version, step = self._runs[number].item()
        start = nth * self.block_size
        low = max(position - start, 0)
        part = cells[low : max(position + length - start, 0)]
        ref += start + low - position
        part["ref"] = np.arange(ref, ref + len(part))
        part["version"] = version
        part["step"] = step

    def _slot_by_slot(self, block: int) -> Array:
        """The slots of a block, which is kept slot by slot from now on."""
        if block not in self._mixed:
            if not self._free:
                old = self._cells
                self._cells = np.zeros((max(1, 2 * len(old)), self.block_size), _CELL)
                self._cells[: len(old)] = old
                self._free = [*range(len(old), len(self._cells))]
            row = self._mixed[block] = self._free.pop()
            self._cells[row] = UNKNOWN, 0, 0
            if number := int(self._run[block]):
                self._fill(self._cells[row], int(self._nth[block]), number)
                self._run[block] = 0
        cells: Array = self._cells[self._mixed[block]]
        return cells

    def _drop_runs(self) -> None:
        """Makes room: numbers the runs of which a block holds rows anew."""
        kept = self._held_runs()
        numbers = np.zeros(len(self._runs), np.int32)
        numbers[kept] = np.arange(1, len(kept) + 1)
        self._run = numbers[self._run]
        runs = np.zeros(max(len(self._runs), 2 * len(kept) + 2), _RUN)
        runs[1 : len(kept) + 1] = self._runs[kept]
        self._runs, self._next = runs, len(kept) + 1

    def _held_runs(self) -> Array:
        held = np.zeros(len(self._runs), np.bool_)
        held[self._run] = True
        held[0] = False
        return np.flatnonzero(held)

    # ------------------------------------------------------------------ forgetting

    def forget_run(self, block_ids: Sequence[int], start: int, stop: int) -> None:
        """Nobody reported what a request that holds `block_ids` has at [start, stop)."""
        for _, blocks, low, high in self._parts(block_ids, start, stop):
            if high - low == self.block_size:
                self.forget_blocks(blocks)
            elif blocks[0] in self._mixed or self._run[blocks[0]]:
                self._slot_by_slot(blocks[0])["ref"][low:high] = UNKNOWN

    def forget_blocks(self, block_ids: Sequence[int]) -> None:
        """Blocks that were handed out anew, or filled from elsewhere."""
        self._give_back(block_ids)
        run_of = self._run.data  # as fast as numpy for many, and much faster for a few
        for block in block_ids:
            run_of[block] = 0

    def _give_back(self, block_ids: Sequence[int]) -> None:
        """Blocks that are not kept slot by slot any more."""
        if self._mixed:
            for block in block_ids:
                if (row := self._mixed.pop(block, None)) is not None:
                    self._free.append(row)

    def forget_all(self) -> None:
        """The engine dropped its prefix cache."""
        self._run = np.zeros_like(self._run)
        self._mixed, self._cells, self._free = {}, self._cells[:0], []

    def _parts(
        self, block_ids: Sequence[int], start: int, stop: int
    ) -> Iterator[tuple[int, Sequence[int], int, int]]:
        """Where the positions [start, stop) are: (nth, blocks, low, high) of each part.

        `blocks` are those of the request from the nth on, of each of them the slots [low, high).
        All whole blocks are one part. Positions beyond the blocks are left out.
        """
        size = self.block_size
        stop = min(stop, len(block_ids) * size)
        while start < stop:
            nth, low = divmod(start, size)
            whole = 0 if low else (stop - start) // size
            high = size if whole else min(low + stop - start, size)
            count = max(whole, 1)
            yield nth, block_ids[nth : nth + count], low, high
            start += count * (high - low)

    # ------------------------------------------------------------------ reading

    def _slots_of(self, blocks: Array) -> tuple[Array, Array, Array]:
        """What the slots of blocks hold, [blocks, block_size]: references, versions, steps."""
        size = self.block_size
        runs = self._runs[self._run[blocks]]
        at = (self._nth[blocks].astype(np.int64) * size - runs["position"])[:, None]
        at = at + np.arange(size)
        refs = at + runs["ref"][:, None]
        refs[(at < 0) | (at >= runs["length"][:, None])] = UNKNOWN
        versions = np.repeat(runs["version"], size).reshape(refs.shape)
        steps = np.repeat(runs["step"], size).reshape(refs.shape)
        if self._mixed:
            rows = [self._mixed.get(block, -1) for block in blocks.tolist()]
            mixed = np.flatnonzero(np.array(rows) >= 0)
            cells = self._cells[np.array(rows)[mixed]]
            refs[mixed], versions[mixed] = cells["ref"], cells["version"]
            steps[mixed] = cells["step"]
        return refs, versions, steps

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
        size = self.block_size
        stop = min(stop, len(block_ids) * size)
        if start >= stop:
            return []
        first = start // size
        held = self._slots_of(np.asarray(block_ids[first : -(-stop // size)], np.int64))
        part = slice(start - first * size, stop - first * size)
        refs, versions, steps = (column.reshape(-1)[part] for column in held)
        known = refs != UNKNOWN
        if last_step:
            known &= steps <= last_step
        # A run ends where the next row is not the next one of the same frame and version.
        breaks = (np.diff(refs) != 1) | (np.diff(refs >> ROW_BITS) != 0)
        breaks |= (np.diff(versions) != 0) | (known[1:] != known[:-1])
        edges = [0, *(np.flatnonzero(breaks) + 1).tolist(), len(refs)]
        return [
            SlotRun(start + a, b - a, int(refs[a]), int(versions[a]))
            for a, b in pairwise(edges)
            if known[a]
        ]

    def chunks(self) -> npt.NDArray[np.int64]:
        """Numbers of the chunks that live slots point into, each once."""
        mixed = self._cells["ref"][[*self._mixed.values()]]
        refs = np.concatenate([self._runs["ref"][self._held_runs()], mixed[mixed != UNKNOWN]])
        return np.unique(refs >> CHUNK_SHIFT)

    # ------------------------------------------------------------------ snapshots

    def dump(self) -> dict[str, Any]:
        """For a snapshot: as it is kept, which takes as little."""
        blocks = np.flatnonzero(self._run)
        return {
            "block_size": self.block_size,
            "num_blocks": self.num_blocks,
            "blocks": blocks.astype("<u4").tobytes(),
            "run": self._run[blocks].astype("<i4", copy=False).tobytes(),
            "nth": self._nth[blocks].astype("<i4", copy=False).tobytes(),
            "runs": self._runs[1 : self._next].tobytes(),
            "room": len(self._runs),
            "mixed": np.array([*self._mixed], "<u4").tobytes(),
            "cells": self._cells[[*self._mixed.values()]].tobytes(),
        }

    @classmethod
    def load(cls, data: dict[str, Any]) -> SlotMap:
        """From a snapshot."""
        self = cls(data["block_size"], data["num_blocks"])
        blocks = np.frombuffer(data["blocks"], "<u4")
        self._run[blocks] = np.frombuffer(data["run"], "<i4")
        self._nth[blocks] = np.frombuffer(data["nth"], "<i4")
        runs = np.frombuffer(data["runs"], _RUN)
        self._next = len(runs) + 1
        self._runs = np.zeros(data["room"], _RUN)
        self._runs[1 : self._next] = runs
        mixed = np.frombuffer(data["mixed"], "<u4").tolist()
        self._mixed = {block: row for row, block in enumerate(mixed)}
        cells = np.frombuffer(data["cells"], _CELL)
        self._cells = cells.reshape(len(mixed), self.block_size).copy()
        return self
