"""HTTP endpoint for scrapes and probes, on threads of its own and in bounded numbers of them."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import socket
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from socketserver import TCPServer, ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

import prometheus_client

from routetrace.server.common.addresses import split_address

#: Seconds that an HTTP client may take to send its request or to receive the response.
_HTTP_SECONDS = 10.0
#: Maximum HTTP connections, of one thread each; a further one ends the oldest whose request has not
#: arrived, and gets its thread in this time.
_MAX_CONNECTIONS = 32
_TURN_SECONDS = 1.0
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


def _app(registry: prometheus_client.CollectorRegistry, probes: Mapping[str, Probe]) -> Any:
    """Return the WSGI application."""
    metrics = prometheus_client.make_wsgi_app(registry)

    def app(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        probe = probes.get(environ["PATH_INFO"])
        if probe is None:
            answer: Iterable[bytes] = metrics(environ, start_response)
            return answer
        passed = probe()
        body = b"ok\n" if passed else b"not ready\n"
        status = "200 OK" if passed else "503 Service Unavailable"
        headers = [("Content-Type", "text/plain"), ("Content-Length", str(len(body)))]
        start_response(status, headers)
        return [body]

    return app


class _HttpServer(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, address: tuple[Any, ...]) -> None:
        self.address_family = address[0]
        self._open = threading.BoundedSemaphore(_MAX_CONNECTIONS)
        #: Connections whose request has not arrived; the oldest first.
        self._unread: OrderedDict[socket.socket, None] = OrderedDict()
        super().__init__(address[4][:2], _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._open.acquire(blocking=False):
            # A request that arrives at once is served, however many others never end.
            with contextlib.suppress(KeyError, OSError):
                self._unread.popitem(last=False)[0].shutdown(socket.SHUT_RDWR)
            if not self._open.acquire(timeout=_TURN_SECONDS):
                self.shutdown_request(request)
                return
        self._unread[request] = None
        super().process_request(request, client_address)

    def arrived(self, request: socket.socket) -> None:
        """Note that the request of a connection has arrived."""
        self._unread.pop(request, None)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.arrived(request)
            self._open.release()

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
        found = super().parse_request()
        self.server.arrived(self.connection)
        return found

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Log nothing."""
