"""Typed errors as a status and an ErrorDetail in trailing metadata."""

from __future__ import annotations

import functools
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import grpc
from google.protobuf.message import DecodeError, Message

from routetrace.common.errors import ERROR_METADATA_KEY, InvalidArgument, RouteTraceError
from routetrace.common.limited import LimitedLog

_failures = LimitedLog(logging.getLogger(__name__), "failed calls")

#: Size of a message up to which it is parsed as it arrives, in less than a millisecond.
_AT_ONCE_BYTES = 64 << 10

F = TypeVar("F", bound=Callable[..., Any])
Context = grpc.aio.ServicerContext[Any, Any]


class Unusable(NamedTuple):
    """Message that is not parsed: over the limit of its method, or no message of its type."""

    name: str
    value: str
    expected: str

    def error(self) -> InvalidArgument:
        """Return the error for it."""
        return InvalidArgument(field=self.name, value=self.value, expected=self.expected)


class Unparsed(NamedTuple):
    """Message that is too long, or takes milliseconds of the event loop to parse."""

    data: bytes
    kind: type[Message]
    most: int

    @property
    def too_long(self) -> bool:
        """Whether it is over the limit of its method."""
        return len(self.data) > self.most

    def unusable(self) -> Unusable:
        """Return the message as unusable: too long, or one that does not parse."""
        return _unusable(self.data, self.kind, self.most)


def _unusable(data: bytes, kind: type[Message], most: int) -> Unusable:
    name: str = kind.DESCRIPTOR.name
    if len(data) > most:
        return Unusable(name, f"{len(data)} bytes", f"at most {most} bytes")
    return Unusable(name, f"{len(data)} bytes that do not parse", f"a {name}")


class Parses(Protocol):
    """Servicer that parses long messages when their caller may use the loop."""

    async def parsed(self, request: Unparsed, context: Context) -> Message | Unusable:
        """Return the message."""


def parser(kind: type[Message]) -> Callable[[bytes], Message | Unusable]:
    """Return a parser that returns bytes which do not parse as unusable.

    gRPC logs a traceback for an error of a parser, and ends the call without a type.
    """

    def parsed(data: bytes) -> Message | Unusable:
        try:
            return kind.FromString(data)
        except DecodeError:
            return _unusable(data, kind, len(data))

    return parsed


def limited(kind: type[Message], most: int) -> Callable[[bytes], Message | Unusable | Unparsed]:
    """Return a parser that returns unusable messages as such, and leaves long ones unparsed.

    Args:
        kind: class of the message.
        most: its maximum length in bytes, at least 64 KiB: shorter messages are parsed unchecked.
    """
    at_once = parser(kind)

    def parsed(data: bytes) -> Message | Unusable | Unparsed:
        if len(data) > _AT_ONCE_BYTES:
            return Unparsed(data, kind, most)
        return at_once(data)

    return parsed


async def _message(servicer: Parses, request: object, context: Context) -> object:
    if isinstance(request, Unparsed):
        request = await servicer.parsed(request, context)
    if isinstance(request, Unusable):
        raise request.error()
    return request


async def received(context: Context, name: str) -> AsyncIterator[Any]:
    """Yield the messages of a stream; use it in place of gRPC's request iterator.

    gRPC's iterator and its generator refer to each other and to the last message. Where the server
    ends a stream before its caller does, that reference cycle remains (`process.pauses`).

    Args:
        context: context of the call.
        name: name of the messages.

    Raises:
        InvalidArgument: if one does not parse.
    """
    while True:
        try:
            message = await context.read()
        except DecodeError:
            raise Unusable(name, "bytes that do not parse", f"a {name}").error() from None
        if message is grpc.aio.EOF:
            return
        yield message


async def fail(context: Context, error: RouteTraceError) -> None:
    """End a call with a typed error; its handler must return then.

    The call refers to the error. With a traceback, the error would refer to the call and its
    request: a reference cycle (`process.pauses`).
    """
    _forget_traceback(error)
    detail = error.to_detail().SerializeToString()
    try:
        await context.abort(error.status, error.message, ((ERROR_METADATA_KEY, detail),))
    except grpc.aio.AbortError as aborted:
        _forget_traceback(aborted)  # gRPC raises it again after the handler


def _forget_traceback(error: BaseException) -> None:
    error.__traceback__ = error.__context__ = error.__cause__ = None


def internal(error: Exception) -> str:
    """Return the text for callers about an error of the server; its own text may hold paths."""
    return f"internal error of the server ({type(error).__name__}); its log has the details"


async def _fail_internally(context: Context, handler: Callable[..., Any], error: Exception) -> None:
    """End a call with an error that is not typed, which gRPC would send as it is."""
    name = handler.__name__
    _failures.warning((name, type(error)), "%s failed: %s", name, error, error=error)
    _forget_traceback(error)
    await fail(context, RouteTraceError(internal(error)))


def unary(handler: F) -> F:
    """Decorate a unary handler to send its typed errors to the caller."""

    @functools.wraps(handler)
    async def wrapped(self: Parses, request: object, context: Context) -> object:
        try:
            request = await _message(self, request, context)
            return await handler(self, request, context)
        except RouteTraceError as error:
            await fail(context, error)
        except Exception as error:
            await _fail_internally(context, handler, error)
        return None

    return cast("F", wrapped)


def streaming(handler: F) -> F:
    """Decorate a streaming handler to send its typed errors to the caller."""

    @functools.wraps(handler)
    async def wrapped(self: Parses, request: object, context: Context) -> AsyncIterator[object]:
        try:
            request = await _message(self, request, context)
            async for response in handler(self, request, context):
                yield response
        except RouteTraceError as error:
            await fail(context, error)
        except Exception as error:
            await _fail_internally(context, handler, error)

    return cast("F", wrapped)
