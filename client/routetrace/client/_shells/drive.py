"""Execution of read plans with blocking calls."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from itertools import islice
from queue import SimpleQueue
from typing import Any, TypeVar

import grpc

from routetrace.client._core.batch import Item, batch_size, begun_late, checked, in_place, together
from routetrace.client._core.config import Config
from routetrace.client._core.messages import Received
from routetrace.client._core.steps import END, Emit, Open, Plan, Receive, Sleep, Step, Unary
from routetrace.client._shells.channels import Connections
from routetrace.client._shells.fork import start_over_after_fork
from routetrace.client._shells.outage import Outage
from routetrace.client.progress import Meter
from routetrace.common.errors import Closed, DeadlineExceeded, RouteTraceError, Unavailable

T = TypeVar("T")

# Streams are received by the thread that reads them: starting one for each takes as long as a call.
_NO_SPIN_THREAD = ("SingleThreadedUnaryStream", 1)


class Scope:
    """Calls, and inner scopes, that are cancelled together."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._lock = threading.Lock()
        self._members: set[Any] = set()

    @property
    def cancelled(self) -> bool:
        """Whether it was cancelled."""
        return self._event.is_set()

    def wait(self, seconds: float) -> None:
        """Sleep until the time is over or the scope is cancelled."""
        self._event.wait(seconds)

    def add(self, member: Any) -> None:
        """Add a call or a scope."""
        with self._lock:
            self._members.add(member)
        if self.cancelled:
            member.cancel()

    def discard(self, member: Any) -> None:
        """Remove a call or a scope."""
        with self._lock:
            self._members.discard(member)

    def cancel(self) -> None:
        """Cancel all members, and those added later."""
        self._event.set()
        with self._lock:
            members = list(self._members)
        for member in members:
            member.cancel()


class Driver:
    """Channels, opened at the first call, and the calls under way. Thread-safe."""

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
        self._outage = Outage(self._config)
        self._lock = threading.Lock()
        self._scope = Scope()

    def _channel(self, target: str, options: Sequence[tuple[str, Any]]) -> grpc.Channel:
        return self._config.security.channel(target, (*options, _NO_SPIN_THREAD))

    @property
    def state(self) -> str:
        """State for repr: idle, open or closed."""
        return "closed" if self._scope.cancelled else "open" if self._connections else "idle"

    def close(self) -> None:
        """Cancel all calls, for good."""
        self._scope.cancel()
        with self._lock:
            channels = self._connections.clear()
        for channel in channels:
            channel.close()

    def scope(self) -> Scope:
        """Return a scope that closing the driver cancels; `end` removes it."""
        scope = Scope()
        self._scope.add(scope)
        return scope

    def end(self, scope: Scope) -> None:
        """Remove a scope."""
        self._scope.discard(scope)

    def one(self, plan: Plan[T], scope: Scope | None = None) -> T:
        """Return the one value of a plan."""
        with closing(self.run(plan, scope)) as values:
            return next(values)

    def every(self, plan: Plan[T | RouteTraceError], scope: Scope | None = None) -> list[T]:
        """Return the values of a plan; raise the first error among them."""
        with closing(self.run(plan, scope)) as values:
            return [checked(value) for value in values]

    def one_by_one(self, plans: Iterable[Plan[T | RouteTraceError]]) -> list[T]:
        """Return the values of all plans; raise the first error among them.

        A call starts as the previous one decodes its last message.
        """
        values: list[T] = []
        with ExitStack() as stack:
            under_way = [stack.enter_context(closing(self._steps(plan))) for plan in plans]
            begun = 0
            for number, steps in enumerate(under_way):
                for step in steps:
                    if isinstance(step, Emit):
                        values.append(checked(step.value))
                    elif isinstance(step, Receive) and begun == number < len(under_way) - 1:
                        begun += 1
                        next(under_way[begun])
                begun = max(begun, number + 1)
        return values

    def run(self, plan: Plan[T], scope: Scope | None = None) -> Generator[T, None, None]:
        """Yield the values of a plan."""
        with closing(self._steps(plan, scope)) as steps:
            for step in steps:
                if isinstance(step, Emit):
                    yield step.value

    def _steps(self, plan: Plan[T], scope: Scope | None = None) -> Generator[Step[T], None, None]:
        """Execute a plan; stop after a call starts, at its last message, and at each value."""
        scope = scope or self._scope
        outcome: Any = None
        failure: grpc.RpcError | None = None
        with ExitStack() as stream:
            while True:
                try:
                    step = plan.send(outcome) if failure is None else plan.throw(failure)
                except StopIteration:
                    return
                except (Unavailable, DeadlineExceeded) as error:
                    raise self._config.explained(error) from error.__cause__
                outcome = failure = None
                if isinstance(step, Emit):
                    yield step
                    continue
                self._outage.before(step)
                try:
                    outcome = self._do(step, scope, stream)
                except (grpc.RpcError, ValueError) as error:
                    if scope.cancelled:
                        raise Closed("the client was closed during the call") from error
                    if not isinstance(error, grpc.RpcError):
                        raise
                    failure = error
                    with self._lock:
                        self._outage.failed(error)
                else:
                    if isinstance(step, (Unary, Receive)):
                        self._outage.answered()
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
            case Open(name, request, limit, worker):
                stream.close()  # the one before
                metadata = self._config.security.metadata()
                methods = stream.enter_context(self._connected(worker))
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
    def _connected(self, worker: str = "") -> Iterator[dict[str, Any]]:
        """Lend the methods of a connection for one call, to a worker if one is named."""
        with self._lock:
            if self._scope.cancelled:
                raise Closed("the client is closed")
            connection = self._connections.enter(worker)
        try:
            yield connection.methods
        finally:
            with self._lock:
                unused = self._connections.leave(connection)
            for channel in unused:
                channel.close()

    def many(
        self,
        plan: Callable[[Item], Plan[T]],
        ids: Iterable[Item],
        prefetch: int,
        return_errors: bool,
        meter: Meter,
    ) -> Generator[T | RouteTraceError, None, None]:
        """Yield the value of one plan per id, in order, `prefetch` of them at a time."""
        scope = self.scope()
        ids = iter(ids)
        size = batch_size(prefetch)
        pending: deque[SimpleQueue[T | BaseException]] = deque()  # one for each batch
        with ThreadPoolExecutor(prefetch // size + 1, "routetrace-get-many") as pool:
            try:
                while True:
                    while prefetch - len(pending) >= size and (some := [*islice(ids, size)]):
                        values: SimpleQueue[T | BaseException] = SimpleQueue()
                        batch = together(self._config, [begun_late(plan, i) for i in some])
                        pool.submit(self._fill, batch, values, len(some), scope)
                        pending += [values] * len(some)
                    if not pending:
                        return
                    value = pending.popleft().get()
                    if isinstance(value, BaseException) and not isinstance(value, RouteTraceError):
                        raise value
                    meter.counted(value)
                    yield in_place(value) if return_errors else checked(value)
            finally:
                self.end(scope)
                scope.cancel()

    def use_each(
        self,
        use: Callable[[Any], None],
        plan: Callable[[Item], Plan[Any]],
        items: Iterable[Item],
        prefetch: int,
        meter: Meter,
    ) -> None:
        """Call a function with the value of each plan, as `many` yields them."""
        with closing(self.many(plan, items, prefetch, False, meter)) as values:
            for value in values:
                use(value)

    def _fill(
        self,
        plan: Plan[T | RouteTraceError],
        values: SimpleQueue[T | BaseException],
        count: int,
        scope: Scope,
    ) -> None:
        """Put the `count` values of a plan into a queue, each as it comes, or an error for each."""
        left = count
        try:
            with closing(self.run(plan, scope)) as each:
                for value in each:
                    values.put(value)
                    left -= 1
            assert not left, f"{left} values of {count} are missing"
        except BaseException as error:
            for _ in range(left):
                values.put(error)
