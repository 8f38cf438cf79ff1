"""benchmarks/scale_model.py: no token is lost in the model, and a seed says all."""

from __future__ import annotations

import importlib
import math
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def model(monkeypatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("scale.model")


@pytest.fixture
def tables(monkeypatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("scale_model")


#: A load that a server takes, one beyond its core, and one beyond the agents' queues.
DROPPING = {"nodes": 40, "tokens": 20_000, "seconds": 900}
LOADS = [{"nodes": 4}, {"nodes": 40}, pytest.param(DROPPING, marks=pytest.mark.long)]


@pytest.mark.parametrize("killed", [math.inf, 20.0])
@pytest.mark.parametrize("load", LOADS, ids=["light", "heavy", "dropping"])
def test_each_token_is_acknowledged_or_queued_or_dropped(model, load, killed):
    setup = model.Setup(**load)
    (engines,) = setup.engines_of()
    result = model.Partition(setup, engines, "1", killed).run()
    fates = result.acknowledged + result.queued + result.dropped
    assert fates == pytest.approx(result.made, rel=1e-9)
    assert result.made == pytest.approx(setup.nodes * setup.tokens * setup.seconds, rel=0.02)
    assert (result.dropped > 0) is ("seconds" in load)
    assert result.rates.busy <= 1.01


def test_a_seed_says_all(model):
    setup = model.Setup(nodes=8)
    first, again, other = (model.Partition(setup, 64, seed).run() for seed in ("1", "1", "2"))
    assert first.latencies == again.latencies
    assert first.rates == again.rates
    assert first.latencies != other.latencies


def test_runs_are_placed_as_the_product_places_them(model):
    setup = model.Setup(nodes=10, runs=7, servers=3)
    dealt, hashed = setup.engines_of(), replace(setup, pinned=False).engines_of()
    assert sum(dealt) == sum(hashed) == 80
    assert max(dealt) - min(dealt) <= 80 // 7 + 1
    assert hashed == [
        sum(12 if n < 3 else 11 for n in range(7) if model.place(f"run-{n}", 3) == at)
        for at in range(3)
    ]


def test_a_light_load_is_one_put_for_each_chunk(model):
    result = model.Partition(model.Setup(nodes=1, engines=1), 1, "1").run()
    assert result.rates.puts == pytest.approx(5_000 / 3_120, rel=0.05)


def test_a_standby_drains_what_the_agents_kept(model):
    setup = model.Setup(nodes=6, seconds=120)
    (engines,) = setup.engines_of()
    calm, hit = (model.Partition(setup, engines, "1", killed=k).run() for k in (math.inf, 60.0))
    assert math.isnan(calm.drained)
    assert setup.lease + setup.replay < hit.drained < 60
    assert hit.backlog > 3 * calm.backlog


def test_leases_cost_requests_without_load(tables):
    def leases(**setup: int) -> tuple[float, float, float]:
        return tables.Total(tables.Setup(**setup), [tables.Result()]).leases

    assert leases(sharing=1) == pytest.approx((0.8, 0, 0))
    assert leases(sharing=2) == pytest.approx((1, 1.05, 1.05))
    assert leases(servers=10, sharing=10) == pytest.approx((26, 75.25, 91.25))
    total = tables.Total(tables.Setup(sharing=1), [tables.Result()])
    assert total.requests_usd(tables.Prices()) == (0, pytest.approx(0.8 * 3600 * 5e-6))
