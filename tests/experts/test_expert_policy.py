"""Policies of expert caches, against their definitions by brute force."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from routetrace.common.errors import InvalidArgument
from routetrace.experts.policy import Hazard, Lfu, Lru, Policy

NUM_EXPERTS = 6
SOME = st.sets(st.integers(0, NUM_EXPERTS - 1), min_size=1).map(sorted)
PASSES = st.lists(SOME, max_size=40)
DECAYS = (0.5, 0.75)
# Sums of powers of two: exact in any order, so that equals are equal.
WEIGHTS = st.lists(st.sampled_from([-1.0, 0.0, 0.5, 1.0]), min_size=2, max_size=2)
SHARES = st.lists(st.sampled_from([0.0, 0.25, 1.0]), min_size=NUM_EXPERTS, max_size=NUM_EXPERTS)


def tell(policy: Policy, passes: list[list[int]]) -> Policy:
    for experts in passes:
        policy.used(experts)
    return policy


def last_pass(passes: list[list[int]], expert: int) -> int:
    """Which pass used it last; -1 where none did."""
    return max((i for i, experts in enumerate(passes) if expert in experts), default=-1)


@given(PASSES, SOME)
def test_lru_gives_up_what_was_used_longest_ago(passes, candidates):
    expected = sorted((last_pass(passes, e), e) for e in candidates)[0][1]
    assert tell(Lru(NUM_EXPERTS), passes).victim(candidates) == expected


@given(PASSES, SOME)
def test_lfu_gives_up_what_fewest_passes_used(passes, candidates):
    expected = sorted((sum(e in p for p in passes), e) for e in candidates)[0][1]
    assert tell(Lfu(NUM_EXPERTS), passes).victim(candidates) == expected


@given(st.lists(SOME, max_size=20), SOME, WEIGHTS, SHARES)
def test_hazard_gives_up_what_its_memories_say_is_least_likely(passes, candidates, weights, start):
    def chance(expert: int) -> float:
        total = 0.0
        for decay, weight in zip(DECAYS, weights, strict=True):
            average = start[expert] * decay ** len(passes)
            for age, experts in enumerate(reversed(passes)):
                average += (1 - decay) * decay**age * (expert in experts)
            total += weight * average
        return total

    victim = tell(Hazard(DECAYS, weights, start), passes).victim(candidates)
    assert chance(victim) == pytest.approx(min(map(chance, candidates)), abs=1e-12)
    if not passes:  # nothing is rounded then
        assert victim == min(candidates, key=lambda e: (chance(e), e))


@given(PASSES, SOME)
def test_a_question_changes_nothing(passes, candidates):
    """Neither the answer to the next one, nor what is learnt later."""
    kinds = (Lru, Lfu, lambda n: Hazard(DECAYS, [0.25, 1.0], [0.25] * n))
    for make in kinds:
        asked, other = make(NUM_EXPERTS), make(NUM_EXPERTS)
        for experts in passes:
            asked.victim(candidates)
            assert asked.victim(candidates) == asked.victim(candidates)
            asked.used(experts)
        assert asked.victim(candidates) == tell(other, passes).victim(candidates)


@pytest.mark.parametrize("policy", [Lru(4), Lfu(4), Hazard([0.5], [1.0], [0.0] * 4)])
def test_equals_go_by_id(policy: Policy) -> None:
    tell(policy, [[1, 2], [1, 2]])
    assert policy.victim([1, 2]) == 1
    assert policy.victim([0, 1, 2, 3]) == 0
    assert policy.victim([2, 3]) == 3


def test_hazard_weighs_recency_against_frequency() -> None:
    """Expert 0 was used often, long ago; expert 1 once, just now."""
    passes = [[0]] * 20 + [[2]] * 3 + [[1]]
    for weights, victim in (((1.0, 0.0), 0), ((0.0, 1.0), 1)):
        policy = tell(Hazard((0.5, 0.98), weights, [0.0] * 3), passes)
        assert policy.victim([0, 1]) == victim


@pytest.mark.parametrize("kind", [Lru, Lfu])
def test_a_layer_without_experts(kind: type[Lru] | type[Lfu]) -> None:
    with pytest.raises(InvalidArgument, match="num_experts is 0"):
        kind(0)


@pytest.mark.parametrize(
    ("decays", "weights", "start", "field"),
    [
        ([], [], [0.5], "decays"),
        ([1.0], [1.0], [0.5], "decays"),
        ([0.5, 0.0], [1.0, 1.0], [0.5], "decays"),
        ([float("nan")], [1.0], [0.5], "decays"),
        ([0.5], [], [0.5], "weights"),
        ([0.5], [float("inf")], [0.5], "weights"),
        ([0.5], [1.0], [], "start"),
        ([0.5], [1.0], [[0.5]], "start"),
        ([0.5], [1.0], [0.5, 1.5], "start"),
        ([0.5], [1.0], [float("nan")], "start"),
    ],
)
def test_bad_hazards(decays, weights, start, field) -> None:
    with pytest.raises(InvalidArgument) as caught:
        Hazard(decays, weights, start)
    assert caught.value.field == field
