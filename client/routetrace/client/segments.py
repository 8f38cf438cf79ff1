"""Rows of a request that positions of a sample take."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from routetrace.client import _arguments as check
from routetrace.common.errors import InvalidArgument
from routetrace.common.values import Values


@dataclass(frozen=True)
class Segment(Values):
    """Rows [start, stop) of a request, for the positions of a sample from `at` on."""

    trace_id: str
    """The trace's id."""
    start: int
    """First position in the request."""
    stop: int
    """One past the last; the request must have these rows."""
    at: int | None = None
    """Position in the sample of the first row; `start` if None."""
    incarnation: int | None = None
    """As in `RouteClient.get`."""
    num_tokens: int | None = None
    """Tokens that the request must have, or more if the sample's token ids are proven to be its
    start; None: any number."""
    nonce: int | None = None
    """As in `RouteClient.get`."""

    def __post_init__(self) -> None:
        check.identifier("trace_id", self.trace_id)
        check.whole("start", self.start)
        check.whole("stop", self.stop, self.start + 1)
        if self.at is None:
            object.__setattr__(self, "at", self.start)
        check.whole("at", self.at)
        if self.num_tokens is not None:
            check.whole("num_tokens", self.num_tokens, self.stop + 1)
        if self.incarnation is not None:
            check.whole("incarnation", self.incarnation, 1)
        if self.nonce is not None:
            check.nonce(self.nonce)

    @property
    def shift(self) -> int:
        """Position in the request - position in the sample."""
        assert self.at is not None
        return self.start - self.at


def check_segments(field: str, segments: Iterable[Segment], num_tokens: int) -> tuple[Segment, ...]:
    """Return segments that are ascending and disjoint in the positions [0, num_tokens).

    Raises:
        InvalidArgument: if they are not; names the first of them as an item of `field`.
    """
    listed = tuple(
        check.instance(f"{field}[{i}]", s, Segment)
        for i, s in enumerate(check.several(field, segments, "Segment"))
    )
    end = 0
    for number, segment in enumerate(listed):
        at, stop = segment.start - segment.shift, segment.stop - segment.shift
        if not end <= at < stop <= num_tokens:
            raise InvalidArgument(
                field=f"{field}[{number}]",
                value=f"positions [{at}, {stop})",
                expected=f"positions in [{end}, {num_tokens}), ascending and disjoint",
            )
        end = stop
    return listed
