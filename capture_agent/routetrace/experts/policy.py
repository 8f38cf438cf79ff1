"""Eviction policies of a layer's cache of experts.

A policy belongs to one layer and one cache. Each pass of the layer first reports the experts that
it uses, then requests as many victims as it needs slots. A victim is the expert that is least
missed from the next pass on.

`Lru` and `Lfu` use the layer's past alone. Published studies of routing find that counts beat
recency (arXiv:2511.05814), that neither describes it well (arXiv:2602.03921), and that requests
have favourite experts (arXiv:2401.14361). `Hazard` combines short and long memories of use, with
weights fitted on stored traces.

Depends on numpy alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from routetrace.common.errors import InvalidArgument


class Policy(Protocol):
    """Eviction policy of one layer. Deterministic."""

    def used(self, experts: Sequence[int]) -> None:
        """Record a pass of the layer that uses these experts, ascending, each once.

        Called before `victim` for that pass.
        """

    def victim(self, candidates: Sequence[int]) -> int:
        """Return the one of these experts, ascending, to evict; of equals the lowest id."""
        ...


class Lru:
    """Evict the least recently used expert; those never used first."""

    def __init__(self, num_experts: int) -> None:
        self._passes = 0
        self._last = [0] * _experts(num_experts)  # the pass of the last use, from 1; 0: none

    def used(self, experts: Sequence[int]) -> None:
        """See `Policy.used`."""
        self._passes += 1
        for expert in experts:
            self._last[expert] = self._passes

    def victim(self, candidates: Sequence[int]) -> int:
        """See `Policy.victim`."""
        return min(candidates, key=self._last.__getitem__)


class Lfu:
    """Evict the expert that the fewest passes used since the start.

    Counts survive eviction and do not age: an aged count mixes frequency with recency in a
    proportion to be chosen, which `Hazard` fits on traces.
    """

    def __init__(self, num_experts: int) -> None:
        self._counts = [0] * _experts(num_experts)

    def used(self, experts: Sequence[int]) -> None:
        """See `Policy.used`."""
        for expert in experts:
            self._counts[expert] += 1

    def victim(self, candidates: Sequence[int]) -> int:
        """See `Policy.victim`."""
        return min(candidates, key=self._counts.__getitem__)


class Hazard:
    """Evict the expert least likely to be used soon, by weights fitted on stored traces.

    The likelihood of an expert is a weighted sum of exponential averages of its use, some over a
    few passes, some over hundreds. Recency and frequency are its limits. Of equally likely experts
    the lowest id is evicted.

    Args:
        decays: [D], each in (0, 1): factor of an average in a pass that does not use the expert.
        weights: [D]: weight of each average.
        start: float [E]: initial averages: the share of passes that use each expert.

    Raises:
        InvalidArgument: if a shape or a value is invalid.
    """

    def __init__(
        self, decays: Sequence[float], weights: Sequence[float], start: npt.ArrayLike
    ) -> None:
        shares: npt.NDArray[np.floating[Any]] = np.asarray(start, np.float64)
        if not decays or not all(0 < decay < 1 for decay in decays):
            raise InvalidArgument(field="decays", value=decays, expected="numbers in (0, 1)")
        if len(weights) != len(decays) or not np.isfinite(weights).all():
            raise InvalidArgument(
                field="weights", value=weights, expected=f"{len(decays)} finite numbers"
            )
        if shares.ndim != 1 or not len(shares) or not ((shares >= 0) & (shares <= 1)).all():
            raise InvalidArgument(
                field="start", value=f"shape {shares.shape}", expected="shares in [0, 1], [E]"
            )
        self._decays = np.array(decays, np.float64)[:, None]
        self._weights = np.array(weights, np.float64)
        self._averages = np.tile(shares, (len(decays), 1))
        self._chances: list[float] | None = None  # by expert, until the next pass

    def used(self, experts: Sequence[int]) -> None:
        """See `Policy.used`."""
        self._averages *= self._decays
        self._averages[:, experts] += 1 - self._decays
        self._chances = None

    def victim(self, candidates: Sequence[int]) -> int:
        """See `Policy.victim`."""
        chances = self._chances
        if chances is None:
            chances = self._chances = (self._weights @ self._averages).tolist()
        return min(candidates, key=chances.__getitem__)


def _experts(num_experts: int) -> int:
    if num_experts < 1:
        raise InvalidArgument(field="num_experts", value=num_experts, expected="at least 1")
    return num_experts
