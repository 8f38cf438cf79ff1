"""Writers of KV blocks: the request that each block was given to last."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

import numpy as np

from routetrace.capture_agent.pipeline.chunks import Blocks
from routetrace.capture_agent.pipeline.linger import Ints
from routetrace.capture_agent.pipeline.window import Slots


class _Released(NamedTuple):
    """Blocks that a request gave up."""

    blocks: Blocks
    since: int
    """Number of allocations before."""


class BlockOwners:
    """Which request writes each block, and which blocks requests held last.

    Args:
        block_size: tokens per block; 0 if slots are not reported.
        num_blocks: blocks in the pool.
    """

    def __init__(self, block_size: int, num_blocks: int) -> None:
        self._block_size = block_size
        # By block: lane of its writer (-1: none), and its index among the blocks of that request.
        self._lane = np.full(num_blocks, -1, np.int64)
        self._index = np.zeros(num_blocks, np.int64)
        # Number of allocations, and of those up to the last one of each block.
        self._allocations = 0
        self._allocated = np.zeros(num_blocks, np.int64)
        # The same of the last copy from each block.
        self._copied = np.zeros(num_blocks, np.int64)
        self._released: OrderedDict[int, _Released] = OrderedDict()  # by handle
        self._num_released = 0  # blocks in it, and requests
        # Several times the blocks of requests that share none; needed for one or two steps only.
        self._most_released = 4 * num_blocks

    def num_blocks_of(self, num_tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-num_tokens // self._block_size) if self._block_size else 0

    def own(self, lane: int, start: int, blocks: Blocks) -> None:
        """Enter a writer of blocks that are its `start`-th and later ones."""
        self._lane[blocks] = lane
        self._index[blocks] = np.arange(start, start + len(blocks))

    def own_each(self, lanes: Ints, indexes: Ints, blocks: Blocks) -> None:
        """Enter the writer of each block, and its index among the blocks of that writer."""
        self._lane[blocks] = lanes
        self._index[blocks] = indexes

    def of(self, blocks: Blocks) -> tuple[Ints, Ints]:
        """Return lanes and indexes of those of the blocks that have a writer."""
        lanes, index = self._lane[blocks], self._index[blocks]
        owned = lanes >= 0
        return lanes[owned], index[owned]

    def allocate(self, blocks: Blocks) -> None:
        """Note that blocks are newly allocated."""
        self._allocations += 1
        self._allocated[blocks] = self._allocations

    def copy(self, sources: Blocks, targets: Blocks) -> None:
        """Note that blocks were copied to others, which so have new contents."""
        self.allocate(targets)
        self._copied[sources] = self._allocations

    def release(self, handle: int, blocks: Blocks) -> None:
        """Note the blocks that a request gives up."""
        if not self._block_size:
            return
        self._released[handle] = _Released(blocks, self._allocations)
        self._num_released += len(blocks) + 1
        while self._num_released > self._most_released:
            self.forget(next(iter(self._released)))

    def forget(self, handle: int) -> None:
        """Forget the blocks that a request gave up."""
        if released := self._released.pop(handle, None):
            self._num_released -= len(released.blocks) + 1

    def slots_of(self, handle: int, start: int, stop: int) -> Slots | None:
        """Slots of late positions, but for blocks allocated since.

        None if they are unknown, or if a copy may hold what the late pass wrote.
        """
        released = self._released.get(handle)
        if released is None:
            return None
        slots = self.slots(released.blocks, start, stop)
        blocks = slots // np.uint64(self._block_size)
        if (self._copied[blocks] > released.since).any():
            return None
        late: Slots = slots[self._allocated[blocks] <= released.since]
        return late

    def slots(self, blocks: Blocks, start: int, stop: int) -> Slots:
        """Slots of the positions [start, stop) of a request with these blocks."""
        size = self._block_size
        positions = np.arange(start, min(stop, len(blocks) * size))
        slots: Slots = blocks[positions // size].astype(np.uint64) * np.uint64(size)
        slots += (positions % size).astype(np.uint64)
        return slots
