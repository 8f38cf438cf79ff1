"""The payloads of the disk store: one file of blocks of one size, which are used again and again.

A payload lies in any blocks that are free, so that scattered space is as good as any other. Which
blocks those are, and a checksum for each, is its table, which the log and the snapshots keep.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from ctypes import CDLL, c_int64
from itertools import pairwise
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

from routetrace.server.disk_reserve import NO_ROOM
from routetrace.server.store import check_ranges, full
from routetrace.v1.errors import Corrupt

BLOCK_BYTES = 1 << 14
#: Of a table: the block, and the checksum of the payload's number, the place in it, and the bytes.
TABLE = np.dtype([("block", "<u4"), ("checksum", "<u4")])

Array = np.ndarray[Any, np.dtype[Any]]

_libc = CDLL(None)
_PUNCH_HOLE = 0x03  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE


class Blocks:
    """The file of blocks. Thread-safe; writes are the caller's to order."""

    def __init__(self, path: Path, capacity_bytes: int) -> None:
        self.path = path
        self._capacity = capacity_bytes
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        in_file = self._blocks_in_file()
        self._taken = bytearray(max(in_file, capacity_bytes // BLOCK_BYTES))
        self._flags = np.frombuffer(self._taken, np.uint8)  # the same bytes
        self._end = in_file
        self._lock = threading.Lock()
        self._next = 0
        self.count = 0
        """Blocks that are taken."""

    def close(self) -> None:
        """Lets go of the file."""
        os.close(self._file)

    def file_bytes(self) -> int:
        """Disk space taken."""
        return os.fstat(self._file).st_blocks * 512

    def _blocks_in_file(self) -> int:
        return blocks_of(os.fstat(self._file).st_size)

    # ------------------------------------------------------------------ space

    def claim(self, table: bytes) -> bool:
        """Takes the blocks of a table that was read back; False if one of them is taken.

        Raises:
            Corrupt: if there are no such blocks.
        """
        blocks = _blocks(table)
        if blocks.max() >= len(self._taken):
            raise Corrupt(f"block {blocks.max()} is not there")
        with self._lock:
            if self._flags[blocks].any():
                return False
            self._flags[blocks] = 1
            self.count += len(blocks)
        return True

    def free(self, table: bytes) -> None:
        """Gives the blocks of a table back."""
        blocks = _blocks(table)
        with self._lock:
            self._flags[blocks] = 0
            self.count -= len(blocks)

    def _take(self, count: int) -> list[tuple[int, int]]:
        """Free blocks as runs (first, number); new ones only where the file has too few."""
        runs: list[tuple[int, int]] = []
        with self._lock:
            if self.count + count > len(self._taken):
                raise full(self._capacity)
            self._end = max(self._end, self.count + count)
            self.count += count
            while count:
                # On from the last ones, so that what is written together lies together.
                start = self._taken.find(0, self._next, self._end)
                if start < 0:
                    self._next = 0
                    continue
                limit = min(start + count, self._end)
                stop = self._taken.find(1, start, limit)
                stop = stop if stop >= 0 else limit
                self._taken[start:stop] = b"\1" * (stop - start)
                runs.append((start, stop - start))
                count -= stop - start
                self._next = stop
        return runs

    def give_back(self, size: int) -> None:
        """Gives the disk about `size` bytes of free blocks back, if it can take them."""
        blocks = blocks_of(size)
        with self._lock:
            self._next = 0  # the others first
            stop = self._end
            while blocks > 0 and (stop := self._taken.rfind(0, 0, stop) + 1) > 0:
                start = max(self._taken.rfind(1, 0, stop) + 1, stop - blocks)
                offset, length = start * BLOCK_BYTES, (stop - start) * BLOCK_BYTES
                _libc.fallocate(self._file, _PUNCH_HOLE, c_int64(offset), c_int64(length))
                blocks -= stop - start
                stop = start

    # ------------------------------------------------------------------ bytes

    def write(self, number: int, payload: bytes) -> bytes:
        """Writes a payload into free blocks; returns its table. Durable after `sync`.

        Raises:
            Overloaded: if there are not enough blocks.
            OSError: if it can not be written. Nothing is taken then.
        """
        try:
            return self._write(number, memoryview(payload))
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
        self._next = 0  # there may be free blocks that the disk still holds
        return self._write(number, memoryview(payload))

    def _write(self, number: int, view: memoryview) -> bytes:
        runs = self._take(blocks_of(len(view)))
        table = np.empty(sum(count for _, count in runs), TABLE)
        at = 0
        for first, count in runs:
            table["block"][at : at + count] = range(first, first + count)
            at += count
        table["checksum"] = [
            _checksum(number, i, view[i * BLOCK_BYTES : (i + 1) * BLOCK_BYTES])
            for i in range(len(table))
        ]
        packed = table.tobytes()
        try:
            at = 0
            for first, count in runs:
                part = view[at : at + count * BLOCK_BYTES]
                write_all(self._file, part, first * BLOCK_BYTES)
                at += len(part)
        except BaseException:
            self.free(packed)
            self._end = self._blocks_in_file()
            raise
        return packed

    def sync(self) -> None:
        """Waits until all that was written is on the disk."""
        os.fdatasync(self._file)

    def read(
        self, number: int, size: int, table: bytes, ranges: Sequence[tuple[int, int]]
    ) -> list[bytes]:
        """Ranges of a payload of `size` bytes. Every block that is touched is checked, every time.

        Raises:
            Corrupt: if a range is outside of it, or a block of it is damaged.
        """
        check_ranges(size, ranges, number)
        entries = np.frombuffer(table, TABLE)
        touched = sorted(
            (offset // BLOCK_BYTES, blocks_of(offset + length))
            for offset, length in ranges
            if length
        )
        # Ranges lie close together: blocks that follow each other are read at once, and once.
        spans: list[list[int]] = []
        for first, stop in touched:
            if spans and first <= spans[-1][1]:
                spans[-1][1] = max(spans[-1][1], stop)
            else:
                spans.append([first, stop])
        data: dict[int, tuple[int, memoryview]] = {}
        for first, stop in spans:
            span = (first * BLOCK_BYTES, self._read_blocks(number, size, entries, first, stop))
            data.update(dict.fromkeys(range(first, stop), span))
        found = []
        for offset, length in ranges:
            if length:
                begin, view = data[offset // BLOCK_BYTES]
                found.append(bytes(view[offset - begin : offset - begin + length]))
            else:
                found.append(b"")
        return found

    def _read_blocks(
        self, number: int, size: int, entries: Array, first: int, stop: int
    ) -> memoryview:
        begin = first * BLOCK_BYTES
        view = memoryview(bytearray(min(stop * BLOCK_BYTES, size) - begin))
        blocks = entries["block"][first:stop].astype(np.int64)
        cuts = [0, *(np.flatnonzero(np.diff(blocks) != 1) + 1).tolist(), stop - first]
        try:
            for start, end in pairwise(cuts):
                part = view[start * BLOCK_BYTES : end * BLOCK_BYTES]
                got = os.preadv(self._file, [part], int(blocks[start]) * BLOCK_BYTES)
                if got < len(part):
                    raise Corrupt(f"record {number} lies outside of the file")
        except OSError as error:
            raise Corrupt(f"record {number} can not be read: {error}") from error
        for i, checksum in enumerate(entries["checksum"][first:stop].tolist()):
            part = view[i * BLOCK_BYTES : (i + 1) * BLOCK_BYTES]
            if _checksum(number, first + i, part) != checksum:
                raise Corrupt(f"record {number} does not match its checksum")
        return view


def blocks_of(size: int) -> int:
    """Blocks that so many bytes take."""
    return -(-size // BLOCK_BYTES)


def write_all(file: int, data: bytes | bytearray | memoryview, at: int) -> None:
    """Writes everything, or raises OSError."""
    view = memoryview(data)
    while view:
        written = os.pwrite(file, view, at)
        view, at = view[written:], at + written


def _blocks(table: bytes) -> Array:
    return np.frombuffer(table, TABLE)["block"]


def _checksum(number: int, index: int, data: memoryview) -> int:
    # The number and the place are in the sum: blocks must not pass for one another.
    return crc32(data, crc32(number.to_bytes(8, "little") + index.to_bytes(4, "little")))
