"""Capture in vLLM; short name of `routetrace.capture_agent.engines.vllm`, for launch commands."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from routetrace.capture_agent.engines.vllm import RouteTraceConnector

__all__ = ["RouteTraceConnector"]


def __getattr__(name: str) -> Any:
    if name == "RouteTraceConnector":
        from routetrace.capture_agent.engines.vllm import RouteTraceConnector

        return RouteTraceConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
