"""Tiles: values of all cells at each zoom level, in bytes.

At level z a column is the mean of 2^z tokens over the cells that have a value, quantised to 0..254;
255 where none has. A tile is 256 columns of one level.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from routetrace.client import Trace
from routetrace.common.errors import InvalidArgument
from routetrace.trainers.agreement import overlap

#: Columns of a tile.
COLUMNS = 256
#: Value of a column none of whose cells has one.
ABSENT = 255
_MOST = 254

_Bytes = npt.NDArray[np.uint8]
_Counts = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]


class Levels:
    """The zoom levels of one value of a trace; level 0 has a column for each token.

    Args:
        levels: [layers, columns] by level, each half as many columns as the one before.
    """

    def __init__(self, levels: list[_Bytes]) -> None:
        self._levels = levels

    def __len__(self) -> int:
        return len(self._levels)

    @property
    def nbytes(self) -> int:
        """Bytes of all levels."""
        return sum(level.nbytes for level in self._levels)

    def tiles(self, z: int) -> int:
        """Return the number of tiles of a level."""
        return -(-int(self._levels[z].shape[1]) // COLUMNS)

    def tile(self, z: int, x: int) -> bytes:
        """Return the bytes [layers, 256] of a tile; columns beyond the last token are absent.

        Raises:
            InvalidArgument: if there is no such level or tile.
        """
        if not 0 <= z < len(self):
            raise InvalidArgument(field="z", value=z, expected=f"0 to {len(self) - 1}")
        level = self._levels[z]
        tiles = self.tiles(z)
        if not 0 <= x < tiles:
            raise InvalidArgument(
                field="x", value=x, expected=f"0 to {tiles - 1} at z = {z}" if tiles else "no rows"
            )
        part = level[:, x * COLUMNS : (x + 1) * COLUMNS]
        tile = np.full((len(level), COLUMNS), ABSENT, np.uint8)
        tile[:, : part.shape[1]] = part
        return tile.tobytes()


def count_levels(tokens: int) -> int:
    """Return the number of levels of a trace: up to that which one tile holds."""
    levels = 1
    while tokens > COLUMNS:
        tokens, levels = -(-tokens // 2), levels + 1
    return levels


def changed(trace: Trace) -> Levels:
    """Return the levels of the share of experts that the token before did not choose.

    A cell has a value if it and that of the token before are there; those of position 0 have none.
    """
    ids, valid = trace.topk_ids.transpose(1, 0, 2), trace.valid.T

    def of(layer: int) -> _Counts:
        tokens = valid.shape[1]
        counts, known = np.zeros(tokens, np.int64), np.zeros(tokens, np.int64)
        known[1:] = valid[layer, 1:] & valid[layer, :-1]
        rows = ids[layer : layer + 1]
        counts[1:] = trace.top_k - overlap(rows[:, 1:], rows[:, :-1])[0] if tokens > 1 else 0
        return counts, known

    return _levels(valid.shape, trace.top_k, of)


def differing(trace: Trace, other: Trace) -> Levels:
    """Return the levels of the share of experts that another side did not choose for the cell.

    A cell has a value if both sides have it.

    Args:
        trace: a whole trace.
        other: rows of the same tokens, of the same top-k: some of the positions and layers.
    """
    ids, valid = trace.topk_ids.transpose(1, 0, 2), trace.valid.T
    theirs, known_there = other.topk_ids.transpose(1, 0, 2), other.valid.T
    start, stop = max(0, other.token_start), min(len(trace), other.token_stop)
    columns = {layer: column for column, layer in enumerate(other.layer_ids)}

    def of(layer: int) -> _Counts:
        counts, known = np.zeros(len(trace), np.int64), np.zeros(len(trace), np.int64)
        column = columns.get(trace.layer_ids[layer])
        if column is not None and start < stop:
            here = slice(start, stop)
            there = slice(start - other.token_start, stop - other.token_start)
            same = overlap(ids[layer : layer + 1, here], theirs[column : column + 1, there])[0]
            known[here] = valid[layer, here] & known_there[column, there]
            counts[here] = trace.top_k - same
        return counts, known

    return _levels(valid.shape, trace.top_k, of)


def _levels(shape: tuple[int, ...], most: int, of: Callable[[int], _Counts]) -> Levels:
    """Return the levels of values 0 .. `most` of [layers, tokens]; of(layer): values, and where."""
    layers, tokens = shape
    sizes = [tokens]
    while len(sizes) < count_levels(tokens):
        sizes.append(-(-sizes[-1] // 2))
    levels = [np.empty((layers, size), np.uint8) for size in sizes]
    for layer in range(layers):  # one at a time: temporary arrays of all would take a gigabyte
        counts, known = of(layer)
        counts = counts * known
        for level in levels:
            level[layer] = quantised(counts, known, most)
            counts, known = _halved(counts), _halved(known)
    return Levels(levels)


def quantised(
    total: npt.NDArray[np.int64], count: npt.NDArray[np.int64], most: int
) -> npt.NDArray[np.uint8]:
    """Return means as bytes: 254 for `most`, halves rounded up, 255 where `count` is 0.

    Args:
        total: sums of values 0 .. `most`.
        count: cells of each sum.
        most: highest value of a cell.
    """
    cells = np.maximum(count, 1) * most
    means = (2 * _MOST * total + cells) // (2 * cells)
    return np.where(count > 0, means, ABSENT).astype(np.uint8)


def _halved(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the sums of neighbours; the last one stays alone if the number is odd."""
    sums = values[::2].copy()
    sums[: len(values) // 2] += values[1::2]
    return sums
