"""Placements of experts on ranks, and the load of each rank under them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from routetrace.common.errors import InvalidArgument


@dataclass(frozen=True, eq=False)
class Placement:
    """Placement of experts on ranks.

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
        """Return the load of each rank.

        Args:
            load: [L, E]: how often each expert is needed.

        Returns:
            [L, R].

        Raises:
            InvalidArgument: if the shape differs.
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
    """Return a placement of neighbouring experts on each rank.

    Raises:
        InvalidArgument: if the experts cannot be divided evenly.
    """
    size = _slots_per_rank(num_experts, ranks)
    one = np.arange(num_experts).reshape(ranks, size)
    return Placement(np.tile(one, (layers, 1, 1)), num_experts)


def round_robin(layers: int, num_experts: int, ranks: int) -> Placement:
    """Return a placement of expert e on rank e modulo ranks.

    Raises:
        InvalidArgument: if the experts cannot be divided evenly.
    """
    size = _slots_per_rank(num_experts, ranks)
    one = np.arange(num_experts).reshape(size, ranks).T
    return Placement(np.tile(one, (layers, 1, 1)), num_experts)


def balanced(load: npt.NDArray[Any], ranks: int, replicas: int = 0) -> Placement:
    """Return a greedy placement: the heaviest expert first, each on the least loaded rank.

    Args:
        load: [L, E] of a recording; judge the placement by the load of another one.
        ranks: R.
        replicas: slots of a layer beyond one for each expert. Each goes to the expert with
            the most load per slot then.

    Raises:
        InvalidArgument: if the slots cannot be divided evenly.
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
