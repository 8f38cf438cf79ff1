"""The compiled loops beside memory that no process may touch; `test_native.py` runs it apart.

Each array ends where its last page ends, or begins where its first one begins; the pages around are
closed, so a byte too far ends the process. NUMBA_BOUNDSCHECK=1 checks the plain indexes as well.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from typing import Any

import numpy as np

from routetrace.codec.native import Loader

PAGE = mmap.PAGESIZE
_libc = ctypes.CDLL(None, use_errno=True)


class Fenced:
    """An array between two closed pages, at one of them."""

    def __init__(self, data: Any, *, at_end: bool) -> None:
        data = np.ascontiguousarray(data)
        pages = -(-max(1, data.nbytes) // PAGE)
        self._memory = mmap.mmap(-1, (pages + 2) * PAGE)
        whole = np.frombuffer(self._memory, np.uint8)
        base = whole.ctypes.data
        start = PAGE + (pages * PAGE - data.nbytes if at_end else 0)
        self.array = np.ndarray(data.shape, data.dtype, self._memory, start)
        self.array[...] = data
        for page in (0, pages + 1):
            if _libc.mprotect(ctypes.c_void_p(base + page * PAGE), PAGE, 0):
                raise OSError(ctypes.get_errno(), "mprotect")


def run(seed: int, count: int) -> None:
    loader = Loader("on", present=True)
    kernels = loader.kernels(0)
    assert kernels, loader.reason
    rng = np.random.default_rng(seed)
    for number in range(count):
        num_experts = int(rng.choice([1, 2, 5, 16, 100, 128, 256, 257, 384, 1000, 65536]))
        top_k = int(rng.integers(1, min(num_experts, 17) + 1))
        layers, n = int(rng.integers(1, 8)), int(rng.integers(1, 140))
        dtype: Any = np.uint8 if num_experts <= 256 else np.uint16
        ids = rng.integers(0, num_experts, (n, layers, top_k)).astype(dtype)
        item, size, experts = ids.itemsize, top_k * ids.itemsize, num_experts
        bits = max(1, (num_experts - 1).bit_length())
        width, shift, words = min(8, bits), max(0, bits - 8), -(-n * top_k // 8)
        places = np.arange(layers, dtype=np.int64) * words
        planes, low_planes = places * width, layers * words * width + places * shift
        frame = np.zeros(layers * words * (width + shift), np.uint8)
        for at_end in (False, True):
            rows = Fenced(ids.reshape(-1).view(np.uint8), at_end=at_end).array
            made = Fenced(frame, at_end=at_end).array
            bad = Fenced(np.zeros(n, np.bool_), at_end=at_end).array
            out = Fenced(np.zeros((layers, n * size), np.uint8), at_end=at_end).array
            kernels.check(rows, size, layers, item, experts, bad)
            args = size, layers, item, width, shift, planes, low_planes
            assert kernels.pack(rows, *args, made), number
            largest = kernels.unpack(made, planes, low_planes, n * top_k, item, width, shift, out)
            assert largest == ids.max(), number
            expected = ids.transpose(1, 0, 2).tobytes()
            assert out.tobytes() == expected, number
            # Sizes and places that do not fit are refused before anything is touched.
            wrong = rng.integers(-(2**40), 2**40, layers)
            # The last plane ends a byte behind the frame.
            beyond, nowhere = planes + len(made) - planes[-1] - words * width + 1, 0 * planes
            odd = int(rng.choice([-1, 0, 3, 7, 9, 2**40]))
            before = made.copy(), out.copy()
            for refused in (
                kernels.pack(rows, size, layers, item, width, shift, wrong, low_planes, made),
                kernels.pack(rows, size, layers, item, width, shift, planes - 1, low_planes, made),
                kernels.pack(rows, size, layers + 1, item, *args[3:], made),
                kernels.pack(rows, *args[:5], beyond, nowhere, made),
                kernels.unpack(made, beyond, nowhere, n * top_k, item, width, shift, out) >= 0,
                layers * size > 1 and kernels.pack(rows[:-1], *args, made),
                kernels.pack(rows, *args, made[:-1]),
                kernels.check(rows, odd, layers, item, experts, bad),
                kernels.check(rows[:-1], size, layers, item, experts, bad),
                kernels.unpack(made, wrong, low_planes, n * top_k, item, width, shift, out) >= 0,
                kernels.unpack(made[:-1], planes, low_planes, n * top_k, item, width, shift, out)
                >= 0,
                kernels.unpack(made, planes, low_planes, odd, item, width, shift, out) >= 0
                and odd != n * top_k,
                kernels.unpack(made, planes, low_planes, n * top_k, item, 9, shift, out) >= 0,
                kernels.unpack(made, planes, low_planes, n * top_k, item, width, 9, out) >= 0,
            ):
                assert not refused, number
            if odd != n * top_k:
                assert np.array_equal(made, before[0]), number
                assert np.array_equal(out, before[1]), number


if __name__ == "__main__":
    run(int(sys.argv[1]), int(sys.argv[2]))
