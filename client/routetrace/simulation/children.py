"""Child processes of a load, and the lines of JSON between them and the command.

A child gets all parameters on its standard input, including credentials, as arguments are visible
to other users. It exits at the end of that input, however the command ends.
"""

from __future__ import annotations

import contextlib
import json
import queue
import subprocess
import sys
import tempfile
import threading
from typing import Any

Message = dict[str, Any]
#: Kind of the last message of a child, sent on its behalf.
EXITED = "exited"


class Child:
    """A process that runs a module of this package.

    Args:
        name: name in messages.
        module: module to run.
        arguments: command-line arguments.
        inbox: receives (child, message) for each line from the process.
    """

    def __init__(
        self, name: str, module: str, arguments: list[str], inbox: queue.Queue[Any]
    ) -> None:
        self.name = name
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-m", f"routetrace.simulation.{module}", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            # Only the command handles Ctrl-C; it stops its children in order.
            start_new_session=True,
        )
        self._inbox = inbox
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def send(self, message: Message | str) -> None:
        """Send a line; no effect after the process has exited."""
        line = message if isinstance(message, str) else json.dumps(message)
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError, ValueError):
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()

    def close_input(self) -> None:
        """Close the standard input of the process."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()

    def end(self, seconds: float) -> None:
        """Wait for the process to exit; kill it after `seconds`."""
        self.close_input()
        try:
            self._process.wait(max(0.0, seconds))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join()
        self._errors.close()

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self._inbox.put((self, json.loads(line)))
        code = self._process.wait()
        self._errors.seek(0)
        errors = self._errors.read().decode(errors="replace").strip().splitlines()
        self._inbox.put((self, {"kind": EXITED, "code": code, "errors": errors[-1:]}))


class Parent:
    """Connection of a child to the command."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Libraries must not print into the messages.
        self._out = sys.stdout
        sys.stdout = sys.stderr
        self.lines: queue.Queue[str | None] = queue.Queue()
        """Lines from the command; None at the end of the input."""
        self.stopped = threading.Event()
        """Set by the line "stop" and at the end of the input."""
        threading.Thread(target=self._receive, daemon=True).start()

    def send(self, kind: str, **values: Any) -> None:
        """Send a message to the command."""
        with self._lock:
            self._out.write(json.dumps({"kind": kind, **values}) + "\n")
            self._out.flush()

    def _receive(self) -> None:
        for line in sys.stdin:
            if line == "stop\n":
                self.stopped.set()
            else:
                self.lines.put(line)
        self.stopped.set()
        self.lines.put(None)
