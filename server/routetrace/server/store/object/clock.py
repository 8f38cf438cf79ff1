"""Clock of leases, which is this machine's alone."""

from __future__ import annotations

import time


def clock() -> float:
    """Return seconds that also pass while the machine is suspended."""
    boot = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if boot is None else time.clock_gettime(boot)
