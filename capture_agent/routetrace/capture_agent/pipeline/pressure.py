"""Levels of memory pressure, and the rule that picks one."""

from __future__ import annotations

from enum import Enum

#: Parts of the memory that may be held: one for ring contents that are not bounded yet, one for the
#: chunk under construction, and one for each level.
SHARES = 16


class Pressure(Enum):
    """Level of memory pressure; its value is the number of shares above which it starts."""

    NORMAL = 0
    """Everything is recorded."""
    FULL = SHARES - 1
    """No rows and no changes of slots: a RESET comes at its end, at a flush, and before any op that
    needs slots. Requests that begin are dropped, and reported by name and end."""
    EXHAUSTED = SHARES
    """As FULL; requests that begin are not reported either."""


class PressureGauge:
    """Current level; any level may follow any other, as memory is measured after many records.

    Args:
        share: bytes of one share.
    """

    def __init__(self, share: int) -> None:
        self._share = share
        self.level = Pressure.NORMAL
        #: Whether memory was exhausted, and has not fallen to half since.
        self.alarmed = False

    def measure(self, held: int) -> bool:
        """Set the level for `held` bytes; return whether an alarm starts."""
        for level in Pressure:
            if level is Pressure.NORMAL or held > level.value * self._share:
                self.level = level
        was_alarmed = self.alarmed
        exhausted = self.level is Pressure.EXHAUSTED
        self.alarmed = exhausted or (was_alarmed and held > SHARES // 2 * self._share)
        return exhausted and not was_alarmed
