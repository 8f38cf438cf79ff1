"""Checks of every request before anything else, and the headers of every answer."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from routetrace.page.errors import refusal

_CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = {
    "Content-Security-Policy": _CSP,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
_LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
_READING = ("GET", "HEAD")
#: Ports that browsers leave out of the Host header.
_DEFAULT_PORTS = (80, 443)


class Hosts:
    """Values of the Host header that name this page.

    Without the check, a page of another site could read this one by a name that resolves to
    127.0.0.1 (DNS rebinding).

    Args:
        listen: host listened on.
        port: port listened on.
        hosts: further names, host or host:port; those without a port are good for any.
        certified: returns the names of the certificate; a name may begin with `*.`.
    """

    def __init__(
        self,
        listen: str,
        port: int,
        hosts: Iterable[str] = (),
        certified: Callable[[], Iterable[str]] = tuple,
    ) -> None:
        self._names = {*_LOOPBACK, _bracketed(listen).lower()}
        self._port = port
        self._hosts = {host.lower() for host in hosts}
        self._certified = certified

    def __contains__(self, host: str) -> bool:
        host = host.lower()
        name, port = _split(host)
        if host in self._hosts or name in self._hosts:
            return True
        if port != self._port and (port is not None or self._port not in _DEFAULT_PORTS):
            return False
        if name in self._names:
            return True
        return any(_matches(name, known) for known in self._certified())


class Guard:
    """Refuses requests for other hosts, and calls that other pages make; ASGI.

    * Host: a name of this page, else 421, whatever is asked for.
    * `/api`: no `Sec-Fetch-Site` but same-origin, no `Origin` but this host, else 403. Another port
      of 127.0.0.1 is the same site, so that its pages send the cookie, SameSite or not.
    * Calls that change something: `Origin` is there, and a body is JSON, else 403.

    Args:
        app: the application.
        hosts: names of this page.
    """

    def __init__(self, app: ASGIApp, hosts: Hosts) -> None:
        self._app = app
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check a request and pass it on, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(HEADERS)
                headers.setdefault("Cache-Control", "no-store")
            await send(message)

        refused = self._refused(scope)
        await (refused or self._app)(scope, receive, guarded)

    def _refused(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        hosts = headers.getlist("host")
        if len(hosts) != 1 or hosts[0] not in self._hosts:
            return refusal(421, "This page has another name; expected a Host that it listens on.")
        if scope["path"].startswith("/api") or scope["method"] not in _READING:
            text = _foreign(scope["method"], headers, hosts[0])
            if text:
                return refusal(403, text, "cross_site")
        return None


def _foreign(method: str, headers: Headers, host: str) -> str:
    """Return why a call is not one of the page's own; "" if it is."""
    site = headers.get("sec-fetch-site", "same-origin")
    if site != "same-origin":
        return "Sec-Fetch-Site is not same-origin; expected a call of this page itself."
    origin = headers.get("origin")
    if origin is not None and origin.lower().partition("://")[2] != host.lower():
        return "Origin is another host; expected a call of this page itself."
    if method in _READING:
        return ""
    if origin is None:
        return "Origin is missing; expected that of this page."
    if method == "POST" and headers.get("content-type", "").partition(";")[0].strip() != (
        "application/json"
    ):
        return "Content-Type is not application/json; expected JSON."
    return ""


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _split(host: str) -> tuple[str, int | None]:
    name, colon, port = host.rpartition(":")
    if not colon or host.endswith("]"):
        return host, None
    return name, int(port) if port.isascii() and port.isdigit() else -1


def _matches(name: str, known: str) -> bool:
    known = known.lower()
    if not known.startswith("*."):
        return name == known
    # As in TLS, the star stands for one label.
    return fnmatch.fnmatchcase(name, known) and name.count(".") == known.count(".")
