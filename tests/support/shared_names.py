"""Names of shared memory; processes of other tests make some as well."""

from __future__ import annotations

import os
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

import psutil

_SHM = Path("/dev/shm")
#: Beginnings of the names that Python, torch and this package may make; engines that other tests
#: run make more.
_KINDS = ("psm_", "sem.", "torch_", "routetrace")


def shared_names() -> set[str]:
    """Return those that exist, of kinds that this package may make."""
    names = os.listdir(_SHM) if _SHM.is_dir() else ()
    return {name for name in names if name.startswith(_KINDS)}


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
