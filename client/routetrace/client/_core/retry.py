"""Meaning of failed calls, life cycle of a call, and its repetition.

Here, and nowhere else, gRPC errors become errors of `routetrace.common.errors`.
"""

from __future__ import annotations

import random
import time
from enum import Enum
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from routetrace.common.errors import (
    ERROR_METADATA_KEY,
    Corrupt,
    DeadlineExceeded,
    Fenced,
    InvalidArgument,
    Moved,
    NotFound,
    OutOfSequence,
    Overloaded,
    PermissionDenied,
    RouteTraceError,
    Unauthenticated,
    Unavailable,
    from_detail,
)
from routetrace.common.target import is_misfit
from routetrace.v1 import routetrace_pb2 as pb

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
#: Workers of a server that send a call on before it fails.
_MOST_HOPS = 5
#: Attempts at a server that speaks another protocol, which is no outage.
_MISFIT_ATTEMPTS = 3


def to_error(error: grpc.RpcError) -> RouteTraceError:
    """Return the meaning of a failed call, for which the gRPC error is the __cause__."""
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
        # Servers under a burst of calls cancel some; drivers handle their own cancellations.
        return Unavailable(f"{status.name}: {text}", retry_after=_FIRST_PAUSE)
    if status is grpc.StatusCode.RESOURCE_EXHAUSTED:
        if "larger than max" in text:
            return InvalidArgument(field="max_message_bytes", value="too low", expected=text)
        return Overloaded(text, retry_after=_FIRST_PAUSE)
    if status is grpc.StatusCode.UNIMPLEMENTED:
        expected = "the address of a routetrace-server that is as new as this client"
        return InvalidArgument(
            f"the server at the target does not offer this call ({status.name}: {text}); "
            f"expected {expected}",
            field="target",
            value="another server",
            expected=expected,
        )
    if status is grpc.StatusCode.INTERNAL and "deserializing" in text:
        return Corrupt(text)
    return _BY_STATUS.get(status, RouteTraceError)(f"{status.name}: {text}")


def retry_pause(error: RouteTraceError, attempt: int, left: float, jitter: float) -> float | None:
    """Return the pause before another attempt of a failed call, if that is of use.

    Args:
        error: why it failed.
        attempt: attempts so far, from 1.
        left: seconds until the deadline.
        jitter: random number in [0, 1), which spreads the attempts of many clients.

    Returns:
        Seconds to wait, which leave as many for the attempt; None: no attempt.
    """
    if not isinstance(error, (Unavailable, Overloaded)) or error.retry_after <= 0:
        return None
    if attempt >= _MISFIT_ATTEMPTS and is_misfit(error.message):
        return None
    if left < 2 * error.retry_after:
        return None
    backoff = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2.0 ** min(attempt - 1, 30))
    return min(max(error.retry_after, backoff) * (0.75 + jitter / 2), left / 2)


class CallState(Enum):
    """State of one call of the client, over all its attempts."""

    WAITING = "waiting"
    """No attempt is under way."""
    UNDER_WAY = "under way"
    """An attempt was started; the caller has nothing of it."""
    HANDED_OUT = "handed out"
    """The caller has a part of the answer: another attempt would repeat it."""
    FAILED = "failed"
    """No other attempt follows."""


#: States that may follow each state.
TRANSITIONS: dict[CallState, frozenset[CallState]] = {
    CallState.WAITING: frozenset({CallState.UNDER_WAY}),
    CallState.UNDER_WAY: frozenset({CallState.WAITING, CallState.HANDED_OUT, CallState.FAILED}),
    CallState.HANDED_OUT: frozenset({CallState.HANDED_OUT, CallState.FAILED}),
    CallState.FAILED: frozenset(),
}


class Attempts:
    """Attempts of one call within its time.

    Args:
        seconds: time for all of them.
        repeatable: errors after which another attempt is harmless.
    """

    def __init__(self, seconds: float, repeatable: type[RouteTraceError] = RouteTraceError) -> None:
        self._seconds = seconds
        self._deadline = time.monotonic() + seconds
        self._repeatable = repeatable
        self._count = 0
        self._hops = 0  # since the last other failure
        self.state = CallState.WAITING
        self.failure = RouteTraceError()
        """Meaning of the last failure."""

    def enter(self, state: CallState) -> bool:
        """Change to a state; return False, and stay, where `TRANSITIONS` has no such change."""
        if state not in TRANSITIONS[self.state]:
            return False
        self.state = state
        return True

    def left(self) -> float:
        """Return the seconds left."""
        return max(0.0, self._deadline - time.monotonic())

    def start(self) -> float:
        """Start an attempt; return the seconds that it may take."""
        self.enter(CallState.UNDER_WAY)
        return self.left()

    def hand_out(self) -> None:
        """Note that the caller gets a part of the answer."""
        self.enter(CallState.HANDED_OUT)

    def pause(self, failure: Exception) -> float:
        """Return the seconds to wait before the next attempt.

        Args:
            failure: end of the last attempt.

        Raises:
            RouteTraceError: the meaning of the failure, if there is no other attempt.
        """
        error = to_error(failure) if isinstance(failure, grpc.RpcError) else failure
        assert isinstance(error, RouteTraceError)
        if error is not failure:
            error.__cause__ = failure
        if isinstance(error, DeadlineExceeded) and error.waited_seconds is None:
            error.waited_seconds = self._seconds
            if isinstance(self.failure, Unavailable):  # the last attempt may have had no time
                error.earlier = self.failure
        self.failure = error
        if isinstance(error, Moved):  # it had no effect, and the driver has changed its target
            self._hops += 1
            if self._hops <= _MOST_HOPS and self.enter(CallState.WAITING):
                return 0.0
            self.enter(CallState.FAILED)
            raise error
        self._hops = 0
        self._count += 1
        if isinstance(error, Unavailable):
            error.attempts = self._count
        if isinstance(error, self._repeatable):
            pause = retry_pause(error, self._count, self.left(), random.random())
            if pause is not None and self.enter(CallState.WAITING):
                return pause
        self.enter(CallState.FAILED)
        raise error
