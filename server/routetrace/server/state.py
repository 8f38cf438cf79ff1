"""Everything the server knows beside the stored bytes.

It is derived: every change is a record in the store, which `apply.py` applies, in order, after it
was committed, and again, in the same order, when the server starts. Snapshots spare it old ones.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple, cast

import msgpack
import numpy as np
from google.protobuf.message import DecodeError

from routetrace.server.record import Sums, layout_from_hex, layout_to_hex
from routetrace.server.slot_map import SlotMap
from routetrace.server.spans import Span
from routetrace.server.trace_index import (
    Source,
    Trace,
    TraceIndex,
    TraceKey,
    WriterKey,
    dump_source,
    dump_trace,
    load_source,
    load_trace,
)
from routetrace.v1 import routetrace_pb2 as pb
from routetrace.v1.errors import Corrupt, InvalidArgument
from routetrace.v1.layout import RoutingLayout
from routetrace.v1.records import Provenance

#: Of snapshots.
_FORMAT = 3
#: Bytes of a piece of a snapshot, about.
_PIECE_BYTES = 1 << 20


@dataclass(slots=True, eq=False)
class Writer:
    """One agent's part of one engine, in its current epoch."""

    key: WriterKey
    epoch: int
    boot_id: str
    """Of the engine; shards with the same one are parts of the same engine."""
    opened: int
    """Number of the record that opened the epoch."""
    layout: RoutingLayout
    slots: SlotMap
    sequence: int = 0
    """Last applied sequence number."""
    step: int = 0
    """Last engine step of which rows were applied."""
    torn: bool = False
    """Whether records before this moment of a replay are damaged: some may be its own."""
    live: dict[str, tuple[TraceKey, Source]] = field(default_factory=dict)
    """Requests that have not ended, by engine request id."""
    recent: OrderedDict[int, Sums] = field(default_factory=OrderedDict)


class Frames(NamedTuple):
    """Where the frames of a stored chunk begin: frame i is offsets[i] .. offsets[i + 1]."""

    offsets: np.ndarray[Any, np.dtype[np.uint32]]
    layout: RoutingLayout
    run: str

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""
        return int(self.offsets[-1])


class State:
    """Writers with their slot maps, the trace index, and the directory of stored chunks."""

    def __init__(self, default_ttl: float) -> None:
        self.default_ttl = default_ttl
        self.number = 0
        """Last applied record."""
        self.traces = TraceIndex()
        self.writers: dict[WriterKey, Writer] = {}
        self.epochs: dict[WriterKey, int] = {}
        """Highest epoch ever granted, also to writers that are forgotten since."""
        self.frames: dict[int, Frames] = {}
        """Stored chunks, by record number."""
        self.run_bytes: Counter[str] = Counter()
        """Their bytes, by run."""
        self._layouts: dict[RoutingLayout, int] = {}
        self.touched: set[TraceKey | WriterKey] = set()
        """What changed since the last look; whoever wakes those who wait empties it."""

    def begin(
        self, writer: Writer, request_id: str, occurrence: str, begin: pb.RequestBegin, now: float
    ) -> tuple[Trace, Source]:
        """Enters a new source into the trace index."""
        source = Source(
            writer.key, writer.epoch, request_id, occurrence, writer.layout, begin.prompt_len
        )
        trace = self.traces.begin(
            (writer.key.run, begin.trace_id or request_id),
            source,
            labels=begin.labels,
            ttl=begin.ttl_seconds or self.default_ttl,
            now=now,
        )
        return trace, source

    def inherit(
        self, writer: Writer, source: Source, block_ids: list[int], stop: int, last_step: int = 0
    ) -> None:
        """Gives a source the rows that the KV cache already holds for positions [0, stop)."""
        spans = source.attempts[-1]
        at = 0
        for run in writer.slots.resolve(block_ids, 0, stop, last_step):
            if run.position > at:
                source.lose(at, run.position, pb.MISSING_REASON_KV_UNKNOWN)
            spans.append(Span(*run, Provenance.CACHED))
            at = run.position + run.length
        if at < stop:
            source.lose(at, stop, pb.MISSING_REASON_KV_UNKNOWN)

    def touch(self, trace: Trace, now: float) -> None:
        """Notes that a trace changed, and that it lives on."""
        self.changed(trace)
        trace.updated = now
        trace.expires = max(trace.expires, now + trace.ttl)

    def changed(self, trace: Trace) -> None:
        """Notes that what is known of a trace, or packed of it, is no longer true."""
        trace.changes += 1
        trace.packed = None
        self.touched.add(trace.key)

    def hold(self, number: int, frames: Frames) -> None:
        """A chunk is stored."""
        self.frames[number] = frames
        self._count(frames.run, frames.nbytes)

    def release(self, number: int) -> Frames:
        """A chunk is stored no longer."""
        frames = self.frames.pop(number)
        self._count(frames.run, -frames.nbytes)
        return frames

    def _count(self, run: str, nbytes: int) -> None:
        self.run_bytes[run] += nbytes
        if not self.run_bytes[run]:
            del self.run_bytes[run]

    def forget(self, key: TraceKey) -> bool:
        """Drops a trace; requests that still run into it go on unseen."""
        self.touched.add(key)
        return self.traces.remove(key)

    def engine_writers(self, run: str, engine_id: str) -> list[Writer]:
        """The shards of an engine in its newest boot, in order."""
        found = [
            w
            for key, w in sorted(self.writers.items())
            if (key.run, key.engine_id) == (run, engine_id)
        ]
        # A shard that was not heard of since a restart knows slots that mean nothing any more.
        newest = max(found, key=lambda w: w.opened, default=None)
        return [w for w in found if newest and w.boot_id == newest.boot_id]

    def marks(self) -> Iterator[Iterable[int]]:
        """Chunks that live slots and traces point into, part by part.

        Between two parts records may be applied: of the chunks that were there before the first
        part, all that are pointed into at the end are named. A trace takes over rows from slots,
        never the other way round, so slots come first, and then all traces that there are by then.
        """
        for writer in [*self.writers.values()]:
            yield writer.slots.chunks().tolist()
        for trace in [*self.traces.traces.values()]:
            yield trace.chunks()

    def pack(self) -> Iterator[None]:
        """Prepares a snapshot, trace by trace: those that do not change until then are done."""
        for trace in [*self.traces.traces.values()]:
            if trace.packed is None:
                self._pack(trace)
                yield

    def _pack(self, trace: Trace) -> bytes:
        for source in trace.sources:
            self._layout_number(source.layout)
        trace.packed = _packed("trace", dump_trace(trace, self._layouts))
        return trace.packed

    def _layout_number(self, layout: RoutingLayout) -> int:
        return self._layouts.setdefault(layout, len(self._layouts))

    # ------------------------------------------------------------------ snapshots

    def dump(self) -> Iterator[bytes]:
        """The whole state, in pieces, for a snapshot that covers the records up to `number`.

        A stream of [kind, value] items, in which layouts come before what names them by number, and
        traces before the writers whose live requests are in them. It is the state of the moment of
        the call; the pieces may be taken later, and in another thread.
        """
        traces = [trace.packed or self._pack(trace) for trace in self.traces.traces.values()]
        for layout in {id(f.layout): f.layout for f in self.frames.values()}.values():
            self._layout_number(layout)
        items = [
            _packed("head", (_FORMAT, self.number, self.traces.serial)),
            *(_packed("layout", layout_to_hex(layout)) for layout in self._layouts),
            *traces,
            *(_packed("writer", self._dump_writer(writer)) for writer in self.writers.values()),
            _packed("epochs", [(tuple(key), epoch) for key, epoch in self.epochs.items()]),
        ]
        layouts = dict(self._layouts)
        frames = (
            _packed("frames", (number, f.offsets.tobytes(), layouts[f.layout], f.run))
            for number, f in [*self.frames.items()]
        )
        return _pieces(chain(items, frames))

    def _dump_writer(self, writer: Writer) -> dict[str, Any]:
        own = {writer.layout: 0}
        return {
            "key": tuple(writer.key),
            "epoch": writer.epoch,
            "boot_id": writer.boot_id,
            "opened": writer.opened,
            "layout": layout_to_hex(writer.layout),
            "slots": writer.slots.dump(),
            "sequence": writer.sequence,
            "step": writer.step,
            # A request whose trace was forgotten runs on unseen: its blocks still count.
            "live": [
                (name, *key, None if key in self.traces.traces else dump_source(source, own))
                for name, (key, source) in writer.live.items()
            ],
            "recent": [(n, *sums) for n, sums in writer.recent.items()],
        }

    def load(self, pieces: Iterable[bytes]) -> None:
        """Becomes what `dump` saw; stays as it is if that can not be.

        Raises:
            Corrupt: if it is no snapshot.
            InvalidArgument: if it is one of another version.
        """
        new = State(self.default_ttl)
        unpacker = msgpack.Unpacker(strict_map_key=False, max_buffer_size=0)
        layouts: list[RoutingLayout] = []
        kind = ""
        try:
            for piece in pieces:
                unpacker.feed(piece)
                for kind, value in unpacker:
                    new._load_item(kind, value, layouts)
        except (KeyError, IndexError, OverflowError, TypeError, ValueError, DecodeError) as error:
            if isinstance(error, InvalidArgument):
                raise
            raise Corrupt(f"the snapshot can not be read: {kind}: {error}") from error
        if not kind:
            raise Corrupt("the snapshot is empty")
        self.number, self.traces, self.writers = new.number, new.traces, new.writers
        self.epochs, self.frames, self.run_bytes = new.epochs, new.frames, new.run_bytes
        self._layouts = new._layouts

    def _load_item(self, kind: str, value: Any, layouts: list[RoutingLayout]) -> None:
        if kind == "head":
            if value[0] != _FORMAT:
                raise InvalidArgument(
                    field="snapshot format", value=value[0], expected=str(_FORMAT)
                )
            _, self.number, self.traces.serial = value
        elif kind == "layout":
            layouts.append(layout_from_hex(value))
            self._layout_number(layouts[-1])
        elif kind == "trace":
            self.traces.add(load_trace(value, layouts))
        elif kind == "writer":
            writer = self._load_writer(value)
            self.writers[writer.key] = writer
        elif kind == "epochs":
            self.epochs = {WriterKey(*key): epoch for key, epoch in value}
        elif kind == "frames":
            number, offsets, layout, run = value
            self.hold(number, Frames(np.frombuffer(offsets, np.uint32), layouts[layout], run))

    def _load_writer(self, data: dict[str, Any]) -> Writer:
        key = WriterKey(*data["key"])
        writer = Writer(
            key,
            data["epoch"],
            data["boot_id"],
            data["opened"],
            layout_from_hex(data["layout"]),
            SlotMap.load(data["slots"]),
        )
        writer.sequence, writer.step = data["sequence"], data["step"]
        writer.recent = OrderedDict((n, Sums(h, p)) for n, h, p in data["recent"])
        for request_id, run, trace_id, source in data["live"]:
            trace = self.traces.traces.get((run, trace_id))
            known = (
                s
                for s in reversed(trace.sources if trace else [])
                if (s.writer, s.epoch, s.request_id) == (key, writer.epoch, request_id)
            )
            live = next(known, None) if source is None else load_source(source, [writer.layout])
            if live:
                writer.live[request_id] = ((run, trace_id), live)
        return writer


def _packed(kind: str, value: Any) -> bytes:
    return cast("bytes", msgpack.packb((kind, value)))


def _pieces(items: Iterable[bytes]) -> Iterator[bytes]:
    piece = bytearray()
    for item in items:
        piece += item
        if len(piece) >= _PIECE_BYTES:
            yield bytes(piece)
            piece.clear()
    if piece:
        yield bytes(piece)
