"""Calls of a store, and a program that uses one in another process."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from routetrace.common.errors import (
    RouteTraceError,
)
from routetrace.server.store.interface import Store
from support.servers.store_records import content, record

CAPACITY = 64 << 20


def put(store: Store, *numbers: int) -> None:
    for future in [store.append(record(number)) for number in numbers]:
        future.result(30)


def read(store: Store, number: int) -> bytes:
    return store.read(number, [(0, len(content(number)))])[0]


def whole_snapshot(store: Store) -> tuple[int, bytes] | None:
    found = store.load_snapshot()
    return (found[0], b"".join(found[1])) if found else None


def outcome(call: Any, *args: Any) -> Any:
    """Return the value of a call, or the kind of its error."""
    try:
        return call(*args)
    except RouteTraceError as error:
        return type(error)


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
