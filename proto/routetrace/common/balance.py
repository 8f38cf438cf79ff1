"""Measures of how evenly choices spread over experts, or work over ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


def balancedness(load: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Return mean / largest [L] of loads [L, n], of experts or of ranks; 1.0 without counts.

    A wait for the most loaded rank takes 1 / balancedness times that of equal loads.
    """
    most = load.max(1).astype(np.float64)
    even = np.ones(len(load))
    np.divide(load.mean(1), most, out=even, where=most > 0)
    return even


def shares(load: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Return the share [L, n] of its layer's load that each one has; 0 without counts."""
    return np.asarray(load / np.maximum(load.sum(1, keepdims=True), 1))


def entropy(load: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Return entropy / log2 n [L] of loads [L, n]: 1 is even, 0 all on one; 1 if n is 1."""
    count = load.shape[1]
    if count == 1:
        return np.ones(len(load))
    share = shares(load)
    bits = -np.sum(share * np.log2(np.where(share > 0, share, 1)), 1)
    return np.asarray(bits / np.log2(count))
