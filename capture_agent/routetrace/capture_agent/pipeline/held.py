"""Steps whose rows are stored but not yet entered into their lanes.

Most steps of an engine bring one more row to each request of the step before. Each row is copied at
once; the rest of the work costs the same for a handful of steps as for one.
"""

from __future__ import annotations

import numpy as np

from routetrace.capture_agent.pipeline.linger import Ints, Places

#: Most steps that are held: as many as a background that keeps up finds at a time.
_MOST_STEPS = 16


class Held:
    """Steps with one row for each of the same lanes, which continue them.

    Args:
        frame_rows: most rows of a lane, and so most steps that are held.
    """

    def __init__(self, frame_rows: int) -> None:
        self._most = min(_MOST_STEPS, frame_rows)
        self.lanes: Ints = np.empty(0, np.int64)
        self.version = 0
        self.since = 0.0
        self._steps: list[int] = []
        self._places: list[Places] = []

    def __len__(self) -> int:
        """Number of held steps."""
        return len(self._steps)

    def takes(self, version: int) -> bool:
        """Whether there are held steps that one more step of these lanes can join."""
        return 0 < len(self._steps) < self._most and version == self.version

    def begin(self, since: float, version: int, lanes: Ints) -> None:
        """Set the lanes of the steps that follow; none are held."""
        self.since, self.version, self.lanes = since, version, lanes

    def add(self, step: int, places: Places) -> None:
        """Add a step whose rows are in these places."""
        self._steps.append(step)
        self._places.append(places)

    def take(self) -> tuple[Ints, Places]:
        """Remove all; return step numbers [n] and places of rows [lanes, n]."""
        steps, places = np.array(self._steps), np.stack(self._places, axis=1)
        self._steps, self._places = [], []
        return steps, places
