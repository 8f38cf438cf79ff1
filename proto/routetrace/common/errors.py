"""Errors of agents, server and clients.

    RouteTraceError
    +-- InvalidArgument      a field has an invalid value (also a ValueError)
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
    +-- Closed               used after close()

Every error has `field`, `value` and `expected`, "" where they do not apply.
"""

from __future__ import annotations

from typing import Any

import grpc

from routetrace.common.missing import MissingRange
from routetrace.v1 import routetrace_pb2 as pb

#: Trailing metadata key under which a failed call carries a serialized `ErrorDetail`.
ERROR_METADATA_KEY = "routetrace-error-bin"

# gRPC drops trailing metadata of more than about 8 KB.
_VALUE_LIMIT, _EXPECTED_LIMIT, _MESSAGE_LIMIT = 200, 1000, 2000


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _printable(value: Any) -> str:
    """Return one line for a value that may be huge, or forged to fake lines of a log."""
    if isinstance(value, str):
        start = value[:_VALUE_LIMIT]
        return value if start.isprintable() else repr(start)
    if isinstance(value, (list, tuple)) and len(value) > _VALUE_LIMIT:
        return repr(value[:_VALUE_LIMIT])
    return repr(value)


class RouteTraceError(Exception):
    """Base of all errors of routetrace.

    Attributes:
        field: the offending field, "" if none.
        value: its value, printed and cut to 200 characters.
        expected: values that would be valid.
    """

    kind: int = pb.ERROR_KIND_UNSPECIFIED
    status: grpc.StatusCode = grpc.StatusCode.UNKNOWN

    def __init__(
        self, message: str = "", *, field: str = "", value: Any = "", expected: str = ""
    ) -> None:
        self.field = field
        self.value = _cut(_printable(value), _VALUE_LIMIT)
        self.expected = _cut(expected, _EXPECTED_LIMIT)
        if not message:
            message = f"{field} is {self.value or 'empty'}, expected {self.expected}"
        self.message = _cut(message, _MESSAGE_LIMIT)
        super().__init__(self.message)

    @property
    def retry_after(self) -> float:
        """Seconds after which a retry makes sense; 0: retrying is of no use."""
        return 0.0

    def to_detail(self) -> pb.ErrorDetail:
        """Return the message for the wire."""
        return pb.ErrorDetail(
            kind=self.kind,  # type: ignore[arg-type]
            field=self.field,
            value=self.value,
            expected=self.expected,
            message=self.message,
            retry_after_ms=int(self.retry_after * 1000),
        )


class InvalidArgument(RouteTraceError, ValueError):
    """A field has an invalid value."""

    kind = pb.ERROR_KIND_INVALID_ARGUMENT
    status = grpc.StatusCode.INVALID_ARGUMENT


class NotFound(RouteTraceError, LookupError):
    """No such trace, engine or run."""

    kind = pb.ERROR_KIND_NOT_FOUND
    status = grpc.StatusCode.NOT_FOUND


class Incomplete(RouteTraceError):
    """Cells are missing, and no mask was requested.

    Attributes:
        missing: ranges of missing cells, by position.
    """

    def __init__(self, message: str, *, missing: tuple[MissingRange, ...] = ()) -> None:
        super().__init__(message)
        self.missing = missing


class Corrupt(RouteTraceError):
    """Stored or received bytes do not match their checksum or shape."""

    kind = pb.ERROR_KIND_CORRUPT
    status = grpc.StatusCode.DATA_LOSS


class Fenced(RouteTraceError):
    """A newer epoch of the engine has taken over."""

    kind = pb.ERROR_KIND_FENCED
    status = grpc.StatusCode.FAILED_PRECONDITION


class OutOfSequence(RouteTraceError):
    """A sequence number is not the next one."""

    kind = pb.ERROR_KIND_OUT_OF_SEQUENCE
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

    kind = pb.ERROR_KIND_OVERLOADED
    status = grpc.StatusCode.RESOURCE_EXHAUSTED


class Unavailable(_Retryable):
    """The server cannot be reached, is starting or draining."""

    kind = pb.ERROR_KIND_UNAVAILABLE
    status = grpc.StatusCode.UNAVAILABLE


class DeadlineExceeded(RouteTraceError, TimeoutError):
    """The deadline passed first."""

    status = grpc.StatusCode.DEADLINE_EXCEEDED


class Unauthenticated(RouteTraceError):
    """No valid credentials."""

    kind = pb.ERROR_KIND_UNAUTHENTICATED
    status = grpc.StatusCode.UNAUTHENTICATED


class PermissionDenied(RouteTraceError):
    """Credentials that do not cover this run or scope."""

    kind = pb.ERROR_KIND_PERMISSION_DENIED
    status = grpc.StatusCode.PERMISSION_DENIED


class Moved(RouteTraceError):
    """Another worker of the server serves the run.

    Attributes:
        target: ":port" of that worker, on the host of the call's target, or host:port of a worker
            of another server.
    """

    kind = pb.ERROR_KIND_MOVED
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
    cls.kind: cls
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
    }
    if issubclass(cls, _Retryable):
        kwargs["retry_after"] = detail.retry_after_ms / 1000
    if cls is Moved:
        kwargs["target"] = detail.target
    return cls(detail.message, **kwargs)
