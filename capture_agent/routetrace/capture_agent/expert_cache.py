"""Which experts of a layer lie in which slots of a cache, and what has to be copied for a batch.

A batch that needs no more experts than there are slots is one wave. Any other is cut into waves,
each of which fits: experts ascending, so that whoever adds up the outputs of the waves adds in the
order of a model that loops over its experts. Such waves use at most half of the slots, so that
copies for the next one find room while this one computes.

The cut depends on the batch and the capacity alone, not on what the cache holds. What a wave needs
room for, it takes from experts that neither it nor the rest of the batch needs, as the policy
says; if there are none left, from the one needed last. So no policy has fewer misses than one that
knows the future and gives up what is needed last (of those needed in the same pass, the highest id,
which comes last there): also where batches do not fit.

A slot of the wave before is as good as any other, though its copy cannot overlap: a copy takes many
times as long as what is computed with it, so fewer copies count more than copies that overlap.

Knows no torch: nothing is copied here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from routetrace.capture_agent.expert_policy import Policy
from routetrace.v1.errors import InvalidArgument

#: An expert, and the slot that it is copied to.
Load = tuple[int, int]


@dataclass(frozen=True)
class Wave:
    """Experts that are in the cache together.

    Attributes:
        experts: their ids, ascending.
        slots: the slot of each.
        loads: what has to be copied before: (expert, slot), experts and slots ascending.
    """

    experts: tuple[int, ...]
    slots: tuple[int, ...]
    loads: tuple[Load, ...]


class ExpertCache:
    """The slots of one layer. Not safe for threads.

    Args:
        num_experts: experts of the layer.
        capacity: slots.
        policy: what to give up; of this layer and this cache only.

    Attributes:
        hits: experts that were in a slot when their wave needed them, one per batch and expert.
        misses: those that were not.
        prefetched: experts that were loaded ahead.
        prefetched_used: those of them that a batch needed before they were given up again. They
            are hits, too.

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
        """The slot of an expert, None if it has none."""
        return self._slots.get(expert)

    @property
    def residents(self) -> list[int]:
        """The experts that have a slot, ascending."""
        return sorted(self._slots)

    def plan(self, needed: Iterable[int]) -> list[Wave]:
        """Finds a slot for every expert that a batch needs.

        The waves are to be served in order, the loads of each before it.

        Args:
            needed: ids, in any order.

        Returns:
            The waves: none where nothing is needed, one where everything fits.

        Raises:
            InvalidArgument: if an id is out of range; nothing has changed then.
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
        """Finds slots for experts that may be needed soon.

        Takes free slots first, then what the policy gives up; never what `keep` names, nor what is
        itself among the first `capacity` of `experts`. Where there is no more room it stops.

        Args:
            experts: ids, the most wanted first.
            keep: ids that stay.

        Returns:
            What has to be copied, experts and slots ascending.

        Raises:
            InvalidArgument: if an id is out of range; nothing has changed then.
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
        """Frees the slot of an expert; nothing where it has none.

        Raises:
            InvalidArgument: if the id is out of range.
        """
        self._checked("expert", (expert,))
        if expert in self._slots:
            self._free.append(self._give_up(expert))

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
        """Gives slots to experts that have none.

        Args:
            experts: no more than there are slots for.
            candidates: residents that may go, ascending; the list is used up.
            last: residents that may go when there are no others, the highest first; likewise.
        """
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
            slots.append(self._give_up(victim))
        # Both ascending: neighbours are copied in one go.
        loads = tuple(zip(sorted(experts), sorted(slots), strict=True))
        self._slots.update(loads)
        return loads

    def _give_up(self, expert: int) -> int:
        self._ahead.discard(expert)
        return self._slots.pop(expert)

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """Where a plan breaks off, its copies will not happen: then nothing is in any slot."""
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
