"""HTTP endpoint for scrapes and probes, on threads of its own and in bounded numbers of them.

The threads share the interpreter with the event loop. So requests are bounded by the second, and a
scrape, which takes milliseconds, serves all that wait; the next one begins after a pause.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import math
import socket
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from socketserver import TCPServer, ThreadingMixIn
from typing import Any, NamedTuple
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

import prometheus_client
from prometheus_client import Metric

from routetrace.common.limited import LimitedLog
from routetrace.server.common.addresses import split_address

_failures = LimitedLog(logging.getLogger(__name__), "failed HTTP requests")

#: Seconds that an HTTP client may take to send its request or to receive the response.
_HTTP_SECONDS = 10.0
#: Maximum HTTP connections, of one thread each; a further one ends the oldest whose request has not
#: arrived, and gets its thread in this time.
_MAX_CONNECTIONS = 32
_TURN_SECONDS = 1.0
#: Connections that are accepted in a second, beside `_MAX_CONNECTIONS` after a pause.
_CONNECTIONS_PER_SECOND = 200.0
#: Part of a processor that scrapes take at most, unless the pause after one would be longer than
#: this: Prometheus waits for 10 s.
_SCRAPES_SHARE = 0.1
_LONGEST_PAUSE_SECONDS = 2.0
#: Seconds after which a connection is accepted that could not be.
_REFUSED_SECONDS = 0.5
#: Seconds that the event loop has to answer a probe.
_PROBE_SECONDS = 5.0

Probe = Callable[[], bool]


def on_loop(check: Probe, seconds: float = _PROBE_SECONDS) -> Probe:
    """Return a check that runs on this event loop; False while the loop does not answer."""
    loop = asyncio.get_running_loop()

    def probe() -> bool:
        found: concurrent.futures.Future[bool] = concurrent.futures.Future()
        try:
            loop.call_soon_threadsafe(lambda: found.set_result(check()))
            return found.result(seconds)
        except (concurrent.futures.TimeoutError, RuntimeError):  # the loop is busy, or closed
            return False

    return probe


class Endpoint:
    """HTTP endpoint on its own threads: /metrics, and a status for each probe.

    Args:
        registry: metrics.
        listen: "host:port".
        probes: by path; status 200 if it returns True, else 503.

    Attributes:
        address: "host:port" of the listening socket.

    Raises:
        OSError: if the address cannot be bound.
    """

    def __init__(
        self,
        registry: prometheus_client.CollectorRegistry,
        listen: str,
        probes: Mapping[str, Probe],
    ) -> None:
        # They add one series per counter, with little use.
        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
        host, port = split_address(listen)
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        self._server = _HttpServer(found[0])
        prometheus_client.ProcessCollector(registry=registry)
        self._server.set_app(_app(registry, probes))
        port = self._server.server_port
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True).start()

    def close(self) -> None:
        """Stop the endpoint; block until it has stopped."""
        self._server.shutdown()
        self._server.server_close()


class _Format(NamedTuple):
    """Form of a scrape that a client asks for."""

    open_metrics: bool
    gzip: bool


class _Response(NamedTuple):
    """Response of /metrics in one format."""

    status: str
    headers: tuple[tuple[str, str], ...]
    body: list[bytes]


class _Scrape:
    """Families of one scrape, and the responses with them.

    Args:
        number: of the scrape: those that begin later have higher ones.
        registry: metrics.

    Attributes:
        number: as above.
    """

    def __init__(self, number: int, registry: prometheus_client.CollectorRegistry) -> None:
        self.number = number
        self._families = list(registry.collect())
        # It renders what `collect` returns.
        self._app: Any = prometheus_client.make_wsgi_app(self)
        self._responses: dict[_Format, _Response] = {}

    def collect(self) -> list[Metric]:
        """Return the families."""
        return self._families

    def response(self, form: _Format) -> _Response:
        """Return the response in a format."""
        if form not in self._responses:
            self._responses[form] = self._render(form)
        return self._responses[form]

    def _render(self, form: _Format) -> _Response:
        head: list[Any] = []
        accept = "application/openmetrics-text; version=1.0.0" if form.open_metrics else ""
        environ = {
            "REQUEST_METHOD": "GET",
            "PATH_INFO": "/metrics",
            "QUERY_STRING": "",
            "HTTP_ACCEPT": accept,
            "HTTP_ACCEPT_ENCODING": "gzip" if form.gzip else "",
        }
        body = list(self._app(environ, lambda *args: head.extend(args)))
        return _Response(head[0], tuple(head[1]), body)


class _Scrapes:
    """Responses of /metrics, in a bounded part of a processor's time.

    Args:
        registry: metrics.
        now: clock in seconds.
        sleep: waits for seconds.
        spent: processor seconds of the calling thread.
    """

    def __init__(
        self,
        registry: prometheus_client.CollectorRegistry,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        spent: Callable[[], float] = time.thread_time,
    ) -> None:
        self._registry = registry
        self._now, self._sleep, self._spent = now, sleep, spent
        self._lock = threading.Lock()
        self._begun = 0
        self._last: _Scrape | None = None
        self._next = 0.0  # time before which no scrape begins

    def response(self, form: _Format) -> _Response:
        """Return a scrape that began after this call did; others that wait get the same one."""
        wanted = self._begun + 1
        with self._lock:
            new = self._last is None or self._last.number < wanted
            if new:
                self._sleep(max(0.0, self._next - self._now()))
                self._begun += 1
            before = self._spent()
            try:
                if new or self._last is None:
                    self._last = _Scrape(self._begun, self._registry)
                return self._last.response(form)
            finally:
                pause = (self._spent() - before) * (1 / _SCRAPES_SHARE - 1)
                now = self._now()
                self._next = min(max(now, self._next) + pause, now + _LONGEST_PAUSE_SECONDS)


def _app(registry: prometheus_client.CollectorRegistry, probes: Mapping[str, Probe]) -> Any:
    """Return the WSGI application."""
    scrapes = _Scrapes(registry)

    def app(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        try:
            return answer(environ, start_response)
        except Exception as error:
            _failures.failed("a request", error)
            start_response("500 Internal Server Error", [("Content-Length", "0")])
            return []

    def answer(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        if environ["REQUEST_METHOD"] != "GET":
            start_response("405 Method Not Allowed", [("Allow", "GET"), ("Content-Length", "0")])
            return []
        probe = probes.get(environ["PATH_INFO"])
        if probe is None:
            form = _Format(
                "application/openmetrics-text" in environ.get("HTTP_ACCEPT", ""),
                "gzip" in environ.get("HTTP_ACCEPT_ENCODING", ""),
            )
            response = scrapes.response(form)
            start_response(response.status, list(response.headers))
            return response.body
        passed = probe()
        body = b"ok\n" if passed else b"not ready\n"
        status = "200 OK" if passed else "503 Service Unavailable"
        headers = [("Content-Type", "text/plain"), ("Content-Length", str(len(body)))]
        start_response(status, headers)
        return [body]

    return app


class _Rate:
    """Events of one thread, in a bounded number of them in a second.

    Args:
        per_second: events in a second.
        burst: further ones at once, after a pause.
        now: clock in seconds.
        sleep: waits for seconds.
    """

    def __init__(
        self,
        per_second: float,
        burst: int,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._seconds = 1 / per_second
        self._burst_seconds = burst / per_second
        self._now, self._sleep = now, sleep
        self._due = -math.inf

    def wait(self) -> None:
        """Block until the next event may happen."""
        now = self._now()
        self._due = max(self._due, now - self._burst_seconds) + self._seconds
        self._sleep(max(0.0, self._due - now))


class _HttpServer(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, address: tuple[Any, ...]) -> None:
        self.address_family = address[0]
        self._rate = _Rate(_CONNECTIONS_PER_SECOND, _MAX_CONNECTIONS)
        self._open = threading.BoundedSemaphore(_MAX_CONNECTIONS)
        #: Connections whose request has not arrived; the oldest first.
        self._unread: OrderedDict[socket.socket, None] = OrderedDict()
        super().__init__(address[4][:2], _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        self._rate.wait()  # further connections stay in the queue of the socket
        if not self._open.acquire(blocking=False):
            # A request that arrives at once is served, however many others never end.
            with contextlib.suppress(KeyError, OSError):
                self._unread.popitem(last=False)[0].shutdown(socket.SHUT_RDWR)
            if not self._open.acquire(timeout=_TURN_SECONDS):
                self.shutdown_request(request)
                return
        self._unread[request] = None
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread could be started
            self.arrived(request)
            self._open.release()
            raise

    def arrived(self, request: socket.socket) -> bool:
        """Note that the request of a connection has arrived; return whether it is to be served."""
        try:
            del self._unread[request]
        except KeyError:  # ended in favour of another one
            return False
        return True

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.arrived(request)
            self._open.release()

    def get_request(self) -> tuple[socket.socket, Any]:
        """Accept a connection."""
        try:
            return super().get_request()
        except OSError as error:
            # Without a descriptor it stays in the queue, for which the caller looks at once.
            _failures.failed("accepting a connection", error)
            time.sleep(_REFUSED_SECONDS)
            raise

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002
        """Log an error of a connection; none of one that its client has ended, as any may."""
        error = sys.exc_info()[1]
        if isinstance(error, Exception) and not isinstance(error, (ConnectionError, TimeoutError)):
            _failures.failed("a request", error)

    def server_bind(self) -> None:
        # The inherited method looks up the host name, which can be slow.
        TCPServer.server_bind(self)
        self.server_name, self.server_port = "", self.server_address[1]
        self.setup_environ()


class _Handler(WSGIRequestHandler):
    timeout = _HTTP_SECONDS
    server: _HttpServer  # pyright: ignore[reportIncompatibleVariableOverride]

    def parse_request(self) -> bool:
        """Parse the request line and the headers."""
        # The parser takes the end of a connection, also by this server, for that of the headers.
        return super().parse_request() and self.server.arrived(self.connection)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Log nothing."""
