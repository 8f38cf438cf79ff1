"""Which expert of a layer a cache gives up.

A policy belongs to one layer, and to one cache. Per pass of that layer it is told first which
experts the pass uses, then asked for as many victims as the pass needs slots: so it always
answers the question which of these is least missed from the next pass on.

`Lru` and `Lfu` look at the layer's own past. What is published of routing says that counts beat
recency (arXiv:2511.05814), that neither describes it well (arXiv:2602.03921), and that a request
has experts of its own (arXiv:2401.14361). `Hazard` makes no such choice: it remembers uses for
short and for long, and stored traces tell it what each memory is worth.

Knows numpy; knows neither torch nor caches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from routetrace.v1.errors import InvalidArgument


class Policy(Protocol):
    """Says what to give up, for one layer. The same calls give the same answers."""

    def used(self, experts: Sequence[int]) -> None:
        """A pass of the layer uses these experts, ascending, each once.

        Called before the victims of that pass are asked for.
        """

    def victim(self, candidates: Sequence[int]) -> int:
        """The one of these experts, ascending, to give up. Equals: the lowest id."""
        ...


class Lru:
    """Gives up what was not used for the most passes; what was never used, before all."""

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
    """Gives up what the fewest passes used, of all since the beginning.

    Counts outlive a stay in the cache, and do not age: an aged count mixes frequency with recency
    in a proportion that somebody has to choose, and `Hazard` takes it from traces.
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
    """Gives up what is least likely to be used soon, by what stored traces say.

    How likely an expert is, is a weighted sum of exponential averages of its own use, of which some
    forget within a few passes and some within hundreds. Recency and frequency are both limits of
    it; the weights are fitted on traces. Equally likely ones: the lowest id goes.

    Args:
        decays: [D], each in (0, 1): what is left of an average after a pass that does not use the
            expert.
        weights: [D]: what each average is worth.
        start: float [E]: where the averages begin: the share of passes that use each expert.

    Raises:
        InvalidArgument: if a shape or a value is another.
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
