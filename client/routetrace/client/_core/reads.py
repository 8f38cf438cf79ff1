"""Calls, retries and results as read plans, without I/O.

Each decision is written once, for both clients, and can be tested without a network.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import grpc

from routetrace.client._core.assemble import Assembler, Want
from routetrace.client._core.retry import Attempts
from routetrace.client._core.route import TRACE_FIELD
from routetrace.client._core.steps import END, Emit, Open, Part, Plan, Receive, Sleep, T, Unary
from routetrace.client.stat import ReadFacts, TraceStat, TraceState
from routetrace.client.trace import Trace
from routetrace.common.errors import (
    Corrupt,
    DeadlineExceeded,
    Incomplete,
    Moved,
    NotFound,
    Overloaded,
    RouteTraceError,
    Unavailable,
)
from routetrace.common.missing import MissingRange
from routetrace.v1 import routetrace_pb2 as pb


def named(trace_id: str, plan: Plan[T]) -> Plan[T]:
    """Carry out a plan; name its trace in a NotFound."""
    try:
        yield from plan
    except NotFound as error:
        error.trace_id = trace_id
        raise


def one_of_many(plan: Plan[T]) -> Plan[T]:
    """Carry out the plan of a trace whose error ends an iteration; say how to go on without it."""
    try:
        yield from plan
    except (NotFound, Incomplete, DeadlineExceeded) as error:
        remedy = 'pass errors="return" to go on with the other traces'
        error.message += f"; {remedy}"
        error.args = (error.message,)
        error.remedy += f"; {remedy}" if error.remedy else remedy
        raise


def value_of(plan: Plan[T]) -> Part[T]:
    """Carry out a plan as a part of another one; return its first value."""
    step = plan.send(None)
    while not isinstance(step, Emit):
        try:
            outcome = yield step
        except Exception as failure:  # noqa: PERF203
            step = plan.throw(failure)
        else:
            step = plan.send(outcome)
    return step.value


def unary(
    method: str,
    request: Any,
    timeout: float,
    convert: Callable[[Any], T],
    *,
    idempotent: bool = True,
) -> Plan[T]:
    """Call a method; emit its converted response."""
    response = yield from called(method, request, timeout, idempotent)
    yield Emit(converted(convert, response))


def called(method: str, request: Any, timeout: float, idempotent: bool = True) -> Part[Any]:
    """Return the response of a call."""
    # A refused call had no effect; one that broke off may have had one.
    attempts = Attempts(timeout, RouteTraceError if idempotent else Overloaded)
    while True:
        try:
            return (yield Unary(method, request, attempts.start()))
        except grpc.RpcError as failure:
            pause = attempts.pause(failure)
        yield Sleep(pause, attempts.failure, attempts.left())


def converted(convert: Callable[[Any], T], response: Any) -> T:
    """Return a converted response; Corrupt if it contradicts itself."""
    try:
        return convert(response)
    except (LookupError, ValueError, AttributeError) as error:
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
    until_end = request.wait_for == pb.WAIT_FOR_END
    try:
        trace = yield from _read("GetTrace", request, want, wait)
    except DeadlineExceeded:
        pass  # the rows may be there now, or sending them takes longer
    else:
        yield Emit(trace)
        return
    request.wait_for = pb.WAIT_FOR_UNSPECIFIED
    late = _TooLate(want, wait, until_end)
    try:
        trace = yield from _read("GetTrace", request, want, timeout, late)
    except NotFound as error:
        raise late.unknown(error) from error
    except Incomplete as error:
        if not _may_come(error.state, error.missing, error.unknown_from):
            raise
        raise late.lacks(error.unknown_from, error.missing) from None
    unknown_from = None
    if want.token_stop is None and trace.num_tokens is None:
        unknown_from = trace.num_rows
    if _may_come(trace.state, trace.missing, unknown_from):
        raise late.lacks(unknown_from, trace.missing)
    yield Emit(trace)


def _may_come(
    state: TraceState, missing: tuple[MissingRange, ...], unknown_from: int | None
) -> bool:
    """Return whether requested rows may still come."""
    if state is not TraceState.RUNNING:
        return False
    return unknown_from is not None or any(m.reason == "not_yet" for m in missing)


def _fact(error: RouteTraceError) -> str:
    """Return the message of an error without the remedy: to wait was of no use."""
    return error.message.removesuffix(f"; {error.remedy}")


class _TooLate:
    """Errors of a wait that ran out."""

    def __init__(self, want: Want, wait: float, until_end: bool) -> None:
        self._want = want
        self._wait = wait
        self.until_end = until_end
        self.stat: TraceStat | None = None

    def unknown(self, error: NotFound) -> DeadlineExceeded:
        """The server does not know the trace."""
        verb = "end" if self.until_end else "begin"
        return self._error(
            f"{self._want.name} did not {verb} within {self._wait:g} s: {_fact(error)}"
        )

    def running(self, num_rows: int) -> DeadlineExceeded:
        """The request has not ended."""
        return self._error(
            f"{self._want.name} did not end within {self._wait:g} s ({num_rows} rows so far)"
        )

    def lacks(
        self, unknown_from: int | None, missing: tuple[MissingRange, ...]
    ) -> DeadlineExceeded:
        """Requested rows are not there."""
        start = min([m.start for m in missing], default=unknown_from)
        stop: Any = max([m.stop for m in missing], default=unknown_from)
        if unknown_from is not None and self._want.token_stop is None:
            stop = "end"
        more = f" ({len(missing)} missing ranges)" if len(missing) > 1 else ""
        return self._error(
            f"rows [{start}, {stop}) of {self._want.name} did not arrive within "
            f"{self._wait:g} s{more}"
        )

    def _error(self, text: str) -> DeadlineExceeded:
        return DeadlineExceeded(
            text, trace_id=self._want.trace_id, waited_seconds=self._wait, stat=self.stat
        )


def _read(
    method: str, request: Any, want: Want, timeout: float, late: _TooLate | None = None
) -> Part[Trace | ReadFacts]:
    """Read a stream to its end; with `late`, refuse a trace whose end was waited for in vain."""
    attempts = Attempts(timeout)
    worker = _sent_on(request, None)
    while True:
        assembler = Assembler(want)
        try:
            call = yield Open(method, request, attempts.start(), worker)
            while (message := (yield Receive(call))) is not END:
                assembler.feed(*message)
                del message  # not kept while the next one comes
                if late:
                    late.stat = assembler.stat
                    if late.until_end and assembler.state is TraceState.RUNNING:
                        raise late.running(assembler.num_rows)
            trace = assembler.finish()
            if trace.num_tokens is not None and trace.num_tokens < want.num_tokens:
                raise DeadlineExceeded(
                    f"{want.name} ended with {trace.num_tokens} tokens, {want.num_tokens} expected:"
                    " its last request has not arrived",
                    trace_id=want.trace_id,
                    waited_seconds=timeout,
                    stat=assembler.stat,
                )
            return trace
        except (grpc.RpcError, Unavailable, Moved) as failure:
            pause = attempts.pause(failure)
            worker = _sent_on(request, attempts.failure)
        yield Sleep(pause, attempts.failure, attempts.left())


def _sent_on(request: Any, failure: RouteTraceError | None) -> str:
    """Return the worker that alone has the trace of a read, if the failure names it, else ""."""
    worker = ""
    if isinstance(failure, Moved) and failure.field == TRACE_FIELD:
        worker = failure.target
    if isinstance(request, pb.GetTraceRequest):
        request.located = bool(worker)
    return worker


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
            except RouteTraceError as error:
                if limit is not None and assembler.state and not attempts.left():
                    raise DeadlineExceeded(
                        f"{want.name} did not end within {limit:g} s",
                        trace_id=want.trace_id,
                        waited_seconds=limit,
                        stat=assembler.stat,
                    ) from error
                begun = assembler.state or not request.wait_ms
                if begun or not isinstance(error, (NotFound, DeadlineExceeded)):
                    raise
                raise DeadlineExceeded(
                    f"{want.name} did not begin within {timeout:g} s: {_fact(error)}",
                    trace_id=want.trace_id,
                    waited_seconds=timeout,
                ) from error
        else:
            yield Emit(rest)
            return
        yield Sleep(pause, attempts.failure, attempts.left())


def watch(request: pb.WatchTracesRequest, timeout: float, convert: Callable[[Any], T]) -> Plan[T]:
    """Emit the converted messages about a run as they come.

    Args:
        request: the request.
        timeout: seconds for the first message, with retries.
        convert: converts a message.
    """
    attempts = Attempts(timeout)
    while True:
        try:
            attempts.start()
            call = yield Open("WatchTraces", request, None)
            while (message := (yield Receive(call))) is not END:
                attempts.hand_out()
                yield Emit(converted(convert, message))
            raise Unavailable("the server has ended the watch")
        except (grpc.RpcError, Unavailable) as failure:
            pause = attempts.pause(failure)
        yield Sleep(pause, attempts.failure, attempts.left())


def pages(
    name: str,
    request: Any,
    timeout: float,
    items: Callable[[Any], Iterable[Any]],
    convert: Callable[[Any], T],
    limit: int | None = None,
) -> Plan[T]:
    """Emit the items of all pages of a list, with `timeout` seconds for each page.

    Args:
        name: method of the service.
        request: its request.
        timeout: seconds.
        items: returns the items of a page.
        convert: returns the item to emit.
        limit: maximum of items; None: all.
    """
    left = math.inf if limit is None else limit
    while True:
        page = yield from called(name, request, timeout)
        for item in items(page):
            yield Emit(converted(convert, item))
            left -= 1
            if not left:
                return
        if not page.next_page_token:
            return
        if page.next_page_token == request.page_token:
            raise Corrupt("the server sent the same page again")
        request.page_token = page.next_page_token
