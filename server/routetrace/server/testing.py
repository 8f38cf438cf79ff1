"""Real server for tests, in its own process, on a free port of 127.0.0.1.

with run_server() as server:
    client = RouteClient(server.target)
"""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar

_LOG_TAIL = 4000
#: Below the ports that systems give to connections: none takes a port while its server is away, and
#: no client that tries to reach it connects to itself.
_PORTS = range(15_000, 30_000)


def free_ports(count: int) -> int:
    """Return the first of `count` free ports of 127.0.0.1 in a row."""
    while True:
        first = random.choice(_PORTS)
        with ExitStack() as probes:
            try:
                for port in range(first, first + count):
                    probes.enter_context(socket.socket()).bind(("127.0.0.1", port))
            except OSError:
                continue
            return first


class ServerProcess:
    """A running server; leaving it as a context manager stops it and removes its log.

    Attributes:
        target: "127.0.0.1:port", for clients and agents.
        metrics_target: "host:port" of the metrics; empty without the setting `metrics_listen`.
        pid: process id.
        log: file with the output of the process.
        popen: starts the process; a subclass of `subprocess.Popen`, or what acts like it.
    """

    popen: ClassVar[Callable[..., Any]] = subprocess.Popen

    def __init__(self, command: list[str], timeout: float) -> None:
        self._dir = tempfile.TemporaryDirectory(prefix="routetrace-")
        self.log = Path(self._dir.name) / "log"
        ready_file = Path(self._dir.name) / "ready"
        # Settings in the environment must not reach the test server.
        env = {k: v for k, v in os.environ.items() if not k.startswith("ROUTETRACE_")}
        with self.log.open("wb") as output:
            self._process: subprocess.Popen[bytes] = type(self).popen(
                [*command, "--ready-file", str(ready_file)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=env,
            )
        self.pid = self._process.pid
        try:
            addresses = self._wait_until_ready(ready_file, time.monotonic() + timeout)
        except BaseException:
            self.kill()
            self._dir.cleanup()
            raise
        self.target, _, self.metrics_target = addresses.partition("\n")

    def stop(self, timeout: float = 30.0) -> int:
        """Stop the server with SIGTERM; return its exit code.

        Raises:
            TimeoutError: if it still runs after `timeout` seconds; it is then killed.
        """
        self._process.terminate()
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            raise TimeoutError(f"the server still runs after SIGTERM: {self._log_tail()}") from None

    def kill(self) -> None:
        """Kill the server with SIGKILL, as in a crash."""
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self.stop()
        finally:
            self._dir.cleanup()

    def __repr__(self) -> str:
        return f"ServerProcess(target={self.target!r}, pid={self.pid})"

    def _wait_until_ready(self, ready_file: Path, deadline: float) -> str:
        while time.monotonic() < deadline:
            if ready_file.exists():
                return ready_file.read_text()
            if self._process.poll() is not None:
                code = self._process.returncode
                raise RuntimeError(f"the server ended with code {code}: {self._log_tail()}")
            time.sleep(0.01)
        raise TimeoutError(f"the server is not ready in time: {self._log_tail()}")

    def _log_tail(self) -> str:
        return self.log.read_text(errors="replace")[-_LOG_TAIL:]


def run_server(
    *, data_dir: str | Path | None = None, port: int = 0, timeout: float = 60.0, **settings: Any
) -> ServerProcess:
    """Start `routetrace-server` and wait until it is ready.

    Args:
        data_dir: directory of the disk store; None: a memory store.
        port: port on 127.0.0.1; 0 picks a free one.
        timeout: maximum seconds of the start.
        settings: settings of `routetrace.server.settings.config.ServerConfig` by name; None leaves
            one to its default.

    Raises:
        RuntimeError: if the server exits; the message has the end of its log.
        TimeoutError: if the server is not ready in time.
    """
    settings.setdefault("listen", f"127.0.0.1:{port}")
    settings.setdefault("page_listen", "")
    if data_dir is None:
        settings.setdefault("store", "memory")
    else:
        settings["data_dir"] = data_dir
    command = [sys.executable, "-m", "routetrace.server.daemon"]
    for name, value in settings.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            command.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None:
            command.append(f"--{flag}={value}")
    return ServerProcess(command, timeout)
