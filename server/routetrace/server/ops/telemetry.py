"""Interceptor that counts calls in the conventional metrics of gRPC servers."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import aclosing
from typing import Any

import grpc
from google.protobuf.descriptor import FileDescriptor

from routetrace.server.common.metrics import Metrics

#: Seconds before its deadline from which on a cancelled call counts as late: clocks differ.
_DEADLINE_SLACK = 0.1

_NAMES = {code.value[0]: code.name for code in grpc.StatusCode}


class Telemetry(grpc.aio.ServerInterceptor):
    """Counts calls from their first byte to their end; must be the first interceptor.

    Unknown methods are counted as "unknown": clients choose the names, and each would stay in
    memory.
    """

    def __init__(self, metrics: Metrics, files: Iterable[FileDescriptor]) -> None:
        """Create the series of all methods of the services in `files`."""
        self._methods = {
            f"/{service.full_name}/{method.name}": _Method(
                metrics, (_type_of(method), service.full_name, method.name)
            )
            for file in files
            for service in file.services_by_name.values()
            for method in service.methods
        }
        self._unknown = _Method(metrics, ("unknown", "unknown", "unknown"))

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]
        ],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Return the next handler, wrapped to count its messages and its end."""
        call = _Call(self._methods.get(handler_call_details.method, self._unknown))
        # gRPC runs a whole call in one task, so the end of the task is the end of the call.
        task = asyncio.current_task()
        assert task is not None
        task.add_done_callback(call.ended)
        handler = await continuation(handler_call_details)
        if handler is None:
            call.failure = "UNIMPLEMENTED"
            return None
        return call.watch(handler)


class _Method:
    """Series of one method."""

    def __init__(self, metrics: Metrics, labels: tuple[str, str, str]) -> None:
        self.labels = labels
        self.started = metrics.started.labels(*labels)
        self.received = metrics.received.labels(*labels)
        self.sent = metrics.sent.labels(*labels)
        self.handling = metrics.handling.labels(*labels)
        self.handled = metrics.handled
        self.handled.labels(*labels, "OK")  # a rate needs an initial zero


class _Call:
    """Running call."""

    def __init__(self, method: _Method) -> None:
        self._method = method
        self._start = time.perf_counter()
        self._context: Any = None
        #: Status of an end that the handler did not set.
        self.failure = ""
        method.started.inc()

    def watch(self, handler: Any) -> Any:
        """Return the handler, wrapped to count messages as they are parsed and serialized."""
        make: Callable[..., Any]
        if handler.request_streaming and handler.response_streaming:
            make, behavior = grpc.stream_stream_rpc_method_handler, handler.stream_stream
        elif handler.request_streaming:
            make, behavior = grpc.stream_unary_rpc_method_handler, handler.stream_unary
        elif handler.response_streaming:
            make, behavior = grpc.unary_stream_rpc_method_handler, handler.unary_stream
        else:
            make, behavior = grpc.unary_unary_rpc_method_handler, handler.unary_unary
        watched = self._generator if inspect.isasyncgenfunction(behavior) else self._coroutine
        return make(
            watched(behavior),
            self._counted(handler.request_deserializer, self._method.received),
            self._counted(handler.response_serializer, self._method.sent),
        )

    def _coroutine(self, behavior: Callable[..., Awaitable[Any]]) -> Callable[..., Any]:
        async def run(request: Any, context: Any) -> Any:
            self._context = context
            try:
                return await behavior(request, context)
            except Exception:
                self.failure = "UNKNOWN"
                raise

        return run

    def _generator(self, behavior: Callable[..., Any]) -> Callable[..., Any]:
        async def run(request: Any, context: Any) -> AsyncIterator[Any]:
            self._context = context
            try:
                async with aclosing(behavior(request, context)) as responses:
                    async for response in responses:
                        yield response
            except Exception:
                self.failure = "UNKNOWN"
                raise

        return run

    def _counted(self, convert: Callable[[Any], Any] | None, count: Any) -> Callable[[Any], Any]:
        def converted(message: Any) -> Any:
            if convert is not None:
                try:
                    message = convert(message)
                except Exception:
                    self.failure = "UNKNOWN"
                    raise
            count.inc()
            return message

        return converted

    def ended(self, _: asyncio.Task[Any]) -> None:
        """Record the end of the call; its status, if any, is set by now."""
        method = self._method
        method.handling.observe(time.perf_counter() - self._start)
        method.handled.labels(*method.labels, self._code()).inc()
        self._context = None

    def _code(self) -> str:
        context = self._context
        if context is None:
            return self.failure or "CANCELLED"  # before the request arrived
        if context.done():
            # Status set by the handler; an unexpected error sets none.
            code = context.code()
            return _name_of(code) if code is not None else self.failure or "OK"
        remaining = context.time_remaining()
        late = remaining is not None and remaining <= _DEADLINE_SLACK
        return "DEADLINE_EXCEEDED" if late else "CANCELLED"


def _name_of(code: Any) -> str:
    return code.name if isinstance(code, grpc.StatusCode) else _NAMES.get(code, "UNKNOWN")


def _type_of(method: Any) -> str:
    if method.client_streaming:
        return "bidi_stream" if method.server_streaming else "client_stream"
    return "server_stream" if method.server_streaming else "unary"
