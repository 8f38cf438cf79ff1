"""`routetrace diff` against a server with two incarnations, a shifted copy, and files."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from routetrace.client import RouteClient
from routetrace.server.testing import ServerProcess, run_server
from support.agents.feeder import Feeder
from support.ranks.disagreement import MODELS, routed, shifted
from support.servers import forked

OF = routed(MODELS["deepseek"], [200], 5)
LAYOUT = OF.layout
ROWS = len(OF.engine[0])
Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with run_server(agent_timeout_seconds=3600) as server:
        feeder = Feeder(server.target, LAYOUT, run="diff")
        late = shifted(OF.engine[0], 1)
        for name, ids in (("a", OF.engine[0]), ("other", OF.trainer[0]), ("late#2", late)):
            handle = feeder.begin(name, prompt_len=1)
            feeder.step(ids, [(handle, 0, ROWS)])
            feeder.finish(handle, ROWS + 1)
        handle = feeder.begin("again", trace_id="a", prompt_len=1)
        feeder.step(OF.engine[0][:50], [(handle, 0, 50)])
        feeder.finish(handle, ROWS + 1)
        feeder.close()
        yield server


@pytest.fixture
def diff(server: ServerProcess) -> Run:
    def run(*words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        where = ("--target", server.target, "--run", "diff")
        done = forked.run("routetrace", "diff", *words, *where)
        assert done.returncode == code, done
        return done

    return run


def found(done: subprocess.CompletedProcess[str]) -> dict:
    [line] = done.stdout.splitlines()
    return json.loads(line)


def test_the_same_is_the_same(diff: Run):
    told = found(diff("a", "a", "--json"))
    assert (told["cells"], told["differing"]) == (ROWS * len(LAYOUT.layer_ids), 0)
    assert (told["worst"], told["diagnosis"]) == ([], None)
    assert "the same in" in diff("a", "a").stdout


def test_rows_that_differ_as_precisions_do(diff: Run):
    told = found(diff("a", "other", "--json", "--worst", "3"))
    sets = [np.sort(ids, axis=-1) for ids in (OF.engine[0], OF.trainer[0])]
    differing = int((sets[0] != sets[1]).any(axis=-1).sum())
    assert told["differing"] == differing > 0
    assert len(told["worst"]) == 3
    assert told["diagnosis"] is None
    text = diff("a", "other").stdout
    assert "no pattern" in text
    assert str(told["worst"][0]["position"]) in text


def test_a_shift_is_named_and_exits_with_1(diff: Run):
    done = diff("late#2#1", "other", code=1)
    assert "shifted by" in done.stdout
    assert "shifted by" in found(diff("late#2#1", "other", "--json", code=1))["diagnosis"]


def test_incarnations_and_policies(diff: Run):
    told = found(diff("a#1", "a#2@latest", "--json"))
    layers = len(LAYOUT.layer_ids)
    assert (told["cells"], told["differing"]) == (50 * layers, 0)
    assert told["missing"] == (ROWS - 50) * layers
    assert "has no incarnation 9" in diff("a", "a#9", code=1).stderr


def test_files(diff: Run, server: ServerProcess, tmp_path: Path):
    path = tmp_path / "trainer.npz"
    np.savez(path, topk_ids=OF.trainer[0])
    from_file = found(diff("a", str(path), "--json"))
    from_server = found(diff("a", "other", "--json"))
    for told in (from_file, from_server):
        del told["b"]
    assert from_file == from_server
    np.savez(
        path, topk_ids=OF.trainer[0][10:20, 1:3], layer_ids=LAYOUT.layer_ids[1:3],
        token_start=10, valid=np.ones((10, 2), bool),
    )  # fmt: skip
    told = found(diff("a", str(path), "--json"))
    assert (told["start"], told["stop"], told["cells"]) == (10, 20, 20)
    saved = tmp_path / "a.npz"
    where = ("--target", server.target, "--run", "diff")
    forked.run("routetrace", "get", "a", "-o", str(saved), *where).check_returncode()
    assert found(diff("a", str(saved), "--json"))["differing"] == 0


@pytest.mark.parametrize("content", [None, b"no file of arrays", {"other": np.zeros(3)}])
def test_files_that_cannot_be_read(diff: Run, tmp_path: Path, content: object):
    path = tmp_path / "bad.npz"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif isinstance(content, dict):
        np.savez(path, **content)
    error = diff("a", str(path), code=2).stderr
    assert str(path) in error
    assert "Traceback" not in error
    assert "comes second" in diff(str(path), "a", code=2).stderr


def test_a_trace_that_is_not_there(diff: Run, server: ServerProcess):
    assert "unknown" in diff("a", "unknown", code=1).stderr
    with RouteClient(server.target, run="diff") as client:
        assert {stat.trace_id for stat in client.find()} == {"a", "other", "late#2"}


def test_a_report_of_a_trainer_is_a_side(diff: Run, server: ServerProcess):
    with RouteClient(server.target, run="diff") as client:
        client.report_routing("a", OF.trainer[0], reporter="my rank", step=3, incarnation=1)
    same = found(diff("a#1", "other", "--json"))
    told = found(diff("a#1", "a@report:my rank", "--json"))
    assert told.pop("b") == "a@report:my rank"
    assert told == {name: value for name, value in same.items() if name != "b"}
    assert told["differing"] > 0
    back = found(diff("a@report:my rank", "a#1", "--json"))
    assert (back["cells"], back["differing"]) == (told["cells"], told["differing"])
    assert "no run" in diff("a", "a@report:unknown", code=1).stderr
