"""A cache that follows a forecast as far as that pays, else recency.

A forecast that does not fit the routing costs copies: experts copied ahead in vain, and experts
evicted too early. A second cache without weights therefore runs beside the first, by recency alone:
its misses are the copies that would be made without a forecast. A miss of the second cache that the
first one avoids is a wait that was saved. It pays for two copies: the one saved, and one more.

The credit starts at two copies a slot, which is also its maximum: one to fill the cache, one to
try. When it is spent, copies ahead stop and eviction is by recency, so the cache becomes equal to
the second one, at the price of at most a miss for each slot.

Does not depend on torch, and copies nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from routetrace.experts.cache import ExpertCache, Load, Wave
from routetrace.experts.policy import Lru, Policy

_CREDIT = 2  # copies, for each slot


class GuardedCache(ExpertCache):
    """A cache whose policy and copies ahead follow a forecast while that pays.

    Its copies (misses and copies ahead) never exceed those of a cache by recency, plus one for each
    miss that it avoids, plus five for each slot, and two for each expert of the largest batch.

    Args:
        num_experts: experts of the layer.
        capacity: slots.
        policy: eviction by a forecast; of this cache only.

    Raises:
        InvalidArgument: if a number is not positive.
    """

    def __init__(self, num_experts: int, capacity: int, policy: Policy) -> None:
        self._switch = _Switch(policy, Lru(num_experts))
        super().__init__(num_experts, capacity, self._switch)
        self._recent = ExpertCache(num_experts, capacity, Lru(num_experts))
        self._credit = self._most = _CREDIT * capacity

    def plan(self, needed: Iterable[int]) -> list[Wave]:
        """See `ExpertCache.plan`."""
        experts = list(needed)
        before = self._recent.misses - self.misses
        waves = super().plan(experts)
        self._recent.plan(experts)
        self._earn(2 * (self._recent.misses - self.misses - before))
        return waves

    def prefetch(self, experts: Iterable[int], keep: Iterable[int] = ()) -> tuple[Load, ...]:
        """See `ExpertCache.prefetch`; loads nothing while that does not pay."""
        if self._switch.recency:
            return ()
        loads = super().prefetch(experts, keep)
        self._earn(-len(loads))
        return loads

    def invalidate(self, expert: int) -> None:
        """See `ExpertCache.invalidate`."""
        super().invalidate(expert)
        self._recent.invalidate(expert)

    def _earn(self, copies: int) -> None:
        self._credit = min(self._credit + copies, self._most)
        self._switch.recency = self._credit <= 0


class _Switch:
    """One of two policies, both of which see every pass."""

    def __init__(self, forecast: Policy, recent: Policy) -> None:
        self.recency = False
        self._forecast = forecast
        self._recent = recent

    def used(self, experts: Sequence[int]) -> None:
        """See `Policy.used`."""
        self._forecast.used(experts)
        self._recent.used(experts)

    def victim(self, candidates: Sequence[int]) -> int:
        """See `Policy.victim`."""
        return (self._recent if self.recency else self._forecast).victim(candidates)
