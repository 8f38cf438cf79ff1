"""The `routetrace` command against a real server that holds known routing."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from routetrace.cli.arguments import layers_of, tokens_of
from routetrace.cli.commands import app
from routetrace.cli.facts import layers_text
from routetrace.cli.files import file_name, parquet_table
from routetrace.client import RouteClient, Security, Trace
from routetrace.codec.frame import encode_frame
from routetrace.common.layout import ModelLayout
from routetrace.server.access.tokens import new_token
from routetrace.server.testing import ServerProcess, run_server
from routetrace.v1 import routetrace_pb2 as pb
from support.agents.feeder import Feeder
from support.agents.simulated import drive
from support.commands import commands
from support.servers.client_server import LAYOUT, ScriptedServer, rows_of, truth
from support.terminal import typed
from support.waiting import wait_for

PROGRAM = str(Path(sys.executable).with_name("routetrace"))
NUM_ROWS = 300
IDS = rows_of(LAYOUT, NUM_ROWS, 1)
#: Of everything that a file name or a terminal could take for something else.
ODD = "../b\x1b[31m [red]:smile: \n%2F"
HOLE = (20, 30)


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    """Run "cli": two whole traces, one with a hole, one that runs."""
    with run_server(agent_timeout_seconds=3600) as server:
        feeder = Feeder(server.target, LAYOUT, run="cli")
        for name in ("whole", ODD):
            handle = feeder.begin(
                name, prompt_len=100, labels={"group": "g0"}, prompt_token_ids=list(range(100))
            )
            feeder.set_weight_version(3)
            feeder.step(IDS[:200], [[handle, 0, 200]])
            feeder.set_weight_version(4)
            feeder.step(IDS[200:], [[handle, 200, 100]])
            feeder.finish(handle, NUM_ROWS + 1)
        handle = feeder.begin("hole", prompt_len=10, labels={"group": "g1"})
        for start, stop in ((0, HOLE[0]), (HOLE[1], 40)):
            feeder.step(IDS[start:stop], [[handle, start, stop - start]])
        feeder.finish(handle, 41)
        handle = feeder.begin("running", prompt_len=10)
        feeder.step(IDS[:20], [[handle, 0, 20]])
        feeder.close()
        yield server


@pytest.fixture
def cli(server, monkeypatch):
    """Function that runs a command in this process and returns CliRunner's result."""
    return commands(monkeypatch, server.target, "cli")


@pytest.fixture
def client(server) -> Iterator[RouteClient]:
    with RouteClient(server.target, run="cli") as client:
        yield client


def process(server, *words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run the installed command."""
    command = [PROGRAM, *words, "--target", server.target, "--run", "cli"]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, **options
    )


# ---------------------------------------------------------------------------- get: npz


def assert_holds(path: Path, trace: Trace) -> None:
    with np.load(path, allow_pickle=False) as file:
        for name in ("topk_ids", "valid", "token_digests"):
            np.testing.assert_array_equal(file[name], getattr(trace, name))
            assert file[name].dtype == getattr(trace, name).dtype
        assert tuple(file["layer_ids"]) == trace.layer_ids
        assert tuple(map(tuple, file["weight_versions"].tolist())) == trace.weight_versions
        facts = json.loads(str(file["facts"]))
    assert (facts["trace_id"], facts["run"], facts["state"]) == (
        trace.trace_id,
        trace.run,
        trace.state.value,
    )
    assert (facts["token_start"], facts["token_stop"]) == (trace.token_start, trace.token_stop)
    assert facts["num_tokens"] == trace.num_tokens
    assert facts["labels"] == trace.labels
    missing = [
        (m["start"], m["stop"], tuple(m["layer_ids"]), m["reason"]) for m in facts["missing"]
    ]
    assert missing == [(m.start, m.stop, m.layer_ids, m.reason) for m in trace.missing]


def test_npz_round_trip(cli, client, tmp_path):
    cli("get", "whole", "-o", str(tmp_path / "a.npz"))
    trace = client.get("whole")
    np.testing.assert_array_equal(trace.topk_ids, IDS)
    assert_holds(tmp_path / "a.npz", trace)
    assert [path.name for path in tmp_path.iterdir()] == ["a.npz"]


def test_npz_of_a_cut_and_masked_trace(cli, client, tmp_path):
    path = tmp_path / "a.npz"
    words = ("--layers", "2-4", "--tokens", "15:35", "--missing", "mask", "--policy", "latest")
    # A range of layers names absolute ids: 3 is a dense layer.
    done = cli("get", "hole", "-o", str(path), *words, code=1)
    assert "layer_ids" in done.output
    cli("get", "hole", "-o", str(path), "--layers", "2,4", *words[2:])
    cut = client.get("hole", layer_ids=(2, 4), token_start=15, token_stop=35, missing="mask")
    assert cut.coverage == 0.5
    assert_holds(path, cut)


def test_weight_version_and_incarnation_are_asked_for(cli, client, tmp_path):
    words = ("--weight-version", "4", "--incarnation", "1", "--missing", "mask")
    cli("get", "whole", "-o", str(tmp_path / "a.npz"), *words)
    assert_holds(
        tmp_path / "a.npz",
        client.get("whole", weight_version=4, incarnation=1, missing="mask"),
    )


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=25)
def test_any_trace_survives_npz_and_parquet(seed, tmp_path_factory):
    import random

    rng = random.Random(seed)
    layout = rng.choice([LAYOUT, ModelLayout((0, 3), 4, 300, 2)])
    made = truth(rng.randint(1, 40), layout=layout, rng=rng)
    path = tmp_path_factory.mktemp("npz") / "a.npz"
    with ScriptedServer() as scripted:
        scripted.serve(made)
        done = CliRunner().invoke(
            app, ["get", "req", "-o", str(path), "--missing", "mask", "--target", scripted.target]
        )
        assert done.exit_code == 0, done.output
        with RouteClient(scripted.target) as client:
            trace = client.get("req", missing="mask")
    assert_holds(path, trace)
    np.testing.assert_array_equal(trace.topk_ids[trace.valid], made.ids[made.valid])
    assert_table_holds(parquet_table(trace), {"req": trace})


# ---------------------------------------------------------------------------- get: Parquet


def assert_table_holds(table, traces: dict[str, Trace]) -> None:
    """Compare cell by cell: the table has one row per token and layer."""
    found = {(r["trace_id"], r["position"], r["layer"]): r for r in table.to_pylist()}
    assert len(found) == table.num_rows == sum(t.valid.size for t in traces.values())
    for name, trace in traces.items():
        versions = dict.fromkeys(range(trace.token_start, trace.token_stop))
        for start, stop, version in trace.weight_versions:
            for position in range(start, stop):
                versions[position] = max(version, versions[position] or 0)
        for i, position in enumerate(versions):
            for j, layer in enumerate(trace.layer_ids):
                row = found[name, position, layer]
                ids = trace.topk_ids[i, j].tolist() if trace.valid[i, j] else None
                assert row["topk_ids"] == ids
                assert row["weight_version"] == versions[position]


def test_parquet_holds_all_traces_of_a_label(cli, client, tmp_path):
    path = tmp_path / "a.parquet"
    cli("get", "--label", "group=g0", "-o", str(path))
    traces = {name: client.get(name) for name in ("whole", ODD)}
    assert_table_holds(pq.read_table(path), traces)
    assert [path.name for path in tmp_path.iterdir()] == ["a.parquet"]


def test_parquet_marks_missing_cells_as_null(cli, client, tmp_path):
    path = tmp_path / "a.parquet"
    cli("get", "hole", "whole", "-o", str(path), "--missing", "mask")
    table = pq.read_table(path)
    assert table["topk_ids"].null_count == (HOLE[1] - HOLE[0]) * len(LAYOUT.layer_ids)
    traces = {name: client.get(name, missing="mask") for name in ("hole", "whole")}
    assert_table_holds(table, traces)


def test_one_parquet_file_takes_one_kind_of_model(cli, tmp_path):
    with ScriptedServer() as scripted:
        scripted.serve(
            truth(trace_id="a"), truth(layout=ModelLayout((0, 3), 4, 300, 2), trace_id="b")
        )
        words = ("get", "a", "b", "--target", scripted.target, "-o")
        assert "top-3 of 40" in cli(*words, str(tmp_path / "a.parquet"), code=2).output
        assert not list(tmp_path.iterdir())
        cli(*words, f"{tmp_path}/")
        assert len(list(tmp_path.iterdir())) == 2


def test_parquet_without_pyarrow_says_what_to_install(cli, tmp_path, monkeypatch):
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "pyarrow" else find(name)
    )
    done = cli("get", "whole", "-o", str(tmp_path / "a.parquet"), code=2)
    assert "pip install pyarrow" in done.output


# ---------------------------------------------------------------------------- get: outcomes


def test_directory_keeps_what_could_be_had(cli, client, tmp_path):
    out = tmp_path / "deep/er"
    done = cli("get", "whole", "hole", ODD, "unknown", "-o", f"{out}/", code=1)
    assert "2 of 4 traces failed" in done.output
    assert "not_captured" in done.output
    files = {unquote(path.name.removesuffix(".npz")): path for path in out.iterdir()}
    assert set(files) == {"whole", ODD}
    for name, path in files.items():
        assert_holds(path, client.get(name))


@pytest.mark.parametrize("output", ["a.npz", "a.parquet"])
def test_a_file_is_there_whole_or_not_at_all(cli, tmp_path, output):
    old = tmp_path / output
    old.write_bytes(b"what was there before")
    words = ["hole"] if output == "a.npz" else ["whole", "hole"]
    done = cli("get", *words, "-o", str(old), "--force", code=1)
    assert "is not written" in done.output
    assert old.read_bytes() == b"what was there before"
    assert list(tmp_path.iterdir()) == [old]


def test_interrupted_get_leaves_nothing(server, tmp_path):
    out = tmp_path / "a.parquet"
    child = subprocess.Popen(
        [PROGRAM, "get", "whole", "running", "-o", str(out), "--wait-for", "end", "--run", "cli"],
        env={**os.environ, "ROUTETRACE_TARGET": server.target},
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_for(lambda: list(tmp_path.iterdir()))  # its unfinished file
        child.send_signal(signal.SIGTERM)
        assert child.wait(20) != 0
    finally:
        child.kill()
        child.wait()
    assert not list(tmp_path.iterdir())


def test_get_waits_for_the_end(server, cli, client, tmp_path):
    feeder = Feeder(server.target, LAYOUT, run="cli", engine_id="late")
    handle = feeder.begin("late", prompt_len=10)
    feeder.step(IDS[:50], [[handle, 0, 50]])
    feeder.flush()
    get = ["get", "late", "-o", str(tmp_path / "a.npz"), "--wait-for", "end"]
    done = cli(*get, "--timeout", "1", code=1)
    assert "did not end within 1 s" in done.output

    def end() -> None:
        feeder.finish(handle, 51)
        feeder.close()

    timer = threading.Timer(0.2, end)
    timer.start()
    cli(*get, "--timeout", "30")
    timer.join()
    assert_holds(tmp_path / "a.npz", client.get("late"))
    cli("delete", "late")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["get", "whole"], "-o is required"),
        (["get", "-o", "a.npz"], "trace ids, or --label"),
        (["get", "a", "--label", "b=c", "-o", "a.npz"], "trace ids, or --label"),
        (["get", "a", "b", "-o", "a.npz"], "to hold several traces"),
        (["get", "a", "-o", "a.csv"], "a.csv"),
        (["get", "a", "-o", "/nowhere/a.npz"], "/nowhere is not a directory"),
        (["get", "a", "-o", "a.npz", "--layers", "3-"], "layer ids"),
        (["get", "a", "-o", "a.npz", "--tokens", "5"], "start:stop"),
        (["get", "a", "-o", "a.npz", "--tokens", "9:5"], "token_stop"),
        (["get", "a", "b", "-o", "x/", "--incarnation", "1"], "one trace id"),
        (["get", "a", "-o", "a.npz", "--policy", "newest"], "as_sampled"),
        (["list", "--label", "group"], "key=value"),
        (["list", "--state", "gone"], "incomplete"),
        (["verify"], "--all"),
        (["renew", "a", "--ttl", "0"], "1"),
        (["nonsense"], "nonsense"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_usage_errors_exit_with_2(cli, tmp_path, monkeypatch, words, said):
    monkeypatch.chdir(tmp_path)
    assert said in re.sub(r"[\s│]+", " ", cli(*words, code=2).output)
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------------------- stat, list


def test_stat_shows_facts_and_missing_ranges(cli):
    said = cli("stat", "hole").output
    assert re.search(r"coverage +75.00%", said)
    assert re.search(r"20:30 +1-2,4-5,7 +not_captured", said)
    assert re.search(r"weights +3..4", cli("stat", "whole").output)
    value = json.loads(cli("stat", "hole", "--json").output)
    assert value["coverage"] == 0.75
    ranges = {"start": 20, "stop": 30, "layer_ids": [1, 2, 4, 5, 7], "reason": "not_captured"}
    assert value["missing"] == [ranges]
    assert value["missing_cells"] == {"not_captured": 50}
    assert re.search(r"missing +50 not_captured", said)
    assert "missing" not in cli("stat", "whole").output


def test_list_shows_completeness(cli, client):
    done = cli("list")
    shares = re.findall(r"^(whole|hole|running).*? (\d+ %|[\d.]+%) ", done.stdout, re.M)
    assert shares == [("running", "100 %"), ("hole", "75.00%"), ("whole", "100 %")]
    # 20 + 40 + 300 + 300 rows of 5 layers.
    assert done.stderr == (
        "4 traces: 1 running, 1 incomplete, 2 complete; coverage 98.48%\n"
        "missing cells: 50 not_captured\n"
    )
    for found in client.find():
        one = client.stat(found.trace_id)
        assert (found.missing_cells, found.coverage) == (one.missing_cells, one.coverage)
    (line,) = cli("list", "--json", "--label", "group=g1").stdout.splitlines()
    assert json.loads(line)["missing_cells"] == {"not_captured": 50}
    assert json.loads(line)["coverage"] == 0.75


def test_list_filters_and_limits(cli):
    def ids(*words: str) -> list[str]:
        lines = cli("list", "--json", *words).output.splitlines()
        return [json.loads(line)["trace_id"] for line in lines]

    assert ids() == ["running", "hole", ODD, "whole"]
    assert ids("--label", "group=g0") == [ODD, "whole"]
    assert ids("--state", "running", "--state", "incomplete") == ["running", "hole"]
    done = cli("list", "--limit", "2")
    assert "more than 2" in done.stderr
    assert len(done.stdout.splitlines()) == 3
    assert "more than" not in cli("list", "--limit", "4").output


def test_nothing_printed_is_obeyed_by_a_terminal(cli):
    said = cli("list").output + cli("stat", ODD).output
    assert "\x1b" not in said
    assert said.count("../b\\x1b[31m [red]:smile: \\x0a%2F") == 2


# ---------------------------------------------------------------------------- tail


def test_tail_counts_what_comes_until_the_end(server, cli):
    feeder = Feeder(server.target, LAYOUT, run="cli", engine_id="tail")
    handle = feeder.begin("tailed", prompt_len=10)
    feeder.step(IDS[:50], [[handle, 0, 50]])
    feeder.flush()
    child = subprocess.Popen(
        [PROGRAM, "tail", "tailed", "--run", "cli", "--target", server.target],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        # Rows that were there before have no rate.
        assert child.stdout.readline() == "[0, 50)  50 rows, 100.0% valid\n"
        feeder.step(IDS[50:80], [[handle, 50, 30]])
        feeder.finish(handle, 81)
        feeder.close()
        line = child.stdout.readline()
        assert re.fullmatch(r"\[50, 80\)  30 rows, 100\.0% valid, [\d,]+ rows/s\n", line)
        assert child.stdout.read() == "complete, stop: 81 tokens, 80 rows\n"
        assert child.wait(20) == 0
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
    cli("delete", "tailed")


def test_tail_prints_rows_with_null_where_they_are_missing(cli):
    done = cli("tail", "hole", "--rows", "--layers", "2,7", "--tokens", "28:32", code=1)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["position"] for row in rows] == [28, 29, 30, 31]
    for row in rows:
        at = row["position"]
        for layer, column in (("2", 1), ("7", 4)):
            there = not HOLE[0] <= at < HOLE[1]
            assert row["topk_ids"][layer] == (IDS[at, column].tolist() if there else None)


def test_a_closed_pipe_ends_tail_without_a_word(server):
    command = f"{PROGRAM} tail whole --rows --run cli --target {server.target} | head -n 1"
    done = subprocess.run(
        command, shell=True, capture_output=True, text=True, timeout=60, check=False
    )
    assert json.loads(done.stdout)["position"] == 0
    assert done.stderr == ""


# ---------------------------------------------------------------------------- verify


def test_verify_finds_holes_and_nothing_else(cli):
    done = cli("verify", "--all", "--json", code=1)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [
        (one["trace_id"], finding["wrong"]) for one in found for finding in one["findings"]
    ] == [("hole", "missing")]
    assert "traces 4, incarnations 4, running 1" in done.stderr
    assert "defective traces: 0" in cli("verify", "whole", "running").stderr
    done = cli("verify", "unknown", code=1)
    assert "not found" in done.stdout
    assert done.stderr.endswith("defective traces: 0, not there: 1\n")


def test_verify_is_content_with_what_simulated_engines_did(server, cli):
    """Preemptions, prefix hits and rejected drafts are not wrong."""
    drive(server.target, 5, "simulated")
    with RouteClient(server.target, run="simulated") as client:
        lost = {
            stat.trace_id
            for stat in client.find()
            if any(m.reason != "not_yet" for m in client.stat(stat.trace_id).missing)
        }
    done = cli("verify", "--all", "--json", "--run", "simulated", code=int(bool(lost)))
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert {one["trace_id"] for one in found if one["findings"]} == lost
    assert {finding["wrong"] for one in found for finding in one["findings"]} <= {"missing"}
    assert "traces 25," in done.stderr


def test_verify_reads_every_incarnation(server, cli):
    feeder = Feeder(server.target, LAYOUT, run="twice")
    for seed, name in enumerate(("first", "second")):
        tokens = [seed + 1] * 31
        handle = feeder.begin(name, trace_id="both", prompt_len=5, prompt_token_ids=tokens[:5])
        feeder.step(IDS[:30] if seed else IDS[:10], [[handle, 0, 30 if seed else 10]])
        feeder.finish(handle, 31, token_ids=tokens)
    feeder.close()
    # The newest is whole; the one before lacks rows.
    done = cli("verify", "both", "--run", "twice", code=1)
    assert "incarnation 1: positions [10, 30)" in done.stdout
    assert "traces 1, incarnations 2" in done.stderr


@pytest.mark.parametrize("where", ["ids", "checksum"])
def test_verify_finds_damage(cli, where, monkeypatch):
    """Bytes that do not match their checksum, and rows that no router can choose."""
    made = truth(40, trace_id="bad")
    if where == "ids":
        made.ids[7, 2] = made.ids[7, 2, 0]
        monkeypatch.setattr(
            "support.servers.client_server.encode_frame", partial(encode_frame, validate=False)
        )

    def answer(request: pb.GetTraceRequest, context: Any) -> Iterator[pb.GetTraceResponse]:
        for response in made.responses(request):
            if where == "checksum" and response.payload:
                payload = bytearray(response.payload)
                payload[-1] ^= 1
                response.payload = bytes(payload)
            yield response

    with ScriptedServer() as scripted:
        scripted.script["GetTrace"] = answer
        done = cli("verify", "bad", "--json", "--target", scripted.target, code=1)
    assert json.loads(done.stdout)["findings"][0]["wrong"] == "corrupt"


# ---------------------------------------------------------------------------- deletion


def test_delete_retire_and_renew(server, cli):
    feeder = Feeder(server.target, LAYOUT, run="going")
    for version in (1, 2, 3):
        feeder.set_weight_version(version)
        handle = feeder.begin(f"v{version}")
        feeder.step(IDS[:5], [[handle, 0, 5]])
        feeder.finish(handle, 6)
    feeder.close()
    run = ("--run", "going")

    def expires() -> float:
        found = json.loads(cli("stat", "v3", "--json", *run).stdout)
        return datetime.fromisoformat(found["expires_at"]).timestamp()

    before = expires()
    cli("renew", "v3", "--ttl", "900000", *run)
    assert expires() > before + 800000
    done = cli("renew", "v3", "unknown", "unknown", *run, code=1)
    assert done.stdout == "1 of 2 traces renewed\n"
    assert (
        done.stderr == "routetrace: unknown: trace 'unknown' is not in run 'going'; check --run\n"
    )
    assert cli("renew", "v3", *run).stdout == "1 of 1 trace renewed\n"
    assert cli("retire", "--through", "1", *run).stdout == "1 trace deleted\n"
    done = cli("renew", "v1", "v3", *run, code=1)
    assert re.fullmatch(
        r"routetrace: v1: trace 'v1' of run 'going' was retired at \S+: .*\n", done.stderr
    )
    assert "unknown" in cli("delete", "v2", "unknown", *run, code=1).stderr
    left = [json.loads(line) for line in cli("list", "--json", *run).stdout.splitlines()]
    assert [value["trace_id"] for value in left] == ["v3"]


# ---------------------------------------------------------------------------- doctor


def test_doctor_finds_nothing_wrong(cli):
    said = cli("doctor").stdout
    for line in ("health: SERVING", "clock: ", "server: ", "run 'cli': 4 traces"):
        assert re.search(rf"^ok +{line}", said, re.M), said
    assert "problem" not in said
    assert "check that agents use this run" in cli("doctor", "--run", "empty").stdout


def test_doctor_names_an_allocator_under_which_vllm_takes_no_connector(tmp_path, cli, monkeypatch):
    setting = "garbage_collection_threshold:0.8,expandable_segments:True"
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", setting)
    assert "allocator" not in cli("doctor").stdout  # a machine without vLLM
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    said = cli("doctor").stdout
    assert re.search(
        r"^warning +allocator: .*PYTORCH_CUDA_ALLOC_CONF.*ROUTETRACE_VLLM=1", said, re.M
    )
    for name, value in (("CUDA_", setting.replace("True", "False")), ("", setting)):
        monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
        monkeypatch.setenv(f"PYTORCH_{name}ALLOC_CONF", value)
        assert "allocator" not in cli("doctor").stdout


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("127.0.0.1:9", r"^problem +connection: .*--listen"),
        ("no-such-host.invalid:7411", r"^problem +name: .*--target"),
    ],
)
def test_doctor_says_why_a_server_is_unreachable(cli, target, said):
    assert re.search(said, cli("doctor", "--target", target, code=1).stdout, re.M)


@pytest.mark.slow
@pytest.mark.parametrize("tls", [(), ("--tls",)])
def test_doctor_names_a_server_that_does_not_answer(cli, tls):
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        target = f"127.0.0.1:{silent.getsockname()[1]}"
        said = cli("doctor", "--target", target, *tls, code=1).stdout
    assert f"connection: {target} takes connections, and does not answer in 5 s; check" in said


def test_doctor_finds_a_server_without_tls(cli):
    said = cli("doctor", "--tls", code=1).stdout
    assert re.search(r"^problem +TLS: .*--tls-cert", said, re.M)


def test_doctor_says_what_a_token_lacks(tmp_path, cli):
    token, digest = new_token()
    (tmp_path / "token").write_text(token)
    (tmp_path / "tokens.toml").write_text(
        f'[[token]]\nname = "t"\nsha256 = "{digest}"\nscopes = ["read"]\nruns = ["cli"]\n'
    )
    with run_server(tokens_file=tmp_path / "tokens.toml") as guarded:
        words = ("doctor", "--target", guarded.target)
        said = cli(*words, code=1).stdout
        assert re.search(r"^problem +token: .*--token-file", said, re.M)
        given = ("--token-file", str(tmp_path / "token"))
        assert re.search(r"^ok +token: ", cli(*words, *given).stdout, re.M)
        said = cli(*words, *given, "--run", "foreign", code=1).stdout
        assert re.search(r"^problem +token: .*run 'foreign'", said, re.M)
        assert token not in said


def test_doctor_finds_tls(tmp_path, cli):
    import trustme

    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    issued = authority.issue_cert("127.0.0.1", "localhost")
    issued.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    (tmp_path / "key.pem").touch(0o600)
    issued.private_key_pem.write_to_path(tmp_path / "key.pem")
    with run_server(tls_cert=tmp_path / "cert.pem", tls_key=tmp_path / "key.pem") as secure:
        words = ("doctor", "--target", secure.target)
        assert "--ca-file" in cli(*words, code=1).stdout
        said = cli(*words, "--ca-file", str(tmp_path / "ca.pem")).stdout
        assert re.search(r"^ok +TLS: .* days$", said, re.M)
        wrong = cli("list", "--target", secure.target, "--timeout", "2", code=1)
        assert len(wrong.stderr.splitlines()) == 1
    assert "cert_file" in cli("list", "--key-file", str(tmp_path / "key.pem"), code=2).stderr


def test_files_are_replaced_with_force_alone(cli, tmp_path):
    for output in ("a.npz", "b.parquet", "c/"):
        words = ("get", "whole", "-o", f"{tmp_path}/{output}")
        cli(*words)
        (path,) = [p for p in (tmp_path / output, tmp_path / output / "whole.npz") if p.is_file()]
        before = path.stat().st_mtime_ns
        done = cli(*words, code=2)
        assert done.stderr == (
            f"routetrace: --output is {path}; expected no such file yet, or --force\n"
        )
        assert path.stat().st_mtime_ns == before
        cli(*words, "--force")
        assert path.stat().st_mtime_ns > before
    cli("get", "hole", "-o", f"{tmp_path}/c/", "--missing", "mask")  # another file of it


@pytest.mark.parametrize("answer", [b"y", b"", b"n", b"\x04"])
def test_at_a_terminal_get_asks_before_it_replaces(server, tmp_path, answer):
    for name in ("whole.npz", "hole.npz"):
        (tmp_path / name).write_bytes(b"old")
    words = ["get", "whole", "hole", "-o", f"{tmp_path}/", "--missing", "mask"]
    words += ["--target", server.target, "--run", "cli"]
    keys = answer if answer == b"\x04" else answer + b"\n"
    seen, code = typed(words, [(b"[y/N]", keys)], columns=300)
    assert f"replace {tmp_path}/whole.npz and 1 other file?" in seen.decode()
    kept = [(tmp_path / name).read_bytes() == b"old" for name in ("whole.npz", "hole.npz")]
    if answer == b"y":
        assert (code, kept) == (0, [False, False])
    else:
        assert (code, kept) == (1 if answer == b"\x04" else 2, [True, True])


def test_tail_of_an_ended_trace_has_no_rate(cli):
    assert cli("tail", "whole").stdout == (
        "[0, 300)  300 rows, 100.0% valid\ncomplete, stop: 301 tokens, 300 rows\n"
    )
    parts = [json.loads(line) for line in cli("tail", "whole", "--json").stdout.splitlines()]
    assert {part["rows_per_second"] for part in parts} == {None}


def test_runs_and_a_run_that_is_not_there(cli, server):
    names = cli("runs").stdout.splitlines()
    assert "cli" in names
    assert {"run": "cli"} in map(json.loads, cli("runs", "--json").stdout.splitlines())
    assert cli("list", "--run", "typo", code=1).stderr == (
        f"routetrace: no run 'typo'; runs: {', '.join(names)}\n"
    )
    assert cli("list", "--label", "group=none").stderr == (
        "no such trace in run 'cli'; a trace has the labels of its newest complete incarnation, "
        "else of its newest\n"
    )


def test_limits_name_the_parts_of_the_run_and_of_all(monkeypatch):
    with run_server() as server, RouteClient(server.target, run="one") as client:
        feeders = [
            Feeder(server.target, LAYOUT, run=run, engine_id=engine)
            for run, engine in (("one", "e0"), ("one", "e1"), ("other", "e0"))
        ]
        handle = feeders[0].begin("t", prompt_len=10)
        feeders[0].step(IDS[:20], [[handle, 0, 20]])
        feeders[0].finish(handle, 21)
        feeders[0].flush()
        cli = commands(monkeypatch, server.target, "one")
        info = client.server_info()
        assert info.owner == "run one"
        parts = {limit.name: limit for limit in info.limits}
        assert len(parts) == len(info.limits)
        for name in ("max_agents", "max_writers"):
            assert (parts[name].used, parts[name].held) == (3, 2)
        assert parts["max_reads"].used == 0
        stored = parts["store_capacity"]
        assert stored.used == stored.held == info.run_bytes > 0
        assert stored.share == stored.limit == info.capacity_bytes
        shown = cli("limits")
        assert shown.stderr == "held by run one\n"
        lines = [line.split() for line in shown.stdout.splitlines()]
        assert lines[0] == ["limit", "of", "all", "used", "held", "may", "hold"]
        assert [line[0] for line in lines[1:]] == [limit.name for limit in info.limits]
        agents = parts["max_agents"]
        numbers = (f"{n:,}" for n in (agents.limit, 3, 2, agents.share))
        assert ["max_agents", *numbers] in lines
        as_json = [json.loads(line) for line in cli("limits", "--json").stdout.splitlines()]
        assert {"owner": "run one", **asdict(stored)} in as_json
        for feeder in feeders:
            feeder.close()


def test_quotas_are_limits_of_their_run_and_token(tmp_path):
    token, digest = new_token()
    (tmp_path / "tokens.toml").write_text(
        f'[[token]]\nname = "t"\nsha256 = "{digest}"\nscopes = ["read"]\nruns = ["*"]\n'
    )
    settings = {"run_quotas": json.dumps({"small": 1 << 20}), "token_quota": 1 << 22}
    with run_server(tokens_file=tmp_path / "tokens.toml", **settings) as guarded:
        for run, expected in (
            ("small", {"run_quota": 1 << 20, "token_quota": 1 << 22}),
            ("large", {"token_quota": 1 << 22}),
        ):
            with RouteClient(guarded.target, run=run, security=Security(token=token)) as client:
                info = client.server_info()
            assert info.owner == "token t"
            quotas = {q.name: q for q in info.limits if q.name.endswith("_quota")}
            assert {name: q.limit for name, q in quotas.items()} == expected
            assert all((q.used, q.held, q.share) == (0, 0, q.limit) for q in quotas.values())


def test_doctor_as_json(cli, server):
    lines = [json.loads(line) for line in cli("doctor", "--json").stdout.splitlines()]
    assert {"subject": "health", "verdict": "ok", "details": "SERVING", "advice": ""} in lines
    assert all(set(line) == {"verdict", "subject", "details", "advice"} for line in lines)


def test_dry_runs_name_what_the_command_would_delete(monkeypatch):
    with run_server(agent_timeout_seconds=3600) as server:
        dry = commands(monkeypatch, server.target, "dry")
        feeder = Feeder(server.target, LAYOUT, run="dry")
        for name, versions in {"old": (1, 2), "later": (2, 3), "runs": (1, 1)}.items():
            handle = feeder.begin(name, prompt_len=5)
            for at, version in enumerate(versions):
                feeder.set_weight_version(version)
                feeder.step(IDS[at * 10 : at * 10 + 10], [[handle, at * 10, 10]])
            if name != "runs":
                feeder.finish(handle, 21)
        feeder.flush()
        line = "would delete old: complete, 20 rows\n"
        done = dry("delete", "old", "--dry-run")
        assert done.stdout == line
        assert re.fullmatch(r"would delete 1 trace: 20 rows, [\d.]+ K?i?B\n", done.stderr)
        assert "trace 'none' is not in run" in dry("delete", "none", "--dry-run", code=1).stderr
        again = dry("retire", "--through", "2", "--dry-run")
        assert (again.stdout, again.stderr) == (line, done.stderr)
        done = dry("retire", "--through", "0", "--dry-run")
        assert done.stdout == ""
        assert done.stderr == (
            "would delete nothing: no ended trace has only rows of weight versions up to 0\n"
        )
        assert dry("retire", "--through", "2").stdout == "1 trace deleted\n"
        left = [json.loads(one)["trace_id"] for one in dry("list", "--json").stdout.splitlines()]
        assert sorted(left) == ["later", "runs"]
        feeder.close()


@pytest.fixture
def table(monkeypatch):
    """Return a function that writes a table at a terminal of some columns, and returns its text."""
    from routetrace.cli import output

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    def written(width: int, *table: Any) -> str:
        monkeypatch.setattr(sys, "stdout", text := Terminal())
        monkeypatch.setenv("COLUMNS", str(width))
        output.write_table(*table)
        return re.sub(r"\x1b\[[\d;]*m", "", text.getvalue())

    return written


def test_headers_of_tables_break_between_words_alone(table):
    columns = ("trace", "incarnations ", "missing because")
    words = table(60, columns, [("x" * 90, 1, "y" * 90)]).split()
    assert {"trace", "incarnations", "missing", "because"} <= {*words}


def test_tables_cut_nothing_off(table):
    """Numbers, and columns that must not break, are whole where a terminal is too narrow."""
    columns = [f"frequency{i} " for i in range(5)]
    cells = [f"{i}{'1' * 9}%" for i in range(5)]
    words = table(40, columns, [cells]).split()
    assert words == [*(name.strip() for name in columns), *cells]
    words = table(20, ("id", "host"), [("x" * 30, "a host")], ("id",))
    assert "a host" in words
    assert words.count("x") == 30


# ---------------------------------------------------------------------------- the program


def test_program_prints_one_line_for_an_error(server):
    done = process(server, "stat", "unknown")
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr == ("routetrace: trace 'unknown' is not in run 'cli'; check --run\n")
    gone = subprocess.run(
        [PROGRAM, "list", "--target", "127.0.0.1:9", "--timeout", "0.3"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert gone.returncode == 1
    first, last = gone.stderr.splitlines()
    assert last.startswith("routetrace: cannot connect to 127.0.0.1:9 (connection refused); ")
    assert first.startswith(f"{last} (retrying")


def test_progress_is_for_terminals_alone(server, tmp_path):
    words = ("get", "whole", ODD, "-o", f"{tmp_path}/")
    assert process(server, *words).stderr == ""
    ours, theirs = pty.openpty()
    child = subprocess.Popen(
        [PROGRAM, *words, "--force", "--target", server.target, "--run", "cli"],
        stdout=subprocess.PIPE,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "80"},
    )
    os.close(theirs)
    seen = b""
    try:
        while part := os.read(ours, 4096):
            seen += part
    except OSError:  # how a pseudo-terminal says that its other end was closed
        pass
    out, _ = child.communicate(timeout=60)
    os.close(ours)
    assert child.returncode == 0
    assert out == b""
    assert b"2/2" in seen


@pytest.mark.parametrize("module", ["typer", "rich"])
def test_without_its_extra_it_names_it(module):
    code = f"import sys; sys.modules[{module!r}] = None; from routetrace.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert (
        done.stderr
        == f"routetrace: {module} is not installed: pip install '.[cli]' in a checkout\n"
    )


# ---------------------------------------------------------------------------- arguments


@settings(max_examples=30)
@given(st.sets(st.integers(0, 400), min_size=1))
def test_layers_are_read_as_they_are_printed(ids):
    wanted = tuple(sorted(ids))
    assert layers_of(layers_text(wanted)) == wanted


@given(st.integers(0, 10**9 - 1) | st.none(), st.integers(0, 10**9 - 1) | st.none())
def test_tokens_are_two_positions_that_may_be_left_out(start, stop):
    text = f"{'' if start is None else start}:{'' if stop is None else stop}"
    assert tokens_of(text) == (start or 0, stop)


@given(st.lists(st.text(max_size=250), unique=True, max_size=4))
@settings(max_examples=30)
def test_file_names_are_valid_and_tell_ids_apart(ids):
    names = [file_name(i) for i in ids]
    assert len(set(names)) == len(ids)
    for name in names:
        assert "/" not in name
        assert len(name.encode()) <= 200
