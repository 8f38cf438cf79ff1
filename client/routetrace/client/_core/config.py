"""Configuration of a client: its server, deadlines, channel options and credentials."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from threading import Event
from typing import Any

import grpc

from routetrace.client import _arguments as check
from routetrace.client._core.route import Route
from routetrace.codec import native
from routetrace.common.errors import (
    DeadlineExceeded,
    InvalidArgument,
    RouteTraceError,
    Unavailable,
    quoted,
    typed,
)
from routetrace.common.limits import is_text
from routetrace.common.security import Security
from routetrace.common.target import FAILOVER_OPTIONS, parse_target, targets_of, unreachable


@dataclass(frozen=True)
class Config:
    """Configuration of a client."""

    target: str
    run: str
    timeout: float
    channel_options: tuple[tuple[str, Any], ...]
    security: Security
    route: Route = field(compare=False, repr=False)
    reached: Event = field(default_factory=Event, compare=False, repr=False)
    """Set once the server has answered."""

    @classmethod
    def make(
        cls,
        target: str | None,
        run: str | None,
        timeout: float,
        max_message_bytes: int,
        grpc_options: Mapping[str, str | int],
        security: Security | Mapping[str, Any] | None,
    ) -> Config:
        """Check the arguments; complete them from the environment.

        Raises:
            InvalidArgument: if an argument is wrong, there is no target, a file is not usable, or a
                token would travel in plain text.
        """
        target = parse_target(os.environ.get("ROUTETRACE_TARGET", "") if target is None else target)
        if run is None:
            run = os.environ.get("ROUTETRACE_RUN") or "default"
        check.identifier("run", run)
        check.seconds("timeout", timeout)
        check.whole("max_message_bytes", max_message_bytes, 1, 2**31 - 1)
        native.require()
        security = Security.of(security)
        for one in targets_of(target):
            security.check(one)
        defaults = {
            "grpc.max_receive_message_length": max_message_bytes,
            "grpc.max_send_message_length": max_message_bytes,
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
        if len(targets_of(target)) > 1:
            defaults |= FAILOVER_OPTIONS
        merged = tuple({**defaults, **_grpc_options(grpc_options)}.items())
        return cls(target, run, timeout, merged, security, Route(target))

    def __reduce__(self) -> tuple[Any, ...]:
        return _anew, (self.target, self.run, self.timeout, self.channel_options, self.security)

    def limit(self, timeout: float | None) -> float:
        """Return the seconds that a call may take."""
        return self.timeout if timeout is None else check.seconds("timeout", timeout)

    def explained(self, error: RouteTraceError) -> RouteTraceError:
        """Return the error of a failed connection in words: target, cause and remedy."""
        if not isinstance(error.__cause__, grpc.RpcError):
            return error
        if isinstance(error, DeadlineExceeded):
            remedy = "the server may be busy: raise timeout="
            if not self.reached.is_set():
                remedy = "check that it is a routetrace-server"
            waited = self.timeout if error.waited_seconds is None else error.waited_seconds
            return DeadlineExceeded(
                f"no answer from {self.target} within {waited:g} s; {remedy}",
                trace_id=error.trace_id,
                waited_seconds=waited,
                remedy=remedy,
            )
        hint = self.security.hint(error.message, reached=self.reached.is_set())
        message = unreachable(self.route.unreached or self.target, error.message, hint)
        if self.route.unreached:
            message += f" (a worker of {self.target}; its port must be open, too)"
        return Unavailable(message, retry_after=error.retry_after)


def _anew(
    target: str,
    run: str,
    timeout: float,
    channel_options: tuple[tuple[str, Any], ...],
    security: Security,
) -> Config:
    """Return a configuration without its state: neither a route nor an answer is known."""
    return Config(target, run, timeout, channel_options, security, Route(target))


def _grpc_options(options: Any) -> dict[str, str | int]:
    """Return gRPC channel options."""
    expected = "a mapping of str to str or int"
    if not isinstance(options, Mapping):
        raise InvalidArgument(field="grpc_options", value=typed(options), expected=expected)
    for name, value in options.items():
        fits = is_text(value) or (isinstance(value, int) and -(2**31) <= value < 2**31)
        if not (is_text(name) and fits):
            shown = quoted(dict(options))
            raise InvalidArgument(field="grpc_options", value=shown, expected=expected)
    return dict(options)
