"""Counters and latencies that add up over processes."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

# Six steps per doubling, from 10 us on.
_LEAST = 1e-5
_RATIO = math.log(2) / 6


class Latencies:
    """Histogram of seconds in steps of 12 %, of bounded size."""

    def __init__(self, counts: dict[str, int] | None = None) -> None:
        self._counts: Counter[int] = Counter()
        self.add_counts(counts or {})

    def add(self, seconds: float, times: int = 1) -> None:
        """Count a latency `times` times."""
        self._counts[max(0, math.ceil(math.log(max(seconds, _LEAST) / _LEAST) / _RATIO))] += times

    def add_counts(self, counts: dict[str, int]) -> None:
        """Add the result of another `to_json`."""
        for step, times in counts.items():
            self._counts[int(step)] += times

    def __len__(self) -> int:
        return sum(self._counts.values())

    def at(self, share: float) -> float | None:
        """Return the quantile `share`; None if empty."""
        rank = math.ceil(len(self) * share)
        for step in sorted(self._counts):
            rank -= self._counts[step]
            if rank <= 0:
                return _LEAST * math.exp(step * _RATIO)
        return None

    def to_json(self) -> dict[str, int]:
        """Return the counts for another process."""
        return {str(step): times for step, times in self._counts.items()}

    def facts(self) -> dict[str, float | int | None]:
        """Return count and quantiles for a report."""
        return {"count": len(self), "p50": self.at(0.5), "p90": self.at(0.9), "p99": self.at(0.99)}


def added(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the sums of dictionaries of numbers, nested ones included."""
    total: dict[str, Any] = {}
    for part in parts:
        for name, value in part.items():
            if isinstance(value, dict):
                total[name] = added([total.get(name, {}), value])
            else:
                total[name] = total.get(name, 0) + value
    return total
