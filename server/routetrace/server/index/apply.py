"""Application of committed records to the state: the only way in which it changes.

Records are applied in order after their commit, and again when the server starts, so that recovery
is no second code path. The ops of a chunk are events of the engine, in order; invalid ops
were refused before they were stored.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any

import numpy as np

from routetrace.codec.records import NO_REQUEST, UNKNOWN_VERSION, Provenance
from routetrace.common.errors import Corrupt
from routetrace.common.layout import ModelLayout
from routetrace.server.common.slices import at_once
from routetrace.server.index.chunk import (
    BEGIN,
    BLOCKS,
    COPY,
    DIGESTS,
    EXTERNAL,
    FINISH,
    FORGET,
    INHERIT,
    LOST,
    PREEMPT,
    RESET,
    RESUME,
    REWIND,
    ROWS,
    ParsedChunk,
    parse_header,
)
from routetrace.server.index.control import CONTROL, close_requests, key_of, lose_track
from routetrace.server.index.records.record import Sums, decode_record
from routetrace.server.index.state import Frames, State
from routetrace.server.index.traces import refs
from routetrace.server.index.traces.sources import Source, TraceKey
from routetrace.server.index.traces.spans import FOREVER, Span
from routetrace.server.index.writer import Writer
from routetrace.stored import format5_pb2 as stored
from routetrace.v1 import routetrace_pb2 as pb

#: Maximum live requests of a writer; beyond it, the oldest counts as lost.
MAX_LIVE = 1 << 16

#: Ops of a chunk that are applied at a time, and slots of one op.
_OPS = 16
_SLOTS = 1 << 12

#: Frames of a chunk that does not count; its space is reclaimed.
NO_FRAMES = Frames(np.zeros(1, np.uint32), ModelLayout((0,), 1, 1, 1), "")


def apply_record(state: State, number: int, record: bytes, chunk: ParsedChunk | None = None) -> Any:
    """Apply one committed record at once; see `apply_in_steps`."""
    return at_once(apply_in_steps(state, number, record, chunk))


def apply_in_steps(
    state: State, number: int, record: bytes, chunk: ParsedChunk | None = None
) -> Generator[None, None, Any]:
    """Apply one committed record, step by step.

    Between two steps the state is that of an agent which has sent the ops so far: it may be read,
    but neither changed by another record nor be put into a snapshot.

    Args:
        state: state to change.
        number: number of the record.
        record: header of the record.
        chunk: parsed ChunkHeader of the record, if known.

    Returns:
        The Writer for open, whether it counted for a chunk, the number of traces for delete and
        renew.
    """
    change = decode_record(record)
    state.number = number
    kind = change.WhichOneof("change")
    if kind == "chunk":
        return (yield from _apply_chunk(state, number, change.chunk, change.time, chunk))
    if kind is None:
        raise Corrupt(f"record {number} holds no change")
    return (yield from CONTROL[kind](state, getattr(change, kind), change.time))


def _apply_chunk(
    state: State, number: int, change: stored.Chunk, now: float, chunk: ParsedChunk | None
) -> Generator[None, None, bool]:
    writer = state.writers.get(key_of(change.writer))
    # A record that does not continue its writer was never acknowledged: an earlier one of the same
    # stream failed to commit, and the agent resends both. Nothing will point into this one.
    if writer is None or writer.epoch != change.epoch or not _continues(writer, change):
        state.hold(number, NO_FRAMES)
        return False
    if writer.sequence + 1 < change.sequence:
        yield from lose_track(state, writer)
    if chunk is None:
        chunk = parse_header(change.header, writer.layout, writer.slots)
    if len(chunk.frame_lengths):
        offsets = np.zeros(len(chunk.frame_lengths) + 1, np.uint32)
        np.cumsum(chunk.frame_lengths, out=offsets[1:])
        state.hold(number, Frames(offsets, writer.layout, writer.key.run, writer.token))
    yield from _Applier(state, writer, chunk, number, now).run()
    writer.closed = chunk.closed
    if chunk.closed:
        yield from close_requests(state, writer, now)
    _count(writer, change)
    state.touched.add(writer.key)
    return True


def leave_out(state: State, number: int, record: bytes) -> None:
    """Pass over a record that cannot be applied, before any part of it is.

    A chunk costs its writer the same as a damaged one. Its sequence number counts, so that the
    agent, which has no ack for it, gets one and does not send it a second time.
    """
    change = decode_record(record)
    state.number = number
    if not change.HasField("chunk"):
        return
    state.hold(number, NO_FRAMES)
    chunk = change.chunk
    writer = state.writers.get(key_of(chunk.writer))
    if writer and writer.epoch == chunk.epoch and _continues(writer, chunk):
        at_once(lose_track(state, writer))
        _count(writer, chunk)


def _count(writer: Writer, change: stored.Chunk) -> None:
    writer.sequence = change.sequence
    writer.recent.add(writer.sequence, Sums(change.header_crc32, change.payload_crc32))


def _continues(writer: Writer, change: stored.Chunk) -> bool:
    """Whether a chunk is the next one of its writer, or the next one that is left."""
    behind = change.sequence - writer.sequence - 1
    return behind == 0 or (behind > 0 and writer.torn)


class _Applier:
    """Apply the ops of one chunk, in order."""

    def __init__(
        self, state: State, writer: Writer, chunk: ParsedChunk, number: int, now: float
    ) -> None:
        self.state = state
        self.writer = writer
        self.slots = writer.slots
        self.chunk = chunk
        self.number = number
        self.now = now
        self.touched: dict[TraceKey, None] = {}
        self._fresh: set[TraceKey] = set()

    def run(self) -> Iterator[None]:
        try:
            yield from self._run()
            yield from self._step()
            for index, key in enumerate(self.touched, 1):
                if trace := self.state.trace(key, self.now):
                    self.state.touch(trace, self.now)
                if not index % _OPS:
                    yield
            self.touched.clear()
        finally:  # no cached view of a trace may outlive a change
            for key in self.touched:
                if trace := self.state.traces.traces.get(key):
                    self.state.changed(trace)

    def _step(self) -> Iterator[None]:
        """End a step; no cached view of a trace may outlive a change."""
        for key in self._fresh:
            if trace := self.state.traces.traces.get(key):
                self.state.changed(trace)
        self._fresh.clear()
        yield

    def _run(self) -> Iterator[None]:
        for index, op in enumerate(self.chunk.ops, 1):
            if not index % _OPS:
                yield from self._step()
            kind, _, arg, request, position, count, frame, row, at, num, step, version, value = op
            blocks = self.chunk.block_ids[at : at + num]
            if kind == ROWS:
                if not version and not self.writer.says_unknown_versions:
                    version = UNKNOWN_VERSION
                self.writer.step = max(self.writer.step, step)
                self.writer.weight_version = None if version == UNKNOWN_VERSION else version
                ref = refs.pack(self.number, frame, row)
                if request == NO_REQUEST:
                    for first in range(0, count, _SLOTS):
                        slots = self._slots(at + first, min(_SLOTS, count - first))
                        self.slots.write(slots, ref + first, version, step)
                        yield
                    continue
                key, source = self._source(request)
                if not source.placed:
                    self._forget(source, position, FOREVER)
                    continue
                span = Span(position, count, ref, version, Provenance.FORWARD)
                self._rows(key, source, span, step, value)
                if trace := self.state.traces.traces.get(key):
                    self.state.traces.prefixes.computed(trace, version, position)
            elif kind == EXTERNAL:
                self.slots.erase(blocks)
            elif kind == COPY:
                self.slots.copy(blocks[: num // 2], blocks[num // 2 :], step)
            elif kind == RESET:
                self.slots.forget_all(count)
            elif kind == FORGET:
                for first in range(0, count, _SLOTS):
                    self.slots.forget(self._slots(at + first, min(_SLOTS, count - first)))
                    yield
                continue
            elif kind == BEGIN:
                key, source = self._begin(request, self.chunk.begins[arg], value)
                source.loaded = position - count, position
                self._take(source, blocks, position, count)
            else:
                key, source = self._source(request)
                if kind == BLOCKS:
                    self.slots.erase(blocks)
                    # A request holds no block twice.
                    source.blocks.extend(blocks[: self.slots.num_blocks - len(source.blocks)])
                elif kind == REWIND:
                    source.give_up(position)
                    self._drop(key, source, position)
                elif kind == INHERIT:
                    yield from self._inherit(source)
                    self._rejoin(key)
                elif kind == PREEMPT:
                    source.preempt(position)
                    self._release(source, position)
                    self._rejoin(key)
                elif kind == RESUME:
                    source.resume(value)
                    self._take(source, blocks, position, count)
                    self._rejoin(key)
                elif kind == FINISH:
                    source.ended, source.num_tokens, source.finish_reason = True, count, arg
                    source.handed_over_by = self.chunk.transfer_ids[row - 1] if row else ""
                    source.sampled, source.reported = min(value / 1000, self.now), self.now
                    self._release(source, max(0, count - 1))
                    del self.writer.live[self.chunk.request_ids[request]]
                    self._rejoin(key)
                elif kind == LOST:
                    stop = position + count if count else FOREVER
                    self._remove(key, source, position)
                    self.slots.forget_run(source.blocks, position, stop)
                    if source.placed:
                        source.lose(position, stop, arg)
                    if count:
                        self._confirm(source, stop - value)
                elif kind == DIGESTS:
                    source.add_digests(self.chunk.token_digests[row : row + count])
                    self._rejoin(key)
                    if trace := self.state.traces.traces.get(key):
                        self.state.traces.learn(trace, source)

    def _slots(self, at: int, count: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        return self.chunk.slots[at : at + count].astype(np.int64)

    def _source(self, request: int) -> tuple[TraceKey, Source]:
        """Return the live request; begin it, unnamed, if its begin was lost."""
        request_id = self.chunk.request_ids[request]
        if known := self.writer.live.get(request_id):
            self._touch(*known)
            return known
        key, source = self._begin(request, pb.RequestBegin(), -1)
        source.placed = False
        return key, source

    def _begin(self, request: int, begin: pb.RequestBegin, index: int) -> tuple[TraceKey, Source]:
        writer, request_id = self.writer, self.chunk.request_ids[request]
        # Shards of one boot count the same requests; one whose begin was lost equals no other.
        occurrence = f"{writer.boot_id}/{index}" if index >= 0 else f"unknown {self.number}"
        key, source = self.state.begin(writer, request_id, occurrence, begin, self.now)
        writer.live[request_id] = (key, source)
        if len(writer.live) > MAX_LIVE:
            former, oldest = writer.live.pop(next(iter(writer.live)))
            self.slots.forget_run(oldest.blocks, 0, FOREVER)
            oldest.lose_track()
            self._rejoin(former)
            self._touch(former, oldest)
        self._touch(key, source)
        return key, source

    def _touch(self, key: TraceKey, source: Source) -> None:
        # A trace of the same id that began after a deletion is another one.
        if not source.forgotten:
            self.touched[key] = None
            self._fresh.add(key)

    def _rejoin(self, key: TraceKey) -> None:
        if trace := self.state.traces.traces.get(key):
            trace.rejoin()

    def _take(
        self, source: Source, blocks: list[int], num_computed_tokens: int, num_external_tokens: int
    ) -> None:
        """Give a request its blocks; the first tokens in them are cached."""
        known = num_computed_tokens - num_external_tokens
        source.blocks, source.cached = list(blocks[: self.slots.num_blocks]), known
        source.written, source.tentative = known, 0
        source.drafts.truncate(0)
        if num_external_tokens and source.placed:
            source.external = True
            source.not_know([(known, num_computed_tokens)])
        if size := self.slots.block_size:
            new = -(-known // size)
            self.slots.forget_run(source.blocks, known, new * size)
            self.slots.erase(source.blocks[new:])

    def _inherit(self, source: Source) -> Iterator[None]:
        """Inherit the rows of the cached tokens.

        Other requests may have written into the last cached block since the request began.
        """
        known, source.cached = source.cached, 0
        blocks = np.asarray(source.blocks, np.uint32)
        if source.placed:
            for _ in self.state.inherit(self.writer, source, blocks, known):
                yield from self._step()
        size = self.slots.block_size
        if size and known % size:
            self.slots.forget_run(source.blocks, known, known + size - known % size)

    def _rows(self, key: TraceKey, source: Source, span: Span, step: int, tentative: int) -> None:
        if span.position < source.attempts[-1].end:
            self._drop(key, source, span.position)
        self._confirm(source, span.stop - tentative)
        source.compute(span)
        source.tentative = tentative
        if tentative:
            sure = max(span.position, span.stop - tentative)
            if not len(source.drafts):
                source.drafts_since = self.slots.erasures
            source.drafts.append(span.cut(sure, span.stop))
            source.draft_step = step
            if sure == span.position:
                return
            span = span.cut(span.position, sure)
        self._name(source, span, step)

    def _confirm(self, source: Source, stop: int) -> None:
        """Confirm drafts before a position: their slots name them from now on."""
        if not source.tentative:
            return
        left = max(0, source.attempts[-1].end - stop)
        if source.tentative > left:
            source.tentative = left
            for span in source.drafts.between(0, stop):
                where = source.blocks, span.position, span.stop
                for start, end in self.slots.kept(*where, source.drafts_since):
                    self._name(source, span.cut(start, end), source.draft_step)
            source.drafts.remove(0, stop)

    def _name(self, source: Source, span: Span, step: int) -> None:
        """Let the slots of a request name rows."""
        if source.blocks:
            source.written = max(source.written, span.stop)
            self.slots.write_run(source.blocks, span, step)

    def _release(self, source: Source, position: int) -> None:
        """Release the blocks of a request; rows at and after a position were not kept."""
        self._confirm(source, position)
        self.slots.forget_run(source.blocks, position, FOREVER)
        source.tentative, source.cached, source.blocks = 0, 0, []
        source.drafts.truncate(0)

    def _drop(self, key: TraceKey, source: Source, position: int) -> None:
        """Remove rows at and after a position, and forget their slots."""
        self._remove(key, source, position)
        self._forget(source, position, FOREVER)

    def _remove(self, key: TraceKey, source: Source, position: int) -> None:
        source.remove(position)
        if position < source.loaded[1]:  # rows that it took from slots may go
            self._rejoin(key)

    def _forget(self, source: Source, start: int, stop: int) -> None:
        # Slots that the request never wrote are unknown already.
        last = min(stop, source.written)
        if start < last:
            self.slots.forget_run(source.blocks, start, last)
            if last == source.written:
                source.written = start
