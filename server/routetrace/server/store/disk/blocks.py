"""Payloads of the disk store: one file of reusable blocks of one size.

A payload lies in any free blocks, so that scattered space is as good as any other. The table of a
payload lists its blocks and its running checksum at the end of each (`checksums.py`); the log and
the snapshots store it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from ctypes import CDLL, c_int64
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from routetrace.common.checksum import crc32
from routetrace.common.errors import Corrupt
from routetrace.server.store.disk.reserve import NO_ROOM
from routetrace.server.store.interface import check_ranges, full
from routetrace.server.wire.checksums import STEP, Payload, running

BLOCK_BYTES = STEP
#: Of a table: the block, and the checksum of the payload from its beginning to the block's end.
TABLE = np.dtype([("block", "<u4"), ("checksum", "<u4")])

Array = np.ndarray[Any, np.dtype[Any]]

#: Of preadv, by whether to wait for the disk.
_FLAGS = getattr(os, "RWF_NOWAIT", 0), 0

_libc = CDLL(None)
_PUNCH_HOLE = 0x03  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE


class Blocks:
    """File of blocks. Thread-safe; the caller orders writes."""

    def __init__(self, path: Path, capacity_bytes: int, *, read_only: bool = False) -> None:
        self.path = path
        self._capacity = capacity_bytes
        access = os.O_RDONLY if read_only else os.O_RDWR | os.O_CREAT
        self._file = os.open(path, access | os.O_CLOEXEC, 0o600)
        in_file = self._blocks_in_file()
        self._taken = bytearray(max(in_file, capacity_bytes // BLOCK_BYTES))
        self._flags = np.frombuffer(self._taken, np.uint8)  # the same bytes
        self._end = in_file
        self._lock = threading.Lock()
        self._next = 0
        self.count = 0
        """Allocated blocks."""

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def file_bytes(self) -> int:
        """Return the disk space of the file."""
        return os.fstat(self._file).st_blocks * 512

    def _blocks_in_file(self) -> int:
        return blocks_of(os.fstat(self._file).st_size)

    # ------------------------------------------------------------------ space

    def claim(self, table: bytes) -> bool:
        """Allocate the blocks of a stored table; return False if one is allocated already.

        Raises:
            Corrupt: if a block does not exist.
        """
        blocks = _blocks(table)
        if blocks.max() >= len(self._taken):
            raise Corrupt(f"block {blocks.max()} does not exist")
        with self._lock:
            if self._flags[blocks].any():
                return False
            self._flags[blocks] = 1
            self.count += len(blocks)
        return True

    def free(self, table: bytes) -> None:
        """Free the blocks of a table."""
        blocks = _blocks(table)
        with self._lock:
            self._flags[blocks] = 0
            self.count -= len(blocks)

    def _take(self, count: int) -> list[tuple[int, int]]:
        """Allocate blocks as runs (first, count); extend the file only if it has too few."""
        runs: list[tuple[int, int]] = []
        with self._lock:
            if self.count + count > len(self._taken):
                raise full(self._capacity)
            self._end = max(self._end, self.count + count)
            self.count += count
            while count:
                # Continue after the last ones, so that data written together lies together.
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
        """Return about `size` bytes of free blocks to the file system, if it supports that."""
        blocks = blocks_of(size)
        with self._lock:
            self._next = 0  # reuse the remaining blocks first
            stop = self._end
            while blocks > 0 and (stop := self._taken.rfind(0, 0, stop) + 1) > 0:
                start = max(self._taken.rfind(1, 0, stop) + 1, stop - blocks)
                offset, length = start * BLOCK_BYTES, (stop - start) * BLOCK_BYTES
                _libc.fallocate(self._file, _PUNCH_HOLE, c_int64(offset), c_int64(length))
                blocks -= stop - start
                stop = start

    # ------------------------------------------------------------------ bytes

    def write(self, payload: Payload, sums: Sequence[int] | None = None) -> bytes:
        """Write a payload into free blocks; return its table. Durable after `sync`.

        Args:
            payload: bytes to write.
            sums: running checksums of the payload, if known.

        Raises:
            Overloaded: if there are not enough blocks.
            OSError: if the write fails; no block is allocated then.
        """
        sums = running(payload) if sums is None else sums
        try:
            return self._write(memoryview(payload), sums)
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
        self._next = 0  # some free blocks may still have disk space
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
            self._put(view, runs)
        except BaseException:
            self.free(packed)
            self._end = self._blocks_in_file()
            raise
        return packed

    def _put(self, view: memoryview, runs: Sequence[tuple[int, int]]) -> None:
        at = 0
        for first, count in runs:
            part = view[at : at + count * BLOCK_BYTES]
            write_all(self._file, part, first * BLOCK_BYTES)
            at += len(part)

    def put(self, payload: Payload, table: bytes) -> None:
        """Write a payload into the blocks of its table, as another file holds it.

        Raises:
            OSError: if the write fails.
        """
        self._put(memoryview(payload), [(block, 1) for block in _blocks(table).tolist()])

    def sync(self) -> None:
        """Wait until all writes are durable."""
        os.fdatasync(self._file)

    def read(
        self,
        number: int,
        size: int,
        table: bytes,
        ranges: Sequence[tuple[int, int]],
        wait: bool = True,
    ) -> list[Payload]:
        """Return ranges of a payload of `size` bytes; every touched block is verified.

        Raises:
            Corrupt: if a range is outside of it, or a block of it is damaged.
            BlockingIOError: if `wait` is False and the data is not in memory.
        """
        check_ranges(size, ranges, number)
        entries = np.frombuffer(table, TABLE)
        found: list[Payload] = [b""] * len(ranges)
        # Ranges lie close together: adjacent blocks are read at once, and once.
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
                    raise Corrupt(f"record {number} is outside of the file")
        except OSError as error:
            if not wait:
                raise BlockingIOError from error  # or the file system does not support it
            raise Corrupt(f"record {number} cannot be read: {error}") from error
        before = entries["checksum"].item(first - 1) if first else 0
        if crc32(view, before) != entries["checksum"].item(stop - 1):
            raise Corrupt(f"record {number} does not match its checksum")
        return view


def _neighbours(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int, list[int]]]:
    """Return adjacent blocks [first, stop), each with the indices of the ranges in them."""
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
    """Return the number of blocks of `size` bytes."""
    return -(-size // BLOCK_BYTES)


def write_all(file: int, data: bytes | bytearray | memoryview, at: int) -> None:
    """Write all data, or raise OSError."""
    view = memoryview(data)
    while view:
        written = os.pwrite(file, view, at)
        view, at = view[written:], at + written


def _blocks(table: bytes) -> Array:
    return np.frombuffer(table, TABLE)["block"]
