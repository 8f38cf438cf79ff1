"""Servers of tests fork from one process that has imported the server: a tenth of a start's time.

`tests/conftest.py` has `run_server` start them so. Heavy suites, the demo, the documents and tests
that type a command start the program itself.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from typing import IO, Any

_COMMAND = [sys.executable, "-m", "routetrace.server.daemon"]
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload([_COMMAND[-1]])


def start(command: list[str], **options: Any) -> subprocess.Popen[bytes] | ForkedServer:
    """Start a server like `subprocess.Popen`, which starts all other commands."""
    if command[:3] != _COMMAND:
        return subprocess.Popen(command, **options)
    return ForkedServer(command[3:], options["env"], options["stdout"])


class ForkedServer:
    """The part of `subprocess.Popen` that `ServerProcess` uses.

    Args:
        args: of the program.
        env: the whole environment of the process.
        output: file for what it prints.
    """

    def __init__(self, args: list[str], env: dict[str, str], output: IO[bytes]) -> None:
        # A daemon, so that a server that a test leaves behind ends with the tests.
        self._process = _FORKS.Process(target=_serve, args=(args, env, output.name), daemon=True)
        self._process.start()
        assert self._process.pid
        self.pid = self._process.pid
        self.terminate = self._process.terminate
        self.kill = self._process.kill

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(_COMMAND, timeout or 0.0)
        return self.returncode


def _serve(args: list[str], env: dict[str, str], output: str) -> None:
    """Run the server in the new process."""
    from routetrace.server import daemon

    os.environ.clear()
    os.environ.update(env)
    log = os.open(output, os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    daemon.end_process(daemon.main(args))
