"""A worker's end of the socket pair to the process that watches the workers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable

from routetrace.server.process.workers import ALL_READY, NOT_ALL_READY, READY

_log = logging.getLogger("routetrace.server.daemon")


class Link:
    """Messages of the watching process, over all the times that this worker stands by or serves.

    Args:
        link: the socket.
        stop: set where the watching process says so, or is gone.
    """

    def __init__(self, link: socket.socket, stop: asyncio.Event) -> None:
        self._link = link
        self._stop = stop
        self._reported = False
        self.all_ready = False
        """Whether all workers have reported that they are ready."""
        self.on_change: Callable[[], object] = lambda: None
        """Called after a change of `all_ready`."""
        asyncio.get_running_loop().add_reader(link, self._receive)

    def report_ready(self) -> None:
        """Report that this worker answers calls; once is enough for its process."""
        if not self._reported:
            self._reported = True
            with contextlib.suppress(OSError):  # it is gone, which stops the worker
                self._link.send(READY)

    def _receive(self) -> None:
        message = self._link.recv(1)
        if message in (ALL_READY, NOT_ALL_READY):
            self.all_ready = message == ALL_READY
            self.on_change()
            return
        if not message:
            _log.error("the process that watches the workers is gone")
        asyncio.get_running_loop().remove_reader(self._link)
        self._stop.set()
