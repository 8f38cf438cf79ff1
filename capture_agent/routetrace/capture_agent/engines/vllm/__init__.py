"""Capture in vLLM by configuration alone; see docs/vllm.md.

vLLM imports `RouteTraceConnector` from here (`kv_connector_module_path`).
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from routetrace.capture_agent.engines.vllm.connector import RouteTraceConnector

__all__ = ["RouteTraceConnector"]


def __getattr__(name: str) -> Any:
    # The plugin is in this package too, and must not import large parts of vLLM before vLLM does.
    if name == "RouteTraceConnector":
        from routetrace.capture_agent.engines.vllm import connector

        return connector.RouteTraceConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
