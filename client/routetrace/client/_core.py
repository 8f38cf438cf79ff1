"""Core of the clients without I/O: calls, retries and results as read plans.

A plan is a generator that yields steps and is sent their outcomes; a shell (_sync, _aio) carries
them out. A step that fails with a grpc.RpcError gets it thrown in. So each decision is written
once, and can be tested without a network.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass, field
from threading import Event
from typing import Any, Generic, TypeVar

import grpc

from routetrace.client import _arguments as check
from routetrace.client._assemble import Assembler, Want
from routetrace.client._messages import parser_of, unary_parser_of
from routetrace.client._retry import Attempts
from routetrace.client._route import Route
from routetrace.client.stat import ReadFacts, TraceState
from routetrace.client.trace import RoutingTrace
from routetrace.common.errors import (
    Corrupt,
    DeadlineExceeded,
    Incomplete,
    InvalidArgument,
    NotFound,
    Overloaded,
    RouteTraceError,
    Unavailable,
)
from routetrace.common.security import Security
from routetrace.common.target import FAILOVER_OPTIONS, parse_target, targets_of, unreachable
from routetrace.v1 import native
from routetrace.v1 import routetrace_pb2 as pb
from routetrace.v1 import routetrace_pb2_grpc as pb_grpc

T = TypeVar("T")

# ------------------------------------------------------------------ steps


@dataclass(frozen=True)
class Unary:
    """Call a method; its outcome is the response."""

    method: str
    request: Any
    timeout: float


@dataclass(frozen=True)
class Open:
    """Start a streaming call; its outcome is the call. A plan has one open at a time."""

    method: str
    request: Any
    timeout: float | None


@dataclass(frozen=True)
class Receive:
    """Take the next message of a call; its outcome is the message, or END."""

    call: Any


@dataclass(frozen=True)
class Sleep:
    """Wait before another attempt."""

    seconds: float
    failure: RouteTraceError
    """Reason of the attempt."""
    left: float
    """Seconds until the call gives up."""


@dataclass(frozen=True)
class Emit(Generic[T]):
    """Hand a value to the caller."""

    value: T


END: Any = object()

Step = Unary | Open | Receive | Sleep | Emit[T]
Plan = Generator[Step[T], Any, None]
Part = Generator[Step[Any], Any, T]

# ------------------------------------------------------------------ configuration


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
        channel_options: Iterable[tuple[str, Any]],
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
        merged = tuple({**defaults, **_channel_options(channel_options)}.items())
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
            return DeadlineExceeded(f"{self.target} did not answer in time: {error.message}")
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


def _channel_options(options: Any) -> dict[str, Any]:
    try:
        merged: dict[Any, Any] = dict(options)
    except (TypeError, ValueError):
        merged = {0: None}
    if not all(isinstance(name, str) for name in merged):
        raise InvalidArgument(
            field="channel_options", value=options, expected="pairs of (gRPC option, value)"
        )
    return merged


def methods(channel: Any) -> dict[str, Any]:
    """Return the methods of both services on a channel, by name."""
    # A stub's attributes are its methods, and the two services share no name.
    stubs = vars(pb_grpc.TraceServiceStub(channel)), vars(pb_grpc.IngestServiceStub(channel))
    reads = {
        name: channel.unary_stream(
            f"/routetrace.v1.TraceService/{name}",
            request_serializer=request.SerializeToString,
            response_deserializer=parser_of(response),
        )
        for name, request, response in (
            ("GetTrace", pb.GetTraceRequest, pb.GetTraceResponse),
            ("GetTraces", pb.GetTracesRequest, pb.GetTracesResponse),
            ("GetBlocks", pb.GetBlocksRequest, pb.GetBlocksResponse),
        )
    }
    sealed = {
        name: channel.unary_unary(
            f"/routetrace.v1.{service}/{name}",
            request_serializer=request.SerializeToString,
            response_deserializer=unary_parser_of(response),
        )
        for service, name, request, response in (
            ("TraceService", "StatTrace", pb.StatTraceRequest, pb.StatTraceResponse),
            ("TraceService", "ListTraces", pb.ListTracesRequest, pb.ListTracesResponse),
            ("IngestService", "BindRequest", pb.BindRequestRequest, pb.BindRequestResponse),
        )
    }
    return {**stubs[0], **stubs[1], **reads, **sealed}


# ------------------------------------------------------------------ plans


def unary(
    method: str,
    request: Any,
    timeout: float,
    convert: Callable[[Any], T],
    *,
    idempotent: bool = True,
) -> Plan[T]:
    """Call a method; emit its converted response."""
    response = yield from _unary(method, request, timeout, idempotent)
    yield Emit(_converted(convert, response))


def _unary(method: str, request: Any, timeout: float, idempotent: bool = True) -> Part[Any]:
    # A refused call had no effect; one that broke off may have had one.
    attempts = Attempts(timeout, RouteTraceError if idempotent else Overloaded)
    while True:
        try:
            return (yield Unary(method, request, attempts.start()))
        except grpc.RpcError as failure:
            pause = attempts.pause(failure)
        yield Sleep(pause, attempts.failure, attempts.left())


def _converted(convert: Callable[[Any], T], response: Any) -> T:
    try:
        return convert(response)
    except (KeyError, ValueError, AttributeError) as error:
        raise Corrupt(f"invalid response of the server: {error}") from error


def read(method: str, request: Any, want: Want, timeout: float) -> Plan[Any]:
    """Read a trace as it is now."""
    trace = yield from _read(method, request, want, timeout)
    yield Emit(trace)


def read_waiting(request: pb.GetTraceRequest, want: Want, wait: float, timeout: float) -> Plan[Any]:
    """Read a trace after its end or its rows, as `request.wait_for` says.

    Args:
        request: the request.
        want: the same, for the assembler.
        wait: seconds to wait.
        timeout: seconds for the read that follows if they were not enough.
    """
    for_end = request.wait_for == pb.WAIT_FOR_END
    try:
        trace = yield from _read("GetTrace", request, want, wait)
    except DeadlineExceeded:
        pass  # the rows may be there now, or sending them takes longer
    else:
        yield Emit(trace)
        return
    request.wait_for = pb.WAIT_FOR_UNSPECIFIED
    too_late = f"{want.name} {'had not ended' if for_end else 'lacked rows'} after {wait:g} s: "
    try:
        trace = yield from _read("GetTrace", request, want, timeout, too_late if for_end else "")
    except NotFound as error:
        raise DeadlineExceeded(f"{too_late}the server does not know it: {error.message}") from error
    except Incomplete as error:
        if for_end:
            raise
        raise Incomplete(f"{error}; waited {wait:g} s", missing=error.missing) from None
    yield Emit(trace)


def _read(
    method: str, request: Any, want: Want, timeout: float, too_late: str = ""
) -> Part[RoutingTrace | ReadFacts]:
    """Read a stream to its end; with `too_late`, refuse a trace that is still running."""
    attempts = Attempts(timeout)
    while True:
        assembler = Assembler(want)
        try:
            call = yield Open(method, request, attempts.start())
            while (message := (yield Receive(call))) is not END:
                assembler.feed(*message)
                del message  # not kept while the next one comes
                if too_late and assembler.state is TraceState.RUNNING:
                    raise DeadlineExceeded(
                        f"{too_late}it is running, with {assembler.num_rows} rows"
                    )
            trace = assembler.finish()
            if 0 < trace.num_tokens < want.num_tokens:
                raise DeadlineExceeded(
                    f"{want.name} ended with {trace.num_tokens} tokens, {want.num_tokens} expected:"
                    " its last request has not arrived"
                )
            return trace
        except (grpc.RpcError, Unavailable) as failure:
            pause = attempts.pause(failure)
        yield Sleep(pause, attempts.failure, attempts.left())


def read_parts(
    request: pb.GetTraceRequest, want: Want, timeout: float, limit: float | None
) -> Plan[Any]:
    """Read the rows of a trace as they arrive.

    Args:
        request: the request.
        want: the same, for the assembler.
        timeout: seconds for the first answer, with retries.
        limit: seconds for the whole stream; None: no limit.

    Raises:
        DeadlineExceeded: also if the trace is unknown after waiting for it (`request.wait_ms`).
    """
    attempts = Attempts(timeout)
    while True:
        assembler = Assembler(want)
        try:
            left = attempts.start()
            call = yield Open("GetTrace", request, None if limit is None else left)
            while (message := (yield Receive(call))) is not END:
                assembler.feed(*message)
                del message
                part = assembler.take()
                if part is not None:
                    attempts.hand_out()
                    yield Emit(part)
            rest = assembler.finish()
        except (grpc.RpcError, Unavailable) as failure:
            try:
                pause = attempts.pause(failure)
            except (NotFound, DeadlineExceeded) as error:
                if assembler.state or not request.wait_ms:
                    raise
                raise DeadlineExceeded(
                    f"{want.name} had not begun after {timeout:g} s: {error.message}"
                ) from error
        else:
            yield Emit(rest)
            return
        yield Sleep(pause, attempts.failure, attempts.left())


def pages(
    name: str,
    request: Any,
    timeout: float,
    items: Callable[[Any], Iterable[Any]],
    convert: Callable[[Any], T],
) -> Plan[T]:
    """Emit every item of all pages of a list, with `timeout` seconds for each page.

    Args:
        name: method of the service.
        request: its request.
        timeout: seconds.
        items: returns the items of a page.
        convert: returns the item to emit.
    """
    while True:
        page = yield from _unary(name, request, timeout)
        for item in items(page):
            yield Emit(_converted(convert, item))
        if not page.next_page_token:
            return
        if page.next_page_token == request.page_token:
            raise Corrupt("the server sent the same page again")
        request.page_token = page.next_page_token
