"""Capture in vLLM, chosen by configuration alone; docs/vllm.md says how.

`RouteTraceConnector` is what `kv_connector_module_path` looks for.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from routetrace.capture_agent.vllm.connector import RouteTraceConnector

__all__ = ["RouteTraceConnector"]


def __getattr__(name: str) -> Any:
    # The plugin lives in this package too, and must not import half of vLLM before vLLM does.
    if name == "RouteTraceConnector":
        from routetrace.capture_agent.vllm import connector

        return connector.RouteTraceConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
