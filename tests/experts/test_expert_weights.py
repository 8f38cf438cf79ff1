"""Providers of expert weights: exact at every capacity, and copies in order with kernels."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from itertools import islice
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from routetrace.common.errors import InvalidArgument
from routetrace.experts.cached import CachedWeightProvider
from routetrace.experts.lanes import CudaLanes
from routetrace.experts.policy import Hazard, Lfu, Lru, Policy
from routetrace.experts.weights import (
    ExpertWave,
    ExpertWeightProvider,
    ExpertWeights,
    FullGPUProvider,
    ProviderStats,
)
from support.models.fake_streams import FakeCuda, FakeStream, Work

NUM_EXPERTS, TOP_K, WIDTH = 6, 3, 5
CAPACITIES = range(1, NUM_EXPERTS + 1)
SIGNED = (torch.int8, torch.int32, torch.int64)
POLICIES: dict[str, Callable[[], Policy | None]] = {
    "default": lambda: None,
    "lru": lambda: Lru(NUM_EXPERTS),
    "lfu": lambda: Lfu(NUM_EXPERTS),
    "hazard": lambda: Hazard([0.5, 0.9], [1.0, 2.0], np.linspace(0, 1, NUM_EXPERTS)),
}


def drawn(seed: int = 0, num_experts: int = NUM_EXPERTS) -> ExpertWeights:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(num_experts, *shape, generator=generator)

    return ExpertWeights(
        {"up": draw(WIDTH, 4), "down": draw(4, WIDTH).bfloat16(), "bias": draw(WIDTH)},
        {"up": draw().half(), "down": draw(4, 1)},
    )


def tensors_of(weights: ExpertWeights | ExpertWave) -> dict[str, torch.Tensor]:
    named = {f"weights.{name}": t for name, t in weights.weights.items()}
    return named | {f"scales.{name}": t for name, t in weights.scales.items()}


def gathered(provider: ExpertWeightProvider, topk_ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensors of each pair's expert [n, K, ...], summed over the waves, from zero."""
    weights: Any = provider.host if isinstance(provider, CachedWeightProvider) else provider.weights
    out = {
        name: torch.zeros((*topk_ids.shape, *tensor.shape[1:]), dtype=tensor.dtype)
        for name, tensor in tensors_of(weights).items()
    }
    times = torch.zeros(topk_ids.shape, dtype=torch.int)
    for wave in provider.prepare(topk_ids):
        assert wave.topk_ids.dtype == topk_ids.dtype
        assert wave.topk_ids.shape == topk_ids.shape
        mine = sum((wave.topk_ids == slot for slot in wave.slots), torch.zeros_like(times).bool())
        nobody = 255 if topk_ids.dtype == torch.uint8 else -1
        assert (wave.topk_ids[~mine] == nobody).all()
        named = torch.tensor(wave.experts)[:, None, None] == topk_ids.long()
        assert torch.equal(named.any(0), mine)
        times += mine
        for name, tensor in tensors_of(wave).items():
            out[name][mine] += tensor[wave.topk_ids[mine].long()]
    wanted = (topk_ids.long() >= 0).int()
    assert torch.equal(times, wanted)
    return out


def indexed(weights: ExpertWeights, topk_ids: torch.Tensor) -> dict[str, torch.Tensor]:
    ids = topk_ids.long()
    out = {}
    for name, tensor in tensors_of(weights).items():
        out[name] = tensor[ids.clamp(0)]
        out[name][ids < 0] = 0
    return out


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        assert torch.equal(tensor, b[name]), name


IDS = st.lists(
    st.lists(st.integers(-1, NUM_EXPERTS - 1), min_size=TOP_K, max_size=TOP_K), max_size=5
)


def tensor_of(ids: list[list[int]], dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor(ids, dtype=dtype).reshape(-1, TOP_K)


@pytest.mark.parametrize("capacity", CAPACITIES)
@settings(max_examples=60)
@given(
    st.sampled_from(sorted(POLICIES)),
    st.lists(st.tuples(IDS, st.sampled_from(SIGNED)), min_size=1, max_size=6),
)
def test_batches_of_any_ids_are_exact_at_every_capacity(capacity, policy, batches):
    weights = drawn()
    provider = CachedWeightProvider(weights, capacity=capacity, policy=POLICIES[policy]())
    full = FullGPUProvider(weights)
    for ids, dtype in batches:
        topk_ids = tensor_of(ids, dtype)
        before = topk_ids.clone()
        expected = indexed(weights, topk_ids)
        assert_same(gathered(provider, topk_ids), expected)
        assert torch.equal(topk_ids, before)
        if (topk_ids >= 0).all():
            assert_same(gathered(full, topk_ids), expected)


@pytest.mark.parametrize("capacity", CAPACITIES)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.int16])
def test_other_integer_ids(capacity: int, dtype: torch.dtype) -> None:
    topk_ids = torch.arange(2 * NUM_EXPERTS).remainder(NUM_EXPERTS).reshape(-1, TOP_K).to(dtype)
    provider = CachedWeightProvider(drawn(), capacity=capacity)
    if dtype == torch.uint16:  # torch can hold, but not compare them
        seen = [wave.topk_ids.long() for wave in provider.prepare(topk_ids)]
        assert all(places.dtype == torch.int64 for places in seen)
        assert sum((places != 65535).int() for places in seen).eq(1).all()
    else:
        assert_same(gathered(provider, topk_ids), indexed(drawn(), topk_ids))


@pytest.mark.parametrize("capacity", [1, 100, 255, 256])
def test_every_id_of_uint8(capacity: int) -> None:
    weights = drawn(num_experts=256)
    topk_ids = torch.arange(256, dtype=torch.uint8).reshape(-1, 4)
    provider = CachedWeightProvider(weights, capacity=capacity)
    seen = torch.zeros(256)
    for wave in provider.prepare(topk_ids):
        places = wave.topk_ids.flatten().long()
        mine = places < capacity if capacity < 256 else torch.ones(256).bool()
        assert torch.equal(mine.nonzero().flatten(), torch.tensor(wave.experts))
        assert torch.equal(wave.weights["bias"][places[mine]], weights.weights["bias"][mine])
        seen += mine
    assert seen.eq(1).all()


@pytest.mark.parametrize("capacity", CAPACITIES)
def test_sums_over_experts_are_bitwise_those_of_a_loop_over_all(capacity: int) -> None:
    """Waves keep the order of additions: ascending experts for each token, for any cache size."""
    weights = drawn()
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(9, WIDTH, generator=generator)
    scores, topk_ids = torch.rand(9, NUM_EXPERTS, generator=generator).topk(TOP_K)
    expected = torch.zeros(9, 4)
    for expert in range(NUM_EXPERTS):
        token, k = (topk_ids == expert).nonzero(as_tuple=True)
        y = x[token] @ weights.weights["up"][expert] * scores[token, k, None]
        expected.index_add_(0, token, y)
    provider = CachedWeightProvider(weights, capacity=capacity)
    for _ in range(2):
        out = torch.zeros(9, 4)
        for wave in provider.prepare(topk_ids):
            for slot in wave.slots:
                token, k = (wave.topk_ids == slot).nonzero(as_tuple=True)
                y = x[token] @ wave.weights["up"][slot] * scores[token, k, None]
                out.index_add_(0, token, y)
        assert torch.equal(out, expected)


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("batch"), IDS),
        st.tuples(st.just("abandon"), st.tuples(IDS, st.integers(0, 3))),
        st.tuples(st.just("prefetch"), st.lists(st.integers(0, NUM_EXPERTS - 1))),
        st.tuples(st.just("warm"), st.lists(st.integers(0, NUM_EXPERTS - 1))),
        st.tuples(st.just("change"), st.integers(0, NUM_EXPERTS - 1)),
        st.tuples(st.just("fail"), IDS),
    ),
    max_size=12,
)


@settings(max_examples=200)
@given(st.sampled_from(CAPACITIES), ACTIONS)
def test_nothing_that_happens_between_batches_makes_one_wrong(capacity, actions):
    """Batches whose waves were not all taken, copies that failed, weights that changed."""
    provider = CachedWeightProvider(drawn(), capacity=capacity)
    version = 0
    for action, value in [*actions, ("batch", [[0, 1, 2], [3, 4, 5]])]:
        if action == "batch":
            topk_ids = tensor_of(value)
            assert_same(gathered(provider, topk_ids), indexed(provider.host, topk_ids))
        elif action == "abandon":
            waves = provider.prepare(tensor_of(value[0]))
            for _ in range(value[1]):
                next(waves, None)
        elif action == "prefetch":
            provider.prefetch(value)
        elif action == "warm":
            provider.warm(value)
        elif action == "change":
            version += 1
            for name, tensor in tensors_of(drawn(version)).items():
                tensors_of(provider.host)[name][value] = tensor[value]
            provider.invalidate(value)
        else:
            copies = provider._pairs
            provider._pairs = [copies[0], None]  # type: ignore[list-item]
            try:
                provider.prefetch([0])
                for _ in provider.prepare(tensor_of(value)):
                    pass
            except TypeError:
                pass
            provider._pairs = copies


def test_an_iterator_that_is_over_does_not_look_complete() -> None:
    provider = CachedWeightProvider(drawn(), capacity=2)
    topk_ids = tensor_of([[0, 1, 2]])
    calls: list[Callable[[], object]] = [
        lambda: provider.prepare(topk_ids),
        lambda: provider.prefetch([1]),
        lambda: provider.warm([1]),
        lambda: provider.invalidate(1),
    ]
    for call in calls:
        waves = provider.prepare(topk_ids)
        next(waves)
        call()
        with pytest.raises(InvalidArgument, match="all waves of a batch taken"):
            next(waves)
    whole = provider.prepare(topk_ids)
    assert len(list(whole)) == 3
    provider.prepare(topk_ids)
    assert list(whole) == []
    # One that was refused is no call.
    waves = provider.prepare(topk_ids)
    with pytest.raises(InvalidArgument):
        provider.prepare(tensor_of([[0, 1, NUM_EXPERTS]]))
    assert len(list(waves)) == 3


def test_what_is_counted() -> None:
    weights = drawn()
    each = weights.bytes_per_expert
    assert each == WIDTH * 4 * 4 + 4 * WIDTH * 2 + WIDTH * 4 + 2 + 4 * 4
    provider = CachedWeightProvider(weights, capacity=2)
    assert provider.stats() == ProviderStats()
    provider.warm([4, 1, 0])
    provider.prefetch([1, 5])  # in place of 4
    assert provider.stats() == ProviderStats(prefetched=3, bytes_moved=3 * each)
    assert len(list(provider.prepare(tensor_of([[1, 5, 1], [5, -1, 1]])))) == 1
    assert provider.stats() == ProviderStats(
        hits=2, prefetched=3, prefetched_used=2, bytes_moved=3 * each, batches=1, waves=1
    )
    assert len(list(provider.prepare(tensor_of([[2, 3, 1]])))) == 3
    assert list(provider.prepare(tensor_of([[-1, -1, -1]]))) == []
    assert list(provider.prepare(tensor_of([]))) == []
    provider.invalidate(0)
    assert provider.stats() == ProviderStats(
        hits=3,
        misses=2,
        prefetched=3,
        prefetched_used=2,
        bytes_moved=5 * each,
        batches=4,
        waves=4,
        overflows=1,
    )


def test_warm_never_throws_out() -> None:
    provider = CachedWeightProvider(drawn(), capacity=3)
    provider.prefetch([5])
    provider.warm([2, 5, 0, 1])
    assert provider._cache.residents == [0, 2, 5]
    provider.warm([3, 4])
    assert provider._cache.residents == [0, 2, 5]


def test_the_full_provider_passes_everything_through() -> None:
    weights = drawn()
    provider = FullGPUProvider(weights)
    for topk_ids in (tensor_of([[0, 1, 5]], torch.int32), tensor_of([]), tensor_of([[-1] * 3])):
        (wave,) = provider.prepare(topk_ids)
        assert wave.topk_ids is topk_ids
        assert wave.weights is weights.weights
        assert wave.scales is weights.scales
        assert wave.experts == wave.slots == tuple(range(NUM_EXPERTS))
    provider.invalidate(0)
    assert provider.stats() == ProviderStats(batches=3, waves=3)


def test_host_memory_that_will_do_is_shared_and_other_is_copied() -> None:
    parameter = torch.nn.Parameter(torch.randn(4, 3, 2))
    across = torch.randn(2, 3, 4).permute(2, 0, 1)
    provider = CachedWeightProvider(ExpertWeights({"a": parameter, "b": across}), capacity=2)
    assert provider.host.weights["a"].data_ptr() == parameter.data_ptr()
    assert not provider.host.weights["a"].requires_grad
    assert provider.host.weights["b"].is_contiguous()
    assert torch.equal(provider.host.weights["b"], across)
    (wave,) = provider.prepare(torch.tensor([[1, 3]]))
    assert torch.equal(wave.weights["a"], parameter[[1, 3]])
    assert torch.equal(wave.weights["b"], across[[1, 3]])
    with pytest.raises(TypeError):
        wave.weights["a"] = across  # type: ignore[index]


@pytest.mark.parametrize(
    "dtype", [torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.int8, torch.uint8, torch.float16]
)
def test_quantised_weights(dtype: torch.dtype) -> None:
    bits = torch.arange(4 * 6, dtype=torch.uint8).reshape(4, 6)
    weights = ExpertWeights({"w": bits.view(dtype)}, {"w": torch.rand(4)})
    provider = CachedWeightProvider(weights, capacity=2)
    assert not any(t.view(torch.uint8).any() for t in tensors_of_slots(provider))
    for expert in (2, 0, 1, 3, 2):
        (wave,) = provider.prepare(torch.tensor([[expert]]))
        (slot,) = wave.slots
        assert wave.weights["w"].dtype == dtype
        assert torch.equal(wave.weights["w"][slot].view(torch.uint8), bits[expert])
        assert torch.equal(wave.scales["w"][slot], weights.scales["w"][expert])


def tensors_of_slots(provider: CachedWeightProvider) -> list[torch.Tensor]:
    return [*provider._weights.values(), *provider._scales.values()]


def test_made_in_inference_mode_and_used_outside() -> None:
    with torch.inference_mode():
        provider = CachedWeightProvider(drawn(), capacity=2)
        list(provider.prepare(tensor_of([[0, 1, 2]])))
    topk_ids = tensor_of([[3, 4, 5]])
    assert_same(gathered(provider, topk_ids), indexed(drawn(), topk_ids))
    assert not any(t.is_inference() for t in tensors_of_slots(provider))


def test_a_default_device_is_not_taken_for_the_host() -> None:
    topk_ids, weights = tensor_of([[0, 1, 2], [-1, 4, 5]]), drawn()
    across = ExpertWeights({"w": torch.randn(2, NUM_EXPERTS).T})
    with torch.device("meta"):
        provider = CachedWeightProvider(weights, capacity=2)
        waves = list(provider.prepare(topk_ids))
        assert CachedWeightProvider(across, capacity=1).host.device.type == "cpu"
    assert all(wave.topk_ids.device.type == "cpu" for wave in waves)
    assert_same(gathered(provider, topk_ids), indexed(weights, topk_ids))


def test_neighbours_are_copied_in_one_go() -> None:
    provider = CachedWeightProvider(ExpertWeights({"w": torch.randn(8, 2)}), capacity=6)
    copies: list[tuple[slice, tuple[int, ...]]] = []
    host, buffer = provider._pairs[0]
    spy = Spy(buffer, lambda slots, value: copies.append((slots, tuple(value.shape))))
    provider._pairs = [(host, spy)]  # type: ignore[list-item]
    next(provider.prepare(torch.tensor([[6, 2, 3, 0]])))
    assert copies == [(slice(0, 1), (1, 2)), (slice(1, 3), (2, 2)), (slice(3, 4), (1, 2))]
    assert torch.equal(buffer[:4], host[[0, 2, 3, 6]])


class Spy:
    """A buffer that tells what is copied into it."""

    def __init__(self, buffer: torch.Tensor, tell: Callable[[slice, torch.Tensor], None]) -> None:
        self._buffer = buffer
        self._tell = tell

    def __getitem__(self, slots: slice) -> Any:
        def copy_(value: torch.Tensor, non_blocking: bool) -> None:
            assert non_blocking
            self._tell(slots, value)
            self._buffer[slots] = value

        return SimpleNamespace(copy_=copy_)


# Bad input.


def refused(field: str, call: Callable[[], object], *says: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        call()
    assert caught.value.field == field
    for text in says:
        assert text in str(caught.value)


def test_weights_that_are_none() -> None:
    two, three = torch.zeros(2, 1), torch.zeros(3, 1)
    elsewhere = torch.zeros(2, 1, device="meta")
    refused("weights", lambda: ExpertWeights({}))
    refused("weights.b", lambda: ExpertWeights({"a": two, "b": three}), "3 experts", "2")
    refused("scales.c", lambda: ExpertWeights({"a": two}, {"c": three}), "3 experts")
    refused("weights.a", lambda: ExpertWeights({"a": torch.zeros(())}))
    refused("weights.a", lambda: ExpertWeights({"a": torch.zeros(0, 2)}))
    refused("weights.b", lambda: ExpertWeights({"a": two, "b": elsewhere}), "on meta", "on cpu")
    refused("scales.c", lambda: ExpertWeights({"a": two}, {"c": elsewhere}), "on meta")


def test_capacities() -> None:
    weights = drawn()
    each = weights.bytes_per_expert

    def capacity(**how: int) -> int:
        provider = CachedWeightProvider(weights, **how)  # type: ignore[arg-type]
        assert all(len(t) == provider.capacity for t in tensors_of_slots(provider))
        assert sum(t.nbytes for t in tensors_of_slots(provider)) == provider.capacity * each
        return provider.capacity

    assert [capacity(capacity=n) for n in (1, 6, 7)] == [1, 6, 6]
    assert [capacity(capacity_bytes=each * n // 2) for n in (2, 3, 4, 90)] == [1, 1, 2, 6]
    for value in (0, -1):
        refused("capacity", lambda value=value: capacity(capacity=value), "at least 1")
    for value in (each - 1, 0, -each):
        refused(
            "capacity_bytes",
            lambda value=value: capacity(capacity_bytes=value),
            f"is {value};",
            f"at least {each}",
        )
    refused("capacity", capacity)
    refused("capacity", lambda: capacity(capacity=1, capacity_bytes=each))


@pytest.mark.parametrize(
    "provider", [CachedWeightProvider(drawn(), capacity=2), FullGPUProvider(drawn())]
)
def test_bad_ids(provider: CachedWeightProvider | FullGPUProvider) -> None:
    for bad in (
        torch.zeros(2, 3),
        torch.zeros(2, 3, dtype=torch.bool),
        torch.zeros(2, 3, dtype=torch.complex64),
        torch.zeros(3, dtype=torch.int64),
        torch.zeros(1, 2, 3, dtype=torch.int64),
    ):
        refused("topk_ids", lambda bad=bad: provider.prepare(bad), "integers [n, K]")
    for expert, says in ((NUM_EXPERTS, "high"), (2**40, "high"), (-2, "low"), (-(2**40), "low")):
        ids = tensor_of([[0, expert, 1]])
        refused("topk_ids", lambda ids=ids: provider.prepare(ids), f"too {says}", "[0, 6)")
    uint8 = torch.tensor([[255]], dtype=torch.uint8)
    refused("topk_ids", lambda: provider.prepare(uint8), "too high")
    for expert in (-1, NUM_EXPERTS):
        with pytest.raises(InvalidArgument, match=f"{expert}; expected"):
            provider.invalidate(expert)
    assert provider.stats() == ProviderStats()


def test_ids_that_cannot_name_the_slots() -> None:
    weights = drawn(num_experts=200)
    ids = torch.tensor([[5]], dtype=torch.int8)
    (wave,) = CachedWeightProvider(weights, capacity=128).prepare(ids)
    assert wave.experts == (5,)
    provider = CachedWeightProvider(weights, capacity=129)
    refused("topk_ids", lambda: provider.prepare(ids), "int8", "129 slots")


def test_ids_out_of_range_ahead() -> None:
    provider = CachedWeightProvider(drawn(), capacity=2)
    refused("experts", lambda: provider.warm([0, NUM_EXPERTS]))
    refused("experts", lambda: provider.prefetch([-1]))
    refused("keep", lambda: provider.prefetch([0], keep=[NUM_EXPERTS]))
    assert provider.stats() == ProviderStats()


def test_everything_lies_as_in_the_host() -> None:
    weights = drawn()
    provider = CachedWeightProvider(weights, capacity=NUM_EXPERTS)
    for wave in provider.prepare(tensor_of([[4, 1, 4]])):
        assert wave.slots == wave.experts == (1, 4)
    before = provider.stats()
    for _ in range(2):
        for name, tensor in provider.everything().items():
            assert torch.equal(tensor, weights.weights[name])
    stats = provider.stats()
    assert stats.bytes_moved == NUM_EXPERTS * weights.bytes_per_expert
    assert (stats.batches, stats.waves) == (before.batches + 2, before.waves + 2)
    weights.weights["up"][3] += 1
    provider.invalidate(3)
    assert torch.equal(provider.everything()["up"], weights.weights["up"])
    fewer = CachedWeightProvider(weights, capacity=NUM_EXPERTS - 1)
    with pytest.raises(InvalidArgument, match=f"capacity is {NUM_EXPERTS - 1}; expected"):
        fewer.everything()


# Streams.


class Device(FakeCuda):
    """Runs a provider on fake streams, and checks the order of what it enqueues."""

    def __init__(self, patch: pytest.MonkeyPatch, weights: ExpertWeights, capacity: int) -> None:
        super().__init__()
        self.install(patch)
        self.recorded: list[FakeStream] = []
        self.allocated = self.main.work()  # by who had the memory before
        self.provider = CachedWeightProvider(weights, capacity=capacity)
        buffer = SimpleNamespace(device=torch.device("cpu"), record_stream=self.recorded.append)
        self.lanes = CudaLanes([buffer])  # type: ignore[list-item]
        self.provider._lanes = self.lanes
        self.provider._pairs = [
            (host, Spy(buffer, self._copied))  # type: ignore[misc]
            for host, buffer in self.provider._pairs
        ]
        self.copies: dict[int, Work] = {}
        self.kernels: dict[int, list[Work]] = defaultdict(list)
        self.beside = 0  # kernels that run while copies may be under way
        self.early = 0  # copies that do not wait for all kernels before them

    def _copied(self, slots: slice, value: torch.Tensor) -> None:
        assert self.current is not self.main
        assert self.current.over(self.allocated)
        for slot in range(slots.start, slots.stop):
            assert all(self.current.over(kernel) for kernel in self.kernels[slot]), slot
        work = self.current.work()
        self.copies.update(dict.fromkeys(range(slots.start, slots.stop), work))
        every = [kernel for kernels in self.kernels.values() for kernel in kernels]
        self.early += not all(self.current.over(kernel) for kernel in every)

    def compute(self, wave: ExpertWave | SimpleNamespace) -> None:
        """The kernels of a wave; they use its slots."""
        for slot in wave.slots:
            assert self.current.over(self.copies[slot]), slot
        self.beside += not all(self.current.over(copy) for copy in self.copies.values())
        work = self.current.work()
        for slot in wave.slots:
            self.kernels[slot].append(work)


@settings(max_examples=200)
@given(
    st.sampled_from(CAPACITIES),
    st.lists(
        st.one_of(
            st.tuples(st.just("batch"), st.tuples(IDS, st.integers(0, 2), st.integers(1, 9))),
            st.tuples(st.just("prefetch"), st.lists(st.integers(0, NUM_EXPERTS - 1))),
            st.tuples(st.just("everything"), st.integers(0, 2)),
            st.tuples(st.just("invalidate"), st.integers(0, NUM_EXPERTS - 1)),
        ),
        max_size=12,
    ),
)
def test_copies_wait_for_kernels_and_kernels_for_copies(capacity, actions):
    """On any of three streams that nobody orders; also where batches are abandoned."""
    with pytest.MonkeyPatch.context() as patch:
        device = Device(patch, drawn(), capacity)
        streams = [device.main, *(FakeStream(device) for _ in range(2))]
        every = SimpleNamespace(slots=range(NUM_EXPERTS))
        for action, value in actions:
            if action == "prefetch":
                device.provider.prefetch(value)
                continue
            if action == "invalidate":
                device.provider.invalidate(value)
                continue
            if action == "everything":
                if device.provider.whole:
                    with device.on(streams[value]):
                        device.provider.everything()
                        device.compute(every)
                continue
            ids, stream, waves = value
            with device.on(streams[stream]):
                for wave in islice(device.provider.prepare(tensor_of(ids)), waves):
                    device.compute(wave)


def test_the_allocator_is_told_of_every_stream() -> None:
    with pytest.MonkeyPatch.context() as patch:
        device = Device(patch, drawn(), 2)
        assert device.recorded == [device.lanes._copies]
        other = FakeStream(device)
        for stream in (device.main, other, other):
            with device.on(stream):
                list(device.provider.prepare(tensor_of([[0, 1, 2]])))
        assert device.recorded == [device.lanes._copies, other]


@pytest.mark.parametrize("capacity", [1, 2, 3, 4, 7, 8])
def test_the_next_waves_copies_run_while_this_one_computes(capacity: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        device = Device(patch, drawn(num_experts=32), capacity)
        for topk_ids in torch.arange(32).reshape(2, 1, 16):
            for wave in device.provider.prepare(topk_ids):
                device.compute(wave)
        # All but the last of a batch, where there is room for two waves and nothing is a hit.
        waves = device.provider.stats().waves
        assert waves == 2 * -(-16 // max(1, capacity // 2))
        assert device.beside == (0 if capacity == 1 else waves - 2)


def test_prefetched_experts_do_not_wait_for_what_computes() -> None:
    with pytest.MonkeyPatch.context() as patch:
        device = Device(patch, drawn(), 4)
        for wave in device.provider.prepare(tensor_of([[0, 1, 1]])):
            device.compute(wave)
        assert device.early == 0
        device.provider.prefetch([4, 5])
        assert device.early == len(device.provider._pairs)
        for wave in device.provider.prepare(tensor_of([[4, 5, 0]])):
            device.compute(wave)


# The same where streams are real, and late.


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("source", ["cpu", "cuda"])
@pytest.mark.parametrize("capacity", CAPACITIES)
def test_late_kernels_and_copies_on_a_device(source: str, capacity: int) -> None:
    """In turns kernels and copies first do nothing for a while: what does not wait is seen."""
    shape = (NUM_EXPERTS, 1 << 18)
    weights = ExpertWeights(
        {"w": torch.randn(shape, device=source)}, {"w": torch.randn(NUM_EXPERTS, device=source)}
    )
    provider = CachedWeightProvider(weights, capacity=capacity, device="cuda")
    assert provider.host.weights["w"].is_pinned()
    expected = weights.weights["w"].cpu()
    side = torch.cuda.Stream()
    rng = np.random.default_rng(capacity)
    for step in range(12):
        ids = torch.from_numpy(rng.integers(-1, NUM_EXPERTS, (4, TOP_K)))
        topk_ids = ids.to(
            device=["cuda", "cpu"][step % 3 == 0], dtype=[torch.int32, torch.int64][step % 5 > 1]
        )
        out = torch.zeros((4, TOP_K, shape[1]), device="cuda")
        torch.cuda.synchronize()
        if step % 2 == 0:
            with provider._lanes.copying(()):
                torch.cuda._sleep(1 << 22)
        with torch.cuda.stream(side if step % 4 == 3 else torch.cuda.current_stream()):
            for wave in provider.prepare(topk_ids):
                assert wave.topk_ids.device == topk_ids.device
                if step % 2:
                    torch.cuda._sleep(1 << 22)
                places = wave.topk_ids.to("cuda", torch.int64)
                out += wave.weights["w"][places.clamp(0)] * (places >= 0)[..., None]
            provider.prefetch(rng.permutation(NUM_EXPERTS).tolist())
        torch.cuda.synchronize()
        assert torch.equal(out.cpu(), expected[ids.clamp(0)] * (ids >= 0)[..., None])
