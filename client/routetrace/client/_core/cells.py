"""Destinations of rows: arrays that grow, or places in arrays of the caller."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from routetrace.client._memory import zeros
from routetrace.client._ranges import merge_ranges
from routetrace.client.plan import Piece
from routetrace.common.layout import ModelLayout

Ids = npt.NDArray[np.unsignedinteger[Any]]
Valid = npt.NDArray[np.bool_]


class GrowingCells:
    """Consecutive positions, one after the other.

    Args:
        num_layers: layers that are read.
        layout: the model's.
        start: the first position.
        pin: whether the ids are page-locked.
    """

    def __init__(self, num_layers: int, layout: ModelLayout, start: int, pin: bool = False) -> None:
        self._start = start
        self._pin = pin
        self.ids: Ids = np.zeros((num_layers, 0, layout.top_k), layout.dtype)
        self.valid: Valid = np.zeros((num_layers, 0), np.bool_)

    def reserve(self, stop: int) -> None:
        """Make room for positions before `stop`."""
        ids, valid = self.ids, self.valid
        old, need = valid.shape[1], stop - self._start
        if need <= old:
            return
        room = max(need, 2 * old)
        # Zeros: missing cells must not show previous content of the memory.
        self.ids = zeros((len(ids), room, ids.shape[2]), ids.dtype, self._pin)
        self.valid = np.zeros((len(valid), room), np.bool_)
        if old:
            self.ids[:, :old] = ids
            self.valid[:, :old] = valid

    def rows(self, start: int, stop: int) -> slice:
        """Return the places of positions [start, stop) in the arrays."""
        return slice(start - self._start, stop - self._start)

    def parts(self, start: int, stop: int) -> Iterator[tuple[slice, int, int]]:
        """Yield the places of positions [start, stop): (places in the arrays, from, to)."""
        yield self.rows(start, stop), start, stop


class PlacedCells:
    """Ranges of positions that have their places in arrays of the caller.

    Args:
        ids: [layers, tokens, top_k].
        valid: [layers, tokens].
        layout: the model's, as the caller expects it.
        pieces: the ranges, ascending and disjoint, and their places.
    """

    def __init__(
        self, ids: Ids, valid: Valid, layout: ModelLayout, pieces: Sequence[Piece]
    ) -> None:
        self.ids = ids
        self.valid = valid
        self.layout = layout
        self.pieces = pieces
        self.bytes_fetched = 0

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """The positions, ascending and apart."""
        ranges = merge_ranges((piece.start, piece.stop, None) for piece in self.pieces)
        return [(start, stop) for start, stop, _ in ranges]

    def clear(self) -> None:
        """Mark all places as missing."""
        for piece in self.pieces:
            self.valid[:, piece.where(piece.start, piece.stop)] = False

    def parts(self, start: int, stop: int) -> Iterator[tuple[slice, int, int]]:
        """Yield the places of positions in [start, stop), if any: (places, from, to)."""
        for piece in self.pieces:
            a, b = max(start, piece.start), min(stop, piece.stop)
            if a < b:
                yield piece.where(a, b), a, b
