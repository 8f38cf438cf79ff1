"""Where the weights of a layer's experts come from: all on the device, or some of them, cached.

A provider is asked with the ids that a batch was routed to. It answers with waves: weights, and
the ids as places in them. The outputs of the waves, added up, are the output of the batch: exactly
what plain indexing of all weights gives, whatever the capacity. Where a batch needs more experts
than fit, there are more waves; nothing is ever left out or approximated.

`CachedWeightProvider` keeps the weights in host memory and as many of them as fit on the device.
On CUDA, copies ride a stream of their own. Two rules order them and the kernels, by events:

    a wave's kernels wait for the copies into its slots
    a copy into a slot waits for the kernels of the wave that used the slot last

Ids before `prepare` are logical, those after it are not: whoever captures reads them before.

Knows torch; knows no engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol

import torch

from routetrace.capture_agent.expert_cache import ExpertCache, Load, Wave
from routetrace.capture_agent.expert_policy import Lru, Policy
from routetrace.v1.errors import InvalidArgument

Tensors = Mapping[str, torch.Tensor]

# What ids are shifted by where they index a table: before the experts come "too low" and -1, after
# them "too high".
_SHIFT = 2


@dataclass(frozen=True)
class ExpertWeights:
    """The tensors of one layer's experts.

    Attributes:
        weights: by name, each [E, ...].
        scales: of quantised weights, by name, each [E, ...].

    Raises:
        InvalidArgument: if there are no weights, or a tensor (which is named) has no experts,
            another number of them, or lies on another device than the first.
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
        """Experts of the layer."""
        return next(iter(self.weights.values())).shape[0]

    @property
    def device(self) -> torch.device:
        """Where all of them are."""
        return next(iter(self.weights.values())).device

    @property
    def bytes_per_expert(self) -> int:
        """Bytes of one expert, scales included."""
        tensors = (*self.weights.values(), *self.scales.values())
        return sum(t.element_size() * t[0].numel() for t in tensors)


@dataclass(frozen=True)
class ExpertWave:
    """What a part of a batch's experts needs. Valid until the next wave is asked for.

    Attributes:
        weights: by name, on the device, each [slots, ...].
        scales: likewise.
        topk_ids: the batch's ids [n, K], as places in these; -1 (in unsigned dtypes: the largest
            number) where a pair is nobody's, or of another wave. Dtype and device as given.
        experts: the experts of this wave, ascending.
        slots: the place of each.
    """

    weights: Tensors
    scales: Tensors
    topk_ids: torch.Tensor
    experts: tuple[int, ...]
    slots: tuple[int, ...]


@dataclass(frozen=True)
class ProviderStats:
    """What a provider did so far.

    Attributes:
        hits: experts that were on the device when their wave needed them.
        misses: those that were not.
        prefetched: experts that were copied ahead, by `warm` and `prefetch`.
        prefetched_used: those of them that a batch needed before they were given up again; they
            are hits, too.
        bytes_moved: to the device, ahead and on demand.
        batches: calls of `prepare`.
        waves: handed out.
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
    """Gives a layer's experts their weights. One caller at a time."""

    def prepare(self, topk_ids: torch.Tensor) -> Iterator[ExpertWave]:
        """The waves of a batch; the caller adds up their outputs, in order, from zero.

        Args:
            topk_ids: logical ids [n, K] of an integer dtype, on any device; -1: nobody.

        Raises:
            InvalidArgument: if they are not, or out of range.
        """
        ...

    def invalidate(self, expert_id: int) -> None:
        """Forgets what is cached of an expert, whose weights have changed."""

    def stats(self) -> ProviderStats:
        """What was done so far."""
        ...


class FullGPUProvider:
    """All weights are where they are needed: one wave, ids and weights as they are.

    The values of ids are checked on the CPU only: elsewhere that would wait for the device.
    """

    def __init__(self, weights: ExpertWeights) -> None:
        self.weights = weights
        self._batches = 0

    def prepare(self, topk_ids: torch.Tensor) -> Iterator[ExpertWave]:
        """See `ExpertWeightProvider.prepare`. One wave, of all experts, also of an empty batch."""
        count = self.weights.num_experts
        _check_ids(topk_ids)
        if topk_ids.device.type == "cpu":
            _needed(_index(topk_ids, count), count)
        self._batches += 1
        every = tuple(range(count))
        weights = self.weights
        return iter([ExpertWave(weights.weights, weights.scales, topk_ids, every, every)])

    def invalidate(self, expert_id: int) -> None:
        """Nothing is cached.

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
        """Batches and waves; which experts they needed, nobody looked."""
        return ProviderStats(batches=self._batches, waves=self._batches)


class CachedWeightProvider:
    """Weights in host memory, some of them in slots on the device.

    `prepare` reads which experts the batch needs, so it waits for the device that the ids are on.
    The kernels of a wave belong on the stream that is current when the wave is asked for. Waves
    overwrite each other's weights: not for training, nor inside CUDA graphs.

    One caller at a time. A batch whose waves were not all taken is over when the provider is called
    again; its iterator then raises.

    Args:
        weights: of one layer. They are copied to pinned host memory for a CUDA device, and used as
            they are where they are in host memory that will do. See `host`.
        capacity: slots; more than there are experts are as many as there are experts.
        capacity_bytes: in its place: device memory for the slots, in bytes.
        device: where the slots are; the default is where `weights` are.
        policy: what to give up, of this provider only; the default is `Lru`.

    Attributes:
        host: the weights in host memory. Whoever changes them calls `invalidate` after.
        device: where the slots are.
        capacity: slots.

    Raises:
        InvalidArgument: if not exactly one of the capacities is given, or it is not enough for one
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
    ) -> None:
        self.device = weights.device if device is None else torch.device(device)
        self.capacity = _capacity(weights, capacity, capacity_bytes)
        count = weights.num_experts
        self._cache = ExpertCache(count, self.capacity, Lru(count) if policy is None else policy)
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
        self._lanes = _CudaLanes(buffers) if self.device.type == "cuda" else _Lanes()
        # By slot: the last copy into it, as its number and mark; and the kernels that used it
        # since, as marks by lane.
        self._copied: list[tuple[int, Any]] = [(0, None)] * self.capacity
        self._used: list[dict[Any, Any]] = [{} for _ in range(self.capacity)]
        self._fills = 0
        self._batch: _Batch | None = None
        self._bytes_moved = self._batches = self._waves = self._overflows = 0

    def prepare(self, topk_ids: torch.Tensor) -> Iterator[ExpertWave]:
        """See `ExpertWeightProvider.prepare`. No wave where the batch needs no expert."""
        _check_ids(topk_ids, self.capacity)
        index = _index(topk_ids, self._cache.num_experts)
        needed = _needed(index, self._cache.num_experts)
        self._end_batch()
        waves = self._cache.plan(needed)
        self._batches += 1
        self._overflows += len(waves) > 1
        self._batch = _Batch(self, waves, index, topk_ids.dtype)
        return self._batch

    def warm(self, experts: Iterable[int]) -> None:
        """Fills free slots, from a ranking: the hottest first.

        Raises:
            InvalidArgument: if an id is out of range.
        """
        self._end_batch()
        self._fill_ahead(self._cache.prefetch(experts, keep=self._cache.residents))

    def prefetch(self, experts: Iterable[int], keep: Iterable[int] = ()) -> None:
        """Copies experts that may be needed soon, the most wanted first, as far as there is room.

        Args:
            experts: ids.
            keep: ids that stay where they are.

        Raises:
            InvalidArgument: if an id is out of range.
        """
        self._end_batch()
        self._fill_ahead(self._cache.prefetch(experts, keep))

    def invalidate(self, expert_id: int) -> None:
        """Frees the slot of an expert, whose weights in `host` have changed.

        Raises:
            InvalidArgument: if the id is out of range.
        """
        self._end_batch()
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
        except BaseException:  # what was not copied is not in the cache
            self._forget(loads)
            raise

    def _forget(self, loads: Sequence[Load]) -> None:
        for expert, _ in loads:
            self._cache.invalidate(expert)

    def _fill(self, loads: Sequence[Load]) -> None:
        """Enqueues copies into slots, behind the kernels that used these last."""
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
        """A wave whose copies are enqueued, and the lane of its kernels, which wait for them."""
        # The copies run in order: the last of them is the last to arrive.
        _, mark = max((self._copied[slot] for slot in wave.slots), key=lambda copied: copied[0])
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
        """The kernels of a wave are enqueued: what is copied into its slots waits for them."""
        mark = self._lanes.used(lane)
        for slot in wave.slots:
            self._used[slot][lane] = mark


class _Batch(Iterator[ExpertWave]):
    """The waves of one batch, one after the other."""

    def __init__(
        self,
        provider: CachedWeightProvider,
        waves: Sequence[Wave],
        index: torch.Tensor,
        dtype: torch.dtype,
    ) -> None:
        self._provider = provider
        self._waves = waves
        self._loads = [list(wave.loads) for wave in waves]  # that are not enqueued yet
        self._index = index
        self._dtype = dtype
        self._next = 0
        self._out: tuple[Wave, Any] | None = None  # the wave that is handed out, and its lane
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
            # Behind what this wave waits for; into slots that it does not use.
            self._enqueue(self._next, wave.slots)
        return handed

    def end(self) -> None:
        """Takes back what was handed out; what was not copied is not in the cache."""
        self._take_back()
        self._over = True
        for loads in self._loads:  # what was not copied is not in the cache
            self._provider._forget(loads)

    def _take_back(self) -> None:
        if self._out is not None:
            self._provider._take_back(*self._out)
            self._out = None

    def _enqueue(self, number: int, busy: Sequence[int]) -> None:
        """Enqueues the loads of a wave, except those into busy slots."""
        loads = self._loads[number]
        self._provider._fill([load for load in loads if load[1] not in busy])
        self._loads[number] = [load for load in loads if load[1] in busy]

    def _places(self, wave: Wave) -> torch.Tensor:
        """The batch's ids as slots of this wave; -1 for the others."""
        table = [-1] * (self._provider._cache.num_experts + _SHIFT + 1)
        for expert, slot in zip(wave.experts, wave.slots, strict=True):
            table[expert + _SHIFT] = slot
        device = self._index.device
        places = torch.tensor(table, device="cpu", pin_memory=device.type == "cuda")
        return places.to(device, non_blocking=True)[self._index].to(self._dtype)


class _Lanes:
    """Order of copies and kernels, where all that is called happens in the order of the calls."""

    def copying(self, after: Iterable[Any]) -> AbstractContextManager[Any]:
        """What is copied inside happens after these marks."""
        del after
        return nullcontext()

    def copied(self) -> Any:
        """Marks what was copied so far."""

    def kernels(self, after: Any) -> Any:
        """The lane of the kernels that come next. They wait for this mark; None has passed."""

    def used(self, lane: Any) -> Any:
        """Marks the kernels that were enqueued on the lane so far."""


class _CudaLanes(_Lanes):
    """The same on CUDA: a stream for copies, streams as lanes, events as marks."""

    def __init__(self, buffers: Sequence[torch.Tensor]) -> None:
        self._buffers = buffers
        self._device = buffers[0].device
        self._copies = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        # Who had the memory of the buffers before may still use it on the stream that made them.
        made = torch.cuda.current_stream(self._device)
        self._copies.wait_stream(made)
        # The allocator gives the memory to others only behind the work of these streams.
        self._known = {made}
        self._keep_for(self._copies)

    def copying(self, after: Iterable[Any]) -> AbstractContextManager[Any]:
        for mark in after:
            self._copies.wait_event(mark)
        return torch.cuda.stream(self._copies)

    def copied(self) -> Any:
        return self._copies.record_event()

    def kernels(self, after: Any) -> Any:
        lane = torch.cuda.current_stream(self._device)
        self._keep_for(lane)
        if after is not None:
            lane.wait_event(after)
        return lane

    def used(self, lane: Any) -> Any:
        return lane.record_event()

    def _keep_for(self, stream: Any) -> None:
        if stream not in self._known:
            self._known.add(stream)
            for buffer in self._buffers:
                buffer.record_stream(stream)


def _capacity(weights: ExpertWeights, experts: int | None, size: int | None) -> int:
    """Slots, from one of the two ways to say how many."""
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
    """Tensors in host memory from which they are copied to the device without a stop."""
    hosted: dict[str, torch.Tensor] = {}
    pinned = device.type == "cuda"
    for name, tensor in tensors.items():
        plain = tensor.detach()
        will_do = plain.device.type == "cpu" and plain.is_contiguous()
        if not will_do or (pinned and not plain.is_pinned()):
            plain = torch.empty(
                plain.shape, dtype=plain.dtype, device="cpu", pin_memory=pinned
            ).copy_(plain)
        hosted[name] = plain
    return hosted


def _slots(tensors: Tensors, capacity: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Room for some experts; zeroed, since NaN times nothing is NaN."""
    slots: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        slots[name] = torch.empty((capacity, *tensor.shape[1:]), dtype=tensor.dtype, device=device)
        slots[name].view(torch.uint8).zero_()  # not every quantised dtype can be filled
    return slots


def _runs(loads: Sequence[Load]) -> Iterator[tuple[int, int, int]]:
    """Neighbouring experts that go to neighbouring slots: (expert, slot, count)."""
    expert, slot, count = *loads[0], 0
    for load in loads:
        if load != (expert + count, slot + count):
            yield expert, slot, count
            expert, slot, count = *load, 0
        count += 1
    yield expert, slot, count


def _check_ids(topk_ids: torch.Tensor, capacity: int = 0) -> None:
    """Refuses ids that are not integers [n, K], or whose dtype cannot name every slot."""
    dtype = topk_ids.dtype
    if topk_ids.dim() != 2 or dtype.is_floating_point or dtype.is_complex or dtype == torch.bool:
        raise InvalidArgument(
            field="topk_ids",
            value=f"{dtype} of shape {tuple(topk_ids.shape)}",
            expected="integers [n, K]",
        )
    if capacity > torch.iinfo(dtype).max + 1:
        raise InvalidArgument(
            field="topk_ids", value=str(dtype), expected=f"a dtype that can name {capacity} slots"
        )


def _index(topk_ids: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Ids as places in a table, int64 [n, K], from 0, "too low", to `num_experts` + _SHIFT."""
    return topk_ids.to(torch.int64).clamp(-_SHIFT, num_experts) + _SHIFT


def _needed(index: torch.Tensor, num_experts: int) -> list[int]:
    """The experts that are named, ascending. Waits for the device."""
    seen = torch.zeros(num_experts + _SHIFT + 1, dtype=torch.bool, device=index.device)
    named = seen.index_fill_(0, index.flatten(), True).tolist()
    if named[0] or named[-1]:
        raise InvalidArgument(
            field="topk_ids",
            value="an id that is too " + ("low" if named[0] else "high"),
            expected=f"ids in [0, {num_experts}), -1 for nobody",
        )
    return [place - _SHIFT for place in range(_SHIFT, num_experts + _SHIFT) if named[place]]
