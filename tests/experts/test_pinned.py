"""Pinned memory of the size that is asked for. A stand-in for the driver keeps account."""

from __future__ import annotations

import gc
import mmap
from typing import Any

import pytest
import torch

from routetrace.experts import cached
from routetrace.experts.pinned import pinned_copy
from routetrace.experts.weights import ExpertWeights


class Driver:
    def __init__(self) -> None:
        self.held: dict[int, int] = {}
        self.error = 0
        self.waited = 0

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        assert address % mmap.PAGESIZE == 0
        if not self.error:
            self.held[address] = size
        return self.error

    def cudaHostUnregister(self, address: int) -> int:
        assert self.waited, "a copy may be under way"
        del self.held[address]
        return 0

    def synchronize(self) -> None:
        self.waited += 1


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    fake = Driver()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)
    monkeypatch.setattr(torch.cuda, "synchronize", fake.synchronize)
    return fake


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64])
@pytest.mark.parametrize("shape", [(3, 5, 7), (1,), (0, 4), (129, 65)])
def test_a_copy_takes_what_it_needs(driver: Driver, dtype: torch.dtype, shape: Any) -> None:
    tensor = torch.randn(shape).to(dtype)
    copy = pinned_copy(tensor)
    assert (copy.shape, copy.dtype) == (tensor.shape, tensor.dtype)
    assert copy.is_contiguous()
    assert torch.equal(copy.view(torch.uint8), tensor.view(torch.uint8))
    assert list(driver.held.values()) == [max(tensor.nbytes, 1)]
    assert copy.numel() == 0 or copy.data_ptr() in driver.held


def test_it_is_let_go_with_the_last_view(driver: Driver) -> None:
    view = pinned_copy(torch.arange(1000))[500:]
    gc.collect()
    assert len(driver.held) == 1
    assert view[0] == 500
    del view
    gc.collect()
    assert not driver.held


def test_what_is_not_pinned_is_an_error(driver: Driver) -> None:
    driver.error = 2
    with pytest.raises(RuntimeError, match="4000 bytes of host memory were not pinned: CUDA err"):
        pinned_copy(torch.zeros(1000))
    gc.collect()
    assert not driver.held


def test_weights_take_no_more_host_memory_than_they_have_bytes(driver: Driver) -> None:
    """Torch's allocator would take 4 MiB for each of these."""
    weights = ExpertWeights({"a": torch.rand(3, 1 << 18), "b": torch.rand(3, 1 << 18)})
    held = cached._hosted(weights.weights, torch.device("cuda"))
    assert sum(driver.held.values()) == 3 * weights.bytes_per_expert
    for name, tensor in held.items():
        assert torch.equal(tensor, weights.weights[name])


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_device() -> None:
    tensor = torch.randn(3, 1 << 20)
    copy = pinned_copy(tensor)
    assert copy.is_pinned()
    assert torch.equal(copy.to("cuda", non_blocking=True).cpu(), tensor)
