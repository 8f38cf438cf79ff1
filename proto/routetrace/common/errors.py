"""Errors of agents, server and clients.

    RouteTraceError
    +-- InvalidArgument      a field has an invalid value (also a ValueError)
    |   +-- ModelNotSupported    a configuration or model whose routing is not known
    +-- NotFound             no such trace, engine or run (also a LookupError)
    +-- Incomplete           cells are missing, and no mask was requested
    +-- Corrupt              stored or received bytes do not match their checksum or shape
    +-- Fenced               a newer epoch of the engine has taken over
    +-- OutOfSequence        a sequence number is not the next one
    +-- Overloaded           retry after `retry_after` seconds
    +-- Unavailable          the server cannot be reached, is starting or draining
    +-- DeadlineExceeded     the deadline passed first (also a TimeoutError)
    +-- Unauthenticated      no valid credentials
    +-- PermissionDenied     credentials that do not cover this
    +-- Moved                another worker of the server serves the run; clients follow it
    +-- MissingDependency    a package that the call needs (also an ImportError)
    +-- Closed               used after close()

Every error has `field`, `value`, `expected` and `remedy`, "" where they do not apply. Its message
is `FIELD is VALUE; expected EXPECTED; REMEDY`, or a sentence where that says more.
"""

from __future__ import annotations

from typing import Any

import grpc

from routetrace.common.missing import MissingRange
from routetrace.v1 import routetrace_pb2 as pb

#: Trailing metadata key under which a failed call carries a serialized `ErrorDetail`.
ERROR_METADATA_KEY = "routetrace-error-bin"

# gRPC drops trailing metadata of more than about 8 KB.
_INT_BITS = 600
_VALUE_LIMIT, _EXPECTED_LIMIT, _MESSAGE_LIMIT = 200, 1000, 2000


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 3] + "..."


def quoted(value: Any) -> str:
    """Return one line for a value that was given, strings in quotes; it may be huge."""
    if isinstance(value, int) and value.bit_length() > _INT_BITS:  # Python refuses to print more
        return f"an int of {value.bit_length()} bits"
    if isinstance(value, (str, bytes, list, tuple)) and len(value) > _VALUE_LIMIT:
        value = value[:_VALUE_LIMIT]
    if isinstance(value, str):
        value = str(value)  # the text of an enum
    try:
        return _cut(repr(value), _VALUE_LIMIT)
    except Exception:  # of an object's own, of a huge int in it, or of deep nesting
        return kind_of(value)


def counted(count: int, noun: str) -> str:
    """Return a number and its noun: "1 row", "1,024 rows"."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def typed(value: Any) -> str:
    """Return one line for a value of a wrong type: `'5' (str)`, `None`, `a Sample`."""
    if isinstance(value, (str, bytes, int, float)):
        return f"{quoted(value)} ({type(value).__name__})"
    return kind_of(value)


def kind_of(value: Any) -> str:
    """Return the type of a value with its article: `a str`, `an ndarray`; `None` for None."""
    if value is None:
        return "None"
    name = type(value).__name__
    vowel = name.lstrip("_").lower().startswith(("a", "e", "i", "o", "nd"))  # "nd": ndarray
    return f"{'an' if vowel else 'a'} {name}"


def _printable(value: Any) -> str:
    """Return one line for a value; a string is a description, and stays as it is if it is a line.

    Values may be forged to fake lines of a log.
    """
    if isinstance(value, str) and value[:_VALUE_LIMIT].isprintable():
        return value
    return quoted(value)


class RouteTraceError(Exception):
    """Base of all errors of routetrace.

    Attributes:
        field: the offending field, "" if none.
        value: its value, printed and cut to 200 characters.
        expected: values that would be valid.
        remedy: an action that helps, such as another call.
    """

    wire_kind: int = pb.ERROR_KIND_UNSPECIFIED
    status: grpc.StatusCode = grpc.StatusCode.INTERNAL

    def __init__(
        self,
        message: str = "",
        *,
        field: str = "",
        value: Any = "",
        expected: str = "",
        remedy: str = "",
    ) -> None:
        self.field = field
        self.value = _cut(_printable(value), _VALUE_LIMIT)
        self.expected = _cut(expected, _EXPECTED_LIMIT)
        self.remedy = _cut(remedy, _EXPECTED_LIMIT)
        if not message:
            message = f"{field} is {self.value or 'empty'}; expected {self.expected}"
            message += f"; {remedy}" if remedy else ""
        self.message = _cut(message, _MESSAGE_LIMIT)
        super().__init__(self.message)

    @property
    def retry_after(self) -> float:
        """Seconds after which a retry makes sense; 0: retrying is of no use."""
        return 0.0

    def to_detail(self) -> pb.ErrorDetail:
        """Return the message for the wire."""
        return pb.ErrorDetail(
            kind=self.wire_kind,  # type: ignore[arg-type]
            field=self.field,
            value=self.value,
            expected=self.expected,
            remedy=self.remedy,
            message=self.message,
            retry_after_ms=int(self.retry_after * 1000),
        )


class InvalidArgument(RouteTraceError, ValueError):
    """A field has an invalid value."""

    wire_kind = pb.ERROR_KIND_INVALID_ARGUMENT
    status = grpc.StatusCode.INVALID_ARGUMENT


class ModelNotSupported(InvalidArgument):
    """A configuration or a model whose routing is not known."""


class MissingDependency(RouteTraceError, ImportError):
    """A package that the call needs is missing, or has another version.

    Attributes:
        package: its name.
        install: command that installs it, or a sentence.
    """

    def __init__(
        self, message: str = "", *, package: str = "", install: str = "", field: str = ""
    ) -> None:
        message = message or f"{package} is required; {install}"
        super().__init__(
            message, field=field, value="not installed", expected=package, remedy=install
        )
        self.package = package
        self.install = install


_MISSING = {
    "trace_id": "trace",
    "incarnation": "incarnation",
    "engine_id": "engine",
    "run": "run",
}


class NotFound(RouteTraceError, LookupError):
    """No such trace, engine or run.

    Attributes:
        kind: kind of the missing object: "trace", "incarnation", "engine" or "run"; "" for others.
        trace_id: id of the trace that the call was about; None for other calls.
        reason: why a trace is gone: "deleted", "retired", "expired", or evicted for "quota",
            "capacity" or "memory"; "" if that is unknown, or it never was.
    """

    wire_kind = pb.ERROR_KIND_NOT_FOUND
    status = grpc.StatusCode.NOT_FOUND

    def __init__(
        self, message: str = "", *, reason: str = "", trace_id: str | None = None, **where: Any
    ) -> None:
        super().__init__(message, **where)
        self.kind = _MISSING.get(self.field, "")
        self.reason = reason
        self.trace_id = trace_id

    def to_detail(self) -> pb.ErrorDetail:
        """Return the message for the wire."""
        detail = super().to_detail()
        detail.reason = self.reason
        return detail


class Incomplete(RouteTraceError):
    """Cells are missing, and no mask was requested.

    Attributes:
        trace_id: id of the trace; None for rows of KV blocks.
        state: state of the trace at the read, a `routetrace.client.TraceState`; None if unknown.
        missing: ranges of missing cells, by position.
        unknown_from: first position that may or may not exist; None if the end is known.
    """

    def __init__(
        self,
        message: str = "",
        *,
        trace_id: str | None = None,
        state: Any = None,
        missing: tuple[MissingRange, ...] = (),
        unknown_from: int | None = None,
        remedy: str = "",
    ) -> None:
        super().__init__(message, remedy=remedy)
        self.trace_id = trace_id or None
        self.state = state
        self.missing = missing
        self.unknown_from = unknown_from


class Corrupt(RouteTraceError):
    """Stored or received bytes do not match their checksum or shape."""

    wire_kind = pb.ERROR_KIND_CORRUPT
    status = grpc.StatusCode.DATA_LOSS


class Fenced(RouteTraceError):
    """A newer epoch of the engine has taken over."""

    wire_kind = pb.ERROR_KIND_FENCED
    status = grpc.StatusCode.FAILED_PRECONDITION


class OutOfSequence(RouteTraceError):
    """A sequence number is not the next one."""

    wire_kind = pb.ERROR_KIND_OUT_OF_SEQUENCE
    status = grpc.StatusCode.OUT_OF_RANGE


class _Retryable(RouteTraceError):
    def __init__(self, message: str = "", *, retry_after: float = 1.0, **where: Any) -> None:
        super().__init__(message, **where)
        self._retry_after = retry_after

    @property
    def retry_after(self) -> float:
        return self._retry_after


class Overloaded(_Retryable):
    """Too many requests or too little room; retry later."""

    wire_kind = pb.ERROR_KIND_OVERLOADED
    status = grpc.StatusCode.RESOURCE_EXHAUSTED


class Unavailable(_Retryable):
    """The server cannot be reached, is starting or draining.

    Attributes:
        target: the server, as the client was configured; "" if none was called.
        attempts: calls that were made.
    """

    wire_kind = pb.ERROR_KIND_UNAVAILABLE
    status = grpc.StatusCode.UNAVAILABLE
    target = ""
    attempts = 0


class DeadlineExceeded(RouteTraceError, TimeoutError):
    """The deadline passed first.

    Attributes:
        trace_id: id of the trace that was waited for; None for other calls.
        waited_seconds: seconds until then; None if unknown.
        stat: facts about the trace at that moment, a `routetrace.client.TraceStat`; None if the
            server does not know it, or for other calls.
        earlier: why an earlier attempt of the same call failed, as the server could not be reached;
            None if none did. The message names it.
    """

    status = grpc.StatusCode.DEADLINE_EXCEEDED
    earlier: Unavailable | None = None

    def __init__(
        self,
        message: str = "",
        *,
        trace_id: str | None = None,
        waited_seconds: float | None = None,
        stat: Any = None,
        **where: Any,
    ) -> None:
        super().__init__(message, **where)
        self.trace_id = trace_id or None
        self.waited_seconds = waited_seconds
        self.stat = stat


class Unauthenticated(RouteTraceError):
    """No valid credentials."""

    wire_kind = pb.ERROR_KIND_UNAUTHENTICATED
    status = grpc.StatusCode.UNAUTHENTICATED


class PermissionDenied(RouteTraceError):
    """Credentials that do not cover this run or scope."""

    wire_kind = pb.ERROR_KIND_PERMISSION_DENIED
    status = grpc.StatusCode.PERMISSION_DENIED


class Moved(RouteTraceError):
    """Another worker of the server serves the run.

    Attributes:
        target: ":port" of that worker, on the host of the call's target, or host:port of a worker
            of another server.
    """

    wire_kind = pb.ERROR_KIND_MOVED
    status = grpc.StatusCode.FAILED_PRECONDITION

    def __init__(self, message: str = "", *, target: str = "", **where: Any) -> None:
        super().__init__(message, **where)
        self.target = target

    def to_detail(self) -> pb.ErrorDetail:
        """Return the message for the wire."""
        detail = super().to_detail()
        detail.target = self.target
        return detail


class Closed(RouteTraceError):
    """Used after close()."""


_BY_KIND: dict[int, type[RouteTraceError]] = {
    cls.wire_kind: cls
    for cls in (
        InvalidArgument,
        NotFound,
        Corrupt,
        Fenced,
        OutOfSequence,
        Overloaded,
        Unavailable,
        Unauthenticated,
        PermissionDenied,
        Moved,
    )
}


def from_detail(detail: pb.ErrorDetail) -> RouteTraceError:
    """Return the error that `to_detail` described."""
    cls = _BY_KIND.get(detail.kind, RouteTraceError)
    kwargs: dict[str, Any] = {
        "field": detail.field,
        "value": detail.value,
        "expected": detail.expected,
        "remedy": detail.remedy,
    }
    if issubclass(cls, _Retryable):
        kwargs["retry_after"] = detail.retry_after_ms / 1000
    if cls is Moved:
        kwargs["target"] = detail.target
    if cls is NotFound:
        kwargs["reason"] = detail.reason
    return cls(detail.message, **kwargs)
