"""KV blocks with a prefix cache, as inference engines have them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

#: What a block holds: the last stream of tokens up to its end, and where it ends. A stream begins
#: at one place behind one other, so that this names everything before it as well.
Key = tuple[int, int]


class BlockPool:
    """Blocks that are in use, cached, or free; those not used for longest are given away first."""

    def __init__(self, num_blocks: int) -> None:
        self._free: OrderedDict[int, None] = OrderedDict((i, None) for i in range(num_blocks))
        self._uses = [0] * num_blocks
        self._cached: dict[Key, int] = {}
        self._key: dict[int, Key] = {}
        self._author = [0] * num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that nobody uses, cached ones among them."""
        return len(self._free)

    def hit(self, keys: Iterable[Key]) -> list[int]:
        """The cached blocks of the first keys, used once more from now on."""
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
        """Blocks of which nothing is known any more; there must be as many."""
        blocks = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            self._uses[block] = 1
            key = self._key.pop(block, None)
            if key is not None:
                del self._cached[key]
        return blocks

    def release(self, blocks: list[int]) -> None:
        """Gives them up; the last ones go first."""
        for block in reversed(blocks):
            self._uses[block] -= 1
            if not self._uses[block]:
                self._free[block] = None

    def register(self, block: int, key: Key, author: int) -> None:
        """A block that is, or in this step gets, full: others may use it from now on."""
        if key not in self._cached:
            self._cached[key] = block
            self._key[block] = key
            self._author[block] = author

    def author(self, block: int) -> int:
        """Who computed a cached block."""
        return self._author[block]

    def reset(self) -> None:
        """Forgets what is cached."""
        self._cached.clear()
        self._key.clear()
