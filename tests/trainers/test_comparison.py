"""Comparison of two reads, against sets of experts that are counted one by one."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from routetrace.client import Trace
from routetrace.codec.records import DIGEST, digest_key, token_digests
from routetrace.common.errors import InvalidArgument
from routetrace.common.layout import ModelLayout
from routetrace.trainers.comparison import compare_ids, compare_traces
from support.ranks.disagreement import MODELS, routed, shifted
from support.ranks.rank_rows import trace_of

LAYOUT = ModelLayout((1, 3, 4, 7), 9, 12, 2)


def drawn(rng: random.Random, layers: tuple[int, ...]) -> Trace:
    """A read of some positions and layers, with holes."""
    start, count = rng.randrange(6), rng.randint(1, 30)
    np_rng = np.random.default_rng(rng.randrange(1 << 30))
    ids = np_rng.permuted(np.tile(np.arange(12), (count, len(layers), 1)), axis=2)[..., :2]
    whole = trace_of(
        LAYOUT,
        np.zeros((count, 4, 2), np.uint8),
        token_start=start,
        versions=[(0, 10, 3), (10, 99, 4)],
    )
    valid = np_rng.random((len(layers), count)) < rng.choice([0.5, 1.0])
    return replace(
        whole, layer_ids=layers, _ids=ids.astype(np.uint8).transpose(1, 0, 2).copy(), _valid=valid
    )


def cells_of(trace: Trace) -> dict[tuple[int, int], frozenset[int]]:
    """The experts of each valid cell, by position and layer."""
    return {
        (trace.token_start + t, layer): frozenset(trace.topk_ids[t, column].tolist())
        for t in range(len(trace))
        for column, layer in enumerate(trace.layer_ids)
        if trace.valid[t, column]
    }


@pytest.mark.parametrize("seed", range(80))
def test_it_counts_the_cells_that_both_have(seed: int):
    rng = random.Random(seed)
    layers = [tuple(sorted(rng.sample(LAYOUT.layer_ids, rng.randint(1, 4)))) for _ in range(2)]
    a, b = (drawn(rng, some) for some in layers)
    ours, theirs = cells_of(a), cells_of(b)
    positions = range(max(a.token_start, b.token_start), min(a.token_stop, b.token_stop))
    common = [layer for layer in a.layer_ids if layer in b.layer_ids]
    if not positions or not common:
        with pytest.raises(InvalidArgument, match="nothing in common"):
            compare_traces(a, b)
        return
    found = compare_traces(a, b, worst=100)
    both = sorted(ours.keys() & theirs.keys())
    differing = [cell for cell in both if ours[cell] != theirs[cell]]
    assert (found.start, found.stop) == (positions.start, positions.stop)
    assert list(found.layer_ids) == common
    assert (found.cells, found.differing) == (len(both), len(differing))
    assert found.tokens == len({t for t, _ in both})
    assert found.differing_tokens == len({t for t, _ in differing})
    assert found.missing == len(positions) * len(common) - len(both)
    shared = sum(len(ours[cell] & theirs[cell]) for cell in both)
    assert found.overlap == (pytest.approx(shared / (2 * len(both))) if both else None)
    for layer in common:
        of_layer = [cell for cell in both if cell[1] == layer]
        counts = found.by_layer[layer]
        assert counts.cells == len(of_layer)
        assert counts.differing == len([c for c in of_layer if c in differing])
    for version, counts in found.by_version.items():
        assert counts.cells == len([c for c in both if (3 if c[0] < 10 else 4) == version])
    by_token: dict[int, float] = {}
    for token in {t for t, _ in differing}:
        some = [cell for cell in both if cell[0] == token]
        by_token[token] = sum(len(ours[c] & theirs[c]) for c in some) / (2 * len(some))
    order = sorted(by_token, key=lambda t: (round(by_token[t], 9), t))
    assert [one.position for one in found.worst] == order
    for one in found.worst:
        assert one.overlap == pytest.approx(by_token[one.position])
        assert one.differing == len([c for c in differing if c[0] == one.position])
        assert one.layers == len([c for c in both if c[0] == one.position])
        assert one.weight_version == (3 if one.position < 10 else 4)
    assert json.loads(json.dumps(found.to_dict())) == found.to_dict()
    as_ids = compare_ids(
        a, b.topk_ids, valid=b.valid, layer_ids=b.layer_ids, token_start=b.token_start, worst=100
    )
    assert as_ids.to_dict() == found.to_dict()


def with_tokens(ids: np.ndarray, tokens: list[int], labels: dict[str, str]) -> Trace:
    digests = token_digests(np.array(tokens), key=digest_key(labels))
    return replace(trace_of(LAYOUT, ids), token_digests=np.array(digests, DIGEST), labels=labels)


def test_rows_of_other_tokens_are_not_compared():
    count = 400
    tokens = list(range(count + 1))
    others = [*tokens[:200], 7777, *tokens[201:]]
    ids = np.zeros((count, 4, 2), np.uint8)
    ids[..., 1] = 1
    a, b = (with_tokens(ids, some, {}) for some in (tokens, others))
    found = compare_traces(a, b)
    # Digests are known every 64 tokens: that before 192 agrees, that before 256 does not.
    assert (found.other_tokens_from, found.stop) == (192, 192)
    assert (found.cells, found.differing) == (192 * 4, 0)
    same = compare_traces(a, with_tokens(ids, tokens, {}))
    assert (same.other_tokens_from, same.cells) == (None, count * 4)
    # Digests with another key say nothing.
    other_key = compare_traces(a, with_tokens(ids, tokens, {"adapter": "x"}))
    assert (other_key.other_tokens_from, other_key.cells) == (None, count * 4)


def test_tokens_that_differ_from_the_start_leave_nothing_to_compare():
    ids = np.zeros((100, 4, 2), np.uint8)
    ids[..., 1] = 1
    a = with_tokens(ids, list(range(101)), {})
    b = with_tokens(ids, list(range(5000, 5101)), {})
    with pytest.raises(InvalidArgument, match="nothing in common"):
        compare_traces(a, b)


@pytest.mark.parametrize("model", MODELS)
def test_a_likely_cause_is_named(model: str):
    of = routed(MODELS[model], [300], 3)
    trace = trace_of(of.layout, of.engine[0])
    assert compare_ids(trace, of.trainer[0]).diagnosis is None
    late = compare_ids(trace_of(of.layout, shifted(of.engine[0], 1)), of.trainer[0])
    assert late.diagnosis is not None
    assert "shifted" in late.diagnosis


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"topk_ids": np.zeros((5, 4), np.uint8)}, "topk_ids"),
        ({"topk_ids": np.zeros((5, 3, 2), np.uint8)}, "topk_ids"),
        ({"topk_ids": np.zeros((5, 4, 2))}, "topk_ids"),
        ({"layer_ids": [3, 1, 4, 7]}, "layer_ids"),
        ({"valid": np.ones((5, 4))}, "valid"),
        ({"token_start": -1}, "token_start"),
        ({"worst": 101}, "worst"),
    ],
)
def test_wrong_arguments_are_named(wrong: dict[str, Any], field: str):
    trace = trace_of(LAYOUT, np.zeros((5, 4, 2), np.uint8))
    arguments = {"topk_ids": np.zeros((5, 4, 2), np.uint8), **wrong}
    with pytest.raises(InvalidArgument) as caught:
        compare_ids(trace, **arguments)
    assert caught.value.field == field


def test_other_models_are_refused():
    other = ModelLayout((1, 3), 9, 16, 2)
    a = trace_of(LAYOUT, np.zeros((5, 4, 2), np.uint8))
    with pytest.raises(InvalidArgument, match="num_experts"):
        compare_traces(a, trace_of(other, np.zeros((5, 2, 2), np.uint8)))
