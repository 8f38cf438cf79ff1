"""Runs `make demo` and `make test` as on a fresh machine: a clean clone, an empty home directory.

The demo is interrupted during its installation and begun again. Each command must succeed,
announce its size, leave no process, and leave nothing in the clone or the home directory but what
git ignores and caches. Prints a table of times and download sizes. With several interpreters, the
demo runs with each. Needs the standard library alone:

    PYTHONPATH=tests python3 -m two_commands --command demo --python python3.10 --python python3.13
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
#: Environment variables that the package index may need; caches of the user are not among them.
INDEX = re.compile(
    r"PIP_(?!CACHE)|UV_(?!CACHE)|SSL_CERT_|REQUESTS_CA_BUNDLE|\w*_proxy$", re.IGNORECASE
)
PIP_CONFIG = Path.home() / ".config/pip/pip.conf"
#: Share by which the announced size of a download may differ from the measured one.
NEAR = 0.25


class Failed(Exception):
    """Something is not as it must be."""


class Line(NamedTuple):
    """Line of the table."""

    python: str
    command: str
    seconds: float
    megabytes: float
    announced: float
    at_most: bool
    """Whether less than that may have been downloaded."""

    @property
    def right(self) -> bool:
        """Whether the command announces its size."""
        lowest = 0 if self.at_most else (1 - NEAR) * self.announced
        return lowest <= self.megabytes <= (1 + NEAR) * self.announced

    def __str__(self) -> str:
        size = f"{'up to ' * self.at_most}{self.announced:.0f}"
        names = f"{self.python:<8} {self.command:<18}"
        return f"{names} {self.seconds:>6.0f} {self.megabytes:>6.0f} {size:>14}"


def environment(home: Path, python: str) -> dict[str, str]:
    """Return the environment of somebody who has just logged in."""
    kept = {name: value for name, value in os.environ.items() if INDEX.match(name)}
    if PIP_CONFIG.exists():
        kept.setdefault("PIP_CONFIG_FILE", str(PIP_CONFIG))
    path = os.pathsep.join(
        folder for folder in os.environ["PATH"].split(os.pathsep) if ".venv" not in folder
    )
    return {**kept, "PATH": path, "HOME": str(home), "LANG": "C.UTF-8", "PYTHON": python}


class Machine:
    """A clean clone and an empty home directory."""

    def __init__(self, folder: Path, python: str) -> None:
        self.clone, self.home = folder / "routetrace", folder / "home"
        self.home.mkdir()
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(self.clone)], check=True)
        asked = "import sys; print(sys.executable, sys.version.split()[0])"
        executable, self.version = self._output(python, "-c", asked).split()
        self._environment = environment(self.home, executable)

    def start(self, target: str) -> subprocess.Popen[str]:
        """Start `make target` as the leader of a session of its own."""
        return subprocess.Popen(
            ["make", f"PYTHON={self._environment['PYTHON']}", target],
            cwd=self.clone,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def interrupt(self, target: str, after: str) -> None:
        """Start `make target`, and press Ctrl-C when a line begins with `after`.

        Raises:
            Failed: if no line does, or the command succeeds.
        """
        process = self.start(target)
        assert process.stdout
        for line in process.stdout:
            if line.startswith(after):
                os.killpg(process.pid, signal.SIGINT)
                break
        else:
            code = process.wait()
            raise Failed(f"make {target} exited with {code}; no line began with {after!r}")
        process.stdout.read()
        if process.wait() == 0:
            raise Failed(f"make {target} succeeded in spite of Ctrl-C")
        print(f"make {target} was interrupted after {line.strip()!r}", flush=True)

    def run(self, target: str) -> Line:
        """Run `make target` to its end; print its output.

        Raises:
            Failed: if it fails, or leaves what it must not leave.
        """
        before, begun = self._installed(), time.monotonic()
        process = self.start(target)
        output = []
        assert process.stdout
        for line in process.stdout:
            output.append(line)
            print("   ", line, end="", flush=True)
        if code := process.wait():
            raise Failed(f"make {target} exited with {code}")
        seconds = time.monotonic() - begun
        if left := left_behind(process.pid, self.clone):
            raise Failed(f"make {target} left processes: {left}")
        if found := self._output("git", "status", "--porcelain"):
            raise Failed(f"make {target} left files in the clone:\n{found}")
        # pip asks `rustc --version`, which may be rustup's; that and matplotlib make directories.
        entries = {*self.home.iterdir(), *self.home.glob(".config/*")} - {self.home / ".config"}
        found = {str(entry.relative_to(self.home)) for entry in entries}
        if found := found - {".cache", ".rustup", ".config/matplotlib"}:
            raise Failed(f"make {target} left files in the home directory: {found}")
        new = [made for name, made in self._installed().items() if name not in before]
        with ThreadPoolExecutor() as pool:
            megabytes = sum(pool.map(wheel_size, new)) / 1e6
        return Line(self.version, f"make {target}", seconds, megabytes, *announced("".join(output)))

    def _output(self, *command: str) -> str:
        return subprocess.run(
            command, cwd=self.clone, check=True, stdout=subprocess.PIPE, text=True
        ).stdout

    def _installed(self) -> dict[str, Distribution]:
        folders = self.clone.glob(".venv/lib/python*/site-packages")
        found = distributions(path=[str(folder) for folder in folders])
        return {f"{one.metadata['Name']} {one.version}": one for one in found}


def announced(output: str) -> tuple[float, bool]:
    """Return the size in MB that a command announces, and whether that is an upper bound."""
    found = re.findall(r"^Installing .*?: (up to )?(\d+) (MB|GB)", output, re.MULTILINE)
    if "builds for cpu cannot be reached" in output:
        del found[0]  # the CPU build of torch
    megabytes = sum(int(size) * (1000 if unit == "GB" else 1) for _, size, unit in found)
    return megabytes, any(bound for bound, _, _ in found)


def wheel_size(distribution: Distribution) -> int:
    """Return the size of its files, compressed as in a wheel."""
    size = 0
    for file in distribution.files or ():
        path = Path(str(file.locate()))
        if path.suffix != ".pyc" and path.is_file():
            packer = zlib.compressobj(6, zlib.DEFLATED, -15)
            with path.open("rb") as content:
                while block := content.read(1 << 20):
                    size += len(packer.compress(block))
            size += len(packer.flush())
    return size


def left_behind(session: int, clone: Path, seconds: float = 5) -> list[str]:
    """Return the command lines of processes of a command that do not end within some seconds."""
    deadline = time.monotonic() + seconds
    while (found := processes_of(session, clone)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return found


def processes_of(session: int, clone: Path) -> list[str]:
    """Return the command lines of the processes of a session, or that name a path in the clone.

    Some have a session of their own. Ended ones that no process has waited for are left out; where
    there is no /proc, all are.
    """
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            state, _, _, its_session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
            command = (entry / "cmdline").read_bytes().decode(errors="replace").replace("\0", " ")
            if state != "Z" and (int(its_session) == session or f"{clone}/" in command):
                found.append(command)
    return found


def run(python: str, commands: list[str]) -> list[Line]:
    """Run the commands with one interpreter."""
    with tempfile.TemporaryDirectory(prefix="routetrace-two-commands-") as folder:
        machine = Machine(Path(folder), python)
        print(f"== Python {machine.version}", flush=True)
        machine.interrupt(commands[0], after="Installing")
        lines = [machine.run(command) for command in commands]
        if "demo" in commands:
            again = machine.run("demo")
            if again.megabytes:
                raise Failed("make demo installs something when it is repeated")
            lines.append(again._replace(command="make demo, again"))
        return lines


def main() -> int:
    """Return 1 if a command fails."""
    parser = argparse.ArgumentParser("two_commands", description=__doc__)
    parser.add_argument("--command", action="append", choices=("demo", "test"))
    parser.add_argument("--python", action="append", help="interpreter; by default this one")
    args = parser.parse_args()
    commands = args.command or ["demo", "test"]
    # In the background of a shell it is ignored, by children as well, and Ctrl-C would do nothing.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        lines = run((args.python or [sys.executable])[0], commands)
        for python in (args.python or [])[1:]:
            lines += run(python, ["demo"])
    except Failed as error:
        print(f"two_commands: {error}", file=sys.stderr)
        return 1
    print(f"\n{'Python':<8} {'command':<18} {'s':>6} {'MB':>6} {'announced, MB':>14}")
    print(*lines, sep="\n")
    wrong = [line for line in lines if not line.right]
    for line in wrong:
        print(f"two_commands: {line.command} announces {line.announced:.0f} MB", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
