"""ExpertCache against a model of ten lines, and against the best that anybody could do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routetrace.common.errors import InvalidArgument
from routetrace.experts.cache import ExpertCache, Wave
from routetrace.experts.policy import Hazard, Lfu, Lru, Policy

NUM_EXPERTS = 8
EXPERT = st.integers(0, NUM_EXPERTS - 1)
NEEDED = st.sets(EXPERT).map(sorted)
RANKING = st.lists(EXPERT)
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("plan"), NEEDED),
        st.tuples(st.just("prefetch"), st.tuples(RANKING, NEEDED)),
        st.tuples(st.just("invalidate"), EXPERT),
    ),
    max_size=30,
)


class Highest:
    """Gives up the highest id: a policy like no other here."""

    def used(self, experts: Sequence[int]) -> None:
        pass

    def victim(self, candidates: Sequence[int]) -> int:
        return candidates[-1]


def hazard() -> Hazard:
    return Hazard((0.5, 0.9), (0.3, 0.7), np.random.default_rng(3).random(NUM_EXPERTS))


POLICIES: dict[str, Callable[[], Policy]] = {
    "lru": lambda: Lru(NUM_EXPERTS),
    "lfu": lambda: Lfu(NUM_EXPERTS),
    "hazard": hazard,
    "highest": Highest,
}


def size_of(needed: Sequence[int], capacity: int) -> int:
    return len(needed) if len(needed) <= capacity else max(1, capacity // 2)


def model(
    held: set[int], needed: list[int], capacity: int, policy: Policy
) -> Iterator[tuple[list[int], list[int]]]:
    """Experts and missing experts of each wave; `held` changes on the way."""
    if needed:
        policy.used(needed)
    size = size_of(needed, capacity)
    for at in range(0, len(needed), size or 1):
        wave, rest = needed[at : at + size], set(needed[at + size :])
        missing = [expert for expert in wave if expert not in held]
        while len(held.union(wave)) > capacity:
            idle = sorted(held - rest - set(wave))
            held.discard(policy.victim(idle) if idle else max(held & rest))
        held.update(wave)
        yield wave, missing


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=150)
@given(st.integers(1, NUM_EXPERTS + 1), ACTIONS)
def test_a_cache_of_any_actions(name, capacity, actions):
    cache = ExpertCache(NUM_EXPERTS, capacity, POLICIES[name]())
    policy = POLICIES[name]()
    held: set[int] = set()
    ahead: set[int] = set()
    counted = {"hits": 0, "misses": 0, "prefetched": 0, "prefetched_used": 0}
    content: dict[int, int] = {}  # slot -> expert, of the copies that were asked for

    def copy(loads: Sequence[tuple[int, int]]) -> None:
        assert list(loads) == sorted(loads)
        assert [slot for _, slot in loads] == sorted({slot for _, slot in loads})
        content.update((slot, expert) for expert, slot in loads)

    for action, value in actions:
        if action == "plan":
            waves = cache.plan(value)
            expected = list(model(held, value, capacity, policy))
            assert len(waves) == len(expected)
            for wave, (experts, missing) in zip(waves, expected, strict=True):
                copy(wave.loads)
                assert list(wave.experts) == experts
                assert [expert for expert, _ in wave.loads] == missing
                assert [content[slot] for slot in wave.slots] == experts
                counted["hits"] += len(experts) - len(missing)
                counted["misses"] += len(missing)
            # A batch evicts what it does not need only if it was not used before.
            counted["prefetched_used"] += sum(
                expert in ahead and expert not in missing
                for experts, missing in expected
                for expert in experts
            )
            ahead -= set(value)
        elif action == "prefetch":
            wanted, keep = list(dict.fromkeys(value[0]))[:capacity], value[1]
            before = set(held)
            for expert in wanted:
                idle = sorted(held - set(wanted) - set(keep))
                if expert in held or (len(held) == capacity and not idle):
                    continue
                if len(held) == capacity:
                    held.discard(policy.victim(idle))
                held.add(expert)
            loads = cache.prefetch(*value)
            copy(loads)
            assert {expert for expert, _ in loads} == held - before
            assert before & set(keep) <= held
            ahead |= held - before
            counted["prefetched"] += len(held - before)
        else:
            cache.invalidate(value)
            held.discard(value)
        ahead &= held
        assert cache.residents == sorted(held)
        slots = {expert: cache.slot(expert) for expert in held}
        assert all(content[slot] == expert for expert, slot in slots.items())
        assert set(slots.values()) <= set(range(capacity))
        assert [e for e in range(NUM_EXPERTS) if cache.slot(e) is None] == sorted(
            set(range(NUM_EXPERTS)) - held
        )
        assert {name: getattr(cache, name) for name in counted} == counted


class Belady:
    """Gives up what is needed last: it knows the passes, and that high ids are in later waves."""

    def __init__(self, passes: list[list[int]]) -> None:
        self._passes = passes
        self._now = -1

    def used(self, experts: Sequence[int]) -> None:
        self._now += 1
        assert self._passes[self._now] == list(experts)

    def victim(self, candidates: Sequence[int]) -> int:
        coming = self._passes[self._now + 1 :]

        def next_use(expert: int) -> tuple[int, int]:
            uses = (i for i, experts in enumerate(coming) if expert in experts)
            return next(uses, len(coming)), expert

        return max(candidates, key=next_use)


def misses(passes: list[list[int]], num_experts: int, capacity: int, policy: Policy) -> int:
    cache = ExpertCache(num_experts, capacity, policy)
    for needed in passes:
        cache.plan(needed)
    return cache.misses


def fewest_misses(passes: list[list[int]], capacity: int) -> int:
    """Of all ways to choose victims: every one is tried."""
    waves = [
        frozenset(needed[at : at + size_of(needed, capacity)])
        for needed in passes
        for at in range(0, len(needed), size_of(needed, capacity))
    ]

    @lru_cache(None)
    def best(at: int, held: frozenset[int]) -> int:
        if at == len(waves):
            return 0
        wave = waves[at]
        out = max(0, len(held | wave) - capacity)
        return len(wave - held) + min(
            best(at + 1, (held | wave) - set(gone)) for gone in combinations(held - wave, out)
        )

    return best(0, frozenset())


@settings(max_examples=200)
@given(
    st.integers(1, 5),
    st.lists(st.sets(st.integers(0, 5), min_size=1).map(sorted), min_size=1, max_size=7),
)
def test_belady_is_the_best_also_where_batches_do_not_fit(capacity, passes):
    best = fewest_misses(passes, capacity)
    assert misses(passes, 6, capacity, Belady(passes)) == best
    for policy in (Lru(6), Lfu(6), Highest()):
        assert misses(passes, 6, capacity, policy) >= best


def test_waves_of_a_batch_that_does_not_fit() -> None:
    cache = ExpertCache(10, 4, Lru(10))
    cache.plan([6, 7, 8, 9])
    assert cache.plan([0, 1, 2, 6, 9]) == [
        # 7 and 8 are not needed, so they go first,
        Wave((0, 1), (1, 2), ((0, 1), (1, 2))),
        # then 0, which is not needed any more: 6 and 9 need not be copied again.
        Wave((2, 6), (1, 0), ((2, 1),)),
        Wave((9,), (3,), ()),
    ]
    assert (cache.hits, cache.misses) == (2, 7)


def test_only_what_is_needed_later_is_left_to_go() -> None:
    cache = ExpertCache(10, 4, Lru(10))
    cache.plan([6, 7, 8, 9])
    first, second, third = cache.plan([0, 1, 6, 7, 8, 9])
    assert first == Wave((0, 1), (2, 3), ((0, 2), (1, 3)))  # in place of 9 and 8
    assert second == Wave((6, 7), (0, 1), ())
    assert third.loads == ((8, 2), (9, 3))


def test_a_single_slot() -> None:
    cache = ExpertCache(3, 1, Lru(3))
    assert cache.plan([0, 2]) == [Wave((0,), (0,), ((0, 0),)), Wave((2,), (0,), ((2, 0),))]
    assert cache.plan([2]) == [Wave((2,), (0,), ())]


def test_ids_in_any_order_and_twice() -> None:
    cache = ExpertCache(4, 4, Lru(4))
    (wave,) = cache.plan([3, 1, 3])
    assert wave.experts == (1, 3)
    assert cache.misses == 2
    assert cache.plan([]) == []


def test_prefetch_takes_the_most_wanted_and_leaves_what_is_kept() -> None:
    cache = ExpertCache(8, 3, Lru(8))
    assert cache.prefetch([5, 5, 2, 7, 1]) == ((2, 0), (5, 1), (7, 2))
    assert cache.prefetch([0, 1], keep=[2, 7]) == ((0, 1),)
    assert cache.residents == [0, 2, 7]
    assert cache.prefetch([1], keep=[0, 2, 7]) == ()
    cache.plan([0])
    assert (cache.hits, cache.prefetched, cache.prefetched_used) == (1, 4, 1)


@pytest.mark.parametrize(("field", "args"), [("num_experts", (0, 1)), ("capacity", (4, 0))])
def test_a_cache_of_nothing(field: str, args: tuple[int, int]) -> None:
    with pytest.raises(InvalidArgument) as caught:
        ExpertCache(*args, Lru(4))
    assert caught.value.field == field


@pytest.mark.parametrize("expert", [-1, 4])
@pytest.mark.parametrize(
    ("field", "call"),
    [
        ("needed", lambda cache, e: cache.plan([0, e, 3])),
        ("experts", lambda cache, e: cache.prefetch([0, e])),
        ("keep", lambda cache, e: cache.prefetch([0], [e])),
        ("expert", lambda cache, e: cache.invalidate(e)),
    ],
)
def test_ids_out_of_range_change_nothing(
    field: str, call: Callable[[ExpertCache, int], object], expert: int
) -> None:
    cache = ExpertCache(4, 2, Lru(4))
    cache.plan([1, 2])
    with pytest.raises(InvalidArgument, match=rf"{field} is {expert}; expected ids in \[0, 4\)"):
        call(cache, expert)
    assert cache.residents == [1, 2]
    assert cache.plan([1, 2])[0].loads == ()
    assert (cache.hits, cache.misses, cache.prefetched) == (2, 2, 0)


class Wrong(Lru):
    """Once, it gives up what it was not asked about."""

    def __init__(self, victim: int) -> None:
        super().__init__(8)
        self._wrong = [victim]

    def victim(self, candidates: Sequence[int]) -> int:
        return self._wrong.pop() if self._wrong else super().victim(candidates)


@pytest.mark.parametrize("call", [lambda cache: cache.plan([2, 3]), lambda c: c.prefetch([2], [0])])
def test_a_plan_that_broke_off_leaves_nothing_behind(call: Callable[[ExpertCache], object]) -> None:
    """Its copies will not happen: nobody may find the slots full."""
    cache = ExpertCache(8, 3, Wrong(7))
    cache.plan([0, 1])
    cache.plan([0, 6])
    with pytest.raises(InvalidArgument, match="victim 7"):
        call(cache)
    assert cache.residents == []
    (wave,) = cache.plan([0, 1, 2])
    assert wave.loads == ((0, 0), (1, 1), (2, 2))
