"""Simulated rows.

A row is a function of the seed, the pass that computed it (its author), and its position. A check
therefore needs no stored rows. Rows of other requests, attempts, positions and rejected drafts
differ, so a row in the wrong place shows.

Expert popularity resembles that of models: log-popularity is normally distributed, equal in all
layers but with the experts permuted in each, and the experts of a token are drawn without
replacement by popularity (Plackett-Luce). The skew of a named model is set so that frames of 256
rows are as long as recorded ones. Layers and neighbouring tokens are independent, which hardly
affects the length of frames, as these are compressed layer by layer.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from routetrace.common.layout import ModelLayout

#: log2 of the distinct rows of a layer: of 256 tokens, two rarely share one.
_CHOICE_BITS = 12
#: Layers that are drawn; the others are permutations of these.
_DRAWN_LAYERS = 8
#: Flag in the author of rows of rejected drafts.
REJECTED = 1 << 62

_ALL = slice(None)
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)

_Ints = npt.NDArray[np.int64]


class Rows:
    """Source of rows of a layout.

    Args:
        layout: columns of the rows.
        seed: random seed.
        skew: standard deviation of the experts' log-popularity.
    """

    def __init__(self, layout: ModelLayout, seed: int, skew: float) -> None:
        self.layout = layout
        rng = np.random.default_rng([seed, layout.num_experts, layout.top_k])
        num_layers = len(layout.layer_ids)
        # Equal for every seed, as it determines the length of frames.
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
        # Cells as single values: indexing is ten times as fast as with rows of an array.
        self._cells = self._table.reshape(-1).view(f"V{layout.top_k * layout.dtype.itemsize}")
        self._first = np.arange(num_layers, dtype=np.int64) << _CHOICE_BITS
        self._factors = rng.integers(1, 1 << 63, num_layers, np.uint64) | np.uint64(1)
        self._salt = rng.integers(1, 1 << 63, dtype=np.uint64)

    def of(
        self, authors: _Ints, positions: _Ints, columns: slice | list[int] = _ALL
    ) -> npt.NDArray[Any]:
        """Return the rows [n, layers, K] that `authors` [n] computed at `positions` [n]."""
        keys = mix(authors.view(np.uint64) * _GOLDEN + positions.view(np.uint64) + self._salt)
        # The upper bits of a product with an odd number serve as a second hash.
        cells = (keys[:, None] * self._factors[columns]) >> np.uint64(64 - _CHOICE_BITS)
        at = cells.view(np.int64) + self._first[columns]
        picked = self._cells[at].view(self.layout.dtype)
        return picked.reshape(*at.shape, self.layout.top_k)


def mix(keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Hash keys with the finaliser of splitmix64."""
    keys = (keys ^ (keys >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    keys = (keys ^ (keys >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return keys ^ (keys >> np.uint64(31))


def _draw(
    rng: np.random.Generator, weights: npt.NDArray[np.float32], layout: ModelLayout
) -> npt.NDArray[np.intp]:
    """Draw experts [choices, k] without replacement, by weight (exponential clocks)."""
    times = rng.standard_exponential((1 << _CHOICE_BITS, len(weights)), np.float32) / weights
    first = np.argpartition(times, layout.top_k - 1, axis=1)[:, : layout.top_k]
    order = np.argsort(np.take_along_axis(times, first, 1), axis=1)
    return np.take_along_axis(first, order, 1)
