"""A store on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from routetrace.server.store.disk.store import DiskStore
from routetrace.server.store.interface import Record
from support.servers.stores import CAPACITY, Disk


@pytest.fixture
def disk_store(tmp_path: Path) -> Any:
    store = DiskStore(tmp_path, capacity_bytes=CAPACITY)
    yield store
    store.close()


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


@pytest.fixture
def closed(tmp_path: Path) -> Path:
    """A directory with 20 records, the first 5 of them in a snapshot, without a user."""
    store = DiskStore(tmp_path, capacity_bytes=CAPACITY)
    for number in range(1, 21):
        store.append(Record(number, b"header %d" % number, b"payload %d " % number * 999)).result()
    store.compact((5, [b"the ", b"state"]), [])
    store.close()
    return tmp_path
