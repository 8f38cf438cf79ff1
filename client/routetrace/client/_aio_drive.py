"""Carries out plans on an asyncio event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing
from itertools import islice
from typing import Any, TypeVar

import grpc

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
    methods,
)
from routetrace.client._fork import start_over_after_fork
from routetrace.v1.errors import Closed, RouteTraceError, Unavailable

T = TypeVar("T")


class AsyncDriver:
    """A channel, opened at the first call, one for each event loop that it is used on."""

    #: Whether this process was forked while a client had a channel: gRPC shares one poller between
    #: all asyncio channels, which does not live on in the child, and calls would hang.
    _lost_poller = False

    def __init__(self, config: Config) -> None:
        self._config = config
        self._channel: grpc.aio.Channel | None = None
        self._closed = False
        self._start_over()
        start_over_after_fork(self)

    def _start_over(self) -> Any:
        inherited, self._channel = self._channel, None
        if inherited is not None:
            AsyncDriver._lost_poller = True
        self._methods: dict[str, Any] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        return inherited

    @property
    def state(self) -> str:
        """For people: idle, open or closed."""
        return "closed" if self._closed else "open" if self._channel else "idle"

    async def close(self) -> None:
        """Gives up what is under way; there is no way back."""
        self._closed = True
        channel, self._channel = self._channel, None
        self._methods = {}  # the last references to a channel of a loop that is gone
        if channel is not None and self._loop is asyncio.get_running_loop():
            await channel.close()

    async def one(self, plan: Plan[T]) -> T:
        """The one value of a plan."""
        async with aclosing(self.run(plan)) as values:
            return await anext(values)

    async def run(self, plan: Plan[T]) -> AsyncGenerator[T, None]:
        """The values of a plan."""
        outcome: Any = None
        failure: grpc.RpcError | None = None
        call: Any = None
        try:
            while True:
                try:
                    step = plan.send(outcome) if failure is None else plan.throw(failure)
                except StopIteration:
                    return
                outcome = failure = None
                if isinstance(step, Emit):
                    yield step.value
                    continue
                try:
                    outcome = await self._do(step)
                except grpc.RpcError as error:
                    if self._closed:
                        raise Closed("the client was closed meanwhile") from error
                    failure = error
                except asyncio.CancelledError:
                    # Closing the channel cancels its calls; that is not for the caller's task.
                    if self._closed and not _cancelling():
                        raise Closed("the client was closed meanwhile") from None
                    raise
                if isinstance(step, Open):
                    call = outcome
        finally:
            if call is not None:
                call.cancel()  # does nothing to a call that has ended

    async def _do(self, step: Step[Any]) -> Any:
        match step:
            case Unary(name, request, timeout):
                return await self._method(name)(request, timeout=timeout)
            case Open(name, request, limit):
                return self._method(name)(request, timeout=limit)
            case Receive(call):
                return await anext(aiter(call), END)
            case Sleep(seconds):
                return await asyncio.sleep(seconds)
            case _:
                raise AssertionError(step)

    def _method(self, name: str) -> Any:
        if self._closed:
            raise Closed("the client is closed")
        if self._lost_poller:
            raise Unavailable(
                "asyncio calls would hang in a process that was forked while a client was open; "
                "close it before the fork",
                retry_after=0,
            )
        loop = asyncio.get_running_loop()
        if self._channel is None or self._loop is not loop:
            options = self._config.channel_options
            self._channel = grpc.aio.insecure_channel(self._config.target, options)
            self._methods = methods(self._channel)
            self._loop = loop
        return self._methods[name]

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
            await asyncio.gather(*pending, return_exceptions=True)


def _cancelling() -> bool:
    """Whether somebody cancels the running task; Python 3.10 does not tell."""
    cancelling = getattr(asyncio.current_task(), "cancelling", None)
    return cancelling is not None and cancelling() > 0
