"""A disk that loses power: events of a process that writes and syncs, and images that it may leave.

`Recorder` wraps the calls of Python that change files, and the `fallocate` of the C library. `Disk`
replays its events and makes crash images by the rules of POSIX: content is durable up to the last
sync of its file, names are durable up to the last sync of their directory. Of later changes, any
page may be on the disk or not, pages may be torn between sectors, a hole that was punched holds
zeros or what was there, a file may be long and hold zeros, as one that was allocated does, and
changes of names may have happened in any order that the names allow.
"""

from __future__ import annotations

import _pyio
import builtins
import ctypes
import io
import os
import pathlib
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

PAGE, SECTOR = 4096, 512
#: In place of the number of a file.
DIRECTORY = -1
#: Files that say nothing of the stored records, and are written in C.
_IGNORED = ("lock",)
_MODES = ("none", "all", "first", "some", "some")
_PUNCH_HOLE = 0x03  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE
_OPEN = io.open


class Event(NamedTuple):
    """A change of the disk, or a mark of the workload."""

    kind: str
    """Name of a method of `Disk`, or of a mark."""
    args: tuple[Any, ...]
    begun: float
    """Time of `time.monotonic` at which the call began."""


class Recorder:
    """Changes below a directory, in the order in which they took effect.

    One call is made at a time; those of other threads wait for it.

    Args:
        root: the directory.
        note: called with each event.
        before: called before each call with its name and arguments; may fail in its place, or
            return other arguments.
        names: numbers of the files that are there, by path; None: those of `numbers_of`.
    """

    def __init__(
        self,
        root: Path,
        note: Callable[[Event], object],
        before: Callable[[str, tuple[Any, ...]], tuple[Any, ...]] = lambda _, args: args,
        names: dict[str, int] | None = None,
    ) -> None:
        self._root = str(root)
        self._note = note
        self._before = before
        self._lock = threading.RLock()
        self._begun = 0.0
        self._paths: dict[int, str] = {}  # by open descriptor
        self._files: dict[int, int] = {}  # numbers of files, by open descriptor
        self.names = numbers_of(root) if names is None else names
        """Numbers of the files that are there, by path."""

    def mark(self, kind: str, *args: Any) -> None:
        """Add a mark of the workload."""
        with self._lock:
            self._begun = time.monotonic()
            self._add(kind, *args)

    def _add(self, kind: str, *args: Any) -> None:
        self._note(Event(kind, args, self._begun))

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record until the end of the block."""
        # pathlib of Python 3.10 keeps functions of its own.
        owners = [os, *filter(None, [getattr(pathlib, "_normal_accessor", None)])]
        with ExitStack() as stack:
            for name in filter(partial(hasattr, os), _CALLS):
                call = self._wrapped(name, getattr(os, name))
                for owner in owners:
                    if hasattr(owner, name):
                        stack.enter_context(patch.object(owner, name, call))
            # Python's own `open` makes its calls in C.
            for owner in (builtins, io, *owners[1:]):
                stack.enter_context(patch.object(owner, "open", self._open))
            found = ctypes.CDLL.__getattr__

            def function(library: ctypes.CDLL, name: str) -> Any:
                real = found(library, name)
                if name != "fallocate":
                    return real
                call = self._wrapped(name, real)
                stack.enter_context(patch.object(library, name, call))  # for the next look
                return call

            stack.enter_context(patch.object(ctypes.CDLL, "__getattr__", function))
            yield

    def _open(self, file: Any, *args: Any, **named: Any) -> Any:
        return (_pyio.open if self._counts((file,)) else _OPEN)(file, *args, **named)

    def _wrapped(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        on = getattr(self, f"_on_{name}")

        def call(*args: Any, **named: Any) -> Any:
            with self._lock:
                self._begun = time.monotonic()
                args = self._before(name, args) if self._counts(args) else args
                try:
                    result = real(*args, **named)
                except OSError:
                    if name == "posix_fallocate":  # the file may have grown
                        on(None, *args)
                    raise
                on(result, *args)
                return result

        return call

    def _counts(self, args: tuple[Any, ...]) -> bool:
        """Whether a call may change what is below the directory."""
        if isinstance(args[0], int):
            return args[0] in self._paths
        return bool(self._inside(args[0]))

    def _inside(self, path: Any) -> str:
        """Return the absolute path; "" if its changes do not count."""
        name = os.path.abspath(os.fspath(path))
        inside = name == self._root or name.startswith(self._root + os.sep)
        return name if inside and os.path.basename(name) not in _IGNORED else ""

    def _on_open(self, result: int, path: Any, flags: int = 0, *_: Any) -> None:
        if not (name := self._inside(path)):
            return
        self._paths[result] = name
        if os.path.isdir(name):
            return
        if name not in self.names:
            self.names[name] = time.monotonic_ns()  # of no other file, of any process
            self._add("make", name, self.names[name])
        self._files[result] = self.names[name]
        if flags & os.O_TRUNC:
            self._add("cut", self.names[name], 0)

    def _on_close(self, _: None, descriptor: int) -> None:
        self._paths.pop(descriptor, None)
        self._files.pop(descriptor, None)

    def _on_pwrite(self, result: int, descriptor: int, data: Any, at: int) -> None:
        if descriptor in self._files:
            self._add("write", self._files[descriptor], at, bytes(memoryview(data)[:result]))

    def _on_write(self, result: int, descriptor: int, data: Any) -> None:
        if descriptor in self._files:
            at = os.lseek(descriptor, 0, os.SEEK_CUR) - result
            self._on_pwrite(result, descriptor, data, at)

    def _on_ftruncate(self, _: None, descriptor: int, size: int) -> None:
        if descriptor in self._files:
            self._add("cut", self._files[descriptor], size)

    def _on_truncate(self, _: None, path: Any, size: int) -> None:
        if name := self._inside(path):
            self._add("cut", self.names[name], size)

    def _on_posix_fallocate(self, _: None, descriptor: int, *__: int) -> None:
        if descriptor in self._files:
            self._add("allocate", self._files[descriptor], os.fstat(descriptor).st_size)

    def _on_fallocate(self, result: int, descriptor: int, mode: int, at: Any, size: Any) -> None:
        if descriptor in self._files and result == 0:
            assert mode == _PUNCH_HOLE, f"fallocate with the mode {mode} is not modelled"
            self._add("punch", self._files[descriptor], at.value, size.value)

    def _on_fsync(self, _: None, descriptor: int) -> None:
        if descriptor in self._files:
            self._add("sync", self._files[descriptor])
        elif descriptor in self._paths:
            self._add("sync_names", self._paths[descriptor])

    _on_fdatasync = _on_fsync

    def _on_rename(self, _: None, old: Any, new: Any) -> None:
        before, after = self._inside(old), self._inside(new)
        if before:
            _rename(self.names, "rename", (before, after))
            self._add("rename", before, after)

    _on_replace = _on_rename

    def _on_unlink(self, _: None, path: Any) -> None:
        if name := self._inside(path):
            self.names.pop(name, None)
            self._add("unlink", name)

    def _on_mkdir(self, _: None, path: Any, *__: Any) -> None:
        if name := self._inside(path):
            self.names[name] = DIRECTORY
            self._add("make", name, DIRECTORY)


_CALLS = [name.removeprefix("_on_") for name in vars(Recorder) if name.startswith("_on_")]


@dataclass
class File:
    """A file, by what of it is durable."""

    durable: bytearray = field(default_factory=bytearray)
    pending: list[tuple[int, bytes | None]] = field(default_factory=list)
    """Changes since the last sync: (offset, data), or (size, None) where it was cut."""
    size: int = 0
    """Size with all changes."""

    def content(self, rng: random.Random) -> bytearray:
        """Return content that may be on the disk after a crash."""
        data, mode = bytearray(self.durable), rng.choice(_MODES)
        changes = list(_pages(self.pending))
        first = rng.randint(0, len(changes)) if mode == "first" else len(changes)
        for at, part in changes[:first]:
            if mode == "none" or (mode == "some" and rng.random() < 0.5):
                continue
            torn = part is not None and mode == "some" and rng.random() < 0.2
            _change(data, at, part[: rng.randrange(0, PAGE, SECTOR)] if torn and part else part)
        size = max([at + len(part) for at, part in changes if part is not None], default=0)
        if size > len(data) and rng.random() < 0.3:
            data.extend(bytes(size - len(data)))
        return data


class Disk:
    """What is durable, and what is not yet.

    Args:
        root: a directory; all that it holds is durable.
    """

    def __init__(self, root: Path) -> None:
        self._root = str(root)
        self._durable = numbers_of(root)
        self._pending: list[tuple[str, tuple[Any, ...]]] = []  # changes of names
        self._files = {
            number: File(bytearray(data := Path(name).read_bytes()), size=len(data))
            for name, number in self._durable.items()
            if number != DIRECTORY
        }

    def apply(self, event: Event) -> bool:
        """Apply a change; return False for a mark of the workload."""
        method = getattr(self, event.kind, None)
        if method is not None:
            method(*event.args)
        return method is not None

    def make(self, name: str, number: int) -> None:
        self._pending.append(("make", (name, number)))
        self._files.setdefault(number, File())

    def rename(self, old: str, new: str) -> None:
        self._pending.append(("rename", (old, new)))

    def unlink(self, name: str) -> None:
        self._pending.append(("unlink", (name,)))

    def write(self, number: int, at: int, data: bytes) -> None:
        file = self._files[number]
        file.pending.append((at, data))
        file.size = max(file.size, at + len(data))

    def cut(self, number: int, size: int) -> None:
        self._files[number].pending.append((size, None))
        self._files[number].size = size

    def allocate(self, number: int, size: int) -> None:
        end = self._files[number].size
        if size > end:
            self.write(number, end, bytes(size - end))

    def punch(self, number: int, at: int, size: int) -> None:
        if (inside := min(size, self._files[number].size - at)) > 0:
            self.write(number, at, bytes(inside))

    def sync(self, number: int) -> None:
        file = self._files[number]
        for at, part in file.pending:
            _change(file.durable, at, part)
        file.pending.clear()

    def sync_names(self, directory: str) -> None:
        rest = []
        for kind, args in self._pending:
            if os.path.dirname(args[0]) == directory:
                _rename(self._durable, kind, args)
            else:
                rest.append((kind, args))
        self._pending = rest

    def contents(self) -> dict[str, bytes | bytearray | None]:
        """Return the content of each file by its name, None for a directory: with all changes."""
        names = dict(self._durable)
        for kind, args in self._pending:
            _rename(names, kind, args)
        found: dict[str, bytes | bytearray | None] = {}
        for name, number in names.items():
            data = None
            if number != DIRECTORY:
                data = bytearray(self._files[number].durable)
                for at, part in self._files[number].pending:
                    _change(data, at, part)
            found[os.path.relpath(name, self._root)] = data
        return found

    def image(self, target: Path, rng: random.Random) -> None:
        """Write a legal crash image to `target`, which is made."""
        names = dict(self._durable)
        mode = rng.choice(_MODES)
        first = rng.randint(0, len(self._pending)) if mode == "first" else len(self._pending)
        late: set[str] = set()  # names with a change that did not happen
        for i, (kind, args) in enumerate(self._pending):
            touched = {arg for arg in args if isinstance(arg, str)}
            lost = mode == "none" or i >= first or (mode == "some" and rng.random() < 0.5)
            if lost or touched & late:
                late |= touched
            else:
                _rename(names, kind, args)
        target.mkdir(parents=True)
        for name in sorted(names):
            path = target / os.path.relpath(name, self._root)
            if not path.parent.is_dir():
                continue  # its directory was lost
            if names[name] == DIRECTORY:
                path.mkdir()
            else:
                path.write_bytes(self._files[names[name]].content(rng))


def contents_of(root: Path) -> dict[str, bytes | bytearray | None]:
    """Return what is below a directory, as `Disk.contents` does."""
    return {
        os.path.relpath(name, root): None if number == DIRECTORY else Path(name).read_bytes()
        for name, number in numbers_of(root).items()
    }


def names_after(names: dict[str, int], events: Iterable[Event]) -> dict[str, int]:
    """Return the numbers of all files by their paths after some events."""
    names = dict(names)
    for kind, args, _ in events:
        if kind in ("make", "rename", "unlink"):
            _rename(names, kind, args)
    return names


def numbers_of(root: Path) -> dict[str, int]:
    """Return the number of each file below a directory by its path; all differ."""
    paths = [path for path in sorted(root.rglob("*")) if path.name not in _IGNORED]
    return {str(p): DIRECTORY if p.is_dir() else i for i, p in enumerate(paths)}


def _pages(changes: Iterable[tuple[int, bytes | None]]) -> Iterator[tuple[int, bytes | None]]:
    for at, data in changes:
        if data is None:
            yield at, None
            continue
        start = 0
        while start < len(data):
            stop = min(len(data), start + PAGE - (at + start) % PAGE)
            yield at + start, data[start:stop]
            start = stop


def _change(data: bytearray, at: int, part: bytes | None) -> None:
    if part is None:
        del data[at:]
        part = b""
    if at > len(data):
        data.extend(bytes(at - len(data)))
    data[at : at + len(part)] = part


def _rename(names: dict[str, int], kind: str, args: tuple[Any, ...]) -> None:
    if kind == "make":
        names[args[0]] = args[1]
    elif kind == "unlink":
        names.pop(args[0], None)
    elif args[0] in names:
        old, new = args
        for name in [name for name in names if name == old or name.startswith(old + os.sep)]:
            names[new + name.removeprefix(old)] = names.pop(name)
