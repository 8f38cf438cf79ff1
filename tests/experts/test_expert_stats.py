"""Statistics of experts, against their definitions by brute force."""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from routetrace.common.balance import balancedness
from routetrace.common.errors import InvalidArgument
from routetrace.experts.analysis.stats import ExpertStats
from support.models.expert_rows import drawn

LAYERS, EXPERTS, TOP_K = 2, 6, 2
CELL = st.permutations(range(EXPERTS)).map(lambda ids: ids[:TOP_K])
ROW = st.lists(CELL, min_size=LAYERS, max_size=LAYERS)
TRACES = st.lists(
    st.integers(0, 8).flatmap(
        lambda n: st.tuples(
            st.lists(ROW, min_size=n, max_size=n),
            st.none()
            | st.lists(
                st.lists(st.booleans(), min_size=LAYERS, max_size=LAYERS), min_size=n, max_size=n
            ),
        )
    ),
    max_size=4,
)


def arrays(rows, valid):
    ids = np.array(rows, np.uint8).reshape(-1, LAYERS, TOP_K)
    return ids, None if valid is None else np.array(valid, bool).reshape(-1, LAYERS)


@given(TRACES)
def test_counts_and_figures_are_what_they_are_defined_as(traces):
    stats = ExpertStats(LAYERS, EXPERTS)
    for rows, valid in traces:
        stats.add(*arrays(rows, valid))
    for layer in range(LAYERS):
        cells, shared, pairs = [], 0, 0
        for rows, valid in traces:
            there = [valid is None or valid[i][layer] for i in range(len(rows))]
            cells += [set(row[layer]) for row, ok in zip(rows, there, strict=True) if ok]
            for i in range(1, len(rows)):
                if there[i] and there[i - 1]:
                    pairs += 1
                    shared += len(set(rows[i][layer]) & set(rows[i - 1][layer]))
        load = [sum(e in cell for cell in cells) for e in range(EXPERTS)]
        assert stats.tokens[layer] == len(cells)
        assert stats.load[layer].tolist() == load
        assert (stats.shared[layer], stats.pairs[layer]) == (shared, pairs)
        assert stats.overlap[layer] == pytest.approx(shared / (pairs * TOP_K) if pairs else 0)
        assert stats.dead[layer] == load.count(0)
        total = sum(load)
        share = [x / total if total else 0.0 for x in load]
        violations = [s * EXPERTS - 1 for s in share]
        assert stats.max_violation[layer] == pytest.approx(max(violations))
        assert stats.min_violation[layer] == pytest.approx(min(violations))
        assert stats.avg_violation[layer] == pytest.approx(sum(map(abs, violations)) / EXPERTS)
        even = total / EXPERTS / max(load) if total else 1.0
        assert stats.balancedness[layer] == pytest.approx(even)
        bits = -sum(s * math.log2(s) for s in share if s)
        assert stats.entropy[layer] == pytest.approx(bits / math.log2(EXPERTS))
        for count in (1, 3, EXPERTS):
            top = sum(sorted(share, reverse=True)[:count])
            assert stats.top_share(count)[layer] == pytest.approx(top)
        lift = stats.coactivation[layer]
        assert not lift.diagonal().any()
        for a, b in combinations(range(EXPERTS), 2):
            both = sum({a, b} <= cell for cell in cells)
            assert stats.together[layer, a, b] == stats.together[layer, b, a] == both
            chance = load[a] * load[b] / max(len(cells), 1)
            assert lift[a, b] == pytest.approx(both / chance if chance else 0)


def test_many_rows_are_counted_as_a_few_are(monkeypatch):
    rows = drawn(50, 3, 20, 4, 1)
    whole = ExpertStats(3, 20)
    whole.add(rows)
    monkeypatch.setattr("routetrace.experts.analysis.stats._PAIR_ROWS", 7)
    parts = ExpertStats(3, 20)
    parts.add(rows)
    np.testing.assert_array_equal(whole.together, parts.together)
    # Cut into traces, only the neighbours at the cut are lost.
    cut = ExpertStats(3, 20)
    cut.add(rows[:20])
    cut.add(rows[20:])
    np.testing.assert_array_equal(whole.together, cut.together)
    np.testing.assert_array_equal(whole.pairs - cut.pairs, 1)


def test_extremes():
    even = ExpertStats(1, 4)
    even.add(np.array([[[0, 1]], [[2, 3]]]))
    assert (even.entropy[0], even.balancedness[0], even.max_violation[0]) == (1, 1, 0)
    one = ExpertStats(1, 4)
    one.add(np.full((5, 1, 1), 2))
    assert (one.entropy[0], one.balancedness[0], one.dead[0]) == (0, 0.25, 3)
    assert (one.max_violation[0], one.min_violation[0], one.avg_violation[0]) == (3, -1, 1.5)
    assert one.overlap[0] == 1
    single = ExpertStats(1, 1)
    single.add(np.zeros((2, 1, 1), int))
    assert single.entropy[0] == single.balancedness[0] == 1


def test_balancedness_of_ranks():
    assert balancedness(np.array([[1, 3], [0, 0], [2, 2]])).tolist() == [2 / 3, 1, 1]


@pytest.mark.parametrize(
    ("rows", "valid", "field"),
    [
        (np.zeros((2, 2)), None, "rows"),
        (np.zeros((2, 2, 2)), None, "rows"),  # floats
        (np.zeros((2, 3, 2), int), None, "rows"),
        (np.zeros((2, 2, 7), int), None, "rows"),
        (np.zeros((2, 2, 1), int), None, "rows"),  # another top-k than before
        (np.full((2, 2, 2), 6), None, "rows"),
        (np.full((2, 2, 2), -1), None, "rows"),
        (np.zeros((2, 2, 2), int), np.ones((2, 3), bool), "valid"),
        (np.zeros((2, 2, 2), int), np.ones((2, 2), int), "valid"),
    ],
)
def test_bad_rows(rows, valid, field):
    stats = ExpertStats(LAYERS, EXPERTS)
    stats.add(np.zeros((1, LAYERS, TOP_K), int))
    with pytest.raises(InvalidArgument) as caught:
        stats.add(rows, valid)
    assert caught.value.field == field


def test_ids_mean_nothing_where_they_are_not_valid():
    stats = ExpertStats(1, 4)
    stats.add(np.array([[[200, 200]], [[1, 2]]], np.uint8), np.array([[False], [True]]))
    assert stats.load.tolist() == [[0, 1, 1, 0]]


@pytest.mark.parametrize(("layers", "experts"), [(0, 4), (2, 0), (5000, 4), (1, 70_000)])
def test_bad_shapes(layers, experts):
    with pytest.raises(InvalidArgument):
        ExpertStats(layers, experts)


@pytest.mark.parametrize("count", [0, 7])
def test_bad_counts(count):
    with pytest.raises(InvalidArgument, match="count"):
        ExpertStats(LAYERS, EXPERTS).top_share(count)
