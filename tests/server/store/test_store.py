"""The stores against a model, against each other, and against crashes, damage and full disks."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from faults import images
from routetrace.common.errors import (
    Closed,
    Corrupt,
    InvalidArgument,
    NotFound,
    Overloaded,
    RouteTraceError,
    Unavailable,
)
from routetrace.server.store.disk.frames import Frame
from routetrace.server.store.disk.log import record_frame
from routetrace.server.store.disk.store import DiskStore
from routetrace.server.store.interface import Record, Store
from routetrace.server.store.memory import MemoryStore
from support.servers import store_records
from support.servers.store_records import content, record

CAPACITY = 64 << 20


def put(store: Store, *numbers: int) -> None:
    for future in [store.append(record(number)) for number in numbers]:
        future.result(30)


def read(store: Store, number: int) -> bytes:
    return store.read(number, [(0, len(content(number)))])[0]


def in_pieces(data: bytes) -> Iterator[bytes]:
    return (data[at : at + 1_000_000] for at in range(0, len(data), 1_000_000))


def whole_snapshot(store: Store) -> tuple[int, bytes] | None:
    found = store.load_snapshot()
    return (found[0], b"".join(found[1])) if found else None


def outcome(call: Any, *args: Any) -> Any:
    """Return the value of a call, or the kind of its error."""
    try:
        return call(*args)
    except RouteTraceError as error:
        return type(error)


@pytest.fixture
def disk_store(tmp_path: Path) -> Any:
    store = DiskStore(tmp_path, capacity_bytes=CAPACITY)
    yield store
    store.close()


# ---------------------------------------------------------------------------- congruence


class Congruence(RuleBasedStateMachine):
    """MemoryStore and DiskStore do what a few dictionaries do; DiskStore also after reopening."""

    @initialize()
    def start(self) -> None:
        self.dir = tempfile.TemporaryDirectory()
        self.memory = MemoryStore(CAPACITY)
        self.disk = DiskStore(Path(self.dir.name), capacity_bytes=CAPACITY)
        self.headers: dict[int, bytes] = {}
        self.payloads: dict[int, bytes] = {}
        self.snapshot: tuple[int, bytes] | None = None
        self.last = 0

    def both(self, call: Any) -> Any:
        memory, disk = outcome(call, self.memory), outcome(call, self.disk)
        assert memory == disk
        return memory

    @rule(
        records=st.lists(
            st.tuples(
                st.integers(1, 3),
                st.binary(max_size=50) | st.just(b"h" * 6000),
                st.binary(max_size=50) | st.just(b"p" * 5000),
            ),
            min_size=1,
            max_size=6,
        )
    )
    def append(self, records: list[tuple[int, bytes, bytes]]) -> None:
        for gap, header, payload in records:
            self.last += gap
            new = Record(self.last, header, payload)
            assert self.both(lambda s, new=new: s.append(new).result(30)) is None
            self.headers[self.last] = header
            if payload:
                self.payloads[self.last] = payload

    @rule(back=st.integers(0, 3))
    def append_again(self, back: int) -> None:
        old = Record(self.last - back, b"h", b"p")
        assert self.both(lambda s: s.append(old)) is InvalidArgument

    @rule(
        back=st.integers(-1, 9),
        ranges=st.lists(st.tuples(st.integers(-1, 60), st.integers(-1, 60)), max_size=4),
    )
    def read(self, back: int, ranges: list[tuple[int, int]]) -> None:
        number = max(0, self.last - back)
        payload = self.payloads.get(number)
        want: Any
        if payload is None:
            want = NotFound
        elif any(at < 0 or size < 0 or at + size > len(payload) for at, size in ranges):
            want = Corrupt
        else:
            want = [payload[at : at + size] for at, size in ranges]
        assert self.both(lambda s: s.read(number, ranges)) == want

    @rule(
        back=st.integers(-2, 6),
        data=st.binary(max_size=20) | st.just(b"s" * 2_200_000),
        drop=st.lists(st.integers(-1, 9)),
    )
    def compact(self, back: int, data: bytes, drop: list[int]) -> None:
        snapshot = (max(0, self.last - back), data)
        drop = [self.last - back for back in drop if back <= self.last]
        got = self.both(lambda s: s.compact((snapshot[0], in_pieces(data)), drop))
        if self.snapshot and snapshot[0] < self.snapshot[0]:
            assert got is InvalidArgument
            return
        assert got is None
        self.snapshot = snapshot
        self.last = max(self.last, snapshot[0])
        self.headers = {n: h for n, h in self.headers.items() if n > snapshot[0]}
        for number in drop:
            self.payloads.pop(number, None)

    @rule(back=st.integers(-1, 9))
    def drop_one(self, back: int) -> None:
        number = max(0, self.last - back)
        assert self.both(lambda s: s.compact(None, [number])) is None
        self.payloads.pop(number, None)

    @rule()
    def reopen(self) -> None:
        self.disk.close()
        self.disk = DiskStore(Path(self.dir.name), capacity_bytes=CAPACITY)
        assert not [p for p in Path(self.dir.name).iterdir() if "damaged" in p.name]

    @invariant()
    def facts_agree(self) -> None:
        assert self.both(lambda s: s.last_number()) == self.last
        assert self.both(whole_snapshot) == self.snapshot
        for after in (0, self.last - 2):
            want = [(n, h) for n, h in self.headers.items() if n > after]
            assert self.both(lambda s, after=after: list(s.headers(max(0, after)))) == want
        size = (len(self.payloads), sum(map(len, self.payloads.values())))
        assert self.both(lambda s: (s.stats().records, s.stats().payload_bytes)) == size

    def teardown(self) -> None:
        if hasattr(self, "dir"):
            self.disk.close()
            self.dir.cleanup()


TestCongruence = Congruence.TestCase
TestCongruence.settings = settings(
    max_examples=12,
    stateful_step_count=20,
)


# ---------------------------------------------------------------------------- order and room


def test_all_that_is_queued_takes_one_commit_and_completes_in_order(
    disk_store: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[int] = []
    syncs: list[int] = []
    sync = os.fdatasync

    def count(file: int) -> None:
        syncs.append(file)
        sync(file)

    monkeypatch.setattr(os, "fdatasync", count)
    with disk_store._changed:  # the writer waits for this
        futures = []
        for number in range(1, 101):
            futures.append(disk_store.append(record(number)))
            futures[-1].add_done_callback(lambda _, number=number: done.append(number))
    futures[-1].result(30)
    assert done == list(range(1, 101))
    assert len(syncs) == 2  # of the payloads, and of the log


def test_more_headers_than_one_read_takes(disk_store: DiskStore) -> None:
    put(disk_store, *range(1, 700))
    assert [number for number, _ in disk_store.headers(5)] == list(range(6, 700))


async def test_a_waiter_that_goes_away_changes_nothing(disk_store: DiskStore) -> None:
    with disk_store._changed:
        first = asyncio.wrap_future(disk_store.append(record(1)))
        second = asyncio.wrap_future(disk_store.append(record(2)))
        first.cancel()
    await second
    assert read(disk_store, 1) == content(1)


def test_memory_mode_acknowledges_at_once_and_reads_before_the_commit(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, capacity_bytes=CAPACITY, ack_mode="memory")
    with store._changed:
        for number in range(1, 50):
            assert store.append(record(number)).done()
        assert read(store, 49) == content(49)
        assert store.stats().records == 49
    store.close()
    store = DiskStore(tmp_path, capacity_bytes=CAPACITY)
    assert [n for n, _ in store.headers()] == list(range(1, 50))
    store.close()


@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_a_full_store_refuses_serves_and_resumes(tmp_path: Path, kind: str) -> None:
    capacity = 4 << 20
    store: Store = (
        MemoryStore(capacity) if kind == "memory" else DiskStore(tmp_path, capacity_bytes=capacity)
    )
    blob = os.urandom(100_000)
    for _ in range(3):
        stored = []
        while True:
            number = store.last_number() + 1
            future = store.append(Record(number, b"h", blob))
            if error := future.exception(30):
                break
            stored.append(number)
        assert isinstance(error, Overloaded)
        assert error.retry_after > 0
        assert 35 <= len(stored) <= 41
        assert outcome(store.read, number, [(0, 1)]) is NotFound
        assert store.read(stored[0], [(5, 10)]) == [blob[5:15]]
        assert store.stats().used_bytes <= capacity
        store.compact((stored[-1], [b""]), stored)
        assert store.stats().records == 0
    store.close()


def test_where_one_record_of_a_group_fails_all_behind_it_fail(disk_store: DiskStore) -> None:
    disk_store._capacity = 1 << 40  # so that the blocks themselves run out
    blob = os.urandom(1 << 20)
    for round_ in range(3):
        with disk_store._changed:
            first = disk_store.last_number() + 1
            numbers = range(first, first + 200)
            futures = [disk_store.append(Record(n, b"h", blob)) for n in numbers]
        errors = [future.exception(60) for future in futures]
        kept = errors.count(None)
        assert 0 < kept < 200
        assert all(error is None for error in errors[:kept])
        assert all(isinstance(error, Overloaded) for error in errors[kept:])
        assert disk_store.last_number() == first + kept - 1
        stored = [n for n in numbers if outcome(disk_store.read, n, [(0, 1)]) is not NotFound]
        assert stored == [*numbers][:kept]
        disk_store.compact((first, [b"x" * round_]), stored)


# Fills the disk: no file may grow beyond 12 MB.
FULL_DISK = """
import json, os, resource, sys
from pathlib import Path
from routetrace.server.store.disk.store import DiskStore
from routetrace.server.store.interface import Record
resource.setrlimit(resource.RLIMIT_FSIZE, (12 << 20, resource.RLIM_INFINITY))
store = DiskStore(Path(sys.argv[1]), capacity_bytes=1 << 30)
blob = os.urandom(1 << 20)
def fill():
    stored = []
    while True:
        number = store.last_number() + 1
        error = store.append(Record(number, b"h", blob)).exception()
        if error:
            assert error.retry_after > 0, error
            return stored
        stored.append(number)
first = fill()
store.read(first[0], [(0, 1)])
store.compact(None, first[:6])
second = fill()
store.close()
print(json.dumps([first, second]))
"""


def test_a_full_disk_refuses_serves_and_resumes(tmp_path: Path) -> None:
    first, second = json.loads(python(FULL_DISK, tmp_path))
    assert len(first) >= 8
    assert len(second) >= 3
    store = DiskStore(tmp_path, capacity_bytes=CAPACITY)
    assert [n for n, _ in store.headers()] == first + second
    store.close()


# ---------------------------------------------------------------------------- processes


def python(script: str, *args: object) -> str:
    process = subprocess.run(
        [sys.executable, "-c", script, *map(str, args)],
        check=False,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert process.returncode == 0, (process.returncode, process.stdout[-500:], process.stderr)
    return process.stdout


# Appends for ever, and says which records are acknowledged and which it is about to drop.
WRITER = """
import random, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from support.servers.store_records import record
from routetrace.server.store.disk.store import DiskStore
store = DiskStore(Path(sys.argv[2]), capacity_bytes=1 << 30, ack_mode=sys.argv[3])
rng = random.Random(int(sys.argv[4]))
number = covered = 0
while True:
    futures = []
    for _ in range(rng.randrange(1, 30)):
        number += 1
        futures.append(store.append(record(number)))
    for at, future in enumerate(futures, number - len(futures) + 1):
        future.result()
        print("acked", at, flush=True)
    if rng.random() < 0.2:
        covered = rng.randrange(max(1, covered, number - 60), number + 1)
        print("drop", covered, flush=True)
        store.compact((covered, [b"%d" % covered * 1000]), range(1, covered + 1))
"""


@pytest.mark.parametrize(("mode", "seed"), [("fsync", 1), ("fsync", 2), ("memory", 4)])
def test_kill_9_loses_nothing_that_was_acknowledged(tmp_path: Path, mode: str, seed: int) -> None:
    acked = dropped = 0
    wanted = random.Random(seed).randrange(50, 400)
    helpers = Path(store_records.__file__).parents[2]
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, helpers, tmp_path, mode, str(seed)],
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout
        try:
            for line in process.stdout:
                if not line.endswith("\n"):
                    break  # cut short by the kill
                what, number = line.split()
                if what == "acked":
                    acked = int(number)
                else:
                    dropped = int(number)
                if acked >= wanted:
                    process.kill()
        finally:
            process.kill()
    assert acked >= wanted

    store = DiskStore(tmp_path, capacity_bytes=1 << 30)
    assert not [path for path in tmp_path.iterdir() if "damaged" in path.name]
    snapshot = whole_snapshot(store)
    covered = snapshot[0] if snapshot else 0
    assert covered <= dropped
    if snapshot:
        assert snapshot[1] == b"%d" % covered * 1000
    numbers = [number for number, _ in store.headers(covered)]
    assert numbers == list(range(covered + 1, covered + 1 + len(numbers)))
    if mode == "fsync":
        assert covered + len(numbers) >= acked
    for at, header in store.headers(covered):
        assert header == record(at).header
        assert read(store, at) == content(at)
    assert store.stats().records == len(numbers)
    assert store.stats().damaged_records == 0
    put(store, store.last_number() + 1)
    store.close()


SECOND = """
import sys
from pathlib import Path
from routetrace.server.store.disk.store import DiskStore
DiskStore(Path(sys.argv[1]), capacity_bytes=1 << 30)
"""


def test_a_directory_belongs_to_one_process(tmp_path: Path, disk_store: DiskStore) -> None:
    with pytest.raises(Unavailable, match=f"in use by process {os.getpid()}"):
        DiskStore(tmp_path, capacity_bytes=CAPACITY)
    with pytest.raises(AssertionError, match=f"in use by process {os.getpid()}"):
        python(SECOND, tmp_path)
    put(disk_store, 1)
    disk_store.close()
    python(SECOND, tmp_path)


def test_close_waits_for_readers(disk_store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    put(disk_store, 1)
    reading, go_on = threading.Event(), threading.Event()
    read_payload = disk_store._blocks.read

    def read_slowly(*args: Any) -> list[bytes]:
        reading.set()
        assert go_on.wait(30)
        return read_payload(*args)

    monkeypatch.setattr(disk_store._blocks, "read", read_slowly)
    with ThreadPoolExecutor() as pool:
        got = pool.submit(read, disk_store, 1)
        assert reading.wait(30)
        closed = pool.submit(disk_store.close)
        disk_store._writer.join(30)
        with pytest.raises(FutureTimeout):
            closed.result(0.2)
        go_on.set()
        assert got.result(30) == content(1)
        closed.result(30)
    for call in (disk_store.stats, disk_store.last_number, disk_store.load_snapshot):
        assert outcome(call) is Closed
    assert outcome(disk_store.append, record(100)) is Closed
    assert outcome(disk_store.compact, None, []) is Closed
    disk_store.close()


def test_a_read_does_not_wake_the_writer(
    disk_store: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(disk_store, 1)
    woken: list[str] = []
    wake = disk_store._changed.notify_all

    def noted() -> None:
        woken.append(threading.current_thread().name)
        wake()

    monkeypatch.setattr(disk_store._changed, "notify_all", noted)
    assert read(disk_store, 1) == content(1)
    assert not woken
    put(disk_store, 2)
    assert woken


# ---------------------------------------------------------------------------- a disk that fails


class Disk:
    """Refuses what the store does with its files, as told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.refuse: dict[str, int] = {}  # calls of os: errno
        for name in ("pwrite", "fdatasync", "fsync", "ftruncate", "rename", "preadv"):
            monkeypatch.setattr(os, name, self._guard(name, getattr(os, name)))

    def _guard(self, name: str, call: Any) -> Any:
        def guarded(*args: Any) -> Any:
            if name in self.refuse:
                raise OSError(self.refuse[name], os.strerror(self.refuse[name]))
            return call(*args)

        return guarded


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


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


# ---------------------------------------------------------------------------- damage


def only(directory: Path, pattern: str) -> Path:
    (path,) = directory.glob(f"store-3/{pattern}")
    return path


def flip(file: Path, needle: bytes, *, at: int = 0) -> None:
    """Flip a bit of byte `at` of every `needle`."""
    data = file.read_bytes()
    assert needle in data
    file.write_bytes(data.replace(needle, needle[:at] + bytes([needle[at] ^ 1]) + needle[at + 1 :]))


@pytest.fixture
def closed(tmp_path: Path) -> Path:
    """A directory with 20 records, the first 5 of them in a snapshot, and nobody in it."""
    store = DiskStore(tmp_path, capacity_bytes=CAPACITY)
    for number in range(1, 21):
        store.append(Record(number, b"header %d" % number, b"payload %d " % number * 999)).result()
    store.compact((5, [b"the ", b"state"]), [])
    store.close()
    return tmp_path


def test_a_damaged_record_is_reported_once_and_the_others_are_served(
    closed: Path, caplog: pytest.LogCaptureFixture
) -> None:
    flip(only(closed, "log-*"), b"header 11")
    flip(closed / "store-3/blocks", b"payload 12 payload 12")
    store = DiskStore(closed, capacity_bytes=CAPACITY)
    assert store.stats().damaged_records == 1
    for _ in range(2):
        found = [(n, header is None) for n, header in store.headers()]
        assert found == [(n if n != 11 else 10, n == 11) for n in range(6, 21)]
        for number in range(1, 21):
            want = [b"%d " % number] if number != 12 else Corrupt
            # Its header gone, nothing but the snapshot knows where a payload is: it does, here.
            assert outcome(store.read, number, [(8, len(b"%d " % number))]) == want
        assert store.stats().damaged_records == 2
    assert caplog.text.count("payload of record 12: damaged") == 1
    assert caplog.text.count("behind record 10") == 1
    assert store.last_number() == 20
    put(store, 21)
    store.close()


def test_damage_to_what_a_snapshot_covers_costs_nothing(closed: Path) -> None:
    for number in (3, 5):
        flip(only(closed, "log-*"), b"header %d" % number)
    store = DiskStore(closed, capacity_bytes=CAPACITY)
    assert [(n, header is None) for n, header in store.headers()] == [
        (n, False) for n in range(6, 21)
    ]
    assert store.stats().damaged_records == 2
    assert store.numbers() == [*range(1, 21)]
    store.close()


@pytest.mark.parametrize("how", ["a file", "the end of a file", "a record"])
def test_what_is_missing_in_between_is_known(tmp_path: Path, how: str) -> None:
    for number in range(1, 6):
        store = DiskStore(tmp_path, capacity_bytes=CAPACITY)
        put(store, 10 * number, 10 * number + 1)
        store.close()
    file = only(tmp_path, "log-00000003*")
    if how == "a file":
        file.unlink()
    elif how == "a record":
        flip(file, record(30).header[:20])
    else:
        store = DiskStore(tmp_path, capacity_bytes=CAPACITY)
        end = next(f.end for f in store._log.segments[2].file.scan() if isinstance(f, Frame))
        store.close()
        os.truncate(file, end)
    lost = {"a file": [30, 31], "the end of a file": [31], "a record": [30]}[how]
    store = DiskStore(tmp_path, capacity_bytes=CAPACITY)
    found = [None if header is None else number for number, header in store.headers()]
    kept: list[int | None] = [
        10 * n + i for n in range(1, 6) for i in (0, 1) if 10 * n + i not in lost
    ]
    kept.insert(sum(number is not None and number < lost[0] for number in kept), None)
    assert found == kept
    assert store.stats().damaged_records == 1
    store.close()


@pytest.mark.parametrize("acknowledged", [False, True])
def test_of_a_commit_that_was_torn_nothing_behind_the_tear_counts(
    tmp_path: Path, acknowledged: bool
) -> None:
    """Agents send again all that was not acknowledged; later records build on earlier ones."""
    store = DiskStore(tmp_path / "live", capacity_bytes=CAPACITY)
    put(store, 1)
    store._log.append([record_frame(record(n), None, n - 1) for n in (2, 3, 4)], 4)
    if acknowledged:  # a later commit shows it
        store._log.append([record_frame(record(5), None, 4)], 5)
    crashed = shutil.copytree(tmp_path / "live", tmp_path / "crashed")
    store.close()
    flip(only(crashed, "log-*"), record(3).header[:20])
    store = DiskStore(crashed, capacity_bytes=CAPACITY)
    found = [None if header is None else number for number, header in store.headers()]
    assert found == ([1, 2, None, 4, 5] if acknowledged else [1, 2])
    assert store.stats().damaged_records == acknowledged
    assert store.last_number() == (5 if acknowledged else 2)
    store.close()


def test_damage_to_the_last_record_of_what_was_ended_is_known(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, capacity_bytes=CAPACITY)
    put(store, 1, 2, 3)
    store.compact((1, [b"the state"]), [])  # ends the log; nothing is appended any more
    store.close()
    flip(only(tmp_path, "log-*"), record(3).header[:20])
    store = DiskStore(tmp_path, capacity_bytes=CAPACITY)
    assert [(n, header is None) for n, header in store.headers()] == [(2, False), (2, True)]
    assert store.stats().damaged_records == 1
    store.close()


def test_damage_costs_the_blocks_that_it_hit(tmp_path: Path) -> None:
    payload = random.Random(0).randbytes(10 * 16384)
    store = DiskStore(tmp_path, capacity_bytes=CAPACITY)
    store.append(Record(1, b"h", payload)).result()
    store.close()
    flip(tmp_path / "store-3/blocks", payload[5 * 16384 + 7 : 5 * 16384 + 30])
    store = DiskStore(tmp_path, capacity_bytes=CAPACITY)
    for i in range(10):
        for at, size in ((i * 16384, 16384), (i * 16384 + 100, 1), (max(0, i * 16384 - 1), 2)):
            touched = range(at // 16384, (at + size - 1) // 16384 + 1)
            want = Corrupt if 5 in touched else [payload[at : at + size]]
            assert outcome(store.read, 1, [(at, size)]) == want
    store.close()


def test_a_record_cannot_contain_what_passes_for_a_frame(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, capacity_bytes=CAPACITY)
    store.append(Record(1, b"first", b"")).result()
    inner = only(tmp_path, "log-*").read_bytes()
    # As another store would have written it: everything but the random bytes of this file.
    store.append(Record(2, b"x" * 100 + b"\0" * 8 + inner[8:] * 3, b"")).result()
    # And a copy of a frame of this very file.
    store.append(Record(3, inner * 3, b"")).result()
    store.append(Record(4, b"last", b"")).result()
    store.close()
    file = only(tmp_path, "log-*")
    flip(file, b"x" * 100)
    data = file.read_bytes()
    at = data.rindex(inner)
    file.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    store = DiskStore(tmp_path, capacity_bytes=CAPACITY)
    assert list(store.headers()) == [(1, b"first"), (1, None), (4, b"last")]
    assert store.stats().damaged_records == 1
    store.close()


def test_a_block_that_was_overwritten_does_not_pass_for_what_it_held(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, capacity_bytes=CAPACITY)
    put(store, 1)
    log = only(tmp_path, "log-*").read_bytes()
    store.compact(None, [1])
    store.append(Record(2, b"h", bytes(len(content(1))))).result()
    store.close()
    only(tmp_path, "log-*").write_bytes(log)  # as if what followed had never been written
    store = DiskStore(tmp_path, capacity_bytes=CAPACITY)
    assert [n for n, _ in store.headers()] == [1]
    assert outcome(read, store, 1) is Corrupt
    store.close()


def test_a_lost_drop_gives_no_block_two_owners(tmp_path: Path) -> None:
    payload = random.Random(0).randbytes(5000)
    store = DiskStore(tmp_path, capacity_bytes=CAPACITY)
    store.append(Record(1, b"h", payload)).result()
    before = only(tmp_path, "log-*").stat().st_size
    store.compact(None, [1])
    store._blocks._next = 0  # the same block again
    store.append(Record(2, b"h", payload[::-1])).result()
    store.close()
    log = only(tmp_path, "log-*")
    data = bytearray(log.read_bytes())
    data[before + 20] ^= 1
    log.write_bytes(data)
    store = DiskStore(tmp_path, capacity_bytes=CAPACITY)
    assert outcome(store.read, 1, [(0, 5000)]) is NotFound
    assert store.read(2, [(0, 5000)]) == [payload[::-1]]
    store.compact(None, [1])
    store.append(Record(3, b"h", payload)).result()
    assert store.read(2, [(0, 5000)]) == [payload[::-1]]
    store.close()


def test_a_damaged_snapshot_costs_nothing_while_the_one_before_is_there(closed: Path) -> None:
    store = DiskStore(closed, capacity_bytes=CAPACITY)
    put(store, 21)
    store.compact((21, [b"newer state"]), [3, 4])
    put(store, 22)
    store.close()
    flip(only(closed, "snapshot-00000002-*"), b"newer state")
    store = DiskStore(closed, capacity_bytes=CAPACITY)
    assert whole_snapshot(store) == (5, b"the state")
    assert [n for n, _ in store.headers()] == list(range(6, 23))
    assert [outcome(read, store, n) for n in (21, 22)] == [content(21), content(22)]
    assert store.stats().damaged_records == 1
    assert only(closed, "*.damaged")
    store.compact((22, [b"newest state"]), [])
    store.close()
    store = DiskStore(closed, capacity_bytes=CAPACITY)
    assert whole_snapshot(store) == (22, b"newest state")
    store.close()


def test_a_first_snapshot_that_is_damaged_costs_nothing(closed: Path) -> None:
    flip(only(closed, "snapshot-*"), b"state")
    store = DiskStore(closed, capacity_bytes=CAPACITY)
    assert store.load_snapshot() is None
    assert [n for n, _ in store.headers()] == list(range(1, 21))
    assert store.stats().records == 20
    assert store.stats().damaged_records == 1
    store.close()


def test_a_snapshot_that_is_damaged_after_the_start_says_so(closed: Path) -> None:
    store = DiskStore(closed, capacity_bytes=CAPACITY)
    flip(only(closed, "snapshot-*"), b"state")
    found = store.load_snapshot()
    assert found
    assert next(found[1]) == b"the "
    with pytest.raises(Corrupt):
        next(found[1])
    assert store.stats().damaged_records == 1
    store.close()


def test_without_any_snapshot_all_is_set_aside(
    closed: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(1, 4):
        store = DiskStore(closed, capacity_bytes=CAPACITY)
        for covered in (21, 22, 23):
            put(store, covered)
            store.compact((covered, [b"the state"]), [])
        store.close()
        for file in closed.glob("store-3/snapshot-*"):
            file.write_bytes(b"")
        store = DiskStore(closed, capacity_bytes=CAPACITY)
        assert store.load_snapshot() is None
        assert list(store.headers()) == []
        assert store.stats().damaged_records == 1
        put(store, 1)
        store.close()
        aside = [path for path in closed.iterdir() if "damaged" in path.name]
        assert len(aside) == number
        assert all((path / "blocks").stat().st_size > 16384 for path in aside)
    assert "it is kept as store-3.damaged-" in caplog.text


def test_what_was_being_written_at_a_crash_is_no_damage(closed: Path) -> None:
    with open(only(closed, "log-*"), "ab") as file:
        file.write(b"half of a record")
    (closed / "store-3/snapshot-00000009-0123456789abcdef.new").write_bytes(b"half of a snapshot")
    store = DiskStore(closed, capacity_bytes=CAPACITY)
    assert [n for n, _ in store.headers()] == list(range(6, 21))
    assert store.stats().damaged_records == 0
    put(store, 21)
    store.close()
    store = DiskStore(closed, capacity_bytes=CAPACITY)
    assert [n for n, _ in store.headers()] == list(range(6, 22))
    assert store.stats().damaged_records == 0
    store.close()


def test_blocks_that_are_not_there_are_reported(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, capacity_bytes=CAPACITY)
    for number in range(1, 200):
        store.append(Record(number, b"h", b"%d" % number)).result()
    store.close()
    os.truncate(tmp_path / "store-3/blocks", 100 * 16384)
    store = DiskStore(tmp_path, capacity_bytes=CAPACITY)
    assert [outcome(store.read, n, [(0, 1)]) for n in (100, 101)] == [[b"1"], Corrupt]
    assert store.stats().damaged_records == 1
    store.close()
    store = DiskStore(tmp_path, capacity_bytes=50 * 16384)
    assert [outcome(store.read, n, [(0, 1)]) for n in (100, 101)] == [[b"1"], NotFound]
    assert store.stats().damaged_records == 99
    assert len(list(store.headers())) == 199
    store.compact((199, []), range(1, 199))
    store.close()


@pytest.mark.parametrize("name", ["db", "store-1"])
def test_a_directory_of_another_version_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(Unavailable, match=f"{name} was made by another version"):
        DiskStore(tmp_path, capacity_bytes=CAPACITY)
    (tmp_path / name).rmdir()
    DiskStore(tmp_path, capacity_bytes=CAPACITY).close()


def test_a_directory_of_the_previous_version_is_renamed(closed: Path) -> None:
    """Its servers would not recognize the records that follow: they refuse the new name."""
    (closed / "store-3").rename(closed / "store-2")
    store = DiskStore(closed, capacity_bytes=CAPACITY)
    numbers = list(store.numbers())
    store.close()
    assert numbers
    assert [path.name for path in closed.glob("store-*")] == ["store-3"]
    (closed / "store-2").mkdir()
    with pytest.raises(Unavailable, match="store-2 was made by another version"):
        DiskStore(closed, capacity_bytes=CAPACITY)


def test_a_machine_that_does_not_allow_it_costs_nothing(
    closed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    with monkeypatch.context() as patch:
        patch.setattr("routetrace.server.store.disk.directory.Blocks", refuse)
        with pytest.raises(OSError, match="allocate memory"):
            DiskStore(closed, capacity_bytes=CAPACITY)
    store = DiskStore(closed, capacity_bytes=CAPACITY)
    assert store.last_number() == 20
    store.close()


def test_a_read_error_is_a_damaged_record(closed: Path, disk: Disk) -> None:
    store = DiskStore(closed, capacity_bytes=CAPACITY)
    disk.refuse = {"preadv": errno.EIO}
    assert outcome(store.read, 7, [(0, 7)]) is Corrupt
    disk.refuse = {}
    assert store.read(7, [(0, 7)]) == [b"payload"]
    store.close()


@pytest.mark.slow
def test_no_image_ends_the_process_serves_a_wrong_byte_or_hides_a_loss() -> None:
    found = images.run(seed=1, images=3, flips=100)
    assert found["opened"] == 106
    assert found["right"] > 10 * found["opened"]
    assert found["damaged"]
    assert found["wrong"] == found["crashes"] == 0
