"""Simulated caches and placements: against brute force, and in the order that they must have."""

from __future__ import annotations

from functools import cache
from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routetrace.common.errors import InvalidArgument
from routetrace.experts.analysis import simulation
from routetrace.experts.analysis.placement import Placement, balanced, contiguous, round_robin
from routetrace.experts.analysis.simulation import (
    CacheCount,
    hit_curves,
    next_layer_recall,
    passes_of,
    policy_of,
    prefetching,
    simulate,
    simulate_lru,
    steps_of,
    warm_start,
)
from routetrace.experts.forecast import ExpertForecast
from routetrace.experts.policy import Lru
from support.models.expert_rows import RECORDED, drawn, recorded

EXPERTS = 6
PASSES = st.lists(
    st.sets(st.integers(0, EXPERTS - 1), min_size=1, max_size=4).map(sorted), max_size=40
)
FEW = st.lists(st.sets(st.integers(0, 4), min_size=1, max_size=2).map(sorted), max_size=7)


def fewest_misses(passes: list[list[int]], experts: int, capacity: int) -> int:
    """Of every way to choose what stays; all that a pass needs is held at once."""

    @cache
    def from_(at: int, held: frozenset[int]) -> int:
        if at == len(passes):
            return 0
        needed = frozenset(passes[at])
        others = held - needed
        room = capacity - len(needed)
        keeps = combinations(sorted(others), min(room, len(others)))
        return len(needed - held) + min(from_(at + 1, needed | frozenset(k)) for k in keeps)

    return from_(0, frozenset())


# ---------------------------------------------------------------------------- caches


@settings(max_examples=200)
@given(FEW, st.integers(2, 4))
def test_belady_is_the_best_that_there_is(passes, capacity):
    count = simulate(passes, 5, capacity, policy_of("belady", passes, 5))
    assert count.misses == fewest_misses(passes, 5, capacity)
    assert count.hits + count.misses == sum(map(len, passes))


@given(PASSES)
def test_lru_of_all_capacities_is_lru_of_each(passes):
    capacities = range(1, EXPERTS + 2)  # below the largest pass, too, and above all experts
    counts = simulate_lru(passes, EXPERTS, capacities)
    assert counts == [simulate(passes, EXPERTS, c, Lru(EXPERTS)) for c in capacities]


@settings(max_examples=300)
@given(PASSES, st.integers(1, EXPERTS))
def test_nothing_beats_belady(passes, capacity):
    best = simulate(passes, EXPERTS, capacity, policy_of("belady", passes, EXPERTS))
    for name in ("lru", "lfu"):
        assert (
            simulate(passes, EXPERTS, capacity, policy_of(name, passes, EXPERTS)).hits <= best.hits
        )


@pytest.mark.long
@pytest.mark.parametrize("name", ["drawn", *RECORDED])
@pytest.mark.parametrize("batch", [1, 3])
def test_nothing_beats_belady_on_recorded_routing(name, batch):
    """At every capacity, from one expert to all; a part of the layers and rows."""
    rows, starts, experts = recorded(name)
    forecast = ExpertForecast.fit(rows[: len(rows) // 2, ::6], num_experts=experts)
    rows, starts = rows[len(rows) // 2 :, ::6][:2000], starts[len(rows) // 2 :][:2000]
    passes = passes_of(steps_of(rows[:, :2], experts, starts=starts, batch=batch)[:60])
    capacities = [*range(1, 13), *range(13, experts, 9), experts]
    names = ["lru", "lfu", "hazard", "belady"]
    curves = hit_curves(passes, experts, capacities, names, forecast)
    for at, capacity in enumerate(capacities):
        hits = {name: counts[at].hits for name, counts in curves.items()}
        assert max(hits.values()) == hits["belady"], capacity
    # With a slot for each, all that misses is what was never there.
    ever = sum(len(set().union(*layer)) for layer in passes)
    assert {counts[-1].misses for counts in curves.values()} == {ever}
    # Not one curve four times.
    middle = curves["lru"][len(capacities) // 2], curves["belady"][len(capacities) // 2]
    assert middle[0].hits < middle[1].hits


def test_larger_caches_hit_more_often():
    rows, starts, experts = recorded("drawn")
    passes = passes_of(steps_of(rows, experts))
    curves = hit_curves(passes, experts, range(4, experts + 1), ["lru", "belady"])
    for counts in curves.values():
        rates = [count.hit_rate for count in counts]
        assert rates == sorted(rates)


def test_counts():
    count = CacheCount(3, 1, 4, 2)
    assert (count.hit_rate, count.moved) == (0.75, 5)
    assert count + CacheCount(1, 1, 1, 1) == CacheCount(4, 2, 5, 3)
    assert CacheCount().hit_rate == 1.0


def test_curves_are_sums_over_layers():
    passes = passes_of(steps_of(drawn(60, 3, 12, 3, 1), 12))
    together = hit_curves(passes, 12, [4, 6], ["lfu"])["lfu"]
    apart = [hit_curves([layer], 12, [4, 6], ["lfu"])["lfu"] for layer in passes]
    assert together == [sum(counts, CacheCount()) for counts in zip(*apart, strict=True)]


# ---------------------------------------------------------------------------- passes


@given(st.lists(st.integers(1, 5), min_size=1, max_size=9), st.integers(1, 4), st.integers(0, 99))
def test_passes_are_the_requests_side_by_side(lengths, batch, seed):
    """An engine of so many places, step by step: who has ended makes room, who waited longest
    comes in."""
    rows = drawn(sum(lengths), 2, 9, 3, seed)
    ends = np.cumsum(lengths)
    starts = np.zeros(len(rows), bool)
    starts[ends - lengths] = True
    waiting = [request.tolist() for request in np.split(rows, ends[:-1])]
    running = []
    steps = steps_of(rows, 9, starts=starts, batch=batch)
    for step in steps:
        while waiting and len(running) < batch:
            running.append(waiting.pop(0))
        assert sorted(step.tolist()) == sorted(request.pop(0) for request in running)
        running = [request for request in running if request]
    assert not running
    assert not waiting
    for layer, passes in enumerate(passes_of(steps)):
        assert passes == [sorted({*step[:, layer].ravel().tolist()}) for step in steps]


def test_without_starts_all_rows_are_one_request():
    rows = drawn(7, 2, 9, 3, 0)
    assert [step.tolist() for step in steps_of(rows, 9, batch=4)] == [
        [row] for row in rows.tolist()
    ]
    assert steps_of(rows[:0], 9) == passes_of([]) == []


def test_a_cell_that_names_an_expert_twice_needs_it_once():
    assert passes_of([np.array([[[2, 1, 2]]])]) == [[[1, 2]]]


# ---------------------------------------------------------------------------- traces


@pytest.fixture(scope="module")
def learnt():
    """Passes of the second half of drawn rows, and a forecast of the first."""
    rows = drawn(400, 3, 24, 4, 3)
    passes = passes_of(steps_of(rows[200:], 24))
    return passes, ExpertForecast.fit(rows[:200], num_experts=24), rows[200:]


def test_a_warm_start_is_the_hottest_experts(learnt):
    passes, forecast, _ = learnt
    cold = warm_start(passes, 24, 12, "lru", forecast, first=10, warm=False)
    warm = warm_start(passes, 24, 12, "lru", forecast, first=10, warm=True)
    assert cold == sum(
        (simulate(layer[:10], 24, 12, Lru(24)) for layer in passes), start=CacheCount()
    )
    assert warm.ahead == 3 * 12
    first = sum(
        len(set(layer[0]) & set(forecast.hot(at, 12).tolist())) for at, layer in enumerate(passes)
    )
    one = warm_start(passes, 24, 12, "lru", forecast, first=1, warm=True)
    assert one.hits == one.ahead_used == first > 0
    assert warm.hit_rate > cold.hit_rate


def test_nothing_ahead_is_the_plain_cache(learnt):
    passes, forecast, rows = learnt
    plain = prefetching(steps_of(rows, 24), 24, 8, "lru", forecast, ahead=0)
    assert plain == hit_curves(passes, 24, [8], ["lru"])["lru"][0]


@pytest.mark.parametrize("batch", [1, 4])
def test_what_is_copied_ahead_is_what_the_forecast_says(monkeypatch, learnt, batch):
    """A forecast that knows makes every expert but the first layer's a hit; it hears each token."""
    _, forecast, rows = learnt
    steps = steps_of(rows, 24, starts=np.arange(200) % 50 == 0, batch=batch)
    passes = passes_of(steps)
    asked = iter([(layer, step) for step in steps for layer in range(2)])

    def known(self, layer, experts):
        expected, step = next(asked)
        assert layer == expected
        np.testing.assert_array_equal(experts, step[:, layer])
        return np.isin(np.arange(24), step[:, layer + 1]).astype(float)

    monkeypatch.setattr(ExpertForecast, "next_layer", known)
    count = prefetching(steps, 24, 16, "lru", forecast, ahead=16)
    first = simulate(passes[0], 24, 16, Lru(24))
    assert len(steps[0]) == batch
    assert count.misses == first.misses
    assert count.ahead_used > 0


def test_recall_by_its_definition(learnt):
    _, forecast, rows = learnt
    likely, hot = next_layer_recall(rows[:20], forecast, 5)
    for layer in range(2):
        top = [
            set(np.argsort(-forecast.next_layer(layer, r[layer]))[:5].tolist()) for r in rows[:20]
        ]
        found = [len(set(r[layer + 1].tolist()) & t) for r, t in zip(rows, top, strict=False)]
        assert likely[layer] == pytest.approx(sum(found) / 80)
        frequent = set(forecast.hot(layer + 1, 5).tolist())
        assert hot[layer] == pytest.approx(
            sum(len(set(r[layer + 1].tolist()) & frequent) for r in rows[:20]) / 80
        )


# ---------------------------------------------------------------------------- placement


def brute_rank_load(slots, load):
    layers, ranks, size = slots.shape
    done = np.zeros((layers, ranks))
    for layer, rank, slot in product(range(layers), range(ranks), range(size)):
        expert = slots[layer, rank, slot]
        done[layer, rank] += load[layer, expert] / (slots[layer] == expert).sum()
    return done


@given(st.integers(0, 999), st.sampled_from([(2, 0), (4, 0), (4, 4), (3, 1), (5, 2), (4, 8)]))
def test_load_per_rank_by_its_definition(seed, shape):
    ranks, replicas = shape
    rng = np.random.default_rng(seed)
    load = rng.integers(0, 50, (2, 8))
    placement = balanced(load, ranks, replicas)
    assert placement.slots.shape == (2, ranks, (8 + replicas) // ranks)
    assert (placement.replicas >= 1).all()
    assert (placement.replicas.sum(1) == 8 + replicas).all()
    np.testing.assert_allclose(
        placement.rank_load(load), brute_rank_load(placement.slots, load), atol=1e-9
    )
    np.testing.assert_allclose(placement.rank_load(load).sum(1), load.sum(1), atol=1e-9)


@given(st.integers(0, 999))
def test_replicas_go_where_the_most_load_per_slot_is(seed):
    load = np.random.default_rng(seed).integers(1, 99, (1, 8))
    copies = [1] * 8
    for _ in range(4):
        copies[max(range(8), key=lambda e: (load[0, e] / copies[e], -e))] += 1
    assert balanced(load, 4, 4).replicas[0].tolist() == copies


def test_fixed_placements():
    assert contiguous(1, 6, 3).slots.tolist() == [[[0, 1], [2, 3], [4, 5]]]
    assert round_robin(1, 6, 3).slots.tolist() == [[[0, 3], [1, 4], [2, 5]]]


def test_balanced_is_better_on_what_it_was_fitted_on():
    rows = drawn(300, 4, 24, 4, 11)
    load = np.stack([np.bincount(rows[:, i].ravel(), minlength=24) for i in range(4)])
    worst = {
        name: (placement.rank_load(load).max(1) / load.sum(1) * 4).max()
        for name, placement in {
            "contiguous": contiguous(4, 24, 4),
            "round robin": round_robin(4, 24, 4),
            "balanced": balanced(load, 4),
            "replicas": balanced(load, 4, 8),
        }.items()
    }
    assert worst["replicas"] <= worst["balanced"] < 1.1
    assert worst["balanced"] < min(worst["contiguous"], worst["round robin"])


def test_the_heaviest_goes_first_to_the_rank_with_least():
    """By hand: 0 is halved (7, 7), then come 1 (6), 2 (5), 3 (4), 4 (0)."""
    slots = balanced(np.array([[14, 6, 5, 4, 0]]), 2, 1).slots[0].tolist()
    assert slots == [[0, 1, 4], [0, 2, 3]]
    # Where a rank has room no more, the other one gets what is left.
    assert balanced(np.array([[9, 1, 1, 1]]), 2).slots[0].tolist() == [[0, 3], [1, 2]]


def test_replicas_are_on_several_ranks():
    """One expert has nearly all the load: a replica on each rank."""
    load = np.full((1, 8), 1)
    load[0, 3] = 1000
    placement = balanced(load, 4, 4)
    assert placement.replicas[0, 3] == 5
    assert all(3 in rank for rank in placement.slots[0].tolist())


# ---------------------------------------------------------------------------- errors


def test_bad_arguments(learnt):
    passes, forecast, rows = learnt
    cases = {
        "capacity": lambda: simulate(passes[0], 24, 0, Lru(24)),
        "needed": lambda: simulate([[24]], 24, 4, Lru(24)),
        "passes": lambda: simulate_lru([[24]], 24, [4]),
        "policy": lambda: policy_of("random", passes[0], 24),
        "forecast": lambda: policy_of("hazard", passes[0], 24),
        "rows": lambda: steps_of(rows, 4),
        "batch": lambda: steps_of(rows, 24, batch=0),
        "starts": lambda: steps_of(rows, 24, starts=np.zeros(3, bool), batch=2),
        "ranks": lambda: contiguous(1, 8, 3),
        "replicas": lambda: balanced(np.ones((1, 8)), 4, -4),
        "load": lambda: balanced(np.full((1, 8), -1), 4),
        "placement": lambda: Placement(np.array([[[0, 1], [2, 4]]]), 4),
    }
    for field, call in cases.items():
        with pytest.raises(InvalidArgument) as caught:
            call()
        assert caught.value.field == field
    with pytest.raises(InvalidArgument, match="no slot for expert 3 of layer 0"):
        Placement(np.array([[[0, 1], [2, 2]]]), 4)
    with pytest.raises(InvalidArgument, match="integers"):
        Placement(np.zeros((2, 2)), 4)
    with pytest.raises(InvalidArgument, match="load"):
        contiguous(1, 8, 2).rank_load(np.ones((2, 8)))
    assert simulation.POLICIES == ("lru", "lfu", "hazard", "belady")
