"""`/api/v1/runs/{run}`: the state of a run, the list of its traces, load and agreement."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Mapping
from dataclasses import replace

from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from routetrace.client import MissingReason, TraceState
from routetrace.common.errors import InvalidArgument, quoted
from routetrace.common.limits import MAX_STEP
from routetrace.page import mismatch
from routetrace.page.backends import Backends
from routetrace.page.budgets import Shared
from routetrace.page.errors import refusal
from routetrace.page.expert_counts import MAX_TOKENS, ExpertCounts
from routetrace.page.mirrors import Mirrors
from routetrace.page.overview import overview
from routetrace.page.parameters import choice, whole
from routetrace.page.sessions import Caller
from routetrace.page.tags import has, tag_of, unchanged
from routetrace.page.trace_table import ORDERS, Filter

MAX_LIMIT = 500
#: Seconds for which an overview is shared: less than between two polls of a page.
_POLL_S = 1.5
_LIMIT = 100
_MAX_LABELS = 16
_MIN_VERSION, _MAX_VERSION = -(2**63), 2**63 - 1


class RunEndpoints:
    """Endpoints of one run.

    Args:
        backends: the server.
        mirrors: traces of runs.
        counts: loads of experts.
    """

    def __init__(self, backends: Backends, mirrors: Mirrors, counts: ExpertCounts) -> None:
        self._backends = backends
        self._mirrors = mirrors
        self._counts = counts
        self._shared = Shared()
        self._agreements = mismatch.Kept()

    async def overview(self, request: Request, caller: Caller) -> Response:
        """Answer with the state of a run, which callers within a poll share."""
        run = request.path_params["run"]
        mirror = await self._mirrors.of(caller, run)

        async def ask() -> bytes:
            minutes = mirror.minutes
            info, agents, history = await asyncio.gather(
                self._backends.info(caller, run),
                self._backends.agents(caller, run),
                self._backends.history(caller, run, minutes.last_step),
            )
            minutes.add(history)
            body = json.dumps(overview(mirror, minutes, agents, info), separators=(",", ":"))
            mirror.overview = time.monotonic(), body.encode()
            return mirror.overview[1]

        at, body = mirror.overview
        if time.monotonic() - at > _POLL_S:
            body = await self._shared.call((caller.digest, run), ask)
        return Response(body, media_type="application/json")

    async def traces(self, request: Request, caller: Caller) -> Response:
        """Answer with a page of traces: of a new view, or of one that an earlier answer named."""
        params = request.query_params
        run = request.path_params["run"]
        offset = whole(params, "offset", default=0)
        limit = min(whole(params, "limit", 1, default=_LIMIT), MAX_LIMIT)
        mirror = await self._mirrors.of(caller, run)
        name = params.get("view", "")
        if name:
            view = mirror.view_of(name)
            if view is None:
                return refusal(409, "The list has changed too much; it begins anew.", "view_gone")
        else:
            order = choice(params, "sort", ORDERS, "updated")
            descending = choice(params, "order", ("asc", "desc"), "desc") == "desc"
            name, view = mirror.view(_filter(params), order, descending=descending)
        table = mirror.table
        rows = view.rows[offset : offset + limit].tolist()
        return JSONResponse(
            {
                "view": name,
                "total": len(table),
                "matching": len(view.rows),
                "newer": table.newer(view.version),
                "offset": offset,
                "whole": mirror.whole,
                "stale_since": mirror.stale_since,
                "engines": table.engines() if params.get("engines") else None,
                "traces": table.shown(rows),
            }
        )

    async def experts(self, request: Request, caller: Caller) -> Response:
        """Answer with the load of experts in the newest traces, or how far its count has come."""
        params = request.query_params
        run = request.path_params["run"]
        wanted = _filter(params)
        if wanted.state is TraceState.RUNNING:
            raise InvalidArgument(
                field="state", value="running", expected="complete or incomplete, or no state"
            )
        most = min(whole(params, "most", 1, default=MAX_TOKENS), MAX_TOKENS)
        after = _number(params, "after", "a Unix time", 0, math.inf)
        mirror = await self._mirrors.of(caller, run)
        wanted = replace(wanted, ended=True)
        count = self._counts.of(caller, run, mirror.table, wanted, most, after or 0)
        if not count.task.done():
            progress = {"counting": {"tokens": count.done, "of": count.tokens}}
            return JSONResponse(progress, 202, {"Retry-After": "1"})
        body = count.task.result()
        tag = tag_of(body)
        if has(request, tag):
            return unchanged(tag)
        return Response(body, media_type="application/json", headers={"ETag": tag})

    async def mismatch(self, request: Request, caller: Caller) -> Response:
        """Answer with the agreement of trainer and rollout by training step."""
        params = request.query_params
        run = request.path_params["run"]
        start = whole(params, "from", default=0)
        stop = whole(params, "to", 1, default=MAX_STEP)
        most = min(whole(params, "most", 1, default=mismatch.DEFAULT_STEPS), mismatch.MAX_STEPS)
        key = caller.digest, run
        known = self._agreements.of(key)

        async def ask() -> None:
            first = known.start()
            known.add(first, await self._backends.agreement(caller, run, first))

        if time.monotonic() - known.asked_at > _POLL_S:
            await self._shared.call(("agreement", *key), ask)
        body = await known.answer(start, stop, most)
        tag = tag_of(body)
        if has(request, tag):
            return unchanged(tag)
        return Response(body, media_type="application/json", headers={"ETag": tag})


def _filter(params: QueryParams) -> Filter:
    labels = params.getlist("label")
    if len(labels) > _MAX_LABELS:
        raise InvalidArgument(
            field="label", value=len(labels), expected=f"at most {_MAX_LABELS} of them"
        )
    state, reason = params.get("state"), params.get("reason")
    return Filter(
        state=TraceState(choice(params, "state", tuple(TraceState))) if state else None,
        reason=MissingReason(choice(params, "reason", tuple(MissingReason))) if reason else None,
        engine=params.get("engine", ""),
        versions=_versions(params),
        below=_below(params),
        labels=tuple(map(_label, labels)),
        text=params.get("q", ""),
    )


def _versions(params: Mapping[str, str]) -> tuple[int, int] | None:
    text = params.get("version", "")
    if not text:
        return None
    first, dots, last = text.partition("..")
    try:
        least = int(first) if first else _MIN_VERSION
        most = (int(last) if last else _MAX_VERSION) if dots else least
    except ValueError:
        least, most = 1, 0
    if not _MIN_VERSION <= least <= most <= _MAX_VERSION:
        raise InvalidArgument(
            field="version", value=quoted(text), expected="a weight version, or a..b with a <= b"
        )
    return least, most


def _below(params: Mapping[str, str]) -> float | None:
    return _number(params, "below", "a coverage from 0 to 1, such as 0.99", 0, 1)


def _number(
    params: Mapping[str, str], name: str, expected: str, least: float, most: float
) -> float | None:
    text = params.get(name, "")
    if not text:
        return None
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not least <= number <= most:
        raise InvalidArgument(field=name, value=quoted(text), expected=expected)
    return number


def _label(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise InvalidArgument(field="label", value=quoted(text), expected="name=value")
    return name, value
