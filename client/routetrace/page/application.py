"""The ASGI application of the page."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from routetrace.common.errors import RouteTraceError
from routetrace.page.backends import Backends
from routetrace.page.config import PageConfig
from routetrace.page.errors import answer, busy, refusal
from routetrace.page.expert_counts import ExpertCounts
from routetrace.page.guard import Guard, Hosts
from routetrace.page.mirrors import Mirrors
from routetrace.page.run_endpoints import RunEndpoints
from routetrace.page.session_endpoints import SessionEndpoints
from routetrace.page.sessions import Caller
from routetrace.page.static_files import DIRECTORY, StaticFiles
from routetrace.page.trace_endpoints import TraceEndpoints
from routetrace.page.traces import MAX_HEAVY, Traces

_API = "/api/v1"
_RUN = _API + "/runs/{run:path}"
_TRACE = f"{_RUN}/trace"
#: Bytes of an answer from which it is compressed; higher levels cost more than they save.
_GZIP_BYTES, _GZIP_LEVEL = 1024, 1


def application(config: PageConfig, hosts: Hosts, port: int, static: Path = DIRECTORY) -> ASGIApp:
    """Return the application of a page.

    Args:
        config: settings of the page.
        hosts: names of the page.
        port: port listened on.
        static: folder of the browser's files.
    """

    def forget(caller: Caller) -> None:
        traces.drop(caller)
        counts.drop(caller)

    backends = Backends(config)
    traces = Traces(backends)
    mirrors = Mirrors(backends)
    counts = ExpertCounts(backends)
    runs = RunEndpoints(backends, mirrors, counts)
    sessions = SessionEndpoints(config, port, backends, forget)
    trace = TraceEndpoints(config.shown, backends, traces)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        # Decoding of rows runs in the default executor, too.
        executor = ThreadPoolExecutor(MAX_HEAVY, "routetrace-page")
        asyncio.get_running_loop().set_default_executor(executor)
        yield
        await counts.aclose()
        await mirrors.aclose()
        await backends.aclose()

    inside = Starlette(
        routes=[
            Route(f"{_API}/session", sessions.within(sessions.show), methods=["GET"]),
            Route(f"{_API}/session", sessions.sign_in, methods=["POST"]),
            Route(f"{_API}/session", sessions.sign_out, methods=["DELETE"]),
            Route(f"{_RUN}/overview", sessions.within(runs.overview)),
            Route(f"{_RUN}/traces", sessions.within(runs.traces)),
            Route(f"{_RUN}/experts", sessions.within(runs.experts)),
            Route(f"{_RUN}/mismatch", sessions.within(runs.mismatch)),
            Route(_TRACE, sessions.within(trace.facts)),
            Route(f"{_TRACE}/diff", sessions.within(trace.diff)),
            Route(f"{_TRACE}/explain", sessions.within(trace.explain)),
            Route(f"{_TRACE}/reports", sessions.within(trace.reports)),
            Route(f"{_TRACE}/segments", sessions.within(trace.segments)),
            Route(f"{_TRACE}/tile", sessions.within(trace.tile)),
            Route(f"{_TRACE}/rows", sessions.within(trace.rows)),
            *StaticFiles(static).routes(),
        ],
        middleware=[
            Middleware(GZipMiddleware, minimum_size=_GZIP_BYTES, compresslevel=_GZIP_LEVEL)
        ],
        exception_handlers={
            RouteTraceError: _failed,
            HTTPException: _refused,
            Exception: _broken,
        },
        lifespan=lifespan,
    )
    # Half a path is a mistake, not another name of the whole.
    inside.router.redirect_slashes = False
    return Guard(inside, hosts)


def crowded(hosts: Hosts) -> ASGIApp:
    """Return the application of connections beyond the limit: every request is refused.

    Args:
        hosts: names of the page.
    """

    async def inside(scope: Scope, receive: Receive, send: Send) -> None:
        refused = answer(busy())
        refused.headers["Connection"] = "close"
        await refused(scope, receive, send)

    return Guard(inside, hosts)


async def _failed(_: Request, error: Exception) -> Response:
    assert isinstance(error, RouteTraceError)
    return answer(error)


async def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    words = {404: "There is nothing at this path.", 405: "This path does not take this method."}
    refused = refusal(error.status_code, words.get(error.status_code, "The request was refused."))
    refused.headers.update(error.headers or {})
    return refused


async def _broken(_: Request, __: Exception) -> Response:
    # The text of an error without a type may hold anything; the log has its traceback.
    return refusal(500, "The page failed at this; its log says why.")
