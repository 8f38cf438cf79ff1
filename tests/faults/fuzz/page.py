"""Requests to every route of a real page: no answer is of a fault of the page, nor its log."""

from __future__ import annotations

import json
import random
import re
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from urllib.parse import quote

from faults.fuzz.calls import Log
from faults.fuzz.mutate import mutate_bytes, odd_number
from faults.fuzz.targets import Target
from routetrace.server.testing import run_server
from support.agents.feeder import Feeder
from support.servers.client_server import LAYOUT, rows_of

#: Paths of the API, and others; {} stands for a run.
_RUN = "/api/v1/runs/{}"
_PATHS = (
    "/api/v1/session",
    *(f"{_RUN}/{name}" for name in ("overview", "traces", "experts", "mismatch", "trace")),
    *(
        f"{_RUN}/trace/{name}"
        for name in ("diff", "explain", "reports", "segments", "tile", "rows")
    ),
)
_OTHER_PATHS = ("/", "/static/app.js", "/app.js", "/api/v1", "/api/v1/runs", "/..%2fx", "/%00", "*")
#: Parameters, and values of which one is right.
_PARAMETERS = {
    "id": ("whole", "hole", "gone"),
    "incarnation": ("1",),
    "policy": ("latest", "as_sampled"),
    "against": ("latest", "#1", "report:trainer"),
    "position": ("3",),
    "layer_id": ("2",),
    "what": ("changed", "differing"),
    "z": ("0", "3"),
    "x": ("0",),
    "start": ("0",),
    "stop": ("8",),
    "from": ("0",),
    "to": ("9",),
    "most": ("5",),
    "after": ("1", "1e308", "inf", "-inf", "nan"),
    "offset": ("1",),
    "limit": ("2",),
    "sort": ("id", "version"),
    "order": ("asc",),
    "state": ("complete", "incomplete"),
    "reason": ("not_captured",),
    "engine": ("engine",),
    "version": ("0..7", "..", "1..", "..9"),
    "below": ("0.5", "nan", "1e-400"),
    "label": ("task=math", "=", "a="),
    "q": ("h",),
    "view": ("v",),
    "engines": ("1",),
}
_METHODS = (*["GET"] * 24, "POST", "DELETE", "HEAD", "PUT", "TRACE", "X")
_TEXTS = (
    "", "%00", "a%00b", "%ff", "%ED%A0%80", "%F0%9F%98%80", "%E2%80%AE", "e%CC%81", "..%2f..%2fx",
    "+", "%0d%0aX:%20y", "-1", "1_0", "%D9%A3", "0x1", "1e5", "9" * 10, "9" * 5000, "x" * 60_000,
    "%", "%zz",
)  # fmt: skip
_HEADERS = (
    "Cookie: ", "Cookie: routetrace-{port}=x", "Cookie: routetrace-{port}=\xff\xfe; a=b; =; ;;",
    "If-None-Match: *", 'If-None-Match: "x", W/"y"', "If-None-Match: \xff", "Range: bytes=0-1, 9-",
    "Range: bytes=-", "If-Range: x", "If-Modified-Since: yesterday", "Accept: \x80",
    "Accept-Encoding: gzip;q=nan, br", "Sec-Fetch-Site: cross-site", "Origin: null",
    "Origin: http://[", "Host: other", "Expect: 100-continue", "Content-Encoding: gzip",
    "Upgrade: websocket\r\nConnection: Upgrade",
)  # fmt: skip
_JSON_TEXTS = (
    "", "t", "rt_x", "\0", "\ud800", "a\udfffb", "\U0001f600", "é", "a\r\nb", "x" * 4001,
    "x" * 16_000,
)  # fmt: skip
_TYPES = (
    "application/json",
    "application/json; charset=utf-7",
    "text/plain",
    "",
    "application/\xff",
)
#: Seconds of an answer, and until a request without one counts as unfinished.
_ANSWER_S, _UNFINISHED_S = 20.0, 0.3
#: Statuses that docs/page.md names, those of a parser of HTTP, and those of files.
_FINE = {200, 202, 204, 206, 304, 400, 401, 403, 404, 405, 409, 416, 421, 429, 431, 503}


class PageTarget(Target):
    """The page as a process, over raw sockets."""

    name = "page"
    limit = 512 << 20

    def __init__(self) -> None:
        self._server = run_server(agent_timeout_seconds=3600)
        feeder = Feeder(self._server.target, LAYOUT, run="run", engine_id="engine")
        for name, start in (("whole", 0), ("hole", 3)):
            handle = feeder.begin(name, prompt_len=4, labels={"task": "math"})
            feeder.step(rows_of(LAYOUT, 9), [[handle, start, 9]])
            feeder.finish(handle, 10 + start)
        feeder.close()
        self._folder = tempfile.TemporaryDirectory(prefix="routetrace-fuzz-page-")
        log = Path(self._folder.name) / "log"
        with log.open("wb") as output:
            command = [sys.executable, "-m", "routetrace.page", "--listen", "127.0.0.1:0"]
            command += ["--target", self._server.target]
            self._page = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=output)
        assert self._page.stdout is not None
        address = self._page.stdout.readline().decode().strip()
        self._port = int(address.rstrip("/").rpartition(":")[2])
        self._logs = [Log(log), Log(self._server.log)]

    def close(self) -> None:
        """End page and server."""
        self._page.terminate()
        self._page.wait()
        for log in self._logs:
            log.close()
        self._server.__exit__(None, None, None)
        self._folder.cleanup()

    @property
    def pid(self) -> int:
        """Of the page: its memory is what counts."""
        return self._page.pid

    def samples(self, rng: random.Random) -> bytes:
        path = rng.choice(_PATHS if rng.random() < 0.9 else _OTHER_PATHS)
        method = rng.choice(_METHODS)
        if path.endswith("/session"):
            method = rng.choice(("POST", "POST", "GET", "DELETE"))
        path = path.format(_text(rng, "run"))
        names = rng.sample([*_PARAMETERS], rng.choice((0, 2, 4, 9)))
        if path.endswith(("trace", "diff", "explain", "reports", "segments", "tile", "rows")):
            names = list(
                dict.fromkeys(("id", "what", "z", "x", "start", "stop", "position", *names))
            )
        query = [f"{name}={_text(rng, rng.choice(_PARAMETERS[name]))}" for name in names]
        target = path + ("?" + "&".join(query) if query else "")
        lines = [f"{method} {target} HTTP/1.1", "Connection: close"]
        lines += rng.sample(_HEADERS, rng.choice((0, 0, 0, 1, 3)))
        if not any(line.startswith("Host:") for line in lines):
            lines.append("Host: 127.0.0.1:{port}")
        body = b""
        if method not in ("GET", "HEAD"):
            if rng.random() < 0.9:
                lines.append("Origin: http://127.0.0.1:{port}")
            body = _body(rng)
            given = "application/json" if rng.random() < 0.8 else rng.choice(_TYPES)
            lines += [f"Content-Type: {given}", f"Content-Length: {len(body)}"]
        head = "\r\n".join([*lines, "", ""])
        return head.encode("latin-1") + body

    def mutate(self, rng: random.Random, data: bytes) -> bytes:
        head, end, body = data.partition(b"\r\n\r\n")
        if rng.random() < 0.9 or not body:
            head = mutate_bytes(rng, head) if rng.random() < 0.1 else head
            return head + end + body
        return head + end + mutate_bytes(rng, body)[: len(body)].ljust(len(body), b" ")

    def one_input(self, data: bytes) -> bool:
        request = data.replace(b"{port}", str(self._port).encode())
        status = self._status(request)
        for log in self._logs:
            log.check()
        assert status in _FINE or status is None, f"status {status}"
        return status is not None and status < 400

    def _status(self, request: bytes) -> int | None:
        """Send a request; return the status of the answer, None if there is none."""
        with socket.create_connection(("127.0.0.1", self._port), _ANSWER_S) as connection:
            try:
                connection.sendall(request)
                answer = _received(connection)
            except ConnectionError:
                return None
        statuses = re.findall(rb"^HTTP/1.1 (?!100)(\d+) ", answer, re.MULTILINE)
        return int(statuses[0]) if statuses else None


def _received(connection: socket.socket) -> bytes:
    """Return the answer; a request that is not whole ends after a while."""
    received = b""
    connection.settimeout(_UNFINISHED_S)
    try:
        while part := connection.recv(1 << 16):
            received += part
    except TimeoutError:
        connection.shutdown(socket.SHUT_WR)
        connection.settimeout(_ANSWER_S)
        while part := connection.recv(1 << 16):
            received += part
    return received


def _text(rng: random.Random, right: str) -> str:
    """A value of a parameter, quoted: mostly a right one."""
    match rng.randrange(16):
        case 0:
            return rng.choice(_TEXTS)
        case 1:
            return str(odd_number(rng, 64, signed=True))
        case _:
            return quote(right, safe="")


def _body(rng: random.Random) -> bytes:
    kind = rng.randrange(12)
    if kind == 0:
        return b"[" * rng.choice((1, 1000, 16_000))
    if kind == 1:
        return b'{"a":' * rng.choice((1, 3000))
    if kind == 2:
        return rng.choice(
            (b"", b"null", b"NaN", b"1" * 9000, b'"\xff"', b"\xef\xbb\xbf{}", b"{} {}")
        )
    if kind == 3:
        return rng.randbytes(rng.choice((1, 40, 17_000)))
    values = (*_JSON_TEXTS, 1, -1, 2**64, 1e308, None, True, [], {}, ["t"])
    names = ("token", "run", "\ud800", "x")
    given = {name: rng.choice(values) for name in names if rng.random() < 0.7}
    if rng.random() < 0.6:
        given["token"] = rng.choice(_JSON_TEXTS)
    return json.dumps(given).encode()
