"""A store whose process is killed, and a second process."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path
from typing import Any

import pytest

from routetrace.common.errors import (
    Closed,
    Unavailable,
)
from routetrace.server.store.disk.store import DiskStore
from support.servers import store_records
from support.servers.store_records import content, record
from support.servers.stores import CAPACITY, outcome, put, python, read, whole_snapshot

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
