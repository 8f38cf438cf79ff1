"""Segments: every cell in one rectangle, and no hole hidden where they are joined."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from routetrace.client import (
    MissingRange,
    MissingReason,
    ProvenanceSpan,
    RowOrigin,
    Trace,
)
from routetrace.page.segments import LOUDNESS, exact, segments_of
from support.ranks.rank_rows import trace_of
from support.servers.client_server import LAYOUT, rows_of

LAYERS = len(LAYOUT.layer_ids)
REASONS = [*MissingReason]
ORIGINS = ("forward", "slot", "handoff")


@st.composite
def traces(draw: st.DrawFn, most: int = 40) -> tuple[Trace, np.ndarray, list[Any], list[str]]:
    """A trace; and reasons [tokens, layers] (-1: there), versions and origins by position."""
    tokens, start = draw(st.integers(0, most)), draw(st.integers(0, 3))
    reasons = np.full((tokens, LAYERS), -1)
    for _ in range(draw(st.integers(0, 6)) if tokens else 0):
        a, b = sorted((draw(st.integers(0, tokens)), draw(st.integers(0, tokens))))
        layers = draw(st.lists(st.integers(0, LAYERS - 1), unique=True))
        reasons[a:b, layers] = draw(st.integers(-1, len(REASONS) - 1))
    missing = [
        MissingRange(start + row, start + row + 1, layers, REASONS[reason])
        for row in range(tokens)
        for reason in sorted({*reasons[row].tolist()} - {-1})
        for layers in [tuple(np.array(LAYOUT.layer_ids)[reasons[row] == reason].tolist())]
    ]
    versions = [draw(st.sampled_from((3, 4, 2**60, None))) for _ in range(tokens)]
    origins = [draw(st.sampled_from(ORIGINS)) for _ in range(tokens)]
    trace = trace_of(
        LAYOUT,
        rows_of(LAYOUT, tokens),
        reasons < 0,
        token_start=start,
        versions=[
            (start + row, start + row + 1, v) for row, v in enumerate(versions) if v is not None
        ],
    )
    trace = replace(
        trace,
        missing=tuple(draw(st.permutations(missing))),
        provenance=tuple(
            ProvenanceSpan(start + row, start + row + 1, origin)
            for row, origin in enumerate(origins)
        ),
    )
    return trace, reasons, versions, origins


def cells(columns: dict[str, list[Any]], at: int) -> Any:
    """Yield (row, layer column, index of the rectangle) of all cells."""
    sides = zip(columns["t0"], columns["t1"], columns["l0"], columns["l1"], strict=True)
    for index, (t0, t1, l0, l1) in enumerate(sides):
        assert t0 < t1
        assert l0 < l1
        for row in range(t0 - at, t1 - at):
            for layer in range(l0, l1):
                yield row, layer, index


@given(traces())
def test_rectangles_repaint_the_trace(
    made: tuple[Trace, np.ndarray, list[Any], list[str]],
) -> None:
    trace, reasons, versions, origins = made
    found = json.loads(json.dumps(segments_of(trace)))
    assert found["joined"] == 0
    painted = np.zeros((len(trace), LAYERS), int)
    for row, layer, index in cells(found["present"], trace.token_start):
        painted[row, layer] += 1
        assert reasons[row, layer] == -1
        assert found["present"]["version"][index] == exact(versions[row])
        assert found["present"]["cached"][index] == (origins[row] != "forward")
    for row, layer, index in cells(found["missing"], trace.token_start):
        painted[row, layer] += 1
        assert found["missing"]["reason"][index] == REASONS[reasons[row, layer]].value
    assert (painted == 1).all()


@given(traces(), st.data())
def test_rectangles_name_the_origin_of_each_cell(
    made: tuple[Trace, np.ndarray, list[Any], list[str]], data: st.DataObject
) -> None:
    """Cells without one have the facts of their position; a cell that is missing has none."""
    trace, reasons, versions, origins = made
    at = trace.token_start
    some = st.sampled_from(
        [
            None,
            ("e0", "pp0", 1, 3, "forward"),
            ("e0", "pp1", 1, 4, "forward"),
            ("e0", "pp0", 2, 4, "slot"),
            ("e1", "", 1, 2**60, "handoff"),
        ]
    )
    given = np.empty((len(trace), LAYERS), object)
    told: list[RowOrigin] = []
    for _ in range(data.draw(st.integers(0, 5)) if len(trace) else 0):
        a, b = sorted(
            (data.draw(st.integers(0, len(trace))), data.draw(st.integers(0, len(trace))))
        )
        columns = data.draw(st.lists(st.integers(0, LAYERS - 1), unique=True, min_size=1))
        one = data.draw(some)
        places = [(row, column) for row in range(a, b) for column in columns]
        if one is None or not places or any(given[place] for place in places):
            continue
        for place in places:
            given[place] = one
        layer_ids = tuple(LAYOUT.layer_ids[c] for c in sorted(columns))
        told.append(RowOrigin(at + a, at + b, layer_ids, *one))
    found = json.loads(json.dumps(segments_of(trace, told)))
    present, painted = found["present"], np.zeros((len(trace), LAYERS), int)
    assert ("source" in present) == bool(told)
    for row, layer, index in cells(present, at):
        painted[row, layer] += 1
        one = given[row, layer]
        if one is None:
            assert present["version"][index] == exact(versions[row])
            assert present["cached"][index] == (origins[row] != "forward")
            if told:
                assert (present["source"][index], present["attempt"][index]) == (None, 0)
            continue
        engine, shard, attempt, version, source = one
        assert present["version"][index] == exact(version)
        assert present["cached"][index] == (source != "forward")
        assert found["sources"][present["source"][index]] == {"engine": engine, "shard": shard}
        assert present["attempt"][index] == attempt - 1
    for row, layer, _ in cells(found["missing"], at):
        painted[row, layer] += 1
        assert reasons[row, layer] >= 0
    assert (painted == 1).all()


@given(traces(), st.integers(LAYERS, 30))
def test_joined_rectangles_never_hide_a_hole(
    made: tuple[Trace, np.ndarray, list[Any], list[str]], limit: int
) -> None:
    trace, reasons, versions, _ = made
    found = segments_of(trace, limit=limit)
    assert len(found["present"]["t0"]) + len(found["missing"]["t0"]) <= limit
    width = 1 << found["joined"]
    painted = np.zeros((len(trace), LAYERS), int)
    groups = [
        slice(row // width * width, row // width * width + width) for row in range(len(trace))
    ]
    for row, layer, index in cells(found["present"], trace.token_start):
        painted[row, layer] += 1
        assert (reasons[groups[row], layer] == -1).all()
        known = [version for version in versions[groups[row]] if version is not None]
        assert found["present"]["version"][index] == exact(max(known, default=None))
    for row, layer, index in cells(found["missing"], trace.token_start):
        painted[row, layer] += 1
        here = {REASONS[number] for number in reasons[groups[row], layer] if number >= 0}
        assert found["missing"]["reason"][index] == max(here, key=LOUDNESS.index).value
    assert (painted == 1).all()


def test_a_hole_without_a_reason_is_unknown() -> None:
    valid = np.ones((9, LAYERS), bool)
    valid[4, 2] = False
    found = segments_of(trace_of(LAYOUT, rows_of(LAYOUT, 9), valid))
    assert found["missing"] == {"t0": [4], "t1": [5], "l0": [2], "l1": [3], "reason": ["unknown"]}


def test_a_range_of_missing_cells_hides_none_that_are_there() -> None:
    """The facts of a read may be newer than its rows."""
    trace = trace_of(LAYOUT, rows_of(LAYOUT, 9))
    trace = replace(trace, missing=(MissingRange(0, 9, LAYOUT.layer_ids, MissingReason.NOT_YET),))
    assert segments_of(trace)["missing"]["t0"] == []


def test_stages_of_two_versions_show_the_newest() -> None:
    trace = trace_of(LAYOUT, rows_of(LAYOUT, 9), versions=[(0, 6, 8), (3, 9, 7)])
    present = segments_of(trace)["present"]
    assert [*zip(present["t0"], present["t1"], present["version"], strict=True)] == [
        (0, 6, 8),
        (6, 9, 7),
    ]


def test_reasons_are_all_ordered() -> None:
    assert {*LOUDNESS} == {*MissingReason}


@pytest.mark.parametrize(
    ("number", "shown"),
    [(None, None), (0, 0), (2**53 - 1, 2**53 - 1), (2**53, "9007199254740992"),
     (-(2**63), "-9223372036854775808")],
)  # fmt: skip
def test_numbers_that_a_browser_would_round_are_text(number: int | None, shown: object) -> None:
    assert exact(number) == shown
