"""The examples run as a user runs them, only shorter."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parent.parent / "examples"


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


def test_the_demo_brings_rollout_and_trainer_closer():
    table = run("demo.py", "--prompts", "2", "--samples", "2", "--tokens", "24")
    cells = dict(re.findall(r"^  (\S.*?)  +(\S.*)$", table, re.M))
    assert cells["coverage"] == "100.0%"
    without = float(cells["KL(rollout || trainer) without replay"])
    assert float(cells["KL(rollout || trainer) with replay"]) < without / 2
    assert 0 < float(cells["routers that disagree, bf16 / fp32"].rstrip("%")) < 50


def test_the_grpo_loop_replays_every_trace_and_moves_the_version_on():
    out = run("r3_grpo.py", "--steps", "3", "--samples", "4", "--tokens", "8")
    steps = re.findall(r"^ +(\d+) +[\d.]+ +[\d.]+% +[\d.]+ +[\d.]+%$", out, re.M)
    assert steps == ["0", "1", "2"]


def test_cached_experts_give_the_same_logits():
    out = run("cached_experts.py", "--tokens", "6", "--layers", "2")
    lines = re.findall(r"^ +(\d+) of 32, (\w+) +([\d.]+)% +[\d.]+ +(\w+)$", out, re.M)
    assert [(int(n), name) for n, name, _, _ in lines] == [
        (n, name) for n in (32, 16, 8, 1) for name in ("LRU", "forecast")
    ]
    assert {same for _, _, _, same in lines} == {"yes"}
    assert float(lines[1][2]) == 100  # all of them, copied before the first pass
