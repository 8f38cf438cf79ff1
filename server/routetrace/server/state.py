"""Everything the server knows beside the stored bytes.

It is derived: every change is a record in the store, which `apply.py` applies, in order, after it
was committed, and again, in the same order, when the server starts. Snapshots spare it old ones.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import msgpack
import numpy as np

from routetrace.server.record import Sums, layout_from_hex, layout_to_hex
from routetrace.server.slot_map import SlotMap
from routetrace.server.spans import Span
from routetrace.server.trace_index import (
    Lost,
    Source,
    Trace,
    TraceIndex,
    TraceKey,
    WriterKey,
    dump_source,
    load_source,
)
from routetrace.v1 import routetrace_pb2 as pb
from routetrace.v1.errors import Corrupt
from routetrace.v1.layout import RoutingLayout
from routetrace.v1.records import Provenance

#: Of snapshots.
_FORMAT = 2


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
    live: dict[str, tuple[TraceKey, Source]] = field(default_factory=dict)
    """Requests that have not ended, by engine request id."""
    recent: OrderedDict[int, Sums] = field(default_factory=OrderedDict)


class Frames(NamedTuple):
    """Where the frames of a stored chunk begin: frame i is offsets[i] .. offsets[i + 1]."""

    offsets: np.ndarray[Any, np.dtype[np.uint32]]
    layout: RoutingLayout


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
                source.lost.append(Lost(at, run.position, pb.MISSING_REASON_KV_UNKNOWN))
            spans.append(Span(*run, Provenance.CACHED))
            at = run.position + run.length
        if at < stop:
            source.lost.append(Lost(at, stop, pb.MISSING_REASON_KV_UNKNOWN))

    def touch(self, trace: Trace, now: float) -> None:
        """Notes that a trace changed."""
        trace.changes += 1
        trace.updated = now
        trace.expires = max(trace.expires, now + trace.ttl)
        self.touched.add(trace.key)

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

    def live_chunks(self) -> set[int]:
        """Chunks that a trace or a live slot points into."""
        live = self.traces.chunks()
        for writer in self.writers.values():
            live.update(writer.slots.chunks().tolist())
        return live

    # ------------------------------------------------------------------ snapshots

    def dump(self) -> bytes:
        """The whole state, for a snapshot that covers the records up to `number`."""
        data = {
            "format": _FORMAT,
            "number": self.number,
            "traces": self.traces.dump(),
            "writers": [self._dump_writer(w) for w in self.writers.values()],
            "epochs": [(tuple(k), v) for k, v in self.epochs.items()],
            "frames": [
                (n, f.offsets.tobytes(), layout_to_hex(f.layout)) for n, f in self.frames.items()
            ],
        }
        return cast("bytes", msgpack.packb(data))

    def _dump_writer(self, writer: Writer) -> dict[str, Any]:
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
                (name, *key, None if key in self.traces.traces else dump_source(source, {}))
                for name, (key, source) in writer.live.items()
            ],
            "recent": [(n, *sums) for n, sums in writer.recent.items()],
        }

    def load(self, packed: bytes) -> None:
        """Becomes what `dump` saw."""
        data = msgpack.unpackb(packed)
        if data.get("format") != _FORMAT:
            raise Corrupt(field="format", value=data.get("format"), expected=str(_FORMAT))
        self.number = data["number"]
        self.traces = TraceIndex.load(data["traces"])
        self.epochs = {WriterKey(*k): v for k, v in data["epochs"]}
        self.writers = {}
        for w in data["writers"]:
            writer = self._load_writer(w)
            self.writers[writer.key] = writer
        layouts: dict[str, RoutingLayout] = {}
        for number, offsets, layout in data["frames"]:
            if layout not in layouts:
                layouts[layout] = layout_from_hex(layout)
            self.frames[number] = Frames(np.frombuffer(offsets, np.uint32), layouts[layout])

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
