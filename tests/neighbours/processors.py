"""Processors of a campaign's processes: each tenant gets its own, as on a machine of its own.

Without this, an attacker takes the victim's processor, and the figures tell how two clients of one
machine share it, rather than how the server shares itself.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from enum import Enum, auto

import psutil

#: Priority of attackers and honest neighbours where they share the victim's processor: almost no
#: time is left for them while the victim computes.
_YIELDING = 19


class Part(Enum):
    """Part of a process in a campaign."""

    SERVER = auto()
    VICTIM = auto()
    NEIGHBOUR = auto()


def processors(available: set[int]) -> dict[Part, set[int]]:
    """Return the processors of each part: half of all, one, and the rest; shared if too few."""
    ordered = sorted(available)
    half = max(1, len(ordered) // 2)
    clients = ordered[half:] or ordered
    return {
        Part.SERVER: set(ordered[:half]),
        Part.VICTIM: set(clients[:1]),
        Part.NEIGHBOUR: set(clients[1:] or clients),
    }


@contextmanager
def starting(part: Part) -> Iterator[None]:
    """Start processes of a part here: they inherit the processors of the calling thread."""
    if not hasattr(os, "sched_setaffinity"):  # not Linux
        yield
        return
    before = _available()
    os.sched_setaffinity(0, processors(before)[part])
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _available() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def yield_to_victim(pid: int) -> None:
    """Lower the priority of a neighbour that is prepared, if it has the victim's processor."""
    parts = processors(_available())
    if parts[Part.NEIGHBOUR] & parts[Part.VICTIM]:
        for thread in psutil.Process(pid).threads():  # on Linux, each has a priority of its own
            with suppress(ProcessLookupError):
                os.setpriority(os.PRIO_PROCESS, thread.id, _YIELDING)


def used_since_now(pids: dict[str, int], seconds: float) -> Callable[[], dict[str, float]]:
    """Return a function that returns the processors that processes have used since now, by name.

    Args:
        pids: processes by name.
        seconds: shortest time that counts, for processes that end at once.
    """
    begun = time.monotonic()
    before = {name: _used(pid) for name, pid in pids.items()}

    def since() -> dict[str, float]:
        took = max(seconds, time.monotonic() - begun)
        return {name: max(0.0, _used(pid) - before[name]) / took for name, pid in pids.items()}

    return since


def _used(pid: int) -> float:
    """Processor seconds of a process; 0 if it has ended."""
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(times.user + times.system)
