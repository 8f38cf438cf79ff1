"""Put and expire at a steady load, for many times the capacity: does the store stay as it was?

    python benchmarks/soak.py [--capacity-mb 512] [--times 20] [--dir DIR] [--seed 0]

Records of 20 KB to 1.1 MB go through the real store in groups, each with its commit to the disk.
Before it would be full, records are dropped as a sweep drops them, with a new snapshot. Which ones
is random, so that free space is scattered as badly as can be. A plain file of the same size,
written over and over with the same bytes and one fdatasync a group, runs beside it, group by group:
what the disk itself does with them. One line per fill: the file's size, and the time of a commit,
and of one of the plain file, as ratios to the first fill.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from routetrace.common.errors import Overloaded
from routetrace.server.store.disk.store import DiskStore
from routetrace.server.store.interface import Record

_NOISE = 64 << 20
_FULL = 0.85
_EMPTIER = 0.75


@dataclass
class Fill:
    """Measurements of one write of the capacity."""

    commits: list[float] = field(default_factory=list)
    rival: list[float] = field(default_factory=list)
    sweeps: list[float] = field(default_factory=list)
    written: int = 0
    file_bytes: int = 0


class Rival:
    """A plain file, written round and round."""

    def __init__(self, path: Path, size: int) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT)
        self._size = size
        self._at = 0

    def write(self, parts: list[bytes]) -> None:
        """Write a group, and wait for the disk."""
        for part in parts:
            if self._at + len(part) > self._size:
                self._at = 0
            os.pwrite(self._file, part, self._at)
            self._at += len(part)
        os.fdatasync(self._file)


class Soak:
    """A store under a steady load."""

    def __init__(self, directory: Path, capacity: int, group: int, seed: int) -> None:
        self._random = random.Random(seed)
        self._noise = self._random.randbytes(_NOISE)
        self._capacity = capacity
        self._group = group
        self._store = DiskStore(directory / "store", capacity_bytes=capacity)
        self._rival = Rival(directory / "rival", int(capacity * _FULL))
        self._number = 0
        self._live: dict[int, tuple[int, int]] = {}  # size, where in the noise
        self.refused = 0
        self.refused_with_room = 0

    def fill(self) -> Fill:
        """Write the capacity once."""
        fill = Fill()
        while fill.written < self._capacity:
            if self._store.stats().used_bytes > self._capacity * _FULL:
                self._sweep(fill)
            self._put(fill)
        fill.file_bytes = self._store.stats().file_bytes
        return fill

    def _put(self, fill: Fill) -> None:
        records, places, size = [], [], 0
        while size < self._group:
            self._number += 1
            length = round(20_000 * (55 ** self._random.random()))  # to 1.1 MB
            at = self._random.randrange(_NOISE - length)
            header = self._noise[at : at + 300 + length // 300]
            records.append(Record(self._number, header, self._noise[at : at + length]))
            places.append((length, at))
            size += length
        begin = time.perf_counter()
        futures = [self._store.append(record) for record in records]
        errors = [future.exception() for future in futures]
        fill.commits.append(time.perf_counter() - begin)
        for record, place, error in zip(records, places, errors, strict=True):
            if error is None:
                self._live[record.number] = place
                fill.written += place[0]
            elif isinstance(error, Overloaded):
                self.refused += 1
                used = self._store.stats().used_bytes
                self.refused_with_room += used + size < self._capacity
            else:
                raise error
        self._number = self._store.last_number()
        begin = time.perf_counter()
        self._rival.write([bytes(record.payload) for record in records])
        fill.rival.append(time.perf_counter() - begin)

    def _sweep(self, fill: Fill) -> None:
        numbers = list(self._live)
        self._random.shuffle(numbers)
        excess = self._store.stats().used_bytes - self._capacity * _EMPTIER
        drop = []
        while excess > 0:
            drop.append(numbers.pop())
            excess -= self._live.pop(drop[-1])[0]
        pieces = self._capacity // 50 >> 20
        snapshot = (self._noise[at << 20 : (at + 1) << 20] for at in range(pieces))
        begin = time.perf_counter()
        self._store.compact((self._number, snapshot), drop)
        fill.sweeps.append(time.perf_counter() - begin)

    def check(self) -> int:
        """Read everything that should be there; return how many records."""
        for number, (size, at) in self._live.items():
            if self._store.read(number, [(0, size)]) != [self._noise[at : at + size]]:
                raise SystemExit(f"record {number} is not what was stored")
        return len(self._live)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--capacity-mb", type=int, default=512)
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--group-mb", type=float, default=4, help="what one commit carries")
    parser.add_argument("--dir", type=Path, default=None, help="on the disk to measure")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 31))
    options = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="soak-", dir=options.dir))
    group = int(options.group_mb * (1 << 20))
    capacity = options.capacity_mb << 20
    print(f"seed {options.seed}, capacity {options.capacity_mb} MiB, {group} bytes a commit")
    print("each figure in brackets is the ratio to the first fill")
    print("fill  file/capacity   commit median      p99       plain file     commit/plain  sweep")
    soak = Soak(directory, capacity, group, options.seed)
    try:
        first: list[float] = []
        for number in range(1, options.times + 1):
            fill = soak.fill()
            commit, plain = statistics.median(fill.commits), statistics.median(fill.rival)
            high = statistics.quantiles(fill.commits, n=100)[98]
            size = fill.file_bytes / capacity
            first = first or [size, commit, high, plain, commit / plain]
            print(
                f"{number:4}  {size:5.3f} ({size / first[0]:.3f})"
                f"  {commit * 1e3:6.1f} ms ({commit / first[1]:.2f})"
                f"  {high * 1e3:4.0f} ms ({high / first[2]:.2f})"
                f"  {plain * 1e3:5.1f} ms ({plain / first[3]:.2f})"
                f"  {commit / plain:4.1f} ({commit / plain / first[4]:.2f})"
                f"  {max(fill.sweeps, default=0.0) * 1e3:5.0f} ms",
                flush=True,
            )
        print(
            f"refused {soak.refused}, of them though there was room {soak.refused_with_room}; "
            f"read back {soak.check()} records, all as stored"
        )
    finally:
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main()
