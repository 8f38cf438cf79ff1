"""Summaries of traces, as they change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple

from routetrace.client.stat import FinishReason, TraceState, moment
from routetrace.common.missing import reason_of
from routetrace.common.values import Values
from routetrace.v1 import routetrace_pb2 as pb


@dataclass(frozen=True)
class TraceSummary(Values):
    """Summary of a trace, of the incarnation that `get` without a number returns."""

    trace_id: str
    state: TraceState
    num_tokens: int | None
    """Tokens of the request, which have one row less; None while unknown."""
    num_rows: int
    """Rows; those reported so far if it runs."""
    num_cells: int
    """Cells of its rows (position, layer), present or not; 0 while it runs."""
    missing_cells: Mapping[str, int]
    """Missing cells by reason; none while it runs."""
    engine_ids: tuple[str, ...]
    """Engines that contributed rows by the policy `as_sampled`; those that reported any if it
    runs."""
    labels: Mapping[str, str]
    min_weight_version: int | None
    """Lowest known version of its rows, of all that were reported if it runs; None if there is
    none."""
    max_weight_version: int | None
    """Highest known version of them; None if there is none."""
    finish_reason: FinishReason | None
    """How its last engine request ended; None while it runs, or if unknown."""
    num_incarnations: int
    """Incarnations under this id."""
    created_at: datetime
    """Time of the first report, UTC."""
    updated_at: datetime
    """Time of the last change, UTC."""
    expires_at: datetime
    """Time at which the trace is forgotten if nothing changes, UTC."""
    stored_bytes: int
    """Compressed bytes of the frames that hold its rows, all layers; 0 while it runs."""
    unknown_weight_versions: bool = False
    """Whether the version of some of its rows is unknown."""

    @property
    def coverage(self) -> float | None:
        """Share of the cells of its rows that are present; None while it runs, 1 without rows."""
        if self.state is TraceState.RUNNING:
            return None
        missing = sum(self.missing_cells.values())
        return 1 - missing / self.num_cells if self.num_cells else 1.0

    @classmethod
    def from_proto(cls, summary: pb.TraceSummary) -> TraceSummary:
        """Convert a message.

        Raises:
            KeyError, ValueError: if it has an unknown state or reason.
        """
        lowest = summary.min_weight_version if summary.HasField("min_weight_version") else None
        highest = summary.max_weight_version if summary.HasField("max_weight_version") else None
        return cls(
            trace_id=summary.trace_id,
            state=TraceState.from_proto(summary.state),
            num_tokens=summary.num_tokens or None,
            num_rows=summary.num_rows,
            num_cells=summary.num_cells,
            missing_cells={reason_of(m.reason): m.cells for m in summary.missing_cells},
            engine_ids=tuple(summary.engine_ids),
            labels=dict(summary.labels),
            min_weight_version=lowest,
            max_weight_version=highest,
            unknown_weight_versions=summary.unknown_weight_versions,
            finish_reason=FinishReason.from_proto(summary.finish_reason),
            num_incarnations=summary.num_incarnations,
            created_at=moment(summary.created_ms),
            updated_at=moment(summary.updated_ms),
            expires_at=moment(summary.expires_ms),
            stored_bytes=summary.stored_bytes,
        )


class Retired(NamedTuple):
    """Traces that `retire_through` deleted."""

    traces: int
    """Number of traces."""
    unknown: int
    """Those of them with rows of an unknown weight version, which is older than all others."""

    def to_dict(self) -> dict[str, int]:
        """Return the fields as values of JSON."""
        return self._asdict()


@dataclass(frozen=True)
class TraceChanges(Values):
    """Traces of a run that are new or have changed since the changes before."""

    traces: tuple[TraceSummary, ...]
    """Their summaries, as they are now."""
    gone: tuple[str, ...]
    """Ids of traces that are gone."""
    whole: bool
    """Whether every trace of the run was among these changes or earlier ones."""

    @classmethod
    def from_proto(cls, response: pb.WatchTracesResponse) -> TraceChanges:
        """Convert a message; raises as `TraceSummary.from_proto`."""
        return cls(
            traces=tuple(map(TraceSummary.from_proto, response.traces)),
            gone=tuple(response.gone_trace_ids),
            whole=response.whole,
        )
