"""Frames: the units of the log and of the snapshots of the disk store.

The checksum of a frame covers its content and its offset in the file. After damage, reading goes on
at the next frame that matches its checksum, so that only damaged frames are lost. The frames of a
file begin with random bytes that stand in its name alone, so that no record can contain bytes that
pass for a frame.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple

from routetrace.common.checksum import crc32

RECORD, DROP, PIECE, INDEX, END, JOINED = range(1, 7)

# magic, checksum of all that follows, kind, number, bytes of the body, a second number
_HEAD = struct.Struct("<8sIIQII")
_CHECKED = 12
_NAME = re.compile(r"(log|snapshot)-([0-9a-f]{8})-([0-9a-f]{16})")
_CHUNK = 1 << 20
#: Longer than any frame that is written.
_BODY_MOST = 1 << 28


class Frame(NamedTuple):
    """A frame that matches its checksum."""

    kind: int
    number: int
    extra: int
    body: bytes
    end: int
    """Offset behind it."""

    @property
    def start(self) -> int:
        """Offset."""
        return self.end - _HEAD.size - len(self.body)


class Damage(NamedTuple):
    """Bytes of a file that form no frame."""

    where: str
    start: int
    """Offset."""
    last: bool
    """No frame follows."""


class FrameFile(NamedTuple):
    """Name of a file of frames."""

    path: Path
    id: int
    """Ascends with every file of its kind."""
    magic: bytes

    @classmethod
    def new(cls, directory: Path, kind: str, id_: int) -> FrameFile:
        """Return a name that was never used."""
        magic = os.urandom(8)
        return cls(directory / f"{kind}-{id_:08x}-{magic.hex()}", id_, magic)

    @classmethod
    def all(cls, directory: Path, kind: str) -> list[FrameFile]:
        """Return the existing files in the order of their creation."""
        names = [(path, _NAME.fullmatch(path.name)) for path in directory.iterdir()]
        return sorted(
            (
                cls(path, int(match[2], 16), bytes.fromhex(match[3]))
                for path, match in names
                if match and match[1] == kind
            ),
            key=lambda file: file.id,
        )

    def encode(self, offset: int, kind: int, number: int, body: bytes, extra: int = 0) -> bytes:
        """Encode a frame for this offset of the file."""
        head = _HEAD.pack(self.magic, 0, kind, number, len(body), extra)
        checksum = _checksum(offset, head, body)
        return _HEAD.pack(self.magic, checksum, kind, number, len(body), extra) + body

    def scan(self, start: int = 0, stop: int | None = None) -> Iterator[Frame | Damage]:
        """Yield the contents of the file between two offsets, one frame in memory at a time.

        Raises:
            OSError: if the file cannot be opened.
        """
        with open(self.path, "rb", buffering=_CHUNK) as file:
            size = os.fstat(file.fileno()).st_size
            size = size if stop is None else min(size, stop)
            while start < size:
                frame = self._frame(file, start, size)
                if frame is not None:
                    yield frame
                    start = frame.end
                    continue
                after = start + 1
                while (found := self._find(file, after, size)) < size:
                    if self._frame(file, found, size) is not None:
                        break
                    after = found + 1
                where = f"bytes {start} to {found} of {self.path.name}"
                yield Damage(where, start, found == size)
                start = found

    def _frame(self, file: IO[bytes], at: int, size: int) -> Frame | None:
        head = _read(file, at, _HEAD.size)
        if len(head) < _HEAD.size:
            return None
        magic, checksum, kind, number, length, extra = _HEAD.unpack(head)
        end = at + _HEAD.size + length
        if magic != self.magic or end > size or length > _BODY_MOST:
            return None
        body = _read(file, at + _HEAD.size, length)
        if len(body) < length or _checksum(at, head, body) != checksum:
            return None
        return Frame(kind, number, extra, body, end)

    def _find(self, file: IO[bytes], start: int, size: int) -> int:
        """Return the next offset of the magic bytes; `size` if there is none."""
        while start < size:
            chunk = _read(file, start, _CHUNK)
            found = chunk.find(self.magic)
            if found >= 0:
                return min(start + found, size)
            # An unreadable chunk is skipped, too.
            start += max(len(chunk) - len(self.magic) + 1, len(self.magic))
        return size


def _checksum(offset: int, head: bytes, body: bytes) -> int:
    return crc32(body, crc32(head[_CHECKED:], crc32(offset.to_bytes(8, "little"))))


def _read(file: IO[bytes], at: int, size: int) -> bytes:
    try:
        file.seek(at)
        return file.read(size)
    except OSError:  # unreadable sectors count as damage
        return b""
