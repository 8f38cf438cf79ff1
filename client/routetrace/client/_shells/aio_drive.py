"""Execution of read plans on an asyncio event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from itertools import islice
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

#: Bytes of rows from which decoding runs in a thread: less blocks the loop for less than a call.
_BESIDE_BYTES = 64 << 10

_RETURNED: Any = object()


def _resolve(pause: asyncio.Future[None]) -> None:
    if not pause.done():
        pause.set_result(None)


class AsyncDriver:
    """Channels, opened at the first call on each event loop."""

    #: Whether this process was forked while a client had a channel: gRPC shares one poller between
    #: all asyncio channels, which does not live on in the child, and calls would hang.
    _lost_poller = False

    def __init__(self, config: Config) -> None:
        self._config = config
        self._closed = False
        self._pauses: set[asyncio.Future[None]] = set()  # between attempts; resolved by close()
        self._outage = Outage(config)
        self._begin()
        start_over_after_fork(self)

    def _begin(self) -> None:
        self._connections = Connections(self._config, self._config.security.aio_channel)
        self._loop: asyncio.AbstractEventLoop | None = None

    def _start_over(self) -> Any:
        inherited = self._connections
        if inherited:
            AsyncDriver._lost_poller = True
        self._begin()
        return inherited

    @property
    def state(self) -> str:
        """State for repr: idle, open or closed."""
        return "closed" if self._closed else "open" if self._connections else "idle"

    async def close(self) -> None:
        """Cancel all calls, for good."""
        self._closed = True
        for pause in [*self._pauses]:
            pause.get_loop().call_soon_threadsafe(_resolve, pause)
        channels = self._connections.clear()
        if self._loop is asyncio.get_running_loop():
            for channel in channels:
                await channel.close()

    async def one(self, plan: Plan[T]) -> T:
        """Return the one value of a plan."""
        async with aclosing(self.run(plan)) as values:
            return await anext(values)

    async def every(self, plan: Plan[T | RouteTraceError]) -> list[T]:
        """Return the values of a plan; raise the first error among them."""
        async with aclosing(self.run(plan)) as values:
            return [checked(value) async for value in values]

    async def run(self, plan: Plan[T]) -> AsyncGenerator[T, None]:
        """Yield the values of a plan."""
        outcome: Any = None
        failure: grpc.RpcError | None = None
        async with AsyncExitStack() as stream:
            while True:
                try:
                    step = await _next_step(plan, outcome, failure)
                except (Unavailable, DeadlineExceeded) as error:
                    raise self._config.explained(error) from error.__cause__
                if step is _RETURNED:
                    return
                outcome = failure = None
                if isinstance(step, Emit):
                    yield step.value
                    continue
                self._outage.before(step)
                try:
                    outcome = await self._do(step, stream)
                    if isinstance(step, (Unary, Receive)):
                        self._outage.answered()
                except grpc.RpcError as error:
                    if self._closed:
                        raise Closed("the client was closed during the call") from error
                    failure = error
                    self._outage.failed(error)
                except asyncio.CancelledError:
                    # Closing the channel cancels its calls, not the caller's task.
                    if self._closed and not _cancelling():
                        raise Closed("the client was closed during the call") from None
                    raise

    async def _do(self, step: Step[Any], stream: AsyncExitStack) -> Any:
        match step:
            case Unary(name, request, timeout):
                metadata = self._config.security.metadata()
                async with self._connected() as methods:
                    return await methods[name](request, timeout=timeout, metadata=metadata)
            case Open(name, request, limit, worker):
                await stream.aclose()  # the one before
                metadata = self._config.security.metadata()
                methods = await stream.enter_async_context(self._connected(worker))
                call = methods[name](request, timeout=limit, metadata=metadata)
                stream.callback(call.cancel)  # does nothing to a call that has ended
                return call
            case Receive(call):
                return await anext(aiter(call), END)
            case Sleep(seconds):
                return await self._pause(seconds)
            case _:
                raise AssertionError(step)

    async def _pause(self, seconds: float) -> None:
        """Sleep; end with an error when the client is closed."""
        pause = asyncio.get_running_loop().create_future()
        self._pauses.add(pause)
        try:
            await asyncio.wait({pause}, timeout=seconds)
        finally:
            self._pauses.discard(pause)
        if self._closed:
            raise Closed("the client was closed during the call")

    @asynccontextmanager
    async def _connected(self, worker: str = "") -> AsyncIterator[dict[str, Any]]:
        """Lend the methods of a connection for one call, to a worker if one is named."""
        if self._closed:
            raise Closed("the client is closed")
        if self._lost_poller:
            raise Unavailable(
                "asyncio calls would hang in a process that was forked while a client was open; "
                "close it before the fork",
                retry_after=0,
            )
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._begin()
            self._loop = loop
        connections = self._connections
        connection = connections.enter(worker)
        try:
            yield connection.methods
        finally:
            for channel in connections.leave(connection):
                await channel.close()

    async def many(
        self,
        plan: Callable[[Item], Plan[T]],
        ids: Iterable[Item],
        prefetch: int,
        return_errors: bool,
        meter: Meter,
    ) -> AsyncGenerator[T | RouteTraceError, None]:
        """Yield the value of one plan per id, in order, `prefetch` of them at a time."""
        ids = iter(ids)
        size = batch_size(prefetch)
        pending: deque[asyncio.Future[T | RouteTraceError]] = deque()
        tasks: set[asyncio.Task[None]] = set()
        try:
            while True:
                while prefetch - len(pending) >= size and (some := [*islice(ids, size)]):
                    make = asyncio.get_running_loop().create_future
                    futures: list[asyncio.Future[T | RouteTraceError]] = [make() for _ in some]
                    batch = together(self._config, [begun_late(plan, i) for i in some])
                    task = asyncio.create_task(self._fill(batch, futures))
                    tasks.add(task)
                    task.add_done_callback(tasks.discard)
                    pending += futures
                if not pending:
                    return
                try:
                    value = await pending.popleft()
                except RouteTraceError as error:
                    value = error
                meter.counted(value)
                yield in_place(value) if return_errors else checked(value)
        finally:
            for task in tasks:
                task.cancel()
            await settled([*tasks])

    async def use_each(
        self,
        use: Callable[[Any], None],
        plan: Callable[[Item], Plan[Any]],
        items: Iterable[Item],
        prefetch: int,
        meter: Meter,
    ) -> None:
        """Call a function with the value of each plan, as `many` yields them, in a thread."""
        loop = asyncio.get_running_loop()
        async with aclosing(self.many(plan, items, prefetch, False, meter)) as values:
            async for value in values:
                work = loop.run_in_executor(None, use, value)
                await settled([work])
                work.result()

    async def _fill(self, plan: Plan[T], futures: Sequence[asyncio.Future[T]]) -> None:
        """Set futures to the values of a plan, each as it comes."""
        left = iter(futures)
        try:
            async with aclosing(self.run(plan)) as values:
                async for value in values:
                    future = next(left)
                    if not future.done():  # as it is if the caller was cancelled
                        future.set_result(value)
        except Exception as error:
            for future in left:
                if not future.done():
                    future.set_exception(error)
                    future.exception()  # marks it as seen: there may be no waiter


async def _next_step(plan: Plan[T], outcome: Any, failure: grpc.RpcError | None) -> Step[T]:
    """Return the next step of a plan; decode large messages in a thread."""

    def advance() -> Step[T]:
        try:
            return plan.send(outcome) if failure is None else plan.throw(failure)
        except StopIteration:  # no future can hold it
            return _RETURNED  # type: ignore[no-any-return]

    if not isinstance(outcome, Received) or len(outcome.payload) < _BESIDE_BYTES:
        return advance()
    work = asyncio.get_running_loop().run_in_executor(None, advance)
    await settled([work])  # also if this is cancelled: it writes to arrays of the caller
    return work.result()


async def settled(work: Sequence[asyncio.Future[Any]]) -> None:
    """Wait until all futures are done; only then pass a cancellation on."""
    cancelled: asyncio.CancelledError | None = None
    while not all(future.done() for future in work):
        try:
            await asyncio.wait(work)
        except asyncio.CancelledError as error:  # noqa: PERF203
            cancelled = error
    for future in work:
        if not future.cancelled():
            future.exception()  # seen, if there is one
    if cancelled is not None:
        raise cancelled


def _cancelling() -> bool:
    """Whether the running task is being cancelled; always False on Python 3.10."""
    cancelling = getattr(asyncio.current_task(), "cancelling", None)
    return cancelling is not None and cancelling() > 0
