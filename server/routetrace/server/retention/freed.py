"""Freed memory that the C library keeps for later, and that counts against the memory limit."""

from __future__ import annotations

import ctypes

#: Share of the limit from which on it is worth its time, some 10 ms a GiB in a thread.
NEAR = 0.9


def give_back() -> None:
    """Return it to the system."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim:  # other C libraries have none
        trim(0)
