"""Fate of each routed cell (token, layer), counted alike for every source of rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from routetrace.common.missing import MissingRange

RIGHT, WRONG = "right", "wrong"
#: Fate of a cell that a source neither returned nor gave a reason for.
ABSENT = "not returned"


class Truth(Protocol):
    """The right choices, [tokens, layers, top_k], such as `vllm_runs.reference.Choice`."""

    ids: npt.NDArray[np.int64]

    def agrees(self, rows: npt.NDArray[Any]) -> tuple[npt.NDArray[np.bool_], int]:
        """Return which cells are right, and the number of ties among them."""


def fates(
    truth: Truth,
    rows: npt.NDArray[Any] | None,
    valid: npt.NDArray[np.bool_] | None = None,
    missing: Iterable[MissingRange] = (),
    layers: Sequence[int] = (),
) -> Counter[str]:
    """Count cells by fate: RIGHT, WRONG, or the reason why they are missing.

    The sum is the number of cells of `truth`: of rows beyond it none counts, and cells of rows that
    a source did not return are ABSENT.

    Args:
        truth: the right choices.
        rows: [tokens, layers, top_k] expert ids; None if the source returned nothing.
        valid: bool [tokens, layers], whether a cell holds ids; all do by default.
        missing: reasons of the cells that do not.
        layers: absolute layer ids of the columns; needed with `missing`.
    """
    padded = np.full(truth.ids.shape, -1, np.int64)
    there = np.zeros(truth.ids.shape[:2], np.bool_)
    tokens = len(there)
    if rows is not None:
        n = min(tokens, len(rows))
        padded[:n] = rows[:n]
        there[:n] = True if valid is None else valid[:n]
    right = truth.agrees(padded)[0] & there
    counts = Counter({RIGHT: int(right.sum()), WRONG: int((there & ~right).sum())})
    rest = ~there
    for gap in missing:
        columns = [layers.index(layer) for layer in gap.layer_ids]
        cells = np.ix_(range(gap.start, min(gap.stop, tokens)), columns)
        counts[gap.reason] += int(rest[cells].sum())
        rest[cells] = False
    counts[ABSENT] += int(rest.sum())
    return +counts
