"""The arithmetic of `make rivals-exact`, and that the page shows the committed figures."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import rivals_exact
from rivals_exact import MARK, SCENARIOS, Line
from routetrace.common.missing import MissingRange
from support.models.routed_cells import fates

LAYERS = (1, 3)


@pytest.fixture
def truth() -> Any:
    """Right choices of 5 tokens in 2 layers, ascending."""
    ids = np.arange(20).reshape(5, 2, 2)
    return SimpleNamespace(ids=ids, agrees=lambda rows: ((rows == ids).all(axis=2), 0))


def test_each_cell_has_one_fate(truth: Any) -> None:
    rows, valid = truth.ids.copy(), np.ones((5, 2), bool)
    rows[0, 1] = 99  # wrong
    rows[3] = 99  # missing, so not wrong
    valid[3], valid[4, 0], valid[2, 1] = False, False, False
    gaps = [MissingRange(3, 4, LAYERS, "aborted"), MissingRange(4, 9, (1,), "kv_unknown")]
    counts = fates(truth, rows, valid, gaps, LAYERS)
    assert counts == {"right": 5, "wrong": 1, "aborted": 2, "kv_unknown": 1, "not returned": 1}


def test_rows_that_were_not_returned_are_missing(truth: Any) -> None:
    assert fates(truth, None) == {"not returned": 10}
    assert fates(truth, truth.ids[:3]) == {"right": 6, "not returned": 4}
    assert fates(truth, np.concatenate([truth.ids, truth.ids])) == {"right": 10}


def test_counted() -> None:
    found = rivals_exact.counted({"right": 7, "wrong": 2, "kv_unknown": 3, "aborted": 0})
    assert found == (9, 2, {"kv_unknown": 3})


def test_faults_are_wrong_cells_and_those_without_a_reason() -> None:
    assert not Line("s", "e", {"wrong": 5}, {"right": 9, "kv_unknown": 4}).faults
    assert Line("s", "e", {}, {"wrong": 1}).faults == ["e, s: 1 cells wrong"]
    assert Line("s", "e", {}, {"not returned": 2}).faults == [
        "e, s: 2 cells missing without a reason"
    ]


def _result(scenario: str, run: str = "engine", version: str = "0.30.0", **more: Any) -> Any:
    empty = {"native_cells": {}, "cells": {}, "faults": []}
    return {"version": version, "run": run, "scenario": scenario, **empty, **more}


def test_results_of_a_version_add_up() -> None:
    scenario = next(s for s in SCENARIOS if s.title == "torch.compile")
    results = [
        _result("concurrent", "compiled", native_cells={"wrong": 3}, cells={"right": 3}),
        _result("prefix", "compiled", native_cells={"wrong": 4, "right": 1}, cells={"right": 5}),
        _result("prefix", "engine", native_cells={"right": 100}, cells={"right": 100}),
        _result("prefix", "compiled", "0.32.0", native_cells={"right": 100}),
    ]
    line = rivals_exact.vllm_line(scenario, "0.30.0", results, [])
    assert (line.own, line.ours, line.note) == ({"wrong": 7, "right": 1}, {"right": 8}, "")


def test_an_engine_that_fails_with_its_own_return_is_noted() -> None:
    scenario = next(s for s in SCENARIOS if s.vllm[0] == "offloading")
    results = [_result("restored", "offloading", cells={"right": 8, "kv_unknown": 2})]
    demanded = [_result("process", "offloading", faults=["Refused: both"])]
    line = rivals_exact.vllm_line(scenario, "0.30.0", results, demanded)
    assert (line.own, line.note) == ({}, "Refused: both")
    text = rivals_exact.table([line, Line(scenario.title, "other", {"right": 4, "wrong": 1})])
    assert "| vLLM 0.30.0 | [1] |  |  | 8 | 0 | 2 kv_unknown |" in text
    assert "|  | other | 5 | **1** | 0 |" in text
    assert text.endswith("[1] Refused: both\n")


def test_bytes_a_token() -> None:
    count = {"tokens": 10, "answers": 2_050, "own": 1_500, "handles": 50}
    assert "| e | 10 | 50 | 150 | 5 |" in rivals_exact.bytes_table({"e": count})


def test_the_page_shows_the_committed_figures() -> None:
    figures = json.loads(rivals_exact.FIGURES.read_text())
    lines = [Line(**line) for line in figures["lines"]]
    assert len(lines) == len(SCENARIOS) * (len(rivals_exact.WAYS) + 1)
    assert not [fault for line in lines for fault in line.faults]
    text = rivals_exact.report(lines, figures["http"])
    assert rivals_exact.PAGE.read_text().split(MARK)[1].strip() == text.strip()
