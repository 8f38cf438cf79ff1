"""Names of shared memory; processes of other tests make some as well."""

from __future__ import annotations

import os
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

import psutil

_SHM = Path("/dev/shm")


def shared_names() -> set[str]:
    """Those that there are."""
    return set(os.listdir(_SHM)) if _SHM.is_dir() else set()


def left_behind(before: set[str], ours: Collection[int]) -> set[str]:
    """Names that are new and that no process but ours has mapped, whether or not ours still live.

    Those of another that are not mapped yet are among them, for a moment.
    """
    new = {name for name in shared_names() - before if _is_of_this_user(_SHM / name)}
    for process in psutil.process_iter() if new else ():
        if process.pid not in ours:
            with suppress(psutil.Error):
                new -= {Path(mapped.path).name for mapped in process.memory_maps()}
    return new


def _is_of_this_user(path: Path) -> bool:
    try:
        return path.stat().st_uid == os.getuid()
    except FileNotFoundError:
        return False
