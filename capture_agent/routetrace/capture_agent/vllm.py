"""Capture in vLLM; short name of `routetrace.capture_agent.engines.vllm`, for launch commands."""

from typing import Any

from routetrace.capture_agent.engines import vllm


def __getattr__(name: str) -> Any:
    return getattr(vllm, name)
