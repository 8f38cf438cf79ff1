"""Rates of counts that are reported from time to time."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

# Seconds between the heartbeats of an agent, unless its server has another setting.
_HEARTBEAT_SECONDS = 10.0


@dataclass
class _Count:
    value: int
    at: float
    """Time at which this value was first seen."""
    exact: bool = False
    """Whether it was reported then, not before the first look or in an idle time."""
    gap: float = _HEARTBEAT_SECONDS
    """Seconds between the last two reports."""
    rate: float | None = None


class Rates:
    """Current rates of counts, each from two reports that changed it."""

    def __init__(self) -> None:
        self._counts: dict[Hashable, _Count] = {}

    def add(self, key: Hashable, value: int, now: float) -> float | None:
        """Return the rate of a count.

        Args:
            key: name of the count.
            value: as reported last.
            now: time in seconds.

        Returns:
            Its increase per second: 0 if it has not changed for two reports; None as long as only
            one report is known.
        """
        count = self._counts.setdefault(key, _Count(value, now))
        passed = now - count.at
        if value < count.value or passed < 0:  # another boot, or another clock
            count = self._counts[key] = _Count(value, now)
        elif value > count.value:
            if count.exact and passed:
                count.gap, count.rate = passed, (value - count.value) / passed
            count.value, count.at, count.exact = value, now, True
        elif passed > 2 * count.gap:
            count.rate, count.exact = 0.0, False
        return count.rate
