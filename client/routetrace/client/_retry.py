"""What a failed call means, and whether to try again.

Here, and nowhere else, gRPC errors become errors of `routetrace.v1.errors`.
"""

from __future__ import annotations

import random
import time
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from routetrace.v1 import routetrace_pb2 as pb
from routetrace.v1.errors import (
    ERROR_METADATA_KEY,
    Corrupt,
    DeadlineExceeded,
    Fenced,
    InvalidArgument,
    NotFound,
    OutOfSequence,
    Overloaded,
    PermissionDenied,
    RouteTraceError,
    Unauthenticated,
    Unavailable,
    from_detail,
)

_BY_STATUS: dict[grpc.StatusCode, type[RouteTraceError]] = {
    cls.status: cls
    for cls in (
        InvalidArgument,
        NotFound,
        Corrupt,
        Fenced,
        OutOfSequence,
        DeadlineExceeded,
        Unauthenticated,
        PermissionDenied,
    )
}

_FIRST_PAUSE = 0.05
_LONGEST_PAUSE = 2.0


def to_error(error: grpc.RpcError) -> RouteTraceError:
    """What a failed call means. The gRPC error is to be its __cause__."""
    call: Any = error  # failed calls are errors and calls at once
    status: grpc.StatusCode = call.code()
    text: str = call.details() or "no details"
    for key, value in call.trailing_metadata() or ():
        if key == ERROR_METADATA_KEY:
            try:
                return from_detail(pb.ErrorDetail.FromString(value))
            except DecodeError:
                break
    if status in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
        # Servers under a burst of calls cancel some of them; shells know of their own cancelling.
        return Unavailable(f"{status.name}: {text}", retry_after=_FIRST_PAUSE)
    if status is grpc.StatusCode.RESOURCE_EXHAUSTED:
        if "larger than max" in text:
            return InvalidArgument(field="max_message_bytes", value="too low", expected=text)
        return Overloaded(text, retry_after=_FIRST_PAUSE)
    if status is grpc.StatusCode.INTERNAL and "deserializing" in text:
        return Corrupt(text)
    return _BY_STATUS.get(status, RouteTraceError)(f"{status.name}: {text}")


def retry_pause(error: RouteTraceError, attempt: int, left: float, jitter: float) -> float | None:
    """Whether a call that failed is worth another attempt, and when.

    Args:
        error: why it failed.
        attempt: attempts so far, from 1.
        left: seconds until the deadline.
        jitter: a random number in [0, 1), so that clients do not come back all at once.

    Returns:
        Seconds to wait before the next attempt, which leave it as long again; None: none is of use.
    """
    if not isinstance(error, (Unavailable, Overloaded)) or error.retry_after <= 0:
        return None
    backoff = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2.0 ** min(attempt - 1, 30))
    pause = max(error.retry_after, backoff) * (0.75 + jitter / 2)
    return pause if 2 * pause < left else None


class Attempts:
    """The attempts of one call, and the time that they have."""

    def __init__(self, seconds: float) -> None:
        self._deadline = time.monotonic() + seconds
        self._count = 0

    def left(self) -> float:
        return max(0.0, self._deadline - time.monotonic())

    def pause(
        self, failure: Exception, only: tuple[type[RouteTraceError], ...] = (RouteTraceError,)
    ) -> float:
        """Seconds to wait before the next attempt.

        Args:
            failure: what the last one ended with.
            only: the errors after which another attempt does no harm.

        Raises:
            RouteTraceError: what the failure means, if there is to be no other attempt.
        """
        error = to_error(failure) if isinstance(failure, grpc.RpcError) else failure
        assert isinstance(error, RouteTraceError)
        self._count += 1
        if isinstance(error, only):
            pause = retry_pause(error, self._count, self.left(), random.random())
            if pause is not None:
                return pause
        if error is failure:
            raise error
        raise error from failure
