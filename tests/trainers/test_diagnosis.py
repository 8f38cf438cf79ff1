"""Diagnosis of simulated routing with realistic disagreement of the trainer."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routetrace.client import FetchPlan, Sample
from routetrace.common.errors import InvalidArgument
from routetrace.common.layout import ModelLayout
from routetrace.trainers.agreement import compare
from routetrace.trainers.diagnosis import check_alignment, diagnose
from support.ranks.disagreement import MODELS, chosen, packed, routed, shifted
from support.ranks.planned import drawn
from support.ranks.rank_rows import rows_of, trace_of

# ---------------------------------------------------------------- what fits


@settings(max_examples=60)
@given(rng=st.randoms(use_true_random=False), model=st.sampled_from(sorted(MODELS)))
def test_rows_that_fit_are_left_alone(rng: random.Random, model: str) -> None:
    layout = MODELS[model]

    def sample(rng: random.Random, number: int) -> Sample:
        return Sample.of(f"r{number}", rng.randint(1, 150))

    what = drawn(rng, layout.moe_layer_ids, sample)
    plan = FetchPlan.make(layout, what.batch, what.rank)
    of = routed(layout, [s.num_tokens for s in what.batch.samples], rng.randrange(99))
    rows = rows_of(plan, of.engine, missing=rng.choice([0.0, 0.3]))
    theirs = chosen(plan, of.trainer)
    assert diagnose(rows, theirs) is None
    check_alignment(rows, theirs)


@pytest.mark.parametrize("model", MODELS)
def test_the_simulated_trainer_disagrees_as_real_ones_do(model: str) -> None:
    of = routed(MODELS[model], [300], 0)
    agreement = compare(trace_of(of.layout, of.engine[0]), of.trainer[0])
    assert agreement.disagreement is not None
    assert 0.02 < agreement.disagreement < 0.15


@pytest.mark.parametrize("drift", [0.2, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("model", MODELS)
def test_a_trainer_that_moved_far_is_no_alarm(model: str, drift: float) -> None:
    of = routed(MODELS[model], [300], 1, drift)
    trace = trace_of(of.layout, of.engine[0])
    assert compare(trace, of.trainer[0]).disagreement > 0.15
    assert diagnose(trace, of.trainer[0]) is None


@pytest.mark.parametrize("seed", range(4, 8))
def test_routers_that_barely_agree_are_no_alarm_somewhere(seed: int) -> None:
    of = routed(MODELS["wide"], [600], seed, drift=2.0)
    trace = trace_of(of.layout, of.engine[0])
    assert compare(trace, of.trainer[0]).metrics()["routing/overlap"] < 0.25
    assert diagnose(trace, of.trainer[0]) is None


def test_routers_that_always_choose_the_same_are_no_alarm() -> None:
    layout = MODELS["deepseek"]
    ids = np.broadcast_to(np.arange(6, dtype=np.uint8), (200, 12, 6))
    assert diagnose(trace_of(layout, ids), ids) is None
    # Nor if most of the choices are, and the others are noise.
    keys = np.random.default_rng(0).random((2, 200, 12, 58))
    ours, theirs = keys.argsort(axis=-1)[..., :2] + 6
    fixed = np.broadcast_to(np.arange(4), (200, 12, 4))
    ours, theirs = (np.concatenate([fixed, x], -1).astype(np.uint8) for x in (ours, theirs))
    assert diagnose(trace_of(layout, ours), theirs) is None


@settings(max_examples=150)
@given(
    experts=st.integers(2, 40),
    top_k=st.integers(1, 4),
    layers=st.integers(1, 5),
    tokens=st.integers(0, 200),
    seed=st.integers(0, 2**32 - 1),
)
def test_unrelated_ids_are_never_called_shifted(
    experts: int, top_k: int, layers: int, tokens: int, seed: int
) -> None:
    top_k = min(top_k, experts)
    layout = ModelLayout(tuple(range(layers)), layers, experts, top_k)
    keys = np.random.default_rng(seed).random((2, tokens, layers, experts))
    ours, theirs = keys.argsort(axis=-1)[..., :top_k].astype(np.uint8)
    words = diagnose(trace_of(layout, ours), theirs)
    assert words is None or words.startswith("rows match nothing")
    if tokens >= 150 and experts >= 4 * top_k and layers * top_k > 2:
        assert words is not None
    if tokens < 32:
        assert words is None


# ---------------------------------------------------------------- what does not


@pytest.mark.parametrize("by", [-2, -1, 1, 2])
@pytest.mark.parametrize("model", MODELS)
def test_shifted_rows(model: str, by: int) -> None:
    of = routed(MODELS[model], [120, 40, 70], 2)
    plan, rows = packed(of._replace(engine=[shifted(ids, by) for ids in of.engine]))
    words = diagnose(rows, chosen(plan, of.trainer))
    assert words is not None
    assert words.startswith(f"rows look shifted by {by:+d} token")
    assert "of sample 0 on" in words
    trace = trace_of(of.layout, shifted(of.engine[0], by), token_start=30)
    words = diagnose(trace, of.trainer[0])
    assert words is not None
    assert words.startswith(f"rows look shifted by {by:+d} token")
    assert "of sample" not in words
    with pytest.raises(InvalidArgument, match="rows look shifted by") as caught:
        check_alignment(trace, of.trainer[0])
    assert str(caught.value) == words  # in full


def test_rows_that_are_shifted_from_a_place_on() -> None:
    of = routed(MODELS["deepseek"], [300, 300, 300], 3)
    bent = np.concatenate([of.engine[1][:100], of.engine[1][99:-1]])
    plan, rows = packed(of._replace(engine=[of.engine[0], bent, of.engine[2]]))
    words = diagnose(rows, chosen(plan, of.trainer))
    assert words is not None
    assert words.startswith("rows look shifted by +1 token: ")
    place = words.split("from position ")[1].split(" of sample 1 on")[0]
    assert 60 <= int(place) <= 170


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("step", [-1, 1])
def test_layers_that_are_numbered_otherwise(model: str, step: int) -> None:
    of = routed(MODELS[model], [200, 100], 4)
    plan, rows = packed(of)
    words = diagnose(rows, np.roll(chosen(plan, of.trainer), step, axis=0))
    layers = of.layout.layer_ids
    assert words is not None
    assert words.startswith(f"layers look numbered otherwise: at {len(layers)} of {len(layers)} ")
    assert f"those of layer {layers[0]} share" in words
    assert f"chose at layer {layers[step]}," in words
    assert ("counted from 0" in words) == (layers[0] == 1)


def test_moe_layers_that_were_counted_from_0() -> None:
    of = routed(MODELS["deepseek"], [200], 5)
    plan, rows = packed(of)
    words = diagnose(rows, np.roll(chosen(plan, of.trainer), 3, axis=0))
    assert words is not None
    assert "MoE layers begin at layer 3, and may have been counted from 0" in words


def test_one_wrong_layer() -> None:
    of = routed(MODELS["deepseek"], [200], 5)
    plan, rows = packed(of)
    theirs = chosen(plan, of.trainer)
    theirs[[5, 8]] = theirs[[8, 5]]
    words = diagnose(rows, theirs)
    assert words is not None
    assert words.startswith("layers look numbered otherwise: at 2 of 12 layers")
    assert "those of layer 8 share" in words


def test_a_weak_likeness_is_no_shift() -> None:
    of = routed(MODELS["deepseek"], [200], 6)
    strange = routed(MODELS["deepseek"], [200], 7).engine[0]
    # The first two experts of a row are those of the row before it.
    ids = np.concatenate([np.roll(of.engine[0], 1, axis=0)[..., :2], strange[..., 2:]], axis=-1)
    words = diagnose(trace_of(of.layout, ids), of.engine[0])
    assert words is None or words.startswith("rows match nothing")


def test_rows_of_another_sample() -> None:
    of = routed(MODELS["deepseek"], [150] * 4, 6)
    plan, rows = packed(of._replace(engine=[of.engine[i] for i in (0, 2, 1, 3)]))
    words = diagnose(rows, chosen(plan, of.trainer))
    assert words is not None
    assert words.startswith("rows of sample ")
    assert set(words.split(":")[0].split()) >= {"look", "1", "2"}
    strange = routed(MODELS["deepseek"], [150], 7).engine[0]
    plan, rows = packed(of._replace(engine=[*of.engine[:3], strange]))
    words = diagnose(rows, chosen(plan, of.trainer))
    assert words is not None
    assert words.startswith("rows match nothing: for ")
    assert "of sample 3 on" in words


def test_bad_ids_are_refused() -> None:
    of = routed(MODELS["mixtral"], [50], 8)
    with pytest.raises(InvalidArgument, match="trainer_ids"):
        diagnose(trace_of(of.layout, of.engine[0]), of.trainer[0][:-1])
