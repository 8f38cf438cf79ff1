"""Forecasts from stored traces, against brute force over small random rows."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routetrace.common.errors import InvalidArgument
from routetrace.experts import forecast as expert_forecast
from routetrace.experts.analysis.simulation import passes_of, steps_of
from routetrace.experts.forecast import (
    DECAYS,
    ExpertForecast,
    ForecastFit,
)
from routetrace.experts.rows import side_by_side
from support.models.expert_rows import drawn

LAYERS, EXPERTS, TOP_K = 3, 12, 3


def fitted(rows, **options):
    return ExpertForecast.fit(rows, num_experts=EXPERTS, **options)


@settings(max_examples=30)
@given(st.integers(1, 60), st.integers(0, 999))
def test_frequencies_and_lifts_by_their_definition(n, seed):
    rows = drawn(n, LAYERS, EXPERTS, TOP_K, seed)
    forecast = fitted(rows)
    smoothing = expert_forecast._SMOOTHING
    for layer in range(LAYERS):
        for b in range(EXPERTS):
            chosen = (rows[:, layer] == b).any(1)
            assert forecast.frequencies[layer, b] == pytest.approx(chosen.mean(), abs=1e-6)
            assert forecast.pass_rates[layer, b] == pytest.approx(chosen.mean(), abs=1e-6)
            if not layer:
                continue
            share = chosen.mean()
            for a in range(EXPERTS):
                given = (rows[:, layer - 1] == a).any(1)
                told = (chosen & given).sum() + smoothing * share
                lift = math.log(told / (given.sum() + smoothing) / share) if share else 0
                assert forecast.lift[layer - 1, a, b] == pytest.approx(lift, abs=4e-3, rel=1e-3)
    hot = forecast.hot(1, 5).tolist()
    frequency = forecast.frequencies[1].tolist()
    assert hot == sorted(range(EXPERTS), key=lambda e: (-frequency[e], e))[:5]


def brute_weights(passes, first):
    """Least squares of the uses in the passes ahead, by averages that are kept one by one."""
    ahead = expert_forecast._AHEAD
    evidence, told = [], []
    for needed in passes:
        averages = np.full((len(DECAYS), EXPERTS), first)
        x, y = [], []
        for at in range(len(needed)):
            if at + ahead <= len(needed):
                x += averages.T.tolist()
                y += [
                    sum(e in needed[t] for t in range(at, at + ahead)) / ahead
                    for e in range(EXPERTS)
                ]
            for i, decay in enumerate(DECAYS):
                for e in range(EXPERTS):
                    averages[i, e] = averages[i, e] * decay + (1 - decay) * (e in needed[at])
        evidence.append(np.array(x).T @ np.array(x))
        told.append(np.array(x).T @ np.array(y))
    unit, size = np.eye(len(DECAYS)), len(DECAYS)
    pooled = sum(evidence)
    common = np.linalg.solve(pooled + 1e-4 * np.trace(pooled) / size * unit, sum(told))
    weights = []
    for some, said in zip(evidence, told, strict=True):
        pull = expert_forecast._PULL * np.trace(some) / size
        weights.append(np.linalg.solve(some + pull * unit, said + pull * common))
    return np.array(weights)


@pytest.mark.parametrize("n", [9, 64, 65, 71, 150])
def test_weights_by_their_definition(n):
    """Blocks of 64 passes are no boundary: neither of the averages nor of what lies ahead."""
    rows = drawn(n, LAYERS, EXPERTS, TOP_K, n)
    expected = brute_weights(passes_of(steps_of(rows, EXPERTS)), TOP_K / EXPERTS)
    np.testing.assert_allclose(fitted(rows).weights, expected, rtol=2e-3, atol=2e-4)


def test_passes_of_several_tokens():
    rows = drawn(120, LAYERS, EXPERTS, TOP_K, 5)
    starts = np.arange(120) % 30 == 0
    forecast = fitted(rows, starts=starts, batch=4)
    passes = passes_of(steps_of(rows, EXPERTS, starts=starts, batch=4))
    assert len(passes[0]) == 30
    for layer in range(LAYERS):
        for e in range(EXPERTS):
            rate = sum(e in needed for needed in passes[layer]) / 30
            assert forecast.pass_rates[layer, e] == pytest.approx(rate, abs=1e-6)
    np.testing.assert_allclose(forecast.frequencies, fitted(rows).frequencies)
    expected = brute_weights(passes, min(4 * TOP_K / EXPERTS, 1.0))
    np.testing.assert_allclose(forecast.weights, expected, rtol=2e-3, atol=2e-4)


def test_memories_are_worth_what_favourites_last():
    """Favourites for ever, each pass drawn anew; and none, but passes that often come again."""
    rng = np.random.default_rng(1)
    taste = rng.normal(0, 1, EXPERTS)
    for_ever = np.argsort(taste + rng.gumbel(0, 1, (2000, 1, EXPERTS)), -1)[..., :TOP_K]
    again = np.argsort(rng.random((2000, 1, EXPERTS)), -1)[..., :TOP_K]
    for at in range(1, 2000):
        if rng.random() < 0.8:
            again[at] = again[at - 1]
    short, _, long = fitted(for_ever).weights[0]
    assert abs(short) < 0.1
    assert long > 0.8
    again_short, _, again_long = fitted(again).weights[0]
    assert again_short > 0.4
    assert again_long < 0.8 * long


def test_requests_one_by_one_are_the_requests_together():
    rows = drawn(90, LAYERS, EXPERTS, TOP_K, 2)
    fit = ForecastFit(EXPERTS)
    fit.add(rows[:40])
    fit.add(rows[40:40])
    fit.add(rows[40:])
    apart, together = fit.result(), fitted(rows)
    np.testing.assert_array_equal(apart.frequencies, together.frequencies)
    np.testing.assert_array_equal(apart.lift, together.lift)
    # Uses ahead are not looked for in the next request.
    np.testing.assert_allclose(apart.weights, together.weights, atol=0.1)
    assert not np.array_equal(apart.weights, together.weights)


def test_rows_with_missing_cells_are_left_out():
    rows = drawn(80, LAYERS, EXPERTS, TOP_K, 2)
    valid = np.ones((80, LAYERS), bool)
    valid[10:20, 1] = False
    spoilt = rows.copy()
    spoilt[10:20] = 0
    fit = ForecastFit(EXPERTS)
    fit.add(spoilt, valid=valid)
    kept = fitted(np.delete(rows, range(10, 20), 0))
    np.testing.assert_array_equal(fit.result().frequencies, kept.frequencies)
    np.testing.assert_array_equal(fit.result().weights, kept.weights)


def test_next_layer_by_its_definition():
    rows = drawn(200, LAYERS, EXPERTS, TOP_K, 9)
    forecast = fitted(rows)

    def chances(layer, experts):
        scores = [
            forecast.frequencies[layer + 1, b]
            * math.exp(0.5 * sum(float(forecast.lift[layer, a, b]) for a in experts))
            for b in range(EXPERTS)
        ]
        return [min(s * TOP_K / sum(scores), 1) for s in scores]

    one = forecast.next_layer(1, [4, 7, 2])
    np.testing.assert_allclose(one, chances(1, [4, 7, 2]), rtol=1e-4)
    several = forecast.next_layer(0, np.array([[4, 7, 2], [-1, -1, -1], [5, -1, 1]]))
    expected = np.add(chances(0, [4, 7, 2]), chances(0, [5, 1]))
    np.testing.assert_allclose(several, expected, rtol=1e-4)
    assert not forecast.next_layer(0, [-1, -1]).any()


def test_what_always_follows_is_foreseen():
    """Expert e of a layer is followed by e + 1: seen in rows that were not fitted on."""
    rng = np.random.default_rng(0)
    first = rng.permuted(np.tile(np.arange(EXPERTS), (500, 1)), axis=1)[:, :TOP_K]
    rows = np.stack([first, (first + 1) % EXPERTS], 1)
    forecast = fitted(rows[:400])
    for row in rows[400:]:
        likely = np.argsort(-forecast.next_layer(0, row[0]))[:TOP_K]
        assert set(likely.tolist()) == set(row[1].tolist())


def test_an_expert_that_was_never_chosen_is_not_likely():
    rows = np.array([[[0, 1], [2, 3]], [[1, 2], [0, 1]]] * 20)
    forecast = ExpertForecast.fit(rows, num_experts=6)
    scores = forecast.next_layer(0, [4, 5])  # nor was anything seen after these
    assert np.isfinite(scores).all()
    assert scores[4] == scores[5] == 0


def test_a_model_of_one_layer_and_rows_too_few_to_look_ahead():
    forecast = ExpertForecast.fit(np.array([[[1, 2]]]), num_experts=4)
    assert forecast.lift.shape == (0, 4, 4)
    assert forecast.weights[0].tolist() == pytest.approx([1 / len(DECAYS)] * len(DECAYS))
    assert forecast.hot(0, 2).tolist() == [1, 2]
    with pytest.raises(InvalidArgument, match="layer is 0"):
        forecast.next_layer(0, [1])


def test_saved_and_loaded(tmp_path):
    forecast = fitted(drawn(60, LAYERS, EXPERTS, TOP_K, 4))
    forecast.save(tmp_path / "a.forecast")
    again = ExpertForecast.load(tmp_path / "a.forecast")
    for name in ("frequencies", "pass_rates", "weights", "lift"):
        np.testing.assert_array_equal(getattr(again, name), getattr(forecast, name))
        assert getattr(again, name).dtype == getattr(forecast, name).dtype
        with pytest.raises(ValueError, match="read-only"):
            getattr(again, name)[0] = 0


def test_files_that_are_no_forecasts(tmp_path, monkeypatch):
    path = tmp_path / "a.npz"
    fitted(drawn(60, LAYERS, EXPERTS, TOP_K, 4)).save(path)
    whole = path.read_bytes()
    with monkeypatch.context() as patched:
        patched.setattr(expert_forecast, "DECAYS", (0.5, 0.9))
        with pytest.raises(InvalidArgument, match="decays"):
            ExpertForecast.load(path)
    for spoilt in (b"", b"no", whole[:100]):
        path.write_bytes(spoilt)
        with pytest.raises(InvalidArgument, match="a saved forecast"):
            ExpertForecast.load(path)
    np.savez(path, frequencies=np.ones((1, 2)))
    with pytest.raises(InvalidArgument, match="a saved forecast"):
        ExpertForecast.load(path)
    with pytest.raises(FileNotFoundError):
        ExpertForecast.load(tmp_path / "none")


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"frequencies": np.ones(3, np.float32)}, "frequencies"),
        ({"pass_rates": np.ones((2, 3), np.float32)}, "pass_rates"),
        ({"weights": np.full((2, len(DECAYS)), np.nan, np.float32)}, "weights"),
        ({"lift": np.ones((2, 4, 4), np.float16)}, "lift"),
        ({"lift": np.ones((1, 4, 4), np.int16)}, "lift"),
    ],
)
def test_bad_statistics(changed, field):
    whole = {
        "frequencies": np.ones((2, 4), np.float32),
        "pass_rates": np.ones((2, 4), np.float32),
        "weights": np.ones((2, len(DECAYS)), np.float32),
        "lift": np.ones((1, 4, 4), np.float16),
    }
    ExpertForecast(**whole)
    with pytest.raises(InvalidArgument) as caught:
        ExpertForecast(**(whole | changed))
    assert caught.value.field == field


def test_bad_arguments():
    rows = drawn(20, LAYERS, EXPERTS, TOP_K, 4)
    forecast = fitted(rows)
    fit = ForecastFit(EXPERTS)
    fit.add(rows)
    cases = {
        "num_experts": lambda: ForecastFit(0),
        "rows": lambda: ExpertForecast.fit(rows, num_experts=4),
        "passes": lambda: fit.add(rows, passes=np.arange(20)[::-1]),
        "layer": lambda: forecast.hot(LAYERS, 1),
        "experts": lambda: forecast.next_layer(0, [EXPERTS]),
        "batch": lambda: side_by_side(rows, None, 0),
        "starts": lambda: side_by_side(rows, np.zeros(20, int), 2),
    }
    for field, call in cases.items():
        with pytest.raises(InvalidArgument) as caught:
            call()
        assert caught.value.field == field
    for bad in (rows[:, :2], rows.astype(float), rows[0], -rows.astype(int) - 1, rows[:0, :, :0]):
        with pytest.raises(InvalidArgument, match="rows"):
            fit.add(bad)
    with pytest.raises(InvalidArgument, match="at least one whole row"):
        fitted(rows[:0])
    with pytest.raises(InvalidArgument, match="experts"):
        forecast.next_layer(0, np.zeros((1, 1, 1), int))
    with pytest.raises(InvalidArgument, match="layer is -1"):
        forecast.policy(-1)
    with pytest.raises(InvalidArgument, match="4 GiB"):
        ForecastFit(65536).add(np.zeros((1, 4, 1), int))
