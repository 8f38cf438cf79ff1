"""Carries out plans with blocking calls."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from itertools import islice
from typing import Any, TypeVar

import grpc

from routetrace.client._channels import Connections
from routetrace.client._core import (
    END,
    Config,
    Emit,
    Open,
    Plan,
    Receive,
    Sleep,
    Step,
    Unary,
)
from routetrace.client._fork import start_over_after_fork
from routetrace.client._messages import Received
from routetrace.v1.errors import Closed, RouteTraceError, Unavailable

T = TypeVar("T")

# Streams are received by the thread that reads them: starting one for each takes as long as a call.
_NO_SPIN_THREAD = ("SingleThreadedUnaryStream", 1)


class Scope:
    """Calls, and scopes within, that are given up together."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._lock = threading.Lock()
        self._members: set[Any] = set()

    @property
    def cancelled(self) -> bool:
        """Whether it was given up."""
        return self._event.is_set()

    def wait(self, seconds: float) -> None:
        """Sleeps, unless the scope is given up."""
        self._event.wait(seconds)

    def add(self, member: Any) -> None:
        """Takes in a call or a scope."""
        with self._lock:
            self._members.add(member)
        if self.cancelled:
            member.cancel()

    def discard(self, member: Any) -> None:
        """Lets one go."""
        with self._lock:
            self._members.discard(member)

    def cancel(self) -> None:
        """Gives all up."""
        self._event.set()
        with self._lock:
            members = list(self._members)
        for member in members:
            member.cancel()


class Driver:
    """Channels, the first opened at the first call, and what is under way. Thread-safe."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._begin()
        start_over_after_fork(self)

    def _start_over(self) -> Any:
        inherited = self._connections
        self._begin()
        return inherited

    def _begin(self) -> None:
        self._connections = Connections(self._config, self._channel)
        self._lock = threading.Lock()
        self._scope = Scope()

    def _channel(self, target: str, options: Sequence[tuple[str, Any]]) -> grpc.Channel:
        return self._config.security.channel(target, (*options, _NO_SPIN_THREAD))

    @property
    def state(self) -> str:
        """For people: idle, open or closed."""
        return "closed" if self._scope.cancelled else "open" if self._connections else "idle"

    def close(self) -> None:
        """Gives up what is under way; there is no way back."""
        self._scope.cancel()
        with self._lock:
            channels = self._connections.clear()
        for channel in channels:
            channel.close()

    def scope(self) -> Scope:
        """A scope that is given up when the driver is closed; `end` lets it go."""
        scope = Scope()
        self._scope.add(scope)
        return scope

    def end(self, scope: Scope) -> None:
        """Lets a scope go."""
        self._scope.discard(scope)

    def one(self, plan: Plan[T], scope: Scope | None = None) -> T:
        """The one value of a plan."""
        with closing(self.run(plan, scope)) as values:
            return next(values)

    def one_by_one(self, plans: Iterable[Plan[T]]) -> list[T]:
        """The one value of each plan; a call begins while the last message before is worked on."""
        values: list[T] = []
        with ExitStack() as stack:
            under_way = [stack.enter_context(closing(self._steps(plan))) for plan in plans]
            begun = 0
            for number, steps in enumerate(under_way):
                for step in steps:
                    if isinstance(step, Emit):
                        values.append(step.value)
                    elif isinstance(step, Receive) and begun == number < len(under_way) - 1:
                        begun += 1
                        next(under_way[begun])
                begun = max(begun, number + 1)
        return values

    def run(self, plan: Plan[T], scope: Scope | None = None) -> Generator[T, None, None]:
        """The values of a plan."""
        with closing(self._steps(plan, scope)) as steps:
            for step in steps:
                if isinstance(step, Emit):
                    yield step.value

    def _steps(self, plan: Plan[T], scope: Scope | None = None) -> Generator[Step[T], None, None]:
        """Carries a plan out; stops at a call that began, its last message, and each value."""
        scope = scope or self._scope
        outcome: Any = None
        failure: grpc.RpcError | None = None
        with ExitStack() as stream:
            while True:
                try:
                    step = plan.send(outcome) if failure is None else plan.throw(failure)
                except StopIteration:
                    return
                except Unavailable as error:
                    raise self._config.explained(error) from error.__cause__
                outcome = failure = None
                if isinstance(step, Emit):
                    yield step
                    continue
                try:
                    outcome = self._do(step, scope, stream)
                except (grpc.RpcError, ValueError) as error:
                    if scope.cancelled:
                        raise Closed("the client was closed meanwhile") from error
                    if not isinstance(error, grpc.RpcError):
                        raise
                    failure = error
                else:
                    if isinstance(step, Open) or (
                        isinstance(outcome, Received) and outcome.is_last
                    ):
                        yield step

    def _do(self, step: Step[Any], scope: Scope, stream: ExitStack) -> Any:
        match step:
            case Unary(name, request, timeout):
                metadata = self._config.security.metadata()
                with self._connected() as methods:
                    return methods[name](request, timeout=timeout, metadata=metadata)
            case Open(name, request, limit):
                stream.close()  # the one before
                metadata = self._config.security.metadata()
                methods = stream.enter_context(self._connected())
                call = methods[name](request, timeout=limit, metadata=metadata)
                stream.callback(call.cancel)  # does nothing to a call that has ended
                stream.callback(scope.discard, call)
                scope.add(call)
                return call
            case Receive(call):
                return next(call, END)
            case Sleep(seconds):
                return scope.wait(seconds)
            case _:
                raise AssertionError(step)

    @contextmanager
    def _connected(self) -> Iterator[dict[str, Any]]:
        """The methods to call, for the time of a call."""
        with self._lock:
            if self._scope.cancelled:
                raise Closed("the client is closed")
            connection = self._connections.enter()
        try:
            yield connection.methods
        finally:
            with self._lock:
                unused = self._connections.leave(connection)
            for channel in unused:
                channel.close()

    def many(
        self,
        plan: Callable[[str], Plan[T]],
        ids: Iterable[str],
        prefetch: int,
        return_errors: bool,
    ) -> Generator[T | RouteTraceError, None, None]:
        """The values of one plan per id, in their order, `prefetch` of them at a time."""
        scope = self.scope()
        ids = iter(ids)
        pending: deque[Future[T]] = deque()
        with ThreadPoolExecutor(prefetch, "routetrace-get-many") as pool:
            try:
                while True:
                    for i in islice(ids, prefetch - len(pending)):
                        pending.append(pool.submit(lambda i: self.one(plan(i), scope), i))
                    if not pending:
                        return
                    value: T | RouteTraceError
                    try:
                        value = pending.popleft().result()
                    except RouteTraceError as error:
                        if not return_errors:
                            raise
                        value = error
                    yield value
            finally:
                self.end(scope)
                scope.cancel()
                for future in pending:
                    future.cancel()
