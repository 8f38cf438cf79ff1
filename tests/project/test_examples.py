"""The examples run as a user runs them, only shorter."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from routetrace.server.access.partition import place

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name: str, *flags: str) -> str:
    done = subprocess.run(
        [sys.executable, EXAMPLES / name, *flags],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.long
def test_the_demo_brings_rollout_and_trainer_closer():
    table = run("demo.py", "--prompts", "2", "--samples", "2", "--tokens", "24")
    cells = dict(re.findall(r"^  (\S.*?)  +(\S.*)$", table, re.M))
    assert cells["coverage"] == "100.0%"
    arms = {
        name: float(cells[name].split()[0])
        for name in (
            "no replay",
            "the same bf16 model, one full forward",
            "replay: right rows",
            "replay: rows of another sample",
            "replay: rows one token late",
        )
    }
    without = arms["no replay"]
    assert arms["replay: right rows"] < without / 2
    assert arms["replay: right rows"] < arms["the same bf16 model, one full forward"]
    assert arms["replay: rows of another sample"] > 5 * without
    assert arms["replay: rows one token late"] > 5 * without
    layers, top_k = 6, 4
    assert float(cells["bytes per row, uint8"]) == layers * top_k
    assert float(cells["bytes per row, int32"]) == 4 * layers * top_k
    assert float(cells["bytes per row, sent"].split()[0]) < layers * top_k
    assert 0 < float(cells["routers that disagree, bf16 / fp32"].rstrip("%")) < 50


@pytest.mark.slow
def test_the_grpo_loop_replays_every_trace_and_moves_the_version_on():
    out = run("r3_grpo.py", "--steps", "3", "--samples", "4", "--tokens", "8")
    steps = re.findall(r"^ +(\d+) +[\d.]+ +[\d.]+% +[\d.]+ +[\d.]+%$", out, re.M)
    assert steps == ["0", "1", "2"]


@pytest.mark.slow
def test_the_loop_without_ids_finds_all_rows():
    """A row that is missing raises in it."""
    out = run("auto_grpo.py")
    assert re.findall(r"(\d+) passes replayed, coverage 1, (\d+) samples found, 0 not", out) == [
        (str(3 * n), str(96 * n)) for n in range(1, 7)
    ]


@pytest.mark.long
def test_cached_experts_give_the_same_logits():
    out = run("cached_experts.py", "--tokens", "6", "--layers", "2")
    lines = re.findall(r"^ +(\d+) of 32, (\w+) +([\d.]+)% +[\d.]+ +(\w+)$", out, re.M)
    assert [(int(n), name) for n, name, _, _ in lines] == [
        (n, name) for n in (32, 16, 8, 1) for name in ("LRU", "forecast")
    ]
    assert {same for _, _, _, same in lines} == {"yes"}
    assert float(lines[1][2]) == 100  # all of them, copied before the first pass


def test_every_read_and_error_of_the_client():
    lines = run("client_api.py").splitlines()
    assert lines == [
        "get: 11 rows at layers (1, 2), complete",
        "get_many: g0-s0, coverage 100%",
        "get_many: g0-s1, coverage 100%",
        "fetch: ids (1, 21, 2), 19 valid cells",
        "follow: 8 rows",
        "NotFound: trace_id",
        "Incomplete: positions 0 to 11, other_version",
        "InvalidArgument: layer_ids is [2, 1]; expected strictly ascending ids, or None for all",
        "InvalidArgument: target",
        "AsyncRouteClient: 19 rows",
    ]


@pytest.mark.slow
def test_the_main_uses_of_the_api():
    lines = run("stories.py").splitlines()
    logit = lines.pop(2)
    # Prompts of 71 and 86 bytes, 8 tokens after them, and a request of 10; 2 layers, top 4.
    assert lines == [
        "get_one (9, 2, 4)",
        f"get_many 3 of 3, {2 * 4 * (78 + 93 + 9)} bytes",
        "follow 78",
        "prefetch 100%",
        "convert (9, 2, 4) (9, 2, 4) (10, 2, 4)",
        "operate 0 1 2",
    ]
    assert re.fullmatch(r"replay_samples -?0\.\d{4}", logit)


def test_the_runs_of_the_demo_without_disks_lie_in_different_partitions(monkeypatch):
    """Else a server that is killed there may serve no run; `make check-full` runs the demo."""
    monkeypatch.syspath_prepend(EXAMPLES)
    demo = importlib.import_module("demo_scale")
    partitions = [place(run, demo.PARTITIONS) for run in demo.RUNS]
    assert sorted(partitions) == list(range(demo.PARTITIONS))


def test_the_demo_without_disks_counts_wrong_and_missing_rows(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    demo = importlib.import_module("demo_scale")
    truth = demo.routed("a-request")
    valid = np.ones(truth.shape[:2], bool)
    assert demo.compare(truth, valid, truth) == (demo.ROWS, 0, 0)
    assert demo.compare(truth[:0], valid[:0], truth) == (0, 0, demo.ROWS)
    ids = truth.copy()
    ids[3, 1, 2] ^= 1
    ids[6, 0, 0] ^= 1  # means nothing, as the cell is missing
    valid[5:7, 0] = False
    assert demo.compare(ids, valid, truth) == (demo.ROWS - 3, 1, 2)
