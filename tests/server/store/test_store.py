"""Stores: all kinds behave alike, keep order and room."""

from __future__ import annotations

import asyncio
import json
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from routetrace.common.errors import (
    Corrupt,
    InvalidArgument,
    NotFound,
    Overloaded,
)
from routetrace.server.store.disk.store import DiskStore
from routetrace.server.store.interface import Record, Store
from routetrace.server.store.memory import MemoryStore
from support.servers.store_records import content, record
from support.servers.stores import CAPACITY, outcome, put, python, read, whole_snapshot


def in_pieces(data: bytes) -> Iterator[bytes]:
    return (data[at : at + 1_000_000] for at in range(0, len(data), 1_000_000))


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


@pytest.fixture
def usual_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def modes(folder: Path) -> dict[str, int]:
    """Return the modes of a directory, and of all that is in it, by path."""
    found = [folder, *folder.rglob("*")]
    return {str(p.relative_to(folder)): stat.S_IMODE(p.stat().st_mode) for p in found}


@pytest.mark.usefixtures("usual_umask")
def test_no_other_user_can_read_what_is_stored(tmp_path: Path) -> None:
    data_dir = tmp_path / "data"
    store = DiskStore(data_dir, capacity_bytes=CAPACITY)
    put(store, 1, 2, 3)
    store.compact((2, [b"the ", b"state"]), [])
    store.close()
    found = modes(data_dir)
    assert len([name for name in found if "snapshot" in name]) == 1
    for name, mode in found.items():
        assert mode == (0o700 if (data_dir / name).is_dir() else 0o600), name


@pytest.mark.usefixtures("usual_umask")
def test_a_directory_of_before_is_closed_to_other_users(closed: Path) -> None:
    [folder] = (path for path in closed.iterdir() if path.is_dir())
    folder.chmod(0o755)
    [snapshot] = folder.glob("snapshot*")
    snapshot.chmod(0o755)
    store = DiskStore(closed, capacity_bytes=CAPACITY)
    assert whole_snapshot(store) == (5, b"the state")
    store.close()
    assert modes(closed)[folder.name] == 0o700
