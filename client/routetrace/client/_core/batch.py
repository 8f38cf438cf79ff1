"""Many read plans carried out together, over GetTraces. No I/O.

Each plan is the one of a single read, and sees the same steps: the messages of the common stream
are dealt to the plans as if each had a call of its own. So every check, wait and retry of a read is
the same in both ways.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

import grpc

from routetrace.client._core.config import Config
from routetrace.client._core.messages import Received
from routetrace.client._core.steps import END, Emit, Open, Plan, Receive, Unary
from routetrace.common.errors import (
    Closed,
    DeadlineExceeded,
    PermissionDenied,
    RouteTraceError,
    Unauthenticated,
    Unavailable,
    from_detail,
)
from routetrace.v1 import routetrace_pb2 as pb

T = TypeVar("T")
Item = TypeVar("Item")

#: Maximum reads of one stream: they share its time.
MAX_READS = 32

#: Errors that are not those of one read: all further ones would end with them.
_OF_ALL = (Closed, PermissionDenied, Unauthenticated, Unavailable)

_BROKEN = Received(None)


def together(config: Config, plans: Iterable[Plan[T]]) -> Plan[T | RouteTraceError]:
    """Carry out read plans; emit the value or the error of each, in their order.

    Args:
        config: configuration of the client.
        plans: plans of reads of one trace each, with about the same time left.
    """
    lanes = [_Lane(plan) for plan in plans]
    waiting = deque(lanes)
    try:
        for lane in lanes:
            lane.send(None)
        while waiting:
            yield from _emit_ended(config, waiting)
            live = [lane for lane in waiting if lane.step is not None]
            opening = [lane for lane in live if isinstance(lane.step, Open)]
            calling = [lane for lane in live if isinstance(lane.step, Unary)]
            if len(live) == 1:
                yield from _alone(live[0])
            elif calling:
                yield from _step_of(calling[0])
            elif opening:
                # Those that are sent to one worker share its stream.
                worker = opening[0].step.worker
                some = [lane for lane in opening if lane.step.worker == worker]
                yield from _stream(config, some, waiting)
            elif live:
                yield max((lane.step for lane in live), key=lambda step: step.seconds)
                for lane in live:
                    lane.send(None)
    finally:
        for lane in lanes:
            lane.plan.close()


def batch_size(most: int) -> int:
    """Return the reads of a stream where `most` are under way or ready: two streams, or more."""
    return min(MAX_READS, max(1, most // 2))


def begun_late(make: Callable[[Item], Plan[T]], item: Item) -> Plan[T]:
    """Return a plan that is made at its first step, so that its errors are those of its read."""
    yield from make(item)


def checked(value: T | RouteTraceError) -> T:
    """Return a value of `together`; raise it if it is an error."""
    if isinstance(value, RouteTraceError):
        raise value
    return value


def in_place(value: T | RouteTraceError) -> T | RouteTraceError:
    """Return a value of `together`, or the error of its read; raise one that is of all reads."""
    return checked(value) if isinstance(value, _OF_ALL) else value


class _Lane(Generic[T]):
    """A plan, and how far it is."""

    def __init__(self, plan: Plan[T]) -> None:
        self.plan = plan
        self.step: Any = None
        """Step to carry out; None: the plan has ended."""
        self.outcome: T | RouteTraceError | None = None
        """Its value or error, once it has ended."""
        self.answered = False
        """Whether the last message of the read came in this stream."""

    def send(self, outcome: Any) -> None:
        """Send the outcome of its step."""
        self._advance(self.plan.send, outcome)

    def fail(self, error: Exception) -> None:
        """Let its step fail."""
        self._advance(self.plan.throw, error)

    def _advance(self, go_on: Any, value: Any) -> None:
        try:
            self.step = go_on(value)
        except RouteTraceError as error:
            self.step, self.outcome = None, error
        if isinstance(self.step, Emit):
            self.step, self.outcome = None, self.step.value

    @property
    def receives(self) -> bool:
        """Whether it takes messages."""
        return isinstance(self.step, Receive)


def _emit_ended(config: Config, waiting: deque[_Lane[T]]) -> Plan[T | RouteTraceError]:
    """Emit the outcomes of ended plans until one has not ended; remove them."""
    while waiting and waiting[0].step is None:
        outcome = waiting.popleft().outcome
        if isinstance(outcome, (Unavailable, DeadlineExceeded)):
            explained = config.explained(outcome)
            explained.__cause__ = outcome.__cause__
            outcome = explained
        yield Emit(outcome)  # type: ignore[arg-type]


def _alone(lane: _Lane[T]) -> Plan[Any]:
    """Carry out the one plan that is left, with a call of its own."""
    while lane.step is not None:
        yield from _step_of(lane)


def _step_of(lane: _Lane[T]) -> Plan[Any]:
    """Carry out one step of a plan."""
    try:
        outcome = yield lane.step
    except grpc.RpcError as failure:
        lane.fail(failure)
    else:
        lane.send(outcome)


def _stream(config: Config, lanes: Sequence[_Lane[T]], waiting: deque[_Lane[T]]) -> Plan[Any]:
    """Carry out one stream for plans that are to open one."""
    request = pb.GetTracesRequest(run=config.run)
    for lane in lanes:
        read = request.reads.add()
        read.CopyFrom(lane.step.request)
        read.ClearField("run")
        lane.answered = False
    try:
        timeout = max(lane.step.timeout for lane in lanes)
        call = yield Open("GetTraces", request, timeout, lanes[0].step.worker)
        for lane in lanes:
            lane.send(call)
        while (message := (yield Receive(call))) is not END:
            _deal(message, lanes)
            del message  # not kept while the next one comes
            yield from _emit_ended(config, waiting)
            if not any(lane.receives for lane in lanes):
                return
    except grpc.RpcError as failure:
        for lane in lanes:
            if isinstance(lane.step, (Open, Receive)):
                lane.fail(failure)
    else:
        for lane in lanes:
            if lane.receives:
                lane.send(END)


def _deal(message: Received, lanes: Sequence[_Lane[Any]]) -> None:
    """Pass the parts of a message on; one that is wrong is an invalid message to all plans."""
    parts = message.head.parts if message.head else ()
    if not parts or sum(part.payload_bytes for part in parts) != len(message.payload):
        _refuse(lanes)
        return
    payload, at = memoryview(message.payload), 0
    for part in parts:
        if part.read >= len(lanes) or lanes[part.read].answered:
            _refuse(lanes)
            return
        lane = lanes[part.read]
        frames = payload[at : at + part.payload_bytes]
        at += part.payload_bytes
        lane.answered = not part.HasField("message") or part.message.HasField("end")
        if not lane.receives:
            continue  # it has failed
        if part.HasField("error"):
            lane.fail(from_detail(part.error))
        elif not part.HasField("message"):
            lane.send(_BROKEN)
        else:
            lane.send(Received(part.message, frames))
            if lane.answered and lane.receives:
                lane.send(END)


def _refuse(lanes: Sequence[_Lane[Any]]) -> None:
    for lane in lanes:
        if lane.receives:
            lane.send(_BROKEN)
