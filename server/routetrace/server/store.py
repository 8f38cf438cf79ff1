"""Where records are kept: the small interface, and the store that keeps them in memory.

A record is one chunk: a header, from which the indexes are rebuilt, and a payload, of which ranges
are read. A snapshot stands in for the headers of all records up to a number.
"""

from __future__ import annotations

import bisect
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from routetrace.server.checksums import Payload
from routetrace.v1.errors import Closed, Corrupt, InvalidArgument, NotFound, Overloaded

_ROOM_TO_FORGET = 16 << 20


@dataclass(frozen=True)
class Record:
    """What is stored of one chunk."""

    number: int
    """In [1, 2**63), strictly ascending, chosen by the caller."""
    header: bytes
    """Kept until a snapshot covers the record."""
    payload: Payload
    """Kept until the record is dropped; if empty, there is nothing to read or to drop."""
    sums: Sequence[int] | None = None
    """`checksums.running` of the payload, where that was worked out already."""


@dataclass(frozen=True)
class StoreStats:
    """How full a store is."""

    records: int
    """Records whose payload is held."""
    payload_bytes: int
    """Bytes of these payloads."""
    used_bytes: int
    """What counts against the capacity."""
    capacity_bytes: int
    """Appends of payloads beyond it fail with Overloaded."""
    file_bytes: int = 0
    """Disk space taken; space that is free for reuse included."""
    damaged_records: int = 0
    """Records that were found not to match their checksums, since the store was opened."""
    lost_records: int = 0
    """Records that were acknowledged before they were durable, and then could not be written."""
    failed_commits: int = 0
    """Commits and compactions that the disk refused, since the store was opened."""


class Store(Protocol):
    """Keeps records. Thread-safe; the calls block, so that an event loop makes them in a thread.

    Every call raises Closed after `close`.
    """

    def append(self, record: Record) -> Future[None]:
        """Queues a record; does not block.

        The future completes once the record is as durable as the ack mode promises, in order of
        the appends. Where a record fails, every record queued behind it fails too, and its number
        is free again. A future can not be cancelled. A record that is refused at the door has its
        future failed already when this returns.

        Future raises:
            Overloaded: no room at the moment; nothing of the record was stored.
            Unavailable: the store can not write any more.

        Raises:
            InvalidArgument: if the number is not above those of all records before.
        """
        ...

    def read(
        self, number: int, ranges: Sequence[tuple[int, int]], *, wait: bool = True
    ) -> list[Payload]:
        """(offset, length) ranges of a payload. Sees every record that is acknowledged.

        Raises:
            NotFound: if there is no such record, or no longer.
            Corrupt: if it does not match its checksum, or a range is outside of it.
            BlockingIOError: if the disk is to be waited for, and `wait` is False.
        """
        ...

    def headers(self, after: int = 0) -> Iterator[tuple[int, bytes | None]]:
        """(number, header) of the records above `after` that no snapshot covers, ascending.

        Damaged ones are counted and logged; in their place stands (number of the one before, None).
        """
        ...

    def numbers(self) -> list[int]:
        """The records whose payload is held."""
        ...

    def last_number(self) -> int:
        """The number that the next record must be above; 0 in an empty store."""
        ...

    def load_snapshot(self) -> tuple[int, Iterator[bytes]] | None:
        """The number of the last record that the snapshot covers, and its pieces; None without one.

        Iterating raises:
            Corrupt: if a piece does not match its checksum.
        """
        ...

    def compact(self, snapshot: tuple[int, Iterable[bytes]] | None, drop: Iterable[int]) -> None:
        """Replaces the snapshot and drops payloads, all or nothing; None keeps the snapshot.

        Headers of the records that the new snapshot covers are deleted. Dropped records keep their
        header until then; numbers that are not stored are passed over. The snapshot comes in pieces
        of about 1 MiB, which are taken one by one, in the thread of the call; appends go on
        meanwhile.

        Raises:
            Overloaded: no room at the moment.
            Unavailable: it can not be written.
            InvalidArgument: if the snapshot covers less than the one before.
        """
        ...

    def stats(self) -> StoreStats:
        """How full the store is."""
        ...

    def close(self) -> None:
        """Stores what is queued, then lets go of everything. May be called again."""
        ...


class Ascending:
    """Refuses numbers that do not ascend."""

    def __init__(self, last: int = 0) -> None:
        self.last = last

    def check(self, number: int) -> None:
        """Looks at the next number, without taking it.

        Raises:
            InvalidArgument: if it is not above the last one.
        """
        if not self.last < number < 1 << 63:
            raise InvalidArgument(
                field="number", value=number, expected=f"a number above {self.last}, below 2**63"
            )


def check_ranges(size: int, ranges: Sequence[tuple[int, int]], number: int) -> None:
    """Looks at (offset, length) ranges of a payload of `size` bytes.

    Raises:
        Corrupt: if one is outside of it.
    """
    for offset, length in ranges:
        if offset < 0 or length < 0 or offset + length > size:
            raise Corrupt(
                f"record {number} holds {size} bytes, "
                f"but {length} bytes at offset {offset} were asked for"
            )


def cut(payload: Payload, ranges: Sequence[tuple[int, int]], number: int) -> list[Payload]:
    """(offset, length) ranges of a payload.

    Raises:
        Corrupt: if a range is outside of it.
    """
    check_ranges(len(payload), ranges, number)
    view = memoryview(payload)
    return [view[offset : offset + length] for offset, length in ranges]


def check_snapshot(new: int, old: int) -> None:
    """Refuses to go back to an older snapshot.

    Raises:
        InvalidArgument: if the new one covers less than the old one.
    """
    if new < old:
        raise InvalidArgument(
            field="snapshot", value=new, expected=f"a record number of {old} or above"
        )


class MemoryStore:
    """A store that forgets everything when the process ends."""

    def __init__(self, capacity_bytes: int = 1 << 62) -> None:
        self._capacity = capacity_bytes
        self._lock = threading.Lock()
        self._numbers = Ascending()
        self._headers: dict[int, bytes] = {}  # in ascending order
        self._payloads: dict[int, Payload] = {}
        self._payload_bytes = 0
        self._header_bytes = 0
        self._snapshot: tuple[int, list[bytes]] | None = None
        self._closed = False

    def append(self, record: Record) -> Future[None]:
        """See `Store.append`."""
        future: Future[None] = Future()
        future.set_running_or_notify_cancel()
        size = len(record.header) + len(record.payload)
        with self._lock:
            self._check_open()
            self._numbers.check(record.number)
            if self._used_bytes() + size > limit(self._capacity, record):
                future.set_exception(full(self._capacity))
                return future
            self._numbers.last = record.number
            self._headers[record.number] = record.header
            if record.payload:
                self._payloads[record.number] = record.payload
            self._header_bytes += len(record.header)
            self._payload_bytes += len(record.payload)
        future.set_result(None)
        return future

    def read(
        self,
        number: int,
        ranges: Sequence[tuple[int, int]],
        *,
        wait: bool = True,  # noqa: ARG002
    ) -> list[Payload]:
        """See `Store.read`."""
        with self._lock:
            self._check_open()
            payload = self._payloads.get(number)
        if payload is None:
            raise gone(number)
        return cut(payload, ranges, number)

    def headers(self, after: int = 0) -> Iterator[tuple[int, bytes | None]]:
        """See `Store.headers`."""
        with self._lock:
            self._check_open()
            items: list[tuple[int, bytes | None]] = list(self._headers.items())
        return iter(items[bisect.bisect_right(items, after, key=lambda item: item[0]) :])

    def numbers(self) -> list[int]:
        """See `Store.numbers`."""
        with self._lock:
            self._check_open()
            return list(self._payloads)

    def last_number(self) -> int:
        """See `Store.last_number`."""
        with self._lock:
            self._check_open()
            return self._numbers.last

    def load_snapshot(self) -> tuple[int, Iterator[bytes]] | None:
        """See `Store.load_snapshot`."""
        with self._lock:
            self._check_open()
            return (self._snapshot[0], iter(self._snapshot[1])) if self._snapshot else None

    def compact(self, snapshot: tuple[int, Iterable[bytes]] | None, drop: Iterable[int]) -> None:
        """See `Store.compact`."""
        pieces = list(snapshot[1]) if snapshot else []
        with self._lock:
            self._check_open()
            if snapshot is not None:
                number = snapshot[0]
                check_snapshot(number, self._snapshot[0] if self._snapshot else 0)
                self._snapshot = number, pieces
                self._numbers.last = max(self._numbers.last, number)
                for covered in [n for n in self._headers if n <= number]:
                    self._header_bytes -= len(self._headers.pop(covered))
            for dropped in drop:
                self._payload_bytes -= len(self._payloads.pop(dropped, b""))

    def stats(self) -> StoreStats:
        """See `Store.stats`."""
        with self._lock:
            self._check_open()
            return StoreStats(
                len(self._payloads), self._payload_bytes, self._used_bytes(), self._capacity
            )

    def close(self) -> None:
        """See `Store.close`."""
        with self._lock:
            self._closed = True

    def _used_bytes(self) -> int:
        snapshot = sum(map(len, self._snapshot[1])) if self._snapshot else 0
        return self._header_bytes + self._payload_bytes + snapshot

    def _check_open(self) -> None:
        if self._closed:
            raise Closed("the store is closed")


def limit(capacity_bytes: int, record: Record) -> int:
    """Up to which size a record may be appended: what only forgets finds room in a full store."""
    return capacity_bytes if record.payload else capacity_bytes + _ROOM_TO_FORGET


def full(capacity_bytes: int) -> Overloaded:
    """The error of a store that has no room."""
    return Overloaded(
        f"the store is full: its capacity is {capacity_bytes} bytes",
        field="store_capacity",
        retry_after=1.0,
    )


def gone(number: int) -> NotFound:
    """The error of a record that is not, or no longer, stored."""
    return NotFound(f"record {number} is not stored, or no longer")
