"""Frames: what the log and the snapshots of the disk store are made of.

Every frame carries a checksum over its content and its place in the file. Where one does not match,
the next one that does is searched for, so that damage costs what it hit and nothing else. A file is
its own namespace: its frames begin with random bytes which only its name holds, so that no record
can contain what passes for a frame.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple
from zlib import crc32

RECORD, DROP, PIECE, INDEX, END = range(1, 6)

# magic, checksum of all that follows, kind, number, bytes of the body, a second number
_HEAD = struct.Struct("<8sIIQII")
_CHECKED = 12
_NAME = re.compile(r"(log|snapshot)-([0-9a-f]{8})-([0-9a-f]{16})")
_CHUNK = 1 << 20
#: Nothing that is written is as long.
_BODY_MOST = 1 << 28


class Frame(NamedTuple):
    """A frame that matches its checksum."""

    kind: int
    number: int
    extra: int
    body: bytes
    end: int
    """Offset of what follows it."""


class Damage(NamedTuple):
    """Bytes of a file that are no frame."""

    where: str
    last: bool
    """No frame follows."""


class FrameFile(NamedTuple):
    """The name of a file of frames."""

    path: Path
    id: int
    """Ascends with every file of its kind."""
    magic: bytes

    @classmethod
    def new(cls, directory: Path, kind: str, id_: int) -> FrameFile:
        """A name that was never used."""
        magic = os.urandom(8)
        return cls(directory / f"{kind}-{id_:08x}-{magic.hex()}", id_, magic)

    @classmethod
    def all(cls, directory: Path, kind: str) -> list[FrameFile]:
        """The files that are there, in the order in which they were made."""
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
        """A frame that will stand at `offset` of the file."""
        head = _HEAD.pack(self.magic, 0, kind, number, len(body), extra)
        checksum = _checksum(offset, head, body)
        return _HEAD.pack(self.magic, checksum, kind, number, len(body), extra) + body

    def scan(self, start: int = 0, stop: int | None = None) -> Iterator[Frame | Damage]:
        """What is in the file, from one offset to another. One frame is in memory at a time.

        Raises:
            OSError: if the file can not be opened.
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
                yield Damage(where, found == size)
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
        """Where the magic stands next; `size` if nowhere."""
        while start < size:
            chunk = _read(file, start, _CHUNK)
            found = chunk.find(self.magic)
            if found >= 0:
                return min(start + found, size)
            # One that can not be read, too.
            start += max(len(chunk) - len(self.magic) + 1, len(self.magic))
        return size


def _checksum(offset: int, head: bytes, body: bytes) -> int:
    return crc32(body, crc32(head[_CHECKED:], crc32(offset.to_bytes(8, "little"))))


def _read(file: IO[bytes], at: int, size: int) -> bytes:
    try:
        file.seek(at)
        return file.read(size)
    except OSError:  # a place that the disk can not read is damaged, like any other
        return b""
