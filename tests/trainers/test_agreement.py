"""Agreement of rows with a trainer's choices: every number against a naive count."""

from __future__ import annotations

import math
import pickle
import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from routetrace.client import FetchPlan, MicroBatch, Rank, RouteClient, Sample
from routetrace.common.errors import InvalidArgument
from routetrace.common.layout import ModelLayout
from routetrace.server.testing import run_server
from routetrace.trainers.agreement import Agreement, AgreementLog, compare, compare_logprobs
from support.ranks.planned import drawn
from support.ranks.rank_rows import facts_of, random_choices, rows_of, trace_of

LAYOUT = ModelLayout((1, 2, 4, 7), 9, 6, 3)


def near(ids: np.ndarray, num_experts: int, share: float, seed: int) -> np.ndarray:
    """Change the choices of a share of the cells, and the order of others."""
    rng = np.random.default_rng(seed)
    other = random_choices(ids.shape[:-1], num_experts, ids.shape[-1], seed)
    mixed = np.where(rng.random(ids.shape[:-1])[..., None] < share, other, ids)
    return rng.permuted(mixed, axis=-1)


def naive(
    ids: np.ndarray, valid: np.ndarray, theirs: np.ndarray, layer_ids: Any
) -> dict[str, float]:
    """The metrics that need no plan, of [layers, tokens, top_k], cell by cell."""
    layers, tokens, top_k = ids.shape
    cells = [(j, t) for j in range(layers) for t in range(tokens) if valid[j, t]]
    common = {c: len({*ids[c].tolist()} & {*theirs[c].tolist()}) for c in cells}
    differing = {c for c in cells if {*ids[c].tolist()} != {*theirs[c].tolist()}}
    found = {}
    if cells:
        found["disagreement"] = len(differing) / len(cells)
        found["overlap"] = sum(common.values()) / len(cells) / top_k
        with_row = {t for _, t in cells}
        found["token_disagreement"] = len({t for _, t in differing}) / len(with_row)
    for j, layer in enumerate(layer_ids):
        own = [common[c] for c in cells if c[0] == j]
        if own:
            found[f"overlap/layer_{layer}"] = sum(own) / len(own) / top_k
    return found


# ---------------------------------------------------------------- compare


@settings(max_examples=150)
@given(rng=st.randoms(use_true_random=False), data=st.data())
def test_rows_of_any_plan_against_a_naive_count(rng: random.Random, data: st.DataObject) -> None:
    what = drawn(rng, LAYOUT.moe_layer_ids)
    plan = FetchPlan.make(LAYOUT, what.batch, what.rank)
    samples = [
        random_choices((s.num_tokens, len(LAYOUT.moe_layer_ids)), 6, 3, i)
        for i, s in enumerate(what.batch.samples)
    ]
    versions = {read: rng.choice([3, 4, 6]) for read in range(len(plan.reads))}
    facts = tuple(facts_of(LAYOUT, [(0, 1 << 20, versions[i])]) for i in versions)
    rows = rows_of(plan, samples, missing=rng.choice([0.0, 0.2, 1.0]), reads=facts)
    theirs = near(rows.topk_ids, 6, 0.3, 7)
    theirs = np.where(rows.valid[..., None], theirs, np.int64(-9))  # never looked at
    as_tensor = data.draw(st.booleans())
    agreement = compare(rows, torch.from_numpy(theirs) if as_tensor else theirs)

    expected = naive(rows.topk_ids, rows.valid, theirs, rows.layer_ids)
    cells = plan.num_rows * len(rows.layer_ids)
    if cells:
        expected["coverage"] = rows.valid.sum() / cells
    placed = [t for t in range(plan.num_tokens) if plan.sample_of[t] >= 0]
    if placed:
        live = [t for t in placed if not rows.valid[:, t].all()]
        expected["fallback"] = len(live) / len(placed)
    by_age: dict[int, list[bool]] = {}
    for layer, token in np.argwhere(rows.valid):
        pair = rows.topk_ids[layer, token], theirs[layer, token]
        age = 10 - int(rows.weight_versions[token])
        by_age.setdefault(age, []).append({*pair[0].tolist()} != {*pair[1].tolist()})
    for age, differs in by_age.items():
        expected[f"disagreement/age_{age}"] = sum(differs) / len(differs)
    if by_age:
        ages = [age for age, differs in by_age.items() for _ in differs]
        expected["age"] = sum(ages) / len(ages)
    assert agreement.metrics("", weight_version=10) == pytest.approx(expected)
    if by_age:  # from the newest row on
        least = min(by_age)
        metrics = agreement.metrics("")
        for age in by_age:
            assert metrics[f"disagreement/age_{age - least}"] == pytest.approx(
                expected[f"disagreement/age_{age}"]
            )

    # Layers add up, but for the tokens that differ at some of them.
    parts = [compare(rows.layers([i]), theirs[[j]]) for j, i in enumerate(rows.layer_ids)]
    whole = sum(parts, Agreement())
    assert whole.by_layer == agreement.by_layer
    assert whole.by_version == agreement.by_version
    assert whole.present_cells == agreement.present_cells
    assert whole.planned_cells == agreement.planned_cells
    assert pickle.loads(pickle.dumps(agreement)) == agreement


@settings(max_examples=60)
@given(tokens=st.integers(0, 20), seed=st.integers(0, 99), start=st.integers(0, 5))
def test_a_trace_against_a_naive_count(tokens: int, seed: int, start: int) -> None:
    ids = random_choices((tokens, 4), 6, 3, seed)
    valid = np.random.default_rng(seed).random((tokens, 4)) < 0.7
    middle = tokens // 2
    trace = trace_of(
        LAYOUT,
        ids,
        valid,
        token_start=start,
        versions=[(start, start + middle, 1), (start + middle, start + tokens, 2)],
    )
    theirs = near(ids, 6, 0.4, seed + 1)
    agreement = compare(trace, theirs)
    expected = naive(*(x.swapaxes(0, 1) for x in (ids, valid, theirs)), trace.layer_ids)
    metrics = agreement.metrics()
    for name, value in expected.items():
        assert metrics[f"routing/{name}"] == pytest.approx(value), name
    if tokens:
        assert metrics["routing/coverage"] == pytest.approx(valid.mean())
        assert metrics["routing/fallback"] == pytest.approx((~valid.all(axis=1)).mean())
    # Positions add up, versions included.
    cut = start + tokens // 3
    parts = compare(trace.tokens(start, cut), theirs[: cut - start]) + compare(
        trace.tokens(cut), theirs[cut - start :]
    )
    assert parts == agreement
    assert set(agreement.by_version) <= {1, 2}


def test_names_stay_as_they_are() -> None:
    """Names are stable, as dashboards use them."""
    trace = trace_of(LAYOUT, random_choices((5, 4), 6, 3, 0), versions=[(0, 3, 5), (3, 5, 7)])
    agreement = compare(trace, trace.topk_ids) + compare_logprobs([0.0], [0.0])
    assert set(agreement.metrics()) == {
        "routing/disagreement",
        "routing/disagreement/age_0",
        "routing/disagreement/age_2",
        "routing/token_disagreement",
        "routing/overlap",
        "routing/overlap/layer_1",
        "routing/overlap/layer_2",
        "routing/overlap/layer_4",
        "routing/overlap/layer_7",
        "routing/age",
        "routing/coverage",
        "routing/fallback",
        "routing/logp/kl_k1",
        "routing/logp/kl_k3",
        "routing/logp/abs_diff",
        "routing/logp/mult_prob_error",
        "routing/logp/over_2x",
        "routing/logp/over_5x",
    }
    assert all(type(value) is float for value in agreement.metrics().values())
    assert Agreement().metrics() == {}
    assert Agreement().disagreement is None
    unversioned = compare(trace_of(LAYOUT, trace.topk_ids), trace.topk_ids)
    assert unversioned.by_version == {}
    assert "routing/age" not in unversioned.metrics()


def test_wide_ids() -> None:
    layout = ModelLayout((0, 1), 2, 400, 4)
    trace = trace_of(layout, random_choices((30, 2), 400, 4, 0))
    theirs = trace.topk_ids.astype(np.int64)
    assert compare(trace, theirs).disagreement == 0
    theirs[:, 0] = (theirs[:, 0] + 256) % 400  # the same low bytes, mostly
    assert compare(trace, theirs).disagreement == pytest.approx(0.5, abs=0.02)


def test_what_compare_refuses() -> None:
    ids = random_choices((5, 4), 6, 3, 0)
    valid = np.ones((5, 4), bool)
    valid[2, 1] = False
    trace = trace_of(LAYOUT, ids, valid)
    plan = FetchPlan.make(LAYOUT, MicroBatch.packed([Sample.of("a", 6)]), Rank(LAYOUT.layer_ids))
    rows = rows_of(plan, [ids])
    for of, theirs in (
        (trace, ids.swapaxes(0, 1)),
        (rows, ids),
        (trace, ids[:-1]),
        (trace, ids.astype(np.float32)),
        (trace, np.where(np.arange(5)[:, None, None] == 3, 6, ids)),
        (trace, np.where(np.arange(5)[:, None, None] == 3, -1, ids.astype(int))),
    ):
        with pytest.raises(InvalidArgument) as caught:
            compare(of, theirs)  # type: ignore[arg-type]
        assert caught.value.field == "trainer_ids"
    spoilt = ids.astype(int)
    spoilt[2, 1] = -1
    assert compare(trace, spoilt).disagreement == 0


# ---------------------------------------------------------------- log-probabilities


@settings(max_examples=100)
@given(
    pairs=st.lists(
        st.tuples(st.floats(-20, 0), st.floats(-20, 0), st.booleans()), min_size=1, max_size=20
    )
)
def test_logprobs_against_a_naive_sum(pairs: list[tuple[float, float, bool]]) -> None:
    rollout, trainer, mask = (list(x) for x in zip(*pairs, strict=True))
    kept = [a - b for a, b, keep in pairs if keep]
    metrics = compare_logprobs(rollout, trainer, mask).metrics("")
    if not kept:
        assert metrics == {}
        return
    expected = {
        "kl_k1": kept,
        "kl_k3": [math.exp(-d) - 1 + d for d in kept],
        "abs_diff": [abs(d) for d in kept],
        "mult_prob_error": [math.exp(abs(d)) for d in kept],
        "over_2x": [abs(d) > math.log(2) for d in kept],
        "over_5x": [abs(d) > math.log(5) for d in kept],
    }
    for name, values in expected.items():
        value = metrics[f"logp/{name}"]
        assert value == pytest.approx(sum(values) / len(values), rel=1e-9, abs=1e-12), name
    assert metrics["logp/kl_k3"] >= 0
    # Masked tokens may be anything.
    spoilt = [b if keep else math.nan for _, b, keep in pairs]
    assert compare_logprobs(rollout, spoilt, mask).metrics("") == metrics


def test_both_estimators_estimate_the_kl_of_rollout_and_trainer() -> None:
    rng = np.random.default_rng(0)
    p, q = rng.dirichlet(np.ones(8)), rng.dirichlet(np.ones(8))
    tokens = rng.choice(8, 200_000, p=p)
    exact = float((p * np.log(p / q)).sum())
    half = len(tokens) // 2
    parts = [
        compare_logprobs(np.log(p)[t].reshape(100, -1), np.log(q)[t].reshape(100, -1))
        for t in (tokens[:half], tokens[half:])
    ]
    metrics = sum(parts, Agreement()).metrics()
    assert metrics["routing/logp/kl_k1"] == pytest.approx(exact, rel=0.05)
    assert metrics["routing/logp/kl_k3"] == pytest.approx(exact, rel=0.05)


def test_logprobs_of_tensors() -> None:
    rollout = torch.tensor([-1.0, -2.0, -3.0], dtype=torch.bfloat16)
    trainer = torch.tensor([-1.0, -3.0, -5.0], requires_grad=True)
    mask = torch.tensor([1, 1, 0])
    metrics = compare_logprobs(rollout, trainer, mask).metrics("")
    assert metrics["logp/abs_diff"] == 0.5
    assert metrics["logp/over_2x"] == 0.5
    assert metrics["logp/over_5x"] == 0
    for field, arguments in (("trainer", ([1.0], [1.0, 2.0])), ("mask", ([1.0], [1.0], [[True]]))):
        with pytest.raises(InvalidArgument) as caught:
            compare_logprobs(*arguments)
        assert caught.value.field == field


# ---------------------------------------------------------------- logging


def test_the_log_adds_up_between_its_calls() -> None:
    logged: list[tuple[dict[str, float], int]] = []
    log = AgreementLog(lambda metrics, step: logged.append((metrics, step)), every=2, prefix="r/")
    ids = random_choices((5, 4), 6, 3, 0)
    equal = compare(trace_of(LAYOUT, ids), ids)
    other = compare(trace_of(LAYOUT, ids), (ids + 1) % 6)
    for step, agreements in enumerate([[equal, equal], [other, equal], [other], [other]]):
        for agreement in agreements:
            log.add(agreement)
        log.end_step(step)
    assert [step for _, step in logged] == [1, 3]
    assert logged[0][0] == (equal + equal + other + equal).metrics("r/")
    assert logged[1][0] == (other + other).metrics("r/")
    assert log.total == Agreement()
    with pytest.raises(InvalidArgument, match="every"):
        AgreementLog(print, every=0)


def test_the_log_reports_what_it_logs(caplog: pytest.LogCaptureFixture) -> None:
    logged: list[dict[str, float]] = []
    ids = random_choices((5, 4), 6, 3, 0)
    other = compare(trace_of(LAYOUT, ids), (ids + 1) % 6)
    with run_server() as server, RouteClient(server.target) as client:
        log = AgreementLog(
            lambda metrics, _: logged.append(metrics), every=2, client=client, reporter="rank3"
        )
        for step in range(5):
            log.add(other)
            log.end_step(step, weight_version=step)
        steps = client.agreement_history().steps
        assert [(s.step, s.weight_version) for s in steps] == [(1, 1), (3, 3)]
        assert all(s.reporters == ("rank3",) and s.agreement == other + other for s in steps)
    # The server is gone: the training goes on.
    log.end_step(5)
    assert len(logged) == 3
    assert "agreement of step 5 is not reported" in caplog.text
