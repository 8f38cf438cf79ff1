"""Reserve of disk space for compaction on a full disk."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

#: A full disk, a full quota, a file as large as files may be.
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

log = logging.getLogger(__name__)

_T = TypeVar("_T")


class Reserve:
    """File without content, whose space compaction uses when the disk is full."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.size = 0
        """Size in bytes."""

    def keep(self, size: int) -> bool:
        """Reserve `size` bytes; on failure keep the old size and return False."""
        if size == self.size:
            return True
        try:
            file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.ftruncate(file, min(size, self.size))
                os.posix_fallocate(file, 0, size)
                self.size = size
                return True
            except OSError:
                os.ftruncate(file, self.size)
            finally:
                os.close(file)
        except OSError as error:
            log.debug("no reserve of %d bytes: %s", size, error)
        return False

    def with_room(self, call: Callable[[], _T]) -> _T:
        """Run a call; if the disk is full, release the reserve and retry once."""
        try:
            return call()
        except OSError as error:
            if error.errno not in NO_ROOM or not self._give_back():
                raise
            return call()

    def _give_back(self) -> bool:
        self.size = 0
        with suppress(OSError):
            self._path.unlink()
            return True
        return False
