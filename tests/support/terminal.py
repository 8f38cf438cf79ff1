"""Runs commands at a pseudo-terminal of a size."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from pathlib import Path

PROGRAM = str(Path(sys.executable).with_name("routetrace"))


def screen(*words: str, columns: int = 80, lines: int = 24, code: int = 0) -> list[str]:
    """Run `routetrace` with both outputs at a terminal; return the lines that it shows."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
    known = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES", "NO_COLOR")}
    known = {name: text for name, text in known.items() if not name.startswith("ROUTETRACE_")}
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
