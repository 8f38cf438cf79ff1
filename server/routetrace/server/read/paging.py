"""Pages of a list of traces, as they are sent."""

from __future__ import annotations

from routetrace.common.seals import seal
from routetrace.server.index.traces.trace import Trace
from routetrace.server.rows.preparing import Steps, prepare_end
from routetrace.server.rows.reader import Reader
from routetrace.server.rows.summaries import Summaries
from routetrace.server.wire.messages import varint_of
from routetrace.v1 import routetrace_pb2 as pb

#: Size of a page after which no further entry is added.
PAGE_BYTES = 1 << 20

#: Maximum traces that are looked at for one page: a call ends in time, even if few of them match.
MOST_LOOKED_AT = 10_000

_TRACES = bytes((pb.ListTracesResponse.DESCRIPTOR.fields_by_name["traces"].number << 3 | 2,))


class Page:
    """Serialized ListTracesResponse to be.

    Args:
        reader: describes traces.
        summaries: summaries of traces.
        request: says which traces are asked for.
        most: maximum number of them.
    """

    def __init__(
        self, reader: Reader, summaries: Summaries, request: pb.ListTracesRequest, most: int
    ) -> None:
        self._reader = reader
        self._summaries = summaries
        self._request = request
        self._labels, self._states = dict(request.labels), frozenset(request.states)
        self._left = most
        self._looked_at = self._size = 0
        self._parts: list[bytes] = []

    def prepare(self, trace: Trace) -> Steps:
        """Work out step by step what `add` needs of a trace of many requests."""
        yield from self._summaries.prepare(trace)
        if self._request.HasField("retirable_through"):
            yield from prepare_end(self._reader, trace)

    def add(self, trace: Trace) -> bool:
        """Add a trace, if it is asked for; return False if the page ends before it."""
        if self._looked_at == MOST_LOOKED_AT:
            return False
        if self._is_asked_for(trace):
            if self._is_full:
                return False
            self._add(self._summaries.entry(trace))
        self._looked_at += 1
        return True

    def add_entry(self, entry: bytes, *, retirable: bool) -> bool:
        """Add an entry, as `add`; `retirable`: whether it may be retired, if that is asked for."""
        if self._looked_at == MOST_LOOKED_AT:
            return False
        info = pb.TraceInfo.FromString(entry)
        if (
            (not self._states or info.state in self._states)
            and (retirable or not self._request.HasField("retirable_through"))
            and self._has_labels(info)
        ):
            if self._is_full:
                return False
            self._add(entry)
        self._looked_at += 1
        return True

    @property
    def _is_full(self) -> bool:
        return not self._left or self._size > PAGE_BYTES

    def _add(self, entry: bytes) -> None:
        self._left -= 1
        self._size += len(entry)
        self._parts += (_TRACES, varint_of(len(entry)), entry)

    def _is_asked_for(self, trace: Trace) -> bool:
        request = self._request
        if not trace.may_have(self._labels):
            return False
        if self._states and self._summaries.of(trace).state not in self._states:
            return False
        if request.HasField("retirable_through") and not self._reader.retirable(
            trace, request.retirable_through
        ):
            return False
        return not self._labels or self._has_labels(
            pb.TraceInfo.FromString(self._summaries.listed(trace).entry)
        )

    def _has_labels(self, info: pb.TraceInfo) -> bool:
        return all(info.labels.get(key) == text for key, text in self._labels.items())

    def sealed(self, next_page_token: str = "") -> bytes:
        """Return the message."""
        rest = pb.ListTracesResponse(next_page_token=next_page_token).SerializeToString()
        head = b"".join((*self._parts, rest))
        return head + seal(head)
