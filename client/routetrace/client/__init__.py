"""Reads routing back: RouteClient, AsyncRouteClient, and what they take and return."""

from routetrace.client._aio import AsyncRouteClient
from routetrace.client._sync import RouteClient
from routetrace.client.micro_batch import MicroBatch, Sample, Segment
from routetrace.client.plan import Plan, Rank, make_plan
from routetrace.client.rows import FetchStats, RankRows
from routetrace.client.stat import MissingRange, ServerInfo, TraceFacts, TraceStat, TraceState
from routetrace.client.trace import RoutingTrace
from routetrace.v1.security import Security

__all__ = [
    "AsyncRouteClient",
    "FetchStats",
    "MicroBatch",
    "MissingRange",
    "Plan",
    "Rank",
    "RankRows",
    "RouteClient",
    "RoutingTrace",
    "Sample",
    "Security",
    "Segment",
    "ServerInfo",
    "TraceFacts",
    "TraceStat",
    "TraceState",
    "make_plan",
]
