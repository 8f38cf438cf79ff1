"""Reads routing back: RouteClient, AsyncRouteClient and the RoutingTrace that they return."""

from routetrace.client._aio import AsyncRouteClient
from routetrace.client._sync import RouteClient
from routetrace.client.stat import MissingRange, TraceFacts, TraceStat, TraceState
from routetrace.client.trace import RoutingTrace

__all__ = [
    "AsyncRouteClient",
    "MissingRange",
    "RouteClient",
    "RoutingTrace",
    "TraceFacts",
    "TraceStat",
    "TraceState",
]
