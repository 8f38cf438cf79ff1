"""`routetrace bench load` against real servers, intact and damaged, and its parts."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from routetrace.cli.commands import app
from routetrace.client import RouteClient
from routetrace.codec.frame import encode_frame, invalid_rows
from routetrace.common.errors import InvalidArgument
from routetrace.server.testing import ServerProcess, run_server
from routetrace.simulation.blocks import BlockPool
from routetrace.simulation.compare import Answer, compare
from routetrace.simulation.engine import Engine
from routetrace.simulation.models import MODELS
from routetrace.simulation.plan import MIXES, Lengths, Load, Mix
from routetrace.simulation.rows import Rows
from routetrace.simulation.sessions import Truth
from routetrace.simulation.totals import Latencies
from support.waiting import wait_for

PROGRAM = str(Path(sys.executable).with_name("routetrace"))
SMALL = ("--layers", "4", "--experts", "32", "--top-k", "4", "--agents", "1")
#: Serves what was computed last where a reader asks for what was sampled by.
DAMAGED = """
from routetrace.v1 import routetrace_pb2 as pb
pb.READ_POLICY_LATEST = pb.READ_POLICY_AS_SAMPLED
from routetrace.server.daemon import main
main()
"""
COUNT = {"type": "integer", "minimum": 0}
NUMBER = {"type": "number", "minimum": 0}


def objects(names: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "required": list(names), "properties": names}


LATENCY = objects({"count": COUNT, "p50": {"type": ["number", "null"]}, "p99": {}})
SCHEMA = objects(
    {
        "version": {"const": 1},
        "ok": {"type": "boolean"},
        "failures": {"type": "array", "items": {"type": "string"}},
        "interrupted": {"type": "boolean"},
        "load": objects({"run": {"type": "string"}, "seed": COUNT, "mix": {}, "shape": {}}),
        "seconds": NUMBER,
        "engines": objects(
            dict.fromkeys(("steps", "rows", "tokens", "sessions", "requests", "cached_tokens",
                           "preemptions", "rejected_drafts", "weight_updates", "aborted"), COUNT)
        ),
        "agents": objects(
            {"offered_rows": COUNT, "acknowledged_rows": COUNT, "dropped_rows": {"type": "object"},
             "in_flight_rows": {"const": 0}, "sent_bytes": COUNT}
        ),
        "reads": objects(
            dict.fromkeys(("reads", "followed", "skipped", "rows", "cells", "fetched", "wrong",
                           "later", "failed"), COUNT)
        ),
        "rates": objects(dict.fromkeys(
            ("rows_per_second", "bytes_per_second", "read_rows_per_second"), NUMBER)),
        "bytes_per_row": objects({"raw": COUNT, "sent": NUMBER}),
        "latency": objects(
            dict.fromkeys(("acknowledged", "get", "ended_to_readable"), LATENCY)
        ),
        "cpu_us_per_row": objects(
            dict.fromkeys(("engine_thread", "agent_background", "reader"), NUMBER)
        ),
        "server": objects({"before": {"type": "object"}, "after": {"type": ["object", "null"]}}),
        "deleted_traces": COUNT,
    }
)  # fmt: skip


def bench(target: str, *words: str) -> subprocess.Popen[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("ROUTETRACE_")}
    return subprocess.Popen(
        [PROGRAM, "bench", "load", "--target", target, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def finished(process: subprocess.Popen[str], code: int) -> tuple[str, str]:
    try:
        out, err = process.communicate(timeout=90)
    finally:
        process.kill()
    assert process.returncode == code, out + err
    assert "Traceback" not in err
    return out, err


# ---------------------------------------------------------------------------- against servers


@pytest.fixture(scope="module")
def server():
    with run_server() as server:
        yield server


@pytest.mark.slow
def test_everything_at_once_is_verified_and_deleted(server):
    """Groups, turns, preemptions, drafts, weight updates, two kinds of readers."""
    words = (
        "--quick", "--seconds", "2", "--steps", "150", "--run", "bench-all", "--readers", "2",
        "--preemptions", "100", "--update-seconds", "0.3", "--json",
    )  # fmt: skip
    out, err = finished(bench(server.target, *words, *SMALL), 0)
    assert err == "" or "wrong 0" in err
    (line,) = out.splitlines()
    report = json.loads(line)
    jsonschema.validate(report, SCHEMA)
    assert report["ok"]
    assert report["failures"] == []
    engines, agents, reads = (report[name] for name in ("engines", "agents", "reads"))
    for name in ("cached_tokens", "preemptions", "rejected_drafts", "weight_updates"):
        assert engines[name] > 0, name
    assert engines["rows"] == agents["offered_rows"]
    assert agents["offered_rows"] == agents["acknowledged_rows"] + sum(
        agents["dropped_rows"].values()
    )
    assert set(agents["dropped_rows"]) <= {"rewound"}
    assert reads["rows"] > agents["acknowledged_rows"] / 2
    assert reads["reads"] > 0 < reads["followed"]
    assert report["latency"]["get"]["count"] == reads["reads"]
    assert (reads["wrong"], reads["failed"]) == (0, 0)
    assert "security" not in report["load"]
    assert report["deleted_traces"] == report["server"]["after"]["num_traces"] > 0
    with RouteClient(server.target, run="bench-all") as client:
        assert client.server_info().num_traces == 0


@pytest.mark.long
def test_a_rank_reads_its_share_and_traces_may_stay(server):
    words = ("--quick", "--tokens", "3000", "--reads", "rank", "--run", "bench-kept", "--keep")
    out, _ = finished(bench(server.target, *words, *SMALL), 0)
    assert "a rank's share" in out
    with RouteClient(server.target, run="bench-kept") as client:
        assert client.server_info().num_traces > 0
        facts = next(client.find())
        assert (facts.expires_at - facts.updated_at).total_seconds() <= 600
        assert facts.labels["group"].startswith("e0-g")
    # A run with traces is refused.
    _, err = finished(bench(server.target, "--run", "bench-kept"), 2)
    assert "without traces" in err


def test_a_damaged_server_is_found():
    words = ("--quick", "--tokens", "5000", "--preemptions", "300", "--followers", "0")
    command = [sys.executable, "-c", DAMAGED, "--listen=127.0.0.1:0", "--store=memory"]
    with ServerProcess(command, 60) as damaged:
        out, err = finished(bench(damaged.target, *words, *SMALL, "--json"), 1)
        assert re.search(r"routetrace: [\d,]+ rows come from a later pass", err)
        value = json.loads(out)
        assert not value["ok"]
        assert value["reads"]["later"] > 0


def test_ctrl_c_ends_it_with_the_report_so_far(server):
    words = ("--seconds", "0", "--tokens", "1000000000", "--run", "bench-cut", "--answer", "99")
    process = bench(server.target, *words, *SMALL)
    with RouteClient(server.target, run="bench-cut") as client:
        wait_for(lambda: client.server_info().num_traces)
    children = _children(process.pid)
    assert children
    process.send_signal(signal.SIGINT)
    out, _ = finished(process, 0)
    assert re.search(r"wrong, failed +0, 0", out)
    assert re.search(r"rows offered +[1-9]", out)
    for pid in children:
        assert not Path(f"/proc/{pid}").exists()


def test_an_engine_that_dies_is_reported(server):
    process = bench(server.target, "--seconds", "60", "--readers", "0", *SMALL)
    wait_for(lambda: _children(process.pid))
    os.kill(_children(process.pid)[0], signal.SIGKILL)
    _, err = finished(process, 1)
    assert "engine 0 exited with code -9" in err


def _children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


def test_a_server_that_is_not_there_is_logged_and_then_an_error():
    out, err = finished(bench("127.0.0.1:9", "--quick", "--timeout", "0.3"), 1)
    assert out == ""
    first, last = err.splitlines()
    assert first.startswith(f"{last} (retrying")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--run", "production"], "begins with 'bench-'"),
        (["--model", "gpt-2"], "deepseek-v3"),
        (["--layers", "3"], "--experts and --top-k"),
        (["--layers", "3", "--experts", "4", "--top-k", "5"], "top_k"),
        (["--prompt", "normal:3"], "lognormal:MEDIAN:SIGMA"),
        (["--max-tokens", "100"], "max_tokens"),
        (["--seconds", "0"], "tokens above 0"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_usage_errors_exit_with_2(words, said):
    done = CliRunner().invoke(app, ["bench", "load", "--target", "127.0.0.1:9", *words])
    assert done.exit_code == 2
    assert said in re.sub(r"[\s│]+", " ", done.output)


# ---------------------------------------------------------------------------- the simulation


class Book:
    """A capture agent that applies the rules of rows itself, with rows as values of slots."""

    def __init__(self, lost: float = 0.0) -> None:
        self.lost = lost
        """Share of spans whose rows are dropped."""
        self.rng = np.random.default_rng(0)
        self.slots: dict[int, tuple[bytes, int]] = {}
        self.version = 0
        self.requests: dict[int, dict[str, Any]] = {}
        self.traces: dict[str, dict[int, tuple[bytes, int]]] = {}
        self.starts: list[int] = []
        self.rejected: set[tuple[str, int, bytes]] = set()

    def begin(self, request_id: str, **facts: Any) -> int:
        handle = len(self.requests)
        self.requests[handle] = {"trace": facts["trace_id"], "end": 0, "computed": 0}
        self.traces.setdefault(facts["trace_id"], {})
        self._take(handle, facts["num_computed_tokens"], facts["block_ids"])
        return handle

    def resume(self, handle: int, computed: int, *, block_ids: list[int]) -> None:
        self._take(handle, computed, block_ids)

    def _take(self, handle: int, computed: int, blocks: list[int]) -> None:
        request = self.requests[handle]
        request["blocks"] = list(blocks)
        # Looked up when the step's rows are there: another request may write them in that step.
        request["cached"], request["order"] = computed, len(self.starts)
        self.starts.append(handle)

    def add_blocks(self, handle: int, blocks: list[int]) -> None:
        self.requests[handle]["blocks"] += blocks

    def step(self, rows: np.ndarray, runs: np.ndarray) -> int:
        ends = np.cumsum(runs[:, 2]).tolist()
        told = [(*run, end - run[2]) for run, end in zip(runs.tolist(), ends, strict=True)]
        for handle, start, count, at in sorted(told, key=self._turn):
            request = self.requests[handle]
            trace, blocks = self.traces[request["trace"]], request["blocks"]
            if (cached := request.pop("cached", None)) is not None:
                assert start == cached
                for position in range(cached):
                    slot = blocks[position // 16] * 16 + position % 16
                    if slot in self.slots or not self.lost:
                        trace.setdefault(position, self.slots[slot])
            self._drop(handle, start)
            request["last"] = []
            lost = self.rng.random() < self.lost
            for i in range(count):
                position = start + i
                slot = blocks[position // 16] * 16 + position % 16
                if lost:
                    self.slots.pop(slot, None)
                    continue
                self.slots[slot] = rows[at + i].tobytes(), self.version
                if position not in trace:
                    trace[position] = self.slots[slot]
                    request["last"].append(position)
        return 1

    def _turn(self, run: tuple[int, ...]) -> int:
        """Order of spans: starting requests last, in the order of their start."""
        request = self.requests[run[0]]
        return request["order"] if "cached" in request else -1

    def preempt(self, handle: int, computed: int) -> None:
        self._drop(handle, computed)

    def finish(self, handle: int, num_tokens: int, reason: str, token_ids: np.ndarray) -> None:
        assert len(token_ids) == num_tokens
        self._drop(handle, num_tokens - 1)

    def _drop(self, handle: int, computed: int) -> None:
        request = self.requests[handle]
        trace = self.traces[request["trace"]]
        for position in [p for p in request.pop("last", ()) if p >= computed]:
            self.rejected.add((request["trace"], position, trace.pop(position)[0]))

    def reset_prefix_cache(self) -> None:
        pass

    def set_weight_version(self, version: int) -> None:
        self.version = version


def load_of(**changes: Any) -> Load:
    values: dict[str, Any] = {
        "target": "", "run": "bench-x", "security": {}, "timeout": 1.0, "model": "",
        "shape": (3, 16, 2), "mix": MIXES["quick"], "max_tokens": 400, "agents": 1, "batch": 6,
        "prefill": 128, "kv_blocks": 60, "steps_per_second": 0.0, "seconds": 1.0, "tokens": 0,
        "drafts": 3, "preemptions": 60.0, "update_seconds": 0.0, "readers": 0, "reads": "whole",
        "followers": 0, "ttl": 60, "keep": False, "seed": 1,
    }  # fmt: skip
    return Load(**{**values, **changes})


def simulated(seed: int, lost: float = 0.0) -> tuple[Engine, Book, Rows, list[Truth]]:
    mix = Mix(20, Lengths("uniform", 5, 90), Lengths("uniform", 2, 60), 3, 3,
              Lengths("uniform", 1, 40))  # fmt: skip
    load = load_of(seed=seed, mix=mix, prefill=40)
    book, truths = Book(lost), list[Truth]()
    rows = Rows(load.shape_of().layout, seed, 1.5)
    engine = Engine(load, 0, book, rows, lambda name: None, truths.append)
    for number in range(600):
        if number % 9 == 8:
            engine.update_weights()
        engine.step()
    engine.stop()
    return engine, book, rows, truths


@pytest.mark.parametrize("seed", range(2))
def test_the_truth_follows_from_the_calls_of_the_agent(seed):
    engine, book, rows, truths = simulated(seed)
    assert min(engine.counts.values()) > 0, engine.counts
    assert len(truths) == engine.counts["sessions"] > 20
    for truth in truths:
        trace = book.traces[truth.name]
        stop = truth.num_tokens - 1 if truth.num_tokens else len(trace)
        assert sorted(trace)[:stop] == list(range(stop))
        wanted = rows.of(truth.authors(stop), np.arange(stop))
        for position in range(stop):
            row, version = trace[position]
            assert row == wanted[position].tobytes(), (truth.name, position)
            assert version == truth.versions(stop)[position]
            # Were a rejected row served, it would show.
            assert (truth.name, position, row) not in book.rejected


@pytest.mark.parametrize("seed", range(2))
def test_rows_of_a_later_pass_are_distinguished_from_wrong_rows(seed):
    _, book, rows, truths = simulated(seed, lost=0.2)
    layout = rows.layout
    later = 0
    for truth in truths:
        trace = book.traces[truth.name]
        stop = truth.num_tokens - 1 if truth.num_tokens else max(trace, default=-1) + 1
        ids = np.zeros((stop, len(layout.layer_ids), layout.top_k), layout.dtype)
        valid = np.zeros(ids.shape[:2], bool)
        for position, (row, _) in trace.items():
            if position < stop:
                ids[position] = np.frombuffer(row, layout.dtype).reshape(ids.shape[1:])
                valid[position] = True
        found = compare(rows, truth, Answer(ids, valid, np.arange(stop)))
        assert found.wrong == 0, found.error
        assert found.rows + found.later == valid.all(axis=1).sum()
        later += found.later
    assert later > 0


def test_a_load_travels_whole():
    load = load_of(mix=MIXES["agentic"], model="kimi-k2", max_tokens=9999)
    assert Load.from_json(load.to_json()) == load
    assert "hunter2" not in repr(load_of(security={"token": "hunter2"}))
    assert "hunter2" not in json.dumps(load_of(security={"token": "hunter2"}).facts())


def test_blocks_in_use_are_never_given_away():
    pool = BlockPool(4)
    first = pool.take(2)
    for number, block in enumerate(first):
        pool.register(block, (7, 16 * (number + 1)))
    assert pool.hit([(7, 16), (7, 32), (8, 48)]) == first
    pool.release(first)
    assert pool.num_free == 2  # still in use by the one that hit them
    pool.release(first)
    assert pool.num_free == 4
    assert pool.hit([(7, 16)]) == first[:1]
    assert pool.num_free == 3
    assert first[0] not in pool.take(3)
    pool.release(list(range(4)))
    assert sorted(pool.take(4)) == [0, 1, 2, 3]
    assert pool.hit([(7, 16)]) == []


def test_a_block_that_is_reused_is_found_under_no_key():
    pool = BlockPool(2)
    (block,) = pool.take(1)
    pool.register(block, "first")
    pool.register(block, "second")  # keeps its first key
    assert pool.hit(["second"]) == []
    pool.release([block])
    assert sorted(pool.take(2)) == [0, 1]
    assert pool.hit(["first"]) == pool.hit(["second"]) == []


# ---------------------------------------------------------------------------- rows


@pytest.mark.parametrize("name", MODELS)
def test_rows_are_rows_of_the_model_and_as_long_as_recorded_ones(name):
    model = MODELS[name]
    rows = Rows(model.layout, 3, model.skew)
    made = rows.of(np.full(256, 9), np.arange(256))
    assert made.dtype == model.layout.dtype
    assert made.nbytes == 256 * model.layout.row_bytes
    assert not invalid_rows(made, model.layout.num_experts).any()
    assert len(encode_frame(made, model.layout)) / 256 == pytest.approx(model.frame_bytes, rel=0.03)
    part = rows.of(np.full(5, 9), np.arange(3, 8), [1, 4])
    assert (part == made[3:8, [1, 4]]).all()
    assert not (rows.of(np.full(256, 10), np.arange(256)) == made).all(axis=(1, 2)).any()
    assert not (Rows(model.layout, 4, model.skew).of(np.full(256, 9), np.arange(256)) == made).all()


def test_a_wrong_row_fact_or_hole_is_found():
    load = load_of()
    layout = load.shape_of().layout
    rows = Rows(layout, 1, 1.5)
    truth = Truth("t", 31, ((0, 1),), ((0, 5, 0), (10, 6, 1)), ((3, 12, 7, 1),), 0.0)
    ids = rows.of(truth.authors(30), np.arange(30))
    valid = np.ones((30, 3), bool)

    def found(ids: np.ndarray, valid: np.ndarray) -> tuple[int, int]:
        finding = compare(rows, truth, Answer(ids, valid, np.arange(30)))
        return finding.rows, finding.wrong

    assert found(ids, valid) == (30, 0)
    shifted = np.roll(ids, 1, axis=0)
    assert found(shifted, valid)[1] > 25
    holes = valid.copy()
    holes[4, 1] = False
    assert found(ids, holes) == (29, 0)
    other = ids.copy()
    other[4, 1] = other[4, 1, ::-1]
    assert found(other, valid) == (29, 1)
    assert found(other, holes) == (29, 0)
    # What another pass computed once more is not wrong, but it is not what was asked for.
    ids = rows.of(np.where(np.arange(30) < 4, 7, truth.authors(30)), np.arange(30))
    finding = compare(rows, truth, Answer(ids, valid, np.arange(30)))
    assert (finding.rows, finding.wrong, finding.later) == (26, 3, 1)
    ids = rows.of(truth.authors(30), np.arange(30))
    stranger = Rows(layout, 2, 1.5)
    assert compare(stranger, truth, Answer(ids, valid, np.arange(30))).wrong == 30


# ---------------------------------------------------------------------------- numbers


@settings(max_examples=50)
@given(st.lists(st.floats(2e-5, 1e4), min_size=1, max_size=50), st.sampled_from((0.5, 0.9, 0.99)))
def test_percentiles_are_close_to_the_true_ones(seconds, share):
    latencies = Latencies()
    for value in seconds:
        latencies.add(value)
    again = Latencies(json.loads(json.dumps(latencies.to_json())))
    true = sorted(seconds)[max(0, int(np.ceil(len(seconds) * share)) - 1)]
    found = again.at(share)
    assert found is not None
    assert true * 0.999 <= found <= true * 1.13
    assert len(again) == len(seconds)


@pytest.mark.parametrize("text", ["512", "uniform:50:900", "lognormal:300:0.8"])
def test_lengths_are_as_they_say(text):
    lengths = Lengths.parse(text)
    rng = np.random.default_rng(0)
    drawn = [lengths.draw(rng) for _ in range(4000)]
    assert min(drawn) >= 1
    assert np.mean(drawn) == pytest.approx(lengths.mean, rel=0.1)


@pytest.mark.parametrize("text", ["", "0", "-3", "uniform:9:5", "lognormal:0:1", "x:1", "1:2:3"])
def test_lengths_that_make_no_sense_are_refused(text):
    with pytest.raises(InvalidArgument):
        Lengths.parse(text)
