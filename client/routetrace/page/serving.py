"""The HTTP server of the page: its socket, its connections, and their bounds."""

from __future__ import annotations

import asyncio
import logging
import socket
from pathlib import Path
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from routetrace.common.errors import Unavailable
from routetrace.common.limited import LimitedLog
from routetrace.common.target import targets_of
from routetrace.page.application import application, crowded
from routetrace.page.certificate import Certificate
from routetrace.page.config import PageConfig, split_address
from routetrace.page.guard import Hosts
from routetrace.page.static_files import DIRECTORY

_failures = LimitedLog(logging.getLogger(__name__), "errors of the event loop")

MAX_CONNECTIONS = 100
_BACKLOG = 128
#: Seconds between two looks at a connection, and looks that a request may take.
_LOOK_S = 10.0
_MAX_LOOKS = 12
_SHUTDOWN_S = 2


class Page:
    """A page that listens, and serves once it runs.

    Args:
        config: settings of the page.
        static: folder of the browser's files.

    Attributes:
        address: URL of the page.

    Raises:
        InvalidArgument: if a file of the settings cannot be used.
        Unavailable: if the address cannot be listened on.
    """

    def __init__(self, config: PageConfig, static: Path = DIRECTORY) -> None:
        host, _ = split_address(config.listen)
        for target in targets_of(config.target):
            config.security.check(target)
        certificate = Certificate(config.tls_cert, config.tls_key) if config.tls_cert else None
        self._socket = _listen(config.listen)
        port = self._socket.getsockname()[1]
        hosts = Hosts(host, port, config.hosts, certificate.names if certificate else tuple)
        settings = uvicorn.Config(
            application(config, hosts, port, static),
            http=_connections(crowded(hosts)),
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            log_level="warning",  # a handler of the root logger switches the access log on again
            # Forwarded addresses would let anybody choose where wrong sign-ins come from.
            proxy_headers=False,
            server_header=False,
            backlog=_BACKLOG,  # asyncio tries as many times to accept a connection
            timeout_graceful_shutdown=_SHUTDOWN_S,
        )
        settings.load()
        if certificate:
            settings.ssl = certificate.context
        self._server = uvicorn.Server(settings)
        shown = f"[{host}]" if ":" in host else host
        self.address = f"{'https' if certificate else 'http'}://{shown}:{port}/"

    def run(self) -> None:
        """Serve until SIGINT, SIGTERM or `stop`."""
        with self._socket:
            asyncio.run(self._serve())

    async def _serve(self) -> None:
        asyncio.get_running_loop().set_exception_handler(_log_error)
        await self._server.serve(sockets=[self._socket])

    def stop(self) -> None:
        """End `run`; thread-safe."""
        self._server.should_exit = True


def _log_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log an error of the event loop, which has one for each connection that it cannot accept."""
    error = context.get("exception")
    if isinstance(error, OSError):
        _failures.warning(context["message"], "%s: %s", context["message"], error)
    else:
        loop.default_exception_handler(context)


def _listen(address: str) -> socket.socket:
    host, port = split_address(address)
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listening = socket.socket(family, kind, protocol)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(where)
            listening.listen(_BACKLOG)
        except OSError:
            listening.close()
            raise
    except OSError as error:
        raise Unavailable(
            f"cannot listen on {address} ({error.strerror or error}); expected a free address of "
            "this machine",
            field="listen",
            value=address,
            expected="a free address of this machine",
        ) from error
    return listening


def _connections(beyond: Any) -> type[asyncio.Protocol]:
    """Return the protocol of connections: HTTP/1.1, bounded in number and in time.

    Args:
        beyond: application of connections beyond the limit.
    """

    class Connection(H11Protocol):
        """One connection; it ends when it sends no request, or a request takes too long."""

        _looks = 0
        _seen: object = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            if len(self.connections) > MAX_CONNECTIONS:
                self.app = beyond
            if len(self.connections) > 2 * MAX_CONNECTIONS:
                transport.abort()
            self.loop.call_later(_LOOK_S, self._look)

        def _look(self) -> None:
            if self.transport.is_closing():
                return
            cycle = self.cycle
            same = cycle is self._seen
            self._seen, self._looks = cycle, self._looks + 1 if same else 0
            working = cycle is not None and not cycle.response_complete
            if same and not (working and self._looks < _MAX_LOOKS):
                self.transport.abort()
                return
            self.loop.call_later(_LOOK_S, self._look)

    return Connection
