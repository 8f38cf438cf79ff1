"""Log of the disk store: records and drops in the order of their commits, in append-only files.

A record that is not the first of its commit is in a JOINED frame, which states the distance to the
beginning of the commit. After a power failure during a commit, its last frames may exist without
earlier ones: `committed` leaves them out, as they were not acknowledged and build on missing ones.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from routetrace.server.store.disk.blocks import write_all
from routetrace.server.store.disk.frames import (
    DROP,
    END,
    JOINED,
    RECORD,
    Damage,
    Frame,
    FrameFile,
)
from routetrace.server.store.disk.snapshot import Stored, sync_directory
from routetrace.server.store.interface import Record

_SIZE = _PREVIOUS = struct.Struct("<Q")
_BACK = struct.Struct("<I")  # bytes of the commit before a JOINED frame, behind its body
_DROPS = 1 << 16


@dataclass
class Segment:
    """File of the log."""

    file: FrameFile
    size: int
    """Durable bytes."""
    last: int
    """Last number in the store at the time of its last record."""


class Log:
    """Files of the log. Only the writer thread calls it, except for `records`.

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
        """Size of all files in bytes."""
        return sum(segment.size for segment in self.segments)

    def append(self, frames: Iterable[tuple[int, int, bytes, int]], last: int) -> None:
        """Append frames as (kind, number, body, extra); all are durable when this returns.

        Raises:
            OSError: if they are not. They are cut off again before anything else is appended, and
                what is appended then is written anew: no failed sync is repeated in the hope that
                it works.
        """
        if self._out is None:
            self._out = self._begin()
        segment = self.segments[-1]
        self.mend()
        data = bytearray()
        for kind, number, body, extra in frames:
            at = segment.size + len(data)
            if data and kind == RECORD:
                joined = body + _BACK.pack(len(data))
                data += segment.file.encode(at, JOINED, number, joined, extra)
            else:
                data += segment.file.encode(at, kind, number, body, extra)
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
        """End the file and return the id of the next one, which later frames go to.

        Raises:
            OSError: if frames of a failed append cannot be cut off.
        """
        if self._out is not None:
            # Tells damage to its last record from an unfinished commit.
            with suppress(OSError):  # a full disk: it looks like an unfinished one
                self.append([(END, 0, b"", 0)], self.segments[-1].last)
            self.mend()
            os.close(self._out)
            self._out = None
        return self.next_id

    def mend(self) -> None:
        """Cut frames of a failed append off; the blocks that they name are free behind this.

        Raises:
            OSError: if they may still be there.
        """
        if self._torn and self._out is not None:
            os.ftruncate(self._out, self.segments[-1].size)
            os.fdatasync(self._out)
            self._torn = False

    def trim(self, number: int, base: int) -> None:
        """Delete files that a snapshot with this number and this base does not need."""
        kept = [s for s in self.segments if s.file.id >= base or s.last > number]
        for segment in self.segments:
            if segment not in kept:
                with suppress(OSError):  # it stays, and says nothing that is not known
                    segment.file.path.unlink()
        self.segments = kept


def record_frame(
    record: Record, stored: Stored | None, previous: int
) -> tuple[int, int, bytes, int]:
    """Return the frame of a record; `previous` is the number of the record before it."""
    where = _SIZE.pack(stored.size) + stored.table if stored else b""
    body = record.header + _PREVIOUS.pack(previous) + where
    return RECORD, record.number, body, len(record.header)


def header_of(frame: Frame) -> bytes:
    """Return the header in the frame of a record."""
    return frame.body[: frame.extra]


def previous_of(frame: Frame) -> int:
    """Return the number of the record before it: a gap between both shows missing records."""
    previous: int = _PREVIOUS.unpack_from(frame.body, frame.extra)[0]
    return previous


def stored_of(frame: Frame) -> Stored | None:
    """Return the place of a record's payload."""
    where = frame.body[frame.extra + _PREVIOUS.size :]
    return Stored(_SIZE.unpack_from(where)[0], where[_SIZE.size :]) if where else None


def drop_frames(numbers: list[int]) -> list[tuple[int, int, bytes, int]]:
    """Return the frames that drop these payloads: one or more."""
    parts = (numbers[at : at + _DROPS] for at in range(0, max(1, len(numbers)), _DROPS))
    return [(DROP, 0, np.array(part, "<u8").tobytes(), 0) for part in parts]


def dropped_by(frame: Frame) -> list[int]:
    """Return the numbers in a frame of dropped payloads."""
    numbers: list[int] = np.frombuffer(frame.body, "<u8").tolist()
    return numbers


def committed(frames: Iterator[Frame | Damage]) -> Iterator[Frame | Damage]:
    """Yield frames, without those of a last commit that are behind damage to that commit."""
    for frame in frames:
        if isinstance(frame, Frame):
            yield _alone(frame)
            continue
        behind: list[Frame | Damage] = []  # in the same commit
        for other in frames:
            if isinstance(other, Frame) and _begins(other) > frame.start:
                yield frame
                yield from map(_alone, behind)
                yield _alone(other)
                break
            behind.append(other)
        else:
            yield frame._replace(last=True)


def _begins(frame: Frame) -> int:
    """Return the offset at which the commit of a frame begins."""
    back: int = _BACK.unpack(frame.body[-_BACK.size :])[0] if frame.kind == JOINED else 0
    return frame.start - back


def _alone(frame: Frame | Damage) -> Frame | Damage:
    """Return a JOINED frame as the record that it is."""
    if isinstance(frame, Damage) or frame.kind != JOINED:
        return frame
    return frame._replace(kind=RECORD, body=frame.body[: -_BACK.size])


def records(segments: list[Segment], after: int) -> Iterator[Frame | None]:
    """Yield records above a number, ascending; None where records are, or may be, missing."""
    damaged = False
    for file, size in [(segment.file, segment.size) for segment in segments]:
        with suppress(OSError):  # a snapshot covers it by now, or it was reported
            for frame in committed(file.scan(0, size)):
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
