"""Rows of recorded requests: checks, and their order by pass."""

from __future__ import annotations

from heapq import heapreplace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from routetrace.common.errors import InvalidArgument
from routetrace.common.limits import MAX_LAYERS


def side_by_side(
    rows: npt.NDArray[np.integer[Any]], starts: npt.NDArray[np.bool_] | None, batch: int
) -> tuple[npt.NDArray[np.integer[Any]], npt.NDArray[np.int64]]:
    """Return rows in the order of an engine that decodes `batch` requests concurrently.

    Args:
        rows: [n, L, K] of consecutive requests.
        starts: bool [n]: the first row of each request; row 0 is one in any case.
        batch: concurrent requests. The next one begins when one ends; the last passes have fewer.

    Returns:
        The rows by pass, and the pass of each from 0 on, int64 [n].

    Raises:
        InvalidArgument: if the batch is below 1, or `starts` is not [n].
    """
    if batch < 1:
        raise InvalidArgument(field="batch", value=batch, expected="at least 1")
    if starts is not None and (starts.shape != (len(rows),) or starts.dtype.kind != "b"):
        raise InvalidArgument(
            field="starts", value=f"{starts.dtype} {starts.shape}", expected=f"bool [{len(rows)}]"
        )
    begun = [0] if starts is None else [0, *(np.flatnonzero(starts[1:]) + 1).tolist()]
    free_at = [0] * min(batch, len(begun))
    passes = np.empty(len(rows), np.int64)
    for start, stop in pairwise([*begun, len(rows)]):
        first = free_at[0]
        passes[start:stop] = np.arange(first, first + stop - start)
        heapreplace(free_at, first + stop - start)
    order = np.argsort(passes, kind="stable")
    return rows[order], passes[order]


def check_rows(
    rows: npt.NDArray[np.integer[Any]], num_experts: int, layers: int | None = None
) -> None:
    """Check that rows are ids [n, L, K] of `num_experts` experts.

    Args:
        rows: the rows.
        num_experts: E.
        layers: L; None or 0 if unknown.

    Raises:
        InvalidArgument: if they are not.
    """
    if rows.ndim != 3 or rows.dtype.kind not in "iu" or not rows.shape[1] or not rows.shape[2]:
        raise InvalidArgument(
            field="rows", value=f"{rows.dtype} {rows.shape}", expected="integers [n, L, K]"
        )
    if rows.shape[1] > MAX_LAYERS or (layers and rows.shape[1] != layers):
        raise InvalidArgument(
            field="rows",
            value=f"{rows.shape[1]} layers",
            expected=f"{layers or f'at most {MAX_LAYERS}'} layers",
        )
    if rows.size and not (rows.min() >= 0 and rows.max() < num_experts):
        raise InvalidArgument(
            field="rows",
            value=f"ids {int(rows.min())} to {int(rows.max())}",
            expected=f"ids in [0, {num_experts})",
        )
