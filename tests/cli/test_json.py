"""--json, --version and the shared options at every command, and errors for programs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import typer.main

from routetrace.cli.commands import app
from routetrace.page.serving import Page
from routetrace.server.testing import ServerProcess, run_server
from support.agents.feeder import Feeder
from support.commands import commands
from support.servers.client_server import LAYOUT, rows_of

IDS = rows_of(LAYOUT, 40, 1)


def paths(command: Any = None, words: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The words of every command, as typer has them."""
    command = command or typer.main.get_command(app)
    for name, one in getattr(command, "commands", {}).items():
        yield from paths(one, (*words, name))
    if words and not hasattr(command, "commands"):
        yield words


COMMANDS = sorted(paths())

#: Words after each command, with the exit code and the fields of each line that it prints.
CALLS: dict[str, tuple[tuple[str, ...], int, set[str]]] = {
    "get": (
        ("whole", "-o", "{tmp}/", "--force"),
        0,
        {"trace_id", "path", "rows", "bytes", "state"},
    ),
    "stat": (("whole",), 0, {"trace_id", "state", "coverage", "missing"}),
    "explain": (
        ("hole", "--position", "12"),
        0,
        {"trace_id", "rule", "row", "missing", "owner", "chain", "evidence", "refused", "remedy"},
    ),
    "list": ((), 0, {"trace_id", "state", "coverage", "missing_cells"}),
    "tail": (("whole",), 0, {"trace_id", "state", "token_start", "token_stop", "rows_per_second"}),
    "verify": (
        ("--all",),
        1,
        {"trace_id", "findings", "incarnations", "running", "cells", "bytes"},
    ),
    "diff": (("whole", "hole"), 0, {"a", "b", "cells", "differing", "by_layer", "worst"}),
    "view": (("hole", "-o", "{tmp}/v{n}.html"), 0, {"trace_id", "path", "bytes", "rows_with_ids"}),
    "runs": ((), 0, {"run"}),
    "agents": ((), 0, {"engine_id", "shard", "connected"}),
    "limits": ((), 0, {"owner", "name", "limit", "used", "held", "share"}),
    "experts": (("--all",), 0, {"layers"}),
    "delete": (("unknown", "--missing-ok"), 0, {"trace_id", "deleted"}),
    "retire": (("--through", "0"), 0, {"through", "num_deleted"}),
    "renew": (("whole",), 0, {"num_requested", "num_renewed"}),
    "forget-engine": (("gone{n}",), 0, {"engine_id", "num_forgotten"}),
    "page": (("--listen", "127.0.0.1:0"), 0, {"address", "target"}),
    "doctor": ((), 0, {"verdict", "subject", "details", "advice"}),
    "bench load": (
        ("--quick", "--tokens", "500", "--readers", "1", "--agents", "1", "--run", "bench-json"),
        0,
        {"ok", "failures", "rates"},
    ),
    "bench capacity": (
        ("--tokens-per-second", "1000"),
        0,
        {"servers", "disk_bytes_per_server", "cores_per_agent"},
    ),
}


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    """Run "json": a whole trace, and one with a hole."""
    with run_server(agent_timeout_seconds=3600) as server:
        feeder = Feeder(server.target, LAYOUT, run="json")
        feeder.set_weight_version(3)  # which retire --through 0 leaves
        handle = feeder.begin("whole", prompt_len=5)
        feeder.step(IDS, [[handle, 0, 40]])
        feeder.finish(handle, 41)
        handle = feeder.begin("hole", prompt_len=5)
        for start, stop in ((0, 10), (20, 40)):
            feeder.step(IDS[start:stop], [[handle, start, stop - start]])
        feeder.finish(handle, 41)
        feeder.close()
        for name in ("gone0", "gone1"):
            Feeder(server.target, LAYOUT, run="json", engine_id=name).close()
        yield server


@pytest.fixture
def cli(server, monkeypatch):
    # It would run until Ctrl-C.
    monkeypatch.setattr(Page, "run", lambda page: page._socket.close())
    return commands(monkeypatch, server.target, "json")


def objects(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def errors(text: str) -> list[dict[str, Any]]:
    """The errors on stderr, where notes for people stand as well."""
    return objects("\n".join(line for line in text.splitlines() if line.startswith("{")))


# ---------------------------------------------------------------------------- every command


def test_the_table_has_every_command():
    assert {" ".join(words) for words in COMMANDS} == CALLS.keys()


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_json_stands_before_and_after_every_command(cli, tmp_path, words):
    more, code, fields = CALLS[" ".join(words)]
    before = [word.format(tmp=tmp_path, n=0) for word in more]
    after = [word.format(tmp=tmp_path, n=1) for word in more]
    for call in (("--json", *words, *before), (*words, *after, "--json")):
        found = objects(cli(*call, code=code).stdout)
        assert found
        assert all(one.keys() >= fields for one in found)


@pytest.mark.parametrize("words", [("bench",), *COMMANDS], ids=" ".join)
def test_an_error_of_every_command_is_json(cli, words):
    for call in ((*words, "--nope", "--json"), ("--json", *words, "--nope")):
        done = cli(*call, code=2)
        assert done.stdout == ""
        (error,) = objects(done.stderr)
        assert error.keys() == {"error", "message", "field", "remedy"}
        assert (error["error"], error["field"]) == ("InvalidArgument", "--nope")


@pytest.mark.parametrize("words", [(), ("bench",), *COMMANDS], ids=" ".join)
def test_version_at_every_command(cli, words):
    assert cli(*words, "--version").stdout == f"{version('routetrace')}\n"
    assert cli("--json", *words, "--version").stdout == f"{version('routetrace')}\n"


@pytest.mark.parametrize(
    "words",
    [words for words in COMMANDS if words != ("bench", "capacity")],  # without a server
    ids=" ".join,
)
def test_options_of_the_connection_stand_before_every_command(cli, tmp_path, words):
    more = (word.format(tmp=tmp_path, n=0) for word in CALLS[" ".join(words)][0])
    before = ("--ca-file", "/none", "--run=bench-json")  # the only one that bench load takes
    code = 1 if words == ("doctor",) else 2
    assert "ca_file '/none' cannot be read" in cli(*before, *words, *more, code=code).output


# ---------------------------------------------------------------------------- results


def test_get_names_each_trace_and_its_file(cli, tmp_path):
    def written(*words: str) -> list[dict[str, Any]]:
        return objects(cli("get", "whole", *words, "--json").stdout)

    facts = {"trace_id": "whole", "rows": 40, "state": "complete"}
    for output, path in (("a.npz", "a.npz"), ("c/", "c/whole.npz"), ("b.parquet", "b.parquet")):
        (one,) = written("-o", f"{tmp_path}/{output}")
        file = tmp_path / path
        assert one == {**facts, "path": str(file), "bytes": file.stat().st_size}
    both = written("hole", "-o", f"{tmp_path}/d.parquet", "--missing", "mask")
    size = (tmp_path / "d.parquet").stat().st_size
    assert [(one["trace_id"], one["bytes"]) for one in both] == [("whole", size), ("hole", size)]


def test_get_prints_what_it_wrote_and_the_error_of_each_other_trace(cli, tmp_path):
    words = ("get", "whole", "hole", "unknown", "--json", "-o")
    done = cli(*words, f"{tmp_path}/", code=1)
    assert [one["trace_id"] for one in objects(done.stdout)] == ["whole"]
    found = [(e["error"], e.get("trace_id")) for e in errors(done.stderr)]
    assert found == [("Incomplete", "hole"), ("NotFound", "unknown"), ("RouteTraceError", None)]
    done = cli(*words, f"{tmp_path}/a.parquet", code=1)
    assert done.stdout == ""  # nothing is written
    assert len(errors(done.stderr)) == 3


def test_verify_prints_each_trace_with_its_findings(cli):
    found = objects(cli("verify", "whole", "hole", "unknown", "--json", code=1).stdout)
    assert [[f["wrong"] for f in one["findings"]] for one in found] == [
        [], ["missing"], ["not found"],
    ]  # fmt: skip
    cells = 40 * len(LAYOUT.layer_ids)
    assert [(one["trace_id"], one["incarnations"], one["cells"]) for one in found] == [
        ("whole", 1, cells), ("hole", 1, cells), ("unknown", 0, 0),
    ]  # fmt: skip


def test_delete_and_dry_runs(server, cli):
    feeder = Feeder(server.target, LAYOUT, run="json-going")
    for name in ("a", "b"):
        handle = feeder.begin(name, prompt_len=5)
        feeder.step(IDS[:10], [[handle, 0, 10]])
        feeder.finish(handle, 11)
    feeder.close()

    def going(*words: str, code: int = 0) -> Any:
        return cli(*words, "--json", "--run", "json-going", code=code)

    dry = {"trace_id": "a", "would_delete": True, "state": "complete", "rows": 10}
    assert objects(going("delete", "a", "--dry-run").stdout) == [dry]
    assert objects(going("delete", "a").stdout) == [{"trace_id": "a", "deleted": True}]
    done = going("delete", "a", "b", code=1)
    assert objects(done.stdout) == [{"trace_id": "b", "deleted": True}]
    (error,) = objects(done.stderr)
    assert (error["error"], error["trace_id"]) == ("NotFound", "a")
    done = going("delete", "a", "--missing-ok")
    assert objects(done.stdout) == [{"trace_id": "a", "deleted": False}]
    assert objects(going("renew", "a", code=1).stdout) == [{"num_requested": 1, "num_renewed": 0}]
    assert objects(going("retire", "--through", "3").stdout) == [
        {"through": 3, "num_deleted": 0, "num_unknown": 0}
    ]


def test_tail_prints_each_part_and_rows_as_before(cli):
    parts = objects(cli("tail", "hole", "--json", code=1).stdout)
    assert (parts[0]["token_start"], parts[-1]["token_stop"]) == (0, 40)
    assert parts[-1]["state"] == "incomplete"
    assert any(part["missing"] for part in parts)
    rows = cli("tail", "whole", "--rows").stdout
    assert cli("tail", "whole", "--rows", "--json").stdout == rows
    assert [one["position"] for one in objects(rows)] == list(range(40))


def test_tail_is_not_held_back_by_a_pipe(server):
    feeder = Feeder(server.target, LAYOUT, run="json-tail")
    handle = feeder.begin("live", prompt_len=5)
    feeder.step(IDS[:10], [[handle, 0, 10]])
    feeder.flush()
    program = str(Path(sys.executable).with_name("routetrace"))
    with subprocess.Popen(
        [program, "tail", "live", "--json", "--run", "json-tail", "--target", server.target],
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        try:
            assert json.loads(child.stdout.readline())["state"] == "running"
            feeder.finish(handle, 11)
            feeder.close()
            assert objects(child.stdout.read())[-1]["num_tokens"] == 11
            assert child.wait(20) == 0
        finally:
            child.kill()


# ---------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("words", "code", "error"),
    [
        (("stat", "unknown"), 1, {"error": "NotFound"}),
        (("stat", "whole", "--target", "http://x"), 2, {"field": "target"}),
        (("get", "whole"), 2, {"field": "-o"}),
        (("list", "--label", "group"), 2, {"field": "--label"}),
        (("get", "whole", "-o", "a.npz", "--layers", "x"), 2, {"field": "--layers"}),
        (("get", "whole", "-o", "a.npz", "--tokens", "x"), 2, {"field": "--tokens"}),
        (("list", "--limit", "x"), 2, {"field": "--limit"}),
        (("stat",), 2, {"field": "trace_id"}),
        (("nonsense",), 2, {"field": ""}),
        (("verify",), 2, {"field": ""}),
        (("experts", "unknown"), 1, {"error": "NotFound", "trace_id": "unknown"}),
        (("experts", "--npz", "/none.npz"), 1, {"error": "FileNotFoundError"}),
        (("bench", "capacity"), 2, {"field": "--tokens-per-second"}),
        (("bench", "load", "--run", "mine"), 2, {"field": "--run"}),
        (("bench",), 2, {"field": ""}),
        ((), 2, {"field": ""}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_errors_have_class_field_and_the_same_exit_code(cli, words, code, error):
    first, *_ = errors(cli("--json", *words, code=code).stderr)
    assert first.items() >= ({"error": "InvalidArgument"} if code == 2 else {}).items()
    assert first.items() >= error.items()
    plain = cli(*words, code=code) if words not in ((), ("bench",)) else None
    assert plain is None or not errors(plain.stderr)


def test_an_error_has_its_remedy(cli):
    (error,) = objects(cli("--json", "list", "--target", "http://x:1", code=2).stderr)
    assert error["remedy"]
    assert error["message"].endswith(error["remedy"])
