"""A server that notes how long each callback holds its event loop.

`python watched.py NOTES FLAG ...` serves as `python -m routetrace.server.daemon FLAG ...` does, and
writes NOTES when it ends: a line of JSON for each callback of at least a millisecond.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from asyncio import events
from pathlib import Path
from typing import Any

from routetrace.server.daemon import main

_LEAST_SECONDS = 0.001


def _note_holds() -> list[tuple[float, float, float, str]]:
    """Return the holds from now on: when one began, CPU time, wall time, name."""
    holds: list[tuple[float, float, float, str]] = []
    run = events.Handle._run  # all that the loop does but waiting for sockets

    def noted(handle: Any) -> None:
        name = _name(handle._callback)
        begun, cpu = time.monotonic(), time.thread_time()
        run(handle)
        cpu, wall = time.thread_time() - cpu, time.monotonic() - begun
        if wall >= _LEAST_SECONDS:
            holds.append((begun, cpu, wall, name))

    events.Handle._run = noted  # type: ignore[method-assign,assignment]
    return holds


def _name(callback: Any) -> str:
    """Name a callback; that of a task by the innermost coroutine that goes on, and its line."""
    task = getattr(callback, "__self__", None)
    if not isinstance(task, asyncio.Task):
        return str(getattr(callback, "__qualname__", callback))
    coroutine: Any = task.get_coro()
    name = "?"
    while coroutine is not None and hasattr(coroutine, "__qualname__"):
        name = coroutine.__qualname__
        if frame := getattr(coroutine, "cr_frame", None):
            name += f":{frame.f_lineno}"
        coroutine = getattr(coroutine, "cr_await", None)
    return name


if __name__ == "__main__":
    notes = Path(sys.argv[1])
    found = _note_holds()
    code = main(sys.argv[2:])
    notes.write_text("".join(json.dumps(hold) + "\n" for hold in found))
    sys.exit(code)
