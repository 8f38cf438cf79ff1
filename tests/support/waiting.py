"""Waits for conditions that other threads and processes bring about."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from routetrace.common.errors import DeadlineExceeded

Answer = TypeVar("Answer")


def wait_for(condition: Callable[[], object], seconds: float = 30.0) -> None:
    """Wait until the condition holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def keeps_to(limit: float, attempt: Callable[[], float], tries: int = 4) -> None:
    """Repeat an attempt, which returns its seconds, until one keeps to the limit.

    A busy machine delays one of them; a broken limit delays each.
    """
    taken = [attempt()]
    while taken[-1] >= limit:
        assert len(taken) < tries, f"took {taken} s, expected less than {limit} s once"
        taken.append(attempt())


def with_time(call: Callable[[float], Answer], seconds: float) -> Answer:
    """Return the answer of a call that gets seconds, and more after each DeadlineExceeded."""
    try:
        return call(seconds)
    except DeadlineExceeded:
        if seconds > 30:
            raise
    return with_time(call, 5 * seconds)
