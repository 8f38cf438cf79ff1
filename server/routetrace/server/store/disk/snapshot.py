"""Snapshots of the disk store: a file each, with the caller's pieces and the store's own index.

A snapshot is written beside the one before, read back, and only then renamed. The one before stays
until the next snapshot, with the log that it needs: a snapshot that turns out to be damaged
costs nothing then.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, TypeVar

from routetrace.common.errors import Corrupt
from routetrace.server.store.disk.blocks import TABLE, write_all
from routetrace.server.store.disk.frames import END, INDEX, PIECE, Damage, Frame, FrameFile

_ENTRY = struct.Struct("<QQI")  # number, bytes, blocks; then the table
_END = struct.Struct("<QII")  # first log file that the index does not know, pieces, index frames
_INDEX_BYTES = 1 << 20

_T = TypeVar("_T")
#: Calls something that needs disk space; may make room and call it again.
WithRoom = Callable[[Callable[[], _T]], _T]


class Stored(NamedTuple):
    """Place of a payload."""

    size: int
    table: bytes


class Snapshot(NamedTuple):
    """A snapshot that was read and verified as a whole."""

    file: FrameFile
    number: int
    """Last record that it covers."""
    base: int
    """First log file whose payloads are not in the index."""
    size: int


class Draft:
    """Writer of a snapshot, under a temporary name beside the others."""

    def __init__(self, file: FrameFile, with_room: WithRoom[None]) -> None:
        self._name = file.path
        self._file = file._replace(path=file.path.with_name(file.path.name + ".new"))
        self._with_room = with_room
        access = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._out = os.open(self._file.path, access, 0o600)
        self._size = self._checked = 0
        self._pieces = self._indexes = 0

    def add_piece(self, piece: bytes) -> None:
        """Add a piece of the caller's state."""
        self._add(PIECE, self._pieces, piece)
        self._pieces += 1

    def check(self) -> None:
        """Sync, and read back the bytes that were added since the last check.

        Raises:
            Corrupt: if they differ from the bytes that were written.
        """
        os.fsync(self._out)
        with suppress(OSError):  # not from memory, where the system allows it
            os.posix_fadvise(self._out, 0, 0, os.POSIX_FADV_DONTNEED)
        at = self._checked
        for frame in self._file.scan(at, self._size):
            if isinstance(frame, Damage):
                break
            at = frame.end
        if at != self._size:
            raise Corrupt(f"{self._file.path.name} cannot be read back")
        self._checked = at

    def finish(self, number: int, base: int, index: Mapping[int, Stored]) -> Snapshot:
        """Add the index, and rename the snapshot to its final name.

        Raises:
            Corrupt: if it cannot be read back.
            OSError: if it cannot be written.
        """
        entries = bytearray()
        for key, stored in index.items():
            blocks = len(stored.table) // TABLE.itemsize
            entries += _ENTRY.pack(key, stored.size, blocks) + stored.table
            if len(entries) >= _INDEX_BYTES:
                self._add_index(entries)
        self._add_index(entries)
        self._add(END, number, _END.pack(base, self._pieces, self._indexes))
        self.check()
        os.rename(self._file.path, self._name)
        try:
            sync_directory(self._name.parent)
        except BaseException:  # it must not turn up after the next one
            self._name.unlink(missing_ok=True)
            raise
        return Snapshot(self._file._replace(path=self._name), number, base, self._size)

    def close(self, *, keep: bool) -> None:
        """Close the file."""
        os.close(self._out)
        if not keep:
            self._file.path.unlink(missing_ok=True)

    def _add_index(self, entries: bytearray) -> None:
        self._add(INDEX, self._indexes, bytes(entries))
        self._indexes += 1
        entries.clear()

    def _add(self, kind: int, number: int, body: bytes) -> None:
        data = self._file.encode(self._size, kind, number, body)
        self._with_room(lambda: write_all(self._out, data, self._size))
        self._size += len(data)


def load(file: FrameFile) -> tuple[Snapshot, dict[int, Stored]]:
    """Return the facts and the index of a snapshot; its pieces are verified, and not kept.

    Raises:
        Corrupt: if any of it is damaged.
        OSError: if it cannot be opened.
    """
    index: dict[int, Stored] = {}
    pieces = indexes = 0
    last: Frame | None = None
    for frame in _frames(file):
        if last is not None:
            raise Corrupt(f"{file.path.name} goes on behind its end")
        if frame.kind == PIECE:
            pieces += 1
        elif frame.kind == INDEX:
            indexes += 1
            _read_index(frame.body, index)
        else:
            last = frame
    if last is None:
        raise Corrupt(f"{file.path.name} has no end")
    base, *counts = _END.unpack(last.body)
    if counts != [pieces, indexes]:
        raise Corrupt(f"{file.path.name} lacks a part")
    return Snapshot(file, last.number, base, last.end), index


def pieces_of(file: FrameFile) -> Iterator[bytes]:
    """Yield the caller's pieces.

    Raises:
        Corrupt: if one of them is damaged, after those before it.
    """
    try:
        for frame in _frames(file):
            if frame.kind != PIECE:
                return
            yield frame.body
        raise Corrupt(f"{file.path.name} has no end")
    except OSError as error:
        raise Corrupt(f"{file.path.name} cannot be read: {error}") from error


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _frames(file: FrameFile) -> Iterator[Frame]:
    for frame in file.scan():
        if isinstance(frame, Damage):
            raise Corrupt(f"{frame.where} are damaged")
        yield frame


def _read_index(body: bytes, index: dict[int, Stored]) -> None:
    at = 0
    while at < len(body):
        number, size, blocks = _ENTRY.unpack_from(body, at)
        at += _ENTRY.size
        index[number] = Stored(size, body[at : at + blocks * TABLE.itemsize])
        at += blocks * TABLE.itemsize
