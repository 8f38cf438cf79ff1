"""`routetrace bench capacity`: its arithmetic, and that docs/capacity.md shows what it prints."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from routetrace.cli.bench.capacity import MEASURED, Job, costs_of, need_of
from routetrace.cli.commands import app
from routetrace.simulation.models import MODELS, custom_model

PAGE = (Path(__file__).parents[2] / "docs" / "capacity.md").read_text("utf-8")
EXAMPLES = re.findall(r"^```\n\$ routetrace (bench capacity .*)\n([^`]*)^```", PAGE, re.M)
JOB = Job(MODELS["qwen3-30b-a3b"], 20_000)


def printed(words: str) -> str:
    done = CliRunner().invoke(app, shlex.split(words))
    assert done.exit_code == 0, done.output
    return "".join(f"{line.rstrip()}\n" for line in done.stdout.splitlines())


@pytest.mark.parametrize(("words", "shown"), EXAMPLES, ids=[words for words, _ in EXAMPLES])
def test_the_page_shows_what_the_command_prints(words, shown):
    assert shown == printed(words)


def test_the_page_has_examples_of_all_measured_models_and_their_costs():
    assert len(EXAMPLES) >= 5
    for name, costs in MEASURED.items():
        assert any(f"--model {name} " in words for words, _ in EXAMPLES)
        figures = [costs.sent, costs.engine, costs.worker, costs.ingest, costs.read, costs.reader]
        line = f"| {name} | " + " | ".join(f"{figure:g}" for figure in figures) + " |"
        assert line in PAGE
    for name, model in MODELS.items():
        (line,) = re.findall(rf"^\| {name} \({model.layout.row_bytes}.*\|$", PAGE, re.M | re.I)
        assert f"| {model.frame_bytes:.0f} |" in line


def test_needs_grow_with_what_they_are_of():
    need = need_of(JOB)
    twice = need_of(replace(JOB, tokens_per_second=40_000))
    assert twice.server_cores == pytest.approx(2 * need.server_cores)
    assert twice.worker_cores == pytest.approx(2 * need.worker_cores)
    assert need_of(replace(JOB, hours=3)).server_disk == pytest.approx(3 * need.server_disk)
    fast = need_of(replace(JOB, core=4))
    assert fast.server_tokens_per_second == pytest.approx(4 * need.server_tokens_per_second)
    assert need_of(replace(JOB, reads=0)).trainer_cores == 0
    # A server more for what one does not carry, and each holds its part.
    many = need_of(replace(JOB, tokens_per_second=2_000_000, nodes=100))
    assert many.servers * many.server_tokens_per_second >= 2_000_000
    assert (many.servers - 1) * many.server_tokens_per_second < 2_000_000
    each = 2_000_000 / many.servers * 3600 * many.sent / 0.9
    assert many.server_disk == pytest.approx(each)


def test_a_worked_example_by_hand():
    job = replace(JOB, engines=2, kv_tokens=1000, trace_tokens=500, hours=1)
    costs, need = costs_of(job.model), need_of(job)
    traces = 20_000 * 3600 / 500
    assert need.raw == 48 * 8
    assert need.servers == 1
    assert need.server_memory == pytest.approx(100e6 + 2 * 1000 * 19 + traces * (2000 + 155 + 500))
    assert need.engine_core == pytest.approx(10_000 * costs.engine / 1e6)


def test_models_that_were_not_measured_go_by_the_length_of_rows():
    ours = costs_of(custom_model(96, 128, 8))
    known = MEASURED["qwen3-30b-a3b"]
    assert ours.worker == pytest.approx(2 * known.worker)
    assert "96" not in printed(
        "bench capacity --tokens-per-second 9 --layers 4 --experts 8 --top-k 2"
    )


@pytest.mark.parametrize("words", ["--model gpt-2", "--layers 3", "--tokens-per-second 0"])
def test_usage_errors_exit_with_2(words):
    base = "" if "--tokens-per-second" in words else "--tokens-per-second 5 "
    done = CliRunner().invoke(app, shlex.split(f"bench capacity {base}{words}"))
    assert done.exit_code == 2
