"""Payloads on a local disk: a ring of bytes in a file without a name.

Records are written and released in the order of their chunks. Their places and checksums are in
memory alone, so the file is useless without the process, and vanishes with it however it ends.
"""

from __future__ import annotations

import logging
import os
import tempfile
import threading
import time
from collections import deque
from dataclasses import dataclass

from routetrace.common.checksum import crc32

#: Seconds without writes after the disk failed.
_REST_S = 5.0

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class Record:
    """Bytes on disk."""

    at: int
    """Offset among all bytes that the ring ever reserved."""
    size: int
    checksum: int
    free: bool = False


class Spill:
    """File in `directory` of at most `capacity` bytes; one thread writes."""

    def __init__(self, directory: str | os.PathLike[str], capacity: int) -> None:
        self._file = tempfile.TemporaryFile(dir=directory, buffering=0)  # noqa: SIM115
        self._fd = self._file.fileno()
        self._capacity = capacity
        self._lock = threading.Lock()
        self._records: deque[Record] = deque()  # not released, or after one that is not
        self._end = 0  # offset of the next record
        self._rests_until = 0.0
        #: Bytes of records that were not released.
        self.nbytes = 0

    def write(self, data: bytes) -> Record | None:
        """Write bytes; return None without room, or if the disk refuses them."""
        if time.monotonic() < self._rests_until:
            return None
        with self._lock:
            record = self._reserve(len(data), crc32(data))
        if record is None:
            return None
        try:
            written = 0
            while written < len(data):
                at = record.at % self._capacity + written
                written += os.pwrite(self._fd, memoryview(data)[written:], at)
        except OSError as error:
            _log.warning("routetrace: cannot spill, chunks stay in memory: %s", error)
            self._rests_until = time.monotonic() + _REST_S
            self.release(record)
            return None
        return record

    def read(self, record: Record) -> bytes | None:
        """Read the bytes of a record; return None if they are damaged."""
        at, parts, left = record.at % self._capacity, [], record.size
        try:
            while left and (part := os.pread(self._fd, left, at)):
                parts.append(part)
                at, left = at + len(part), left - len(part)
        except OSError:
            return None
        data = b"".join(parts)
        return data if not left and crc32(data) == record.checksum else None

    def release(self, record: Record) -> None:
        """Release a record."""
        with self._lock:
            record.free = True
            self.nbytes -= record.size
            while self._records and self._records[0].free:
                self._records.popleft()
            if not self._records and self._end:
                self._end = 0
                os.ftruncate(self._fd, 0)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _reserve(self, size: int, checksum: int) -> Record | None:
        at, start = self._end, self._records[0].at if self._records else self._end
        room = self._capacity - at % self._capacity
        if size > room:  # would cross the end of the file
            at += room
        if at + size > start + self._capacity:
            return None
        record = Record(at, size, checksum)
        self._records.append(record)
        self._end = at + size
        self.nbytes += size
        return record
