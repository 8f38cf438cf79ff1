"""Lets vLLM's Model Runner V2 run on CPU, in Triton's interpreter.

vLLM takes Triton for usable on a CPU if Triton lists a backend of the name "cpu". The interpreter
(TRITON_INTERPRET=1) needs none, so any entry will do. vLLM asks its platform plugins in each
process, before it looks: with this directory on PYTHONPATH that also holds for what it spawns.
"""

from __future__ import annotations

import os
from types import SimpleNamespace


def register() -> None:
    """The entry point; names no platform, and does nothing where Triton is not interpreted."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    from triton.backends import backends

    driver = SimpleNamespace(is_active=lambda: True)
    backends["cpu"] = SimpleNamespace(driver=driver, compiler=None)  # type: ignore[assignment]
