"""Cached expert weights: all in host memory, some in slots on the device.

On CUDA, copies run on a stream of their own. Two rules order copies and kernels, by events:

    a wave's kernels wait for the copies into its slots
    a copy into a slot waits for the kernels of the wave that used the slot last
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from types import MappingProxyType
from typing import Any

import torch

from routetrace.common.errors import InvalidArgument
from routetrace.experts.cache import ExpertCache, Load, Wave
from routetrace.experts.guard import GuardedCache
from routetrace.experts.ids import SHIFT, check_ids, needed_experts, table_index
from routetrace.experts.lanes import CudaLanes, Lanes
from routetrace.experts.pinned import pinned_copy
from routetrace.experts.policy import Lru, Policy
from routetrace.experts.weights import ExpertWave, ExpertWeights, ProviderStats, Tensors


class CachedWeightProvider:
    """Provider of weights in host memory, some of them in slots on the device.

    `prepare` reads the ids, so it waits for their device. Run the kernels of a wave on the stream
    that is current when the wave is taken. Waves overwrite each other's weights: not for training,
    nor inside CUDA graphs.

    One caller at a time. The next call ends a batch whose waves were not all taken; its iterator
    then raises.

    Args:
        weights: of one layer. They are copied to pinned host memory for a CUDA device; suitable
            host memory is used without a copy. See `host`.
        capacity: slots; at most the number of experts are used.
        capacity_bytes: alternatively, device memory for the slots, in bytes.
        device: device of the slots; by default that of `weights`.
        policy: eviction policy, of this provider only; by default `Lru`.
        guarded: whether the policy and copies ahead are followed only as far as they pay; see
            `GuardedCache`. No effect with a slot for every expert.

    Attributes:
        host: the weights in host memory. Call `invalidate` after a change.
        device: device of the slots.
        capacity: slots.

    Raises:
        InvalidArgument: if not exactly one of the capacities is given, or it is less than one
            expert.
    """

    def __init__(
        self,
        weights: ExpertWeights,
        *,
        capacity: int | None = None,
        capacity_bytes: int | None = None,
        device: torch.device | str | None = None,
        policy: Policy | None = None,
        guarded: bool = False,
    ) -> None:
        self.device = weights.device if device is None else torch.device(device)
        self.capacity = _capacity(weights, capacity, capacity_bytes)
        count = weights.num_experts
        cache = GuardedCache if guarded and self.capacity < count else ExpertCache
        self._cache = cache(count, self.capacity, Lru(count) if policy is None else policy)
        # Tensors that are made in inference mode could not be written outside it.
        with torch.inference_mode(mode=False), torch.no_grad():
            self.host = ExpertWeights(
                _hosted(weights.weights, self.device), _hosted(weights.scales, self.device)
            )
            self._weights = _slots(self.host.weights, self.capacity, self.device)
            self._scales = _slots(self.host.scales, self.capacity, self.device)
        pairs = [(self.host.weights[name], buffer) for name, buffer in self._weights.items()]
        pairs += [(self.host.scales[name], buffer) for name, buffer in self._scales.items()]
        self._pairs = pairs
        buffers = [buffer for _, buffer in pairs]
        self._lanes = CudaLanes(buffers) if self.device.type == "cuda" else Lanes()
        # By slot: number and mark of the last copy into it, and marks by lane of the kernels that
        # used it since.
        self._copied: list[tuple[int, Any]] = [(0, None)] * self.capacity
        self._used: list[dict[Any, Any]] = [{} for _ in range(self.capacity)]
        self._fills = 0
        self._whole_on: dict[Any, int] = {}  # by lane of `everything`: fills it waited for
        self._batch: ExpertBatch | None = None
        self._bytes_moved = self._batches = self._waves = self._overflows = 0

    @property
    def whole(self) -> bool:
        """Whether every expert has a slot; `everything` needs it."""
        return self.capacity == self._cache.num_experts

    def prepare(self, topk_ids: torch.Tensor) -> ExpertBatch:
        """See `ExpertWeightProvider.prepare`. A batch that needs no expert has no wave."""
        check_ids(topk_ids, self.capacity)
        index = table_index(topk_ids, self._cache.num_experts)
        needed, has_none = needed_experts(index, self._cache.num_experts)
        self._end_batch()
        waves = self._cache.plan(needed)
        self._batches += 1
        self._overflows += len(waves) > 1
        one = len(waves) == 1 and not has_none
        self._batch = ExpertBatch(self, waves, index, topk_ids.dtype, one)
        return self._batch

    def everything(self) -> Tensors:
        """Return all weights in the order of `host`, for the kernels that are enqueued next.

        Copies missing experts; reads no ids, so it never waits for the device. Counts as a batch of
        one wave, without hits and misses.

        Raises:
            InvalidArgument: if there are fewer slots than experts.
        """
        count = self._cache.num_experts
        if not self.whole:
            raise InvalidArgument(field="capacity", value=self.capacity, expected=str(count))
        self._end_batch()
        if self._cache.num_residents < count:
            self._fill_ahead(self._cache.prefetch(range(count)))
        lane = self._lanes.kernels(None)
        if self._whole_on.get(lane) != self._fills:
            self._lanes.kernels(max(self._copied, key=_number)[1])
            self._whole_on[lane] = self._fills
        self._batches += 1
        self._waves += 1
        return MappingProxyType(self._weights)

    def warm(self, experts: Iterable[int]) -> None:
        """Fill free slots from a ranking, the hottest first.

        Raises:
            InvalidArgument: if an id is out of range.
        """
        self._end_batch()
        self._fill_ahead(self._cache.prefetch(experts, keep=self._cache.residents))

    def prefetch(self, experts: Iterable[int], keep: Iterable[int] = ()) -> None:
        """Copy experts that may be needed soon, the most wanted first, until slots run out.

        Args:
            experts: ids.
            keep: ids that are not evicted.

        Raises:
            InvalidArgument: if an id is out of range.
        """
        self._end_batch()
        self._fill_ahead(self._cache.prefetch(experts, keep))

    def invalidate(self, expert_id: int) -> None:
        """Free the slot of an expert whose weights in `host` have changed.

        Raises:
            InvalidArgument: if the id is out of range.
        """
        self._end_batch()
        slot = self._cache.slot(expert_id)
        if slot is not None:
            for lane in self._whole_on:
                self._used[slot][lane] = self._lanes.used(lane)
        self._cache.invalidate(expert_id)

    def stats(self) -> ProviderStats:
        """See `ProviderStats`."""
        cache = self._cache
        return ProviderStats(
            hits=cache.hits,
            misses=cache.misses,
            prefetched=cache.prefetched,
            prefetched_used=cache.prefetched_used,
            bytes_moved=self._bytes_moved,
            batches=self._batches,
            waves=self._waves,
            overflows=self._overflows,
        )

    def _end_batch(self) -> None:
        if self._batch is not None:
            self._batch.end()
            self._batch = None

    def _fill_ahead(self, loads: Sequence[Load]) -> None:
        try:
            self._fill(loads)
        except BaseException:  # experts that were not copied are not in the cache
            self._forget(loads)
            raise

    def _forget(self, loads: Sequence[Load]) -> None:
        for expert, _ in loads:
            self._cache.invalidate(expert)

    def _fill(self, loads: Sequence[Load]) -> None:
        """Enqueue copies into slots, after the kernels that used these last."""
        if not loads:
            return
        self._fills += 1
        with self._lanes.copying({m for _, slot in loads for m in self._used[slot].values()}):
            for expert, slot, count in _runs(loads):
                for host, buffer in self._pairs:
                    buffer[slot : slot + count].copy_(
                        host[expert : expert + count], non_blocking=True
                    )
        mark = (self._fills, self._lanes.copied())
        for _, slot in loads:
            self._copied[slot] = mark
            self._used[slot].clear()
        self._bytes_moved += len(loads) * self.host.bytes_per_expert

    def _hand_out(self, wave: Wave, topk_ids: torch.Tensor) -> tuple[ExpertWave, Any]:
        """Return a wave whose copies are enqueued, and its lane, which waits for them."""
        # Copies run in order: the last one enqueued arrives last.
        _, mark = max((self._copied[slot] for slot in wave.slots), key=_number)
        lane = self._lanes.kernels(mark)
        self._waves += 1
        handed = ExpertWave(
            MappingProxyType(self._weights),
            MappingProxyType(self._scales),
            topk_ids,
            wave.experts,
            wave.slots,
        )
        return handed, lane

    def _take_back(self, wave: Wave, lane: Any) -> None:
        """Make later copies into a wave's slots wait for its kernels, which are enqueued."""
        mark = self._lanes.used(lane)
        for slot in wave.slots:
            self._used[slot][lane] = mark


class ExpertBatch(Iterator[ExpertWave]):
    """The waves of one batch, one after the other.

    Attributes:
        one: whether one wave holds every id of the batch.
    """

    def __init__(
        self,
        provider: CachedWeightProvider,
        waves: Sequence[Wave],
        index: torch.Tensor,
        dtype: torch.dtype,
        one: bool,
    ) -> None:
        self.one = one
        self._provider = provider
        self._waves = waves
        self._loads = [list(wave.loads) for wave in waves]  # not enqueued yet
        self._index = index
        self._dtype = dtype
        self._next = 0
        self._out: tuple[Wave, Any] | None = None  # the wave in use, and its lane
        self._over = False

    def __next__(self) -> ExpertWave:
        if self._over and self._next == len(self._waves):
            raise StopIteration
        if self._over:
            raise InvalidArgument(
                field="waves",
                value="a wave of an earlier batch",
                expected="all waves of a batch taken before the provider is called again",
            )
        self._take_back()
        if self._next == len(self._waves):
            self._over = True
            self._provider._batch = None
            raise StopIteration
        wave = self._waves[self._next]
        self._enqueue(self._next, ())
        handed, lane = self._provider._hand_out(wave, self._places(wave))
        self._out = wave, lane
        self._next += 1
        if self._next < len(self._waves):
            # After the copies that this wave waits for, into slots that it does not use.
            self._enqueue(self._next, wave.slots)
        return handed

    def end(self) -> None:
        """Return the wave in use; drop experts that were not copied from the cache."""
        self._take_back()
        self._over = True
        for loads in self._loads:
            self._provider._forget(loads)

    def _take_back(self) -> None:
        if self._out is not None:
            self._provider._take_back(*self._out)
            self._out = None

    def _enqueue(self, number: int, busy: Sequence[int]) -> None:
        """Enqueue the loads of a wave, except those into busy slots."""
        loads = self._loads[number]
        self._provider._fill([load for load in loads if load[1] not in busy])
        self._loads[number] = [load for load in loads if load[1] in busy]

    def _places(self, wave: Wave) -> torch.Tensor:
        """Return the batch's ids as slots of this wave; -1 for the others."""
        table = [-1] * (self._provider._cache.num_experts + SHIFT + 1)
        for expert, slot in zip(wave.experts, wave.slots, strict=True):
            table[expert + SHIFT] = slot
        device = self._index.device
        places = torch.tensor(table, device="cpu", pin_memory=device.type == "cuda")
        return places.to(device, non_blocking=True)[self._index].to(self._dtype)


def _number(copied: tuple[int, Any]) -> int:
    return copied[0]


def _capacity(weights: ExpertWeights, experts: int | None, size: int | None) -> int:
    """Return the number of slots from a number of experts or of bytes."""
    if experts is not None and size is None:
        capacity, name, value, least = experts, "capacity", experts, 1
    elif size is not None and experts is None:
        least = weights.bytes_per_expert
        capacity, name, value = size // max(1, least), "capacity_bytes", size
    else:
        raise InvalidArgument(
            field="capacity",
            value=f"{experts}, capacity_bytes {size}",
            expected="one of the two",
        )
    if capacity < 1:
        raise InvalidArgument(
            field=name, value=value, expected=f"at least {least}, which is one expert"
        )
    return min(capacity, weights.num_experts)


def _hosted(tensors: Tensors, device: torch.device) -> dict[str, torch.Tensor]:
    """Return tensors in host memory from which copies to the device are asynchronous."""
    hosted: dict[str, torch.Tensor] = {}
    pinned = device.type == "cuda"
    for name, tensor in tensors.items():
        plain = tensor.detach()
        if pinned and not (plain.is_pinned() and plain.is_contiguous()):
            plain = pinned_copy(plain)
        elif not pinned:
            plain = plain.cpu().contiguous()
        hosted[name] = plain
    return hosted


def _slots(tensors: Tensors, capacity: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Return slots, zeroed: unset memory may be NaN, and zero times NaN is NaN."""
    slots: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        slots[name] = torch.empty((capacity, *tensor.shape[1:]), dtype=tensor.dtype, device=device)
        slots[name].view(torch.uint8).zero_()  # not every quantised dtype can be filled
    return slots


def _runs(loads: Sequence[Load]) -> Iterator[tuple[int, int, int]]:
    """Yield neighbouring experts of neighbouring slots as (expert, slot, count)."""
    expert, slot, count = *loads[0], 0
    for load in loads:
        if load != (expert + count, slot + count):
            yield expert, slot, count
            expert, slot, count = *load, 0
        count += 1
    yield expert, slot, count
