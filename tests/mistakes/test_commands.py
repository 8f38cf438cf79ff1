"""Mistakes on the command line: the exit code of each, and every word of its error."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from routetrace.client import __version__
from support.mistakes import Case, World, check, command, world


@pytest.fixture(scope="module")
def things() -> Iterator[World]:
    with world() as made:
        yield made


def ends(text: str) -> re.Pattern[str]:
    """Match an exit code and the words that an output ends with."""
    code, _, words = text.partition(": ")
    return re.compile(rf"{code}: (.* )?{re.escape(words)}")


# fmt: off
CASES = [
    Case(79, "options-before-the-command",
         lambda w: command("routetrace", "--target", w.target, "list"), "",
         re.compile(r"exit 0: .*\bdone\b.*")),
    # The cause is also logged, at once.
    Case(80, "closed-port",
         lambda w: command("routetrace", "list", "--target", w.dead, "--timeout", "1")
         .replace(w.dead, "DEAD"), "",
         ends("exit 1: routetrace: cannot connect to DEAD (connection refused); is "
              "routetrace-server running there?")),
    Case(81, "no-output", lambda w: command("routetrace", "get", "done", "--target", w.target), "",
         ends("exit 2: -o is required: FILE.npz, FILE.parquet or DIR/")),
    Case(82, "server-version", lambda w: command("routetrace-server", "--version"), "",
         ends(f"exit 0: {__version__}")),
    Case(83, "memory-limit", lambda w: command("routetrace-server", "--memory-limit", "-1"), "",
         ends("exit 2: memory_limit is '-1'; expected a size such as 16GiB, or 0")),
    Case(84, "data-dir", lambda w: command("routetrace-server", "--data-dir", "/proc/x"), "",
         ends("exit 1: cannot write to '/proc/x' (No such file or directory); choose a writable "
              "data_dir")),
]
# fmt: on


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_a_wrong_command_is_told(case: Case, things: World) -> None:
    check(case, things)


def test_every_row_of_the_table_has_a_case() -> None:
    files = Path(__file__).parent.glob("test_*.py")
    found = {int(n) for file in files for n in re.findall(r" Case\((\d+), ", file.read_text())}
    assert found == set(range(1, 85))
