"""What is in the database of the LMDB store, and the steps of a transaction over it.

Four named databases: headers and payloads by record number, the snapshot in pieces, and meta. The
key of a record carries the CRC-32 of its number and value, so that values are stored, and read in
slices, without being copied.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple
from zlib import crc32

import lmdb

from routetrace.server.store import Record, cut, gone
from routetrace.v1.errors import Corrupt

NAMES = (b"headers", b"payloads", b"snapshot", b"meta")
_FORMAT = b"1"
_KEY = struct.Struct(">QI")  # number, checksum; ascends with the number
_SNAPSHOT = struct.Struct(">QQI")  # number, bytes, CRC-32
# The snapshot is cut up, so that it fits between records, however the free space is scattered.
_PIECE_BYTES = 1 << 20


class Contents(NamedTuple):
    """What a walk over the database found."""

    records: int
    payload_bytes: int
    last_number: int
    snapshot_number: int


class Tables:
    """Reads and writes the named databases inside of transactions of the caller.

    Raises:
        lmdb.IncompatibleError: if the database is not one of ours.
    """

    def __init__(self, env: Any) -> None:
        self._headers, self._payloads, self._snapshot, self._meta = self._all = tuple(
            env.open_db(name) for name in NAMES
        )
        self.page_size: int = env.stat()["psize"]
        self._verified: set[int] = set()  # records whose payload matched its checksum
        with env.begin(write=True) as txn:
            found = txn.get(b"format", db=self._meta)
            if found is None and not any(txn.stat(db)["entries"] for db in self._all):
                txn.put(b"format", _FORMAT, db=self._meta)
            elif found != _FORMAT:
                raise lmdb.IncompatibleError(f"its format is {found!r}, expected {_FORMAT!r}")

    def pages(self, record: Record) -> int:
        """Pages that a record takes, about."""
        sizes = (len(record.header), len(record.payload))
        return sum((size + 64) // self.page_size + 1 for size in sizes)

    def used_pages(self, txn: Any) -> int:
        """Pages that hold something."""
        stats = (txn.stat(db) for db in self._all)
        return sum(s["branch_pages"] + s["leaf_pages"] + s["overflow_pages"] for s in stats)

    def survey(self, txn: Any) -> Contents:
        """Walks over everything, without reading the payloads; `txn` is one with buffers."""
        sizes = [len(payload) for _, payload in txn.cursor(db=self._payloads)]
        facts = txn.get(b"snapshot", db=self._meta)
        snapshot_number = _SNAPSHOT.unpack(facts)[0] if facts else 0
        last = snapshot_number
        for db in (self._headers, self._payloads):
            cursor = txn.cursor(db=db)
            if cursor.last():
                last = max(last, _number(cursor))
        return Contents(len(sizes), sum(sizes), last, snapshot_number)

    # ------------------------------------------------------------------ reading

    def read(self, txn: Any, number: int, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Ranges of a payload; `txn` is one with buffers. The first read checks all of it."""
        cursor = txn.cursor(db=self._payloads)
        if not _seek(cursor, number):
            raise gone(number)
        payload: memoryview = cursor.value()
        if number not in self._verified:
            if _key(number, payload) != cursor.key():
                raise Corrupt(f"record {number} does not match its checksum")
            self._verified.add(number)
        return cut(payload, ranges, number)

    def headers(self, txn: Any, after: int, limit: int) -> list[tuple[int, bytes | None]]:
        """The next headers above a number, at most `limit`; None for a damaged one."""
        found: list[tuple[int, bytes | None]] = []
        cursor = txn.cursor(db=self._headers)
        more = cursor.set_range(_KEY.pack(after + 1, 0))
        while more and len(found) < limit:
            number, header = _number(cursor), bytes(cursor.value())
            found.append((number, header if _key(number, header) == cursor.key() else None))
            more = cursor.next()
        return found

    def snapshot(self, txn: Any) -> tuple[int, bytes] | None:
        """The snapshot, and the number of the last record that it covers.

        Raises:
            Corrupt: if it does not match its checksum.
        """
        facts = txn.get(b"snapshot", db=self._meta)
        if facts is None:
            return None
        number, size, checksum = _SNAPSHOT.unpack(facts)
        data = b"".join(bytes(piece) for _, piece in txn.cursor(db=self._snapshot))
        if len(data) != size or crc32(data) != checksum:
            raise Corrupt(f"the snapshot of record {number} does not match its checksum")
        return number, data

    # ------------------------------------------------------------------ writing

    def put(self, txn: Any, record: Record) -> None:
        """Adds a record; one without a payload is nothing but its header."""
        values = [(self._headers, record.header)]
        if record.payload:
            values.append((self._payloads, record.payload))
        for db, value in values:
            key = _key(record.number, value)
            # Appending is refused below the last key, which may be a damaged one.
            if not txn.put(key, value, append=True, db=db):
                txn.put(key, value, db=db)

    def replace_snapshot(self, txn: Any, number: int, data: bytes) -> None:
        """Puts a snapshot in the place of the one before, and of the headers that it covers."""
        txn.drop(self._snapshot, delete=False)
        for start in range(0, len(data), _PIECE_BYTES):
            piece = memoryview(data)[start : start + _PIECE_BYTES]
            txn.put(_KEY.pack(start, 0), piece, append=True, db=self._snapshot)
        txn.put(b"snapshot", _SNAPSHOT.pack(number, len(data), crc32(data)), db=self._meta)
        cursor = txn.cursor(db=self._headers)
        while cursor.first() and _number(cursor) <= number:
            cursor.delete()

    def touch(self, txn: Any) -> None:
        """Changes nothing that anybody reads, so that there is something to commit."""
        txn.put(b"format", _FORMAT, db=self._meta)

    def drop(self, txn: Any, numbers: Iterable[int]) -> list[int]:
        """Deletes payloads that are there; returns their sizes. `txn` is one with buffers."""
        sizes: list[int] = []
        cursor = txn.cursor(db=self._payloads)
        for number in numbers:
            if _seek(cursor, number):
                sizes.append(len(cursor.value()))
                cursor.delete()
                self._verified.discard(number)
        return sizes


def _key(number: int, value: bytes | memoryview) -> bytes:
    # The number is in the sum: a damaged key must not pass one record off as another.
    return _KEY.pack(number, crc32(value, crc32(number.to_bytes(8, "big"))))


def _number(cursor: Any) -> int:
    number: int = _KEY.unpack(cursor.key())[0]
    return number


def _seek(cursor: Any, number: int) -> bool:
    return bool(cursor.set_range(_KEY.pack(number, 0))) and _number(cursor) == number
