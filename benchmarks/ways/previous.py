"""Run `ways.engine` or `ways.trainer` on version 0.7.0, whose names differ.

As `python benchmarks/run.py ways.previous ways.engine ...`, with 0.7.0 on PYTHONPATH.
"""

# Names of 0.7.0, which is not installed where types are checked.
# mypy: ignore-errors
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
from __future__ import annotations

import runpy
import sys
from types import ModuleType
from typing import Any


def main() -> None:
    """Give 0.7.0 the names of today, then run the module."""
    from routetrace.v1.layout import RoutingLayout

    from routetrace import capture_agent, client

    layout = ModuleType("routetrace.common.layout")
    layout.ModelLayout = RoutingLayout
    sys.modules |= {"routetrace.common": ModuleType("routetrace.common"), layout.__name__: layout}
    capture_agent.AgentConfig = _config(capture_agent.AgentConfig)
    client.RouteClient = _client(client.RouteClient)
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


def _config(config: Any) -> Any:
    def make(*, codec: str, **settings: Any) -> Any:
        assert codec == "auto"  # it has one codec
        return config(**settings)

    return make


def _client(base: Any) -> Any:
    class RouteClient(base):
        """Reads that wait for rows, and so for the end."""

        def get(self, trace_id: str, *, timeout: float, **_: str) -> Any:
            return super().get(trace_id, missing="wait", wait=timeout)

        def get_many(self, trace_ids: list[str], *, timeout: float, **_: str) -> Any:
            return super().get_many(trace_ids, missing="wait", wait=timeout)

    return RouteClient


if __name__ == "__main__":
    main()
