"""`/api/v1/runs/{run}/trace`: facts, rectangles, tiles, rows and reasons of one trace."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from routetrace.client import TraceStat
from routetrace.client.options import Policy
from routetrace.common.errors import InvalidArgument
from routetrace.page.backends import Backends
from routetrace.page.facts import facts_of
from routetrace.page.parameters import choice, whole
from routetrace.page.segments import stamp_of
from routetrace.page.sessions import Caller
from routetrace.page.sides import Side, reports_of, side_of
from routetrace.page.tags import has, tag_of, unchanged
from routetrace.page.traces import Traces

#: Most tokens of one call for rows.
MAX_ROWS = 64
_BYTES = "application/octet-stream"


class TraceEndpoints:
    """Endpoints of one trace. Each asks the server first, so that it sees a revoked token.

    Args:
        target: the server, as clients name it.
        backends: the server.
        traces: reads of it.
    """

    def __init__(self, target: str, backends: Backends, traces: Traces) -> None:
        self._target = target
        self._backends = backends
        self._traces = traces

    async def facts(self, request: Request, caller: Caller) -> Response:
        """Answer with the facts about a trace."""
        run, trace_id, incarnation = _which(request)
        description = await self._backends.describe(
            caller, run, trace_id, incarnation, origins=False
        )
        answer = JSONResponse(facts_of(description, self._target))
        tag = tag_of(bytes(answer.body))
        if has(request, tag):
            return unchanged(tag)
        answer.headers["ETag"] = tag
        return answer

    async def segments(self, request: Request, caller: Caller) -> Response:
        """Answer with the rectangles of a trace."""
        policy = _policy(request.query_params)
        stat = await self._stat(request, caller)
        tag = _tag(stat, policy)
        if has(request, tag):
            return unchanged(tag)
        body = await self._traces.segments(caller, stat, policy)
        return Response(body, media_type="application/json", headers={"ETag": tag})

    async def tile(self, request: Request, caller: Caller) -> Response:
        """Answer with the bytes [layers, 256] of a tile."""
        params = request.query_params
        policy = _policy(params)
        what = choice(params, "what", ("changed", "differing"))
        z, x = whole(params, "z"), whole(params, "x")
        stat = await self._stat(request, caller)
        other = await self._other(request, caller, stat) if what == "differing" else None
        tag = _tag(stat, policy, z, x, *_stamps(other))
        if has(request, tag):
            return unchanged(tag)
        if other is None:
            levels = await self._traces.levels(caller, stat, policy)
        else:
            levels = (await self._traces.compared(caller, stat, policy, other)).levels
        return Response(levels.tile(z, x), media_type=_BYTES, headers={"ETag": tag})

    async def rows(self, request: Request, caller: Caller) -> Response:
        """Answer with the ids and the validity of up to 64 tokens."""
        params = request.query_params
        policy = _policy(params)
        start, stop = whole(params, "start"), whole(params, "stop")
        if not start < stop <= start + MAX_ROWS:
            raise InvalidArgument(
                field="stop", value=stop, expected=f"{start + 1} to {start + MAX_ROWS}"
            )
        stat = await self._stat(request, caller)
        if params.get("against"):
            layers = stat.layout.layer_ids
            stat, policy = await self._other(request, caller, stat)
            # The other side is shorter, or its rows would be taken for those of other layers.
            if start >= stat.num_rows or stat.layout.layer_ids != layers:
                return Response(b"", media_type=_BYTES)
        body = await self._traces.rows(caller, stat, policy, start, stop)
        return Response(body, media_type=_BYTES)

    async def explain(self, request: Request, caller: Caller) -> Response:
        """Answer with the words for one cell: where its row comes from, or why there is none."""
        params = request.query_params
        run, trace_id, incarnation = _which(request)
        layer_id = whole(params, "layer_id") if params.get("layer_id") else None
        found = await self._backends.explain(
            caller,
            run,
            trace_id,
            incarnation,
            _policy(params),
            whole(params, "position"),
            layer_id,
        )
        words: list[tuple[str, list[str]]] = []
        for name, text in found.lines():
            if name in ("cell", "trace"):  # which is what was asked for
                continue
            if name:
                words.append((name, []))
            words[-1][1].append(text)
        return JSONResponse({"words": words})

    async def reports(self, request: Request, caller: Caller) -> Response:
        """Answer with the reports of trainers about a trace."""
        stat = await self._stat(request, caller)
        return JSONResponse({"reports": await reports_of(self._backends, caller, stat)})

    async def diff(self, request: Request, caller: Caller) -> Response:
        """Answer with where another side of a trace differs."""
        policy = _policy(request.query_params)
        stat = await self._stat(request, caller)
        other = await self._other(request, caller, stat)
        tag = _tag(stat, policy, *_stamps(other))
        if has(request, tag):
            return unchanged(tag)
        found = await self._traces.compared(caller, stat, policy, other)
        return Response(found.body, media_type="application/json", headers={"ETag": tag})

    async def _other(self, request: Request, caller: Caller, stat: TraceStat) -> Side:
        text = request.query_params.get("against", "")
        return await side_of(self._backends, caller, stat, _policy(request.query_params), text)

    async def _stat(self, request: Request, caller: Caller) -> TraceStat:
        return await self._backends.stat(caller, *_which(request))


def _which(request: Request) -> tuple[str, str, int | None]:
    """Return run, trace id and incarnation of a request."""
    params = request.query_params
    trace_id = params.get("id", "")
    if not trace_id:
        raise InvalidArgument(field="id", value="not given", expected="the id of a trace")
    incarnation = whole(params, "incarnation", 1) if params.get("incarnation") else None
    return request.path_params["run"], trace_id, incarnation


def _policy(params: Mapping[str, str]) -> Policy:
    return cast("Policy", choice(params, "policy", ("as_sampled", "latest"), "as_sampled"))


def _stamps(other: Side | None) -> tuple[Any, ...]:
    return () if other is None else (other.stat.run, other.policy, *stamp_of(other.stat))


def _tag(stat: TraceStat, *more: Any) -> str:
    """Return the ETag of an answer that follows from the state of a trace."""
    return tag_of(repr((stat.trace_id, stat.run, *stamp_of(stat), *more)).encode())
