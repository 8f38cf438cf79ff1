"""The payloads of the disk store: one file of blocks of one size, which are used again and again.

A payload lies in any blocks that are free, so that scattered space is as good as any other. Which
blocks those are, and the payload's running checksum at the end of each (`checksums.py`), is its
table, which the log and the snapshots keep.
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

from routetrace.server.checksums import STEP, Payload, running
from routetrace.server.disk_reserve import NO_ROOM
from routetrace.server.store import check_ranges, full
from routetrace.v1.errors import Corrupt

BLOCK_BYTES = STEP
#: Of a table: the block, and the checksum of the payload from its beginning to the block's end.
TABLE = np.dtype([("block", "<u4"), ("checksum", "<u4")])

Array = np.ndarray[Any, np.dtype[Any]]

#: Of preadv, by whether to wait for the disk.
_FLAGS = getattr(os, "RWF_NOWAIT", 0), 0

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

    def write(self, payload: Payload, sums: Sequence[int] | None = None) -> bytes:
        """Writes a payload into free blocks; returns its table. Durable after `sync`.

        Args:
            payload: what to write.
            sums: its running checksums, where they are known.

        Raises:
            Overloaded: if there are not enough blocks.
            OSError: if it can not be written. Nothing is taken then.
        """
        sums = running(payload) if sums is None else sums
        try:
            return self._write(memoryview(payload), sums)
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
        self._next = 0  # there may be free blocks that the disk still holds
        return self._write(memoryview(payload), sums)

    def _write(self, view: memoryview, sums: Sequence[int]) -> bytes:
        runs = self._take(blocks_of(len(view)))
        table = np.empty(len(sums), TABLE)
        at = 0
        for first, count in runs:
            table["block"][at : at + count] = np.arange(first, first + count)
            at += count
        table["checksum"] = sums
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
        self,
        number: int,
        size: int,
        table: bytes,
        ranges: Sequence[tuple[int, int]],
        wait: bool = True,
    ) -> list[Payload]:
        """Ranges of a payload of `size` bytes. Every block that is touched is checked, every time.

        Raises:
            Corrupt: if a range is outside of it, or a block of it is damaged.
            BlockingIOError: if the disk is to be waited for, and `wait` is False.
        """
        check_ranges(size, ranges, number)
        entries = np.frombuffer(table, TABLE)
        found: list[Payload] = [b""] * len(ranges)
        # Ranges lie close together: blocks that follow each other are read at once, and once.
        for first, stop, members in _neighbours(ranges):
            begin = first * BLOCK_BYTES
            view = self._read_blocks(number, size, entries, first, stop, wait)
            for index in members:
                offset, length = ranges[index]
                found[index] = view[offset - begin : offset - begin + length]
        return found

    def _read_blocks(
        self, number: int, size: int, entries: Array, first: int, stop: int, wait: bool
    ) -> memoryview:
        begin = first * BLOCK_BYTES
        view = memoryview(np.empty(min(stop * BLOCK_BYTES, size) - begin, np.uint8))  # type: ignore[arg-type]
        blocks = entries["block"][first:stop].tolist()
        cuts = [i for i in range(1, len(blocks)) if blocks[i] != blocks[i - 1] + 1]
        try:
            for start, end in pairwise([0, *cuts, len(blocks)]):
                part = view[start * BLOCK_BYTES : end * BLOCK_BYTES]
                got = os.preadv(self._file, [part], blocks[start] * BLOCK_BYTES, _FLAGS[wait])
                if got < len(part):
                    if not wait:
                        raise BlockingIOError  # the rest is not in memory
                    raise Corrupt(f"record {number} lies outside of the file")
        except OSError as error:
            if not wait:
                raise BlockingIOError from error  # or this file system can not tell
            raise Corrupt(f"record {number} can not be read: {error}") from error
        before = entries["checksum"].item(first - 1) if first else 0
        if crc32(view, before) != entries["checksum"].item(stop - 1):
            raise Corrupt(f"record {number} does not match its checksum")
        return view


def _neighbours(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int, list[int]]]:
    """Blocks [first, stop) that follow each other, and the ranges, by index, that lie in them."""
    touched = sorted(
        (offset // BLOCK_BYTES, blocks_of(offset + length), index)
        for index, (offset, length) in enumerate(ranges)
        if length
    )
    found: list[tuple[int, int, list[int]]] = []
    for first, stop, index in touched:
        if found and first <= found[-1][1]:
            begin, end, members = found[-1]
            members.append(index)
            found[-1] = begin, max(end, stop), members
        else:
            found.append((first, stop, [index]))
    return found


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
