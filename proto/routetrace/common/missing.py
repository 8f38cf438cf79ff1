"""Missing cells of a trace, and why they are missing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from routetrace.v1 import routetrace_pb2 as pb


@dataclass(frozen=True)
class MissingRange:
    """Missing cells: consecutive positions at some layers."""

    start: int
    """First position."""
    stop: int
    """One past the last position."""
    layer_ids: tuple[int, ...]
    """Absolute layer ids, ascending; never empty."""
    reason: str
    """Reason, as the contract names it: "not_yet", "not_captured", "kv_unknown", "queue_full",
    "invalid_ids", "agent_lost", "rejected", "corrupt", "aborted", "other_version" (the rows are of
    other weight versions than the requested one); "unspecified" if unknown."""

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


def reason_of(reason: int) -> str:
    """Return a reason as the contract names it, in lower case."""
    try:
        name = pb.MissingReason.Name(reason)  # type: ignore[arg-type]
    except ValueError:  # a reason that only a newer server has
        name = "MISSING_REASON_UNSPECIFIED"
    return name.removeprefix("MISSING_REASON_").lower()


def missing_from_proto(
    messages: Iterable[pb.MissingRange], layer_ids: tuple[int, ...]
) -> tuple[MissingRange, ...]:
    """Convert messages, in which no layers stand for all of `layer_ids`; sort by position."""
    ranges = (MissingRange.from_proto(m, layer_ids) for m in messages)
    return tuple(sorted(ranges, key=lambda m: (m.start, m.layer_ids)))
