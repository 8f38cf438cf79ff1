"""Errors for traces and incarnations that are not there."""

from __future__ import annotations

from datetime import datetime, timezone

from routetrace.common.errors import NotFound, quoted
from routetrace.server.index.traces.tombstones import Fate
from routetrace.server.index.traces.trace import Trace

#: Fate of a deleted trace in errors, by the reason of its tombstone: before and behind the time.
_GONE = {
    "deleted": ("was deleted", ""),
    "retired": ("was retired", ": all its rows are of retired weight versions"),
    "expired": ("has expired", ": its lease ran out; a longer ttl_seconds or renew keeps one"),
    "quota": ("was evicted", ": its run came near run_quota"),
    "capacity": ("was evicted", ": the store came near store_capacity"),
    "memory": ("was evicted", ": traces took nearly half of memory_limit"),
}

# Incarnations that an error lists; of more it names the first and the last.
_SHOWN = 8

_YEAR_10000 = 253_402_300_800


def no_trace(run: str, trace_id: str, fate: Fate | None, *, named: bool = False) -> NotFound:
    """Return the error for a missing trace.

    Args:
        run: namespace.
        trace_id: the trace.
        fate: its deletion, if known.
        named: whether the caller may see the name of the token that deleted it.
    """
    remedy = 'check run=, or wait_for="end" if it has not begun'
    text = f"trace {trace_id!r} is not in run {run!r}; {remedy}"
    if fate:
        remedy = ""
        verb, why = _GONE.get(fate.reason, ("was deleted", ""))
        by = f" by token {fate.token}" if named and fate.token else ""
        text = f"trace {trace_id!r} of run {run!r} {verb}{_moment(fate.time)}{by}{why}"
    return NotFound(
        text,
        field="trace_id",
        value=quoted(trace_id),
        expected=f"a trace of run {run!r}",
        remedy=remedy,
        reason=fate.reason if fate else "",
    )


def no_incarnation(trace: Trace, number: int) -> NotFound:
    """Return the error for an incarnation that a trace does not have, or has dropped."""
    numbers = list(trace.join.numbers)
    has = ", ".join(map(str, numbers))
    if len(numbers) > _SHOWN:
        has = f"{numbers[0]} to {numbers[-1]}"
    return NotFound(
        f"trace {trace.key[1]!r} has no incarnation {number}; it has {has}",
        field="incarnation",
        value=number,
        expected=has,
    )


def no_request(trace: Trace, nonce: int) -> NotFound:
    """Return the error for a nonce that no request of a trace has, as far as the server knows."""
    remedy = 'check the handle, or wait_for="end" if the request has not begun'
    return NotFound(
        f"trace {trace.key[1]!r} has no engine request with nonce {nonce}; {remedy}",
        field="nonce",
        value=nonce,
        expected="that of one of its engine requests",
        remedy=remedy,
    )


def _moment(seconds: float) -> str:
    """Return " at" and a Unix time; "" for one that is not known."""
    if not 0 < seconds < _YEAR_10000:
        return ""
    return datetime.fromtimestamp(seconds, timezone.utc).strftime(" at %Y-%m-%dT%H:%M:%SZ")
