"""Health service, which needs no token and therefore bounds all that a caller can hold.

grpcio-health-checking has neither bound: each open Watch costs 16 kB, and so does a Check whose
message never comes.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import grpc
from grpc_health.v1 import health_pb2

from routetrace.common.errors import InvalidArgument, NotFound, Overloaded
from routetrace.server.common.metrics import Metrics
from routetrace.server.common.rpc import Context, received, streaming

INGEST_SERVICE = "routetrace.v1.IngestService"
TRACE_SERVICE = "routetrace.v1.TraceService"
#: Health services that are SERVING once the server is ready; "" means alive.
READY_SERVICES = (INGEST_SERVICE, TRACE_SERVICE)

#: Maximum open Watch calls, 16 kB each; one address alone takes half. Each client whose target has
#: a scheme, such as dns:, opens one.
MAX_WATCHES = 2048
#: Maximum calls whose message has not arrived; the oldest is ended for a new one, so that calls
#: that bring theirs at once are always served.
MAX_UNREAD = 256

_MESSAGE_SECONDS = 10.0
_RETRY_SECONDS = 5.0

_SERVICE = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


class Health:
    """grpc.health.v1.Health. All calls belong to one event loop."""

    def __init__(self, metrics: Metrics) -> None:
        self._statuses: dict[str, int] = {
            "": _SERVING,
            **dict.fromkeys(READY_SERVICES, _NOT_SERVING),
        }
        self._refused = metrics.overloaded
        self._changed = asyncio.Event()
        self._draining = False
        self._watches: Counter[str] = Counter()  # by address
        self._unread: list[asyncio.Future[None]] = []  # the oldest first

    def add_to(self, server: grpc.aio.Server) -> None:
        """Register the service; its handlers read the message themselves, to wait no longer."""
        handlers: dict[str, Any] = {
            name: grpc.stream_stream_rpc_method_handler(
                getattr(self, name),
                health_pb2.HealthCheckRequest.FromString,
                health_pb2.HealthCheckResponse.SerializeToString,
            )
            for name in ("Check", "Watch")
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, handlers),))

    def serving(self, service: str) -> bool:
        """Return whether the status of a service is SERVING."""
        return bool(self._statuses.get(service) == _SERVING)

    def set(self, service: str, status: int) -> None:
        """Set the status of a service; ignored while draining."""
        if not self._draining and self._statuses.get(service) != status:
            self._statuses[service] = status
            self._changed.set()
            self._changed = asyncio.Event()

    def drain(self) -> None:
        """Set all services to NOT_SERVING, for good."""
        for service in self._statuses:
            self.set(service, _NOT_SERVING)
        self._draining = True

    @streaming
    async def Check(  # noqa: N802
        self, _: AsyncIterator[Any], context: Context
    ) -> AsyncIterator[Any]:
        """Yield the status of a service."""
        service = await self._service(context)
        status = self._statuses.get(service)
        if status is None:
            raise NotFound(field="service", value=service, expected=" or ".join(READY_SERVICES))
        yield health_pb2.HealthCheckResponse(status=status)

    @streaming
    async def Watch(  # noqa: N802
        self, _: AsyncIterator[Any], context: Context
    ) -> AsyncIterator[Any]:
        """Yield the status of a service at each change."""
        service = await self._service(context)
        address = context.peer().rpartition(":")[0]
        under_way = self._watches.total()
        if self._watches[address] >= MAX_WATCHES - under_way:
            self._refused.labels("health_watches").inc()
            raise Overloaded(
                field="health_watches",
                value=under_way,
                expected=f"at most {MAX_WATCHES} open Watch calls; call Check",
                retry_after=_RETRY_SECONDS,
            )
        self._watches[address] += 1
        try:
            last = None
            while True:
                changed = self._changed
                status = self._statuses.get(service, _UNKNOWN)
                if status != last:
                    last = status
                    yield health_pb2.HealthCheckResponse(status=status)
                await changed.wait()
        finally:
            self._watches[address] -= 1
            self._watches += Counter()  # without addresses that hold none

    async def _service(self, context: Context) -> str:
        """Return the service that a call names."""
        if len(self._unread) >= MAX_UNREAD:
            self._unread.pop(0).set_result(None)
        # A handler that is cancelled sends no status, and gRPC keeps its call.
        displaced = asyncio.get_running_loop().create_future()
        self._unread.append(displaced)
        reading = asyncio.ensure_future(anext(received(context, "HealthCheckRequest"), None))
        try:
            await asyncio.wait(
                {reading, displaced}, timeout=_MESSAGE_SECONDS, return_when=asyncio.FIRST_COMPLETED
            )
            request = reading.result() if reading.done() else None
        finally:
            reading.cancel()
            with suppress(ValueError):  # displaced
                self._unread.remove(displaced)
        if request is None:
            raise InvalidArgument(
                field="message",
                value="none",
                expected=f"a HealthCheckRequest, within {_MESSAGE_SECONDS:g} seconds",
            )
        service: str = request.service
        return service
