"""What can go wrong, the same on every side.

    RouteTraceError
    +-- InvalidArgument      a field holds something that it must not (also a ValueError)
    +-- NotFound             no such trace, engine or run (also a LookupError)
    +-- Incomplete           cells are missing, and the caller did not ask for a mask
    +-- Corrupt              stored or received bytes do not match their checksum or shape
    +-- Fenced               a newer epoch of the engine has taken over
    +-- OutOfSequence        a sequence number is not the next one
    +-- Overloaded           retry after `retry_after` seconds
    +-- Unavailable          the server cannot be reached, is starting or draining
    +-- DeadlineExceeded     the deadline passed first (also a TimeoutError)
    +-- Unauthenticated      no valid credentials
    +-- PermissionDenied     credentials that do not cover this
    +-- Closed               used after close()

Every error carries `field`, `value` and `expected` where it has them.
"""

from __future__ import annotations

from typing import Any

import grpc

from routetrace.v1 import routetrace_pb2 as pb

#: Trailing metadata key under which a failed call carries a serialized `ErrorDetail`.
ERROR_METADATA_KEY = "routetrace-error-bin"

# Trailing metadata of more than some 8 KB does not arrive.
_VALUE_LIMIT, _EXPECTED_LIMIT, _MESSAGE_LIMIT = 200, 1000, 2000


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _printable(value: Any) -> str:
    """A value in one line, from what may be huge, or made to forge lines of a log."""
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
        expected: what was expected in its place.
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
            message = f"{field} is {self.value}, expected {self.expected}"
        self.message = _cut(message, _MESSAGE_LIMIT)
        super().__init__(self.message)

    @property
    def retry_after(self) -> float:
        """Seconds after which a retry makes sense; 0: retrying is of no use."""
        return 0.0

    def to_detail(self) -> pb.ErrorDetail:
        """This error as it crosses the wire."""
        return pb.ErrorDetail(
            kind=self.kind,  # type: ignore[arg-type]
            field=self.field,
            value=self.value,
            expected=self.expected,
            message=self.message,
            retry_after_ms=int(self.retry_after * 1000),
        )


class InvalidArgument(RouteTraceError, ValueError):
    """A field holds something that it must not."""

    kind = pb.ERROR_KIND_INVALID_ARGUMENT
    status = grpc.StatusCode.INVALID_ARGUMENT


class NotFound(RouteTraceError, LookupError):
    """No such trace, engine or run."""

    kind = pb.ERROR_KIND_NOT_FOUND
    status = grpc.StatusCode.NOT_FOUND


class Incomplete(RouteTraceError):
    """Cells are missing, and the caller did not ask for a mask.

    Attributes:
        missing: what is missing, as `routetrace.v1.MissingRange` messages.
    """

    def __init__(self, message: str, *, missing: tuple[pb.MissingRange, ...] = ()) -> None:
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
    """Too much work or no room at the moment."""

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
    )
}


def from_detail(detail: pb.ErrorDetail) -> RouteTraceError:
    """The error that `to_detail` came from."""
    cls = _BY_KIND.get(detail.kind, RouteTraceError)
    kwargs: dict[str, Any] = {
        "field": detail.field,
        "value": detail.value,
        "expected": detail.expected,
    }
    if issubclass(cls, _Retryable):
        kwargs["retry_after"] = detail.retry_after_ms / 1000
    return cls(detail.message, **kwargs)
