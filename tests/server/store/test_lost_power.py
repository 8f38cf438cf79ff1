"""Power that is lost after something else went wrong, or in a new directory; see tests/faults."""

from __future__ import annotations

import errno
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from faults.power_disk import Disk, Event, Recorder
from routetrace.server.process.partitions import check_partitions, make_partitions, partition_dir
from routetrace.server.store.disk.copying import copy_store, survey
from routetrace.server.store.disk.store import DiskStore
from routetrace.server.store.interface import Record
from support.servers.stores import CAPACITY, put, read

PAYLOAD = 5000


@pytest.fixture
def root(tmp_path: Path) -> Path:
    path = tmp_path / "root"
    path.mkdir()
    return path


def images(root: Path, disk: Disk, count: int = 20) -> Iterator[Path]:
    """Yield what may be left of a directory."""
    rng = random.Random(0)
    for number in range(count):
        path = root.with_name(f"image-{number}")
        disk.image(path, rng)
        yield path


def test_what_a_killed_process_left_is_durable_before_it_is_served(root):
    events: list[Event] = []
    disk = Disk(root)
    with Recorder(root, events.append).recording():
        first = DiskStore(root / "data", capacity_bytes=CAPACITY)
        put(first, 1)
        put(first, 2)
        # It died before the last sync; what it wrote is known to the kernel.
        del events[max(i for i, event in enumerate(events) if event.kind == "sync") :]
        first._lock.release()
        second = DiskStore(root / "data", capacity_bytes=CAPACITY)
        served = [number for number, _ in second.headers()]
        for event in events:
            disk.apply(event)
    assert served == [1, 2]
    for image in images(root, disk):
        store = DiskStore(image / "data", capacity_bytes=CAPACITY)
        assert [number for number, _ in store.headers()] == served
        store.close()
    for store in (first, second):
        store.close()


def test_blocks_are_used_again_once_the_snapshot_that_frees_them_is_durable(root):
    events: list[Event] = []
    disk = Disk(root)
    with Recorder(root, events.append).recording():
        first = DiskStore(root / "data", capacity_bytes=CAPACITY)
        put(first, 1, 2)
        first.compact((2, [b"state"]), [1])
        # It died behind the rename; what came then was not done.
        del events[max(i for i, event in enumerate(events) if event.kind == "rename") + 1 :]
        first._lock.release()
        begun = len(events)
        second = DiskStore(root / "data", capacity_bytes=CAPACITY)
        put(second, 3)
    for at, event in enumerate(events):
        disk.apply(event)
        for image in images(root, disk, 4) if at >= begun else ():
            store = DiskStore(image / "data", capacity_bytes=CAPACITY)
            assert read(store, 2)
            store.close()
            assert not survey(image / "data").damaged
            shutil.rmtree(image)
    for store in (first, second):
        store.close()


@pytest.mark.parametrize("gives_back", [False, True])
def test_what_a_failed_commit_left_names_no_block_that_is_used_again(root, gives_back):
    """Of two frames the first one was there; its block held another payload, or a hole."""
    writes = 0
    full = errno.ENOSPC if gives_back else errno.EIO  # a full disk gives blocks back

    def before(name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
        nonlocal writes
        writes += name == "pwrite"
        if name == "pwrite" and writes == 4:  # behind two payloads: the log
            descriptor, data, at = args
            return descriptor, data[: len(data) * 2 // 3], at
        if name == "pwrite" and writes == 5:
            raise OSError(full, os.strerror(full))
        return args

    def payload(number: int) -> bytes:
        return b"%d " % number * (PAYLOAD // 2)

    def append(store: DiskStore, *numbers: int) -> list[BaseException | None]:
        with store._changed:  # one commit
            found = [store.append(Record(n, b"header", payload(n))) for n in numbers]
        return [future.exception(30) for future in found]

    events: list[Event] = []
    disk = Disk(root)
    with Recorder(root, events.append, before).recording():
        store = DiskStore(root / "data", capacity_bytes=CAPACITY)
        writes = 1
        assert all(append(store, 1, 2))
        assert not any(append(store, 3))
        store.close()
    torn = 0
    for event in events:
        disk.apply(event)
        for image in images(root, disk, 6):
            store = DiskStore(image / "data", capacity_bytes=CAPACITY)
            held = [number for number, _ in store.headers()]
            torn += held[:1] == [1]
            for number in held:
                assert store.read(number, [(0, 10)]) == [payload(number)[:10]]
            store.close()
            assert not survey(image / "data").damaged
            shutil.rmtree(image)
    assert torn  # the first frame was there, alone


def _single(root: Path) -> Path:
    data_dir = root / "new" / "data"
    store = DiskStore(data_dir, capacity_bytes=CAPACITY)
    put(store, 1)
    store.close()
    return data_dir


def _partition(root: Path) -> Path:
    data_dir = root / "new" / "data"
    make_partitions(data_dir, 2)
    for number in range(2):
        store = DiskStore(partition_dir(data_dir, number), capacity_bytes=CAPACITY)
        put(store, 1)
        store.close()
    return partition_dir(data_dir, 1)


def _copy(root: Path) -> Path:
    copy_store(_single(root), root / "copies" / "today")
    return root / "copies" / "today"


@pytest.mark.parametrize("make", [_single, _partition, _copy])
def test_new_directories_are_durable(root: Path, make: Callable[[Path], Path]) -> None:
    """Those above the data directory were not, where they were new as well."""
    events: list[Event] = []
    disk = Disk(root)
    with Recorder(root, events.append).recording():
        data_dir = make(root)
    for event in events:
        disk.apply(event)
    for image in images(root, disk):
        if make is _partition:
            check_partitions(image / data_dir.parent.relative_to(root), 2)
        store = DiskStore(image / data_dir.relative_to(root), capacity_bytes=CAPACITY)
        assert read(store, 1)
        store.close()
