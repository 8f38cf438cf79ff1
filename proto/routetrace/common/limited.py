"""Log lines at a limited rate, for events that callers can cause at will."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from time import monotonic

from routetrace.common.errors import RouteTraceError

#: Seconds in which each key is logged once.
WINDOW_SECONDS = 10.0

#: Maximum lines in that time, over all keys.
MAX_LINES = 100


class LimitedLog:
    """Logger that leaves out repeated lines, and logs their number later.

    Args:
        log: logger of the lines.
        events: name of the events, for the number of those that were left out.
        now: clock in seconds.
    """

    def __init__(
        self, log: logging.Logger, events: str, now: Callable[[], float] = monotonic
    ) -> None:
        self._log = log
        self._events = events
        self._now = now
        self._since = -WINDOW_SECONDS
        self._keys: set[Hashable] = set()
        self._left_out = 0

    def failed(self, what: str, error: Exception) -> None:
        """Log that something failed; with a traceback, unless the error is typed or an OSError."""
        known = isinstance(error, (RouteTraceError, OSError))
        seen = None if known else error
        self.warning((what, type(error)), "%s failed: %s", what, error, error=seen)

    def warning(
        self, key: Hashable, text: str, *args: object, error: BaseException | None = None
    ) -> None:
        """Log a line, unless one of its key or too many were logged recently.

        Args:
            key: what counts as the same event.
            text: format of the line.
            args: arguments of the format.
            error: exception to log with its traceback.
        """
        now = self._now()
        if now - self._since >= WINDOW_SECONDS:
            if self._left_out:
                seconds = now - self._since
                self._log.warning(
                    "%d more %s in %.0f s are not logged", self._left_out, self._events, seconds
                )
            self._since, self._left_out = now, 0
            self._keys.clear()
        if key in self._keys or len(self._keys) >= MAX_LINES:
            self._left_out += 1
            return
        self._keys.add(key)
        self._log.warning(text, *args, exc_info=error)
