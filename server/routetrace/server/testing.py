"""A real server for tests: its own process, on a free port of 127.0.0.1.

with run_server() as server:
    client = RouteClient(server.target)
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

_LOG_TAIL = 4000


class ServerProcess:
    """A running server; leaving it as a context manager stops it and removes its log.

    Attributes:
        target: "127.0.0.1:port", for clients and agents.
        metrics_target: "host:port" of its metrics; empty without the setting `metrics_listen`.
        pid: of the process.
        log: file that holds what it printed.
    """

    def __init__(self, command: list[str], timeout: float) -> None:
        self._dir = tempfile.TemporaryDirectory(prefix="routetrace-")
        self.log = Path(self._dir.name) / "log"
        ready_file = Path(self._dir.name) / "ready"
        # Settings that surround the test are not the test's.
        env = {k: v for k, v in os.environ.items() if not k.startswith("ROUTETRACE_")}
        with self.log.open("wb") as output:
            self._process = subprocess.Popen(
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
        """Ends it with SIGTERM; returns its exit code.

        Raises:
            TimeoutError: if it is still running after `timeout` seconds; it is then killed.
        """
        self._process.terminate()
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            raise TimeoutError(f"the server ran on after SIGTERM: {self._log_tail()}") from None

    def kill(self) -> None:
        """Ends it with SIGKILL, as a crash would."""
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
        raise TimeoutError(f"the server did not get ready: {self._log_tail()}")

    def _log_tail(self) -> str:
        return self.log.read_text(errors="replace")[-_LOG_TAIL:]


def run_server(
    *, data_dir: str | Path | None = None, port: int = 0, timeout: float = 60.0, **settings: Any
) -> ServerProcess:
    """Starts `routetrace-server` and waits until it is ready.

    Args:
        data_dir: keeps chunks there; without it they are kept in memory.
        port: to listen on, on 127.0.0.1; 0 takes a free one.
        timeout: seconds that the start may take.
        settings: any setting of `routetrace.server.config.ServerConfig`, by its name.

    Raises:
        RuntimeError: if the server ends instead; the message holds the end of its log.
        TimeoutError: if it takes too long.
    """
    settings.setdefault("listen", f"127.0.0.1:{port}")
    if data_dir is None:
        settings.setdefault("store", "memory")
    else:
        settings["data_dir"] = data_dir
    command = [sys.executable, "-m", "routetrace.server.daemon"]
    for name, value in settings.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            command.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            command.append(f"--{flag}={value}")
    return ServerProcess(command, timeout)
