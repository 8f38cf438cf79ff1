"""Interface of the record stores, and the checks and errors that they share.

A record is one chunk: a header, from which the indexes are rebuilt, and a payload, of which ranges
are read. A snapshot stands in for the headers of all records up to a number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from routetrace.common.errors import Corrupt, InvalidArgument, NotFound, Overloaded
from routetrace.server.wire.checksums import Payload

_ROOM_TO_FORGET = 16 << 20


@dataclass(frozen=True)
class Record:
    """Stored form of a chunk."""

    number: int
    """In [1, 2**63), strictly ascending, chosen by the caller."""
    header: bytes
    """Kept until a snapshot covers the record."""
    payload: Payload
    """Kept until the record is dropped; if empty, there is nothing to read or to drop."""
    sums: Sequence[int] | None = None
    """`checksums.running` of the payload, if known."""


@dataclass(frozen=True)
class StoreStats:
    """Usage of a store."""

    records: int
    """Records whose payload is held."""
    payload_bytes: int
    """Bytes of these payloads."""
    used_bytes: int
    """Bytes that count against the capacity."""
    capacity_bytes: int
    """Appends of payloads beyond it fail with Overloaded."""
    file_bytes: int = 0
    """Disk space, with free space for reuse."""
    damaged_records: int = 0
    """Records with wrong checksums found since the store was opened."""
    lost_records: int = 0
    """Records acknowledged before they were durable, and then not written."""
    failed_commits: int = 0
    """Commits and compactions refused by the disk since the store was opened."""
    writable: bool = True
    """Whether the disk took the last commit."""


class Ownership(Protocol):
    """How a server comes to own a store that others may name too. Thread-safe."""

    on_lost: Callable[[], object]
    """Called in some thread once this server has lost the store, or should leave it to another."""

    @property
    def owned(self) -> bool:
        """Whether this server may answer from its state and acknowledge at the moment."""
        ...

    def take_over(self, waiting: Callable[[Owner], None] = ...) -> None:
        """Wait until this server owns the store, then read what it needs of it; blocks.

        Args:
            waiting: called with each other owner that is found meanwhile.

        Raises:
            RouteTraceError: if the store cannot be used, or was closed.
        """
        ...


@dataclass(frozen=True)
class Owner:
    """Server that owns a store."""

    name: str
    """For log lines; "" if no server owns it."""
    address: str = ""
    """host:port at which it serves clients; "" if that is not published."""


#: In place of an owner, where the last one has left or its lease is over.
NO_OWNER = Owner("")


class Store(Protocol):
    """Store of records. Thread-safe; calls block, so an event loop makes them in a thread.

    Every call raises Closed after `close`.
    """

    @property
    def ownership(self) -> Ownership | None:
        """Ownership of a store that several servers may name; None: it is this server's alone."""
        ...

    def append(self, record: Record) -> Future[None]:
        """Queue a record; does not block.

        The future completes once the record is as durable as the ack mode promises, in order of
        the appends. If a record fails, every record queued after it fails too, and its number is
        free again. A future cannot be cancelled. The future of a record that is refused at once has
        failed when this returns.

        Future raises:
            Overloaded: no room at the moment; nothing of the record was stored.
            Unavailable: the store can no longer write.

        Raises:
            InvalidArgument: if the number is not above those of all records before.
        """
        ...

    def read(
        self, number: int, ranges: Sequence[tuple[int, int]], *, wait: bool = True
    ) -> list[Payload]:
        """Return (offset, length) ranges of a payload; sees every acknowledged record.

        Raises:
            NotFound: if the record is not stored, or no longer.
            Corrupt: if it does not match its checksum, or a range is outside of it.
            BlockingIOError: if `wait` is False and the data is not in memory.
        """
        ...

    def headers(self, after: int = 0) -> Iterator[tuple[int, bytes | None]]:
        """Yield (number, header) of records above `after` that no snapshot covers, ascending.

        A damaged record is counted and logged, and yields (number of its predecessor, None).
        """
        ...

    def numbers(self) -> list[int]:
        """Return the records with a stored payload."""
        ...

    def last_number(self) -> int:
        """Return the number that the next record must exceed; 0 in an empty store."""
        ...

    def load_snapshot(self) -> tuple[int, Iterator[bytes]] | None:
        """Return the last record that the snapshot covers, and its pieces; None without one.

        Iterating raises:
            Corrupt: if a piece does not match its checksum.
        """
        ...

    def compact(self, snapshot: tuple[int, Iterable[bytes]] | None, drop: Iterable[int]) -> None:
        """Replace the snapshot and drop payloads, all or nothing; None keeps the snapshot.

        Headers that the new snapshot covers are deleted; dropped records keep their header until
        then. Numbers that are not stored are ignored. The pieces of the snapshot, of about 1 MiB
        each, are taken one by one in the calling thread; appends continue meanwhile. A store that
        is not writable tries to write, even where nothing is to drop.

        Raises:
            Overloaded: no room at the moment.
            Unavailable: it cannot be written.
            InvalidArgument: if the snapshot covers less than the one before.
        """
        ...

    def stats(self) -> StoreStats:
        """Return the usage of the store."""
        ...

    def close(self) -> None:
        """Write queued records, then release all resources; idempotent."""
        ...


class Ascending:
    """Check that numbers ascend."""

    def __init__(self, last: int = 0) -> None:
        self.last = last

    def check(self, number: int) -> None:
        """Check the next number, without taking it.

        Raises:
            InvalidArgument: if it does not exceed the last one.
        """
        if not self.last < number < 1 << 63:
            raise InvalidArgument(
                field="number", value=number, expected=f"a number above {self.last}, below 2**63"
            )


def check_ranges(size: int, ranges: Sequence[tuple[int, int]], number: int) -> None:
    """Check (offset, length) ranges of a payload of `size` bytes.

    Raises:
        Corrupt: if a range is outside of it.
    """
    for offset, length in ranges:
        if offset < 0 or length < 0 or offset + length > size:
            raise Corrupt(
                f"record {number} has {size} bytes, expected {length} bytes at offset {offset}"
            )


def cut(payload: Payload, ranges: Sequence[tuple[int, int]], number: int) -> list[Payload]:
    """Return (offset, length) ranges of a payload.

    Raises:
        Corrupt: if a range is outside of it.
    """
    check_ranges(len(payload), ranges, number)
    view = memoryview(payload)
    return [view[offset : offset + length] for offset, length in ranges]


def check_snapshot(new: int, old: int) -> None:
    """Check that a snapshot is not older than the previous one.

    Raises:
        InvalidArgument: if it covers fewer records.
    """
    if new < old:
        raise InvalidArgument(
            field="snapshot", value=new, expected=f"a record number of {old} or above"
        )


def limit(capacity_bytes: int, record: Record) -> int:
    """Return the limit of an append; records without payload, as deletions, may exceed capacity."""
    return capacity_bytes if record.payload else capacity_bytes + _ROOM_TO_FORGET


def full(capacity_bytes: int) -> Overloaded:
    """Return the error of a full store."""
    return Overloaded(
        f"the store is full: store_capacity is {capacity_bytes} bytes",
        field="store_capacity",
        retry_after=1.0,
    )


def gone(number: int) -> NotFound:
    """Return the error of a record that is not stored."""
    return NotFound(f"record {number} is not stored, or no longer")
