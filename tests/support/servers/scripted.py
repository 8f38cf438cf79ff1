"""Calls of both clients to a scripted server."""

from __future__ import annotations

import asyncio
import inspect

import numpy as np

from routetrace.client import AsyncRouteClient, Trace
from routetrace.v1 import routetrace_pb2 as pb
from support.servers.client_server import Truth

RUNNING, INCOMPLETE = pb.TRACE_STATE_RUNNING, pb.TRACE_STATE_INCOMPLETE
GONE = 5.0  # seconds in which something must have happened


class Blocking:
    """AsyncRouteClient with the face of RouteClient, so that one test serves both."""

    def __init__(self, client: AsyncRouteClient) -> None:
        self._client = client
        self._loop = asyncio.new_event_loop()

    def __getattr__(self, name):
        method = getattr(self._client, name)

        def call(*args, **kwargs):
            result = method(*args, **kwargs)
            return self._iterate(result) if inspect.isasyncgen(result) else self._run(result)

        return call

    def __repr__(self) -> str:
        return repr(self._client).replace("Async", "")

    def close(self) -> None:
        self._run(self._client.aclose())
        self._run(self._loop.shutdown_asyncgens())

    def _run(self, awaitable):
        return self._loop.run_until_complete(awaitable)

    def _iterate(self, values):
        try:
            while True:
                yield self._run(anext(values))
        except StopAsyncIteration:
            return
        finally:
            self._run(values.aclose())


def assert_rows(trace: Trace, source: Truth) -> None:
    assert np.array_equal(trace.valid, source.valid)
    assert np.array_equal(trace.topk_ids[trace.valid], source.ids[source.valid])
