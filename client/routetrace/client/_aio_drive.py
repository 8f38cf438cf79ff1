"""Carries out plans on an asyncio event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
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

#: Bytes of rows that are worked on beside the event loop: it is held up less than by a call.
_BESIDE_BYTES = 64 << 10

_RETURNED: Any = object()


class AsyncDriver:
    """Channels, the first opened at the first call on each event loop that it is used on."""

    #: Whether this process was forked while a client had a channel: gRPC shares one poller between
    #: all asyncio channels, which does not live on in the child, and calls would hang.
    _lost_poller = False

    def __init__(self, config: Config) -> None:
        self._config = config
        self._closed = False
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
        """For people: idle, open or closed."""
        return "closed" if self._closed else "open" if self._connections else "idle"

    async def close(self) -> None:
        """Gives up what is under way; there is no way back."""
        self._closed = True
        channels = self._connections.clear()
        if self._loop is asyncio.get_running_loop():
            for channel in channels:
                await channel.close()

    async def one(self, plan: Plan[T]) -> T:
        """The one value of a plan."""
        async with aclosing(self.run(plan)) as values:
            return await anext(values)

    async def run(self, plan: Plan[T]) -> AsyncGenerator[T, None]:
        """The values of a plan."""
        outcome: Any = None
        failure: grpc.RpcError | None = None
        async with AsyncExitStack() as stream:
            while True:
                try:
                    step = await _next_step(plan, outcome, failure)
                except Unavailable as error:
                    raise self._config.explained(error) from error.__cause__
                if step is _RETURNED:
                    return
                outcome = failure = None
                if isinstance(step, Emit):
                    yield step.value
                    continue
                try:
                    outcome = await self._do(step, stream)
                except grpc.RpcError as error:
                    if self._closed:
                        raise Closed("the client was closed meanwhile") from error
                    failure = error
                except asyncio.CancelledError:
                    # Closing the channel cancels its calls; that is not for the caller's task.
                    if self._closed and not _cancelling():
                        raise Closed("the client was closed meanwhile") from None
                    raise

    async def _do(self, step: Step[Any], stream: AsyncExitStack) -> Any:
        match step:
            case Unary(name, request, timeout):
                metadata = self._config.security.metadata()
                async with self._connected() as methods:
                    return await methods[name](request, timeout=timeout, metadata=metadata)
            case Open(name, request, limit):
                await stream.aclose()  # the one before
                metadata = self._config.security.metadata()
                methods = await stream.enter_async_context(self._connected())
                call = methods[name](request, timeout=limit, metadata=metadata)
                stream.callback(call.cancel)  # does nothing to a call that has ended
                return call
            case Receive(call):
                return await anext(aiter(call), END)
            case Sleep(seconds):
                return await asyncio.sleep(seconds)
            case _:
                raise AssertionError(step)

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator[dict[str, Any]]:
        """The methods to call, for the time of a call."""
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
        connection = connections.enter()
        try:
            yield connection.methods
        finally:
            for channel in connections.leave(connection):
                await channel.close()

    async def many(
        self,
        plan: Callable[[str], Plan[T]],
        ids: Iterable[str],
        prefetch: int,
        return_errors: bool,
    ) -> AsyncGenerator[T | RouteTraceError, None]:
        """The values of one plan per id, in their order, `prefetch` of them at a time."""

        async def one(request_id: str) -> T:
            return await self.one(plan(request_id))

        ids = iter(ids)
        pending: deque[asyncio.Task[T]] = deque()
        try:
            while True:
                for i in islice(ids, prefetch - len(pending)):
                    pending.append(asyncio.create_task(one(i)))
                if not pending:
                    return
                value: T | RouteTraceError
                try:
                    value = await pending[0]
                except RouteTraceError as error:
                    if not return_errors:
                        raise
                    value = error
                pending.popleft()
                yield value
        finally:
            for task in pending:
                task.cancel()
            await settled(pending)


async def _next_step(plan: Plan[T], outcome: Any, failure: grpc.RpcError | None) -> Step[T]:
    """What a plan does next; what takes it long is left to a thread."""

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
    """Waits until all of it is done, however it ends; only then is a cancellation passed on."""
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
    """Whether somebody cancels the running task; Python 3.10 does not tell."""
    cancelling = getattr(asyncio.current_task(), "cancelling", None)
    return cancelling is not None and cancelling() > 0
