"""Weights of a layer's experts, and the interface that provides them.

A provider takes the ids that a batch was routed to, and returns waves: weights, and the ids as
places in them. The sum of the outputs of all waves is the output of the batch: exactly the result
of indexing all weights, at every capacity. A batch that needs more experts than fit takes more
waves; nothing is left out or approximated.

Ids before `prepare` are logical, those after it are not: capture reads them before.

Depends on torch, on no engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch

from routetrace.common.errors import InvalidArgument
from routetrace.experts.ids import check_ids, needed_experts, table_index

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class ExpertWeights:
    """The tensors of one layer's experts.

    Attributes:
        weights: by name, each [E, ...].
        scales: of quantised weights, by name, each [E, ...].

    Raises:
        InvalidArgument: if there are no weights, or a tensor (which is named) has no experts, or
            differs from the first in the number of experts or the device.
    """

    weights: Tensors
    scales: Tensors = field(default_factory=dict[str, torch.Tensor])

    def __post_init__(self) -> None:
        if not self.weights:
            raise InvalidArgument(field="weights", value={}, expected="at least one tensor")
        first = next(iter(self.weights.values()))
        for kind, tensors in (("weights", self.weights), ("scales", self.scales)):
            for name, tensor in tensors.items():
                if tensor.dim() == 0 or tensor.shape[0] == 0:
                    raise InvalidArgument(
                        field=f"{kind}.{name}",
                        value=f"shape {tuple(tensor.shape)}",
                        expected="[E, ...], with at least one expert",
                    )
                if tensor.shape[0] != first.shape[0]:
                    raise InvalidArgument(
                        field=f"{kind}.{name}",
                        value=f"{tensor.shape[0]} experts",
                        expected=f"{first.shape[0]}, as the first tensor has",
                    )
                if tensor.device != first.device:
                    raise InvalidArgument(
                        field=f"{kind}.{name}",
                        value=f"on {tensor.device}",
                        expected=f"on {first.device}, as the first tensor is",
                    )

    @property
    def num_experts(self) -> int:
        """Number of experts of the layer."""
        return next(iter(self.weights.values())).shape[0]

    @property
    def device(self) -> torch.device:
        """Device of all tensors."""
        return next(iter(self.weights.values())).device

    @property
    def bytes_per_expert(self) -> int:
        """Bytes of one expert, scales included."""
        tensors = (*self.weights.values(), *self.scales.values())
        return sum(t.element_size() * t[0].numel() for t in tensors)


@dataclass(frozen=True)
class ExpertWave:
    """Weights for some experts of a batch. Valid until the next wave is taken.

    Attributes:
        weights: by name, on the device, each [slots, ...].
        scales: likewise.
        topk_ids: the batch's ids [n, K], as slots of the weights; -1 (in unsigned dtypes the
            largest number) where a pair has no expert, or one of another wave. Dtype and device as
            given.
        experts: the experts of this wave, ascending.
        slots: the slot of each.
    """

    weights: Tensors
    scales: Tensors
    topk_ids: torch.Tensor
    experts: tuple[int, ...]
    slots: tuple[int, ...]


@dataclass(frozen=True)
class ProviderStats:
    """Counts of a provider.

    Attributes:
        hits: experts on the device when their wave needed them.
        misses: experts not on the device then.
        prefetched: experts copied ahead, by `warm` and `prefetch`.
        prefetched_used: those of them that a batch needed before their eviction; also hits.
        bytes_moved: to the device, ahead and on demand.
        batches: calls of `prepare`.
        waves: waves returned.
        overflows: batches that needed more experts than fit.
    """

    hits: int = 0
    misses: int = 0
    prefetched: int = 0
    prefetched_used: int = 0
    bytes_moved: int = 0
    batches: int = 0
    waves: int = 0
    overflows: int = 0


class ExpertWeightProvider(Protocol):
    """Provider of the weights of a layer's experts. One caller at a time."""

    def prepare(self, topk_ids: torch.Tensor) -> Iterator[ExpertWave]:
        """Return the waves of a batch; the caller adds up their outputs, in order, from zero.

        Args:
            topk_ids: logical ids [n, K] of an integer dtype, on any device; -1 names none.

        Raises:
            InvalidArgument: if the ids are not integers [n, K], or out of range.
        """
        ...

    def invalidate(self, expert_id: int) -> None:
        """Drop the cached weights of an expert, whose weights have changed."""

    def stats(self) -> ProviderStats:
        """Return the counts so far."""
        ...


class FullGPUProvider:
    """Provider with all weights on the device: one wave, ids and weights as given.

    Values of ids are checked on the CPU only: elsewhere the check would wait for the device.
    """

    def __init__(self, weights: ExpertWeights) -> None:
        self.weights = weights
        self._batches = 0

    def prepare(self, topk_ids: torch.Tensor) -> Iterator[ExpertWave]:
        """See `ExpertWeightProvider.prepare`. One wave, of all experts, also of an empty batch."""
        count = self.weights.num_experts
        check_ids(topk_ids)
        if topk_ids.device.type == "cpu":
            needed_experts(table_index(topk_ids, count), count)
        self._batches += 1
        every = tuple(range(count))
        weights = self.weights
        return iter([ExpertWave(weights.weights, weights.scales, topk_ids, every, every)])

    def invalidate(self, expert_id: int) -> None:
        """Check the id; nothing is cached.

        Raises:
            InvalidArgument: if the id is out of range.
        """
        if not 0 <= expert_id < self.weights.num_experts:
            raise InvalidArgument(
                field="expert_id",
                value=expert_id,
                expected=f"an id in [0, {self.weights.num_experts})",
            )

    def stats(self) -> ProviderStats:
        """Return the counts of batches and waves; hits and misses are not counted."""
        return ProviderStats(batches=self._batches, waves=self._batches)
