"""Bit packing of small ids: 8 ids of `width` bits each in `width` bytes.

Bits follow each other from the lowest up, ids and bytes in order: id i of a group of 8 is in the
bits [width * i, width * (i + 1)) of its bytes as one little-endian number.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

#: Bytes of ids that are worked on at a time, so that they stay in the CPU's cache.
_BLOCK = 1 << 16

#: Words of two parts each: bits of a part, and the dtype of a word.
_WORDS: tuple[tuple[int, np.dtype[Any]], ...] = (
    (8, np.dtype("<u2")),
    (16, np.dtype("<u4")),
    (32, np.dtype("<u8")),
)

_WORD = np.dtype("<u8")


def pack(ids: Bytes, width: int) -> Bytes:
    """Pack ids, a multiple of 8 of them and each below 2 ** width; they are overwritten.

    Args:
        ids: [8 n], contiguous.
        width: 1 to 8.

    Returns:
        [width * n].
    """
    if width == 8:
        return ids
    packed = np.empty(len(ids) // 8 * width, np.uint8)
    for at in range(0, len(ids), _BLOCK):
        part = ids[at : at + _BLOCK]
        for bits, dtype in _WORDS:
            used, words = width * bits // 8, part.view(dtype)
            # Of (low, high) in `bits` each, to `used` each.
            high = words >> bits
            high *= (1 << bits) - (1 << used)
            words -= high
        # The low bytes of each word, as one item: several times as fast as byte by byte.
        item, n = np.dtype((np.void, width)), len(part) // 8
        items: Any = np.ndarray((n,), item, part.data, 0, (8,))
        packed[at // 8 * width :][: n * width].view(item)[...] = items
    return packed


def unpack(packed: Bytes, width: int) -> Bytes:
    """Unpack ids.

    Args:
        packed: [width * n], contiguous; any bytes.
        width: 1 to 8.

    Returns:
        [8 n], each below 2 ** width.
    """
    if width == 8:
        return packed
    num_words = len(packed) // width
    padded = np.concatenate([packed, np.zeros(8, np.uint8)])  # the last word reads beyond its bytes
    # Words that overlap, without the bytes of the next one.
    stored: Any = np.ndarray((num_words,), _WORD, padded.data, 0, (width,))
    unpacked = stored & ((1 << 8 * width) - 1)
    ids: Bytes = unpacked.view(np.uint8)
    for at in range(0, len(ids), _BLOCK):
        part = ids[at : at + _BLOCK]
        for bits, dtype in reversed(_WORDS):
            used, words = width * bits // 8, part.view(dtype)
            high = words >> used
            high *= (1 << bits) - (1 << used)
            words += high
    return ids
