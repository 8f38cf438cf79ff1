"""Objects of the log: a head with checksums, then payloads.

log/<index> is one commit. Its fixed part names the writer (term and nonce) and the kind; the head
holds the headers of the records and the running checksums of their payloads.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import msgpack
import numpy as np

from routetrace.common.checksum import crc32
from routetrace.common.errors import Corrupt
from routetrace.server.store.interface import Record
from routetrace.server.wire.checksums import Payload, running

MAGIC = b"RTL1"
# magic, term, index, nonce, kind, records, bytes and CRC of the head; then the CRC of all this.
_FIXED = struct.Struct("<4sQQ16sBIII")
_CRC = struct.Struct("<I")
FIXED_BYTES = _FIXED.size + _CRC.size
_RECORD = struct.Struct("<QIII")  # number; bytes of header, payload and checksums

_FRAME = struct.Struct("<II")  # of a piece of a snapshot: bytes, CRC


class Kind(Enum):
    """Kind of a log object."""

    RECORDS = 0
    """Records of one commit."""
    FENCE = 1
    """Start of a term: a writer of an earlier one stops here. Never deleted."""
    COMPACT = 2
    """A snapshot counts from here on; deletions follow."""


class Where(NamedTuple):
    """Place of a payload."""

    object: int
    """Index of the log object."""
    offset: int
    size: int
    sums: bytes
    """Running checksums, little-endian uint32."""

    def fits(self, payload: Payload) -> bool:
        """Whether bytes are the payload."""
        sums = np.array(running(payload), "<u4").tobytes()
        return len(payload) == self.size and sums == self.sums


@dataclass(frozen=True)
class Fixed:
    """Fixed part of a log object."""

    term: int
    index: int
    nonce: bytes
    kind: Kind
    records: int
    head_bytes: int
    head_crc: int


class Entry(NamedTuple):
    """One record of a log object."""

    number: int
    header: bytes
    where: Where


def key(index: int) -> str:
    """Return the key of a log object."""
    return f"log/{index:016d}"


def mark_key(index: int) -> str:
    """Return the key of the marker that says where a compaction may be."""
    return f"mark/{index:016d}"


def index_of(path: str) -> int:
    """Return the index in a key; -1 if it is no key of these."""
    name = path.rpartition("/")[2]
    return int(name) if name.isascii() and name.isdigit() else -1


def pack(
    term: int, index: int, nonce: bytes, kind: Kind, records: int, head: bytes, *payloads: Payload
) -> bytes:
    """Return a log object."""
    fixed = _FIXED.pack(MAGIC, term, index, nonce, kind.value, records, len(head), crc32(head))
    return b"".join((fixed, _CRC.pack(crc32(fixed)), head, *payloads))


def unpack_fixed(data: bytes, index: int) -> Fixed:
    """Return the fixed part of a log object.

    Raises:
        Corrupt: if it is damaged, or another object's.
    """
    fixed = data[: _FIXED.size]
    if len(data) < FIXED_BYTES or _CRC.unpack_from(data, _FIXED.size)[0] != crc32(fixed):
        raise Corrupt(f"{key(index)} is damaged: its start does not match its checksum")
    magic, term, found, nonce, kind, records, length, crc = _FIXED.unpack(fixed)
    if magic != MAGIC or found != index or kind not in {k.value for k in Kind}:
        raise Corrupt(f"{key(index)} is not an object of this log, or of a newer version")
    return Fixed(term, index, nonce, Kind(kind), records, length, crc)


def pack_records(records: Sequence[Record]) -> tuple[bytes, list[bytes]]:
    """Return the head of a commit, and the checksums of each payload."""
    sums = [
        np.array(running(r.payload) if r.sums is None else r.sums, "<u4").tobytes() for r in records
    ]
    table = [
        _RECORD.pack(r.number, len(r.header), len(r.payload), len(s))
        for r, s in zip(records, sums, strict=True)
    ]
    return b"".join((*table, *(r.header for r in records), *sums)), sums


def unpack_records(fixed: Fixed, head: bytes) -> list[Entry]:
    """Return the records of a commit.

    Raises:
        Corrupt: if the head is damaged.
    """
    if len(head) != fixed.head_bytes or crc32(head) != fixed.head_crc:
        raise Corrupt(f"{key(fixed.index)} is damaged: its head does not match its checksum")
    table = [_RECORD.unpack_from(head, at * _RECORD.size) for at in range(fixed.records)]
    at = fixed.records * _RECORD.size
    sums_at = at + sum(row[1] for row in table)
    offset = FIXED_BYTES + len(head)
    entries = []
    for number, header, payload, sums in table:
        where = Where(fixed.index, offset, payload, head[sums_at : sums_at + sums])
        entries.append(Entry(number, head[at : at + header], where))
        at, sums_at, offset = at + header, sums_at + sums, offset + payload
    return entries


class Held(NamedTuple):
    """A log object that holds payloads, or headers that no snapshot covers."""

    size: int
    last: int
    """Number of its last record."""


@dataclass(frozen=True)
class Compaction:
    """Head of a COMPACT object: the store at this index."""

    snapshot: int
    """Last record that the snapshot covers; 0: there is none."""
    directory: str
    """Prefix of the parts of the snapshot."""
    parts: int
    last: int
    """Last record before this index."""
    payloads: dict[int, Where]
    objects: dict[int, Held]

    def uncovered(self) -> list[int]:
        """Return the log objects with headers that the snapshot does not cover."""
        return [index for index, held in self.objects.items() if held.last > self.snapshot]

    def pack(self) -> bytes:
        """Serialize it."""
        packed: Any = msgpack.packb(
            (
                self.snapshot,
                self.directory,
                self.parts,
                self.last,
                [(number, *where) for number, where in self.payloads.items()],
                [(index, *held) for index, held in self.objects.items()],
            )
        )
        return bytes(packed)

    @classmethod
    def parse(cls, fixed: Fixed, head: bytes) -> Compaction:
        """Return the content of a COMPACT object.

        Raises:
            Corrupt: if it is damaged.
        """
        if len(head) != fixed.head_bytes or crc32(head) != fixed.head_crc:
            raise Corrupt(f"{key(fixed.index)} is damaged: its head does not match its checksum")
        snapshot, directory, parts, last, payloads, objects = msgpack.unpackb(head)
        return cls(
            snapshot,
            directory,
            parts,
            last,
            {number: Where(*where) for number, *where in payloads},
            {index: Held(*held) for index, *held in objects},
        )


def pack_piece(piece: bytes) -> bytes:
    """Return a piece of a snapshot with its checksum."""
    return _FRAME.pack(len(piece), crc32(piece)) + piece


def unpack_pieces(data: bytes, name: str) -> list[bytes]:
    """Return the pieces in a part of a snapshot.

    Raises:
        Corrupt: if one is damaged.
    """
    pieces, at = [], 0
    while at < len(data):
        if at + _FRAME.size > len(data):
            raise Corrupt(f"{name} is damaged: it ends early")
        length, crc = _FRAME.unpack_from(data, at)
        piece = data[at + _FRAME.size : at + _FRAME.size + length]
        if len(piece) != length or crc32(piece) != crc:
            raise Corrupt(f"{name} is damaged: a piece does not match its checksum")
        pieces.append(piece)
        at += _FRAME.size + length
    return pieces
