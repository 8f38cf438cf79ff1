"""TraceDescription: the origin of a trace."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple

from routetrace.client.stat import (
    FinishReason,
    TraceStat,
    TraceState,
    facts_from_proto,
    moment,
    version_from_wire,
)
from routetrace.codec.records import Provenance
from routetrace.common.missing import MissingRange, missing_from_proto
from routetrace.common.values import Values
from routetrace.v1 import routetrace_pb2 as pb


@dataclass(frozen=True)
class Incarnation(Values):
    """Incarnation of a trace: a token sequence that ends with one engine request."""

    number: int
    """`TraceStat.incarnation` of it."""
    state: TraceState
    finish_reason: FinishReason | None
    """How that engine request ended; None while it runs, or if unknown."""
    num_tokens: int | None
    """Number of tokens; None while unknown."""
    num_rows: int
    """Positions 0 .. num_rows - 1 exist."""
    begun_at: datetime | None
    """Begin of that engine request, UTC; None if unknown."""
    nonce: int | None = None
    """Number that names it in handles; None if it has none."""

    @classmethod
    def from_proto(cls, message: pb.IncarnationInfo) -> Incarnation:
        """Convert a message.

        Raises:
            KeyError, ValueError: if the state is not set, or unknown.
        """
        return cls(
            number=message.number,
            state=TraceState.from_proto(message.state),
            finish_reason=FinishReason.from_proto(message.finish_reason),
            num_tokens=message.num_tokens or None,
            num_rows=message.num_rows,
            begun_at=_known(message.begun_ms),
            nonce=message.nonce or None,
        )


class RowOrigin(NamedTuple):
    """Origin of the rows of consecutive positions at some layers."""

    start: int
    """First position."""
    stop: int
    """One past the last position."""
    layer_ids: tuple[int, ...]
    """Absolute layer ids, ascending; never empty."""
    engine_id: str
    """Engine that computed them."""
    shard: str
    """Shard whose agent reported them; "" if it records the whole engine."""
    attempt: int
    """Attempt of the engine request, from 1."""
    weight_version: int | None
    """Weight version that computed them; None: unknown."""
    source: str
    """As `ProvenanceSpan.source`: "forward", "slot" or "handoff"; no row stands in here."""

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as values of JSON."""
        return {**self._asdict(), "layer_ids": list(self.layer_ids)}


@dataclass(frozen=True)
class TraceDescription(Values):
    """Origin of a trace, as of the moment of the answer.

    Times are UTC, and None where they are not known: of requests that have not ended, or that ended
    before the server or the agent was upgraded.
    """

    stat: TraceStat
    """Facts about the described incarnation, and its missing cells; without token digests."""
    incarnations: tuple[Incarnation, ...]
    """The last 64 at most, by number."""
    origins: tuple[RowOrigin, ...]
    """Origins of its rows, by position: no cell is in two of them, and each present cell in one,
    unless `more_origins`, or origins were not asked for."""
    more_origins: bool
    """Whether there are more than the 16,384 of an answer."""
    begun_at: datetime | None
    """The server received the begin of the first engine request."""
    sampled_at: datetime | None
    """End of its last engine request by the engine's clock; with a single shard, at most
    `acknowledged_at`."""
    acknowledged_at: datetime | None
    """Commit of the first end report, by any shard."""
    readable_at: datetime | None
    """Commit of the last end report of its shards and of the requests it continues."""
    first_read_at: datetime | None
    """First read of the trace that the answering worker knows: each keeps those that it answered
    since its start, of the 100,000 traces read last. Reads of the web page do not count."""
    last_read_at: datetime | None
    """Last read."""
    num_reads: int
    """Number of reads since the first."""

    @classmethod
    def from_proto(cls, response: pb.DescribeTraceResponse) -> TraceDescription:
        """Convert a message.

        Raises:
            IndexError, KeyError, ValueError: if it contradicts itself, or has an unknown state.
            InvalidArgument: if the layout contradicts itself.
        """
        times = response.times
        whole = [tuple(source.layer_ids) for source in response.sources]
        chosen = [tuple(choice.layer_ids) for choice in response.layer_choices]
        return cls(
            stat=stat_from_proto(response.info, response.missing),
            incarnations=tuple(map(Incarnation.from_proto, response.incarnations)),
            origins=tuple(
                _origin(response, one, chosen[one.choice - 1] if one.choice else whole[one.source])
                for one in response.origins
            ),
            more_origins=response.more_origins,
            begun_at=_known(times.begun_ms),
            sampled_at=_known(times.sampled_ms),
            acknowledged_at=_known(times.acknowledged_ms),
            readable_at=_known(times.readable_ms),
            first_read_at=_known(times.first_read_ms),
            last_read_at=_known(times.last_read_ms),
            num_reads=times.num_reads,
        )


def stat_from_proto(info: pb.TraceInfo, ranges: Any) -> TraceStat:
    """Return the facts about a trace with its missing cells.

    Raises:
        InvalidArgument, KeyError, ValueError: as `facts_from_proto`.
    """
    facts = facts_from_proto(info)
    missing = missing_from_proto(ranges, facts["layout"].layer_ids)
    return TraceStat(**facts, missing=missing, missing_cells=missing_cells(missing))


def missing_cells(missing: Iterable[MissingRange]) -> dict[str, int]:
    """Return the number of missing cells by reason."""
    cells: Counter[str] = Counter()
    for one in missing:
        cells[one.reason.value] += (one.stop - one.start) * len(one.layer_ids)
    return dict(cells)


def _origin(
    response: pb.DescribeTraceResponse, origin: pb.RowOrigin, layer_ids: tuple[int, ...]
) -> RowOrigin:
    source = response.sources[origin.source]
    if not (layer_ids and origin.start < origin.stop <= response.info.num_rows):
        raise ValueError(f"origins at positions [{origin.start}, {origin.stop}) of {layer_ids}")
    return RowOrigin(
        origin.start,
        origin.stop,
        layer_ids,
        source.engine_id,
        source.shard,
        origin.attempt + 1,
        version_from_wire(origin.weight_version),
        _name(origin.provenance),
    )


def _name(provenance: int) -> str:
    try:
        return Provenance(provenance).name.lower()
    except ValueError:  # of a newer server
        return "unknown"


def _known(milliseconds: int) -> datetime | None:
    return moment(milliseconds) if milliseconds else None
