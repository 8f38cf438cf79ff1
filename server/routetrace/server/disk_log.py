"""The log of the disk store: what was committed, in order, in files that are only appended to."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from routetrace.server.disk_blocks import write_all
from routetrace.server.disk_frames import DROP, END, RECORD, Damage, Frame, FrameFile
from routetrace.server.disk_snapshot import Stored, sync_directory
from routetrace.server.store import Record

_SIZE = _PREVIOUS = struct.Struct("<Q")
_DROPS = 1 << 16


@dataclass
class Segment:
    """One file of the log."""

    file: FrameFile
    size: int
    """Bytes of it that are durable."""
    last: int
    """The last number in the store when it was written to."""


class Log:
    """Appends to the log, and knows its files. The writer's own, but for `records`.

    Args:
        directory: of its files.
        segments: those that are there.
        next_id: of the next one.
    """

    def __init__(self, directory: Path, segments: list[Segment], next_id: int) -> None:
        self._directory = directory
        self.segments = segments
        self.next_id = next_id
        self._out: int | None = None
        self._torn = False

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(segment.size for segment in self.segments)

    def append(self, frames: Iterable[tuple[int, int, bytes, int]], last: int) -> None:
        """Appends (kind, number, body, extra), all of them durable when this returns.

        Raises:
            OSError: if they are not. They are cut off again before anything else is appended, and
                what is appended then is written anew: no failed sync is repeated in the hope that
                it works.
        """
        if self._out is None:
            self._out = self._begin()
        segment = self.segments[-1]
        self._mend()
        data = bytearray()
        for kind, number, body, extra in frames:
            data += segment.file.encode(segment.size + len(data), kind, number, body, extra)
        self._torn = True
        write_all(self._out, data, segment.size)
        os.fdatasync(self._out)
        self._torn = False
        segment.size += len(data)
        segment.last = last

    def _begin(self) -> int:
        file = FrameFile.new(self._directory, "log", self.next_id)
        out = os.open(file.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            sync_directory(self._directory)
        except BaseException:
            os.close(out)
            file.path.unlink(missing_ok=True)
            raise
        self.next_id += 1
        self._torn = False
        self.segments.append(Segment(file, 0, 0))
        return out

    def rotate(self) -> int:
        """Ends the file; what is appended from now on goes into a new one. Returns its id.

        Raises:
            OSError: if what could not be appended before can not be cut off.
        """
        if self._out is not None:
            # So that damage to its last record is known from a commit that was under way.
            with suppress(OSError):  # a full disk: it looks like one that was not ended
                self.append([(END, 0, b"", 0)], self.segments[-1].last)
            if self._torn:
                self._mend()
                os.fdatasync(self._out)
            os.close(self._out)
            self._out = None
        return self.next_id

    def _mend(self) -> None:
        if self._torn and self._out is not None:
            os.ftruncate(self._out, self.segments[-1].size)

    def trim(self, number: int, base: int) -> None:
        """Deletes files that a snapshot with this number and this base does not need."""
        kept = [s for s in self.segments if s.file.id >= base or s.last > number]
        for segment in self.segments:
            if segment not in kept:
                with suppress(OSError):  # it stays, and says nothing that is not known
                    segment.file.path.unlink()
        self.segments = kept


def record_frame(
    record: Record, stored: Stored | None, previous: int
) -> tuple[int, int, bytes, int]:
    """A record as it is appended; `previous` is the number of the one before it."""
    where = _SIZE.pack(stored.size) + stored.table if stored else b""
    body = record.header + _PREVIOUS.pack(previous) + where
    return RECORD, record.number, body, len(record.header)


def header_of(frame: Frame) -> bytes:
    """The header in a record's frame."""
    return frame.body[: frame.extra]


def previous_of(frame: Frame) -> int:
    """The number of the record before it: what is missing between them is known by it."""
    previous: int = _PREVIOUS.unpack_from(frame.body, frame.extra)[0]
    return previous


def stored_of(frame: Frame) -> Stored | None:
    """Where a record's payload is."""
    where = frame.body[frame.extra + _PREVIOUS.size :]
    return Stored(_SIZE.unpack_from(where)[0], where[_SIZE.size :]) if where else None


def drop_frames(numbers: list[int]) -> list[tuple[int, int, bytes, int]]:
    """Dropped payloads as they are appended."""
    parts = (numbers[at : at + _DROPS] for at in range(0, len(numbers), _DROPS))
    return [(DROP, 0, np.array(part, "<u8").tobytes(), 0) for part in parts]


def dropped_by(frame: Frame) -> list[int]:
    """The numbers in a frame of dropped payloads."""
    numbers: list[int] = np.frombuffer(frame.body, "<u8").tolist()
    return numbers


def records(segments: list[Segment], after: int) -> Iterator[Frame | None]:
    """Records above a number, ascending; None where one or more are missing, or may be."""
    damaged = False
    for file, size in [(segment.file, segment.size) for segment in segments]:
        with suppress(OSError):  # a snapshot covers it by now, or it was reported
            for frame in file.scan(0, size):
                if isinstance(frame, Damage):
                    damaged = True
                elif frame.kind == RECORD:
                    damaged = False
                    if frame.number > after:
                        if previous_of(frame) > after:
                            yield None
                        after = frame.number
                        yield frame
    if damaged:
        yield None
