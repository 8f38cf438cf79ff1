"""Health of the services, as the store and the workers of the server allow."""

from __future__ import annotations

import asyncio
import contextlib

from grpc_health.v1 import health_pb2

from routetrace.common.errors import RouteTraceError
from routetrace.server.access.lifecycle import Lifecycle, ServerState
from routetrace.server.ops.health import INGEST_SERVICE, READY_SERVICES, Health
from routetrace.server.store.interface import Store

#: Seconds between checks of whether the store takes commits.
_CHECK_SECONDS = 1.0

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Readiness:
    """Health of the services.

    Args:
        health: the health service.
        lifecycle: a server that sends its callers on to another one serves them, too.
        store: without commits to it, there is no ingest; of a store that others may own, there are
            no reads either.
    """

    def __init__(self, health: Health, lifecycle: Lifecycle, store: Store) -> None:
        self.health = health
        self.serving = False
        """Whether this server is ready, with all its workers."""
        self.writable = True
        """Whether the store takes commits."""
        self._lifecycle = lifecycle
        shared = store.ownership is not None
        self._writing = READY_SERVICES if shared else (INGEST_SERVICE,)

    def report(self) -> None:
        """Set the status of both services."""
        state = self._lifecycle.state
        for service in READY_SERVICES:
            stored = self.writable or service not in self._writing
            answers = self._lifecycle.directs or (state is ServerState.READY and stored)
            serving = self.serving and answers
            self.health.set(service, _SERVING if serving else _NOT_SERVING)


async def watch_store(store: Store, readiness: Readiness) -> None:
    """Report services as NOT_SERVING while the store takes no commits."""
    while True:
        await asyncio.sleep(_CHECK_SECONDS)
        if not readiness.writable:  # without agents, nothing else writes
            with contextlib.suppress(RouteTraceError):
                await asyncio.to_thread(store.compact, None, ())
        now = (await asyncio.to_thread(store.stats)).writable
        if now != readiness.writable:
            readiness.writable = now
            readiness.report()
