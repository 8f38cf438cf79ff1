"""What a trace looks like from outside: its state, its cells, and the messages that carry them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice

import numpy as np

from routetrace.server import refs
from routetrace.server.agents import Agents
from routetrace.server.joins import Incarnation
from routetrace.server.journal import Clock
from routetrace.server.metrics import Metrics
from routetrace.server.spans import merge
from routetrace.server.state import State
from routetrace.server.store import Store
from routetrace.server.trace_index import Trace
from routetrace.server.view import Segment, Selection, covered, layer_groups, missing, view
from routetrace.v1 import routetrace_pb2 as pb
from routetrace.v1.errors import Corrupt, InvalidArgument, NotFound
from routetrace.v1.frame import slice_frame
from routetrace.v1.layout import RoutingLayout
from routetrace.v1.records import DIGEST, SPAN, U32, FinishReason

#: Payload bytes that a message aims at.
MESSAGE_BYTES = 1 << 20

#: Incarnations that are looked at for a complete one, the newest first.
MAX_LOOKED_AT = 64

#: Token digests of one answer, at most: those of 16 million tokens.
MAX_DIGESTS = 1 << 18

#: Ranges of positions that one read may ask for.
MAX_RANGES = 1024


@dataclass(frozen=True, slots=True)
class Message:
    """One message's worth of rows."""

    spans: bytes
    frame_lengths: bytes
    payload: bytes
    num_spans: int


class Reader:
    """Looks traces up, describes them, and fetches their rows. Changes nothing."""

    def __init__(
        self, store: Store, state: State, agents: Agents, clock: Clock, metrics: Metrics
    ) -> None:
        self._store = store
        self._metrics = metrics
        self._state = state
        self._agents = agents
        self._clock = clock
        self._pins: Counter[int] = Counter()

    # ------------------------------------------------------------------ looking up

    def find(self, run: str, trace_id: str, number: int = 0) -> tuple[Trace, Incarnation]:
        """A trace, and the incarnation that is meant.

        Args:
            run: namespace.
            trace_id: the trace.
            number: of the incarnation; 0: the newest complete one, else the newest.

        Raises:
            NotFound: if there is no such trace or incarnation.
        """
        trace = self._state.traces.traces.get((run, trace_id))
        if trace is None or not trace.sources:
            raise NotFound(field="trace_id", value=trace_id, expected=f"a trace of run {run!r}")
        join = trace.join
        count = len(join.requests)
        if number > count:
            raise NotFound(field="incarnation", value=number, expected=f"1 to {count}")
        if number:
            return trace, join.incarnation(number)
        for standing in islice(reversed(join.standing), MAX_LOOKED_AT):
            incarnation = join.incarnation(standing)
            if self.state_of(trace, incarnation) == pb.TRACE_STATE_COMPLETE:
                return trace, incarnation
        return trace, join.incarnation(join.standing[-1])

    def state_of(
        self, trace: Trace, incarnation: Incarnation, segments: list[Segment] | None = None
    ) -> int:
        """Running, complete or incomplete; `segments` are all its rows, where they are at hand."""
        recent = self._clock.now() - trace.updated <= self._agents.timeout
        own = incarnation.request.sources
        running = any(self._agents.running(s) for s in own)
        if incarnation.num_tokens:
            whole = Selection(0, incarnation.num_rows, own[0].layout.moe_layer_ids)
            if segments is None:
                segments = view(trace.sources, incarnation, whole)
            if _covers(trace, segments, whole):
                return pb.TRACE_STATE_COMPLETE
            # What may still come: the first word of a shard whose agent is slower than the others,
            # and the rows of the engine that computed what was loaded from elsewhere.
            held = {layer for s in own for layer in s.layout.layer_ids}
            late = not held.issuperset(whole.layers) or any(
                s.external and len(s.digests) for s in own
            )
            others = (s for part in incarnation.continued for s in part.request.sources)
            running = running or (recent and late) or any(map(self._agents.running, others))
        elif incarnation.request.handed_over:
            running = recent
        return pb.TRACE_STATE_RUNNING if running else pb.TRACE_STATE_INCOMPLETE

    def ended(self, trace: Trace) -> bool:
        """Whether no incarnation of a trace may still grow."""
        return all(
            self.state_of(trace, trace.join.incarnation(n)) != pb.TRACE_STATE_RUNNING
            for n in trace.join.standing
        )

    def is_covered(self, trace: Trace, incarnation: Incarnation, selection: Selection) -> bool:
        """Whether every selected cell is there."""
        return _covers(trace, view(trace.sources, incarnation, selection), selection)

    def select(
        self,
        incarnation: Incarnation,
        token_start: int,
        token_stop: int,
        layer_ids: Sequence[int],
        policy: int = pb.READ_POLICY_AS_SAMPLED,
        weight_version: int | None = None,
        ranges: Sequence[tuple[int, int]] = (),
    ) -> Selection:
        """Checks what a reader asks for.

        Raises:
            InvalidArgument: if a layer is no MoE layer of the model, or positions lie outside of
                the rows of an ended trace.
        """
        layout = model_layout(incarnation)
        layout.columns(list(layer_ids))
        rows = incarnation.num_rows
        if ranges:
            _check_ranges(ranges, token_start or token_stop)
            token_start, token_stop = ranges[0][0], ranges[-1][1]
        stop = token_stop or max(rows, token_start)
        if stop < token_start:
            raise InvalidArgument(
                field="token_stop",
                value=token_stop,
                expected=f"at least token_start = {token_start}",
            )
        if incarnation.num_tokens and stop > rows:
            field, value = (
                ("token_start", token_start) if token_start > rows else ("token_stop", stop)
            )
            raise InvalidArgument(
                field=field,
                value=value,
                expected=f"at most {rows}: {incarnation.num_tokens} tokens have one row less",
            )
        layers = tuple(sorted(set(layer_ids))) or layout.layer_ids
        return Selection(
            token_start, stop, layers, policy, weight_version, ranges=tuple(merge(ranges))
        )

    # ------------------------------------------------------------------ describing

    def describe(
        self, trace: Trace, incarnation: Incarnation, *, digests: bool = True
    ) -> pb.TraceInfo:
        """Facts of one incarnation; its digests only if asked for, as they may be many."""
        request = incarnation.request
        layout = model_layout(incarnation)
        whole = Selection(0, incarnation.num_rows, layout.layer_ids)
        segments = view(trace.sources, incarnation, whole)
        engines = {s.writer.engine_id for s in request.sources}
        engines.update(trace.sources[s.source].writer.engine_id for s in segments)
        versions = [s.span.weight_version for s in segments]
        known = sorted(request.digests.items())[:MAX_DIGESTS] if digests else []
        return pb.TraceInfo(
            run=trace.key[0],
            trace_id=trace.key[1],
            state=self.state_of(trace, incarnation, segments),  # type: ignore[arg-type]
            num_tokens=incarnation.num_tokens,
            prompt_len=request.prompt_len,
            num_rows=incarnation.num_rows,
            layout=layout.to_proto(),
            labels=trace.labels,
            incarnation=request.number,
            num_incarnations=len(trace.join.standing),
            finish_reason=reason_name(max(s.finish_reason for s in request.sources)),
            engine_ids=sorted(engines),
            num_attempts=max(len(s.attempts) for s in request.sources),
            min_weight_version=min(versions, default=0),
            max_weight_version=max(versions, default=0),
            created_ms=int(trace.created * 1000),
            updated_ms=int(trace.updated * 1000),
            expires_ms=int(trace.expires * 1000),
            stored_bytes=self._stored_bytes(segments),
            token_digests=np.array(known, DIGEST).tobytes(),
        )

    def missing(
        self,
        state: int,
        trace: Trace,
        incarnation: Incarnation,
        selection: Selection,
        segments: list[Segment],
    ) -> list[pb.MissingRange]:
        """Selected cells that the segments do not give, and why."""
        sources = incarnation.request.sources
        if state == pb.TRACE_STATE_RUNNING:
            default = pb.MISSING_REASON_NOT_YET
        elif any(not s.ended for s in sources):
            default = pb.MISSING_REASON_AGENT_LOST
        elif any(s.finish_reason == FinishReason.ABORT for s in sources):
            default = pb.MISSING_REASON_ABORTED
        else:
            default = pb.MISSING_REASON_NOT_CAPTURED
        return missing(trace.sources, incarnation, segments, selection, default)

    # ------------------------------------------------------------------ fetching

    @contextmanager
    def pinned(self, segments: list[Segment]) -> Iterator[None]:
        """Keeps the chunks behind segments from being dropped."""
        chunks = {refs.chunk_of(s.span.ref) for s in segments}
        self._pins.update(chunks)
        try:
            yield
        finally:
            self._pins.subtract(chunks)
            self._pins += Counter()  # drops the zeros

    def pinned_chunks(self) -> set[int]:
        """Chunks that somebody is reading."""
        return set(self._pins)

    def batches(self, segments: list[Segment]) -> Iterator[list[Segment]]:
        """Cuts segments into messages of about MESSAGE_BYTES."""
        batch: list[Segment] = []
        frames: set[int] = set()
        size = 0
        for segment in segments:
            frame = segment.span.ref >> refs.ROW_BITS
            if frame not in frames:
                length = self._frame_range(segment)[1]
                if batch and size + length > MESSAGE_BYTES:
                    yield batch
                    batch, frames, size = [], set(), 0
                frames.add(frame)
                size += length
            batch.append(segment)
        if batch:
            yield batch

    async def fetch(
        self, batch: list[Segment], selection: Selection, first_frame: int
    ) -> tuple[Message, list[Segment]]:
        """Reads the frames of a batch, cut to the selected layers.

        Returns:
            The message, and the segments whose frames could not be read.
        """
        frames = {s.span.ref >> refs.ROW_BITS: s for s in batch}
        ranges: dict[int, list[tuple[int, tuple[int, int]]]] = {}
        for frame, segment in frames.items():
            at = self._frame_range(segment)
            ranges.setdefault(refs.chunk_of(segment.span.ref), []).append((frame, at))
        data = await asyncio.to_thread(self._read, ranges, selection.layers)
        number = {frame: first_frame + i for i, frame in enumerate(data)}
        good = [s for s in batch if s.span.ref >> refs.ROW_BITS in number]
        spans = np.zeros(len(good), SPAN)
        for i, (_, attempt, span) in enumerate(good):
            spans[i] = (
                span.position,
                span.length,
                number[span.ref >> refs.ROW_BITS],
                refs.row_of(span.ref),
                attempt,
                span.provenance,
                0,
                span.weight_version,
            )
        self._metrics.read_bytes.inc(sum(map(len, data.values())))
        self._metrics.read_corrupt.inc(len(frames) - len(data))
        message = Message(
            spans.tobytes(),
            np.array([len(f) for f in data.values()], U32).tobytes(),
            b"".join(data.values()),
            len(good),
        )
        return message, [s for s in batch if s.span.ref >> refs.ROW_BITS not in number]

    def _stored_bytes(self, segments: list[Segment]) -> int:
        frames = {s.span.ref >> refs.ROW_BITS: s for s in segments}
        return sum(self._frame_range(s)[1] for s in frames.values())

    def _frame_range(self, segment: Segment) -> tuple[int, int]:
        """(offset, length) of a segment's frame in its chunk; empty if the chunk is not known."""
        entry = self._state.frames.get(refs.chunk_of(segment.span.ref))
        frame = refs.frame_of(segment.span.ref)
        if entry is None or frame + 1 >= len(entry.offsets):
            return 0, 0
        return int(entry.offsets[frame]), int(entry.offsets[frame + 1] - entry.offsets[frame])

    def _read(
        self, ranges: dict[int, list[tuple[int, tuple[int, int]]]], layers: tuple[int, ...]
    ) -> dict[int, bytes]:
        """Frames by number, each cut to the layers; without those that cannot be read."""
        frames: dict[int, bytes] = {}
        for chunk, wanted in ranges.items():
            held = self._state.frames.get(chunk)
            if held is None:
                continue
            cut = tuple(i for i in layers if i in held.layout.column)
            try:
                data = self._store.read(chunk, [at for _, at in wanted])
                for (frame, _), body in zip(wanted, data, strict=True):
                    frames[frame] = slice_frame(body, cut)
            except (NotFound, Corrupt, InvalidArgument):
                # The cells are reported as missing; the other chunks are served.
                continue
        return frames


def _check_ranges(ranges: Sequence[tuple[int, int]], also: int) -> None:
    if also:
        raise InvalidArgument(
            field="token_start, token_stop",
            value=also,
            expected="0, as token_ranges are given",
        )
    if len(ranges) > MAX_RANGES:
        raise InvalidArgument(
            field="token_ranges", value=f"{len(ranges)} ranges", expected=f"at most {MAX_RANGES}"
        )
    end = 0
    for start, stop in ranges:
        if not end <= start < stop:
            raise InvalidArgument(
                field="token_ranges",
                value=f"[{start}, {stop})",
                expected=f"ascending, disjoint ranges: start >= {end}, stop above it",
            )
        end = stop


def _covers(trace: Trace, segments: list[Segment], selection: Selection) -> bool:
    """Whether segments give every selected cell."""
    wanted = selection.before(selection.stop)
    # Only those that gave segments count: of an id that is used again and again there are many.
    held = [trace.sources[index] for index in sorted({s.source for s in segments})]
    groups = layer_groups(held, selection.layers)
    return all(covered(trace.sources, segments, group[0]) == wanted for group in groups)


def model_layout(incarnation: Incarnation) -> RoutingLayout:
    """The columns of the whole model."""
    layout = incarnation.request.sources[0].layout
    return layout.select(layout.moe_layer_ids)


def reason_name(finish_reason: int) -> str:
    """A FinishReason in the engine's words; "" if there is none."""
    return FinishReason(finish_reason).name.lower() if finish_reason else ""
