"""What a trace looks like from outside: its state, its cells, and the rows that fill them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import NamedTuple

import numpy as np

from routetrace.server import refs
from routetrace.server.agents import Agents
from routetrace.server.cuts import Cuts
from routetrace.server.joins import Incarnation
from routetrace.server.journal import Clock
from routetrace.server.metrics import Metrics
from routetrace.server.served import Known, Memory, Served, segments_of
from routetrace.server.spans import Interval, merge
from routetrace.server.state import State
from routetrace.server.store import Store
from routetrace.server.trace_index import Trace
from routetrace.server.view import Selection, covers, missing, view
from routetrace.v1 import routetrace_pb2 as pb
from routetrace.v1.errors import Corrupt, InvalidArgument, NotFound
from routetrace.v1.frame_header import Buffer
from routetrace.v1.layout import RoutingLayout
from routetrace.v1.records import DIGEST, FinishReason

#: Payload bytes of a message, at most, where no frame is larger. With twice as many no read is
#: faster beyond the noise, and a reader's memory holds two or three of them.
MESSAGE_BYTES = 1 << 19

#: Times the payload of a message that is read for it, where layers are cut out of frames.
MOST_READ = 4

#: Bytes that are read in passing, without a thread: what others wait for it is less than a wake-up.
AT_ONCE_BYTES = 128 << 10

#: Incarnations that are looked at for a complete one, the newest first.
MAX_LOOKED_AT = 64

#: Token digests of one answer, at most: those of 16 million tokens.
MAX_DIGESTS = 1 << 18

#: Ranges of positions that one read may ask for.
MAX_RANGES = 1024


class Fetched(NamedTuple):
    """One message's worth of rows."""

    spans: Served
    """With the number of its frame, among these, in place of each `source`."""
    frame_lengths: list[int]
    payload: list[Buffer]
    """The frames, in any number of pieces."""
    unread: Served
    """Those whose frames could not be read."""


class _Wanted(NamedTuple):
    """Frames of one chunk that are to be read."""

    chunk: int
    layout: RoutingLayout | None
    """What they hold; None if the chunk is not known."""
    frames: dict[int, Interval]
    """Where each is in the chunk: (offset, length), by its reference without the row."""


class Reader:
    """Looks traces up, describes them, and fetches their rows. Changes nothing."""

    def __init__(
        self, store: Store, state: State, agents: Agents, clock: Clock, metrics: Metrics
    ) -> None:
        self._store = store
        self._cuts = Cuts(store)
        self._metrics = metrics
        self._state = state
        self._agents = agents
        self._clock = clock
        self._pins: Counter[int] = Counter()
        self._memory = Memory()

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

    def known(self, trace: Trace, incarnation: Incarnation) -> Known:
        """What is known of an incarnation."""
        return self._memory.known(trace, incarnation)

    def state_of(self, trace: Trace, incarnation: Incarnation) -> int:
        """Running, complete or incomplete."""
        known = self.known(trace, incarnation)
        if known.complete:
            return pb.TRACE_STATE_COMPLETE
        recent = self._clock.now() - trace.updated <= self._agents.timeout
        own = incarnation.request.sources
        running = any(self._agents.running(s) for s in own)
        if known.num_tokens:
            # What may still come: the first word of a shard whose agent is slower than the others,
            # and the rows of the engine that computed what was loaded from elsewhere.
            held = {layer for s in own for layer in s.layout.layer_ids}
            late = not held.issuperset(known.layout.layer_ids) or any(
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
        if self._is_whole(trace, incarnation, selection):
            return True
        return covers(trace.sources, view(trace.sources, incarnation, selection), selection)

    def _is_whole(self, trace: Trace, incarnation: Incarnation, selection: Selection) -> bool:
        """Whether nothing can be missing, as nothing of the trace is."""
        known = self.known(trace, incarnation)
        return (
            known.complete and selection.weight_version is None and selection.stop <= known.num_rows
        )

    def select(
        self,
        known: Known,
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
        layout, rows = known.layout, known.num_rows
        layout.columns(list(layer_ids))
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
        if known.num_tokens and stop > rows:
            field, value = (
                ("token_start", token_start) if token_start > rows else ("token_stop", stop)
            )
            raise InvalidArgument(
                field=field,
                value=value,
                expected=f"at most {rows}: {known.num_tokens} tokens have one row less",
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
        known = self.known(trace, incarnation)
        if known.info is None:
            known.info = self._facts(trace, incarnation, known)
        info = pb.TraceInfo()
        info.CopyFrom(known.info)
        info.state = self.state_of(trace, incarnation)  # type: ignore[assignment]
        info.expires_ms = int(trace.expires * 1000)
        if digests:
            if known.digests is None:
                all_of_them = sorted(incarnation.request.digests.items())
                known.digests = np.array(all_of_them[:MAX_DIGESTS], DIGEST).tobytes()
            info.token_digests = known.digests
        return info

    def _facts(self, trace: Trace, incarnation: Incarnation, known: Known) -> pb.TraceInfo:
        """Those that stay as long as the trace does not change."""
        request = incarnation.request
        engines = {s.writer.engine_id for s in request.sources}
        sources = set(known.rows["source"].tolist())
        engines.update(trace.sources[source].writer.engine_id for source in sources)
        versions = known.rows["weight_version"]
        frames = set((known.rows["ref"] >> refs.ROW_BITS).tolist())
        return pb.TraceInfo(
            run=trace.key[0],
            trace_id=trace.key[1],
            num_tokens=known.num_tokens,
            prompt_len=request.prompt_len,
            num_rows=known.num_rows,
            layout=known.layout.to_proto(),
            labels=trace.labels,
            incarnation=request.number,
            num_incarnations=len(trace.join.standing),
            finish_reason=reason_name(max(s.finish_reason for s in request.sources)),
            engine_ids=sorted(engines),
            num_attempts=max(len(s.attempts) for s in request.sources),
            min_weight_version=int(versions.min()) if len(versions) else 0,
            max_weight_version=int(versions.max()) if len(versions) else 0,
            created_ms=int(trace.created * 1000),
            updated_ms=int(trace.updated * 1000),
            stored_bytes=sum(self._frame_range(frame)[1] for frame in frames),
        )

    def missing(
        self,
        state: int,
        trace: Trace,
        incarnation: Incarnation,
        selection: Selection,
        rows: Served,
    ) -> list[pb.MissingRange]:
        """Selected cells that the rows do not give, and why."""
        if self._is_whole(trace, incarnation, selection):
            return []
        sources = incarnation.request.sources
        if state == pb.TRACE_STATE_RUNNING:
            default = pb.MISSING_REASON_NOT_YET
        elif any(not s.ended for s in sources):
            default = pb.MISSING_REASON_AGENT_LOST
        elif any(s.finish_reason == FinishReason.ABORT for s in sources):
            default = pb.MISSING_REASON_ABORTED
        else:
            default = pb.MISSING_REASON_NOT_CAPTURED
        return missing(trace.sources, incarnation, segments_of(rows), selection, default)

    # ------------------------------------------------------------------ fetching

    def rows(self, trace: Trace, incarnation: Incarnation, selection: Selection) -> Served:
        """What a reader gets: ascending records, no cell twice."""
        return self._memory.served(trace, incarnation, selection)

    @contextmanager
    def pinned(self, rows: Served) -> Iterator[None]:
        """Keeps the chunks behind rows from being dropped."""
        chunks = set((rows["ref"] >> refs.CHUNK_SHIFT).tolist())
        self._pins.update(chunks)
        try:
            yield
        finally:
            for chunk in chunks:
                self._pins[chunk] -= 1
                if not self._pins[chunk]:
                    del self._pins[chunk]

    def pinned_chunks(self) -> set[int]:
        """Chunks that somebody is reading."""
        return set(self._pins)

    def batches(self, rows: Served, layers: tuple[int, ...]) -> Iterator[Served]:
        """Cuts rows into messages of about MESSAGE_BYTES of the selected layers, at most."""
        first = size = 0
        most = 0.0
        frames: set[int] = set()
        for at, frame in enumerate((rows["ref"] >> refs.ROW_BITS).tolist()):
            if frame in frames:
                continue
            length = self._frame_range(frame)[1]
            if frames and size + length > most:
                yield rows[first:at]
                first, size = at, 0
                frames.clear()
            if not frames:
                # As if all were cut like the first one. They are read whole, so not too many.
                most = MESSAGE_BYTES * min(MOST_READ, self._times(frame, layers))
            frames.add(frame)
            size += length
        if frames:
            yield rows[first:]

    def _times(self, frame: int, layers: tuple[int, ...]) -> float:
        """How many times the selected layers all layers of a frame are."""
        entry = self._state.frames.get(frame >> refs.FRAME_BITS)
        held = entry.layout.column if entry else {}
        return len(held) / max(1, sum(layer in held for layer in layers))

    async def fetch(self, rows: Served, layers: tuple[int, ...]) -> Fetched:
        """Reads the frames behind rows, cut to the selected layers."""
        wanted = self._wanted(rows)
        fetch = partial(self._fetch, rows, wanted, layers)
        size = sum(length for chunk in wanted for _, length in chunk.frames.values())
        try:
            # What is small and in memory is there before a thread has begun to look for it.
            fetched = fetch(wait=False) if size <= AT_ONCE_BYTES else None
        except BlockingIOError:
            fetched = None
        if fetched is None:
            fetched = await asyncio.get_running_loop().run_in_executor(None, fetch)
        self._metrics.read_bytes.inc(sum(fetched.frame_lengths))
        if len(fetched.unread):
            lost = set((fetched.unread["ref"] >> refs.ROW_BITS).tolist())
            self._metrics.read_corrupt.inc(len(lost))
        return fetched

    def _wanted(self, rows: Served) -> list[_Wanted]:
        """The frames behind rows, by chunk, in the order of their first rows."""
        by_chunk: dict[int, _Wanted] = {}
        for frame in dict.fromkeys((rows["ref"] >> refs.ROW_BITS).tolist()):
            number = frame >> refs.FRAME_BITS
            chunk = by_chunk.get(number)
            if chunk is None:
                held = self._state.frames.get(number)
                chunk = by_chunk[number] = _Wanted(number, held.layout if held else None, {})
            chunk.frames[frame] = self._frame_range(frame)
        return list(by_chunk.values())

    def _fetch(
        self, rows: Served, wanted: list[_Wanted], layers: tuple[int, ...], wait: bool = True
    ) -> Fetched:
        order: dict[int, int] = {}  # of the frames that were read
        lengths: list[int] = []
        payload: list[Buffer] = []
        for chunk in wanted:
            try:
                pieces, sizes = self._read(chunk, layers, wait)
            except (NotFound, Corrupt, InvalidArgument):
                # The cells are reported as missing; the other chunks are served.
                continue
            for frame in chunk.frames:
                order[frame] = len(order)
            payload += pieces
            lengths += sizes
        numbers = (rows["ref"] >> refs.ROW_BITS).tolist()
        if len(order) == sum(len(chunk.frames) for chunk in wanted):
            spans, unread = rows.copy(), rows[:0]
        else:
            there = np.array([frame in order for frame in numbers], np.bool_)
            spans, unread = rows[there], rows[~there]
        spans["source"] = [order[frame] for frame in numbers if frame in order]
        return Fetched(spans, lengths, payload, unread)

    def _read(
        self, chunk: _Wanted, layers: tuple[int, ...], wait: bool
    ) -> tuple[list[Buffer], list[int]]:
        """The bytes of frames of one chunk, each cut to the layers, and how many each has."""
        number, layout, frames = chunk
        if layout is None or not all(length for _, length in frames.values()):
            raise NotFound(field="chunk", value=number, expected="one that holds the frames")
        if layers != layout.layer_ids:
            kept = tuple([i for i in layers if i in layout.column])
            if kept != layout.layer_ids:
                return self._cuts.read(number, frames, kept, wait)
        data = self._store.read(number, list(frames.values()), wait=wait)
        return [*data], list(map(len, data))

    def _frame_range(self, frame: int) -> Interval:
        """(offset, length) of a frame in its chunk; empty if the chunk is not known.

        Args:
            frame: a reference without its row.
        """
        entry = self._state.frames.get(frame >> refs.FRAME_BITS)
        index = frame & refs.MAX_FRAMES - 1
        if entry is None or index + 1 >= len(entry.offsets):
            return 0, 0
        offset = entry.offsets.item(index)
        return offset, entry.offsets.item(index + 1) - offset


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


def reason_name(finish_reason: int) -> str:
    """A FinishReason in the engine's words; "" if there is none."""
    return FinishReason(finish_reason).name.lower() if finish_reason else ""
