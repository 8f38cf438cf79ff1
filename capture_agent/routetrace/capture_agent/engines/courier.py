"""A thread that makes the calls which an engine's thread need not wait for, in their order.

The engine's thread posts a call with its arguments, which do not change afterwards, and goes on.
The thread makes it while the engine waits for its device.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from multiprocessing import parent_process
from multiprocessing.util import Finalize
from queue import Empty, SimpleQueue
from typing import Any

_log = logging.getLogger(__name__)

#: Posted calls beyond which the posting thread makes them itself, so that memory stays bounded.
_MOST = 64

#: Seconds at exit for a call that is under way.
_EXIT_S = 5.0


class Courier:
    """Makes calls in the order in which they were posted, one at a time.

    Args:
        name: of the thread.
        rest: called like a posted call after each `rest_s` seconds without a post.
        rest_s: see `rest`.
    """

    def __init__(
        self, name: str, rest: Callable[[], object] | None = None, rest_s: float | None = None
    ) -> None:
        #: Held during each call: its holder finds none under way.
        self.lock = threading.RLock()
        self._rest, self._rest_s = rest, rest_s
        self._calls: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._wake: SimpleQueue[None] = SimpleQueue()
        self._closed = False
        self._inert = False  # inherited over a fork
        _couriers.add(self)
        if parent_process() is not None:  # atexit does not run in a child of multiprocessing
            Finalize(None, _catch_up_all, exitpriority=2)
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def post(self, function: Callable[..., object], *args: Any) -> None:
        """Add a call after those that were posted before. An exception of it is only logged."""
        self._calls.append((function, args))
        if self._closed or len(self._calls) > _MOST:
            self.catch_up()
        else:
            self._wake.put(None)

    def catch_up(self) -> None:
        """Make all posted calls now, in this thread."""
        with self.lock:
            while self._calls:
                function, args = self._calls.popleft()
                if not self._inert:
                    self._make(function, args)

    def close(self) -> None:
        """Make the posted calls, and end the thread. Later ones are made by those who post."""
        self._closed = True
        self._wake.put(None)
        self.catch_up()

    def _run(self) -> None:
        while not self._closed:
            posted = self._waits()
            with self.lock:
                self.catch_up()
                if not posted and self._rest is not None and not self._closed:
                    self._make(self._rest, ())

    def _waits(self) -> bool:
        """Wait for a post; return False if none came for a while."""
        try:
            self._wake.get(timeout=self._rest_s)
        except Empty:
            return False
        return True

    def _make(self, function: Callable[..., object], args: tuple[Any, ...]) -> None:
        try:
            function(*args)
        except Exception:
            _log.exception("routetrace: internal fault in capture")

    def _after_fork_in_child(self) -> None:
        self.lock = threading.RLock()  # some thread of the parent may have held it
        self._closed = self._inert = True


_couriers: weakref.WeakSet[Courier] = weakref.WeakSet()


def _catch_up_all() -> None:
    """Make the posted calls at exit, before agents are closed."""
    for courier in list(_couriers):
        if courier.lock.acquire(timeout=_EXIT_S):
            try:
                courier.close()
            finally:
                courier.lock.release()


def _after_fork_in_child() -> None:
    for courier in list(_couriers):
        courier._after_fork_in_child()


atexit.register(_catch_up_all)
os.register_at_fork(after_in_child=_after_fork_in_child)
