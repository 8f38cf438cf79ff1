"""Short pauses of the garbage collector.

A full collection walks all objects that are not frozen: 100 ms and more for a server that has just
stored some 10,000 traces, in which it answers no call.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping
from typing import Any

#: Processor seconds of a full collection from which on its survivors are frozen.
_LONG_SECONDS = 0.002

#: Allocations, and collections of the younger generations, before a full collection: few, so that
#: it finds some 10,000 new objects at most.
_THRESHOLDS = (700, 5, 1)


class _Freezer:
    """Freezes what a long full collection has found alive, so that no other walks it again.

    Nothing is frozen that was garbage at that time. Objects of the index hold no cycles: reference
    counts free them, frozen or not.
    """

    def __init__(self) -> None:
        self._begun = 0.0

    def __call__(self, phase: str, info: Mapping[str, Any]) -> None:
        if info["generation"] != 2:
            return
        if phase == "start":
            self._begun = time.thread_time()
        elif time.thread_time() - self._begun > _LONG_SECONDS:
            gc.freeze()


def shorten() -> None:
    """Bound the pauses of this process from now on."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)
    gc.callbacks.append(_Freezer())
