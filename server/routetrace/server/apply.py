"""Applies committed records to the state: the one way in which it changes.

Called for each record in order after it was committed, and again when the server starts, so that
recovery is no second code path. Ops of a chunk say what happened in the engine, in the order in
which it happened; what could be wrong with them was refused before they were stored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from routetrace.server import refs
from routetrace.server.chunk import (
    BEGIN,
    BLOCKS,
    DIGESTS,
    EXTERNAL,
    FINISH,
    LOST,
    PREEMPT,
    RESET,
    RESUME,
    REWIND,
    ROWS,
    ParsedChunk,
    parse_header,
)
from routetrace.server.record import Sums, decode_record, hash_of, layout_from_hex
from routetrace.server.slot_map import SlotMap, SlotRun
from routetrace.server.spans import FOREVER, Span, SpanList
from routetrace.server.state import Frames, State, Writer
from routetrace.server.trace_index import Source, TraceKey, WriterKey
from routetrace.v1 import routetrace_pb2 as pb
from routetrace.v1.layout import RoutingLayout
from routetrace.v1.records import DIGEST, NO_REQUEST, Provenance, unpack

#: Sequence numbers whose checksums are remembered, so that a resent chunk is known again.
DEDUP_WINDOW = 1024

#: Passes over one request, at most; the last one then starts anew.
MAX_ATTEMPTS = 256

#: Requests of one writer that have not ended, at most; the oldest is taken for lost.
MAX_LIVE = 1 << 16

#: In place of the frames of a chunk that counts for nothing: its space is given back.
NO_FRAMES = Frames(np.zeros(1, np.uint32), RoutingLayout((0,), 1, 1, 1), "")

Facts = dict[str, Any]


def apply_record(state: State, number: int, record: bytes, chunk: ParsedChunk | None = None) -> Any:
    """Applies one committed record.

    Args:
        state: what changes.
        number: of the record.
        record: its header.
        chunk: what the ChunkHeader in it holds, where that was parsed before.

    Returns:
        What this kind of record has to say: the Writer for open, whether it counted for a chunk,
        the number of traces for delete and renew.
    """
    facts, header = decode_record(record)
    state.number = number
    if facts["kind"] == "chunk":
        return _apply_chunk(state, number, facts, header, chunk)
    return _CONTROL[facts["kind"]](state, facts)


def _apply_open(state: State, facts: Facts) -> Writer:
    key = WriterKey(*facts["writer"])
    old = state.writers.get(key)
    if old:
        state.touched.update(trace_key for trace_key, _ in old.live.values())
    slots = SlotMap(facts["block_size"], facts["num_blocks"])
    layout = layout_from_hex(facts["layout"])
    writer = Writer(key, facts["epoch"], facts["boot_id"], state.number, layout, slots)
    state.writers[key] = writer
    state.epochs[key] = writer.epoch
    return writer


def _apply_bind(state: State, facts: Facts) -> None:
    """Makes a finished request of what the slots of its blocks hold."""
    begin = pb.RequestBegin.FromString(bytes.fromhex(facts["begin"]))
    run, engine_id, request_id = facts["run"], facts["engine_id"], facts["request_id"]
    blocks, num_tokens, step = facts["block_ids"], facts["num_tokens"], facts["step"]
    asked = hash_of([request_id, blocks, num_tokens, step])
    for writer in state.engine_writers(run, engine_id):
        trace, source = state.begin(writer, request_id, f"bind/{asked}", begin, facts["time"])
        source.ended, source.num_tokens = True, num_tokens
        state.inherit(writer, source, blocks, facts["num_computed_tokens"], step)
        source.add_digests(unpack(bytes.fromhex(facts["digests"]), DIGEST, "token_digests"))
        # Asking the same again replaces the answer: slots get fuller.
        for i, other in enumerate(trace.sources[:-1]):
            if (other.writer, other.occurrence) == (source.writer, source.occurrence):
                trace.sources[i] = trace.sources.pop()
                break
        state.touch(trace, facts["time"])


def _apply_delete(state: State, facts: Facts) -> int:
    return sum(state.forget((facts["run"], trace_id)) for trace_id in facts["trace_ids"])


def _apply_renew(state: State, facts: Facts) -> int:
    traces = [state.traces.traces.get((facts["run"], i)) for i in facts["trace_ids"]]
    found = [trace for trace in traces if trace]
    for trace in found:
        trace.ttl = facts["ttl"]
        trace.expires = facts["time"] + trace.ttl
        trace.packed = None
    return len(found)


_CONTROL: dict[str, Callable[[State, Facts], Any]] = {
    "open": _apply_open,
    "bind": _apply_bind,
    "delete": _apply_delete,
    "renew": _apply_renew,
}


def _apply_chunk(
    state: State, number: int, facts: Facts, header: bytes, chunk: ParsedChunk | None
) -> bool:
    writer = state.writers.get(WriterKey(*facts["writer"]))
    # A record that does not continue its writer was never acknowledged: an earlier one of the same
    # stream failed to commit, and the agent sends both again. Nothing will point into this one.
    if writer is None or writer.epoch != facts["epoch"] or not _continues(writer, facts):
        state.hold(number, NO_FRAMES)
        return False
    if writer.sequence + 1 < facts["sequence"]:
        _lose_track(state, writer)
    if chunk is None:
        chunk = parse_header(header, writer.layout, writer.slots)
    if len(chunk.frame_lengths):
        offsets = np.zeros(len(chunk.frame_lengths) + 1, np.uint32)
        np.cumsum(chunk.frame_lengths, out=offsets[1:])
        state.hold(number, Frames(offsets, writer.layout, writer.key.run))
    _Applier(state, writer, chunk, number, facts["time"]).run()
    writer.sequence = facts["sequence"]
    writer.recent[writer.sequence] = Sums(*facts["sums"])
    if len(writer.recent) > DEDUP_WINDOW:
        writer.recent.popitem(last=False)
    state.touched.add(writer.key)
    return True


def _continues(writer: Writer, facts: Facts) -> bool:
    """Whether a chunk is the next one of its writer, or the next one that is left."""
    behind = facts["sequence"] - writer.sequence - 1
    return behind == 0 or (behind > 0 and writer.torn)


def _lose_track(state: State, writer: Writer) -> None:
    """Chunks of a writer are damaged: nobody knows what happened to its blocks and requests."""
    writer.slots.forget_all()
    for key, source in writer.live.values():
        if trace := state.traces.traces.get(key):
            state.changed(trace)
        source.remove(source.attempts[-1].end - source.tentative, FOREVER)
        source.lose(source.end, FOREVER, pb.MISSING_REASON_CORRUPT)
    writer.live.clear()


class _Applier:
    """Applies the ops of one chunk, in order."""

    def __init__(
        self, state: State, writer: Writer, chunk: ParsedChunk, number: int, now: float
    ) -> None:
        self.state = state
        self.writer = writer
        self.slots = writer.slots
        self.chunk = chunk
        self.number = number
        self.now = now

    def run(self) -> None:
        touched: dict[TraceKey, None] = {}
        try:
            self._run(touched)
        finally:  # what was remembered of a trace must not outlive half a change
            for key in touched:
                trace = self.state.traces.traces.get(key)
                if trace:
                    self.state.touch(trace, self.now)

    def _run(self, touched: dict[TraceKey, None]) -> None:
        for op in self.chunk.ops:
            kind, _, arg, request, position, count, frame, row, at, num, step, version, value = op
            blocks = self.chunk.block_ids[at : at + num]
            if kind == ROWS:
                self.writer.step = max(self.writer.step, step)
                ref = refs.pack(self.number, frame, row)
                if request == NO_REQUEST:
                    slots = self.chunk.slots[at : at + count].astype(np.int64)
                    self.slots.write(slots, ref, version, step)
                    continue
                key, source = self._source(request)
                touched[key] = None
                span = Span(position, count, ref, version, Provenance.FORWARD)
                self._rows(source, span, step, value)
            elif kind == EXTERNAL:
                self.slots.forget_blocks(blocks)
                continue
            elif kind == RESET:
                self.slots.forget_all()
                continue
            elif kind == BEGIN:
                key, source = self._begin(request, self.chunk.begins[arg], value)
                touched[key] = None
                self._take(source, blocks, position, count)
            else:
                key, source = self._source(request)
                touched[key] = None
                if kind == BLOCKS:
                    self.slots.forget_blocks(blocks)
                    if source.placed:
                        # A request holds no block twice.
                        source.blocks.extend(blocks[: self.slots.num_blocks - len(source.blocks)])
                elif kind == REWIND:
                    self._drop(source, position)
                elif kind == PREEMPT:
                    self._drop(source, position)
                    source.tentative, source.blocks = 0, []
                elif kind == RESUME:
                    if len(source.attempts) < MAX_ATTEMPTS:
                        source.attempts.append(SpanList())
                    else:
                        source.attempts[-1] = SpanList()
                    source.tentative = 0
                    self._take(source, blocks, position, count)
                elif kind == FINISH:
                    source.ended, source.num_tokens, source.finish_reason = True, count, arg
                    source.tentative, source.blocks = 0, []
                    del self.writer.live[self.chunk.request_ids[request]]
                    self._rejoin(key)
                elif kind == LOST:
                    stop = position + count if count else FOREVER
                    source.lose(position, stop, arg)
                    # What stood there before was computed again, by the pass whose rows are lost.
                    source.remove(position, stop)
                    self._forget(source, position, stop)
                elif kind == DIGESTS:
                    source.add_digests(self.chunk.token_digests[row : row + count])
                    self._rejoin(key)

    def _source(self, request: int) -> tuple[TraceKey, Source]:
        """The live request; one that never began (its begin was lost) begins here, unnamed."""
        request_id = self.chunk.request_ids[request]
        if known := self.writer.live.get(request_id):
            return known
        key, source = self._begin(request, pb.RequestBegin(), -1)
        source.placed = False
        return key, source

    def _begin(self, request: int, begin: pb.RequestBegin, index: int) -> tuple[TraceKey, Source]:
        writer, request_id = self.writer, self.chunk.request_ids[request]
        # Shards of one boot count the same requests; one that never began is like no other.
        occurrence = f"{writer.boot_id}/{index}" if index >= 0 else f"unknown/{self.number}"
        trace, source = self.state.begin(writer, request_id, occurrence, begin, self.now)
        writer.live[request_id] = (trace.key, source)
        if len(writer.live) > MAX_LIVE:
            del writer.live[next(iter(writer.live))]
        return trace.key, source

    def _rejoin(self, key: TraceKey) -> None:
        if trace := self.state.traces.traces.get(key):
            trace.rejoin()

    def _take(
        self, source: Source, blocks: list[int], num_computed_tokens: int, num_external_tokens: int
    ) -> None:
        """The request gets its blocks; the first tokens in them are computed already."""
        source.blocks, source.placed = list(blocks[: self.slots.num_blocks]), True
        source.written = FOREVER
        known = num_computed_tokens - num_external_tokens
        self.state.inherit(self.writer, source, blocks, known)
        if num_external_tokens:
            source.external = True
            source.lose(known, num_computed_tokens, pb.MISSING_REASON_KV_UNKNOWN)
        self._forget(source, known, FOREVER)

    def _rows(self, source: Source, span: Span, step: int, tentative: int) -> None:
        if span.position < source.attempts[-1].end:
            self._drop(source, span.position)
        source.attempts[-1].append(span)
        source.tentative = tentative
        if source.blocks:
            source.written = max(source.written, span.stop)
            self.slots.write_run(source.blocks, SlotRun(*span[:4]), step)

    def _drop(self, source: Source, position: int) -> None:
        """Rows at and after a position were not kept."""
        source.remove(position, FOREVER)
        self._forget(source, position, FOREVER)

    def _forget(self, source: Source, start: int, stop: int) -> None:
        # What it never wrote is forgotten already, however often it is taken back.
        last = min(stop, source.written)
        if start < last:
            self.slots.forget_run(source.blocks, start, last)
            if last == source.written:
                source.written = start
