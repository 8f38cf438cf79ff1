"""Loops of the frame codec for numba: check, pack and unpack of rows.

`native.py` imports this module where numba is installed, and compiles it in the background. Each
loop gives the same bytes as the numpy code of frame.py, on a CPU that stores the low byte first.

Bytes are addressed by hand, 8 at a time, so each loop checks its bounds: `_load` and `_store` touch
no byte outside of their array, and the faster `_load_inside` and `_store_inside` stand only where
a comparison before the loop covers all of their places.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

_U64 = np.uint64

#: Rows that are packed at a time, so that the rows of all layers stay in the CPU's first cache. A
#: multiple of 8: each of these parts is whole bytes.
_TILE = 64

_BYTES = types.Array(types.uint8, 1, "C", readonly=True)
_OUT = types.Array(types.uint8, 1, "C")
_PLANES = types.Array(types.uint8, 2, "A")
_FLAGS = types.Array(types.boolean, 1, "C")
_PLACES = types.Array(types.int64, 1, "C")
_N = types.int64


class Kernels(NamedTuple):
    """The compiled loops."""

    check: Callable[..., bool]
    pack: Callable[..., bool]
    unpack: Callable[..., int]


def build(*, cache: bool) -> Kernels:
    """Compile the loops, or load them from numba's cache.

    Args:
        cache: whether to keep them there.
    """
    # The GIL is kept: a loop takes some microseconds, reacquiring the GIL from a busy thread 5 ms.
    return Kernels(
        njit(types.boolean(_BYTES, _N, _N, _N, _N, _FLAGS), cache=cache)(check),
        njit(types.boolean(_BYTES, _N, _N, _N, _N, _N, _PLACES, _PLACES, _OUT), cache=cache)(pack),
        njit(types.int64(_BYTES, _PLACES, _PLACES, _N, _N, _N, _N, _PLANES), cache=cache)(unpack),
    )


def _word_at(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    """Return the address of the word at a byte of an array."""
    array = context.make_array(signature.args[0])(context, builder, args[0])
    return builder.bitcast(builder.gep(array.data, [args[1]]), ir.IntType(64).as_pointer())


@intrinsic  # type: ignore[untyped-decorator]
def _load_inside(_typing: Any, array: Any, _at: Any) -> Any:
    """Return the 8 bytes at `at` as a number."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = builder.load(_word_at(context, builder, signature, args))
        word.align = 1
        return word

    return types.uint64(array, types.intp), generate


@intrinsic  # type: ignore[untyped-decorator]
def _store_inside(_typing: Any, array: Any, _at: Any, _word: Any) -> Any:
    """Write the 8 bytes at `at`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        stored = builder.store(args[2], _word_at(context, builder, signature, args))
        stored.align = 1
        return context.get_dummy_value()

    return types.void(array, types.intp, types.uint64), generate


@njit(inline="always")  # type: ignore[untyped-decorator]
def _load(array: Any, at: int) -> Any:
    """Return the 8 bytes at `at` >= 0 as a number; bytes behind the array are 0."""
    if at + 8 <= array.shape[0]:
        return _load_inside(array, at)
    word = _U64(0)
    for i in range(at, array.shape[0]):
        word |= _U64(array[i]) << _U64(8 * (i - at))
    return word


@njit(inline="always")  # type: ignore[untyped-decorator]
def _store(array: Any, at: int, word: Any, count: int) -> None:
    """Write the low `count` bytes of a word at `at` >= 0, as far as the array goes."""
    for i in range(at, min(at + count, array.shape[0])):
        array[i] = np.uint8((word >> _U64(8 * (i - at))) & _U64(255))


@njit(inline="always")  # type: ignore[untyped-decorator]
def _equal_lanes(word: Any, other: Any, ones: Any, tops: Any) -> Any:
    """Return a number that is not 0 where a byte (or 16 bits) is equal in both words."""
    differ = word ^ other
    return (differ - ones) & ~differ & tops


def check(rows: Any, size: int, layers: int, item: int, experts: int, bad: Any) -> bool:
    """Mark rows with an id out of range, or twice in one top-k.

    Args:
        rows: [n * layers * size] bytes.
        size: bytes of a top-k: 2, 4 or 8.
        layers: of a row; a row has 8 bytes at least.
        item: bytes of an id, 1 or 2; a top-k has 2 ids at least.
        experts: ids must be below it.
        bad: [n], written.

    Returns:
        Whether the sizes are such; else nothing is written.
    """
    row_bytes, n = size * layers, bad.shape[0]
    if size not in (2, 4, 8) or item not in (1, 2) or size < 2 * item or experts < 1:
        return False
    if layers < 1 or row_bytes < 8 or rows.shape[0] != n * row_bytes:
        return False
    # All pairs of 8 bytes of top-ks are compared at a time: with those turned by 1, 2, ... ids.
    ones = _U64(0x0101010101010101 if item == 1 else 0x0001000100010001)
    tops = ones << _U64(8 * item - 1)
    whole = ~_U64(0) >> _U64(64 - 8 * size)
    wide = rows[: rows.shape[0] // 2 * 2].view(np.uint16)
    for row in range(n):
        at = row * row_bytes
        stop = at + row_bytes
        if item == 1:
            top = np.uint8(0)
            for i in range(at, stop):
                top = max(top, rows[i])
            largest = np.int64(top)
        else:
            top2 = np.uint16(0)
            for i in range(at // 2, stop // 2):
                top2 = max(top2, wide[i])
            largest = np.int64(top2)
        twice = _U64(0)
        for step in range(1, size // item // 2 + 1):
            # The low `step` ids of each top-k go to its high end, the others down.
            down = _U64(8 * item * step)
            up = _U64(8 * size) - down
            keep = (whole >> down) * (~_U64(0) // whole)
            for i in range(at, stop - 7, 8):
                word = _load_inside(rows, i)
                turned = ((word >> down) & keep) | ((word << up) & ~keep)
                twice |= _equal_lanes(word, turned, ones, tops)
            # The last top-ks, where they are not the whole of a word.
            word = _load_inside(rows, stop - 8)
            turned = ((word >> down) & keep) | ((word << up) & ~keep)
            twice |= _equal_lanes(word, turned, ones, tops)
        bad[row] = largest >= experts or twice != 0
    return True


def pack(
    rows: Any,
    size: int,
    layers: int,
    item: int,
    width: int,
    shift: int,
    planes: Any,
    low_planes: Any,
    out: Any,
) -> bool:
    """Write rows as the planes of a PACK frame.

    Args:
        rows: [n * layers * size] bytes, low byte first.
        size: bytes of a top-k.
        layers: of a row.
        item: bytes of an id, 1 or 2.
        width: bits of an id in its plane, 1 to 8.
        shift: low bits of an id outside of its plane, 0 to 8.
        planes: [layers], where each plane begins in `out`.
        low_planes: [layers], where the low bits of each layer begin.
        out: bytes of the frame.

    Returns:
        Whether the sizes match; else nothing is written.
    """
    if size < item or layers < 1 or item not in (1, 2) or size % item:
        return False
    row_bytes = size * layers
    n = rows.shape[0] // row_bytes
    num_words = (n * (size // item) + 7) // 8
    if rows.shape[0] != n * row_bytes or planes.shape[0] != layers:
        return False
    if not (1 <= width <= 8 and 0 <= shift <= 8) or (shift > 0 and item == 1):
        return False
    if low_planes.shape[0] != layers:
        return False
    for layer in range(layers):
        if planes[layer] < 0 or planes[layer] + num_words * width > out.shape[0]:
            return False
        if low_planes[layer] < 0 or low_planes[layer] + num_words * shift > out.shape[0]:
            return False
    # Of (low, high) in 8, 16 and 32 bits each, to `width`, 2 `width` and 4 `width` each.
    by1, by2, by4 = _U64(width), _U64(2 * width), _U64(4 * width)
    low1 = _U64(0x0001000100010001) * ((_U64(1) << by1) - _U64(1))
    low2 = _U64(0x0000000100000001) * ((_U64(1) << by2) - _U64(1))
    low4 = (_U64(1) << by4) - _U64(1)
    most = _TILE * size // item
    strip = np.empty(most * item + 8, np.uint8)  # a top-k is copied as words, beyond its end
    plane = np.empty(most, np.uint8)
    low = np.empty(most if shift else 0, np.uint8)
    words, low_words = plane.view(np.uint64), low.view(np.uint64)
    for first in range(0, n, _TILE):
        some = min(_TILE, n - first)
        count = some * size // item
        its_words = (count + 7) // 8
        word = first * (size // item) // 8
        for layer in range(layers):
            # A layer's ids, one top-k behind the other.
            at, to = first * row_bytes + layer * size, 0
            if size == 8 and item == 1:  # an id is a byte, and a top-k a word
                for i in range(some):
                    words[i] = _load_inside(rows, at)
                    at += row_bytes
            else:
                # A top-k is copied as words, but where that would read behind the last row.
                last = at + (some - 1) * row_bytes + (size + 7) // 8 * 8
                inside = some if last <= rows.shape[0] else 0
                for _ in range(inside):
                    for i in range(0, size, 8):
                        _store_inside(strip, to + i, _load_inside(rows, at + i))
                    at += row_bytes
                    to += size
                for _ in range(inside, some):
                    for i in range(size):
                        strip[to + i] = rows[at + i]
                    at += row_bytes
                    to += size
                for i in range(to, its_words * 8 * item):
                    strip[i] = 0
                if item == 1:
                    for i in range(its_words * 8):
                        plane[i] = strip[i]
                else:
                    ids = strip[: 16 * its_words].view(np.uint16)
                    for i in range(its_words * 8):
                        plane[i] = np.uint8(ids[i] >> shift)
                    if shift:
                        for i in range(its_words * 8):
                            low[i] = np.uint8(ids[i] & 255)
            if width < 8:
                for i in range(its_words):
                    x = words[i]
                    x = (x & low1) | ((x >> _U64(8)) & low1) << by1
                    x = (x & low2) | ((x >> _U64(16)) & low2) << by2
                    x = (x & low4) | ((x >> _U64(32)) & low4) << by4
                    words[i] = x
            to = planes[layer] + word * width
            # Each word overwrites what the one before wrote too much; the last one is exact.
            for i in range(its_words):
                if (its_words - i) * width >= 8:
                    _store_inside(out, to, words[i])
                else:
                    _store(out, to, words[i], width)
                to += width
            for bit in range(shift):
                to = low_planes[layer] + bit * num_words + word
                for i in range(its_words):
                    flags = (low_words[i] >> _U64(bit)) & _U64(0x0101010101010101)
                    # The lowest bit of each byte, the first in the lowest place.
                    out[to + i] = np.uint8((flags * _U64(0x0102040810204080)) >> _U64(56))
    return True


def unpack(
    frame: Any,
    planes: Any,
    low_planes: Any,
    count: int,
    item: int,
    width: int,
    shift: int,
    out: Any,
) -> int:
    """Write layers of a PACK frame as ids.

    Args:
        frame: its bytes.
        planes: [m], where the plane of each layer begins.
        low_planes: [m], where its low bits begin.
        count: ids of a layer.
        item: bytes of an id, 1 or 2.
        width: bits of an id in its plane, 1 to 8.
        shift: low bits of an id outside of its plane, 0 to 8.
        out: [m, count * item] bytes of the ids, each row contiguous.

    Returns:
        The largest id; -1 if the sizes do not match, and then nothing is written.
    """
    num_words = (count + 7) // 8
    if count < 1 or item not in (1, 2) or not (1 <= width <= 8 and 0 <= shift <= 8):
        return -1
    if item == 1 and shift > 0:
        return -1
    if out.shape[0] != planes.shape[0] or out.shape[1] != count * item:
        return -1
    if (out.shape[1] > 1 and out.strides[1] != 1) or low_planes.shape[0] != planes.shape[0]:
        return -1
    for layer in range(planes.shape[0]):
        if planes[layer] < 0 or planes[layer] + num_words * width > frame.shape[0]:
            return -1
        if low_planes[layer] < 0 or low_planes[layer] + num_words * shift > frame.shape[0]:
            return -1
    by1, by2, by4 = _U64(width), _U64(2 * width), _U64(4 * width)
    low1 = _U64(0x0001000100010001) * ((_U64(1) << by1) - _U64(1))
    low2 = _U64(0x0000000100000001) * ((_U64(1) << by2) - _U64(1))
    low4 = (_U64(1) << by4) - _U64(1)
    used = ~_U64(0) >> _U64(64 - 8 * width)
    plane = np.empty(num_words * 8, np.uint8)
    words = plane.view(np.uint64)
    ids = np.empty(0 if item == 1 else num_words * 8, np.uint16)
    stored, wide_words = ids.view(np.uint8), ids.view(np.uint64)
    largest = np.int64(0)
    for layer in range(planes.shape[0]):
        at = planes[layer]
        for i in range(num_words):
            words[i] = _load(frame, at + i * width) & used
        if width < 8:
            for i in range(num_words):
                x = words[i]
                x = (x & low4) | ((x >> by4) & low4) << _U64(32)
                x = (x & low2) | ((x >> by2) & low2) << _U64(16)
                x = (x & low1) | ((x >> by1) & low1) << _U64(8)
                words[i] = x
        row = out[layer]
        if item == 1:
            top = np.uint8(0)
            for i in range(count):
                top = max(top, plane[i])
            largest = max(largest, np.int64(top))
            for i in range(count // 8):
                _store_inside(row, 8 * i, words[i])
            for i in range(count // 8 * 8, count):
                row[i] = plane[i]
            continue
        for i in range(count):
            ids[i] = np.uint16(plane[i]) << shift
        at = low_planes[layer]
        for bit in range(shift):
            for i in range(num_words):
                # Bit j of a byte, alone in byte j of a word; then 1 where it is set.
                x = _U64(frame[at + bit * num_words + i]) * _U64(0x0101010101010101)
                x &= _U64(0x8040201008040201)
                x = ((x + _U64(0x7F7F7F7F7F7F7F7F)) | x) >> _U64(7)
                words[i] = x & _U64(0x0101010101010101)
            for i in range(count):
                ids[i] |= np.uint16(plane[i]) << bit
        wide = np.uint16(0)
        for i in range(count):
            wide = max(wide, ids[i])
        largest = max(largest, np.int64(wide))
        for i in range(count // 4):
            _store_inside(row, 8 * i, wide_words[i])
        for i in range(count // 4 * 8, 2 * count):
            row[i] = stored[i]
    return int(largest)
