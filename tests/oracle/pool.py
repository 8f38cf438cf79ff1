"""The KV blocks of one simulated engine."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from oracle.truth import NOBODY
from oracle.world import EngineSpec

#: Blocks that the CPU keeps of those that were evicted.
OFFLOADED_BLOCKS = 64


class Pool:
    """KV blocks with prefix caching: a cached block that nobody uses is evicted last used first."""

    def __init__(self, spec: EngineSpec, counts: dict[str, int]) -> None:
        self.block_size = spec.block_size
        self.counts = counts
        blocks = range(spec.num_blocks + spec.host_blocks)
        self.slots = np.full(len(blocks) * spec.block_size, NOBODY)
        """Number of the row that computed the KV entry in each slot, as far as the slot knows."""
        self.copied = np.zeros(len(self.slots), bool)
        """Whether that is the row of a copy, which has a name of its own."""
        self.kv = np.full(len(self.slots), NOBODY)
        """The pass that did make the KV entry in each slot; NOBODY: the world does not know it."""
        self.host: OrderedDict[int, int] = OrderedDict()
        """Blocks of the host tier by their nodes, last written last."""
        self.host_free = list(blocks[spec.num_blocks :])
        self.refs = [0] * spec.num_blocks
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(spec.num_blocks))
        self.used = [False] * spec.num_blocks
        self.cached: dict[int, int] = {}
        self.node_of: dict[int, int] = {}
        self.offloaded: OrderedDict[int, np.ndarray] = OrderedDict()
        """KV of evicted blocks in the memory of the CPU."""
        self._children: dict[tuple[int, tuple[int, ...]], int] = {}

    def node(self, parent: int, tokens: list[int]) -> int:
        """A name for a sequence of full blocks: that of all but the last, and its tokens."""
        return self._children.setdefault((parent, tuple(tokens)), len(self._children) + 1)

    def path(self, tokens: list[int], limit: int) -> list[int]:
        """Nodes of the full blocks in the first `limit` tokens."""
        nodes, parent = [], 0
        for end in range(self.block_size, limit + 1, self.block_size):
            parent = self.node(parent, tokens[end - self.block_size : end])
            nodes.append(parent)
        return nodes

    def take(self, block: int) -> None:
        """One more request uses a cached block."""
        if not self.refs[block]:
            del self.free[block]
        self.refs[block] += 1

    def allocate(self) -> int:
        """A block for somebody new."""
        block, _ = self.free.popitem(last=False)
        node = self.node_of.pop(block, None)
        if node is not None:
            del self.cached[node]
            self.offloaded[node] = self.kv.reshape(-1, self.block_size)[block].copy()
            self.offloaded.move_to_end(node)
            if len(self.offloaded) > OFFLOADED_BLOCKS:
                self.offloaded.popitem(last=False)
        self.refs[block] = 1
        self.counts["reused_blocks"] += self.used[block]
        self.used[block] = True
        self.forget([block])
        return block

    def release(self, blocks: list[int]) -> None:
        for block in reversed(blocks):
            self.refs[block] -= 1
            if not self.refs[block]:
                self.free[block] = None

    def register(self, node: int, block: int) -> None:
        """A full block can be found by its tokens from now on."""
        if node not in self.cached and block not in self.node_of:
            self.cached[node] = block
            self.node_of[block] = node

    def load(self, block: int, kv: np.ndarray) -> None:
        """KV is loaded into a block."""
        self.kv.reshape(-1, self.block_size)[block] = kv

    def reload(self, block: int) -> None:
        """A cached block is loaded once more: what the CPU has of it, unless somebody reads it."""
        kv = self.offloaded.get(self.node_of[block])
        if kv is not None and not self.refs[block]:
            self.load(block, kv)

    def host_block(self, node: int) -> int:
        """A block of the host tier for a node: its own, a free one, or that of another node."""
        block = self.host.pop(node, None)
        if block is None:
            block = self.host_free.pop() if self.host_free else self.host.popitem(last=False)[1]
        self.host[node] = block
        return block

    def empty_outside(self) -> list[int]:
        """Nothing is left outside of the engine's blocks; returns the blocks of the host tier."""
        self.offloaded.clear()
        self.host_free += self.host.values()
        self.host.clear()
        return [*self.host_free]

    def copy(self, sources: list[int], targets: list[int], named: np.ndarray) -> None:
        """KV is copied; `named` are the numbers of the rows that all slots name."""
        size = self.block_size
        self.kv.reshape(-1, size)[targets] = self.kv.reshape(-1, size)[sources]
        self.slots.reshape(-1, size)[targets] = named.reshape(-1, size)[sources]
        self.copied.reshape(-1, size)[targets] = True

    def forget(self, blocks: list[int]) -> None:
        """Nobody knows what is in these blocks."""
        self.slots.reshape(-1, self.block_size)[blocks] = NOBODY
        self.copied.reshape(-1, self.block_size)[blocks] = False

    def reset(self) -> None:
        """Forgets the prefix cache, but not the host tier."""
        self.cached.clear()
        self.node_of.clear()
        self.forget([*range(len(self.refs))])

    def slots_of(self, blocks: list[int], start: int, stop: int) -> np.ndarray:
        """Slots of the positions [start, stop) of a request."""
        positions = np.arange(start, stop)
        held = np.asarray(blocks, np.int64)
        return held[positions // self.block_size] * self.block_size + positions % self.block_size
