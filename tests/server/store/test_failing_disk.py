"""A disk that fails: which writes count, and the errors."""

from __future__ import annotations

import errno
import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from routetrace.common.errors import (
    NotFound,
    Overloaded,
    RouteTraceError,
    Unavailable,
)
from routetrace.server.store.disk.store import DiskStore
from routetrace.server.store.interface import Record
from support.servers.store_records import content, record
from support.servers.stores import CAPACITY, Disk, outcome, put, python, read, whole_snapshot

REFUSALS = [
    ({"pwrite": errno.ENOSPC}, Overloaded),
    ({"pwrite": errno.EDQUOT}, Overloaded),
    ({"pwrite": errno.EIO}, Unavailable),
    ({"fdatasync": errno.ENOSPC}, Overloaded),
    ({"fdatasync": errno.EIO}, Unavailable),
    ({"fdatasync": errno.EIO, "ftruncate": errno.EIO}, Unavailable),
]


@pytest.mark.parametrize(("refuse", "expected"), REFUSALS)
@pytest.mark.parametrize("header_only", [False, True])
def test_a_commit_error_acknowledges_nothing_and_appends_resume(
    tmp_path: Path, disk: Disk, refuse: dict[str, int], expected: type, header_only: bool
) -> None:
    store = DiskStore(tmp_path, capacity_bytes=CAPACITY)
    put(store, 1, 2)
    used = store.stats().used_bytes
    disk.refuse = refuse
    payload = b"" if header_only else content(99)
    for attempt in range(1, 3):
        with store._changed:
            futures = [store.append(Record(n, b"refused", payload)) for n in (3, 4, 5)]
        assert [type(future.exception(30)) for future in futures] == [expected] * 3
        assert all(future.exception(0).retry_after > 0 for future in futures)  # type: ignore[union-attr]
        assert store.last_number() == 2
        assert store.stats().failed_commits == attempt
        assert read(store, 2) == content(2)
    assert store.stats().used_bytes == used
    disk.refuse = {}
    store.append(Record(3, b"correct", payload)).result(30)
    store.close()
    # Nothing of what was refused comes back, not even where it reached the file.
    store = DiskStore(tmp_path, capacity_bytes=CAPACITY)
    found = [header for _, header in store.headers()]
    assert found == [record(1).header, record(2).header, b"correct"]
    assert [read(store, n) for n in (1, 2)] == [content(n) for n in (1, 2)]
    assert header_only or store.read(3, [(0, len(payload))]) == [payload]
    assert store.stats().damaged_records == 0
    store.close()


@pytest.mark.parametrize("refused", ["pwrite", "fdatasync", "fsync", "rename"])
def test_a_compaction_that_fails_changes_nothing(tmp_path: Path, disk: Disk, refused: str) -> None:
    store = DiskStore(tmp_path, capacity_bytes=CAPACITY)
    put(store, *range(1, 6))
    store.compact((2, [b"first"]), [1])
    disk.refuse = {refused: errno.EIO}
    snapshots = [(4, [b"second"])] if refused != "fdatasync" else []
    for snapshot in [*snapshots, *([None] if refused in ("pwrite", "fdatasync") else [])]:
        with pytest.raises(Unavailable):
            store.compact(snapshot, [2, 3])
    disk.refuse = {}
    for again in range(2):
        assert whole_snapshot(store) == (2, b"first")
        assert [n for n, _ in store.headers()] == [3, 4, 5]
        assert [outcome(read, store, n) for n in range(1, 6)] == [
            NotFound, *[content(n) for n in range(2, 6)],
        ]  # fmt: skip
        if not again:
            store.close()
            store = DiskStore(tmp_path, capacity_bytes=CAPACITY)
    store.compact((4, [b"second"]), [2, 3])
    assert store.stats().records == 2
    store.close()


def test_what_can_not_be_deleted_stays_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, "read-only")

    store = DiskStore(tmp_path, capacity_bytes=CAPACITY)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refuse)
        for number in range(1, 6):
            put(store, number)
            store.compact((number, [b"state %d" % number]), [number - 1])
    put(store, 6)
    store.close()
    for _ in range(2):
        store = DiskStore(tmp_path, capacity_bytes=CAPACITY)
        assert whole_snapshot(store) == (5, b"state 5")
        assert [n for n, _ in store.headers()] == [6]
        assert store.numbers() == [5, 6]
        assert store.stats().damaged_records == 0
        store.close()


def test_a_snapshot_that_breaks_off_changes_nothing(disk_store: DiskStore, tmp_path: Path) -> None:
    def pieces() -> Iterator[bytes]:
        yield b"a piece"
        raise RuntimeError("no more")

    put(disk_store, 1)
    with pytest.raises(RuntimeError):
        disk_store.compact((1, pieces()), [1])
    assert disk_store.load_snapshot() is None
    assert read(disk_store, 1) == content(1)
    assert not list(tmp_path.glob("store-3/*.new"))


def test_appends_go_on_while_a_snapshot_is_written(disk_store: DiskStore) -> None:
    def pieces() -> Iterator[bytes]:
        for number in range(2, 5):
            put(disk_store, number)
            yield b"%d" % number

    put(disk_store, 1)
    disk_store.compact((1, pieces()), [1])
    assert whole_snapshot(disk_store) == (1, b"234")
    assert [n for n, _ in disk_store.headers()] == [2, 3, 4]
    assert [read(disk_store, n) for n in (2, 3, 4)] == [content(n) for n in (2, 3, 4)]


@pytest.mark.parametrize("at", [10, -10])
def test_a_snapshot_that_can_not_be_read_back_replaces_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    store = DiskStore(tmp_path, capacity_bytes=CAPACITY)
    put(store, 1, 2)
    write = os.pwrite

    def write_badly(file: int, data: Any, offset: int) -> int:
        bad = bytearray(data)
        bad[at] ^= 1
        return write(file, bad, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", write_badly)
        with pytest.raises(Unavailable, match=r": snapshot-\S+ cannot be read back"):
            store.compact((2, [b"the state" * 10]), [1])
    assert store.load_snapshot() is None
    assert [n for n, _ in store.headers()] == [1, 2]
    assert [read(store, n) for n in (1, 2)] == [content(n) for n in (1, 2)]
    store.close()


def test_who_reads_what_is_dropped_and_overwritten_is_told_that_it_is_gone(
    disk_store: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    payload = bytes(100_000)
    disk_store.append(Record(1, b"h", payload)).result(30)
    read_blocks = os.preadv

    def overwrite_first(*args: Any) -> int:
        monkeypatch.setattr(os, "preadv", read_blocks)
        disk_store.compact(None, [1])
        disk_store._blocks._next = 0
        disk_store.append(Record(2, b"h", payload[1:] + b"!")).result(30)
        return read_blocks(*args)

    monkeypatch.setattr(os, "preadv", overwrite_first)
    assert outcome(disk_store.read, 1, [(0, 100_000)]) is NotFound
    assert disk_store.stats().damaged_records == 0


def test_memory_mode_counts_what_it_acknowledged_and_lost(tmp_path: Path, disk: Disk) -> None:
    store = DiskStore(tmp_path, capacity_bytes=CAPACITY, ack_mode="memory")
    put(store, 1)
    store.compact(None, [])
    disk.refuse = {"fdatasync": errno.EIO}
    with store._changed:
        put(store, 2, 3)
    with suppress(RouteTraceError):
        store.compact(None, [])  # behind them
    assert store.stats().lost_records == 2
    assert [outcome(read, store, n) for n in (1, 2, 3)] == [content(1), NotFound, NotFound]
    disk.refuse = {}
    put(store, 4)
    store.close()
    store = DiskStore(tmp_path, capacity_bytes=CAPACITY)
    assert [n for n, _ in store.headers()] == [1, 4]
    store.close()


# Fills a file system of 24 MB, so that not even a snapshot would find room, and expires all of it.
FULL_TMPFS = """
import json, os, sys
from pathlib import Path
from routetrace.server.store.disk.store import DiskStore
from routetrace.server.store.interface import Record
from routetrace.common.errors import Overloaded
store = DiskStore(Path(sys.argv[1]), capacity_bytes=1 << 30)
blob = os.urandom(300_000)
counts = []
for round in range(4):
    stored = []
    while True:
        number = store.last_number() + 1
        error = store.append(Record(number, b"h" * 3000, blob)).exception()
        if error:
            assert isinstance(error, Overloaded), error
            break
        stored.append(number)
    ballast = os.open(Path(sys.argv[1]) / "ballast", os.O_WRONLY | os.O_CREAT)
    try:
        while os.write(ballast, bytes(4096)):
            pass
    except OSError:
        os.close(ballast)
    assert store.read(stored[0], [(100, 50)]) == [blob[100:150]]
    store.compact((number - 1, [b"s" * 300_000]), stored)
    os.unlink(Path(sys.argv[1]) / "ballast")
    counts.append(len(stored))
store.close()
store = DiskStore(Path(sys.argv[1]), capacity_bytes=1 << 30)
assert store.load_snapshot()[0] == number - 1 and store.stats().damaged_records == 0
store.close()
print(json.dumps(counts))
"""


def test_a_full_file_system_refuses_and_what_expires_makes_room(tmp_path: Path) -> None:
    mount = ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(tmp_path)]
    if os.geteuid() or subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("no right to mount")
    try:
        counts = json.loads(python(FULL_TMPFS, tmp_path))
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)
    assert counts[0] > 50
    assert min(counts[1:]) > 0.8 * counts[0]
