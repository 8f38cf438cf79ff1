"""Configuration of a client: its settings, its server, deadlines and channel options."""

from __future__ import annotations

from dataclasses import dataclass, field
from threading import Event
from typing import Any, cast

import grpc

from routetrace.client import _arguments as check
from routetrace.client._core.route import Route
from routetrace.client.config import ClientConfig
from routetrace.codec import native
from routetrace.common.errors import DeadlineExceeded, RouteTraceError, Unavailable
from routetrace.common.security import Security
from routetrace.common.target import FAILOVER_OPTIONS, targets_of, unreachable


@dataclass(frozen=True)
class Config:
    """Settings of a client, and the state of its server."""

    settings: ClientConfig
    route: Route = field(compare=False, repr=False)
    reached: Event = field(default_factory=Event, compare=False, repr=False)
    """Set once the server has answered."""

    @classmethod
    def of(cls, settings: ClientConfig) -> Config:
        """Check the files of the settings.

        Raises:
            InvalidArgument: if a file is not usable, or a token would travel in plain text.
            MissingDependency: if the codec was not built.
        """
        native.require()
        config = cls(settings, Route(cast("str", settings.target)))
        for target in targets_of(config.target):
            config.security.check(target)
        return config

    @property
    def target(self) -> str:
        """Configured target."""
        return cast("str", self.settings.target)

    @property
    def run(self) -> str:
        """Run of all calls."""
        return cast("str", self.settings.run)

    @property
    def security(self) -> Security:
        """Files and token of all calls."""
        return cast("Security", self.settings.security)

    @property
    def timeout(self) -> float:
        """Seconds of a call that is not given its own."""
        return self.settings.timeout

    @property
    def channel_options(self) -> tuple[tuple[str, Any], ...]:
        """Options of every channel."""
        options: dict[str, str | int] = {
            "grpc.max_receive_message_length": self.settings.max_message_bytes,
            "grpc.max_send_message_length": self.settings.max_message_bytes,
            # A forked child cannot use connections that it shares with its parent.
            "grpc.use_local_subchannel_pool": 1,
            # A server that vanished must not hold a follower forever.
            "grpc.keepalive_time_ms": 30_000,
            "grpc.keepalive_timeout_ms": 10_000,
            # The default backs off to two minutes; a restart takes less.
            "grpc.initial_reconnect_backoff_ms": 100,
            "grpc.max_reconnect_backoff_ms": 2_000,
            # Of one attempt to connect; the default waits 20 s for a port that never answers.
            "grpc.min_reconnect_backoff_ms": 3_000,
        }
        if len(targets_of(self.target)) > 1:
            options |= FAILOVER_OPTIONS
        return tuple({**options, **self.settings.grpc_options}.items())

    def limit(self, timeout: float | None) -> float:
        """Return the seconds that a call may take."""
        return self.timeout if timeout is None else check.seconds("timeout", timeout)

    def explained(self, error: RouteTraceError) -> RouteTraceError:
        """Return the error of a failed connection in words: target, cause and remedy."""
        if isinstance(error, Unavailable):
            error.target = self.target
        if not isinstance(error.__cause__, grpc.RpcError):
            return error
        if isinstance(error, DeadlineExceeded):
            remedy = "the server may be busy: raise timeout="
            if not self.reached.is_set():
                remedy = "check that it is a routetrace-server"
            earlier = error.earlier and self._unreached(error.earlier)
            if earlier is not None:
                remedy = f"an earlier attempt failed: {earlier.message}"
            waited = self.timeout if error.waited_seconds is None else error.waited_seconds
            late = DeadlineExceeded(
                f"no answer from {self.target} within {waited:g} s; {remedy}",
                trace_id=error.trace_id,
                waited_seconds=waited,
                remedy=remedy,
            )
            late.earlier = earlier
            return late
        return self._unreached(error)

    def _unreached(self, error: RouteTraceError) -> Unavailable:
        hint = self.security.hint(error.message, reached=self.reached.is_set())
        target = self.route.unreached or self.target
        message = unreachable(target, error.message, hint, self.channel_options)
        if self.route.unreached:
            message += f" (a worker of {self.target}; its port must be open, too)"
        explained = Unavailable(message, retry_after=error.retry_after)
        explained.target, explained.attempts = self.target, getattr(error, "attempts", 0)
        return explained
