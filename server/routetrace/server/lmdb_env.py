"""Opening the database of the LMDB store: by one process alone, and in whatever state it is."""

from __future__ import annotations

import fcntl
import logging
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import lmdb
from lmdb.verify import VerifyError, verify

from routetrace.server.lmdb_tables import NAMES, Contents, Tables
from routetrace.v1.errors import Unavailable

log = logging.getLogger(__name__)

# Deleting takes pages before it gives any back, and snapshots need room beside the records.
_RESERVE_LEAST = 64 << 20
_MAX_READERS = 1024
# What speaks of the file, not of the machine: a full disk must not cost a good database.
_DAMAGE = (
    VerifyError,
    lmdb.CorruptedError,
    lmdb.IncompatibleError,
    lmdb.InvalidError,
    lmdb.PageNotFoundError,
    lmdb.VersionMismatchError,
)


class DirLock:
    """Keeps other processes out of a directory. The kernel lets go of it when the process dies.

    Raises:
        Unavailable: if another process, or another store of this one, holds it.
    """

    def __init__(self, data_dir: Path) -> None:
        self._file = open(data_dir / "lock", "a+")  # noqa: SIM115 (held until release)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.seek(0)
            owner = self._file.read().strip() or "unknown"
            self._file.close()
            raise Unavailable(
                f"data_dir {data_dir} is in use by process {owner}: every server needs its own"
            ) from None
        with suppress(OSError):  # a full disk: the lock holds without a name in it
            self._file.truncate(0)
            self._file.write(f"{os.getpid()}\n")
            self._file.flush()

    def release(self) -> None:
        """Lets the next one in."""
        self._file.close()


def open_database(path: Path, capacity_bytes: int) -> tuple[Any, Tables, Contents]:
    """Opens the database at `path`, or a fresh one if there is none, or none that can be read.

    LMDB trusts its file, and ends the process where it finds a page that can not be. So a file that
    was not left by `close_database` is looked through first (about 0.2 s per GB). What can not be
    read is renamed, never deleted. The caller holds the lock of the directory.

    Raises:
        lmdb.Error: if the machine does not allow it (rights, disk, memory).
    """
    if (path / "data.mdb").exists():
        try:
            if not _left_clean(path):
                _look_through(path)
            return _open(path, capacity_bytes)
        except _DAMAGE as error:
            _set_aside(path, error)
    return _open(path, capacity_bytes)


def close_database(env: Any, *, sound: bool) -> None:
    """Closes the environment; if it is sound, notes that its file needs no looking through."""
    path = Path(env.path())
    env.close()
    if sound:
        with suppress(OSError):  # a full disk: it will be looked through
            (path / "clean").write_text(_fingerprint(path))


def _open(path: Path, capacity_bytes: int) -> tuple[Any, Tables, Contents]:
    (path / "clean").unlink(missing_ok=True)
    # It holds the readers of a process that is gone, and may be damaged itself.
    (path / "lock.mdb").unlink(missing_ok=True)
    map_size = capacity_bytes + max(capacity_bytes // 8, _RESERVE_LEAST)
    env: Any = lmdb.open(
        str(path), map_size=_round_up(map_size), max_dbs=len(NAMES), max_readers=_MAX_READERS
    )
    try:
        tables = Tables(env)
        with env.begin(buffers=True) as txn:
            contents = tables.survey(txn)
    except BaseException:
        env.close()
        raise
    return env, tables, contents


def _fingerprint(path: Path) -> str:
    stat = (path / "data.mdb").stat()
    return f"{stat.st_size} {stat.st_mtime_ns}"


def _left_clean(path: Path) -> bool:
    try:
        return (path / "clean").read_text() == _fingerprint(path)
    except (OSError, ValueError):
        return False


def _look_through(path: Path) -> None:
    problems = verify(path)
    if problems:
        raise VerifyError("; ".join(problems[:3]))


def _set_aside(path: Path, error: Exception) -> None:
    aside = path.with_name(f"{path.name}.damaged-{time.strftime('%Y%m%dT%H%M%S')}")
    while aside.exists():
        aside = aside.with_name(aside.name + "x")
    path.rename(aside)
    log.error(
        "database %s can not be read: it is kept as %s, and an empty one takes its place: %s",
        path,
        aside.name,
        error,
    )


def _round_up(size: int) -> int:
    return -(-size // 65536) * 65536
