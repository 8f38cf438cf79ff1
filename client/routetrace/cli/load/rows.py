"""The truth: the row that a pass computed, as a function of a seed, the pass and the position.

Nothing has to be kept or sent to check what was read: whoever knows who computed a position can
work its row out. Rows of other requests, other attempts, rejected drafts and other positions
differ, so one in the wrong place shows.

Experts are as popular as in models: their log-popularity is drawn from a normal distribution, the
same for all layers but with the experts in another order in each, and a token's experts are drawn
without replacement by popularity (Plackett-Luce). The skew of a named model is set so that frames
of 256 rows are as long as those of recorded rows; one token's layers are independent of each other
and of the token before, which frames, compressed layer by layer, hardly notice.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from routetrace.v1.layout import RoutingLayout

#: Rows that each layer has to choose from, as a power of two: two of 256 tokens rarely share one.
_CHOICE_BITS = 12
#: Layers that are drawn; the others are these with the experts in another order.
_DRAWN_LAYERS = 8
#: Set in the author of rows that belong to rejected drafts.
REJECTED = 1 << 62

_ALL = slice(None)
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)

_Ints = npt.NDArray[np.int64]


class Rows:
    """Rows of a layout.

    Args:
        layout: their columns.
        seed: of everything.
        skew: standard deviation of the experts' log-popularity.
    """

    def __init__(self, layout: RoutingLayout, seed: int, skew: float) -> None:
        self.layout = layout
        rng = np.random.default_rng([seed, layout.num_experts, layout.top_k])
        num_layers = len(layout.layer_ids)
        # The same for every seed: it decides how long the frames are.
        popularity = np.random.default_rng(0).normal(0, skew, layout.num_experts)
        weights = np.exp(popularity).astype(np.float32)
        drawn = [_draw(rng, weights, layout) for _ in range(min(_DRAWN_LAYERS, num_layers))]
        # [layers, choices, k]
        self._table = np.stack(
            [
                rng.permutation(layout.num_experts).astype(layout.dtype)[drawn[i % len(drawn)]]
                for i in range(num_layers)
            ]
        )
        # Cells as single values, which are picked ten times as fast as rows of an array.
        self._cells = self._table.reshape(-1).view(f"V{layout.top_k * layout.dtype.itemsize}")
        self._first = np.arange(num_layers, dtype=np.int64) << _CHOICE_BITS
        self._factors = rng.integers(1, 1 << 63, num_layers, np.uint64) | np.uint64(1)
        self._salt = rng.integers(1, 1 << 63, dtype=np.uint64)

    def of(
        self, authors: _Ints, positions: _Ints, columns: slice | list[int] = _ALL
    ) -> npt.NDArray[Any]:
        """[n, layers, K]: the rows that `authors` [n] computed at `positions` [n]."""
        keys = mix(authors.view(np.uint64) * _GOLDEN + positions.view(np.uint64) + self._salt)
        # The upper bits of a product with an odd number are as good as another hash.
        cells = (keys[:, None] * self._factors[columns]) >> np.uint64(64 - _CHOICE_BITS)
        at = cells.view(np.int64) + self._first[columns]
        picked = self._cells[at].view(self.layout.dtype)
        return picked.reshape(*at.shape, self.layout.top_k)


def mix(keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Keys that have nothing in common any more: the finaliser of splitmix64."""
    keys = (keys ^ (keys >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    keys = (keys ^ (keys >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return keys ^ (keys >> np.uint64(31))


def _draw(
    rng: np.random.Generator, weights: npt.NDArray[np.float32], layout: RoutingLayout
) -> npt.NDArray[np.intp]:
    """[choices, k] experts without replacement, by weight: whose clocks ring first."""
    rings = rng.standard_exponential((1 << _CHOICE_BITS, len(weights)), np.float32) / weights
    first = np.argpartition(rings, layout.top_k - 1, axis=1)[:, : layout.top_k]
    order = np.argsort(np.take_along_axis(rings, first, 1), axis=1)
    return np.take_along_axis(first, order, 1)
