"""KV blocks with a prefix cache, as inference engines have them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable

#: Name of all tokens up to the end of a block.
Key = Hashable


class BlockPool:
    """Blocks in use, cached, or free; the least recently used is reused first."""

    def __init__(self, num_blocks: int) -> None:
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._uses = [0] * num_blocks
        self._cached: dict[Key, int] = {}
        self._key: dict[int, Key] = {}

    @property
    def num_free(self) -> int:
        """Number of unused blocks, cached ones included."""
        return len(self._free)

    def hit(self, keys: Iterable[Key]) -> list[int]:
        """Take the cached blocks of the longest cached prefix of `keys`."""
        blocks: list[int] = []
        for key in keys:
            block = self._cached.get(key)
            if block is None:
                break
            self._free.pop(block, None)
            self._uses[block] += 1
            blocks.append(block)
        return blocks

    def take(self, count: int) -> list[int]:
        """Take `count` blocks with no known contents; that many must be free."""
        blocks = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            self._uses[block] = 1
            key = self._key.pop(block, None)
            if key is not None:
                del self._cached[key]
        return blocks

    def release(self, blocks: list[int]) -> None:
        """Release blocks; the last ones are reused first."""
        for block in reversed(blocks):
            self._uses[block] -= 1
            if not self._uses[block]:
                self._free[block] = None

    def register(self, block: int, key: Key) -> None:
        """Cache a block that is full after this step, unless its key is cached."""
        if key not in self._cached and block not in self._key:
            self._cached[key] = block
            self._key[block] = key

    def reset(self) -> None:
        """Empty the prefix cache."""
        self._cached.clear()
        self._key.clear()
