"""Servers and commands of tests fork from one process that has imported the product.

A start of the program takes seven times as long, nearly all of it for imports. `tests/conftest.py`
has `run_server` start servers so. Heavy suites, the demo, the pages' snippets and tests of the
installed commands start the programs themselves.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from typing import IO, Any

_SERVER = [sys.executable, "-m", "routetrace.server.daemon"]
_COMMANDS = {"routetrace": "routetrace.cli", "routetrace-server": "routetrace.server.command"}
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["routetrace.server.daemon", "routetrace.cli.commands"])


def start(command: list[str], **options: Any) -> subprocess.Popen[bytes] | Forked:
    """Start a server like `subprocess.Popen`, which starts all other commands."""
    path = options["env"].get("PYTHONPATH")
    if command[:3] != _SERVER or path != os.environ.get("PYTHONPATH"):
        return subprocess.Popen(command, **options)
    output = options["stdout"]
    return Forked("routetrace-server", command[3:], options["env"], output, output)


def run(
    command: str, *words: str, env: Mapping[str, str] = os.environ, timeout: float = 60.0
) -> subprocess.CompletedProcess[str]:
    """Run `routetrace` or `routetrace-server` like `subprocess.run` with `capture_output`."""
    with tempfile.NamedTemporaryFile() as output, tempfile.NamedTemporaryFile() as errors:
        process = Forked(command, words, env, output, errors)
        try:
            code = process.wait(timeout)
        finally:
            process.kill()
        told = (file.read().decode() for file in (output, errors))
        return subprocess.CompletedProcess([command, *words], code, *told)


class Forked:
    """A command in a process of its own, with what `ServerProcess` uses of `subprocess.Popen`.

    Args:
        command: a name of `_COMMANDS`.
        words: its arguments.
        env: the whole environment of the process.
        output: file for its standard output.
        errors: file for its standard error.
    """

    def __init__(
        self, command: str, words: Any, env: Mapping[str, str], output: IO[bytes], errors: IO[bytes]
    ) -> None:
        self._process = _FORKS.Process(
            target=_call,
            args=([command, *words], dict(env), output.name, errors.name),
            daemon=True,  # it ends with the tests if one leaves it behind
        )
        self._process.start()
        assert self._process.pid
        self.pid = self._process.pid
        self.terminate = self._process.terminate
        self.kill = self._process.kill

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout or 0.0)
        return self.returncode


def _call(argv: list[str], env: dict[str, str], *files: str) -> None:
    """Make the call of the command in the new process."""
    os.environ.clear()
    os.environ.update(env)
    for number, name in enumerate(files, 1):
        file = os.open(name, os.O_WRONLY | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    sys.argv = argv
    sys.exit(importlib.import_module(_COMMANDS[argv[0]]).main())
