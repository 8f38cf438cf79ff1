"""The drivers of `make test-gpu` and `make bench-gpu`, as far as they run without a GPU."""

from __future__ import annotations

import importlib
import itertools
import json
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from gpu_runs import __main__ as gpu_runs
from gpu_runs import load
from gpu_runs.runs import RUNS, faults_of, not_as_asked
from vllm_runs.engine import Answer, Ask, Prompts
from vllm_runs.report import Tally

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
DECODE = [
    (f"decode step, B = {size}: {way}", against, goal)
    for size in (8, 64, 256)
    for way in ("plugin", "connector")
    for against, goal in (("no capture", "<= 1.004"), ("vLLM's own return", "<= 1"))
]
#: What was asked for; a goal that is missed stays.
GOALS = [
    *DECODE,
    *(
        (f"graph of MoE layers, {n} tokens a step: with capture", "no capture", "<= 1.02")
        for n in (1, 64, 256)
    ),
    ("to_torch of a trace: throughput", "a pinned copy", ">= 0.9"),
    (
        "generate with served experts, all resident: throughput",
        "transformers' default kernels",
        ">= 0.9",
    ),
]


@pytest.fixture
def no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("gpu")


# ---------------------------------------------------------------- make test-gpu


def test_without_a_device_nothing_passes(no_device: None, capsys: Any) -> None:
    assert gpu_runs.main([]) == 2
    assert "needs a CUDA device" in capsys.readouterr().err


def test_without_vllm_only_the_tests_can_be_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_runs.importlib.util, "find_spec", lambda _: None)
    assert "vLLM" in gpu_runs.cannot_run(True, ["tests", "graphs"])
    assert gpu_runs.cannot_run(True, ["tests"]) == ""


def test_a_test_that_was_skipped_did_not_pass(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    passed, left_out = '<testcase classname="a" name="b"/>', '<testcase classname="c" name="d">'
    report.write_text(f"<testsuites>{passed}{left_out}<skipped/></testcase></testsuites>")
    assert gpu_runs.skipped(report) == ["c.d was skipped"]
    report.write_text(f"<testsuites>{passed}</testsuites>")
    assert gpu_runs.skipped(report) == []
    report.write_text("<testsuites></testsuites>")
    assert gpu_runs.skipped(report) == ["tests marked cuda: none was found"]


def test_tests_for_a_device_are_found_in_all_rooms() -> None:
    tests = Path(gpu_runs.__file__).parents[1]
    found = {str(file.relative_to(tests)) for file in gpu_runs.marked_files()}
    assert {"engines/test_capturer_cuda.py", "experts/test_pinned.py"} <= found
    assert "project/test_gpu_drivers.py" not in found


class Idle:
    """An engine whose requests end in the step after the one in which they came."""

    def __init__(self) -> None:
        self.prompts = Prompts(0)
        self.delivered: dict[str, Answer] = {}
        self.asked: list[Ask] = []
        self.aborted: list[str] = []
        self._running: list[Ask] = []

    @property
    def busy(self) -> bool:
        return bool(self._running)

    def add(self, ask: Ask) -> None:
        self.asked.append(ask)
        self._running.append(ask)

    def step(self) -> list[Answer]:
        assert self._running, "an engine in another process would wait for ever"
        done = [Answer(a.trace_id, [*a.prompt, 1], len(a.prompt)) for a in self._running]
        done = [answer for answer in done if answer.trace_id in self.delivered]
        ended = {answer.trace_id for answer in done}
        self._running = [ask for ask in self._running if ask.trace_id not in ended]
        for ask in self._running:
            self.delivered[ask.trace_id] = Answer(ask.trace_id, ask.prompt, len(ask.prompt))
        return done

    def abort(self, trace_id: str) -> Answer:
        self.aborted.append(trace_id)
        self._running = [ask for ask in self._running if ask.trace_id != trace_id]
        return self.delivered[trace_id]


def test_the_load_is_what_it_says() -> None:
    engine = Idle()
    waves = list(itertools.islice(load.waves(engine, 1), 12))  # type: ignore[arg-type]
    names = [ask.trace_id for ask in engine.asked]
    assert len(set(names)) == len(names) == 12 * 40
    assert sorted(answer.trace_id for wave in waves for answer in wave) == sorted(names)
    assert engine.aborted
    prompts = [ask.prompt for ask in engine.asked]
    assert max(map(len, prompts)) > 64  # more than a step: chunked
    assert len({tuple(prompt[:16]) for prompt in prompts}) < len(prompts) / 3  # shared prefixes
    assert {ask.sampling.get("n", 1) for ask in engine.asked} == {1, 2}
    assert not engine.delivered


def test_waves_add_up() -> None:
    total = Tally()
    load.add(total, Tally(requests=2, native=5, wrong=1, missing={"a": 1}, faults=["x"]))
    load.add(total, Tally(requests=3, native=7, missing={"a": 2, "b": 1}, faults=["y"]))
    assert (total.requests, total.native, total.wrong) == (5, 12, 1)
    assert total.missing == {"a": 3, "b": 1}
    assert total.faults == ["x", "y"]


def test_what_did_not_happen_is_a_fault() -> None:
    run = RUNS[0]
    assert faults_of(run, 10, 10, {"num_preemptions": 1}) == []
    assert len(faults_of(run, 9, 10, {"num_preemptions": 0, "prefix_cache_hits": 2})) == 2


@pytest.mark.parametrize("run", RUNS, ids=[run.name for run in RUNS])
def test_what_is_not_switched_on_is_a_fault(run: Any) -> None:
    mode = SimpleNamespace(name="FULL_AND_PIECEWISE" if run.graphs else "NONE")
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(async_scheduling=True),
        cache_config=SimpleNamespace(enable_prefix_caching=True),
        compilation_config=SimpleNamespace(cudagraph_mode=mode, mode=mode),
    )
    assert not_as_asked(run, config, {}) == []
    asked = {"compilation_config": {"cudagraph_mode": mode.name}}
    assert not_as_asked(run, config, asked) == []
    asked["compilation_config"]["cudagraph_mode"] = "PIECEWISE"
    assert len(not_as_asked(run, config, asked)) == 1
    config.scheduler_config.async_scheduling = config.cache_config.enable_prefix_caching = False
    mode.name = "NONE" if run.graphs else "FULL"
    assert len(not_as_asked(run, config, {})) == 4


def test_a_million_cells_are_compared_under_graphs() -> None:
    assert max(run.share for run in RUNS if run.graphs and run.native) == 1.0


# ---------------------------------------------------------------- make bench-gpu


def test_without_a_device_nothing_is_measured(
    bench: ModuleType, no_device: None, tmp_path: Path, capsys: Any
) -> None:
    assert bench.main(["--json", str(tmp_path / "results.json")]) == 2
    assert "needs a CUDA device" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_dry_run_measures_everything_and_writes_nothing(
    bench: ModuleType, tmp_path: Path, capsys: Any
) -> None:
    parts = [f"--part={part}" for part in bench.PARTS if part != "decode"]
    file = tmp_path / "results.json"
    assert bench.main(["--dry", "--rounds", "1", "--json", str(file), *parts]) == 0
    shown = capsys.readouterr().out
    assert "figures mean nothing" in shown
    for name, against, goal in GOALS[len(DECODE) :]:
        pattern = rf"^{re.escape(name)} +[^\n]*{re.escape(against)} +{goal}"
        assert re.search(pattern, shown, re.M), name
    assert not file.exists()


def test_the_goals_of_a_decode_step(bench: ModuleType) -> None:
    decode, measure = sys.modules["gpu_vllm"], sys.modules["measure"]
    table = measure.Table()
    for size in (8, 64, 256):
        steps = {"none": [5.0, 6.0], "native": [5.1, 6.1], "plugin": [5.01, 6.01]}
        decode.judge(table, size, {**steps, "connector": [5.2, 6.2]})
    judged = [row for row in table.rows if row.goal]
    assert [(row.name, row.against, row.goal) for row in judged] == DECODE
    assert [row.met for row in judged] == [True, True, False, False] * 3


def test_a_part_that_fails_is_said_and_the_others_go_on(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    """Only a whole run on a device is written, with the device's name."""

    def fails(*_: Any) -> None:
        raise ValueError

    def measured(table: Any, dry: bool, count: int, _more: Any) -> None:
        table.add("figure", [1.0] * count, "x", "other", "<= 1")

    file = tmp_path / "results.json"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "A device")
    monkeypatch.setattr(bench, "machine", dict)
    monkeypatch.setattr(bench, "PARTS", {"one": fails, "two": measured})
    assert bench.main(["--json", str(file)]) == 1
    assert "one did not come to its end" in capsys.readouterr().err
    assert bench.main(["--json", str(file), "--part", "two"]) == 0
    assert not file.exists()
    monkeypatch.setattr(bench, "PARTS", {"one": measured, "two": measured})
    assert bench.main(["--json", str(file)]) == 0
    results = json.loads(file.read_text())
    assert results["device"] == "A device"
    assert [row["met"] for row in results["rows"]] == [True, True]


def test_committed_results_name_their_device_and_keep_the_goals(bench: ModuleType) -> None:
    if not bench.RESULTS.exists():
        assert "no run of it is committed yet" in (BENCHMARKS / "README.md").read_text("utf-8")
        return
    results = json.loads(bench.RESULTS.read_text("utf-8"))
    assert results["device"]
    judged = [(row["name"], row["against"], row["goal"]) for row in results["rows"] if row["goal"]]
    assert sorted(judged) == sorted(GOALS)
