"""Open the directory of the disk store: lock it, read its files, set aside unreadable ones."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from routetrace.common.errors import Corrupt, Unavailable
from routetrace.server.store.disk.blocks import Blocks
from routetrace.server.store.disk.frames import DROP, END, RECORD, Damage, FrameFile
from routetrace.server.store.disk.log import (
    Log,
    Segment,
    committed,
    dropped_by,
    previous_of,
    stored_of,
)
from routetrace.server.store.disk.snapshot import Snapshot, Stored, load, sync_directory

log = logging.getLogger(__name__)

#: The name states the format: no flipped bit turns it into another format's.
NAME = "store-3"
#: Suffix of the directory of a copy that is not complete.
PART = ".part"
_OTHERS = re.compile(r"db|store-\d+")


class DirLock:
    """Lock of a directory against other processes; the kernel releases it when the process dies.

    Raises:
        Unavailable: if another process, or another store of this one, holds it.
    """

    def __init__(self, data_dir: Path) -> None:
        access = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        lock = os.open(data_dir / "lock", access, 0o600)
        self._file = open(lock, "ab+")  # noqa: SIM115 (held until release)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.seek(0)
            owner = self._file.read(20).decode("ascii", "replace").strip() or "unknown"
            self._file.close()
            raise Unavailable(
                f"data_dir {data_dir} is in use by process {owner}: every server needs its own"
            ) from None
        with suppress(OSError):  # a full disk: the lock holds without a name in it
            self._file.truncate(0)
            self._file.write(b"%d\n" % os.getpid())
            self._file.flush()

    def release(self) -> None:
        """Release the lock."""
        self._file.close()


class Contents(NamedTuple):
    """Contents of a directory."""

    path: Path
    blocks: Blocks
    log: Log
    snapshots: list[Snapshot]
    """At most two: the newest one last, and the one that it replaced."""
    stored: dict[int, Stored]
    last_number: int
    damaged: set[str]
    """Files and records that could not be read."""


def open_directory(data_dir: Path, capacity_bytes: int) -> Contents:
    """Read the files of the store in `data_dir`, without the payloads.

    Damage costs the damaged record or file only. If no snapshot can be read, the state before the
    first record is unknown: the whole directory is then renamed, never deleted, and an empty store
    takes its place. The caller holds the lock.

    Raises:
        Unavailable: if another version of the store made the directory, or it is half a copy.
        OSError: if the machine does not allow it (rights, disk).
    """
    path = data_dir / NAME
    for other in data_dir.iterdir():
        if other.name == NAME + PART:
            raise Unavailable(f"{other} is an unfinished copy: delete it, and copy again")
        if _OTHERS.fullmatch(other.name) and other != path:
            raise Unavailable(
                f"{other} was made by another version of routetrace-server: "
                "use that one, another data_dir, or move it away"
            )
    make_directory(path)
    with suppress(OSError):  # of another owner, or on a disk without modes
        path.chmod(0o700)  # up to 0.8, all users could read the snapshots in it
    try:
        contents = read_directory(path, capacity_bytes)
    except Corrupt as error:
        _set_aside(path, error)
        make_directory(path)
        contents = read_directory(path, capacity_bytes)
        contents.damaged.add("the whole store")
    _make_durable(contents)
    return contents


def make_directory(path: Path) -> None:
    """Create a directory, and those above it; the names of all are durable when this returns.

    The name of one that is there is synced, too: the process that made it may have died before.
    """
    made = not path.is_dir()
    if made:
        try:
            path.mkdir(mode=0o700, exist_ok=True)
        except FileNotFoundError:
            if path == path.parent:  # the current directory was deleted
                raise
            make_directory(path.parent)
            path.mkdir(mode=0o700, exist_ok=True)
    try:
        sync_directory(path.parent)
    except OSError as error:
        # Of a directory that was there: the one above may belong to another user, or be one that
        # cannot be synced, such as that of automatic mounts.
        if made or error.errno not in (errno.EACCES, errno.EPERM, errno.EINVAL, errno.EROFS):
            raise


def _make_durable(contents: Contents) -> None:
    """Sync what was read: a process that was killed during a commit may not have done so.

    The records count as acknowledged from now on, and space that they do not need is used again.
    """
    for segment in contents.log.segments:
        try:
            file = os.open(segment.file.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            continue  # it was reported, and nothing of it is served
        try:
            os.fsync(file)
        finally:
            os.close(file)
    sync_directory(contents.path)


def read_directory(path: Path, capacity_bytes: int) -> Contents:
    """Read the files of one store, as `open_directory` does.

    Raises:
        Corrupt: if no snapshot can be read, and the log is not whole.
        OSError: if the machine does not allow it (rights, disk).
    """
    damaged: set[str] = set()
    for draft in path.glob("*.new"):
        draft.unlink()
    snapshots, index = _read_snapshots(path, damaged)
    files = FrameFile.all(path, "log")
    base = snapshots[-1].base if snapshots else 1
    if not snapshots and (damaged or files) and (not files or files[0].id != 1):
        raise Corrupt("there is no snapshot that can be read, and not the whole log")
    last = max([s.number for s in snapshots] + [*index], default=0)
    segments: list[Segment] = []
    for file in files:
        segments.append(_read_segment(file, last, index if file.id >= base else {}, damaged))
        last = max(last, segments[-1].last)
    blocks = Blocks(path / "blocks", capacity_bytes)
    _claim(blocks, index, damaged)
    next_id = max([base] + [file.id + 1 for file in files])
    return Contents(path, blocks, Log(path, segments, next_id), snapshots, index, last, damaged)


def _claim(blocks: Blocks, index: dict[int, Stored], damaged: set[str]) -> None:
    # Blocks of dropped payloads are used again. If the drop itself was lost, a block belongs to the
    # last record that was written to it.
    for number in sorted(index, reverse=True):
        there = False
        with _reporting(damaged, f"payload of record {number}"):
            there = blocks.claim(index[number].table)
        if not there:
            del index[number]


def _read_snapshots(path: Path, damaged: set[str]) -> tuple[list[Snapshot], dict[int, Stored]]:
    found: list[Snapshot] = []
    index: dict[int, Stored] = {}
    for file in FrameFile.all(path, "snapshot"):
        with _reporting(damaged, file.path.name):
            snapshot, index = load(file)
            found.append(snapshot)
            continue
        with suppress(OSError):
            file.path.rename(file.path.with_name(file.path.name + ".damaged"))
    return found, index


def _read_segment(
    file: FrameFile, last: int, index: dict[int, Stored], damaged: set[str]
) -> Segment:
    """Apply the records and drops of a log file to the index."""
    end = here = 0
    reported = False
    with _reporting(damaged, file.path.name):
        for frame in committed(file.scan()):
            if isinstance(frame, Damage):
                if frame.last:
                    # Either way, no record of an unfinished commit was acknowledged.
                    log.warning("%s: an unfinished commit, or damage", frame.where)
                else:
                    _report(damaged, frame.where, f"behind record {here}")
                    reported = True
                continue
            end = frame.end
            if frame.kind == RECORD:
                stored = stored_of(frame)
                if stored is not None:
                    index[frame.number] = stored
                here = frame.number
                if previous_of(frame) > last and not reported:
                    _report(damaged, f"records {last + 1} to {previous_of(frame)}", "not there")
                reported = False
                last = max(last, here)
            elif frame.kind == DROP:
                for number in dropped_by(frame):
                    index.pop(number, None)
            elif frame.kind != END:
                _report(damaged, file.path.name, f"a frame of kind {frame.kind}")
    return Segment(file, end, last)


@contextmanager
def _reporting(damaged: set[str], where: str) -> Iterator[None]:
    try:
        yield
    except (Corrupt, OSError) as error:
        _report(damaged, where, error)


def _report(damaged: set[str], where: str, why: object) -> None:
    damaged.add(where)
    log.error("%s: damaged: %s", where, why)


def _set_aside(path: Path, error: Exception) -> None:
    aside = path.with_name(f"{path.name}.damaged-{time.strftime('%Y%m%dT%H%M%S')}")
    while aside.exists():
        aside = aside.with_name(aside.name + "x")
    path.rename(aside)
    log.error(
        "%s cannot be read: it is kept as %s, and an empty store takes its place: %s",
        path,
        aside.name,
        error,
    )
