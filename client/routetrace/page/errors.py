"""Errors as answers: a status, and JSON that names kind, field, value and expectation."""

from __future__ import annotations

import re
import time
from datetime import datetime, timezone
from typing import Any

from starlette.responses import JSONResponse

from routetrace.common.errors import (
    Closed,
    Corrupt,
    DeadlineExceeded,
    InvalidArgument,
    NotFound,
    Overloaded,
    PermissionDenied,
    RouteTraceError,
    Unauthenticated,
    Unavailable,
)

#: Status and kind, by class; others are 500 and "internal".
_KINDS: dict[type[RouteTraceError], tuple[int, str]] = {
    InvalidArgument: (400, "invalid_argument"),
    Unauthenticated: (401, "unauthenticated"),
    PermissionDenied: (403, "permission_denied"),
    NotFound: (404, "not_found"),
    Overloaded: (503, "overloaded"),
    Unavailable: (503, "unavailable"),
    DeadlineExceeded: (503, "deadline_exceeded"),
    Closed: (503, "unavailable"),
    Corrupt: (500, "corrupt"),
}
#: Of refusals that are no RouteTraceError.
_STATUS_KINDS = {404: "not_found", 405: "invalid_argument", 409: "view_gone", 421: "wrong_host"}

_TIME = re.compile(r" at (\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)Z")
_UNITS = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))
#: Seconds after which a call that failed for a busy or absent server is worth another attempt.
_RETRY_S = 5


class TooManySignIns(RouteTraceError):
    """Too many wrong sign-ins from one address.

    Args:
        seconds: until the next attempt is looked at.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        wait = max(1, round(seconds))
        super().__init__(
            f"Too many wrong sign-ins. Try again in {wait} s.",
            field="token",
            value="***",
            expected="fewer wrong sign-ins",
        )

    @property
    def retry_after(self) -> float:
        """Seconds until the next attempt is looked at."""
        return self._seconds


def answer(error: RouteTraceError) -> JSONResponse:
    """Return the answer for an error."""
    status, kind = status_of(error)
    body = {
        "kind": kind,
        "field": error.field,
        "value": error.value,
        "expected": error.expected,
        "message": error.message,
    }
    if isinstance(error, NotFound):
        body |= _absence(error)
    headers = {}
    if status in (429, 503):
        headers["Retry-After"] = str(max(1, round(error.retry_after or _RETRY_S)))
    return JSONResponse({"error": body}, status, headers)


def refusal(status: int, message: str, kind: str = "") -> JSONResponse:
    """Return the answer for a request that is refused before it reaches an endpoint."""
    found = kind or _STATUS_KINDS.get(status, "internal")
    body = {"kind": found, "field": "", "value": "", "expected": "", "message": message}
    return JSONResponse({"error": body}, status)


def status_of(error: RouteTraceError) -> tuple[int, str]:
    """Return the status and the kind of an error."""
    if isinstance(error, TooManySignIns):
        return 429, "overloaded"
    for cls in type(error).__mro__:
        if cls in _KINDS:
            return _KINDS[cls]
    return 500, "internal"


def busy() -> Overloaded:
    """Return the error of a page that has as much work as it takes."""
    return Overloaded(
        f"Too much is being read. Trying again in {_RETRY_S} s.", retry_after=_RETRY_S
    )


def lost_trace(error: NotFound, run: str, trace_id: str) -> NotFound:
    """Return the error of a trace that is not there, in words for the page.

    Args:
        error: the server's.
        run: the run that was asked.
        trace_id: the trace that was asked for.
    """
    if error.kind == "run":
        text = f"Run {run!r} has no traces. Runs that have: {_runs(error)}."
    elif error.kind != "trace":
        text = error.message
    elif error.reason:
        at = _moment(error)
        ago = f" {_duration(time.time() - at)} ago" if at else ""
        text = f"{trace_id!r} was forgotten{ago}: {error.reason}."
    else:
        text = f"{trace_id!r} was never seen in run {run!r}, or long ago; ids are exact."
    found = NotFound(
        text,
        field=error.field,
        value=error.value,
        expected=error.expected,
        remedy=error.remedy,
        reason=error.reason,
        trace_id=trace_id,
    )
    found.__cause__ = error
    return found


def _absence(error: NotFound) -> dict[str, Any]:
    """Return the facts of a thing that is not there: which kind, why, and since when."""
    source = error.__cause__ if isinstance(error.__cause__, NotFound) else error
    return {
        "missing": error.kind,
        "reason": error.reason,
        "forgotten_at": _moment(source),
        "details": source.message,
    }


def _runs(error: NotFound) -> str:
    return error.expected.removeprefix("one of ") or "none yet"


def _moment(error: NotFound) -> float | None:
    """Return the Unix time at which a trace was forgotten, which the server's words have."""
    found = _TIME.search(error.message) if error.reason else None
    if not found:
        return None
    return datetime.fromisoformat(found[1]).replace(tzinfo=timezone.utc).timestamp()


def _duration(seconds: float) -> str:
    for unit, size in _UNITS:
        if seconds >= size:
            return f"{int(seconds / size)} {unit}"
    return "less than 1 s"
