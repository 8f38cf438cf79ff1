"""A server that comes back: the same data directory, the same port, another process."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from routetrace.server.testing import ServerProcess, free_ports


def free_port() -> int:
    """Return a free port of 127.0.0.1."""
    return free_ports(1)


class Server:
    """A server over its lives.

    Args:
        data_dir: keeps its chunks.
        python: runs it; may be several words, as `env LD_PRELOAD=... python`.
        program: what it runs, and its first arguments.
        settings: of `ServerConfig`.
    """

    def __init__(
        self,
        data_dir: Path | str,
        *,
        python: Sequence[str] = (),
        program: Sequence[str] = ("-m", "routetrace.server.daemon"),
        **settings: Any,
    ) -> None:
        workers = settings.get("workers", 1)
        self.port = free_ports(workers)
        self.metrics_port = free_ports(workers)
        self.target = f"127.0.0.1:{self.port}"
        self.data_dir = Path(data_dir)
        self.starts = 0
        self.python = list(python) or [sys.executable]
        self.program = list(program)
        self.settings: dict[str, Any] = {
            "listen": self.target,
            "metrics_listen": f"127.0.0.1:{self.metrics_port}",
            "data_dir": self.data_dir,
            "log_format": "json",
            "log_level": "warning",
            "store_capacity": 1 << 33,
            **settings,
        }
        self._process: ServerProcess | None = None

    def command(self) -> list[str]:
        """Return the command line."""
        command = [*self.python, *self.program]
        for name, value in self.settings.items():
            flag = name.replace("_", "-")
            if isinstance(value, bool):
                command.append(f"--{flag}" if value else f"--no-{flag}")
            else:
                command.append(f"--{flag}={value}")
        return command

    @property
    def running(self) -> bool:
        """Whether there is a process."""
        return self._process is not None

    @property
    def process(self) -> psutil.Process:
        """The process."""
        assert self._process is not None
        return psutil.Process(self._process.pid)

    @property
    def log(self) -> str:
        """Return the output since the last start."""
        assert self._process is not None
        return self._process.log.read_text(errors="replace")

    def start(self, timeout: float = 60.0) -> float:
        """Start it; return the seconds until it was ready."""
        begun = time.monotonic()
        self._process = ServerProcess(self.command(), timeout)
        self.starts += 1
        return time.monotonic() - begun

    def start_and_kill(self, seconds: float) -> None:
        """Start it, and kill it before it is ready, or not long after."""
        with subprocess.Popen(
            self.command(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as process:
            try:
                process.wait(seconds)
            except subprocess.TimeoutExpired:
                process.kill()

    def kill(self) -> None:
        """kill -9."""
        assert self._process is not None
        self._process.kill()
        self._clean_up()

    def stop(self, timeout: float = 30.0) -> int:
        """SIGTERM; returns the exit code."""
        assert self._process is not None
        code = self._process.stop(timeout)
        self._clean_up()
        return code

    def pause(self) -> None:
        """SIGSTOP."""
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        self.process.send_signal(signal.SIGCONT)

    def metrics(self) -> dict[str, float]:
        """Samples by name, with their labels as they are printed."""
        url = f"http://127.0.0.1:{self.metrics_port}/metrics"
        with urllib.request.urlopen(url, timeout=30) as answer:
            text = answer.read().decode()
        samples = {}
        for line in text.splitlines():
            if line and not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                samples[name] = float(value)
        return samples

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self.kill()

    def _clean_up(self) -> None:
        assert self._process is not None
        process, self._process = self._process, None
        process.__exit__(None, None, None)
