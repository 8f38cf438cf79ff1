"""Counts of the experts that traces chose: against a count cell by cell."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routetrace.client import Corrupt, ExpertLoad, InvalidArgument, Trace
from routetrace.common.layout import ModelLayout
from support.ranks.rank_rows import trace_of

LAYERS = (1, 4, 5)


def a_trace(seed: int, tokens: int, experts: int = 6, top_k: int = 2, gaps: float = 0.3) -> Trace:
    rng = np.random.default_rng(seed)
    layout = ModelLayout(LAYERS, 7, experts, top_k)
    shape = (tokens, len(LAYERS))
    ids = rng.permuted(np.tile(np.arange(experts), (*shape, 1)), axis=2)[..., :top_k]
    return trace_of(layout, ids.astype(layout.dtype), rng.random(shape) >= gaps)


def cell_by_cell(trace: Trace) -> tuple[list[int], Counter[tuple[int, int]]]:
    """Valid cells of each layer, and how often (layer, expert) was chosen."""
    cells, load = [0] * len(trace.layer_ids), Counter()
    for token in range(len(trace)):
        for column in range(len(trace.layer_ids)):
            if trace.valid[token, column]:
                cells[column] += 1
                load.update((column, int(expert)) for expert in trace.topk_ids[token, column])
    return cells, load


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 99), st.integers(0, 9)), min_size=1, max_size=4))
@pytest.mark.parametrize(("experts", "top_k"), [(6, 2), (300, 3), (2, 2)])
def test_sums_are_those_of_each_cell(experts, top_k, parts):
    traces = [a_trace(seed, tokens, experts, top_k) for seed, tokens in parts]
    cells, load = [0] * len(LAYERS), Counter()
    for trace in traces:
        some, chosen = cell_by_cell(trace)
        cells = [a + b for a, b in zip(cells, some, strict=True)]
        load += chosen
    found = sum(map(ExpertLoad.of, traces))
    assert (found.traces, found.tokens) == (len(parts), sum(tokens for _, tokens in parts))
    assert found.cells.tolist() == cells
    assert found.load.shape == (len(LAYERS), experts)
    assert {at: int(n) for at, n in np.ndenumerate(found.load) if n} == dict(load)


def test_measures_by_hand():
    load = ExpertLoad(
        layer_ids=(0, 2, 3),
        num_experts=4,
        top_k=1,
        traces=1,
        tokens=8,
        cells=np.array([8, 8, 0]),
        load=np.array([[2, 2, 2, 2], [0, 6, 2, 0], [0, 0, 0, 0]]),
    )
    assert load.relative.tolist() == [[1, 1, 1, 1], [0, 3, 1, 0], [0, 0, 0, 0]]
    assert load.balancedness.tolist() == [1, 2 / 6, 1]
    skewed = (0.75 * math.log2(4 / 3) + 0.25 * 2) / 2
    assert load.entropy == pytest.approx([1, skewed, 0])
    assert repr(load) == "<ExpertLoad 8 tokens of 1 traces: 3 layers 0 to 3, top-1 of 4>"
    # The placement of the docstring: experts 0 and 3 on rank 0, 1 and 2 on rank 1.
    on_ranks = load.load @ np.eye(2, dtype=int)[[0, 1, 1, 0]]
    assert on_ranks.tolist() == [[4, 4], [0, 8], [0, 0]]


def test_counts_of_other_models_do_not_add_up():
    one, other = ExpertLoad.of(a_trace(1, 3)), ExpertLoad.of(a_trace(1, 3, experts=7))
    with pytest.raises(InvalidArgument, match=r"other .*top-2 of 7.*top-2 of 6"):
        one + other
    with pytest.raises(TypeError):
        one + 1
    assert one == ExpertLoad.of(a_trace(1, 3))
    assert one != other
    assert one != one + one


def test_ids_that_no_router_chooses_are_not_counted():
    layout = ModelLayout((0,), 1, 4, 2)
    trace = trace_of(layout, np.array([[[1, 4]]], np.uint8), np.array([[True]]))
    with pytest.raises(Corrupt, match=r"position 0, layer 0"):
        ExpertLoad.of(trace)
    with pytest.raises(InvalidArgument, match="trace"):
        ExpertLoad.of(trace.topk_ids)
