"""Queue of writes of the disk store."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass

from routetrace.server.store.disk.blocks import BLOCK_BYTES, blocks_of
from routetrace.server.store.disk.snapshot import Draft
from routetrace.server.store.interface import Record
from routetrace.server.wire.checksums import Payload

_GROUP_BYTES = 16 << 20
#: Of a record in the log, beside its header and 8 bytes a block; about.
_FRAME_BYTES = 48


@dataclass(frozen=True)
class Append:
    """A record to append."""

    record: Record
    future: Future[None]

    @property
    def size(self) -> int:
        """Bytes in memory."""
        return len(self.record.header) + len(self.record.payload)

    @property
    def room(self) -> int:
        """Approximate bytes of capacity."""
        blocks = blocks_of(len(self.record.payload))
        return len(self.record.header) + _FRAME_BYTES + blocks * (BLOCK_BYTES + 8)


@dataclass(frozen=True)
class Compaction:
    """Payloads to drop, and a snapshot to put in place."""

    draft: Draft | None
    number: int
    """The last record that the snapshot covers."""
    drop: list[int]
    future: Future[None]


class Queue:
    """Appends and compactions, in order. Guarded by a lock of the caller."""

    def __init__(self) -> None:
        self._items: deque[Append | Compaction] = deque()
        self._pending: dict[int, Append] = {}
        self.bytes = 0
        """Bytes in memory of all pending records."""
        self.room = 0
        """Approximate bytes of capacity of all pending records."""

    def __len__(self) -> int:
        return len(self._items)

    def add(self, item: Append | Compaction) -> None:
        """Add an item; a record is pending until `done`."""
        self._items.append(item)
        if isinstance(item, Append):
            self._pending[item.record.number] = item
            self.bytes += item.size
            self.room += item.room

    def take(self) -> Compaction | list[Append]:
        """Remove and return the next compaction, or the records of one commit."""
        first = self._items.popleft()
        if isinstance(first, Compaction):
            return first
        group, size = [first], first.size
        while self._items and size < _GROUP_BYTES:
            item = self._items[0]
            if isinstance(item, Compaction):
                break
            self._items.popleft()
            group.append(item)
            size += item.size
        return group

    def take_appends(self) -> list[Append]:
        """Remove and return all records; compactions stay."""
        appends = [item for item in self._items if isinstance(item, Append)]
        self._items = deque(item for item in self._items if isinstance(item, Compaction))
        return appends

    def done(self, item: Append) -> None:
        """End the pending state of a record."""
        del self._pending[item.record.number]
        self.bytes -= item.size
        self.room -= item.room

    def payload(self, number: int) -> Payload:
        """Return the payload of a pending record, or empty bytes; needs no lock."""
        item = self._pending.get(number)
        return item.record.payload if item else b""

    def payload_sizes(self) -> list[int]:
        """Return the sizes of non-empty pending payloads."""
        return [len(p.record.payload) for p in self._pending.values() if p.record.payload]
