"""Positions of the rows of a step, as the model was given them.

The scheduler does not know them where it runs ahead of a model that drafts: it plans a step before
the drafts of the last one are judged.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Ints = npt.NDArray[Any]


def to_host(positions: torch.Tensor, *, wait: bool) -> Ints:
    """Return a private copy.

    Args:
        positions: on any device.
        wait: whether the copy is complete on return. If not, one from a CUDA device arrives before
            anything that is enqueued later on the same stream; its pinned memory lives as long.
    """
    if wait or not positions.is_cuda:
        return positions.to("cpu", copy=True).numpy()
    host = torch.empty(positions.shape, dtype=positions.dtype, pin_memory=True)
    return host.copy_(positions, non_blocking=True).numpy()


def first_positions(spans: Ints, positions: Ints) -> Ints:
    """Return the first position of each span.

    Args:
        spans: [m, 3]: any name, upper bound of the first position, and number of rows, in the order
            of the rows.
        positions: of all rows.

    Raises:
        RuntimeError: if the positions do not fit the spans, so that none can be trusted.
    """
    counts = spans[:, 2]
    ends = counts.cumsum()
    starts: Ints = positions[ends - counts]
    steady = np.arange(len(positions)) + np.repeat(starts - (ends - counts), counts)
    # Where nothing is captured the handle is below 0, and the plan's position means nothing.
    beyond = (starts > spans[:, 1]) & (spans[:, 0] >= 0)
    if (positions != steady).any() or beyond.any():
        raise RuntimeError("positions of the batch do not fit the plan of its step")
    return starts
