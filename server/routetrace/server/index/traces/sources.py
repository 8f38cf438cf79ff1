"""Reports of one writer about one engine request, position by position."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from routetrace.codec.records import DIGEST, U32, UNKNOWN_VERSION
from routetrace.common.layout import ModelLayout
from routetrace.server.index.traces.spans import (
    FOREVER,
    Interval,
    Span,
    SpanList,
    merge,
    subtract,
)
from routetrace.stored import format5_pb2 as stored
from routetrace.v1 import routetrace_pb2 as pb

#: Attempts of one engine request that are followed.
MAX_ATTEMPTS = 256

_KV_UNKNOWN = pb.MISSING_REASON_KV_UNKNOWN
_LOST = np.dtype("<i8")

TraceKey = tuple[str, str]
"""(run, trace id)."""


class WriterKey(NamedTuple):
    """Writer: one shard of one engine of one run."""

    run: str
    engine_id: str
    shard: str

    def __str__(self) -> str:
        """Name the writer in messages."""
        shard = f", shard {self.shard!r}," if self.shard else ""
        return f"engine {self.engine_id!r}{shard} of run {self.run!r}"


@dataclass(slots=True, eq=False)
class Source:
    """Report of one writer about one engine request."""

    writer: WriterKey
    epoch: int
    request_id: str
    occurrence: str
    """Distinguishes requests of the same engine and id; equal at all shards. It has a "/" only if
    other shards may report the request: boot id, and number of requests begun before."""
    layout: ModelLayout
    prompt_len: int = 0
    """Length of the prompt; 0 while unknown."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Labels given at its begin."""
    began: float = 0.0
    """Unix time of its begin; 0: not known."""
    running: bool | None = None
    """Whether it may still grow, as the worker that has it reported; None: it is this worker's."""
    attempts: list[SpanList] = field(default_factory=lambda: [SpanList()])
    stops: list[int] = field(default_factory=list)
    """Computed tokens of each attempt that was preempted; FOREVER: not known. Of 0.8, the last
    attempt has one in any case."""
    had: list[int] = field(default_factory=list)
    """Tokens that the request had at the begin of each attempt behind the first; 0: not known."""
    tentative: int = 0
    """Number of drafts at the end of the last attempt."""
    blocks: list[int] = field(default_factory=list)
    """KV blocks of the request."""
    placed: bool = True
    """Whether all its calls arrived: if not, its blocks are not known, nor is of which attempt
    further rows are."""
    external: bool = False
    """Whether external KV was loaded for it."""
    loaded: tuple[int, int] = (0, 0)
    """Positions [start, stop) of the external KV of its begin."""
    first_pass: int = FOREVER
    """First position that its first attempt computed, lost rows included, or of `loaded` that this
    attempt gave up; FOREVER: none."""
    ended: bool = False
    num_tokens: int = 0
    """Final token count; 0 while unknown."""
    finish_reason: int = 0
    model: int = 0
    """Hash of the model of its rows; 0: unknown."""
    nonce: int = 0
    """Names the request in handles; 0: none."""
    kv_version: int = UNKNOWN_VERSION
    """Weight version of all KV that the engine could reuse at its begin."""
    received_by: str = ""
    """Hand-over that its external KV came by; "": not known."""
    handed_over_by: str = ""
    """Hand-over that it ended with; "": none."""
    sampled: float = 0.0
    """Unix time of its end by the clock of the engine, not after `reported`; 0: not known."""
    reported: float = 0.0
    """Unix time of the report of its end; 0: not known."""
    lost: dict[int, SpanList] = field(default_factory=dict)
    """Rows that passes of an attempt computed and that no one has, by attempt: spans whose
    provenance is a MissingReason."""
    unknown: dict[int, list[Interval]] = field(default_factory=dict)
    """Positions whose KV an attempt took from passes that are not known to this writer, by attempt:
    ascending, disjoint."""
    closed: bool = False
    """Whether its agent was closed before it ended: no call of it will come."""
    forgotten: bool = False
    """Whether its trace was deleted: the request may still run, but its rows are not served."""
    written: int = 0
    """One past the last position whose slot may be known."""
    cached: int = 0
    """Number of cached tokens whose rows are not inherited yet."""
    drafts: SpanList = field(default_factory=SpanList)
    """Drafts, which slots name once they are confirmed."""
    drafts_since: int = 0
    """`SlotMap.erasures` when the drafts were written."""
    draft_step: int = 0
    """Engine step of the drafts."""
    _digests: npt.NDArray[Any] = field(default_factory=lambda: np.empty(0, DIGEST))
    _new_digests: list[npt.NDArray[Any]] = field(default_factory=list)

    @property
    def name(self) -> tuple[str, str, str]:
        """Equal at all shards that report one request."""
        return self.writer.engine_id, self.request_id, self.occurrence

    def reports_as(self, other: Source) -> bool:
        """Whether another source is this one, or a copy of it, where another worker has it."""
        if self.running is None or other.running is None:
            return self is other
        return (self.writer, self.epoch, self.name) == (other.writer, other.epoch, other.name)

    @property
    def digests(self) -> npt.NDArray[Any]:
        """DIGEST by position, ascending."""
        if self._new_digests:
            # np.concatenate looks at each field in Python.
            parts = [part.tobytes() for part in (self._digests, *self._new_digests)]
            learned = np.frombuffer(b"".join(parts), DIGEST)
            position = learned["position"]
            if not (position[1:] > position[:-1]).all():  # as agents do not send them
                # Latest first: np.unique keeps the first of several at one position.
                learned = learned[::-1]
                learned = learned[np.unique(learned["position"], return_index=True)[1]]
            self._digests, self._new_digests = learned, []
        return self._digests

    @property
    def num_digests(self) -> int:
        """Number of reported digests, repeated ones too."""
        return len(self._digests) + sum(map(len, self._new_digests))

    def confirmed(self, attempt: int) -> int:
        """Return one past the last confirmed position of an attempt."""
        if attempt < len(self.attempts) - 1 or not self.tentative:
            return FOREVER
        return self.attempts[attempt].end - self.tentative

    @property
    def end(self) -> int:
        """One past the last position that was reported, as row or as lost, and confirmed."""
        ends = [min(a.end, self.confirmed(i)) for i, a in enumerate(self.attempts)]
        ends += [stop for intervals in self.unknown.values() for _, stop in intervals]
        return max(ends + [lost.end for lost in self.lost.values() if lost.end < FOREVER])

    def computed(self, attempt: int) -> int:
        """Return one past the last position of an attempt that was reported, and confirmed."""
        lost = self.lost_in(attempt)
        end = lost.end if lost else 0
        if attempt >= len(self.attempts):  # another shard has reported it alone
            return end
        return max(end, min(self.attempts[attempt].end, self.confirmed(attempt)))

    def remove(self, position: int) -> None:
        """Drop the positions at and after one of the last attempt."""
        if not self.placed:  # all of its rows are lost
            return
        spans = self.attempts[-1]
        confirmed = spans.end - self.tentative
        self.drafts.truncate(position)
        spans.truncate(position)
        self._cut_lost(position)
        self.tentative = max(0, spans.end - confirmed)

    def compute(self, span: Span) -> None:
        """Append rows that a pass of the present attempt computed."""
        self._reach(span.position)
        self._cut_lost(span.position)
        self.attempts[-1].append(span)

    def give_up(self, position: int) -> None:
        """Note that KV at and after a position was given up."""
        if position < self.loaded[1]:
            self._reach(position)

    def _reach(self, position: int) -> None:
        if position < self.first_pass and len(self.attempts) == 1:
            self.first_pass = position

    def lose(self, start: int, stop: int, reason: int) -> None:
        """Append lost rows [start, stop) that a pass of the present attempt computed."""
        self._reach(start)
        lost = self.lost.setdefault(len(self.attempts) - 1, SpanList())
        lost.append(Span(start, stop - start, start, 0, reason))

    def lost_in(self, attempt: int) -> SpanList | None:
        """Return what an attempt lost: of one that was not reported, what the last one did."""
        last = len(self.attempts) - 1
        lost = self.lost.get(min(attempt, last))
        return lost if attempt <= last or (lost and lost.end == FOREVER) else None

    def lose_track(self, reason: int = pb.MISSING_REASON_CORRUPT) -> None:
        """Lose the present attempt: calls are missing, which may have taken back any row of it."""
        if self.placed:
            self.remove(0)
            self.lose(0, FOREVER, reason)
        self.blocks, self.written, self.placed = [], 0, False

    def _cut_lost(self, position: int) -> None:
        attempt = len(self.attempts) - 1
        if lost := self.lost.get(attempt):
            lost.truncate(position)
            if not lost:  # as a snapshot has it
                del self.lost[attempt]

    def not_know(self, intervals: Iterable[Interval]) -> None:
        """Note positions whose KV the present attempt took from passes that are not known."""
        attempt = len(self.attempts) - 1
        if unknown := merge([*self.unknown.get(attempt, ()), *intervals]):
            self.unknown[attempt] = unknown

    def preempt(self, position: int) -> None:
        """End the present attempt; rows at and after a position do not count.

        Rows before it that were not reported come late, if at all.
        """
        if not self.placed:  # which attempt ends is not known
            return
        self.give_up(position)
        self.remove(position)
        if len(self.stops) < len(self.attempts):
            self.stops.append(position)
        self.stops[-1] = stop = min(self.stops[-1], position)
        attempt = len(self.attempts) - 1
        ends = [interval[1] for interval in self.unknown.get(attempt, ())]
        ends += [spans.end for spans in (self.attempts[-1], self.lost.get(attempt)) if spans]
        if (start := max(ends, default=0)) < stop:
            self.lose(max(start, self.cached), stop, pb.MISSING_REASON_NOT_CAPTURED)

    def resume(self, had: int = 0) -> None:
        """Start the next attempt; one with MAX_ATTEMPTS is not followed any more.

        Args:
            had: tokens that the request has now; 0: not known.
        """
        if not self.placed or len(self.attempts) == MAX_ATTEMPTS:
            self.lose_track()
            return
        if len(self.stops) < len(self.attempts):  # its agent had no memory to report the end
            self.stops.append(FOREVER)
        elif self.stops[-1] == FOREVER and not (self.lost or self.writer.shard):
            self.stops[-1] = self.attempts[-1].end  # of 0.8, and preempted: its rows are left
        if self.stops[-1] == FOREVER:
            self.remove(0)
            self.lose(0, FOREVER, pb.MISSING_REASON_QUEUE_FULL)
        self.attempts.append(SpanList())
        self.had.append(had)

    def add_digests(self, digests: npt.NDArray[Any]) -> None:
        """Add token digests; of two at one position the later counts."""
        self._new_digests.append(digests)


def dump_source(message: stored.Source, source: Source, layouts: dict[ModelLayout, int]) -> None:
    """Set the stored form of a source; layouts go by number.

    Fields with default values are left unset: a snapshot has a source for each request.
    """
    _, message.engine_id, message.shard = source.writer
    message.epoch = source.epoch
    message.request_id, message.occurrence = source.request_id, source.occurrence
    message.layout = layouts[source.layout]
    message.prompt_len = source.prompt_len
    for spans in source.attempts:
        message.attempts.append(spans.tobytes())
    message.ended, message.finish_reason = source.ended, source.finish_reason
    message.num_tokens = source.num_tokens
    message.written = source.written
    message.digests = source.digests.tobytes()
    if source.blocks:
        message.blocks = np.array(source.blocks, U32).tobytes()
    message.cached = source.cached
    message.labels.update(source.labels)
    if source.began:
        message.began = source.began
    if source.reported:
        message.sampled, message.reported = source.sampled, source.reported
    message.stops.extend(source.stops)
    message.had.extend(source.had)
    for attempt, spans in source.lost.items():
        message.lost_rows[attempt] = spans.tobytes()
    for attempt, intervals in source.unknown.items():
        unknown = SpanList()
        for a, b in intervals:
            unknown.append(Span(a, b - a, a, 0, _KV_UNKNOWN))
        message.lost_rows[attempt] += unknown.tobytes()
    message.tentative = source.tentative
    if len(source.drafts):
        message.drafts = source.drafts.tobytes()
        message.drafts_since, message.draft_step = source.drafts_since, source.draft_step
    message.unplaced, message.external = not source.placed, source.external
    if source.loaded[1]:
        message.loaded_start, message.loaded_stop = source.loaded
    if source.first_pass != FOREVER:
        message.first_pass = source.first_pass
    message.closed, message.forgotten = source.closed, source.forgotten
    if source.model:
        message.model = source.model
    if source.nonce:
        message.nonce = source.nonce
    if source.kv_version != UNKNOWN_VERSION:
        message.kv_weight_version = source.kv_version
    if source.received_by:
        message.received_by = source.received_by
    if source.handed_over_by:
        message.handed_over_by = source.handed_over_by


def load_source(message: stored.Source, run: str, layouts: Sequence[ModelLayout]) -> Source:
    """Return the source of a stored form."""
    source = Source(
        writer=WriterKey(run, message.engine_id, message.shard),
        epoch=message.epoch,
        request_id=message.request_id,
        occurrence=message.occurrence,
        layout=layouts[message.layout],
        prompt_len=message.prompt_len,
        labels=dict(message.labels),
        began=message.began,
        attempts=[SpanList(spans) for spans in message.attempts],
        stops=[*message.stops],
        had=[*message.had] or [0] * (len(message.attempts) - 1),
        tentative=message.tentative,
        blocks=np.frombuffer(message.blocks, U32).tolist() if message.blocks else [],
        placed=not message.unplaced,
        external=message.external,
        loaded=(message.loaded_start, message.loaded_stop),
        ended=message.ended,
        num_tokens=message.num_tokens,
        finish_reason=message.finish_reason,
        sampled=message.sampled,
        reported=message.reported,
        written=message.written,
        closed=message.closed,
        forgotten=message.forgotten,
        model=message.model,
        nonce=message.nonce,
        received_by=message.received_by,
        handed_over_by=message.handed_over_by,
        cached=message.cached,
        drafts=SpanList(message.drafts),
        drafts_since=message.drafts_since,
        draft_step=message.draft_step,
        _digests=np.frombuffer(message.digests, DIGEST),
    )
    if message.HasField("first_pass"):
        source.first_pass = message.first_pass
    if message.HasField("kv_weight_version"):
        source.kv_version = message.kv_weight_version
    for attempt, lost in message.lost_rows.items():
        for span in SpanList(lost):
            if span.provenance == _KV_UNKNOWN:
                source.unknown.setdefault(attempt, []).append((span.position, span.stop))
            else:
                source.lost.setdefault(attempt, SpanList()).append(span)
    if message.lost:
        notes = np.frombuffer(message.lost, _LOST).reshape(-1, 3).tolist()
        unknown = merge((a, b) for a, b, reason in notes if reason == _KV_UNKNOWN)
        if unknown:
            source.unknown = dict.fromkeys(range(len(source.attempts)), unknown)
        _attribute(source, [note for note in notes if note[2] != _KV_UNKNOWN])
    return source


def _attribute(source: Source, notes: list[list[int]]) -> None:
    """Give notes of lost rows, as 0.8 stored them, to all attempts: it did not say to which."""
    for attempt, spans in enumerate(source.attempts):
        held = merge((span.position, span.stop) for span in spans)
        lost = []
        for start, stop, reason in notes:
            lost += [(a, b, reason) for a, b in subtract((start, stop), held)]
            held = merge([*held, (start, stop)])
        for a, b, reason in sorted(lost):
            source.lost.setdefault(attempt, SpanList()).append(Span(a, b - a, a, 0, reason))
