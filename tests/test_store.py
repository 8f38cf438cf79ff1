"""The stores against a model, against each other, and against crashes, damage and full disks."""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import struct
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path
from typing import Any

import lmdb
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from routetrace.server.lmdb_store import LmdbStore
from routetrace.server.store import MemoryStore, Record, Store
from routetrace.v1.errors import (
    Closed,
    Corrupt,
    InvalidArgument,
    NotFound,
    Overloaded,
    RouteTraceError,
    Unavailable,
)

CAPACITY = 64 << 20


def content(number: int) -> bytes:
    """A payload that only this record has."""
    rng = random.Random(number)
    return rng.randbytes(rng.choice((10, 500, 3000, 9000, 40_000)))


def record(number: int) -> Record:
    return Record(number, content(number)[:1500], content(number))


def put(store: Store, *numbers: int) -> None:
    for future in [store.append(record(number)) for number in numbers]:
        future.result(30)


def read(store: Store, number: int) -> bytes:
    return store.read(number, [(0, len(content(number)))])[0]


def outcome(call: Any, *args: Any) -> Any:
    """What a call returns, or the kind of its error."""
    try:
        return call(*args)
    except RouteTraceError as error:
        return type(error)


@pytest.fixture
def lmdb_store(tmp_path: Path) -> Any:
    store = LmdbStore(tmp_path, capacity_bytes=CAPACITY)
    yield store
    store.close()


# ---------------------------------------------------------------------------- congruence


class Congruence(RuleBasedStateMachine):
    """MemoryStore and LmdbStore do what a few dictionaries do; LmdbStore also after reopening."""

    @initialize()
    def start(self) -> None:
        self.dir = tempfile.TemporaryDirectory()
        self.memory = MemoryStore(CAPACITY)
        self.lmdb = LmdbStore(Path(self.dir.name), capacity_bytes=CAPACITY)
        self.headers: dict[int, bytes] = {}
        self.payloads: dict[int, bytes] = {}
        self.snapshot: tuple[int, bytes] | None = None
        self.last = 0

    def both(self, call: Any) -> Any:
        memory, lmdb = outcome(call, self.memory), outcome(call, self.lmdb)
        assert memory == lmdb
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
        got = self.both(lambda s: s.compact(snapshot, drop))
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
        self.lmdb.close()
        self.lmdb = LmdbStore(Path(self.dir.name), capacity_bytes=CAPACITY)
        assert not [p for p in Path(self.dir.name).iterdir() if "damaged" in p.name]

    @invariant()
    def facts_agree(self) -> None:
        assert self.both(lambda s: s.last_number()) == self.last
        assert self.both(lambda s: s.load_snapshot()) == self.snapshot
        for after in (0, self.last - 2):
            want = [(n, h) for n, h in self.headers.items() if n > after]
            assert self.both(lambda s, after=after: list(s.headers(max(0, after)))) == want
        size = (len(self.payloads), sum(map(len, self.payloads.values())))
        assert self.both(lambda s: (s.stats().records, s.stats().payload_bytes)) == size

    def teardown(self) -> None:
        if hasattr(self, "dir"):
            self.lmdb.close()
            self.dir.cleanup()


TestCongruence = Congruence.TestCase
TestCongruence.settings = settings(
    max_examples=12,
    stateful_step_count=20,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)


# ---------------------------------------------------------------------------- order and room


def test_all_that_is_queued_takes_one_commit_and_completes_in_order(lmdb_store: LmdbStore) -> None:
    done: list[int] = []
    before = lmdb_store._env.info()["last_txnid"]
    with lmdb_store._changed:  # the writer waits for this
        futures = []
        for number in range(1, 101):
            futures.append(lmdb_store.append(record(number)))
            futures[-1].add_done_callback(lambda _, number=number: done.append(number))
    futures[-1].result(30)
    assert done == list(range(1, 101))
    assert lmdb_store._env.info()["last_txnid"] == before + 1


def test_more_headers_than_one_read_takes(lmdb_store: LmdbStore) -> None:
    put(lmdb_store, *range(1, 700))
    assert [number for number, _ in lmdb_store.headers(5)] == list(range(6, 700))


async def test_a_waiter_that_goes_away_changes_nothing(lmdb_store: LmdbStore) -> None:
    with lmdb_store._changed:
        first = asyncio.wrap_future(lmdb_store.append(record(1)))
        second = asyncio.wrap_future(lmdb_store.append(record(2)))
        first.cancel()
    await second
    assert read(lmdb_store, 1) == content(1)


def test_memory_mode_acknowledges_at_once_and_reads_before_the_commit(tmp_path: Path) -> None:
    store = LmdbStore(tmp_path, capacity_bytes=CAPACITY, ack_mode="memory")
    with store._changed:
        for number in range(1, 50):
            assert store.append(record(number)).done()
        assert read(store, 49) == content(49)
        assert store.stats().records == 49
    store.close()
    store = LmdbStore(tmp_path, capacity_bytes=CAPACITY)
    assert [n for n, _ in store.headers()] == list(range(1, 50))
    store.close()


@pytest.mark.parametrize("kind", ["memory", "lmdb"])
def test_a_full_store_refuses_serves_and_resumes(tmp_path: Path, kind: str) -> None:
    capacity = 4 << 20
    store: Store = (
        MemoryStore(capacity) if kind == "memory" else LmdbStore(tmp_path, capacity_bytes=capacity)
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
        store.compact((stored[-1], b""), stored)
        assert store.stats().records == 0
    store.close()


def test_where_one_record_of_a_group_fails_all_behind_it_fail(lmdb_store: LmdbStore) -> None:
    lmdb_store._capacity = 1 << 40  # so that LMDB itself runs out of room
    blob = os.urandom(1 << 20)
    for round_ in range(3):
        with lmdb_store._changed:
            first = lmdb_store.last_number() + 1
            numbers = range(first, first + 200)
            futures = [lmdb_store.append(Record(n, b"h", blob)) for n in numbers]
        errors = [future.exception(60) for future in futures]
        kept = errors.count(None)
        assert 0 < kept < 200
        assert all(error is None for error in errors[:kept])
        assert all(isinstance(error, Overloaded) for error in errors[kept:])
        assert lmdb_store.last_number() == first + kept - 1
        stored = [n for n in numbers if outcome(lmdb_store.read, n, [(0, 1)]) is not NotFound]
        assert stored == [*numbers][:kept]
        lmdb_store.compact((first, b"x" * round_), stored)


# Fills the disk: no file may grow beyond 12 MB.
FULL_DISK = """
import json, os, resource, sys
from pathlib import Path
from routetrace.server.lmdb_store import LmdbStore
from routetrace.server.store import Record
resource.setrlimit(resource.RLIMIT_FSIZE, (12 << 20, resource.RLIM_INFINITY))
store = LmdbStore(Path(sys.argv[1]), capacity_bytes=1 << 30)
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
    store = LmdbStore(tmp_path, capacity_bytes=CAPACITY)
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
from test_store import LmdbStore, record
store = LmdbStore(Path(sys.argv[2]), capacity_bytes=1 << 30, ack_mode=sys.argv[3])
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
        store.compact((covered, b"%d" % covered * 1000), range(1, covered + 1))
"""


@pytest.mark.parametrize(
    ("mode", "seed"), [("fsync", 1), ("fsync", 2), ("fsync", 3), ("memory", 4)]
)
def test_kill_9_loses_nothing_that_was_acknowledged(tmp_path: Path, mode: str, seed: int) -> None:
    acked = dropped = 0
    wanted = random.Random(seed).randrange(50, 400)
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, Path(__file__).parent, tmp_path, mode, str(seed)],
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

    store = LmdbStore(tmp_path, capacity_bytes=1 << 30)
    assert not [path for path in tmp_path.iterdir() if "damaged" in path.name]
    snapshot = store.load_snapshot()
    covered = snapshot[0] if snapshot else 0
    assert covered <= dropped
    if snapshot:
        assert snapshot[1] == b"%d" % covered * 1000
    numbers = [number for number, _ in store.headers(covered)]
    assert numbers == list(range(covered + 1, covered + 1 + len(numbers)))
    if mode == "fsync":
        assert covered + len(numbers) >= acked
    for number, header in store.headers(covered):
        assert header == record(number).header
        assert read(store, number) == content(number)
    assert store.stats().records == len(numbers)
    assert store.stats().damaged_records == 0
    put(store, store.last_number() + 1)
    store.close()


SECOND = """
import sys
from pathlib import Path
from routetrace.server.lmdb_store import LmdbStore
LmdbStore(Path(sys.argv[1]), capacity_bytes=1 << 30)
"""


def test_a_directory_belongs_to_one_process(tmp_path: Path, lmdb_store: LmdbStore) -> None:
    with pytest.raises(Unavailable, match=f"in use by process {os.getpid()}"):
        LmdbStore(tmp_path, capacity_bytes=CAPACITY)
    with pytest.raises(AssertionError, match=f"in use by process {os.getpid()}"):
        python(SECOND, tmp_path)
    put(lmdb_store, 1)
    lmdb_store.close()
    python(SECOND, tmp_path)


def test_close_waits_for_readers(lmdb_store: LmdbStore, monkeypatch: pytest.MonkeyPatch) -> None:
    put(lmdb_store, 1)
    reading, go_on = threading.Event(), threading.Event()
    read_payload = lmdb_store._tables.read

    def read_slowly(*args: Any) -> list[bytes]:
        reading.set()
        assert go_on.wait(30)
        return read_payload(*args)

    monkeypatch.setattr(lmdb_store._tables, "read", read_slowly)
    with ThreadPoolExecutor() as pool:
        got = pool.submit(read, lmdb_store, 1)
        assert reading.wait(30)
        closed = pool.submit(lmdb_store.close)
        lmdb_store._writer.join(30)
        with pytest.raises(FutureTimeout):
            closed.result(0.2)
        go_on.set()
        assert got.result(30) == content(1)
        closed.result(30)
    for call in (lmdb_store.stats, lmdb_store.last_number, lmdb_store.load_snapshot):
        assert outcome(call) is Closed
    assert outcome(lmdb_store.append, record(100)) is Closed
    assert outcome(lmdb_store.compact, None, []) is Closed
    lmdb_store.close()


# ---------------------------------------------------------------------------- damage


def flip(file: Path, needle: bytes, *, at: int = 0, keep_time: bool = False) -> None:
    """Flips a bit of byte `at` of every `needle`, in pages that are free already too."""
    stat = file.stat()
    data = file.read_bytes()
    assert needle in data
    file.write_bytes(data.replace(needle, needle[:at] + bytes([needle[at] ^ 1]) + needle[at + 1 :]))
    if keep_time:
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))


@pytest.fixture
def closed(tmp_path: Path) -> Path:
    """A directory with 20 records, the first 5 of them in a snapshot, and nobody in it."""
    store = LmdbStore(tmp_path, capacity_bytes=CAPACITY)
    for number in range(1, 21):
        store.append(Record(number, b"header %d" % number, b"payload %d " % number * 999)).result()
    store.compact((5, b"the state"), [])
    store.close()
    return tmp_path


@pytest.mark.parametrize("keep_time", [False, True])
def test_a_damaged_record_is_reported_and_the_others_are_served(
    closed: Path, keep_time: bool, caplog: pytest.LogCaptureFixture
) -> None:
    file = closed / "db" / "data.mdb"
    flip(file, b"header 11", keep_time=keep_time)
    flip(file, b"payload 12 payload 12", keep_time=keep_time)
    store = LmdbStore(closed, capacity_bytes=CAPACITY)
    assert [n for n, _ in store.headers()] == [*range(6, 11), *range(12, 21)]
    for number in range(1, 21):
        want = [b"%d " % number] if number != 12 else Corrupt
        assert outcome(store.read, number, [(8, len(b"%d " % number))]) == want
    assert store.stats().damaged_records == 2
    assert "header of record 11 is damaged" in caplog.text
    assert "payload of record 12 is damaged" in caplog.text
    assert store.last_number() == 20
    put(store, 21)
    store.close()


def test_a_damaged_key_does_not_pass_one_record_off_as_another(tmp_path: Path) -> None:
    store = LmdbStore(tmp_path, capacity_bytes=CAPACITY)
    put(store, 10, 20, 30)
    store.close()
    flip(tmp_path / "db" / "data.mdb", struct.pack(">Q", 20), at=7, keep_time=True)
    store = LmdbStore(tmp_path, capacity_bytes=CAPACITY)
    assert [n for n, _ in store.headers()] == [10, 30]
    assert [outcome(read, store, n) for n in (10, 20, 21, 30)] == [
        content(10), NotFound, Corrupt, content(30),
    ]  # fmt: skip
    store.close()


def test_a_tree_that_breaks_under_way_is_looked_through_at_the_next_start(
    closed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def break_down(*_: object) -> None:
        raise lmdb.CorruptedError("a page")

    store = LmdbStore(closed, capacity_bytes=CAPACITY)
    with monkeypatch.context() as patch:
        for name in ("headers", "read", "snapshot"):
            patch.setattr(store._tables, name, break_down)
        assert list(store.headers()) == []
        assert outcome(read, store, 7) is Corrupt
        assert store.load_snapshot() is None
        assert store.stats().damaged_records == 3
        patch.setattr(store._tables, "put", break_down)
        error = store.append(record(21)).exception(30)
        assert isinstance(error, Unavailable)
    put(store, 21)
    store.close()
    assert not (closed / "db" / "clean").exists()
    LmdbStore(closed, capacity_bytes=CAPACITY).close()
    assert (closed / "db" / "clean").exists()


def test_a_damaged_snapshot_counts_as_none(closed: Path) -> None:
    flip(closed / "db" / "data.mdb", b"the state")
    store = LmdbStore(closed, capacity_bytes=CAPACITY)
    assert store.load_snapshot() is None
    assert [n for n, _ in store.headers()] == list(range(6, 21))
    store.close()


def test_what_can_not_be_read_is_set_aside(closed: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = closed / "db" / "data.mdb"
    files = (b"no database", file.read_bytes()[: 5 * 4096], b"", b"\0" * 100_000)
    for number, damaged in enumerate(files, 1):
        (closed / "db").mkdir(exist_ok=True)
        file.write_bytes(damaged)
        store = LmdbStore(closed, capacity_bytes=CAPACITY)
        assert list(store.headers()) == []
        put(store, 1)
        store.close()
        aside = [path for path in closed.iterdir() if "damaged" in path.name]
        assert len(aside) == number
        assert damaged in [(path / "data.mdb").read_bytes() for path in aside]
    assert "can not be read" in caplog.text


def test_a_machine_that_does_not_allow_it_costs_no_database(
    closed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise lmdb.Error("Cannot allocate memory")

    with monkeypatch.context() as patch:
        patch.setattr("lmdb.open", refuse)
        with pytest.raises(lmdb.Error):
            LmdbStore(closed, capacity_bytes=CAPACITY)
    store = LmdbStore(closed, capacity_bytes=CAPACITY)
    assert store.last_number() == 20
    store.close()


def test_only_a_file_that_was_not_closed_is_looked_through(
    closed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[Path] = []
    monkeypatch.setattr("routetrace.server.lmdb_env._look_through", looked.append)
    for changed in (False, True, False):
        if changed:
            os.utime(closed / "db" / "data.mdb")
        LmdbStore(closed, capacity_bytes=CAPACITY).close()
        assert bool(looked) is changed
        looked.clear()
    crashed = closed / "crashed"
    store = LmdbStore(closed, capacity_bytes=CAPACITY)
    shutil.copytree(closed / "db", crashed / "db", copy_function=shutil.copy2)
    store.close()
    LmdbStore(crashed, capacity_bytes=CAPACITY).close()
    assert looked == [crashed / "db"]


def test_another_format_is_set_aside(closed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("routetrace.server.lmdb_tables._FORMAT", b"2")
    store = LmdbStore(closed, capacity_bytes=CAPACITY)
    assert list(store.headers()) == []
    store.close()
    assert [path.name[:11] for path in closed.iterdir() if "db." in path.name] == ["db.damaged-"]


# Damages a database in many ways; whatever it is, the store opens, and serves nothing wrong.
DAMAGE = """
import logging, random, shutil, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from test_store import CAPACITY, Corrupt, LmdbStore, NotFound, content, outcome, put, read, record
logging.disable(logging.CRITICAL)
root = Path(sys.argv[2])
store = LmdbStore(root / "good", capacity_bytes=CAPACITY)
put(store, *range(1, 120))
store.compact((40, b"snap" * 300_000), range(1, 30))
put(store, *range(120, 180))
store.compact(None, range(60, 120))
store.close()
good = (root / "good/db/data.mdb").read_bytes()
pages = len(good) // 4096
# Pages that LMDB reads its way from: not the insides of payloads.
tree = [p for p in range(pages) if good[p * 4096 : p * 4096 + 8] == p.to_bytes(8, "little")]
for seed in range(int(sys.argv[3])):
    rng = random.Random(seed)
    data = bytearray(good)
    kind = rng.choice(("flip", "flips", "meta", "zero", "noise", "swap", "cut", "rot"))
    at = rng.choice(tree) * 4096
    if kind == "cut":
        del data[rng.choice((rng.randrange(len(data)), rng.randrange(pages) * 4096)) :]
    elif kind == "zero":
        data[at : at + 4096] = bytes(4096)
    elif kind == "noise":
        data[at : at + 4096] = rng.randbytes(4096)
    elif kind == "swap":
        other = rng.choice(tree) * 4096
        data[at : at + 4096], data[other : other + 4096] = good[other:][:4096], good[at:][:4096]
    elif kind == "meta":
        data[rng.randrange(2) * 4096 + rng.randrange(160)] ^= 1 << rng.randrange(8)
    elif kind == "rot":
        data[rng.randrange(8192, len(data))] ^= 1 << rng.randrange(8)
    else:
        for _ in range(1 if kind == "flip" else 8):
            at = rng.choice(tree) * 4096 + rng.choice((rng.randrange(40), rng.randrange(4096)))
            data[at] ^= 1 << rng.randrange(8)
    print(seed, kind, flush=True)
    dir = root / "bad"
    shutil.rmtree(dir, ignore_errors=True)
    (dir / "db").mkdir(parents=True)
    (dir / "db/data.mdb").write_bytes(data)
    store = LmdbStore(dir, capacity_bytes=CAPACITY)
    assert all(header == record(number).header for number, header in store.headers())
    assert store.load_snapshot() in (None, (40, b"snap" * 300_000))
    for again in range(2):
        for number in range(1, 240):
            assert outcome(read, store, number) in (content(number), Corrupt, NotFound)
        if not again:
            last = max(store.last_number(), 180)
            if last < 200:
                put(store, *range(last + 1, last + 30))
                store.compact((last + 5, b"x" * 100_000), range(1, last + 20, 2))
                put(store, *range(last + 30, last + 40))
                assert read(store, last + 30) == content(last + 30)
    store.close()
"""


def test_no_damage_ends_the_process_or_serves_a_wrong_byte(tmp_path: Path) -> None:
    python(DAMAGE, Path(__file__).parent, tmp_path, 24)
