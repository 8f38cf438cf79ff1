"""`python stepping.py FILE ...`: the server, with a note of each long step of its loop.

A step is one callback of the event loop, from which on no other call goes on. Arguments after the
file are those of `routetrace-server`.
"""

from __future__ import annotations

import asyncio
import sys
import time
from asyncio import events
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from routetrace.server import daemon

#: Shortest step that is noted, in seconds.
_NOTED_S = 0.001
#: Seconds after which the thread's processor time is read anew: a system call, which takes as long
#: as a short step.
_READ_S = 0.0002

_ASYNCIO = str(Path(asyncio.__file__).parent)


class Step(NamedTuple):
    """A step of the loop; times in seconds.

    Attributes:
        begun: of `time.monotonic`.
        took: until its end.
        computed: processor time of the thread; up to `_READ_S` of the steps before may be in it.
        place: coroutine, and the line at which it waits afterwards.
    """

    begun: float
    took: float
    computed: float
    place: str


def steps(file: Path) -> list[Step]:
    """Return the steps that a server has noted so far."""
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    fields = [line.rstrip().split(" ", 3) for line in lines if line.endswith("\n")]
    return [Step(float(b), float(t), float(c), place) for b, t, c, place in fields]


def note_steps(file: TextIO) -> None:
    """Note long steps of all event loops of this process."""
    run: Callable[[events.Handle], None] = events.Handle._run  # type: ignore[attr-defined]

    read_at = before = 0.0

    def timed(handle: events.Handle) -> None:
        nonlocal read_at, before
        begun = time.monotonic()
        if begun - read_at >= _READ_S:
            read_at, before = begun, time.thread_time()
        run(handle)
        took = time.monotonic() - begun
        if took >= _NOTED_S:
            computed = min(took, time.thread_time() - before)
            file.write(f"{begun:.6f} {took:.6f} {computed:.6f} {_place(handle)}\n")

    events.Handle._run = timed  # type: ignore[attr-defined]


def _place(handle: Any) -> str:
    """Return the name of a callback, or of a task's coroutine and of the one that it waits for."""
    call = handle._callback  # None once it is cancelled
    task = getattr(call, "__self__", None)
    if not isinstance(task, asyncio.Task):
        return _name(call)
    outer: Any = task.get_coro()
    inner, frame = outer, None
    while inner is not None and getattr(inner, "cr_frame", None):
        if not inner.cr_code.co_filename.startswith(_ASYNCIO):
            name, frame = _name(inner), inner.cr_frame
        inner = inner.cr_await
    return f"{_name(outer)} {name}:{frame.f_lineno}" if frame else _name(outer)


def _name(code: Any) -> str:
    return str(getattr(code, "__qualname__", type(code).__name__))


if __name__ == "__main__":
    with Path(sys.argv[1]).open("w", buffering=1) as file:
        note_steps(file)
        code = daemon.main(sys.argv[2:])
    sys.exit(code)
