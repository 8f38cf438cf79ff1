"""`python -m faults.recorded JSON ...`: the server, with a note of each change below a directory.

Arguments after the JSON, the fields of `Recording`, are those of `routetrace-server`. A worker
process notes its changes in the same file. `Server(program=program(...))` starts it.
"""

from __future__ import annotations

import errno
import json
import os
import pickle
import random
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from faults.power_disk import Event, Recorder, names_after

#: Calls that make something durable.
_SYNCS = ("fsync", "fdatasync")


@dataclass(frozen=True)
class Recording:
    """Settings of the record, and faults that are injected.

    Attributes:
        root: directory whose changes are noted.
        file: takes the events; those of an earlier process stay.
        names: numbers of the files that were there before the first event, by path.
        seed: of the calls that fail.
        die_at: number of the change before which the process kills itself; 0: none.
        die_at_sync: whether it waits for the next call that makes something durable.
        full: chance that a write fills the disk, and is cut short; the next one finds no room.
        no_room: chance that there is none to allocate in advance.
    """

    root: str
    file: str
    names: dict[str, int]
    seed: int = 0
    die_at: int = 0
    die_at_sync: bool = False
    full: float = 0.0
    no_room: float = 0.0


def program(recording: Recording) -> list[str]:
    """Return the program of a `Server`, and its first arguments."""
    return ["-m", "faults.recorded", json.dumps(asdict(recording))]


def events_of(file: Path) -> Iterator[Event]:
    """Yield the events of a file; one that a process did not write to its end is none."""
    with file.open("rb") as source, suppress(EOFError, pickle.UnpicklingError):
        while True:
            yield Event(*pickle.load(source))


class _Run:
    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._rng = random.Random(f"recorded {recording.seed}")
        self._write = os.write  # before it is recorded itself
        self._out = os.open(recording.file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._left = recording.die_at
        self._full = False
        self.recorder = Recorder(Path(recording.root), self._note, self._before)
        self._read_names()
        os.register_at_fork(after_in_child=self._read_names)

    def _read_names(self) -> None:
        """Know the files of earlier processes, and of the worker before."""
        file, names = Path(self._recording.file), self._recording.names
        self.recorder.names = names_after(names, events_of(file))

    def _note(self, event: Event) -> None:
        self._write(self._out, pickle.dumps(tuple(event)))

    def _before(self, name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
        recording, rng = self._recording, self._rng
        if self._left > 1:
            self._left -= 1
        elif self._left and (name in _SYNCS or not recording.die_at_sync):
            os.kill(os.getpid(), signal.SIGKILL)
        if name == "posix_fallocate" and rng.random() < recording.no_room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if name == "pwrite" and self._full:
            self._full = False
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if name == "pwrite" and rng.random() < recording.full:
            self._full = True
            descriptor, data, at = args
            return descriptor, memoryview(data)[: rng.randint(1, len(data))], at
        return args


def main(args: list[str]) -> NoReturn:
    """Run the server."""
    # So that everything that is imported finds the calls that are recorded.
    with _Run(Recording(**json.loads(args[0]))).recorder.recording():
        from routetrace.server import daemon

        daemon.end_process(daemon.main(args[1:]))


if __name__ == "__main__":
    main(sys.argv[1:])
