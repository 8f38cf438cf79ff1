"""What a cache of expert weights, or a placement on ranks, would have done on recorded routing.

A simulated cache is the one that serves weights (`ExpertCache`), with the policies that it has; so
what is found here is what a run finds. A layer has a cache of its own. What is not simulated is
time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from routetrace.capture_agent.expert_cache import ExpertCache
from routetrace.capture_agent.expert_forecast import ExpertForecast, check_rows, side_by_side
from routetrace.capture_agent.expert_policy import Lfu, Lru, Policy
from routetrace.v1.errors import InvalidArgument

#: Experts that each pass of one layer needs, ascending, each once.
Passes = Sequence[Sequence[int]]

#: By name. "belady" knows the future: no cache can do better. "hazard" needs a forecast.
POLICIES = ("lru", "lfu", "hazard", "belady")


class Belady:
    """Gives up the expert that is needed again last, or never: the optimum, in hindsight.

    Args:
        passes: all that will be told to `used`, in that order.
        num_experts: E.
    """

    def __init__(self, passes: Passes, num_experts: int) -> None:
        never = len(passes)
        # By expert the passes that use it, the next one at the end; `never` where there is none.
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
    """What a cache, or the caches of all layers, did.

    Attributes:
        hits: experts that a pass needed and that were there; one per pass and expert.
        misses: those that had to be copied while the pass waited.
        ahead: experts that were copied before they were needed: at the start, or by a forecast.
        ahead_used: those of them that were needed while they were there.
    """

    hits: int = 0
    misses: int = 0
    ahead: int = 0
    ahead_used: int = 0

    @property
    def hit_rate(self) -> float:
        """Hits / (hits + misses); 1.0 where nothing was needed."""
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
    """The rows of each pass: one of each request that is under way.

    Args:
        rows: expert ids [n, L, K] of requests that follow one another.
        num_experts: E.
        starts: bool [n]: True at the first row of a request; only needed for a batch.
        batch: requests that are under way at a time. Where one ends, the next one begins.

    Returns:
        For each pass [tokens, L, K].

    Raises:
        InvalidArgument: if a shape is wrong, an id out of range, or the batch below 1.
    """
    check_rows(rows, num_experts)
    ordered, at = side_by_side(rows, starts, batch)
    return np.split(ordered, np.flatnonzero(np.diff(at)) + 1) if len(rows) else []


def passes_of(steps: Sequence[npt.NDArray[np.integer[Any]]]) -> list[list[list[int]]]:
    """What each layer needs, pass by pass.

    Args:
        steps: of `steps_of`.

    Returns:
        For each layer its passes, each the experts that it needs: ascending, each once.
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
    """A policy by its name, new.

    Args:
        name: of `POLICIES`.
        passes: what the layer will need; only Belady's looks at them.
        num_experts: E.
        forecast: for "hazard".
        layer: column of the forecast.

    Raises:
        InvalidArgument: if there is no such policy, or it needs a forecast.
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
    """What one layer's cache does, from empty.

    Raises:
        InvalidArgument: if the capacity is below 1 or an id out of range.
    """
    cache = ExpertCache(num_experts, capacity, policy)
    for needed in passes:
        cache.plan(needed)
    return CacheCount.of(cache)


def simulate_lru(passes: Passes, num_experts: int, capacities: Sequence[int]) -> list[CacheCount]:
    """What caches of several capacities do under LRU: `simulate` with `Lru`, in one go.

    A larger LRU cache holds what a smaller one holds, as long as every pass fits. So one walk with
    the experts in the order of their last use tells for every capacity whether it has an expert.
    Capacities below the largest pass are simulated.

    Raises:
        InvalidArgument: if a capacity is below 1 or an id out of range.
    """
    largest = max(map(len, passes), default=0)
    # How many needed experts stood at a place of that order; the last one: never used before.
    places = np.zeros(num_experts + 1, np.int64)
    # Orders experts: by pass of the last use, then by id, as ties go to the lowest one.
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
    """What caches of every capacity do under every policy, summed over layers.

    Args:
        layers: passes of each layer.
        num_experts: E.
        capacities: slots of each layer's cache.
        policies: names.
        forecast: for "hazard"; fitted on other recordings, if it is to say anything.
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
    """What caches do in their first passes, from empty or filled with what the traces say is hot.

    Args:
        layers: passes of each layer.
        num_experts: E.
        capacity: slots of each layer's cache.
        policy: a name.
        forecast: fitted on other recordings.
        first: how many passes.
        warm: whether the caches are filled before. What that copies is counted as `ahead`.

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
    """What caches do when the next layer's likeliest experts are copied while a layer computes.

    Args:
        steps: rows of each pass, of `steps_of`.
        num_experts: E.
        capacity: slots of each layer's cache.
        policy: a name.
        forecast: fitted on other recordings.
        ahead: how many of the likeliest experts of the next layer are asked for in each pass, the
            ones that are there already among them.

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
    """How many of a layer's experts are among those that the layer before it makes likely.

    Args:
        rows: expert ids [n, L, K] that the forecast was not fitted on.
        forecast: with L layers.
        count: how many likely experts are looked at.

    Returns:
        Shares [L - 1]: among the `count` likeliest given the layer before, and, for comparison,
        among the `count` most frequent.

    Raises:
        InvalidArgument: if the rows are not of such a model.
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


# ---------------------------------------------------------------------------- placement


@dataclass(frozen=True, eq=False)
class Placement:
    """Which experts lie on which ranks.

    Attributes:
        slots: int [L, R, S]: the expert in each of S slots of each of R ranks. An expert that is
            in several slots has replicas, between which its load is divided evenly.
        num_experts: E.

    Raises:
        InvalidArgument: if a shape is wrong, an id out of range, or an expert has no slot.
    """

    slots: npt.NDArray[np.integer[Any]]
    num_experts: int

    def __post_init__(self) -> None:
        slots = self.slots
        if slots.ndim != 3 or slots.dtype.kind not in "iu" or not slots.size:
            raise InvalidArgument(
                field="placement",
                value=f"{slots.dtype} {slots.shape}",
                expected="integers [layers, ranks, slots]",
            )
        if slots.min() < 0 or slots.max() >= self.num_experts:
            raise InvalidArgument(
                field="placement",
                value=f"ids {int(slots.min())} to {int(slots.max())}",
                expected=f"ids in [0, {self.num_experts})",
            )
        without = np.argwhere(self.replicas == 0)
        if len(without):
            layer, expert = without[0].tolist()
            raise InvalidArgument(
                field="placement",
                value=f"no slot for expert {expert} of layer {layer}",
                expected="every expert on some rank",
            )

    @property
    def replicas(self) -> npt.NDArray[np.int64]:
        """Slots of each expert [L, E]."""
        flat = self.slots.reshape(len(self.slots), -1).astype(np.int64)
        return np.stack([np.bincount(row, minlength=self.num_experts) for row in flat])

    def rank_load(self, load: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
        """What each rank has to do.

        Args:
            load: [L, E]: how often each expert is needed.

        Returns:
            [L, R].

        Raises:
            InvalidArgument: if the shape is another.
        """
        if load.shape != (len(self.slots), self.num_experts):
            raise InvalidArgument(
                field="load",
                value=load.shape,
                expected=f"shape {(len(self.slots), self.num_experts)}",
            )
        share = load / self.replicas
        layer = np.arange(len(self.slots))[:, None, None]
        return np.asarray(share[layer, self.slots].sum(2))


def contiguous(layers: int, num_experts: int, ranks: int) -> Placement:
    """Neighbouring experts on each rank.

    Raises:
        InvalidArgument: if they can not be divided evenly.
    """
    size = _slots_per_rank(num_experts, ranks)
    one = np.arange(num_experts).reshape(ranks, size)
    return Placement(np.tile(one, (layers, 1, 1)), num_experts)


def round_robin(layers: int, num_experts: int, ranks: int) -> Placement:
    """Expert e on rank e modulo ranks.

    Raises:
        InvalidArgument: if they can not be divided evenly.
    """
    size = _slots_per_rank(num_experts, ranks)
    one = np.arange(num_experts).reshape(size, ranks).T
    return Placement(np.tile(one, (layers, 1, 1)), num_experts)


def balanced(load: npt.NDArray[Any], ranks: int, replicas: int = 0) -> Placement:
    """A greedy placement by load: the heaviest first, each on the rank that has the least to do.

    Args:
        load: [L, E] of a recording; that of another one is what shows how good it is.
        ranks: R.
        replicas: slots of a layer beyond one for each expert. One after the other they go to the
            expert with the most load per slot.

    Raises:
        InvalidArgument: if the slots can not be divided evenly.
    """
    if load.ndim != 2 or not load.size or not np.isfinite(load).all() or load.min() < 0:
        raise InvalidArgument(
            field="load", value=load.shape, expected="numbers from 0 on, [layers, experts]"
        )
    if replicas < 0:
        raise InvalidArgument(field="replicas", value=replicas, expected="0 or more")
    layers, experts = load.shape
    size = _slots_per_rank(experts + replicas, ranks)
    slots = np.empty((layers, ranks, size), np.int64)
    for layer, loads in enumerate(load.astype(np.float64)):
        copies = np.ones(experts, np.int64)
        for _ in range(replicas):
            copies[np.argmax(loads / copies)] += 1
        share = loads / copies
        done = np.zeros(ranks)
        filled: list[list[int]] = [[] for _ in range(ranks)]
        for expert in np.argsort(-share, kind="stable").tolist():
            for _ in range(copies[expert]):
                rank = min((r for r in range(ranks) if len(filled[r]) < size), key=done.__getitem__)
                filled[rank].append(expert)
                done[rank] += share[expert]
        slots[layer] = filled
    return Placement(slots, experts)


def _slots_per_rank(slots: int, ranks: int) -> int:
    if ranks < 1 or slots % ranks:
        raise InvalidArgument(
            field="ranks", value=ranks, expected=f"a divisor of {slots}, the slots of a layer"
        )
    return slots // ranks
