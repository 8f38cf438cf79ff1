"""Payloads in files of a local disk, behind those in memory; they do not outlive the process."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import IO

from routetrace.server.wire.checksums import Payload

_log = logging.getLogger(__name__)

_PREFIX = "payloads-"
_LOCK = "lock"


class PayloadFiles:
    """Payloads by record number, least recently used first out. Thread-safe.

    Each process has a directory of its own; those of processes that are gone are removed. A payload
    that cannot be written is not kept, and one that has changed on the disk is not returned.

    Args:
        directory: for the directories of all processes.
        capacity_bytes: of all payloads; one that is larger is not kept.

    Raises:
        OSError: if the directory cannot be used.
    """

    def __init__(self, directory: Path, capacity_bytes: int) -> None:
        self._capacity = capacity_bytes
        self._lock = threading.Lock()
        self._held: OrderedDict[int, int] = OrderedDict()  # sizes
        self._bytes = 0
        self._full = False
        directory.mkdir(parents=True, exist_ok=True)
        with _locked(directory):
            _remove_left(directory)
            self._path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=directory))
            self._owned = _locked(self._path)

    def get(self, number: int, fits: Callable[[Payload], bool]) -> Payload | None:
        """Return a payload if it is there and fits."""
        with self._lock:
            if number not in self._held:
                return None
            self._held.move_to_end(number)
        try:
            payload = self._file(number).read_bytes()
        except OSError as error:
            _log.warning("a cached payload cannot be read: %s", error)
        else:
            if fits(payload):
                return payload
        self.drop(number)
        return None

    def put(self, number: int, payload: Payload) -> None:
        """Keep a payload, unless it is there."""
        size = len(payload)
        with self._lock:
            if number in self._held or size > self._capacity:
                return
            out = []
            while self._bytes + size > self._capacity:
                oldest, held = self._held.popitem(last=False)
                self._bytes -= held
                out.append(oldest)
        for oldest in out:
            self._file(oldest).unlink(missing_ok=True)
        try:
            self._file(number).write_bytes(payload)
        except OSError as error:
            if not self._full:
                _log.warning("payloads are not cached on the disk for now: %s", error)
            self._full = True
            self._file(number).unlink(missing_ok=True)
            return
        self._full = False
        with self._lock:
            if number not in self._held:
                self._held[number] = size
                self._bytes += size

    def drop(self, number: int) -> None:
        """Remove a payload."""
        with self._lock:
            self._bytes -= self._held.pop(number, 0)
        self._file(number).unlink(missing_ok=True)

    def close(self) -> None:
        """Remove all payloads."""
        shutil.rmtree(self._path, ignore_errors=True)
        self._owned.close()

    def _file(self, number: int) -> Path:
        return self._path / str(number)


def _locked(directory: Path) -> IO[bytes]:
    """Lock a directory; wait for it. The lock is held while the result is open."""
    file = (directory / _LOCK).open("wb")
    fcntl.flock(file, fcntl.LOCK_EX)
    return file


def _remove_left(directory: Path) -> None:
    """Remove what processes have left that are gone: nothing holds its lock."""
    for left in directory.glob(f"{_PREFIX}*"):
        try:
            descriptor = os.open(left / _LOCK, os.O_WRONLY)
        except OSError:  # its process ended before it had one
            shutil.rmtree(left, ignore_errors=True)
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue  # its process lives
        else:
            shutil.rmtree(left, ignore_errors=True)
        finally:
            os.close(descriptor)
