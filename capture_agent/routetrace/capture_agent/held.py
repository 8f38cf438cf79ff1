"""Steps that wait to be entered into the lanes, many in one go.

Most steps of an engine bring one more row to each of the requests of the step before. What has to
be done for each row of them is to copy it; all else is the same for a handful of steps as for one.
"""

from __future__ import annotations

import numpy as np

from routetrace.capture_agent.linger import Ints, Places

#: Steps that are held at most: as many as a background that keeps up finds at a time.
_MOST_STEPS = 16


class Held:
    """Steps with one row for each of the same lanes, which continue them.

    Args:
        frame_rows: rows that a lane holds at most; so many steps at most are held.
    """

    def __init__(self, frame_rows: int) -> None:
        self._most = min(_MOST_STEPS, frame_rows)
        self.lanes: Ints = np.empty(0, np.int64)
        self.version = 0
        self.since = 0.0
        self._steps: list[int] = []
        self._places: list[Places] = []

    def __len__(self) -> int:
        """Steps that are held."""
        return len(self._steps)

    def takes(self, version: int) -> bool:
        """Whether one more step of these lanes can join those that are held."""
        return 0 < len(self._steps) < self._most and version == self.version

    def begin(self, since: float, version: int, lanes: Ints) -> None:
        """Steps of these lanes follow; there are none."""
        self.since, self.version, self.lanes = since, version, lanes

    def add(self, step: int, places: Places) -> None:
        """One more step, whose rows are in these places."""
        self._steps.append(step)
        self._places.append(places)

    def take(self) -> tuple[Ints, Places]:
        """Takes all out: numbers of the steps [n], places of the rows [lanes, n]."""
        steps, places = np.array(self._steps), np.stack(self._places, axis=1)
        self._steps, self._places = [], []
        return steps, places
