"""The web page as a child process, which is a client of the server like any other."""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import os
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import grpc

from routetrace.server.common.addresses import is_loopback, split_address
from routetrace.server.settings.config import ServerConfig

_log = logging.getLogger(__name__)

#: Packages of the extra `page`.
_PACKAGES = ("starlette", "uvicorn")

#: Seconds before a page that has ended is started again; doubled up to the second number each time
#: that it ends within the third.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S, _SHORT_LIFE_S = 1.0, 60.0, 60.0

#: Seconds that it has to end by itself.
_END_S = 5.0

_MAX_LINE = 1 << 16

#: Maximum bytes of the path of a Unix socket.
_MAX_SOCKET_PATH = 107
_OTHER_DIRECTORY = "TMPDIR names another directory"


class PageProcess:
    """The page of a server: started with it, and again after a crash.

    Args:
        config: settings of the server.
        address: host:port that it listens on.
    """

    def __init__(self, config: ServerConfig, address: str) -> None:
        self._config = config
        self._shown = config.advertise or address
        self._directory = ""
        self._lacking = _reason_for_none(config)
        self._target = ""

    def add_to(self, server: grpc.aio.Server) -> None:
        """Let the page reach a server that has not started."""
        if self._lacking or not self._config.page_listen:
            return
        if self._config.workers > 1:
            # The page follows other workers to their ports.
            host, port = self._config.host_port
            host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
            self._target = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            return
        # Only the user of the server can enter the directory; tokens are asked for all the same.
        try:
            self._directory = tempfile.mkdtemp(prefix="routetrace-page-")
        except OSError as error:
            self._lacking = f"{error}; {_OTHER_DIRECTORY}"
            return
        path = f"{self._directory}/server"
        if len(os.fsencode(path)) > _MAX_SOCKET_PATH:
            self._lacking = f"{path} is too long a path for a socket; {_OTHER_DIRECTORY}"
            return
        server.add_insecure_port(f"unix:{path}")
        self._target = f"unix:{path}"

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the page while the context is open."""
        if self._lacking:
            _log.info("no page on %s: %s", self._config.page_listen, self._lacking)
        keeping = asyncio.create_task(self._keep()) if self._target else None
        try:
            yield
        finally:
            if keeping:
                keeping.cancel()
                with suppress(asyncio.CancelledError):
                    await keeping
            if self._directory:
                shutil.rmtree(self._directory, ignore_errors=True)

    async def _keep(self) -> None:
        """Start the page, and again after a crash; not if it has not come up."""
        pause = _FIRST_PAUSE_S
        while True:
            begun = time.monotonic()
            try:
                listened = await self._run()
            except OSError as error:
                _log.warning("no page on %s: %s", self._config.page_listen, error)
                return
            if not listened:
                return
            if time.monotonic() - begun > _SHORT_LIFE_S:
                pause = _FIRST_PAUSE_S
            _log.warning("the page has ended; started again in %g s", pause)
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    async def _run(self) -> bool:
        """Run the page until it ends; return whether it listened."""
        child = await asyncio.create_subprocess_exec(
            *self._command(),
            stdin=asyncio.subprocess.PIPE,  # its end tells the page that the server has ended
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=_environment(),
            start_new_session=True,  # Ctrl-C in a terminal reaches the server alone
            limit=_MAX_LINE,
        )
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stderr is not None
        logging_lines = asyncio.create_task(_log_lines(child.stderr))
        try:
            address = (await child.stdout.readline()).decode(errors="replace").strip()
            if address:
                _log.info("page on %s", address)
            await child.wait()
            await logging_lines
            return bool(address)
        finally:
            logging_lines.cancel()
            child.stdin.close()
            await _ended(child)

    def _command(self) -> list[str]:
        config = self._config
        command = [sys.executable, "-m", "routetrace.page", "--child"]
        command += ["--target", self._target, "--shown-target", self._shown]
        command += ["--listen", config.page_listen]
        for host in config.page_hosts:
            command += ["--host", host]
        if config.insecure:
            command.append("--insecure")
        if config.tls_cert and config.tls_key and not _is_loopback_page(config):
            command += ["--tls-cert", str(config.tls_cert), "--tls-key", str(config.tls_key)]
        return command


def _reason_for_none(config: ServerConfig) -> str:
    """Return why a page that is wanted is not started; "" if it is."""
    if not config.page_listen:
        return ""
    if any(importlib.util.find_spec(package) is None for package in _PACKAGES):
        return "pip install '.[page]' in a checkout; --page-listen '' wants none"
    beside = "start `routetrace page` beside the server, with its own TLS files"
    if config.tls_client_ca is not None:
        return f"whoever reaches the page would need no client certificate; {beside}"
    if config.workers > 1 and config.tls_cert is not None:
        return f"the workers ask for TLS; {beside}"
    return ""


def _is_loopback_page(config: ServerConfig) -> bool:
    return is_loopback(split_address(config.page_listen)[0])


def _environment() -> dict[str, str]:
    """Return the environment without settings of the server, and of clients."""
    return {name: text for name, text in os.environ.items() if not name.startswith("ROUTETRACE_")}


async def _log_lines(stream: asyncio.StreamReader) -> None:
    with suppress(ValueError):  # a line that is too long
        async for line in stream:
            _log.info("page: %s", line.decode(errors="replace").rstrip())


async def _ended(child: asyncio.subprocess.Process) -> None:
    """Wait for the end of a page that has its signal to stop; kill it after `_END_S` seconds."""
    try:
        await asyncio.wait_for(child.wait(), _END_S)
    except asyncio.TimeoutError:
        child.kill()
        await child.wait()
