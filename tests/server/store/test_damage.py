"""Damaged and torn files of a store."""

from __future__ import annotations

import errno
import os
import random
import shutil
from pathlib import Path

import pytest

from faults.scenarios import images
from routetrace.common.errors import (
    Corrupt,
    NotFound,
    Unavailable,
)
from routetrace.server.store.disk.frames import Frame
from routetrace.server.store.disk.log import record_frame
from routetrace.server.store.disk.store import DiskStore
from routetrace.server.store.interface import Record
from support.servers.store_records import content, record
from support.servers.stores import CAPACITY, Disk, outcome, put, read, whole_snapshot


def only(directory: Path, pattern: str) -> Path:
    (path,) = directory.glob(f"store-3/{pattern}")
    return path


def flip(file: Path, needle: bytes, *, at: int = 0) -> None:
    """Flip a bit of byte `at` of every `needle`."""
    data = file.read_bytes()
    assert needle in data
    file.write_bytes(data.replace(needle, needle[:at] + bytes([needle[at] ^ 1]) + needle[at + 1 :]))


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


@pytest.mark.parametrize("name", ["db", "store-1", "store-2"])
def test_a_directory_of_another_version_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(Unavailable, match=f"{name} was made by another version"):
        DiskStore(tmp_path, capacity_bytes=CAPACITY)
    (tmp_path / name).rmdir()
    DiskStore(tmp_path, capacity_bytes=CAPACITY).close()


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


@pytest.mark.long
def test_no_image_ends_the_process_serves_a_wrong_byte_or_hides_a_loss() -> None:
    found = images.run(seed=1, images=3, flips=100)
    assert found["opened"] == 106
    assert found["right"] > 10 * found["opened"]
    assert found["damaged"]
    assert found["wrong"] == found["crashes"] == 0
