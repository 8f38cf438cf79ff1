"""Limit of a forecast's cost: its copies beside those of an LRU cache."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routetrace.experts.cache import ExpertCache
from routetrace.experts.guard import GuardedCache
from routetrace.experts.policy import Lru

EXPERTS = 12


class Newest:
    """Gives up what was used last: about as wrong as a policy can be."""

    def __init__(self) -> None:
        self.used_at = [0] * 256
        self.time = 0

    def used(self, experts: Sequence[int]) -> None:
        self.time += 1
        for expert in experts:
            self.used_at[expert] = self.time

    def victim(self, candidates: Sequence[int]) -> int:
        return max(candidates, key=self.used_at.__getitem__)


def run(cache: ExpertCache, passes: Sequence[Sequence[int]], ahead: Sequence[Sequence[int]]) -> int:
    """Copies; `ahead` says what is copied ahead before each pass, `passes` what it needs."""
    copies, before = 0, cache.misses + cache.prefetched
    for needed, wanted in zip(passes, ahead, strict=True):
        copies += len(cache.prefetch(wanted))
        copies += sum(len(wave.loads) for wave in cache.plan(needed))
    assert copies == cache.misses + cache.prefetched - before
    return copies


def allowed(cache: ExpertCache, recent: ExpertCache, most: int) -> int:
    spared = max(0, recent.misses - cache.misses)
    return recent.misses + spared + 5 * cache.capacity + 2 * most


SETS = st.sets(st.integers(0, EXPERTS - 1), max_size=6).map(sorted)


@settings(max_examples=300, deadline=None)
@given(st.integers(1, EXPERTS), st.lists(st.tuples(SETS, SETS), max_size=60))
def test_copies_are_bounded_whatever_comes(capacity, actions):
    passes, ahead = [a for a, _ in actions], [b for _, b in actions]
    cache, recent = (
        GuardedCache(EXPERTS, capacity, Newest()),
        ExpertCache(EXPERTS, capacity, Lru(EXPERTS)),
    )
    most = max(map(len, passes), default=0)
    for at in range(len(passes)):
        run(cache, passes[at : at + 1], ahead[at : at + 1])
        run(recent, passes[at : at + 1], [[]])
        assert cache.misses + cache.prefetched <= allowed(cache, recent, most)


@pytest.mark.parametrize("capacity", [16, 32, 64])
def test_on_random_routing_it_moves_what_recency_moves(capacity: int) -> None:
    """2,000 tokens that choose 8 of 128 experts as they come; what is copied ahead is a guess."""
    rng = np.random.default_rng(0)
    draw = [rng.permutation(128)[:8].tolist() for _ in range(4000)]
    passes, ahead = draw[::2], draw[1::2]
    cache = GuardedCache(128, capacity, Newest())
    copies = run(cache, passes, ahead)
    recent = run(ExpertCache(128, capacity, Lru(128)), passes, [[]] * len(passes))
    assert copies <= recent + 5 * capacity + 2 * 8
    # Without the guard:
    blind = run(ExpertCache(128, capacity, Newest()), passes, ahead)
    assert blind > 1.3 * recent


def test_a_forecast_that_is_right_is_followed() -> None:
    rng = np.random.default_rng(0)
    passes = [rng.permutation(128)[:8].tolist() for _ in range(500)]
    cache = GuardedCache(128, 32, Lru(128))
    recent = ExpertCache(128, 32, Lru(128))
    copies, lazy = run(cache, passes, passes), run(recent, passes, [[]] * len(passes))
    assert cache.misses == 0
    assert copies <= lazy
