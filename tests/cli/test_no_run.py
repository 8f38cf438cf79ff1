"""A run that does not exist: each command names those that do, and exits with 1."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import typer.main

from routetrace.cli.commands import app
from routetrace.cli.connection import Connection
from routetrace.cli.errors import describe
from routetrace.client import Security
from routetrace.server.testing import ServerProcess, run_server
from support.agents.feeder import Feeder
from support.commands import commands
from support.servers.client_server import LAYOUT, rows_of

#: Words after each command that names a run, in several ways where it looks in several.
CALLS: dict[str, tuple[tuple[str, ...], ...]] = {
    "get": (("a", "-o", "{tmp}/a.npz"), ("--label", "a=b", "-o", "{tmp}/a.npz")),
    "stat": (("a",),),
    "explain": (("a", "--position", "0"),),
    "list": ((), ("--label", "a=b")),
    "tail": (("a",),),
    "verify": (("--all",), ("a",)),
    "diff": (("a", "b"),),
    "view": (("a", "-o", "{tmp}/a.html"),),
    "agents": ((), ("--watch", "9")),
    "limits": ((),),
    "experts": (("--all",), ("--label", "a=b"), ("a",)),
    "delete": (("a",), ("a", "--dry-run")),
    "retire": (("--through", "1"), ("--through", "1", "--dry-run")),
    "renew": (("a",),),
    "forget-engine": (("e",),),
}
#: Commands for which it is no error.
EXEMPT = {
    "runs": "lists all",
    "page": "shows those that begin later",
    "doctor": "warns: engines may begin later",
    "bench load": "begins one",
}


def _with_run(command: Any = None, words: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield the commands that take --run."""
    command = command or typer.main.get_command(app)
    for name, one in getattr(command, "commands", {}).items():
        yield from _with_run(one, (*words, name))
    if words and any("--run" in param.opts for param in command.params):
        yield " ".join(words)


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    """Run "default" has a trace, run "err" an engine that has just begun."""
    with run_server(agent_timeout_seconds=3600) as server:
        feeder = Feeder(server.target, LAYOUT, run="default")
        handle = feeder.begin("a", prompt_len=5)
        feeder.step(rows_of(LAYOUT, 10), [[handle, 0, 10]])
        feeder.finish(handle, 11)
        feeder.close()
        begun = Feeder(server.target, LAYOUT, run="err")
        yield server
        begun.close()


@pytest.fixture
def cli(server, monkeypatch):
    return commands(monkeypatch, server.target, "typo")


def test_every_command_that_takes_a_run_is_listed():
    assert {*_with_run()} == CALLS.keys() | EXEMPT.keys()


@pytest.mark.parametrize(
    ("name", "words"),
    [(name, words) for name, calls in CALLS.items() for words in calls],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_the_runs_that_exist_are_named(cli, tmp_path, name, words):
    call = (*name.split(), *(word.format(tmp=tmp_path) for word in words))
    done = cli(*call, code=1)
    assert done.stdout == ""
    first, *more = done.stderr.splitlines()
    assert re.fullmatch(r"routetrace: (a: )?no run 'typo'; runs: default, err", first)
    assert all("failed" in line or line == "would delete nothing" for line in more)
    done = cli(*call, "--json", code=1)
    assert done.stdout == ""
    error = json.loads(done.stderr.splitlines()[0])
    expected = {
        "error": "NotFound",
        "message": "no run 'typo'; runs: default, err",
        "field": "run",
        "remedy": "",
    }
    assert error == expected | ({"trace_id": "a"} if "trace_id" in error else {})


def test_doctor_warns(cli):
    assert re.search(
        r"^warning  run 'typo': no run 'typo'; runs: default, err; check that agents use this run",
        cli("doctor").stdout,
        re.M,
    )


def test_a_run_without_traces_is_no_error(cli):
    assert cli("list", "--run", "err").stderr == "run 'err' has no traces\n"
    found = cli("list", "--run", "err", "--state", "complete").stderr
    assert found == "no such trace in run 'err'\n"
    empty = cli("experts", "--all", "--run", "err", code=1).stderr
    assert empty == "routetrace: run 'err' has no traces\n"
    assert cli("verify", "--all", "--run", "err").stderr.startswith("traces 0,")
    assert "1 agent, 1 connected" in cli("agents", "--run", "err").stderr
    assert cli("retire", "--through", "1", "--run", "err").stdout == "0 traces deleted\n"
    assert "held by run err" in cli("limits", "--run", "err").stderr


def test_many_runs_or_none_point_to_the_command_that_lists_them(monkeypatch):
    with run_server() as server:
        cli = commands(monkeypatch, server.target, "typo")
        none = (
            "routetrace: no run 'typo'; runs: none yet; `routetrace runs` lists those that have "
            "traces or agents\n"
        )
        assert cli("list", code=1).stderr == cli("stat", "a", code=1).stderr == none
        feeders = [Feeder(server.target, LAYOUT, run=f"run{at:02}") for at in range(21)]
        for words in (("list",), ("stat", "a")):  # names of the command, and of the server
            said = cli(*words, code=1).stderr
            assert said.endswith(", run18, run19; `routetrace runs` lists all\n")
        for feeder in feeders:
            feeder.close()


def test_a_run_beyond_those_that_a_server_names_exists(server):
    connection = Connection(server.target, "default", 9, Security())
    with connection.client() as client:
        info = connection.known_run(client)
        assert connection.known_run(client, replace(info, runs=())).num_traces == 1
        with pytest.raises(LookupError) as caught:
            connection.known_run(client, replace(info, runs=("b",), num_traces=0, num_agents=0))
    assert describe(caught.value) == "no run 'default'; runs: b"
