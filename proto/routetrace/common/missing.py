"""Missing cells of a trace, and why they are missing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

from routetrace.common.values import TextEnum, Values
from routetrace.v1 import routetrace_pb2 as pb


class MissingReason(TextEnum):
    """Reason why cells are missing."""

    NOT_YET = "not_yet"
    """The request is running and has not computed them."""
    NOT_CAPTURED = "not_captured"
    """No agent reported rows for them: the pass was skipped, or never reported."""
    KV_UNKNOWN = "kv_unknown"
    """Their KV came from a slot whose writer is unknown."""
    QUEUE_FULL = "queue_full"
    """The agent dropped the request, as its queue was full."""
    INVALID_IDS = "invalid_ids"
    """The agent dropped the rows: ids out of range, repeated, or never written."""
    AGENT_LOST = "agent_lost"
    """The agent was lost during the request."""
    AGENT_CLOSED = "agent_closed"
    """The agent was closed, and finish() was never called for the request."""
    REJECTED = "rejected"
    """The chunk that held them was refused."""
    CORRUPT = "corrupt"
    """The stored bytes are lost, or do not match their checksum."""
    ABORTED = "aborted"
    """The request was aborted before it computed them."""
    OTHER_VERSION = "other_version"
    """Rows exist, but none of the requested weight version."""
    AMBIGUOUS = "ambiguous"
    """Several passes qualify equally, and nothing proves which of them made their KV."""
    NOT_PROVEN = "not_proven"
    """No request is proven to have the tokens of the sample up to there; only in `Rows`."""
    UNKNOWN = "unknown"
    """A reason of a newer server, or none."""


@dataclass(frozen=True)
class MissingRange(Values):
    """Missing cells: consecutive positions at some layers."""

    start: int
    """First position."""
    stop: int
    """One past the last position."""
    layer_ids: tuple[int, ...]
    """Absolute layer ids, ascending; never empty."""
    reason: MissingReason

    def __str__(self) -> str:
        layers = f"layer {self.layer_ids[0]}"
        if len(self.layer_ids) > 1:
            layers = f"{len(self.layer_ids)} layers {self.layer_ids[0]}..{self.layer_ids[-1]}"
        return f"positions [{self.start}, {self.stop}) of {layers}: {self.reason}"

    @classmethod
    def from_proto(cls, message: pb.MissingRange, layer_ids: tuple[int, ...]) -> MissingRange:
        """Convert a message, in which no layers stand for all of `layer_ids`."""
        return cls(
            message.start,
            message.stop,
            tuple(sorted(message.layer_ids)) or layer_ids,
            reason_of(message.reason),
        )


@cache
def reason_of(reason: int) -> MissingReason:
    """Return a reason of the contract."""
    try:
        name = pb.MissingReason.Name(reason)  # type: ignore[arg-type]
        return MissingReason[name.removeprefix("MISSING_REASON_")]
    except (ValueError, KeyError):  # unspecified, or one that only a newer server has
        return MissingReason.UNKNOWN


def missing_from_proto(
    messages: Iterable[pb.MissingRange], layer_ids: tuple[int, ...]
) -> tuple[MissingRange, ...]:
    """Convert messages, in which no layers stand for all of `layer_ids`; sort by position."""
    ranges = (MissingRange.from_proto(m, layer_ids) for m in messages)
    return tuple(sorted(ranges, key=lambda m: (m.start, m.layer_ids)))
