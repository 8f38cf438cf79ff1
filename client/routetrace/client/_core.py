"""What the clients do, without doing it: calls, retries and answers as plans of steps.

A plan is a generator that yields steps and is sent their outcomes; a shell (_sync, _aio) carries
them out. A step that fails with a grpc.RpcError gets it thrown in. So each decision is written
once, and can be tested without a network.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import grpc

from routetrace.client._arguments import positive
from routetrace.client._assemble import Assembler, Want
from routetrace.client._messages import parser_of
from routetrace.client._retry import Attempts
from routetrace.client.stat import ReadFacts, TraceState
from routetrace.client.trace import RoutingTrace
from routetrace.v1 import routetrace_pb2 as pb
from routetrace.v1 import routetrace_pb2_grpc as pb_grpc
from routetrace.v1.errors import (
    Corrupt,
    DeadlineExceeded,
    Incomplete,
    InvalidArgument,
    NotFound,
    Overloaded,
    RouteTraceError,
    Unavailable,
)
from routetrace.v1.security import Security

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
    """Wait."""

    seconds: float


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
    """What both clients are made with."""

    target: str
    run: str
    timeout: float
    channel_options: tuple[tuple[str, Any], ...]
    security: Security

    @classmethod
    def make(
        cls,
        target: str | None,
        run: str | None,
        timeout: float,
        max_message_bytes: int,
        options: Iterable[tuple[str, Any]],
        security: Security | None,
    ) -> Config:
        """Fills in what the environment says.

        Raises:
            InvalidArgument: if no target is given, a number is not positive, a file can not be
                used, or a token would travel in plain text.
        """
        target = target or os.environ.get("ROUTETRACE_TARGET", "")
        if not target:
            raise InvalidArgument(
                field="target", value=target, expected="host:port, here or in ROUTETRACE_TARGET"
            )
        run = run or os.environ.get("ROUTETRACE_RUN") or "default"
        positive("timeout", timeout)
        positive("max_message_bytes", max_message_bytes)
        security = Security.from_environment() if security is None else security
        security.check(target)
        defaults = {
            "grpc.max_receive_message_length": max_message_bytes,
            "grpc.max_send_message_length": max_message_bytes,
            # A forked child cannot use connections that it shares with its parent.
            "grpc.use_local_subchannel_pool": 1,
            # A server that is gone without a goodbye must not hold a follower forever.
            "grpc.keepalive_time_ms": 30_000,
            "grpc.keepalive_timeout_ms": 10_000,
            # The default backs off to two minutes: a server that restarts is back much earlier.
            "grpc.initial_reconnect_backoff_ms": 100,
            "grpc.max_reconnect_backoff_ms": 2_000,
        }
        options = tuple({**defaults, **dict(options)}.items())
        return cls(target, run, timeout, options, security)

    def limit(self, timeout: float | None) -> float:
        """Seconds that a call may take."""
        return self.timeout if timeout is None else float(positive("timeout", timeout))

    def explained(self, error: Unavailable) -> Unavailable:
        """The error, with what may be wrong with TLS here or there."""
        hint = self.security.hint(error.message)
        if not hint:
            return error
        return Unavailable(f"{error.message}; {hint}", retry_after=error.retry_after)


def methods(channel: Any) -> dict[str, Any]:
    """The methods of both services on a channel, by name."""
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
            ("GetBlocks", pb.GetBlocksRequest, pb.GetBlocksResponse),
        )
    }
    return {**stubs[0], **stubs[1], **reads}


# ------------------------------------------------------------------ plans


def unary(
    method: str,
    request: Any,
    timeout: float,
    convert: Callable[[Any], T],
    *,
    idempotent: bool = True,
) -> Plan[T]:
    """One call, one value."""
    response = yield from _unary(method, request, timeout, idempotent)
    yield Emit(_converted(convert, response))


def _unary(method: str, request: Any, timeout: float, idempotent: bool = True) -> Part[Any]:
    attempts = Attempts(timeout)
    while True:
        try:
            return (yield Unary(method, request, attempts.left()))
        except grpc.RpcError as failure:
            # What was refused was not done; what broke off may have been.
            pause = attempts.pause(failure, (RouteTraceError if idempotent else Overloaded,))
        yield Sleep(pause)


def _converted(convert: Callable[[Any], T], response: Any) -> T:
    try:
        return convert(response)
    except (KeyError, ValueError, AttributeError) as error:
        raise Corrupt(f"the server's answer cannot be true: {error}") from error


def read(method: str, request: Any, want: Want, timeout: float) -> Plan[Any]:
    """A trace as it is now."""
    trace = yield from _read(method, request, want, timeout)
    yield Emit(trace)


def read_waiting(
    request: pb.GetTraceRequest,
    want: Want,
    wait_for: pb.WaitFor.ValueType,
    wait: float,
    timeout: float,
) -> Plan[Any]:
    """A trace once it has ended, or has the rows asked for, if that is within `wait` seconds."""
    if wait > 0:
        request.wait_for = wait_for
        try:
            trace = yield from _read("GetTrace", request, want, wait)
        except DeadlineExceeded:
            pass  # perhaps it came at the last moment, or sending it took longer
        else:
            yield Emit(trace)
            return
    request.wait_for = pb.WAIT_FOR_UNSPECIFIED
    for_end = wait_for == pb.WAIT_FOR_END
    too_late = f"{want.name} {'had not ended' if for_end else 'lacked rows'} after {wait:g} s: "
    try:
        trace = yield from _read("GetTrace", request, want, timeout, too_late if for_end else "")
    except NotFound as error:
        raise DeadlineExceeded(
            f"{too_late}it is not known to the server: {error.message}"
        ) from error
    except Incomplete as error:
        if for_end:
            raise
        raise Incomplete(f"{error}; waited {wait:g} s", missing=error.missing) from None
    yield Emit(trace)


def _read(
    method: str, request: Any, want: Want, timeout: float, too_late: str = ""
) -> Part[RoutingTrace | ReadFacts]:
    """Reads a stream to its end; with `too_late`, refuses a trace that is still running."""
    attempts = Attempts(timeout)
    while True:
        assembler = Assembler(want)
        try:
            call = yield Open(method, request, attempts.left())
            while (message := (yield Receive(call))) is not END:
                assembler.feed(*message)
                del message  # not kept while the next one comes
                if too_late and assembler.state is TraceState.RUNNING:
                    raise DeadlineExceeded(
                        f"{too_late}it is running, with {assembler.num_rows} rows"
                    )
            return assembler.finish()
        except (grpc.RpcError, Unavailable) as failure:
            pause = attempts.pause(failure)
        yield Sleep(pause)


def read_parts(
    request: pb.GetTraceRequest, want: Want, timeout: float, limit: float | None
) -> Plan[Any]:
    """The rows of a trace as they come.

    Args:
        request: what to ask.
        want: the same, for the assembler.
        timeout: seconds for the first answer, with retries.
        limit: seconds for the whole stream.
    """
    attempts = Attempts(timeout)
    handed_out = False
    while True:
        assembler = Assembler(want)
        try:
            call = yield Open("GetTrace", request, limit)
            while (message := (yield Receive(call))) is not END:
                assembler.feed(*message)
                del message
                part = assembler.take()
                if part is not None:
                    handed_out = True
                    yield Emit(part)
            rest = assembler.finish()
        except (grpc.RpcError, Unavailable) as failure:
            pause = attempts.pause(failure, () if handed_out else (RouteTraceError,))
        else:
            yield Emit(rest)
            return
        yield Sleep(pause)


def pages(
    request: pb.ListTracesRequest, timeout: float, convert: Callable[[pb.TraceInfo], T]
) -> Plan[T]:
    """Every trace that matches, with `timeout` seconds for each page."""
    while True:
        page = yield from _unary("ListTraces", request, timeout)
        for info in page.traces:
            yield Emit(_converted(convert, info))
        if not page.next_page_token:
            return
        if page.next_page_token == request.page_token:
            raise Corrupt("the server sent the same page again")
        request.page_token = page.next_page_token
