"""Reading of routing: RouteClient, AsyncRouteClient, their arguments, results and errors."""

from routetrace.client._shells.aio import AsyncRouteClient
from routetrace.client._shells.prefetch import AsyncPrefetch, Prefetch
from routetrace.client._shells.sync import RouteClient
from routetrace.client.agreement import Agreement
from routetrace.client.agreement_history import (
    AgreementChange,
    AgreementHistory,
    StepAgreement,
)
from routetrace.client.config import ClientConfig
from routetrace.client.description import Incarnation, RowOrigin, TraceDescription
from routetrace.client.expert_load import ExpertLoad
from routetrace.client.explanation import (
    CellRow,
    ChainMember,
    EngineRequest,
    Explanation,
    RefusedCandidate,
)
from routetrace.client.history import AgentHistory, RunHistory
from routetrace.client.located import Located, Locations
from routetrace.client.micro_batch import MicroBatch, Sample
from routetrace.client.options import ReadOptions
from routetrace.client.plan import FetchPlan, Rank
from routetrace.client.progress import Progress
from routetrace.client.rows import FetchStats, Rows
from routetrace.client.samples import SampleRows
from routetrace.client.segments import Segment
from routetrace.client.stat import (
    AgentStat,
    AgentState,
    FinishReason,
    Limit,
    PrefixSpan,
    ProvenanceSpan,
    ReadFacts,
    ServerInfo,
    TraceStat,
    TraceState,
    VersionSpan,
)
from routetrace.client.summary import Retired, TraceChanges, TraceSummary
from routetrace.client.trace import Trace
from routetrace.codec.records import UNKNOWN_VERSION
from routetrace.common.errors import (
    Closed,
    Corrupt,
    DeadlineExceeded,
    Incomplete,
    InvalidArgument,
    MissingDependency,
    ModelNotSupported,
    Moved,
    NotFound,
    Overloaded,
    PermissionDenied,
    RouteTraceError,
    Unauthenticated,
    Unavailable,
)
from routetrace.common.layout import ModelLayout
from routetrace.common.missing import MissingRange, MissingReason
from routetrace.common.security import Security
from routetrace.common.version import installed_version as _version

__version__ = _version()

__all__ = [
    "UNKNOWN_VERSION",
    "AgentHistory",
    "AgentStat",
    "AgentState",
    "Agreement",
    "AgreementChange",
    "AgreementHistory",
    "AsyncPrefetch",
    "AsyncRouteClient",
    "CellRow",
    "ChainMember",
    "ClientConfig",
    "Closed",
    "Corrupt",
    "DeadlineExceeded",
    "EngineRequest",
    "ExpertLoad",
    "Explanation",
    "FetchPlan",
    "FetchStats",
    "FinishReason",
    "Incarnation",
    "Incomplete",
    "InvalidArgument",
    "Limit",
    "Located",
    "Locations",
    "MicroBatch",
    "MissingDependency",
    "MissingRange",
    "MissingReason",
    "ModelLayout",
    "ModelNotSupported",
    "Moved",
    "NotFound",
    "Overloaded",
    "PermissionDenied",
    "Prefetch",
    "PrefixSpan",
    "Progress",
    "ProvenanceSpan",
    "Rank",
    "ReadFacts",
    "ReadOptions",
    "RefusedCandidate",
    "Retired",
    "RouteClient",
    "RouteTraceError",
    "RowOrigin",
    "Rows",
    "RunHistory",
    "Sample",
    "SampleRows",
    "Security",
    "Segment",
    "ServerInfo",
    "StepAgreement",
    "Trace",
    "TraceChanges",
    "TraceDescription",
    "TraceStat",
    "TraceState",
    "TraceSummary",
    "Unauthenticated",
    "Unavailable",
    "VersionSpan",
    "__version__",
]
