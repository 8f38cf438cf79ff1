"""Reading of routing: RouteClient, AsyncRouteClient, their arguments, results and errors."""

from importlib.metadata import version as _version

from routetrace.client._shells.aio import AsyncRouteClient
from routetrace.client._shells.prefetch import AsyncPrefetch, Prefetch
from routetrace.client._shells.sync import RouteClient
from routetrace.client.micro_batch import MicroBatch, Sample, Segment
from routetrace.client.options import ReadOptions
from routetrace.client.plan import Plan, Rank, make_plan
from routetrace.client.rows import FetchStats, RankRows
from routetrace.client.stat import (
    AgentStat,
    Limit,
    ReadFacts,
    ServerInfo,
    TraceFacts,
    TraceStat,
    TraceState,
)
from routetrace.client.trace import RoutingTrace
from routetrace.common.errors import (
    Closed,
    Corrupt,
    DeadlineExceeded,
    Fenced,
    Incomplete,
    InvalidArgument,
    MissingDependency,
    ModelNotSupported,
    Moved,
    NotFound,
    OutOfSequence,
    Overloaded,
    PermissionDenied,
    RouteTraceError,
    Unauthenticated,
    Unavailable,
)
from routetrace.common.missing import MissingRange
from routetrace.common.security import Security

__version__ = _version("routetrace")

__all__ = [
    "AgentStat",
    "AsyncPrefetch",
    "AsyncRouteClient",
    "Closed",
    "Corrupt",
    "DeadlineExceeded",
    "Fenced",
    "FetchStats",
    "Incomplete",
    "InvalidArgument",
    "Limit",
    "MicroBatch",
    "MissingDependency",
    "MissingRange",
    "ModelNotSupported",
    "Moved",
    "NotFound",
    "OutOfSequence",
    "Overloaded",
    "PermissionDenied",
    "Plan",
    "Prefetch",
    "Rank",
    "RankRows",
    "ReadFacts",
    "ReadOptions",
    "RouteClient",
    "RouteTraceError",
    "RoutingTrace",
    "Sample",
    "Security",
    "Segment",
    "ServerInfo",
    "TraceFacts",
    "TraceStat",
    "TraceState",
    "Unauthenticated",
    "Unavailable",
    "__version__",
    "make_plan",
]
