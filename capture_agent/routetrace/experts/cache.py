"""Assignment of a layer's experts to slots of a cache, and the copies that a batch needs.

A batch that needs no more experts than slots is one wave. Any other is cut into waves that fit:
experts ascending, so that outputs are added in the order of a model that loops over its experts.
Such waves use at most half of the slots, which leaves room to copy for the next one while one
computes.

The cut depends on the batch and the capacity alone, not on the content of the cache. A wave evicts
experts that neither it nor the rest of the batch needs, by the policy; if none are left, the one
needed last. So no policy has fewer misses than one that knows the future and evicts the expert
needed last (of those needed in the same pass the highest id, which comes last there), also where
batches do not fit.

With a slot for every expert, each has the slot of its number: the slots then equal the tensor that
they were copied from.

Slots of the wave before are used like any others, though such a copy cannot overlap: a copy takes
many times as long as the computation with it, so fewer copies outweigh overlap.

Does not depend on torch, and copies nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from routetrace.common.errors import InvalidArgument
from routetrace.experts.policy import Policy

#: An expert, and the slot that it is copied to.
Load = tuple[int, int]


@dataclass(frozen=True)
class Wave:
    """Experts that are in the cache together.

    Attributes:
        experts: their ids, ascending.
        slots: the slot of each.
        loads: copies to make before: (expert, slot), experts and slots ascending.
    """

    experts: tuple[int, ...]
    slots: tuple[int, ...]
    loads: tuple[Load, ...]


class ExpertCache:
    """The slots of one layer. Not thread-safe.

    Args:
        num_experts: experts of the layer.
        capacity: slots.
        policy: eviction; of this layer and this cache only.

    Attributes:
        hits: experts in a slot when their wave needed them, one per batch and expert.
        misses: experts without a slot then.
        prefetched: experts that were loaded ahead.
        prefetched_used: those of them that a batch needed before their eviction; also hits.

    Raises:
        InvalidArgument: if a number is not positive.
    """

    def __init__(self, num_experts: int, capacity: int, policy: Policy) -> None:
        for name, value in (("num_experts", num_experts), ("capacity", capacity)):
            if value < 1:
                raise InvalidArgument(field=name, value=value, expected="at least 1")
        self.num_experts = num_experts
        self.capacity = capacity
        self.hits = self.misses = self.prefetched = self.prefetched_used = 0
        self._policy = policy
        self._slots: dict[int, int] = {}  # of the experts that have one
        self._free = list(range(capacity))
        self._ahead: set[int] = set()  # loaded ahead, and not needed since

    def slot(self, expert: int) -> int | None:
        """Return the slot of an expert, None if it has none."""
        return self._slots.get(expert)

    @property
    def num_residents(self) -> int:
        """Number of experts with a slot."""
        return len(self._slots)

    @property
    def residents(self) -> list[int]:
        """Experts with a slot, ascending."""
        return sorted(self._slots)

    def plan(self, needed: Iterable[int]) -> list[Wave]:
        """Assign a slot to every expert that a batch needs.

        Serve the waves in order, each after its loads.

        Args:
            needed: ids, in any order.

        Returns:
            The waves: none if no expert is needed, one if all fit.

        Raises:
            InvalidArgument: if an id is out of range; the cache is unchanged.
        """
        experts = sorted(set(self._checked("needed", needed)))
        if not experts:
            return []
        self._policy.used(experts)
        size = len(experts) if len(experts) <= self.capacity else max(1, self.capacity // 2)
        with self._whole():
            return [
                self._wave(experts[at : at + size], experts[at + size :])
                for at in range(0, len(experts), size)
            ]

    def prefetch(self, experts: Iterable[int], keep: Iterable[int] = ()) -> tuple[Load, ...]:
        """Assign slots to experts that may be needed soon.

        Takes free slots first, then those of the policy's victims; never evicts experts in `keep`,
        nor the first `capacity` of `experts`. Stops when slots run out.

        Args:
            experts: ids, the most wanted first.
            keep: ids that are not evicted.

        Returns:
            Copies to make, experts and slots ascending.

        Raises:
            InvalidArgument: if an id is out of range; the cache is unchanged.
        """
        wanted = list(dict.fromkeys(self._checked("experts", experts)))[: self.capacity]
        kept = set(self._checked("keep", keep)).union(wanted)
        missing = [expert for expert in wanted if expert not in self._slots]
        candidates = [expert for expert in self.residents if expert not in kept]
        with self._whole():
            loads = self._load(missing[: len(self._free) + len(candidates)], candidates, [])
        self._ahead.update(expert for expert, _ in loads)
        self.prefetched += len(loads)
        return loads

    def invalidate(self, expert: int) -> None:
        """Free the slot of an expert, if it has one.

        Raises:
            InvalidArgument: if the id is out of range.
        """
        self._checked("expert", (expert,))
        if expert in self._slots:
            self._free.append(self._evict(expert))

    def _wave(self, experts: Sequence[int], later: Sequence[int]) -> Wave:
        missing = [expert for expert in experts if expert not in self._slots]
        self.misses += len(missing)
        self.hits += len(experts) - len(missing)
        self.prefetched_used += len(self._ahead.intersection(experts))
        self._ahead.difference_update(experts)
        candidates: list[int] = []
        needed: list[int] = []
        if len(missing) > len(self._free):
            batch = {*experts, *later}
            candidates = [expert for expert in self.residents if expert not in batch]
            needed = [expert for expert in later if expert in self._slots]
        loads = self._load(missing, candidates, needed)
        return Wave(tuple(experts), tuple(self._slots[expert] for expert in experts), loads)

    def _load(
        self, experts: Sequence[int], candidates: list[int], last: list[int]
    ) -> tuple[Load, ...]:
        """Assign slots to experts that have none.

        Args:
            experts: at most as many as slots can be found for.
            candidates: residents that may be evicted, ascending; consumed.
            last: residents to evict after all candidates, ascending, from the end; consumed.
        """
        if self.capacity >= self.num_experts:
            slots = list(experts)
            self._free = [slot for slot in self._free if slot not in slots]
        else:
            slots = self._free[: len(experts)]
            del self._free[: len(experts)]
        while len(slots) < len(experts):
            if candidates:
                victim = self._policy.victim(candidates)
                if victim not in candidates:
                    raise InvalidArgument(
                        field="policy", value=f"victim {victim}", expected=f"one of {candidates}"
                    )
                candidates.remove(victim)
            else:
                victim = last.pop()
            slots.append(self._evict(victim))
        # Both ascending: neighbours are copied together.
        loads = tuple(zip(sorted(experts), sorted(slots), strict=True))
        self._slots.update(loads)
        return loads

    def _evict(self, expert: int) -> int:
        self._ahead.discard(expert)
        return self._slots.pop(expert)

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """Empty all slots if a plan raises: its copies will not be made."""
        try:
            yield
        except BaseException:
            self._slots.clear()
            self._ahead.clear()
            self._free = list(range(self.capacity))
            raise

    def _checked(self, name: str, experts: Iterable[int]) -> list[int]:
        ids = list(experts)
        for expert in ids:
            if not 0 <= expert < self.num_experts:
                raise InvalidArgument(
                    field=name, value=expert, expected=f"ids in [0, {self.num_experts})"
                )
        return ids
