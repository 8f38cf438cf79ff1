"""Pinned host memory of exact size.

Torch's allocator rounds up to powers of two: for weights a third more on average.
"""

from __future__ import annotations

import contextlib
import mmap

import torch


def pinned_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous copy in newly pinned pages, freed with the last view.

    Raises:
        RuntimeError: if the driver refuses to pin the memory.
    """
    flat = torch.frombuffer(_Block(max(tensor.nbytes, 1)), dtype=torch.uint8)[: tensor.nbytes]
    return flat.view(tensor.dtype).view(tensor.shape).copy_(tensor)


class _Block(mmap.mmap):
    """Pinned pages. Torch keeps the object alive while a tensor uses its memory."""

    _address: int | None = None

    def __new__(cls, size: int) -> _Block:
        return super().__new__(cls, -1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    def __init__(self, size: int) -> None:
        address = torch.frombuffer(self, dtype=torch.uint8).data_ptr()
        error = int(torch.cuda.cudart().cudaHostRegister(address, size, 0))  # type: ignore[no-untyped-call]
        if error:
            raise RuntimeError(f"{size} bytes of host memory were not pinned: CUDA error {error}")
        self._address = address

    def __del__(self) -> None:
        """Unpin the pages after all copies that may use them."""
        if self._address is not None:
            with contextlib.suppress(Exception):  # at exit CUDA may be shut down already
                torch.cuda.synchronize()
                torch.cuda.cudart().cudaHostUnregister(self._address)  # type: ignore[no-untyped-call]
