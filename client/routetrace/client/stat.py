"""Facts about traces and servers."""

# Over 400 lines: fields of public values, each with its docstring.

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import cache, lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from routetrace.client._ranges import merge_ranges
from routetrace.codec.records import DIGEST, UNKNOWN_VERSION, unpack
from routetrace.common.layout import ModelLayout
from routetrace.common.missing import MissingRange
from routetrace.common.values import TextEnum, Values
from routetrace.v1 import routetrace_pb2 as pb

# Two days before the end of the year 9999.
_LAST = 253_402_300_799 - 2 * 86400


class TraceState(TextEnum):
    """State of a trace."""

    RUNNING = "running"
    """Still being generated, or something may still come: the last rows of a slower agent, the
    engine that a prefill was handed over to."""
    COMPLETE = "complete"
    """Ended, and every cell is there."""
    INCOMPLETE = "incomplete"
    """Nothing more comes, and cells are missing or the end is not known (num_tokens is None)."""

    def to_proto(self) -> pb.TraceState.ValueType:
        """Convert to the wire."""
        return pb.TraceState.Value(f"TRACE_STATE_{self.name}")

    @classmethod
    @cache
    def from_proto(cls, state: int) -> TraceState:
        """Convert a message."""
        return cls[pb.TraceState.Name(state).removeprefix("TRACE_STATE_")]  # type: ignore[arg-type]


class FinishReason(TextEnum):
    """How an engine request ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    HANDOFF = "handoff"
    """Another engine was to go on, which is not the end of the trace."""
    CLOSED = "closed"
    """Its agent was closed, and finish() was never called for it: num_tokens is None."""

    @classmethod
    @cache
    def from_proto(cls, text: str) -> FinishReason | None:
        """Convert the text of a message; None if it is empty or unknown."""
        return cls(text) if text in {reason.value for reason in cls} else None


class VersionSpan(NamedTuple):
    """Weight version of consecutive rows."""

    start: int
    """First position."""
    stop: int
    """One past the last position."""
    weight_version: int | None
    """None: unknown, as nobody gave it to the engine."""

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as values of JSON."""
        return self._asdict()


class ProvenanceSpan(NamedTuple):
    """Origin of consecutive rows."""

    start: int
    """First position."""
    stop: int
    """One past the last position."""
    source: str
    """"forward": computed by an engine request of this incarnation. "slot": by another one whose
    KV blocks it reused. "handoff": by the one that handed its KV over. "prefix": by one with the
    same tokens and weights, whose rows stand in: nothing proves that its pass made the KV."""

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as values of JSON."""
        return self._asdict()


class PrefixSpan(NamedTuple):
    """Trace whose rows stand in at consecutive positions."""

    start: int
    """First position."""
    stop: int
    """One past the last position."""
    trace_id: str

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as values of JSON."""
        return self._asdict()


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class TraceFacts(Values):
    """Facts about a trace, as of the moment of the answer."""

    trace_id: str
    """The trace's id; "" for rows that were asked for by KV blocks."""
    run: str
    state: TraceState
    num_tokens: int | None
    """Tokens of the request, which have one row less; None while unknown, and for good if its agent
    was lost or closed, or no other engine went on after a handoff."""
    num_rows: int
    """Positions 0 .. num_rows - 1 exist, whether captured or not; there may be more while
    num_tokens is None."""
    prompt_len: int | None
    """Prompt tokens; None if unknown."""
    layout: ModelLayout
    """The model; its `layer_ids` are all its MoE layers."""
    labels: dict[str, str]
    incarnation: int
    """Which incarnation this is: the number, in order of arrival from 1, of the engine request that
    its tokens end with. So the numbers of a trace's incarnations may have gaps."""
    num_incarnations: int
    """Incarnations under this id: engine requests that no other one continues."""
    finish_reason: FinishReason | None
    """How that engine request ended; None while it runs, or if unknown."""
    engine_ids: tuple[str, ...]
    """Engines that contributed rows by the policy `as_sampled`; by other policies, rows may come
    from other engines."""
    num_attempts: int
    """Attempts of that engine request: 1 + preemptions."""
    min_weight_version: int | None
    """Lowest known version of the rows that `as_sampled` gives; None if there is none."""
    max_weight_version: int | None
    """Highest known version of them; None if there is none."""
    created_at: datetime
    """Time of the first report, UTC."""
    updated_at: datetime
    """Time of the last change, UTC."""
    expires_at: datetime
    """Time at which the trace is forgotten if nothing changes, UTC."""
    stored_bytes: int
    """Compressed bytes of the frames that hold its rows, all layers."""
    token_digests: npt.NDArray[Any]
    """[n] of records.DIGEST, ascending: position, digest of the token ids before it."""
    prefix_trace_ids: tuple[str, ...]
    """Traces whose rows stand in, perhaps this one with rows of another request."""
    unknown_weight_versions: bool = False
    """Whether the version of some of the rows that `as_sampled` gives is unknown."""
    nonce: int | None = None
    """Number that names the last engine request in handles; None if it has none."""

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} {self.trace_id!r} {self.state.value}: {self.num_rows} rows, "
            f"incarnation {self.incarnation} of {self.num_incarnations}>"
        )


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class TraceStat(TraceFacts):
    """Facts about a trace, without its rows."""

    missing: tuple[MissingRange, ...] | None = None
    """Missing cells of the whole trace; None from calls that do not report them."""
    missing_cells: Mapping[str, int] = field(default_factory=dict)
    """Number of missing cells of its rows (position, layer) by reason, from `stat` and `find`."""

    @property
    def coverage(self) -> float:
        """Share of the cells of its rows that are present."""
        cells = self.num_rows * len(self.layout.layer_ids)
        return 1 - sum(self.missing_cells.values()) / cells if cells else 1.0

    @property
    def proven(self) -> int | None:
        """Rows with all cells, of the pass itself; None from calls that do not report `missing`."""
        lost = merge_ranges((m.start, m.stop, None) for m in self.missing or ())
        return None if self.missing is None else self.num_rows - sum(b - a for a, b, _ in lost)


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class ReadFacts(TraceFacts):
    """Facts about the rows of a trace that were read."""

    missing: tuple[MissingRange, ...] = ()
    """The cells that are not valid, and why."""
    weight_versions: tuple[VersionSpan, ...] = ()
    """Weight versions of the rows, by position."""
    provenance: tuple[ProvenanceSpan, ...] = ()
    """Origin of the rows, by position."""
    prefix_sources: tuple[PrefixSpan, ...] = ()
    """Traces of the rows that stand in, by position."""


def version_from_wire(version: int) -> int | None:
    """Return a weight version of the wire; None if it is unknown."""
    return None if version == UNKNOWN_VERSION else version


def version_number(version: int | None) -> int:
    """Return a weight version as a number; an unknown one is older than all."""
    return UNKNOWN_VERSION if version is None else version


def moment(milliseconds: int) -> datetime:
    """Return a time of the wire, within those that a datetime of any time zone can have."""
    return datetime.fromtimestamp(min(max(milliseconds, 0) / 1000, _LAST), timezone.utc)


def layout_from_proto(message: pb.RoutingLayout) -> ModelLayout:
    """A layout; mostly that of the trace before.

    Raises:
        InvalidArgument: if it contradicts itself.
    """
    return _layout(message.SerializeToString(deterministic=True))


@lru_cache(maxsize=64)
def _layout(data: bytes) -> ModelLayout:
    return ModelLayout.from_proto(pb.RoutingLayout.FromString(data))


def facts_from_proto(info: pb.TraceInfo) -> dict[str, Any]:
    """The fields of `TraceFacts`.

    Raises:
        InvalidArgument: if the layout contradicts itself, or the digests are cut short.
        KeyError, ValueError: if the state is not set, or unknown.
    """
    versions = not info.no_weight_versions
    return {
        "trace_id": info.trace_id,
        "run": info.run,
        "state": TraceState.from_proto(info.state),
        "num_tokens": info.num_tokens or None,
        "num_rows": info.num_rows,
        "prompt_len": info.prompt_len or None,
        "layout": layout_from_proto(info.layout),
        "labels": dict(info.labels),
        "incarnation": info.incarnation,
        "num_incarnations": info.num_incarnations,
        "finish_reason": FinishReason.from_proto(info.finish_reason),
        "engine_ids": tuple(info.engine_ids),
        "num_attempts": info.num_attempts,
        "min_weight_version": info.min_weight_version if versions else None,
        "max_weight_version": info.max_weight_version if versions else None,
        "unknown_weight_versions": info.unknown_weight_versions,
        "nonce": info.nonce or None,
        "created_at": moment(info.created_ms),
        "updated_at": moment(info.updated_ms),
        "expires_at": moment(info.expires_ms),
        "stored_bytes": info.stored_bytes,
        "token_digests": np.sort(unpack(info.token_digests, DIGEST, "token_digests")),
        "prefix_trace_ids": tuple(info.prefix_trace_ids),
    }


@dataclass(frozen=True)
class Limit(Values):
    """A limit that owners share, or a quota, as one owner sees it."""

    name: str
    """Of the server's setting, such as "max_reads" or "run_quota"."""
    limit: int
    """Its value: for all owners, or for one run or token if it is a quota."""
    used: int
    """Parts of all that count against it: reads, streams, slots or bytes."""
    held: int
    """Part of the owner."""
    share: int
    """Most that the owner may hold, as long as all others keep their parts."""

    @classmethod
    def from_proto(cls, limit: pb.Limit) -> Limit:
        """Convert a message."""
        return cls(limit.name, limit.limit, limit.used, limit.held, limit.share)


@dataclass(frozen=True)
class ServerInfo(Values):
    """State of a server, and its contents of one run."""

    version: str
    """Of its software."""
    ack_mode: str
    """Durability of acknowledged rows: "fsync" or "memory"."""
    store: str
    """Where chunks are kept: "disk" or "memory"."""
    started_at: datetime
    """Time of its start, UTC."""
    now: datetime
    """Its clock, UTC."""
    used_bytes: int
    """Bytes that count against the capacity."""
    capacity_bytes: int
    """Most bytes that are kept."""
    damaged_records: int
    """Records that did not match their checksums since the start."""
    num_agents: int
    """Agents of the run that are connected."""
    num_traces: int
    """Traces of the run."""
    run_bytes: int
    """Stored bytes of the run's chunks."""
    run_quota_bytes: int
    """Most of them; 0: no quota."""
    runs: tuple[str, ...] = ()
    """Runs with traces or agents that the client may read, sorted; at most 1000."""
    owner: str = ""
    """Owner of the client's part of `limits`: "token NAME", or "run NAME" without tokens."""
    limits: tuple[Limit, ...] = ()
    """Limits of the process that serves the run; none from a server older than 0.8."""

    @classmethod
    def from_proto(cls, info: pb.GetServerInfoResponse) -> ServerInfo:
        """Convert a message."""
        return cls(
            version=info.version,
            ack_mode=info.ack_mode,
            store=info.store,
            started_at=moment(info.started_ms),
            now=moment(info.now_ms),
            used_bytes=info.used_bytes,
            capacity_bytes=info.capacity_bytes,
            damaged_records=info.damaged_records,
            num_agents=info.num_agents,
            num_traces=info.num_traces,
            run_bytes=info.run_bytes,
            run_quota_bytes=info.run_quota_bytes,
            runs=tuple(info.runs),
            owner=info.owner,
            limits=tuple(map(Limit.from_proto, info.limits)),
        )


class AgentState(TextEnum):
    """State of an agent."""

    CONNECTED = "connected"
    """Its stream is open."""
    CLOSED = "closed"
    """It was closed, and no other agent of its engine and shard has connected since."""
    GONE = "gone"
    """Its stream is not open: it was killed or cut off, or it is about to connect again. Also of
    agents and servers before 0.9 that were closed."""


@dataclass(frozen=True)
class AgentStat(Values):
    """State of an agent: one shard of one engine."""

    engine_id: str
    shard: str
    """Part of the engine that it sees; "" if it sees all of it."""
    state: AgentState
    connected: bool
    """Whether its state is `connected`."""
    connected_at: datetime | None
    """Begin of its last stream, UTC; None if before the server's start."""
    seen_at: datetime | None
    """Time of its last message, UTC; None if before the server's start."""
    epoch: int
    """Number of its boot; the newest fences older ones."""
    attributes: Mapping[str, str]
    """"host", "routetrace" (its version), "engine", "model" and others that its engine gave."""
    running_requests: int
    """Requests that have not ended."""
    offered_rows: int
    """Rows that its engine offered, as of its last heartbeat, like the counts below."""
    acknowledged_rows: int
    in_flight_rows: int
    dropped_rows: Mapping[str, int]
    """Rows that it dropped, by reason."""
    queued_bytes: int
    """Unacknowledged bytes in its memory."""
    spilled_bytes: int
    """Unacknowledged bytes on its disk."""
    lag_seconds: float
    """Age of its oldest chunk that is not acknowledged; 0 if all are, or the agent is older than
    this field."""
    weight_version: int | None
    """Weight version of its last rows; None if it is unknown, or before the first row."""
    weight_version_lag: int
    """Versions by which it is behind the newest of the run's connected agents."""

    @classmethod
    def from_proto(cls, info: pb.AgentInfo) -> AgentStat:
        """Convert a message."""
        report = info.report
        return cls(
            engine_id=info.engine_id,
            shard=info.shard,
            state=_agent_state(info),
            connected=info.connected,
            connected_at=moment(info.connected_ms) if info.connected_ms else None,
            seen_at=moment(info.seen_ms) if info.seen_ms else None,
            epoch=info.epoch,
            attributes=dict(info.attributes),
            running_requests=info.running_requests,
            offered_rows=report.offered_rows,
            acknowledged_rows=report.acknowledged_rows,
            in_flight_rows=report.in_flight_rows,
            dropped_rows=dict(report.dropped_rows),
            queued_bytes=report.queued_bytes,
            spilled_bytes=report.spilled_bytes,
            lag_seconds=report.lag_ms / 1000,
            weight_version=info.weight_version if info.HasField("weight_version") else None,
            weight_version_lag=info.weight_version_lag,
        )


def _agent_state(info: pb.AgentInfo) -> AgentState:
    if info.connected:
        return AgentState.CONNECTED
    return AgentState.CLOSED if info.closed else AgentState.GONE
