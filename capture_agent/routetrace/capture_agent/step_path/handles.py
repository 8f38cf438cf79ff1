"""Handles of running requests."""

from __future__ import annotations

from operator import index
from typing import Any

import numpy as np
import numpy.typing as npt

from routetrace.capture_agent.pipeline.linger import LANE_BITS, LANE_MASK
from routetrace.capture_agent.step_path.checks import wrong
from routetrace.common.errors import InvalidArgument, quoted, typed


class Handles:
    """Allocator of handles: a lane, which is reused, and a generation, which is not."""

    def __init__(self) -> None:
        self._handles = np.full(64, -1, np.int64)  # by lane; -1: free
        self._names: list[str] = []  # by lane
        self._generations: list[int] = []  # by lane
        self._free: list[int] = []
        self._live: set[str] = set()

    def __contains__(self, name: str) -> bool:
        """Whether a request with this name is running."""
        return name in self._live

    def __bool__(self) -> bool:
        """Whether any request is running."""
        return bool(self._live)

    def new(self, name: str) -> int:
        """Allocate a handle for a request that begins."""
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

    def check(self, handle: Any, field: str = "handle") -> int:
        """Return the handle; raise InvalidArgument unless its request is running."""
        number = _whole(handle, field)
        if not self._is_running(number):
            raise _wrong(field, quoted(number))
        return number

    def check_all(self, handles: npt.NDArray[np.int64]) -> None:
        """Raise InvalidArgument unless the requests of all handles are running."""
        now = self._handles.take(handles & LANE_MASK, mode="clip")
        # A free lane holds -1.
        if now.tobytes() != handles.tobytes() or np.minimum.reduce(handles, initial=0) < 0:
            for i, handle in enumerate(handles.tolist()):
                if not self._is_running(handle):
                    raise _wrong(f"handles[{i}]", quoted(handle))

    def _is_running(self, handle: int) -> bool:
        lane = handle & LANE_MASK
        return lane < len(self._names) and bool(self._handles[lane] == handle)

    def is_late(self, handle: int) -> bool:
        """Whether the request of a handle has ended."""
        handle = _whole(handle)
        lane, generation = handle & LANE_MASK, handle >> LANE_BITS
        return (
            lane < len(self._names)
            and 0 < generation <= self._generations[lane]
            and self._handles[lane] != handle
        )

    def late(self, handles: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_] | None:
        """Mark handles of requests that have ended, bool [m]; None without any.

        Raises:
            InvalidArgument: if a handle was never allocated.
        """
        now = self._handles.take(handles & LANE_MASK, mode="clip")
        if now.tobytes() == handles.tobytes():
            return None
        ended: npt.NDArray[np.bool_] = now != handles
        for i in np.flatnonzero(ended).tolist():
            handle = handles.item(i)
            if not self.is_late(handle):
                raise _wrong(f"spans[{i}][0]", quoted(handle))
        return ended

    def free(self, handle: int) -> None:
        """Free the handle of a request that has finished."""
        lane = handle & LANE_MASK
        self._handles[lane] = -1
        self._free.append(lane)
        self._live.discard(self._names[lane])


def _whole(handle: Any, field: str = "handle") -> int:
    try:
        if not isinstance(handle, bool):
            return index(handle)
    except TypeError:
        pass
    raise _wrong(field, typed(handle))


def _wrong(field: str, shown: str) -> InvalidArgument:
    return wrong(field, shown, "the value of begin() for a running request")
