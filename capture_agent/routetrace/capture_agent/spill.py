"""Payloads on a local disk: a ring of bytes in a file that has no name.

Records are written and given back in the order of the chunks that they belong to. What is known of
them is in memory, with their checksums: the file alone is of no use to anybody, and nothing is left
of it once the process that holds it is gone, however it went.
"""

from __future__ import annotations

import logging
import os
import tempfile
import threading
import time
import zlib
from collections import deque
from dataclasses import dataclass

#: Seconds that a disk which failed is left alone.
_REST_S = 5.0

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class Record:
    """Bytes on the disk."""

    at: int
    """Where they are, of all bytes that the ring ever had room for."""
    size: int
    crc32: int
    free: bool = False


class Spill:
    """A file in `directory`, of `capacity` bytes at most. Written to by one thread."""

    def __init__(self, directory: str, capacity: int) -> None:
        self._file = tempfile.TemporaryFile(dir=directory, buffering=0)  # noqa: SIM115
        self._fd = self._file.fileno()
        self._capacity = capacity
        self._lock = threading.Lock()
        self._records: deque[Record] = deque()  # not given back, or behind one that is not
        self._end = 0  # where the next begins
        self._rests_until = 0.0
        #: Bytes of records that were not given back.
        self.nbytes = 0

    def write(self, data: bytes) -> Record | None:
        """Keeps bytes; None where there is no room, or the disk does not take them."""
        if time.monotonic() < self._rests_until:
            return None
        with self._lock:
            record = self._reserve(len(data), zlib.crc32(data))
        if record is None:
            return None
        try:
            written = 0
            while written < len(data):
                at = record.at % self._capacity + written
                written += os.pwrite(self._fd, memoryview(data)[written:], at)
        except OSError as error:
            _log.warning("routetrace: chunks stay in memory, as the disk failed: %s", error)
            self._rests_until = time.monotonic() + _REST_S
            self.give_back(record)
            return None
        return record

    def read(self, record: Record) -> bytes | None:
        """The bytes of a record; None if they are not what was written."""
        at, parts, left = record.at % self._capacity, [], record.size
        try:
            while left and (part := os.pread(self._fd, left, at)):
                parts.append(part)
                at, left = at + len(part), left - len(part)
        except OSError:
            return None
        data = b"".join(parts)
        return data if not left and zlib.crc32(data) == record.crc32 else None

    def give_back(self, record: Record) -> None:
        """A record is not needed any more."""
        with self._lock:
            record.free = True
            self.nbytes -= record.size
            while self._records and self._records[0].free:
                self._records.popleft()
            if not self._records and self._end:
                self._end = 0
                os.ftruncate(self._fd, 0)

    def close(self) -> None:
        """Gives the file back."""
        self._file.close()

    def _reserve(self, size: int, crc32: int) -> Record | None:
        at, start = self._end, self._records[0].at if self._records else self._end
        room = self._capacity - at % self._capacity
        if size > room:  # would cross the end of the file
            at += room
        if at + size > start + self._capacity:
            return None
        record = Record(at, size, crc32)
        self._records.append(record)
        self._end = at + size
        self.nbytes += size
        return record
