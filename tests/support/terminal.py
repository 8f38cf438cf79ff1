"""Runs commands at a pseudo-terminal of a size."""

from __future__ import annotations

import fcntl
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Sequence
from pathlib import Path

CTRL_C = b"\x03"
PROGRAM = str(Path(sys.executable).with_name("routetrace"))


def screen(*words: str, columns: int = 80, lines: int = 24, code: int = 0) -> list[str]:
    """Run `routetrace` with both outputs at a terminal; return the lines that it shows."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
    known = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES", "NO_COLOR")}
    known = {name: text for name, text in known.items() if not name.startswith("ROUTETRACE_")}
    known |= {"COLUMNS": str(columns), "LINES": str(lines)}  # rich takes a dumb one for 80 x 25
    child = subprocess.Popen(
        [PROGRAM, *words], stdout=theirs, stderr=theirs, env={**known, "TERM": "dumb"}
    )
    os.close(theirs)
    seen = b""
    try:
        while part := os.read(ours, 4096):
            seen += part
    except OSError:  # how a pseudo-terminal says that its other end was closed
        pass
    os.close(ours)
    shown = [line.rstrip("\r") for line in seen.decode().split("\n")[:-1]]
    assert child.wait(60) == code, shown
    return shown


def typed(
    words: Sequence[str], answers: Sequence[tuple[bytes, bytes]], columns: int = 80, lines: int = 24
) -> tuple[bytes, int]:
    """Run `routetrace` at a terminal and type; return what it shows and its exit code.

    Args:
        words: the command.
        answers: words to wait for, each behind those before, and keys to type then.
        columns: width of the terminal.
        lines: its height.
    """
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
    known = {k: v for k, v in os.environ.items() if not k.startswith("ROUTETRACE_")}
    known = {k: v for k, v in known.items() if k not in ("COLUMNS", "LINES", "NO_COLOR")}
    child = subprocess.Popen(
        [PROGRAM, *words],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**known, "TERM": "xterm"},
    )
    os.close(theirs)
    seen, at, left = b"", 0, [*answers]
    try:
        while part := os.read(ours, 4096):
            seen += part
            while left and (found := seen.find(left[0][0], at)) >= 0:
                at = found + len(left[0][0])
                keys = left.pop(0)[1]
                if keys == CTRL_C:  # no key of a terminal that is not the child's own
                    child.send_signal(signal.SIGINT)
                else:
                    os.write(ours, keys)
    except OSError:  # how a pseudo-terminal says that its other end was closed
        pass
    os.close(ours)
    return seen, child.wait(60)
