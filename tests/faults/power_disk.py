"""A disk that loses power: events of a process that writes and syncs, and images that it may leave.

`Recorder` wraps the functions of `os` that change files. `Disk` replays its events and makes crash
images by the rules of POSIX: content is durable up to the last sync of its file, names are durable
up to the last sync of their directory. Of later changes, any page may be on the disk or not, pages
may be torn between sectors, a file may be long and hold zeros, and changes of names may have
happened in any order that the names allow.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

PAGE, SECTOR = 4096, 512
#: In place of the number of a file.
DIRECTORY = -1
#: Files that say nothing of the stored records.
_IGNORED = ("reserve", "lock")
_MODES = ("none", "all", "first", "some", "some")


class Event(NamedTuple):
    """A change of the disk, or a mark of the workload."""

    kind: str
    """Name of a method of `Disk`, or of a mark."""
    args: tuple[Any, ...]


class Recorder:
    """Events below a directory, in the order in which they took effect."""

    def __init__(self, root: Path) -> None:
        self._root = str(root)
        self.events: list[Event] = []
        self._lock = threading.RLock()
        self._paths: dict[int, str] = {}  # by open descriptor
        self._files: dict[int, int] = {}  # numbers of files, by open descriptor
        self._names = _numbers(root)  # numbers of files, by path
        self._next = max(self._names.values(), default=0) + 1

    def mark(self, kind: str, *args: Any) -> None:
        """Add a mark of the workload."""
        with self._lock:
            self.events.append(Event(kind, args))

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record until the end of the block."""
        calls = {name: getattr(os, name) for name in _CALLS}
        try:
            for name, real in calls.items():
                setattr(os, name, self._wrapped(real, getattr(self, f"_on_{name}")))
            yield
        finally:
            for name, real in calls.items():
                setattr(os, name, real)

    def _wrapped(self, real: Callable[..., Any], on: Callable[..., None]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            with self._lock:
                result = real(*args, **named)
                on(result, *args)
                return result

        return call

    def _inside(self, path: Any) -> str:
        """Return the absolute path; "" if its changes do not count."""
        name = os.path.abspath(os.fspath(path))
        inside = name == self._root or name.startswith(self._root + os.sep)
        return name if inside and os.path.basename(name) not in _IGNORED else ""

    def _on_open(self, result: int, path: Any, *_: Any) -> None:
        if not (name := self._inside(path)):
            return
        self._paths[result] = name
        if os.path.isdir(name):
            return
        if name not in self._names:
            self._names[name] = self._next
            self.mark("make", name, self._next)
            self._next += 1
        self._files[result] = self._names[name]

    def _on_close(self, _: None, descriptor: int) -> None:
        self._paths.pop(descriptor, None)
        self._files.pop(descriptor, None)

    def _on_pwrite(self, result: int, descriptor: int, data: Any, at: int) -> None:
        if descriptor in self._files:
            self.mark("write", self._files[descriptor], at, bytes(memoryview(data)[:result]))

    def _on_ftruncate(self, _: None, descriptor: int, size: int) -> None:
        if descriptor in self._files:
            self.mark("cut", self._files[descriptor], size)

    def _on_fsync(self, _: None, descriptor: int) -> None:
        if descriptor in self._files:
            self.mark("sync", self._files[descriptor])
        elif descriptor in self._paths:
            self.mark("sync_names", self._paths[descriptor])

    _on_fdatasync = _on_fsync

    def _on_rename(self, _: None, old: Any, new: Any) -> None:
        before, after = self._inside(old), self._inside(new)
        if before:
            self._names[after] = self._names.pop(before)
            self.mark("rename", before, after)

    def _on_unlink(self, _: None, path: Any) -> None:
        if name := self._inside(path):
            self._names.pop(name, None)
            self.mark("unlink", name)

    def _on_mkdir(self, _: None, path: Any, *__: Any) -> None:
        if name := self._inside(path):
            self._names[name] = DIRECTORY
            self.mark("make", name, DIRECTORY)


_CALLS = [name.removeprefix("_on_") for name in vars(Recorder) if name.startswith("_on_")]


@dataclass
class File:
    """A file, by what of it is durable."""

    durable: bytearray = field(default_factory=bytearray)
    pending: list[tuple[int, bytes | None]] = field(default_factory=list)
    """Changes since the last sync: (offset, data), or (size, None) where it was cut."""

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
        self._durable = _numbers(root)
        self._pending: list[tuple[str, tuple[Any, ...]]] = []  # changes of names
        self._files = {
            number: File(bytearray(Path(name).read_bytes()))
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
        self._files[number].pending.append((at, data))

    def cut(self, number: int, size: int) -> None:
        self._files[number].pending.append((size, None))

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


def _numbers(root: Path) -> dict[str, int]:
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
        return
    if at > len(data):
        data.extend(bytes(at - len(data)))
    data[at : at + len(part)] = part


def _rename(names: dict[str, int], kind: str, args: tuple[Any, ...]) -> None:
    if kind == "make":
        names[args[0]] = args[1]
    elif kind == "unlink":
        names.pop(args[0], None)
    elif args[0] in names:
        names[args[1]] = names.pop(args[0])
