"""A Ray of its own on this machine, for one measurement."""

# ray is not installed where types are checked.
# pyright: reportMissingImports=false
from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from typing import Any

# No reports to its makers, no token, no search for accelerators, and time for a busy machine; set
# before Ray is imported, which is why others import `ray` from here.
os.environ |= {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_raylet_start_wait_time_s": "120",
}

import ray

__all__ = ["ray", "ray_node"]

#: Ray's sockets lie up to 76 characters below its directory, and their paths may have 107.
_LONGEST = 107 - 76


@contextlib.contextmanager
def ray_node(cpus: int, memory: int, runtime_env: dict[str, Any] | None = None) -> Iterator[None]:
    """Start Ray with an object store of so many bytes; stop it at the end."""
    short = len(tempfile.gettempdir()) + len("/ray-01234567") <= _LONGEST
    with tempfile.TemporaryDirectory(
        prefix="ray-", dir=None if short else "/tmp", ignore_cleanup_errors=True
    ) as directory:
        try:
            ray.init(
                address="local",
                num_cpus=cpus,
                include_dashboard=False,
                object_store_memory=memory,
                configure_logging=False,
                log_to_driver=False,
                runtime_env=runtime_env,
                _temp_dir=directory,
            )
            yield
        finally:
            ray.shutdown()
