"""A writer in its newest epoch, and its stored form."""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field

from routetrace.common.layout import ModelLayout
from routetrace.server.index.records.record import (
    Sums,
    key_to_stored,
    layout_from_stored,
    layout_to_stored,
)
from routetrace.server.index.slot_map import SlotMap
from routetrace.server.index.traces.sources import (
    Source,
    TraceKey,
    WriterKey,
    dump_source,
    load_source,
)
from routetrace.server.index.traces.trace import Trace
from routetrace.stored import format5_pb2 as stored

#: Sequence number and checksums of a chunk.
_RECENT = struct.Struct("<QII")


@dataclass(slots=True, eq=False)
class Writer:
    """Current epoch of one shard of one engine."""

    key: WriterKey
    epoch: int
    boot_id: str
    """Boot of the engine; shards with equal boot ids belong together."""
    opened: int
    """Number of the record that opened the epoch."""
    layout: ModelLayout
    slots: SlotMap
    token: str = ""
    """Name of the token that opened the epoch; "" without one."""
    sequence: int = 0
    """Last applied sequence number."""
    step: int = 0
    """Last engine step with applied rows."""
    weight_version: int | None = None
    """That of its last rows; None if it is unknown, or before the first row."""
    model: int = 0
    """Hash of its model; 0: unknown."""
    says_unknown_versions: bool = True
    """Whether rows of an unknown weight version say so; else version 0 is unknown."""
    closed: bool = False
    """Whether its agent was closed."""
    torn: bool = False
    """Whether a replay has passed damaged records, which may be of this writer."""
    live: dict[str, tuple[TraceKey, Source]] = field(default_factory=dict)
    """Requests that have not ended, by engine request id."""
    recent: OrderedDict[int, Sums] = field(default_factory=OrderedDict)


def dump_writer(message: stored.Writer, writer: Writer) -> None:
    """Set the stored form of a writer."""
    message.key.CopyFrom(key_to_stored(writer.key))
    message.epoch, message.boot_id = writer.epoch, writer.boot_id
    message.opened, message.token = writer.opened, writer.token
    message.layout.CopyFrom(layout_to_stored(writer.layout))
    writer.slots.dump(message.slots)
    message.sequence, message.step = writer.sequence, writer.step
    if writer.weight_version is not None:
        message.weight_version = writer.weight_version
    message.model, message.says_unknown_versions = writer.model, writer.says_unknown_versions
    message.closed = writer.closed
    message.recent = b"".join(_RECENT.pack(n, *sums) for n, sums in writer.recent.items())
    for request_id, ((_, trace_id), source) in writer.live.items():
        live = message.live.add(request_id=request_id, trace_id=trace_id)
        if source.forgotten:  # a request without a trace still holds blocks
            dump_source(live.source, source, {writer.layout: 0})


def load_writer(message: stored.Writer, traces: Mapping[TraceKey, Trace]) -> Writer:
    """Return the writer of a stored form.

    Args:
        message: stored form.
        traces: loaded traces, with the sources of its live requests.
    """
    run = message.key.run
    writer = Writer(
        WriterKey(run, message.key.engine_id, message.key.shard),
        message.epoch,
        message.boot_id,
        message.opened,
        layout_from_stored(message.layout),
        SlotMap.load(message.slots),
        message.token,
        message.sequence,
        message.step,
        message.weight_version if message.HasField("weight_version") else None,
        message.model,
        message.says_unknown_versions,
        message.closed,
    )
    for number, header, payload in _RECENT.iter_unpack(message.recent):
        writer.recent[number] = Sums(header, payload)
    for live in message.live:
        key = run, live.trace_id
        source = _live_source(writer, live, traces.get(key))
        if source:
            writer.live[live.request_id] = key, source
    return writer


def _live_source(writer: Writer, live: stored.Live, trace: Trace | None) -> Source | None:
    if live.HasField("source"):
        return load_source(live.source, writer.key.run, [writer.layout])
    wanted = writer.key, writer.epoch, live.request_id
    for source in reversed(trace.sources if trace else []):
        if (source.writer, source.epoch, source.request_id) == wanted:
            return source
    return None
