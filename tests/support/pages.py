"""Pages in this process, and a browser that calls them over HTTP."""

from __future__ import annotations

import http.client
import json
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.cookies import SimpleCookie
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

from routetrace.client import Security
from routetrace.page.config import PageConfig
from routetrace.page.serving import Page
from routetrace.page.static_files import DIRECTORY


@contextmanager
def running_page(target: str, *, static: Path = DIRECTORY, **settings: Any) -> Iterator[str]:
    """Run a page on a free port in a thread; yield its address."""
    given = {"listen": "127.0.0.1:0", "security": Security(), **settings}
    page = Page(PageConfig(target=target, **given), static)
    thread = threading.Thread(target=page.run)
    thread.start()
    try:
        yield page.address
    finally:
        page.stop()
        thread.join(30)
        assert not thread.is_alive()


@dataclass
class Answer:
    """A response, whole."""

    status: int
    headers: http.client.HTTPMessage
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        return self.json["error"]


class Browser:
    """One browser: sends its cookies, and what a browser says of calls of a page itself.

    Args:
        address: of the page.
        ca: PEM file of the authority of its certificate.
    """

    def __init__(self, address: str, ca: Path | None = None) -> None:
        url = urlsplit(address)
        self.host = url.netloc
        self.cookies: dict[str, str] = {}
        if url.scheme == "https":
            context = ssl.create_default_context(cafile=str(ca))
            self.connection = http.client.HTTPSConnection(
                url.hostname or "", url.port, timeout=60, context=context
            )
            self.origin = f"https://{url.netloc}"
        else:
            self.connection = http.client.HTTPConnection(url.hostname or "", url.port, timeout=60)
            self.origin = f"http://{url.netloc}"

    def call(
        self,
        path: str,
        method: str = "GET",
        *,
        body: Any = None,
        headers: dict[str, str | None] | None = None,
    ) -> Answer:
        """Call a path; headers with None are left out."""
        sent: dict[str, str | None] = {"Host": self.host, "Sec-Fetch-Site": "same-origin"}
        if method != "GET":
            sent["Origin"] = self.origin
        if self.cookies:
            sent["Cookie"] = "; ".join(f"{k}={v}" for k, v in self.cookies.items())
        data = None
        if body is not None:
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            sent["Content-Type"] = "application/json"
        sent |= headers or {}
        if data is not None:
            sent["Content-Length"] = str(len(data))
        given = {name: value for name, value in sent.items() if value is not None}
        try:
            response = self._response(method, path, given, data)
        except (http.client.RemoteDisconnected, ConnectionError):
            # As a browser does: a page ends a connection that was idle for some seconds.
            if method != "GET":
                raise
            self.connection.close()
            response = self._response(method, path, given, data)
        answer = Answer(response.status, response.headers, response.read())
        for header in answer.headers.get_all("Set-Cookie") or ():
            for name, morsel in SimpleCookie(header).items():
                self.cookies[name] = morsel.value
                if morsel["max-age"] == "0":
                    del self.cookies[name]
        return answer

    def _response(
        self, method: str, path: str, headers: dict[str, str], data: bytes | None
    ) -> http.client.HTTPResponse:
        self.connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
        for name, value in headers.items():
            self.connection.putheader(name, value)
        self.connection.endheaders(data)
        return self.connection.getresponse()

    def sign_in(self, token: str, **more: Any) -> Answer:
        return self.call("/api/v1/session", "POST", body={"token": token, **more})

    def trace(self, run: str, end: str = "", **params: Any) -> Answer:
        """Call an endpoint of a trace."""
        end = f"/{end}" if end else ""
        return self.call(f"/api/v1/runs/{quote(run, safe='')}/trace{end}?{urlencode(params)}")
