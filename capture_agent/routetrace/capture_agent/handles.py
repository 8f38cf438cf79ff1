"""Handles of running requests."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from routetrace.capture_agent.checks import wrong
from routetrace.capture_agent.linger import LANE_BITS, LANE_MASK


class Handles:
    """Hands out handles: lanes that are used again, under a number that is not."""

    def __init__(self) -> None:
        self._handles = np.full(64, -1, np.int64)  # by lane; -1: free
        self._names: list[str] = []  # by lane
        self._generations: list[int] = []  # by lane
        self._free: list[int] = []
        self._live: set[str] = set()

    def __contains__(self, name: str) -> bool:
        """Whether a request of that name is running."""
        return name in self._live

    def new(self, name: str) -> int:
        """A handle for a request that begins."""
        if not self._free:
            lane = len(self._names)
            if lane > LANE_MASK:
                raise wrong("request_id", f"running request {lane + 1}", f"at most {lane}")
            if lane == len(self._handles):
                self._handles = np.concatenate([self._handles, np.full(lane, -1, np.int64)])
            self._names.append("")
            self._generations.append(0)
            self._free.append(lane)
        lane = self._free.pop()
        self._generations[lane] += 1
        handle = self._generations[lane] << LANE_BITS | lane
        self._handles[lane], self._names[lane] = handle, name
        self._live.add(name)
        return handle

    def check(self, handle: int) -> int:
        """The handle, if it is of a running request."""
        lane = handle & LANE_MASK
        if lane >= len(self._names) or self._handles[lane] != handle:
            raise wrong("handle", handle, "the handle of a running request")
        return handle

    def is_late(self, handle: int) -> bool:
        """Whether it is the handle of a request that has ended."""
        lane, generation = handle & LANE_MASK, handle >> LANE_BITS
        return (
            lane < len(self._names)
            and 0 < generation <= self._generations[lane]
            and self._handles[lane] != handle
        )

    def late(self, handles: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_] | None:
        """Which of the handles are of requests that have ended, bool [m]; None if none is.

        Raises:
            InvalidArgument: if one of them was never handed out.
        """
        now = self._handles.take(handles & LANE_MASK, mode="clip")
        if now.tobytes() == handles.tobytes():
            return None
        ended: npt.NDArray[np.bool_] = now != handles
        for handle in handles[ended].tolist():
            if not self.is_late(handle):
                raise wrong("runs", handle, "handles that begin() returned")
        return ended

    def free(self, handle: int) -> None:
        """A request has finished."""
        lane = handle & LANE_MASK
        self._handles[lane] = -1
        self._free.append(lane)
        self._live.discard(self._names[lane])
