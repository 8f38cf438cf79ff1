"""Queue of the log's writer: records that wait for a commit, and compactions between them.

No lock: the store guards it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import NamedTuple, TypeAlias

from routetrace.server.store.interface import Record
from routetrace.server.wire.checksums import Payload

#: Bytes of one commit, and those for which a commit does not wait for company.
GROUP_BYTES, COMPANY_BYTES = 16 << 20, 8 << 20

#: Call that the writer makes between two commits.
Work: TypeAlias = Callable[[], None]


class Queued(NamedTuple):
    """Record that waits, and the future of its append."""

    record: Record
    stored: Future[None]

    @property
    def size(self) -> int:
        """Bytes that it takes in the log, about."""
        return len(self.record.header) + len(self.record.payload)


class Queue:
    """Records and calls in the order of their arrival.

    Attributes:
        bytes: of all records that are not done, also those of the commit under way.
        payloads: of these records by number.
    """

    def __init__(self) -> None:
        self._items: deque[Queued | Work] = deque()
        self.bytes = 0
        self.payloads: dict[int, Payload] = {}

    def __bool__(self) -> bool:
        return bool(self._items)

    @property
    def is_due(self) -> bool:
        """Whether the writer need not wait for company."""
        return self.bytes >= COMPANY_BYTES or not isinstance(self._items[0], Queued)

    def add(self, queued: Queued) -> None:
        """Add a record."""
        self._items.append(queued)
        self.payloads[queued.record.number] = queued.record.payload
        self.bytes += queued.size

    def call(self, work: Work) -> None:
        """Add a call."""
        self._items.append(work)

    def take(self) -> Work | list[Queued]:
        """Remove the first call, or the records of one commit, which are done later."""
        first = self._items.popleft()
        if not isinstance(first, Queued):
            return first
        group, size = [first], first.size
        while self._items and size < GROUP_BYTES:
            item = self._items[0]
            if not isinstance(item, Queued):
                break
            group.append(item)
            size += item.size
            self._items.popleft()
        return group

    def done(self, queued: Queued) -> None:
        """Note the end of a record, stored or not."""
        self.payloads.pop(queued.record.number, None)
        self.bytes -= queued.size

    def remove_records(self) -> list[Queued]:
        """Remove and return the records that wait; calls stay."""
        records = [item for item in self._items if isinstance(item, Queued)]
        self._items = deque(item for item in self._items if not isinstance(item, Queued))
        return records
