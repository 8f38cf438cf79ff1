"""S3 in this process, over HTTP: put-if-absent as the real one does it, and faults on demand."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape, unescape


class FakeS3:
    """One bucket, "bucket"; the parts of S3 that obstore uses.

    Attributes:
        objects: content by key.
        before: called with (verb, key) before a request is carried out; may sleep.
        lose_answer: whether to drop the connection of (verb, key) after it is carried out.
        atomic: False: conditions are checked, and the object written a moment later.
    """

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.lock = threading.Lock()
        self.before: Callable[[str, str], None] = lambda verb, key: None
        self.lose_answer: Callable[[str, str], bool] = lambda verb, key: False
        self.atomic = True
        self.requests: list[tuple[str, str]] = []
        self._running = threading.Event()
        self._running.set()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def __enter__(self) -> FakeS3:
        return self

    def __exit__(self, *_: object) -> None:
        self._running.set()
        self._server.shutdown()
        self._server.server_close()

    def keys(self, prefix: str = "") -> list[str]:
        with self.lock:
            return sorted(key for key in self.objects if key.startswith(prefix))

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Let every request hang until the end of the block."""
        self._running.clear()
        try:
            yield
        finally:
            self._running.set()

    def carry_out(self, verb: str, key: str, body: bytes, headers: Any) -> tuple[int, bytes]:
        self._running.wait()
        self.requests.append((verb, key))
        self.before(verb, key)
        if verb == "PUT":
            absent = headers.get("If-None-Match") == "*"
            if not self.atomic:
                taken = key in self.objects
                time.sleep(0.05)
            with self.lock:
                if absent and (key in self.objects if self.atomic else taken):
                    return 412, b"<Error><Code>PreconditionFailed</Code></Error>"
                self.objects[key] = body
            return 200, b""
        with self.lock:
            if verb == "POST":  # delete
                found = re.findall("<Key>(.*?)</Key>", body.decode())
                for name in found:
                    self.objects.pop(unescape(name), None)
                done = "".join(f"<Deleted><Key>{name}</Key></Deleted>" for name in found)
                return 200, f"<DeleteResult>{done}</DeleteResult>".encode()
            if key not in self.objects:
                return 404, b"<Error><Code>NoSuchKey</Code></Error>"
            return 200, self.objects[key]

    def listing(self, prefix: str) -> bytes:
        self._running.wait()
        self.requests.append(("LIST", prefix))
        self.before("LIST", prefix)
        with self.lock:
            found = sorted((k, len(v)) for k, v in self.objects.items() if k.startswith(prefix))
        contents = "".join(
            f"<Contents><Key>{escape(key)}</Key><Size>{size}</Size><ETag>&quot;e&quot;</ETag>"
            "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
            for key, size in found
        )
        whole = f"<IsTruncated>false</IsTruncated>{contents}"
        return f"<ListBucketResult>{whole}</ListBucketResult>".encode()


def _handler(fake: FakeS3) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

        def _handle(self) -> None:
            parts = urlsplit(self.path)
            key = unquote(parts.path).removeprefix("/bucket").lstrip("/")
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            query = parse_qs(parts.query)
            extra = {}
            if "list-type" in query:
                status, answer = 200, fake.listing(query.get("prefix", [""])[0])
            else:
                status, answer = fake.carry_out(self.command, key, body, self.headers)
                asked = self.headers.get("Range")
                if status == 200 and asked and self.command == "GET":
                    first, _, last = asked.removeprefix("bytes=").partition("-")
                    whole = len(answer)
                    answer = answer[int(first) : int(last) + 1]
                    status = 206
                    stop = int(first) + len(answer) - 1
                    extra["Content-Range"] = f"bytes {first}-{stop}/{whole}"
                if fake.lose_answer(self.command, key):
                    self.close_connection = True
                    return
            self.send_response(status)
            for name, value in extra.items():
                self.send_header(name, value)
            self.send_header("ETag", '"e"')
            self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(answer)

    for verb in ("GET", "PUT", "POST", "HEAD"):
        setattr(Handler, f"do_{verb}", Handler._handle)
    return Handler
