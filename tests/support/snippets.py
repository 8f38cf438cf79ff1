"""Runs the Python and shell snippets of a page in the order in which they stand.

A snippet that cannot run here has a comment before it that says why: `<!-- not run: docker -->`.
Only ports differ from what the page shows: each is replaced by a free one.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from routetrace.server.testing import free_ports

ROOT = Path(__file__).parents[2]

_SNIPPET = re.compile(
    r"^(?:<!-- not run: (?P<why>[^\n]*) -->\n)?```(?P<kind>python|sh)\n(?P<code>.*?)^```$",
    re.M | re.S,
)
_PORTS = re.compile(r"\b(7411|7443|9411)\b")
#: Starts a server in the background and returns once it is ready, so that a page goes on.
_SERVER = """#!/bin/bash
case "$1" in health|token|backup|restore|--help|--version) exec {program} "$@" ;; esac
ready="{folder}/ready.$$"
{program} "$@" --ready-file "$ready" > "{folder}/log.$$" 2>&1 < /dev/null &
pid=$!
echo $pid >> "{folder}/pids"
until [ -e "$ready" ]; do
  kill -0 $pid 2> /dev/null || {{ cat "{folder}/log.$$" >&2; exit 1; }}
  sleep 0.1
done
"""


class Snippet(NamedTuple):
    """A snippet of a page."""

    page: str
    line: int
    kind: str
    code: str
    why: str
    """Reason for which it is not run; "": it is."""


def snippets(page: str) -> list[Snippet]:
    """The Python and shell snippets of a page, in order."""
    text = (ROOT / page).read_text("utf-8")
    return [
        Snippet(page, text[: m.start("code")].count("\n") + 1, m["kind"], m["code"], m["why"] or "")
        for m in _SNIPPET.finditer(text)
    ]


class Reader:
    """Somebody who types a page in, in a clean directory.

    Args:
        folder: the directory; beside it lies what the reader does not see.
        ports: those that are taken already, by the port that the page shows.
    """

    def __init__(self, folder: Path, ports: dict[str, int] | None = None) -> None:
        self.folder = folder
        self.names: dict[str, Any] = {"__name__": "__main__"}
        self._ports = {port: free_ports(1) for port in ("7411", "7443", "9411")}
        self._ports |= ports or {}
        self._aside = folder.with_name(f"{folder.name}-aside")
        self._aside.mkdir()
        shim = self._aside / "routetrace-server"
        program = Path(sys.executable).with_name("routetrace-server")
        shim.write_text(_SERVER.format(program=program, folder=self._aside))
        shim.chmod(0o755)
        self.env = {k: v for k, v in os.environ.items() if not k.startswith("ROUTETRACE_")}
        here = Path(sys.executable).parent
        self.env["PATH"] = f"{self._aside}:{here}:{self.env['PATH']}"
        # Commands that name no address take the port of the page.
        for name in ("ROUTETRACE_TARGET", "ROUTETRACE_LISTEN"):
            self.env[name] = f"127.0.0.1:{self._ports['7411']}"

    def type(self, snippet: Snippet) -> None:
        """Run a snippet; fail with its place and output."""
        code = _PORTS.sub(lambda found: str(self._ports[found[1]]), snippet.code)
        where = f"{snippet.page}:{snippet.line}"
        if snippet.kind == "python":
            exec(compile("\n" * snippet.line + code, where, "exec"), self.names)
            return
        # What a snippet exports holds for those after it.
        script = f"set -euo pipefail\n{code}\nenv -0 > {self._aside}/env\n"
        done = subprocess.run(
            ["bash", "-c", script],
            cwd=self.folder,
            env=self.env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, f"{where}: exit code {done.returncode}\n{done.stdout}"
        pairs = (self._aside / "env").read_text().split("\0")
        self.env = dict(pair.split("=", 1) for pair in pairs if pair)

    def leave(self) -> None:
        """Close clients and end the servers that the page started."""
        for value in self.names.values():
            if type(value).__name__ == "RouteClient":
                value.close()
        pids = self._aside / "pids"
        for pid in pids.read_text().split() if pids.exists() else ():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGTERM)
