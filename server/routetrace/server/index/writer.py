"""A writer in its newest epoch, and its stored form."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator, Mapping
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

#: Chunks whose checksums are kept to recognize resent ones: four times those that a stream may have
#: under way.
DEDUP_WINDOW = 128


class Recent:
    """Checksums of the last chunks of a writer, 8 bytes for each."""

    __slots__ = ("_last", "_sums")

    def __init__(self) -> None:
        self._last = 0
        self._sums = array("I")  # two for each chunk up to the last one, without a gap

    def add(self, sequence: int, sums: Sums) -> None:
        """Add the chunk that is applied; those before a gap are forgotten."""
        if sequence != self._last + 1:
            del self._sums[:]
        self._last = sequence
        self._sums.extend(sums)
        del self._sums[: -2 * DEDUP_WINDOW]

    def get(self, sequence: int) -> Sums | None:
        """Return the checksums of a chunk; None if they are not known any more."""
        at = len(self._sums) - 2 * (self._last - sequence + 1)
        return Sums(*self._sums[at : at + 2]) if 0 <= at < len(self._sums) else None

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        """Yield sequence numbers and checksums, in order."""
        first = self._last + 1 - len(self._sums) // 2
        for index, sums in enumerate(zip(self._sums[::2], self._sums[1::2], strict=True)):
            yield first + index, *sums


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
    recent: Recent = field(default_factory=Recent)


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
    message.recent = b"".join(_RECENT.pack(*each) for each in writer.recent)
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
        writer.recent.add(number, Sums(header, payload))
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
