"""`/api/v1/session`: sign-in, sign-out, and who is signed in."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from routetrace.client import ServerInfo
from routetrace.common.errors import (
    InvalidArgument,
    PermissionDenied,
    RouteTraceError,
    Unauthenticated,
)
from routetrace.common.report_runs import is_report_run
from routetrace.common.security import Security
from routetrace.page.backends import Backends
from routetrace.page.config import PageConfig
from routetrace.page.errors import answer
from routetrace.page.sessions import ANYBODY, LIFETIME_S, Caller, Sessions, SignIns, cookie_name

#: A token has at most 4,000 characters.
_MAX_BODY = 16 << 10

Endpoint = Callable[[Request, Caller], Awaitable[Response]]


class SessionEndpoints:
    """Sessions of browsers; every other endpoint runs `within` one.

    Args:
        config: settings of the page.
        port: port listened on.
        backends: the server.
        forget: drops what was kept for a caller whose token is not valid any more.
    """

    def __init__(
        self,
        config: PageConfig,
        port: int,
        backends: Backends,
        forget: Callable[[Caller], None],
    ) -> None:
        self._config = config
        self._backends = backends
        self._forget = forget
        self._tls = bool(config.tls_cert)
        self._cookie = cookie_name(port, tls=self._tls)
        self._sessions = Sessions()
        self._sign_ins = SignIns()

    def within(self, endpoint: Endpoint) -> Callable[[Request], Awaitable[Response]]:
        """Return an endpoint that is called with the caller of its request.

        A token that the server does not take any more ends all its sessions.
        """

        async def call(request: Request) -> Response:
            cookie = request.cookies.get(self._cookie, "")
            caller = self._sessions.find(cookie) if cookie else None
            try:
                if caller is None and self._config.needs_tokens:
                    raise _sign_in(self._config.shown)
                return await endpoint(request, caller or ANYBODY)
            except Unauthenticated:
                if caller is None:
                    return answer(_sign_in(self._config.shown))
                self._sessions.end_all(caller.token)
                self._forget(caller)
                ended = answer(
                    Unauthenticated(
                        "Signed out: the token is not valid any more.",
                        field="token",
                        value="***",
                        expected=f"a token that {self._config.shown} takes",
                    )
                )
                self._clear(ended)
                return ended

        return call

    async def show(self, _: Request, caller: Caller) -> Response:
        """Return who is signed in, and the runs that they may see."""
        info = await self._known(caller)
        runs = [run for run in info.runs if not is_report_run(run)]
        if self._config.runs:
            runs = [run for run in self._config.runs if await self._covers(caller, run)]
        return JSONResponse(
            {
                "user": caller.user or None,
                "runs": runs,
                "version": info.version,
                "target": self._config.shown,
                "expires": caller.expires,
            }
        )

    async def sign_in(self, request: Request) -> Response:
        """Begin a session with the token of the body, and end the one before."""
        token, run = _given(await _body(request))
        caller = Caller(token, run=run)
        with self._sign_ins.attempt(request.client.host if request.client else ""):
            info = await self._known(caller)
            if self._config.needs_tokens:
                await self._check_tokens()
        self._sessions.close(request.cookies.get(self._cookie, ""))
        user = info.owner.removeprefix("token ")
        cookie = self._sessions.open(replace(caller, user=user))
        done = Response(status_code=204)
        done.set_cookie(
            self._cookie,
            cookie,
            max_age=LIFETIME_S,
            path="/",
            secure=self._tls,
            httponly=True,
            samesite="strict",
        )
        return done

    async def sign_out(self, request: Request) -> Response:
        """End the session."""
        self._sessions.close(request.cookies.get(self._cookie, ""))
        done = Response(status_code=204)
        self._clear(done)
        return done

    async def _known(self, caller: Caller) -> ServerInfo:
        """Return the server's state, asked for with the first run that the token covers.

        A call needs a run: that of the sign-in, else one of the page's, else "default".

        Raises:
            PermissionDenied: if it covers none of them.
            RouteTraceError: as `Backends.info`.
        """
        runs = self._config.runs or ("default",)
        denied: RouteTraceError | None = None
        for run in (caller.run,) if caller.run else runs:
            try:
                return await self._backends.info(caller, run)
            except PermissionDenied as error:  # noqa: PERF203
                denied = denied or error
        assert denied is not None
        raise denied

    async def _covers(self, caller: Caller, run: str) -> bool:
        try:
            await self._backends.info(caller, run)
        except PermissionDenied:
            return False
        return True

    async def _check_tokens(self) -> None:
        """Refuse a server that needs no token, on a page that other machines can reach."""
        try:
            await self._known(ANYBODY)
        except Unauthenticated:
            return
        exposed = self._config.exposed("tokens_file at the server")
        raise PermissionDenied(
            f"{exposed.message}; {self._config.shown} needs no token", field="listen"
        )

    def _clear(self, response: Response) -> None:
        response.delete_cookie(
            self._cookie, path="/", secure=self._tls, httponly=True, samesite="strict"
        )


def _sign_in(target: str) -> Unauthenticated:
    return Unauthenticated(
        f"Sign in: {target} needs a token.",
        field="token",
        value="not given",
        expected=f"a token that {target} takes",
    )


async def _body(request: Request) -> Any:
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > _MAX_BODY:
            raise InvalidArgument(
                field="body", value=f"over {_MAX_BODY:,} bytes", expected="JSON with a token"
            )
    try:
        return json.loads(body)
    except (ValueError, RecursionError):  # its message has a part of the body
        raise InvalidArgument(
            field="body", value="not JSON", expected='JSON such as {"token": "..."}'
        ) from None


def _given(body: Any) -> tuple[str, str]:
    """Return the token of a sign-in, and the run to ask for with it, "" if none is named."""
    given = body if isinstance(body, dict) else {}
    token, run = given.get("token"), given.get("run", "")
    if not isinstance(token, str) or not token:
        raise InvalidArgument(field="token", value="not given", expected="a str in the body")
    if not isinstance(run, str):
        raise InvalidArgument(field="run", value="no str", expected="the name of a run")
    Security(token=token)  # raises for what is no token
    return token, run
