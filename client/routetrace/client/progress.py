"""Progress of get_many and prefetch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sized
from dataclasses import dataclass
from inspect import iscoroutinefunction
from typing import TypeVar

from routetrace.client.rows import Rows
from routetrace.client.trace import Trace
from routetrace.common.errors import InvalidArgument, typed
from routetrace.common.values import Values

_Item = TypeVar("_Item")


@dataclass(frozen=True, kw_only=True)
class Progress(Values):
    """State of an iteration over traces, or over the rows of plans."""

    done: int
    """Traces or plans that ended, failed ones included."""
    total: int | None
    """Traces or plans of the call; None if its argument has no length."""
    failed: int
    """Those that ended with an error."""
    bytes: int
    """Bytes of the expert ids, decoded."""
    seconds: float
    """Seconds since the call."""


class Meter:
    """Reports the progress of one iteration to a function of the caller.

    Args:
        report: function of the caller; None: nothing is reported.
        source: traces or plans of the call.

    Raises:
        InvalidArgument: if `report` cannot be called, or is a coroutine function.
    """

    def __init__(self, report: Callable[[Progress], None] | None, source: Iterable[object]) -> None:
        if not (report is None or callable(report)) or iscoroutinefunction(report):
            expected = "a function that takes a Progress, or None"
            raise InvalidArgument(field="progress", value=typed(report), expected=expected)
        self._report = report
        self._total = len(source) if isinstance(source, Sized) else None
        self._done = self._failed = self._bytes = 0
        self._began = time.monotonic()

    def counted(self, item: _Item) -> _Item:
        """Count a trace, the rows of a plan, or an error in their place; return it."""
        if self._report is not None:
            self._done += 1
            self._failed += isinstance(item, Exception)
            self._bytes += item.topk_ids.nbytes if isinstance(item, (Trace, Rows)) else 0
            progress = Progress(
                done=self._done,
                total=self._total,
                failed=self._failed,
                bytes=self._bytes,
                seconds=time.monotonic() - self._began,
            )
            try:
                self._report(progress)
            except (StopIteration, StopAsyncIteration) as error:  # would end a loop in silence
                raise RuntimeError(f"progress raised {type(error).__name__}") from error
        return item
