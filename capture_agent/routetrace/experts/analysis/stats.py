"""Statistics of routing, counted trace by trace without keeping rows.

By layer: load and balance, experts never chosen, experts chosen together, and the share of a
token's experts that the next token needs again.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from routetrace.common import balance
from routetrace.common.errors import InvalidArgument
from routetrace.common.limits import MAX_EXPERTS, MAX_LAYERS

# Rows whose pairs are counted together: bounds memory.
_PAIR_ROWS = 1 << 14


class ExpertStats:
    """Counts of one model's routing.

    Args:
        num_layers: L, columns of the rows.
        num_experts: E.

    Attributes:
        tokens: int64 [L]: cells counted.
        load: int64 [L, E]: how often each expert was chosen.
        together: int64 [L, E, E]: by how many tokens both experts were chosen; the diagonal is
            the load.
        pairs: int64 [L]: neighbouring tokens of a trace with two valid cells.
        shared: int64 [L]: experts that such neighbours have in common, summed.

    Raises:
        InvalidArgument: if a number is out of range.
    """

    def __init__(self, num_layers: int, num_experts: int) -> None:
        for name, value, most in (
            ("num_layers", num_layers, MAX_LAYERS),
            ("num_experts", num_experts, MAX_EXPERTS),
        ):
            if not 1 <= value <= most:
                raise InvalidArgument(field=name, value=value, expected=f"1 to {most}")
        self.num_layers, self.num_experts = num_layers, num_experts
        self.top_k = 0
        self.tokens = np.zeros(num_layers, np.int64)
        self.load = np.zeros((num_layers, num_experts), np.int64)
        self.together = np.zeros((num_layers, num_experts, num_experts), np.int64)
        self.pairs = np.zeros(num_layers, np.int64)
        self.shared = np.zeros(num_layers, np.int64)

    def add(
        self, rows: npt.NDArray[np.integer[Any]], valid: npt.NDArray[np.bool_] | None = None
    ) -> None:
        """Count a trace, given as consecutive rows.

        Args:
            rows: expert ids [n, L, K], distinct within a cell. Ignored where not valid.
            valid: bool [n, L]; all if None.

        Raises:
            InvalidArgument: if a shape is wrong, or a valid id out of range.
        """
        self._check(rows, valid)
        self.top_k = rows.shape[2]
        experts = self.num_experts
        for layer in range(self.num_layers):
            # Layer by layer: rows stored layer by layer are then read in order.
            ids = rows[:, layer].astype(np.int64)
            there = np.ones(len(ids), bool) if valid is None else valid[:, layer]
            cells = ids[there]
            if cells.size and not 0 <= cells.min() <= cells.max() < experts:
                raise InvalidArgument(
                    field="rows",
                    value=f"ids {cells.min()} to {cells.max()}",
                    expected=f"ids in [0, {experts})",
                )
            self.tokens[layer] += len(cells)
            self.load[layer] += np.bincount(cells.ravel(), minlength=experts)
            for start in range(0, len(cells), _PAIR_ROWS):
                part = cells[start : start + _PAIR_ROWS]
                both = (part[:, :, None] * experts + part[:, None, :]).ravel()
                counted = np.bincount(both, minlength=experts * experts)
                self.together[layer] += counted.reshape(experts, experts)
            next_to = there[1:] & there[:-1]
            self.pairs[layer] += np.count_nonzero(next_to)
            same = (ids[1:, :, None] == ids[:-1, None, :]).sum((1, 2))
            self.shared[layer] += int(same[next_to].sum())

    @property
    def share(self) -> npt.NDArray[np.float64]:
        """Share of a layer's load that each expert has [L, E]; 0 without counts."""
        return balance.shares(self.load)

    @property
    def balancedness(self) -> npt.NDArray[np.float64]:
        """Mean load / largest load [L]: 1 is even, 1 / E all on one expert."""
        return balance.balancedness(self.load)

    @property
    def violation(self) -> npt.NDArray[np.float64]:
        """Share x E - 1 [L, E]: 0 is even, -1 is an expert without tokens."""
        return self.share * self.num_experts - 1

    @property
    def max_violation(self) -> npt.NDArray[np.float64]:
        """Of the most loaded expert [L]."""
        return np.asarray(self.violation.max(1))

    @property
    def min_violation(self) -> npt.NDArray[np.float64]:
        """Of the least loaded expert [L]."""
        return np.asarray(self.violation.min(1))

    @property
    def avg_violation(self) -> npt.NDArray[np.float64]:
        """Mean distance from even, over the experts [L]: of the violations without their sign."""
        return np.asarray(np.abs(self.violation).mean(1))

    @property
    def entropy(self) -> npt.NDArray[np.float64]:
        """Entropy of the load / log2 E [L]: 1 is even, 0 one expert. 1 for a single expert."""
        return balance.entropy(self.load)

    @property
    def dead(self) -> npt.NDArray[np.int64]:
        """Number of experts never chosen [L]."""
        return np.asarray((self.load == 0).sum(1))

    def top_share(self, count: int) -> npt.NDArray[np.float64]:
        """Return the share of the load of the `count` most loaded experts [L].

        Raises:
            InvalidArgument: if the layer has fewer.
        """
        if not 1 <= count <= self.num_experts:
            raise InvalidArgument(field="count", value=count, expected=f"1 to {self.num_experts}")
        return np.asarray(np.sort(self.share, 1)[:, ::-1][:, :count].sum(1))

    @property
    def overlap(self) -> npt.NDArray[np.float64]:
        """Share of a token's experts that the token before also had [L]; 0 without neighbours.

        By chance it is about K / E.
        """
        return np.asarray(self.shared / np.maximum(self.pairs * max(self.top_k, 1), 1))

    @property
    def coactivation(self) -> npt.NDArray[np.float64]:
        """Lift of pairs [L, E, E]: P(a and b) / (P(a) P(b)), 1 if independent.

        0 on the diagonal, and where an expert was never chosen.
        """
        tokens = np.maximum(self.tokens, 1)[:, None, None]
        expected = self.load[:, :, None] * self.load[:, None, :] / tokens
        lift = np.divide(
            self.together, expected, out=np.zeros(self.together.shape), where=expected > 0
        )
        lift[:, np.arange(self.num_experts), np.arange(self.num_experts)] = 0
        return lift

    def _check(
        self, rows: npt.NDArray[np.integer[Any]], valid: npt.NDArray[np.bool_] | None
    ) -> None:
        expected = f"integers [n, {self.num_layers}, {self.top_k or 'K'}]"
        if (
            rows.ndim != 3
            or rows.dtype.kind not in "iu"
            or rows.shape[1] != self.num_layers
            or not 1 <= rows.shape[2] <= self.num_experts
            or self.top_k not in (0, rows.shape[2])
        ):
            raise InvalidArgument(
                field="rows", value=f"{rows.dtype} {rows.shape}", expected=expected
            )
        if valid is not None and (valid.dtype.kind != "b" or valid.shape != rows.shape[:2]):
            raise InvalidArgument(
                field="valid",
                value=f"{valid.dtype} {valid.shape}",
                expected=f"bool {rows.shape[:2]}",
            )
