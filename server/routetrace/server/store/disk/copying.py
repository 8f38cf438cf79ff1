"""Copy of a store's directory while a server writes to it, as a lost machine would leave it.

The copy needs nothing of the server and holds up nothing there. Each round copies the snapshots and
the log as they are at one moment, then the payloads that these name. A server frees the blocks of a
payload only after the snapshot or the log says so. So if a payload of a round matches its checksum,
it is whole; if it does not, its blocks are in use again, and the next round does not name it any
more. A round without such a payload completes the copy: all of it is the store at the moment at
which that round began. A payload that does not match in two rounds is damaged, and stays so in the
copy.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np

from routetrace.common.errors import Corrupt, Unavailable
from routetrace.server.store.disk.blocks import BLOCK_BYTES, TABLE, Blocks
from routetrace.server.store.disk.directory import (
    NAME,
    PART,
    DirLock,
    make_directory,
    read_directory,
)
from routetrace.server.store.disk.frames import Frame, FrameFile
from routetrace.server.store.disk.snapshot import Stored, sync_directory

#: Entries of an empty directory: a lock, and the root of a file system.
_NOTHING = frozenset({"lock", "lost+found"})

#: Bytes written between two syncs, so that no sync holds up the server's disk for long.
_SYNC_BYTES = 64 << 20

#: Rounds after which the store changes too fast to be copied.
_MAX_ROUNDS = 100


class Copied(NamedTuple):
    """Result of a copy."""

    last_number: int
    """Last record."""
    payloads: int
    payload_bytes: int
    damaged: int
    """Payloads, records and snapshots that do not match their checksums."""
    rounds: int
    """Times that the snapshots and the log were copied."""


def copy_store(data_dir: Path, to: Path) -> Copied:
    """Copy the store in `data_dir`, in use or not, into the new or empty directory `to`.

    The copy holds all records that were durable when this was called and were not dropped since;
    it is durable when this returns. On an error, at most a lock file stays in `to`.

    Raises:
        Unavailable: if there is no store in `data_dir`, `to` is in use or not empty, or the store
            changes faster than it can be copied.
        Corrupt: if no snapshot can be read, and the log is not whole.
        OSError: if the machine does not allow it (rights, disk).
    """
    source = data_dir / NAME
    if not source.is_dir():
        raise Unavailable(
            f"{data_dir} holds no store of this version: expected a directory {NAME} in it"
        )
    with _empty(to):
        part = to / (NAME + PART)
        part.mkdir(mode=0o700)
        try:
            copied = _copy(source, part)
            part.rename(to / NAME)
            sync_directory(to)
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise
    return copied


@contextmanager
def _empty(to: Path) -> Iterator[None]:
    """Hold the lock of an empty directory, which is created if missing."""
    make_directory(to)
    if not (to / "lock").exists():  # else it may be in use
        check_empty(to)
    lock = DirLock(to)
    try:
        check_empty(to)
        yield
    finally:
        lock.release()


def check_empty(to: Path) -> None:
    """Raise Unavailable if a directory exists and is not empty."""
    if not to.exists():
        return
    held = sorted({path.name for path in to.iterdir()} - _NOTHING)
    if held:
        raise Unavailable(
            f"{to} is not empty, it holds {held[0]}: expected a new or empty directory"
        )


def _copy(source: Path, part: Path) -> Copied:
    whole: set[str] = set()
    copied: dict[int, Stored] = {}
    failed: set[int] = set()
    damaged = 0
    with ExitStack() as stack:
        theirs = Blocks(source / "blocks", 0, read_only=True)
        stack.callback(theirs.close)
        ours = Blocks(part / "blocks", 0)
        stack.callback(ours.close)
        rounds = 0
        while True:
            rounds += 1
            _copy_files(source, part, whole)
            # Its blocks are claimed as far as the file goes.
            os.truncate(part / "blocks", _size_of(source / "blocks"))
            contents = read_directory(part, 0)
            contents.blocks.close()
            changed: set[int] = set()
            since = 0
            for number in _by_place(contents.stored, copied):
                stored = contents.stored[number]
                try:
                    ours.put(theirs.read(number, *stored, [(0, stored.size)])[0], stored.table)
                except Corrupt:
                    if number not in failed:
                        changed.add(number)
                        continue
                    _copy_undamaged(theirs, ours, number, stored)
                    damaged += 1
                copied[number] = stored
                since += stored.size
                if since >= _SYNC_BYTES:
                    ours.sync()
                    since = 0
            if not changed:
                break
            if rounds == _MAX_ROUNDS:
                raise Unavailable(
                    f"{source} changes faster than it can be copied: copy again when less is "
                    "written"
                )
            failed = changed
        ours.sync()
    for path in part.iterdir():
        _sync(path)
    sync_directory(part)
    size = sum(stored.size for stored in contents.stored.values())
    damaged += len(contents.damaged)
    return Copied(contents.last_number, len(contents.stored), size, damaged, rounds)


def survey(data_dir: Path) -> Copied:
    """Read all of a store that no server uses, and return its contents.

    Raises:
        Corrupt: if no snapshot can be read, and the log is not whole.
        OSError: if the machine does not allow it (rights, disk).
    """
    contents = read_directory(data_dir / NAME, 0)
    damaged = len(contents.damaged)
    with closing(contents.blocks) as blocks:
        for number, stored in contents.stored.items():
            damaged += not _is_whole(blocks, number, stored)
    size = sum(stored.size for stored in contents.stored.values())
    return Copied(contents.last_number, len(contents.stored), size, damaged, 0)


def _is_whole(blocks: Blocks, number: int, stored: Stored) -> bool:
    try:
        blocks.read(number, *stored, [(0, stored.size)])
    except Corrupt:
        return False
    return True


def _by_place(stored: dict[int, Stored], copied: dict[int, Stored]) -> list[int]:
    """Return the payloads that are left to copy, in the order of their first blocks.

    The number of a record that the disk refused is used again, so that numbers alone do not tell.
    """
    left = [number for number, where in stored.items() if copied.get(number) != where]
    return sorted(left, key=lambda number: int(np.frombuffer(stored[number].table, TABLE)[0][0]))


def _copy_undamaged(theirs: Blocks, ours: Blocks, number: int, stored: Stored) -> None:
    """Copy the blocks of a damaged payload that match their checksums."""
    for at in range(0, stored.size, BLOCK_BYTES):
        part = [(at, min(BLOCK_BYTES, stored.size - at))]
        first = at // BLOCK_BYTES * TABLE.itemsize
        try:
            data = theirs.read(number, *stored, part)[0]
        except Corrupt:
            continue
        ours.put(data, stored.table[first : first + TABLE.itemsize])


def _copy_files(source: Path, part: Path, whole: set[str]) -> None:
    """Copy the snapshots and the log as they are at one moment.

    Args:
        source: directory of the server.
        part: directory of the copy.
        whole: names of the files that an earlier call copied and that have not changed since.
    """
    with ExitStack() as stack:
        files = _open_all(source, stack)
        logs = [name for name in files if name.startswith("log-")]  # in the order of their ids
        for name, file in files.items():
            if name in whole and (part / name).exists():
                continue
            _copy_file(file, part / name)
            # Nothing is appended to a log file once there is another one behind it.
            if name not in logs[-1:]:
                whole.add(name)
    for kind in ("snapshot", "log"):
        for ours in FrameFile.all(part, kind):
            if ours.path.name not in files:
                ours.path.unlink()
    if logs:
        _cut_unfinished(next(f for f in FrameFile.all(part, "log") if f.path.name == logs[-1]))


def _open_all(source: Path, stack: ExitStack) -> dict[str, IO[bytes]]:
    """Open the snapshots and the log files that the store consists of at one moment.

    An open file can be read to its end, also once it is deleted. Names are used once, so that a
    list of them that stays the same while they are opened is that of one moment.
    """
    names = _names(source)
    while True:
        with ExitStack() as opened:
            try:
                files: dict[str, IO[bytes]] = {
                    name: opened.enter_context(open(source / name, "rb")) for name in names
                }
            except FileNotFoundError:  # a compaction deleted it
                files = {}
            before, names = names, _names(source)
            if names == before == [*files]:
                stack.push(opened.pop_all())
                return files


def _names(source: Path) -> list[str]:
    return [file.path.name for kind in ("snapshot", "log") for file in FrameFile.all(source, kind)]


def _copy_file(file: IO[bytes], to: Path) -> None:
    left = os.fstat(file.fileno()).st_size  # it may grow meanwhile
    with open(os.open(to, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as out:
        while left and (data := file.read(min(left, 1 << 20))):
            out.write(data)
            left -= len(data)


def _cut_unfinished(file: FrameFile) -> None:
    """Cut a commit off that was under way when the log was copied."""
    end = 0
    for frame in file.scan():
        if isinstance(frame, Frame):
            end = frame.end
    os.truncate(file.path, end)


def _size_of(path: Path) -> int:
    """Return the size of a file in whole blocks."""
    return -(-path.stat().st_size // BLOCK_BYTES) * BLOCK_BYTES


def _sync(path: Path) -> None:
    """Make a file durable, and have the next reader of it read the disk."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        with suppress(OSError):  # where the system allows it
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
