"""Which channel a call uses: a new one once a certificate was replaced, the old until its end."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from routetrace.client._core import Config, methods
from routetrace.v1.errors import InvalidArgument

#: Seconds between two looks at the files.
_LOOK_S = 1.0

_log = logging.getLogger(__name__)


class Connection:
    """A channel, its methods by name, and the calls on it."""

    def __init__(self, channel: Any) -> None:
        self.channel = channel
        self.methods = methods(channel)
        self.calls = 0


class Connections:
    """The connections of a client. Not thread-safe.

    Args:
        config: where to, and as whom.
        make: makes a channel to a target, with options.
    """

    def __init__(self, config: Config, make: Callable[[str, Any], Any]) -> None:
        self._config = config
        self._make = make
        self._all: list[Connection] = []  # the last is for new calls
        self._version: Any = None
        self._look_at = 0.0

    def __bool__(self) -> bool:
        return bool(self._all)

    def enter(self) -> Connection:
        """The connection for a new call, which is to leave it.

        Raises:
            InvalidArgument: if there is none yet, and a file that it needs can not be used.
        """
        now = time.monotonic()
        if not self._all or now >= self._look_at:
            self._look_at = now + _LOOK_S
            version = self._config.security.version()  # before the files are read
            if not self._all or version != self._version:
                self._connect()
                self._version = version
        self._all[-1].calls += 1
        return self._all[-1]

    def leave(self, connection: Connection) -> list[Any]:
        """A call has ended; returns channels that are of no more use, to be closed."""
        connection.calls -= 1
        done = [old for old in self._all[:-1] if not old.calls]
        self._all = [kept for kept in self._all if kept not in done]
        return [old.channel for old in done]

    def clear(self) -> list[Any]:
        """Forgets all; returns the channels, to be closed."""
        gone, self._all = self._all, []
        return [connection.channel for connection in gone]

    def _connect(self) -> None:
        try:
            channel = self._make(self._config.target, self._config.channel_options)
        except InvalidArgument as error:
            if not self._all:
                raise
            # Perhaps half of it is there yet; the next change is another attempt.
            _log.warning("routetrace: goes on with the certificates it has: %s", error)
        else:
            self._all.append(Connection(channel))
