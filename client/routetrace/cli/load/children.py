"""Processes of a load, and the lines of JSON that they and the command say to each other.

A child is told everything on its standard input, credentials too, which no other user can see
there, and ends when that does: nothing is left behind, however the command ended.
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
#: What a child says last of all, said for it.
GONE = "gone"


class Child:
    """A process that runs a module of this package.

    Args:
        name: for people.
        module: its `__main__`.
        arguments: on its command line.
        inbox: where to put (child, message) for each line that it says.
    """

    def __init__(
        self, name: str, module: str, arguments: list[str], inbox: queue.Queue[Any]
    ) -> None:
        self.name = name
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-m", f"routetrace.cli.load.{module}", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            # Ctrl-C is the command's, which tells its children in order.
            start_new_session=True,
        )
        self._inbox = inbox
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def say(self, message: Message | str) -> None:
        """A line to it; nobody listens once it has ended."""
        line = message if isinstance(message, str) else json.dumps(message)
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError, ValueError):
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()

    def hang_up(self) -> None:
        """Nothing more will be said to it."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()

    def end(self, seconds: float) -> None:
        """Waits for its end, which is forced when the time is up."""
        self.hang_up()
        try:
            self._process.wait(max(0.0, seconds))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join()
        self._errors.close()

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self._inbox.put((self, json.loads(line)))
        code = self._process.wait()
        self._errors.seek(0)
        said = self._errors.read().decode(errors="replace").strip().splitlines()
        self._inbox.put((self, {"kind": GONE, "code": code, "said": said[-1:]}))


class Parent:
    """The command, as a child sees it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Kept from what libraries print.
        self._out = sys.stdout
        sys.stdout = sys.stderr
        self.lines: queue.Queue[str | None] = queue.Queue()
        """What it says; None when it has hung up."""
        self.stopped = threading.Event()
        """Set when it says "stop", or has hung up."""
        threading.Thread(target=self._listen, daemon=True).start()

    def say(self, kind: str, **values: Any) -> None:
        """A line to it."""
        with self._lock:
            self._out.write(json.dumps({"kind": kind, **values}) + "\n")
            self._out.flush()

    def _listen(self) -> None:
        for line in sys.stdin:
            if line == "stop\n":
                self.stopped.set()
            else:
                self.lines.put(line)
        self.stopped.set()
        self.lines.put(None)
