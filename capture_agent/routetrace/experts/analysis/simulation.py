"""Simulation of caches of expert weights on recorded routing.

A simulated cache is the one that serves weights (`ExpertCache`) with the same policies, so its
counts are those of a run. Each layer has a cache. Time is not simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from routetrace.common.errors import InvalidArgument
from routetrace.experts.cache import ExpertCache
from routetrace.experts.forecast import ExpertForecast
from routetrace.experts.policy import Lfu, Lru, Policy
from routetrace.experts.rows import check_rows, side_by_side

#: Experts that each pass of one layer needs, ascending, each once.
Passes = Sequence[Sequence[int]]

#: Policies by name. "belady" knows the future: no cache is better. "hazard" needs a forecast.
POLICIES = ("lru", "lfu", "hazard", "belady")


class Belady:
    """Evict the expert that is needed again last, or never: the optimum, in hindsight.

    Args:
        passes: the arguments of all later calls of `used`, in order.
        num_experts: E.
    """

    def __init__(self, passes: Passes, num_experts: int) -> None:
        never = len(passes)
        # By expert the passes that use it, the next one last; `never` if none.
        self._uses: list[list[int]] = [[never] for _ in range(num_experts)]
        for at in range(never - 1, -1, -1):
            for expert in passes[at]:
                self._uses[expert].append(at)

    def used(self, experts: Sequence[int]) -> None:
        """See `Policy.used`."""
        for expert in experts:
            self._uses[expert].pop()

    def victim(self, candidates: Sequence[int]) -> int:
        """See `Policy.victim`."""
        # Of one pass: the highest id, as passes that do not fit are served in ascending order.
        return max(candidates, key=lambda expert: (self._uses[expert][-1], expert))


@dataclass(frozen=True)
class CacheCount:
    """Counts of a cache, or of the caches of all layers.

    Attributes:
        hits: experts in the cache when a pass needed them; one per pass and expert.
        misses: experts copied while the pass waited.
        ahead: experts copied before they were needed: at the start, or by a forecast.
        ahead_used: those of them that were needed before their eviction.
    """

    hits: int = 0
    misses: int = 0
    ahead: int = 0
    ahead_used: int = 0

    @property
    def hit_rate(self) -> float:
        """Hits / (hits + misses); 1.0 if no expert was needed."""
        asked = self.hits + self.misses
        return self.hits / asked if asked else 1.0

    @property
    def moved(self) -> int:
        """Experts that were copied; times the bytes of one, the bytes moved."""
        return self.misses + self.ahead

    def __add__(self, other: CacheCount) -> CacheCount:
        return CacheCount(
            self.hits + other.hits,
            self.misses + other.misses,
            self.ahead + other.ahead,
            self.ahead_used + other.ahead_used,
        )

    def __sub__(self, other: CacheCount) -> CacheCount:
        return CacheCount(
            self.hits - other.hits,
            self.misses - other.misses,
            self.ahead - other.ahead,
            self.ahead_used - other.ahead_used,
        )

    @staticmethod
    def of(cache: ExpertCache) -> CacheCount:
        """What a cache has done so far."""
        return CacheCount(cache.hits, cache.misses, cache.prefetched, cache.prefetched_used)


def steps_of(
    rows: npt.NDArray[np.integer[Any]],
    num_experts: int,
    *,
    starts: npt.NDArray[np.bool_] | None = None,
    batch: int = 1,
) -> list[npt.NDArray[np.integer[Any]]]:
    """Return the rows of each pass: one of each concurrent request.

    Args:
        rows: expert ids [n, L, K] of consecutive requests.
        num_experts: E.
        starts: bool [n]: True at the first row of a request; only needed for a batch.
        batch: concurrent requests. The next one begins when one ends.

    Returns:
        For each pass [tokens, L, K].

    Raises:
        InvalidArgument: if a shape is wrong, an id out of range, or the batch below 1.
    """
    check_rows(rows, num_experts)
    ordered, at = side_by_side(rows, starts, batch)
    return np.split(ordered, np.flatnonzero(np.diff(at)) + 1) if len(rows) else []


def passes_of(steps: Sequence[npt.NDArray[np.integer[Any]]]) -> list[list[list[int]]]:
    """Return the experts that each layer needs, pass by pass.

    Args:
        steps: of `steps_of`.

    Returns:
        For each layer its passes, each a list of experts: ascending, each once.
    """
    layers: list[list[list[int]]] = [[] for _ in range(steps[0].shape[1] if steps else 0)]
    for step in steps:
        for layer, passes in enumerate(layers):
            passes.append(sorted({*step[:, layer].ravel().tolist()}))
    return layers


def policy_of(
    name: str,
    passes: Passes,
    num_experts: int,
    forecast: ExpertForecast | None = None,
    layer: int = 0,
) -> Policy:
    """Return a new policy by its name.

    Args:
        name: of `POLICIES`.
        passes: the layer's passes, which only Belady's policy reads.
        num_experts: E.
        forecast: for "hazard".
        layer: column of the forecast.

    Raises:
        InvalidArgument: if the policy is unknown, or needs a forecast.
    """
    if name == "lru":
        return Lru(num_experts)
    if name == "lfu":
        return Lfu(num_experts)
    if name == "belady":
        return Belady(passes, num_experts)
    if name != "hazard":
        raise InvalidArgument(field="policy", value=name, expected=f"one of {', '.join(POLICIES)}")
    if forecast is None:
        raise InvalidArgument(field="forecast", value=None, expected="one, for the policy hazard")
    return forecast.policy(layer)


def simulate(passes: Passes, num_experts: int, capacity: int, policy: Policy) -> CacheCount:
    """Return the counts of one layer's cache, from empty.

    Raises:
        InvalidArgument: if the capacity is below 1 or an id out of range.
    """
    cache = ExpertCache(num_experts, capacity, policy)
    for needed in passes:
        cache.plan(needed)
    return CacheCount.of(cache)


def simulate_lru(passes: Passes, num_experts: int, capacities: Sequence[int]) -> list[CacheCount]:
    """Return the counts of LRU caches of several capacities: `simulate` with `Lru`, in one walk.

    As long as every pass fits, a larger LRU cache holds all experts of a smaller one. The place of
    an expert in the order of last use thus gives the capacities that hold it. Capacities below the
    largest pass are simulated.

    Raises:
        InvalidArgument: if a capacity is below 1 or an id out of range.
    """
    largest = max(map(len, passes), default=0)
    # Needed experts by their place in that order; the last place: never used before.
    places = np.zeros(num_experts + 1, np.int64)
    # Sort key of experts: pass of the last use, then id, as ties evict the lowest one.
    last = np.arange(num_experts) - num_experts
    total = 0
    for at, experts in enumerate(passes):
        needed = np.asarray(experts, np.int64)
        if needed.size and not 0 <= needed.min() <= needed.max() < num_experts:
            raise InvalidArgument(
                field="passes", value=needed.tolist(), expected=f"ids in [0, {num_experts})"
            )
        when = last[needed]
        place = (last[None, :] > when[:, None]).sum(1)
        np.add.at(places, np.where(when < 0, num_experts, place), 1)
        last[needed] = at * num_experts + needed
        total += len(needed)
    hits = np.cumsum(places)
    counts = []
    for capacity in capacities:
        if capacity < largest:
            counts.append(simulate(passes, num_experts, capacity, Lru(num_experts)))
        else:
            found = int(hits[min(capacity, num_experts) - 1])
            counts.append(CacheCount(found, total - found))
    return counts


def hit_curves(
    layers: Sequence[Passes],
    num_experts: int,
    capacities: Sequence[int],
    policies: Sequence[str],
    forecast: ExpertForecast | None = None,
    *,
    columns: Sequence[int] | None = None,
    progress: Callable[[], None] = lambda: None,
) -> dict[str, list[CacheCount]]:
    """Return the counts of caches of every capacity and policy, summed over layers.

    Args:
        layers: passes of each layer.
        num_experts: E.
        capacities: slots of each layer's cache.
        policies: names.
        forecast: for "hazard"; fit it on other recordings.
        columns: the forecast's layer of each of `layers`; 0, 1, ... if None.
        progress: called once per layer and policy.

    Returns:
        By policy a count for each capacity.

    Raises:
        InvalidArgument: as `simulate` and `policy_of`.
    """
    columns = range(len(layers)) if columns is None else columns
    curves = {name: [CacheCount()] * len(capacities) for name in policies}
    for column, passes in zip(columns, layers, strict=True):
        for name in policies:
            if name == "lru":
                counts = simulate_lru(passes, num_experts, capacities)
            else:
                counts = [
                    simulate(
                        passes,
                        num_experts,
                        capacity,
                        policy_of(name, passes, num_experts, forecast, column),
                    )
                    for capacity in capacities
                ]
            curves[name] = [a + b for a, b in zip(curves[name], counts, strict=True)]
            progress()
    return curves


def warm_start(
    layers: Sequence[Passes],
    num_experts: int,
    capacity: int,
    policy: str,
    forecast: ExpertForecast,
    *,
    first: int,
    warm: bool,
) -> CacheCount:
    """Return the counts of caches in their first passes, from empty or filled with hot experts.

    Args:
        layers: passes of each layer.
        num_experts: E.
        capacity: slots of each layer's cache.
        policy: a name.
        forecast: fitted on other recordings.
        first: number of passes.
        warm: whether the caches are filled before; these copies count as `ahead`.

    Raises:
        InvalidArgument: as `simulate` and `policy_of`.
    """
    total = CacheCount()
    for column, all_passes in enumerate(layers):
        passes = all_passes[:first]
        made = policy_of(policy, passes, num_experts, forecast, column)
        cache = ExpertCache(num_experts, capacity, made)
        if warm:
            cache.prefetch(forecast.hot(column, capacity).tolist())
        for needed in passes:
            cache.plan(needed)
        total += CacheCount.of(cache)
    return total


def prefetching(
    steps: Sequence[npt.NDArray[np.integer[Any]]],
    num_experts: int,
    capacity: int,
    policy: str,
    forecast: ExpertForecast,
    *,
    ahead: int,
) -> CacheCount:
    """Return the counts of caches where a layer's likeliest experts are copied a layer ahead.

    Args:
        steps: rows of each pass, of `steps_of`.
        num_experts: E.
        capacity: slots of each layer's cache.
        policy: a name.
        forecast: fitted on other recordings.
        ahead: number of likeliest experts of the next layer that each pass requests, resident ones
            included.

    Raises:
        InvalidArgument: as `simulate` and `policy_of`.
    """
    layers = passes_of(steps)
    caches = [
        ExpertCache(num_experts, capacity, policy_of(policy, passes, num_experts, forecast, at))
        for at, passes in enumerate(layers)
    ]
    for tokens, *needed in zip(steps, *layers, strict=True):
        for at, cache in enumerate(caches):
            cache.plan(needed[at])
            if ahead and at + 1 < len(caches):
                scores = forecast.next_layer(at, tokens[:, at])
                likely = np.argsort(-scores, kind="stable")[:ahead]
                caches[at + 1].prefetch(likely.tolist())
    return sum(map(CacheCount.of, caches), CacheCount())


def next_layer_recall(
    rows: npt.NDArray[np.integer[Any]], forecast: ExpertForecast, count: int
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Return the share of a layer's experts that the layer before makes likely.

    Args:
        rows: expert ids [n, L, K] that the forecast was not fitted on.
        forecast: with L layers.
        count: number of likely experts.

    Returns:
        Shares [L - 1]: among the `count` likeliest given the layer before, and, for comparison,
        among the `count` most frequent.

    Raises:
        InvalidArgument: if the rows do not fit the forecast.
    """
    check_rows(rows, forecast.num_experts, forecast.num_layers)
    found = np.zeros((2, forecast.num_layers - 1))
    for layer in range(forecast.num_layers - 1):
        hot = forecast.hot(layer + 1, count)
        following = rows[:, layer + 1]
        for here, there in zip(rows[:, layer], following, strict=True):
            likely = np.argsort(-forecast.next_layer(layer, here), kind="stable")[:count]
            found[0, layer] += np.isin(there, likely).sum()
        found[1, layer] = np.isin(following, hot).sum()
    likely, frequent = found / max(rows[:, 0].size, 1)
    return likely, frequent
