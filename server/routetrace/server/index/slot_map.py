"""Slot map: the stored row of the KV entry in each slot of one engine.

It holds references to rows. Writes are applied in step order and later ones win; a slot that was
not written since its block was allocated is unknown.

Engines allocate whole blocks, and most blocks hold consecutive rows of one run: such a block is
stored as the run and its place in it. Only blocks with rows of several runs are kept slot by slot.
Tables of blocks are as long as the highest block that was used: most engines that are remembered
have used few, and a server remembers very many.
"""

# Over 400 lines: one class, with its stored form.

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.ma  # np.unique imports it when it is first called, which takes 40 ms
import numpy.typing as npt

from routetrace.common.limits import check_slots
from routetrace.server.index.traces.refs import CHUNK_SHIFT, ROW_BITS, UNKNOWN
from routetrace.server.index.traces.spans import Span
from routetrace.stored import format5_pb2 as stored

Array = npt.NDArray[Any]

_CELL = np.dtype([("ref", "<i8"), ("version", "<i8"), ("step", "<u8")])
_RUN = np.dtype([("position", "<i8"), ("length", "<i8"), *_CELL.descr])
#: Blocks per entry of the initial run table; unused runs are dropped when it is full.
_BLOCKS_PER_RUN = 16

#: Minimum lengths of the tables, and the length up to which they grow with the blocks. Beyond it
#: they are those of all blocks: long tables take no memory where they were not written.
_LEAST_BLOCKS, _LEAST_RUNS = 8, 4
_LONG = 1 << 12


class SlotRun(NamedTuple):
    """`length` positions from `position` on, whose rows are `ref`, `ref + 1`, ..."""

    position: int
    length: int
    ref: int
    weight_version: int


class SlotMap:
    """Slots of one writer epoch. `slot = block_id * block_size + offset`."""

    __slots__ = (
        "_all_erased", "_cells", "_erased", "_free", "_mixed", "_next", "_nth", "_run", "_runs",
        "block_size", "changes", "erasures", "num_blocks",
    )  # fmt: skip

    def __init__(self, block_size: int, num_blocks: int) -> None:
        check_slots(block_size, num_blocks)  # a stored record may hold others than a Hello
        self.block_size = block_size
        self.num_blocks = num_blocks
        # By block: the run of its rows (0: none), and its index among the blocks of the request.
        # The last entry is that of all blocks that were not used, and stays 0.
        self._run = np.zeros(1, np.int32)
        self._nth = np.zeros(1, np.int32)
        self._runs = np.zeros(_LEAST_RUNS, _RUN)
        self._next = 1
        # Blocks with rows of several runs, and the index of their cells.
        self._mixed: dict[int, int] = {}
        self._cells = _no_cells(block_size)
        self._free: list[int] = []
        self.changes = 0
        """Number of changes since the server started."""
        # Number of erasures; its value at the last erasure of all blocks, and by block.
        self.erasures = self._all_erased = 0
        self._erased = np.zeros(1, np.int64)

    def _reach(self, block_ids: Sequence[int] | Array) -> None:
        """Make the tables long enough for blocks."""
        highest = max(block_ids, default=-1)
        length = len(self._run) - 1
        if highest < length:
            return
        if highest >= self.num_blocks:  # of a snapshot; chunks are checked
            raise IndexError(f"block {highest} of {self.num_blocks}")
        length = max(_LEAST_BLOCKS, 2 * length, highest + 1)
        length = min(length, self.num_blocks) if length <= _LONG else self.num_blocks
        self._run, self._nth = _longer(self._run, length + 1), _longer(self._nth, length + 1)
        self._erased = _longer(self._erased, length + 1)
        self._runs = _longer(self._runs, max(len(self._runs), length // _BLOCKS_PER_RUN))

    def _entry(self, block: int) -> int:
        """Return the entry of a block in the tables."""
        return min(block, len(self._run) - 1)

    @property
    def num_slots(self) -> int:
        """Number of slots."""
        return self.block_size * self.num_blocks

    @property
    def empty(self) -> bool:
        """Whether no slot is known."""
        return not self._mixed and not self._run.any()

    @property
    def kept_slot_by_slot(self) -> int:
        """Blocks with rows of several runs."""
        return len(self._mixed)

    # ------------------------------------------------------------------ writing

    def write(self, slots: Array, ref: int, weight_version: int, step: int) -> None:
        """Let slots name the rows `ref`, `ref + 1`, ...; of a repeated slot, the last stays."""
        refs = np.arange(ref, ref + len(slots), dtype=np.int64)
        # numpy does not define which of several assignments to one index stays.
        if len({*slots.tolist()}) != len(slots):
            slots, last = np.unique(slots[::-1], return_index=True)
            refs = refs[::-1][last]
        self._write(slots, refs, weight_version, step)

    def _write(self, slots: Array, refs: Array, versions: Array | int, steps: Array | int) -> None:
        self.changes += 1
        blocks, offsets = np.divmod(slots, self.block_size)
        named = blocks.tolist()
        self._reach(named)
        for block in named:
            if block not in self._mixed:
                self._slot_by_slot(block)
        cells = np.array([self._mixed[block] for block in named], np.int64), offsets
        self._cells["ref"][cells] = refs
        self._cells["version"][cells] = versions
        self._cells["step"][cells] = steps

    def write_run(self, block_ids: Sequence[int], run: SlotRun | Span, step: int) -> None:
        """Let the slots of a request with `block_ids` name the rows of a run."""
        if self._next == len(self._runs):
            self._drop_runs()
        self.changes += 1
        position, length = run[:2]
        size = max(self.block_size, 1)
        self._reach(block_ids[position // size : -(-(position + length) // size)])
        number = self._next
        self._next += 1
        self._runs[number] = (*run[:4], step)
        run_of, nth_of = self._run.data, self._nth.data
        for first, blocks, low, high in self._parts(block_ids, position, position + length):
            block = blocks[0]
            if high - low < self.block_size and (block in self._mixed or run_of[block]):
                self._fill(self._slot_by_slot(block), first, number)
                continue
            self._give_back(blocks)
            # Of a block that occurs twice, the last occurrence counts.
            for nth, block in enumerate(blocks, first):
                run_of[block], nth_of[block] = number, nth

    def _fill(self, cells: Array, nth: int, number: int) -> None:
        """Let the slots of the nth block of a request name their rows of a run."""
        position, length, ref, version, step = self._runs[number].item()
        start = nth * self.block_size
        low = max(position - start, 0)
        part = cells[low : max(position + length - start, 0)]
        ref += start + low - position
        part["ref"] = np.arange(ref, ref + len(part))
        part["version"] = version
        part["step"] = step

    def _slot_by_slot(self, block: int) -> Array:
        """Return the slots of a block, which is kept slot by slot from now on."""
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

    def _drop_runs(self, room: int = 1) -> None:
        """Drop runs without blocks, renumber the others, and make room for more."""
        kept = self._held_runs()
        numbers = np.zeros(len(self._runs), np.int32)
        numbers[kept] = np.arange(1, len(kept) + 1)
        self._run = numbers[self._run]
        runs = np.zeros(max(len(self._runs), 2 * len(kept) + 1 + room), _RUN)
        runs[1 : len(kept) + 1] = self._runs[kept]
        self._runs, self._next = runs, len(kept) + 1

    def _held_runs(self) -> Array:
        held = np.zeros(len(self._runs), np.bool_)
        held[self._run] = True
        held[0] = False
        return np.flatnonzero(held)

    # ------------------------------------------------------------------ forgetting

    def forget_run(self, block_ids: Sequence[int], start: int, stop: int) -> None:
        """Forget the slots of positions [start, stop) of a request with `block_ids`."""
        self.changes += 1
        for _, blocks, low, high in self._parts(block_ids, start, stop):
            if high - low == self.block_size:
                self.forget_blocks(blocks)
            elif self._holds(blocks[0], low, high):
                self._slot_by_slot(blocks[0])["ref"][low:high] = UNKNOWN

    def forget(self, slots: Array) -> None:
        """Forget slots."""
        self.changes += 1
        blocks, offsets = np.divmod(slots, self.block_size)
        for block, offset in zip(blocks.tolist(), offsets.tolist(), strict=True):
            if self._holds(block, offset, offset + 1):
                self._slot_by_slot(block)["ref"][offset] = UNKNOWN

    def _holds(self, block: int, low: int, high: int) -> bool:
        """Whether any of the slots [low, high) of a block may be known."""
        if block in self._mixed:
            return True
        entry = self._entry(block)
        run = self._runs[self._run[entry]]  # run 0 is empty
        start = int(self._nth[entry]) * self.block_size - int(run["position"])
        return start + high > 0 and start + low < int(run["length"])

    def erase(self, block_ids: Sequence[int]) -> None:
        """Forget blocks that are given away or filled otherwise: their drafts are not named."""
        self.forget_blocks(block_ids)
        self.erasures += 1
        self._reach(block_ids)
        self._erased[block_ids] = self.erasures

    def copy(self, sources: Sequence[int], targets: Sequence[int], step: int = 0) -> None:
        """Let the slots of targets name the rows that those of their sources name.

        All sources are read first. Of a target that is named twice, the last source counts. The
        rows come there behind engine step `step`, as if they were of the next one.
        """
        pairs = dict(zip(targets, sources, strict=True))
        self._reach([*targets, *sources])
        if self._next + len(pairs) > len(self._runs):
            self._drop_runs(len(pairs))
        held = np.fromiter(pairs.values(), np.int64, len(pairs))
        runs, nths = self._run_again(self._run[held], step + 1), self._nth[held]
        mixed = {
            target: self._cells[self._mixed[source]].copy()
            for target, source in (pairs.items() if self._mixed else ())
            if source in self._mixed
        }
        written = [*pairs]
        self.erase(written)
        self._run[written], self._nth[written] = runs, nths
        for block, cells in mixed.items():
            cells["step"] = np.maximum(cells["step"], step + 1)
            self._slot_by_slot(block)[:] = cells

    def _run_again(self, numbers: Array, step: int) -> Array:
        """Return the numbers of runs of the same rows, none of which is of an earlier step."""
        old, at = np.unique(numbers, return_inverse=True)
        again = old.copy()
        for i, number in enumerate(old.tolist()):
            if number and self._runs["step"][number] < step:
                self._runs[self._next] = self._runs[number]
                self._runs["step"][self._next] = step
                again[i] = self._next
                self._next += 1
        return again[at]

    def kept(
        self, block_ids: Sequence[int], start: int, stop: int, since: int
    ) -> Iterator[tuple[int, int]]:
        """Yield the parts of [start, stop) in blocks that were not erased since an erasure."""
        size = self.block_size
        if not block_ids:  # an engine without blocks has no block size either
            return
        for nth, block in enumerate(block_ids[start // size : -(-stop // size)], start // size):
            if max(self._erased[self._entry(block)], self._all_erased) <= since:
                yield max(start, nth * size), min(stop, (nth + 1) * size)

    def forget_blocks(self, block_ids: Sequence[int]) -> None:
        """Forget all slots of blocks."""
        self.changes += 1
        self._give_back(block_ids)
        run_of = self._run.data  # as fast as numpy for many blocks, much faster for a few
        length = len(run_of) - 1
        for block in block_ids:
            if block < length:
                run_of[block] = 0

    def _give_back(self, block_ids: Sequence[int]) -> None:
        """Free the cells of blocks that were kept slot by slot."""
        if self._mixed:
            for block in block_ids:
                if (row := self._mixed.pop(block, None)) is not None:
                    self._free.append(row)

    def forget_all(self, count: int = 0) -> None:
        """Forget all slots, or those of the first `count` blocks; the others hold no drafts."""
        self.changes += 1
        # Unlike zeros_like, zeros takes no memory before it is written.
        runs = np.zeros(len(self._run), np.int32)
        if count:
            runs[count:] = self._run[count:]
            self._give_back([block for block in self._mixed if block < count])
        else:
            self._mixed, self._free = {}, []
            self._cells = _no_cells(self.block_size)
        self._run = runs
        self.erasures += 1
        self._all_erased = self.erasures
        self._erased = np.zeros(len(self._erased), np.int64)

    def _parts(
        self, block_ids: Sequence[int], start: int, stop: int
    ) -> Iterator[tuple[int, Sequence[int], int, int]]:
        """Yield the parts of the positions [start, stop) as (nth, blocks, low, high).

        `blocks` are blocks of the request from the nth on, each with the slots [low, high). All
        whole blocks form one part. Positions beyond the blocks are left out.
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
        """Return references, versions and steps of slots, [blocks, block_size] each."""
        size = self.block_size
        entries = np.minimum(blocks, len(self._run) - 1)
        runs = self._runs[self._run[entries]]
        at = (self._nth[entries].astype(np.int64) * size - runs["position"])[:, None]
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
        self, block_ids: Sequence[int] | Array, start: int, stop: int, last_step: int = 0
    ) -> list[SlotRun]:
        """Return the rows of the positions [start, stop) of a request with `block_ids`.

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
        # A run ends where the next row is not the successor in the same frame and version.
        breaks = (np.diff(refs) != 1) | (np.diff(refs >> ROW_BITS) != 0)
        breaks |= (np.diff(versions) != 0) | (known[1:] != known[:-1])
        edges = [0, *(np.flatnonzero(breaks) + 1).tolist(), len(refs)]
        return [
            SlotRun(start + a, b - a, int(refs[a]), int(versions[a]))
            for a, b in pairwise(edges)
            if known[a]
        ]

    def chunks(self) -> npt.NDArray[np.int64]:
        """Return the numbers of the chunks that slots point into, each once."""
        mixed = self._cells["ref"][[*self._mixed.values()]]
        refs = np.concatenate([self._runs["ref"][self._held_runs()], mixed[mixed != UNKNOWN]])
        return np.unique(refs >> CHUNK_SHIFT)

    # ------------------------------------------------------------------ snapshots

    def dump(self, message: stored.SlotMap) -> None:
        """Set the stored form, as compact as in memory."""
        message.block_size, message.num_blocks = self.block_size, self.num_blocks
        blocks = np.flatnonzero(self._run)
        message.blocks = blocks.astype("<u4").tobytes()
        message.run = self._run[blocks].astype("<i4", copy=False).tobytes()
        message.nth = self._nth[blocks].astype("<i4", copy=False).tobytes()
        message.runs = self._runs[1 : self._next].tobytes()
        message.room = len(self._runs)
        message.mixed = np.array([*self._mixed], "<u4").tobytes()
        message.cells = self._cells[[*self._mixed.values()]].tobytes()
        message.erasures, message.all_erased = self.erasures, self._all_erased
        message.erased = np.flatnonzero(self._erased).astype("<u4").tobytes()
        message.erased_at = self._erased[self._erased > 0].astype("<i8", copy=False).tobytes()

    @classmethod
    def load(cls, message: stored.SlotMap) -> SlotMap:
        """Return the slot map of a stored form."""
        self = cls(message.block_size, message.num_blocks)
        blocks = np.frombuffer(message.blocks, "<u4")
        erased = np.frombuffer(message.erased, "<u4")
        self._reach([*blocks[-1:].tolist(), *erased[-1:].tolist()])  # they ascend
        self._run[blocks] = np.frombuffer(message.run, "<i4")
        self._nth[blocks] = np.frombuffer(message.nth, "<i4")
        runs = np.frombuffer(message.runs, _RUN)
        self._next = len(runs) + 1
        self._runs = np.zeros(message.room, _RUN)
        self._runs[1 : self._next] = runs
        mixed = np.frombuffer(message.mixed, "<u4").tolist()
        self._mixed = {block: row for row, block in enumerate(mixed)}
        cells = np.frombuffer(message.cells, _CELL)
        self._cells = cells.reshape(len(mixed), self.block_size).copy()
        self.erasures, self._all_erased = message.erasures, message.all_erased
        self._erased[erased] = np.frombuffer(message.erased_at, "<i8")
        return self


@lru_cache(maxsize=64)
def _no_cells(block_size: int) -> Array:
    return np.zeros((0, block_size), _CELL)


def _longer(table: Array, length: int) -> Array:
    longer = np.zeros(length, table.dtype)
    longer[: len(table)] = table
    return longer
