"""Reading of routing: RouteClient, AsyncRouteClient, their arguments, results and errors."""

from importlib.metadata import version as _version

from routetrace.client._shells.aio import AsyncRouteClient
from routetrace.client._shells.prefetch import AsyncPrefetch, Prefetch
from routetrace.client._shells.sync import RouteClient
from routetrace.client.config import ClientConfig
from routetrace.client.micro_batch import MicroBatch, Sample, Segment
from routetrace.client.options import ReadOptions
from routetrace.client.plan import FetchPlan, Rank
from routetrace.client.progress import Progress
from routetrace.client.rows import FetchStats, Rows
from routetrace.client.stat import (
    AgentStat,
    Limit,
    PrefixSpan,
    ProvenanceSpan,
    ReadFacts,
    ServerInfo,
    TraceFacts,
    TraceStat,
    TraceState,
    VersionSpan,
)
from routetrace.client.trace import Trace
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
from routetrace.common.layout import ModelLayout
from routetrace.common.missing import MissingRange
from routetrace.common.security import Security

__version__ = _version("routetrace")

__all__ = [
    "AgentStat",
    "AsyncPrefetch",
    "AsyncRouteClient",
    "ClientConfig",
    "Closed",
    "Corrupt",
    "DeadlineExceeded",
    "Fenced",
    "FetchPlan",
    "FetchStats",
    "Incomplete",
    "InvalidArgument",
    "Limit",
    "MicroBatch",
    "MissingDependency",
    "MissingRange",
    "ModelLayout",
    "ModelNotSupported",
    "Moved",
    "NotFound",
    "OutOfSequence",
    "Overloaded",
    "PermissionDenied",
    "Prefetch",
    "PrefixSpan",
    "Progress",
    "ProvenanceSpan",
    "Rank",
    "ReadFacts",
    "ReadOptions",
    "RouteClient",
    "RouteTraceError",
    "Rows",
    "Sample",
    "Security",
    "Segment",
    "ServerInfo",
    "Trace",
    "TraceFacts",
    "TraceStat",
    "TraceState",
    "Unauthenticated",
    "Unavailable",
    "VersionSpan",
    "__version__",
]
