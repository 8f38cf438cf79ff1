"""What is known of a trace, without its rows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from routetrace.v1 import routetrace_pb2 as pb
from routetrace.v1.layout import RoutingLayout
from routetrace.v1.records import DIGEST, unpack


class TraceState(str, Enum):
    """Where a trace stands."""

    RUNNING = "running"
    """Still being generated, or something may still come: the last rows of a slower agent, the
    engine that a prefill was handed over to."""
    COMPLETE = "complete"
    """Ended, and every cell is there."""
    INCOMPLETE = "incomplete"
    """Nothing more comes, and cells are missing or the end is not known (num_tokens is 0)."""

    def to_proto(self) -> pb.TraceState.ValueType:
        """As it crosses the wire."""
        return pb.TraceState.Value(f"TRACE_STATE_{self.name}")

    @classmethod
    def from_proto(cls, state: int) -> TraceState:
        """From the wire."""
        return cls[pb.TraceState.Name(state).removeprefix("TRACE_STATE_")]  # type: ignore[arg-type]


@dataclass(frozen=True)
class MissingRange:
    """Cells that are not there."""

    start: int
    """First position."""
    stop: int
    """One past the last position."""
    layer_ids: tuple[int, ...]
    """Absolute layer ids, ascending; never empty."""
    reason: str
    """Why, as the contract names it: "not_yet", "not_captured", "kv_unknown", "queue_full",
    "invalid_ids", "agent_lost", "rejected", "corrupt", "aborted", "other_version" (there are rows,
    but of other weight versions than the one asked for); "unspecified" if untold."""

    def __str__(self) -> str:
        layers = f"layer {self.layer_ids[0]}"
        if len(self.layer_ids) > 1:
            layers = f"{len(self.layer_ids)} layers {self.layer_ids[0]}..{self.layer_ids[-1]}"
        return f"positions [{self.start}, {self.stop}) of {layers}: {self.reason}"

    def to_proto(self) -> pb.MissingRange:
        """As it crosses the wire."""
        reason = pb.MissingReason.Value(f"MISSING_REASON_{self.reason.upper()}")
        return pb.MissingRange(
            start=self.start, stop=self.stop, layer_ids=self.layer_ids, reason=reason
        )

    @classmethod
    def from_proto(cls, message: pb.MissingRange, layer_ids: tuple[int, ...]) -> MissingRange:
        """From the wire, where no layers mean all of `layer_ids`."""
        try:
            reason = pb.MissingReason.Name(message.reason)
        except ValueError:  # a reason that a newer server knows
            reason = "MISSING_REASON_UNSPECIFIED"
        return cls(
            message.start,
            message.stop,
            tuple(sorted(message.layer_ids)) or layer_ids,
            reason.removeprefix("MISSING_REASON_").lower(),
        )


def missing_from_proto(
    messages: Iterable[pb.MissingRange], layer_ids: tuple[int, ...]
) -> tuple[MissingRange, ...]:
    """Missing ranges from the wire, by position."""
    ranges = (MissingRange.from_proto(m, layer_ids) for m in messages)
    return tuple(sorted(ranges, key=lambda m: (m.start, m.layer_ids)))


@dataclass(frozen=True, eq=False, kw_only=True)
class TraceFacts:
    """Facts about a trace, as of the moment of the answer."""

    request_id: str
    """The trace's id; "" for rows that were asked for by KV blocks."""
    run: str
    state: TraceState
    num_tokens: int
    """Tokens of the request, which have one row less; 0 while unknown, and for good if its agent
    was lost, or no other engine went on after a handoff."""
    num_rows: int
    """Positions 0 .. num_rows - 1 exist, whether captured or not; there may be more while
    num_tokens is 0."""
    prompt_len: int
    """Prompt tokens; 0 if the agent did not tell."""
    layout: RoutingLayout
    """The model; its `layer_ids` are all its MoE layers."""
    labels: dict[str, str]
    incarnation: int
    """Which incarnation this is: the number, in order of arrival from 1, of the engine request that
    its tokens end with. So the numbers of a trace's incarnations may have gaps."""
    num_incarnations: int
    """Incarnations under this id: engine requests that no other one continues."""
    finish_reason: str
    """How that engine request ended: "stop", "length", "abort", or "handoff" where another engine
    was to go on, which is not the end of the trace; "" while it runs, or if untold."""
    engine_ids: tuple[str, ...]
    """Engines that contributed rows."""
    num_attempts: int
    """Attempts of that engine request: 1 + preemptions."""
    min_weight_version: int
    """Lowest version of the rows that `as_sampled` gives; 0 if there are none."""
    max_weight_version: int
    """Highest version of them."""
    created: float
    """Unix seconds."""
    updated: float
    """Unix seconds."""
    expires: float
    """Unix seconds; when the trace is forgotten, if nothing changes."""
    stored_bytes: int
    """Compressed bytes of the frames that hold its rows, all layers."""
    token_digests: npt.NDArray[Any]
    """[n] of records.DIGEST, ascending: position, digest of the token ids before it."""


@dataclass(frozen=True, eq=False, kw_only=True)
class TraceStat(TraceFacts):
    """What the server knows of a trace, without its rows."""

    missing: tuple[MissingRange, ...] | None = None
    """Cells of the whole trace that are not there; None from calls that do not tell."""


@dataclass(frozen=True, eq=False, kw_only=True)
class ReadFacts(TraceFacts):
    """Facts about the rows of a trace that were read."""

    missing: tuple[MissingRange, ...] = ()
    """The cells that are not valid, and why."""
    weight_versions: tuple[tuple[int, int, int], ...] = ()
    """(start, stop, weight version) of the rows, by position."""
    provenance: tuple[tuple[int, int, str], ...] = ()
    """(start, stop, "forward" or "cached") of the rows, by position: computed by an engine request
    of this incarnation, or by another one whose KV blocks it reused."""


def layout_from_proto(message: pb.RoutingLayout) -> RoutingLayout:
    """A layout; mostly that of the trace before.

    Raises:
        InvalidArgument: if it contradicts itself.
    """
    return _layout(message.SerializeToString(deterministic=True))


@lru_cache(maxsize=64)
def _layout(data: bytes) -> RoutingLayout:
    return RoutingLayout.from_proto(pb.RoutingLayout.FromString(data))


def facts_from_proto(info: pb.TraceInfo) -> dict[str, Any]:
    """The fields of `TraceFacts`.

    Raises:
        InvalidArgument: if the layout contradicts itself, or the digests are cut short.
        KeyError, ValueError: if the state is not set, or unknown.
    """
    return {
        "request_id": info.trace_id,
        "run": info.run,
        "state": TraceState.from_proto(info.state),
        "num_tokens": info.num_tokens,
        "num_rows": info.num_rows,
        "prompt_len": info.prompt_len,
        "layout": layout_from_proto(info.layout),
        "labels": dict(info.labels),
        "incarnation": info.incarnation,
        "num_incarnations": info.num_incarnations,
        "finish_reason": info.finish_reason,
        "engine_ids": tuple(info.engine_ids),
        "num_attempts": info.num_attempts,
        "min_weight_version": info.min_weight_version,
        "max_weight_version": info.max_weight_version,
        "created": info.created_ms / 1000,
        "updated": info.updated_ms / 1000,
        "expires": info.expires_ms / 1000,
        "stored_bytes": info.stored_bytes,
        "token_digests": np.sort(unpack(info.token_digests, DIGEST, "token_digests")),
    }


@dataclass(frozen=True)
class ServerInfo:
    """How a server stands, and what it holds of one run."""

    version: str
    """Of its software."""
    ack_mode: str
    """What an acknowledgement promises: "fsync" or "memory"."""
    store: str
    """Where chunks are kept: "disk" or "memory"."""
    started: float
    """Unix seconds of its start."""
    now: float
    """Its clock, Unix seconds."""
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

    @classmethod
    def from_proto(cls, info: pb.GetServerInfoResponse) -> ServerInfo:
        """From the wire."""
        return cls(
            version=info.version,
            ack_mode=info.ack_mode,
            store=info.store,
            started=info.started_ms / 1000,
            now=info.now_ms / 1000,
            used_bytes=info.used_bytes,
            capacity_bytes=info.capacity_bytes,
            damaged_records=info.damaged_records,
            num_agents=info.num_agents,
            num_traces=info.num_traces,
            run_bytes=info.run_bytes,
            run_quota_bytes=info.run_quota_bytes,
        )
