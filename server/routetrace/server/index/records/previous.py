"""Format 4: the records and snapshots of the previous version, as messages of the present one.

The only module that holds anything of it: JSON facts in records, msgpack items in snapshots, and
protobuf messages in hex in both.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgpack
import numpy as np
from google.protobuf.message import DecodeError

from routetrace.codec.records import U32
from routetrace.server.index.records.format import PREVIOUS, too_old
from routetrace.stored import format5_pb2 as stored
from routetrace.v1 import routetrace_pb2 as pb

_HEAD = struct.Struct("<I")
_RECENT = struct.Struct("<QII")
_INVALID = (KeyError, IndexError, TypeError, ValueError, struct.error)


def read_record(data: bytes) -> stored.Record:
    """Return a record: the size of its facts, facts in JSON, and the ChunkHeader of a chunk.

    Raises:
        DecodeError: if it is damaged.
    """
    try:
        (size,) = _HEAD.unpack_from(data)
        body = _HEAD.size
        facts = json.loads(data[body : body + size])
        kind = facts.pop("kind")
        record = stored.Record(time=facts.pop("time"))
        _CHANGES[kind](getattr(record, kind), facts, bytes(data[body + size :]))
    except _INVALID as error:
        raise DecodeError(f"not a record of format {PREVIOUS}: {error!r}") from error
    return record


def _read_open(change: stored.Open, facts: dict[str, Any], _: bytes) -> None:
    layout = _layout(facts.pop("layout"))
    change.MergeFrom(stored.Open(writer=_key(facts.pop("writer")), layout=layout, **facts))


def _read_chunk(change: stored.Chunk, facts: dict[str, Any], header: bytes) -> None:
    change.writer.MergeFrom(_key(facts["writer"]))
    change.epoch, change.sequence = facts["epoch"], facts["sequence"]
    change.header_crc32, change.payload_crc32 = facts["sums"]
    change.header = header


def _read_bind(change: stored.Bind, facts: dict[str, Any], _: bytes) -> None:
    begin = pb.RequestBegin.FromString(bytes.fromhex(facts.pop("begin")))
    change.MergeFrom(
        stored.Bind(
            block_ids=_u32(facts.pop("block_ids")),
            digests=bytes.fromhex(facts.pop("digests")),
            trace_id=begin.trace_id,
            prompt_len=begin.prompt_len,
            labels=begin.labels,
            ttl_seconds=begin.ttl_seconds,
            **facts,
        )
    )


def _read_delete(change: stored.Delete, facts: dict[str, Any], _: bytes) -> None:
    change.MergeFrom(stored.Delete(**facts))


def _read_renew(change: stored.Renew, facts: dict[str, Any], _: bytes) -> None:
    change.MergeFrom(stored.Renew(**facts))


_CHANGES: dict[str, Callable[[Any, dict[str, Any], bytes], None]] = {
    "open": _read_open,
    "chunk": _read_chunk,
    "bind": _read_bind,
    "delete": _read_delete,
    "renew": _read_renew,
}


# ---------------------------------------------------------------------------- snapshots


def read_snapshot(pieces: Iterable[bytes]) -> Iterator[stored.Piece]:
    """Yield the items of a snapshot, each as a piece: a stream of [kind, value] in msgpack.

    Raises:
        UnsupportedFormat: if it has an earlier format.
        DecodeError: if it is damaged.
    """
    unpacker = msgpack.Unpacker(strict_map_key=False, max_buffer_size=0)
    for data in pieces:
        unpacker.feed(data)
        try:
            for kind, value in unpacker:
                piece = stored.Piece()
                _ITEMS[kind](piece, value)
                yield piece
        except (*_INVALID, OverflowError, msgpack.UnpackException) as error:
            raise DecodeError(f"not a snapshot of format {PREVIOUS}: {error!r}") from error


def _add_head(piece: stored.Piece, value: Any) -> None:
    number, piece.head.number, piece.head.serial = value
    if number != PREVIOUS:
        raise too_old("the snapshot", number)


def _add_layout(piece: stored.Piece, value: Any) -> None:
    piece.layouts.append(_layout(value))


def _add_trace(piece: stored.Piece, value: dict[str, Any]) -> None:
    trace = piece.traces.add(serial=value["serial"], labels=value["labels"])
    trace.run, trace.trace_id = value["key"]
    trace.ttl, trace.created, trace.updated, trace.expires = value["times"]
    trace.sources.extend(map(_source, value["sources"]))


def _source(value: dict[str, Any]) -> stored.Source:
    _, engine_id, shard = value.pop("writer")
    drafts, drafts_since, draft_step = value.pop("drafts")
    return stored.Source(
        engine_id=engine_id,
        shard=shard,
        drafts=drafts,
        drafts_since=drafts_since,
        draft_step=draft_step,
        unplaced=not value.pop("placed"),
        blocks=_u32(value.pop("blocks")),
        lost=np.array(value.pop("lost"), "<i8").tobytes(),
        **value,
    )


def _add_writer(piece: stored.Piece, value: dict[str, Any]) -> None:
    slots = value.pop("slots")
    slots["erasures"], slots["all_erased"] = slots["erasures"]
    live, recent = value.pop("live"), value.pop("recent")
    writer = piece.writers.add(
        key=_key(value.pop("key")),
        layout=_layout(value.pop("layout")),
        slots=stored.SlotMap(**slots),
        recent=b"".join(_RECENT.pack(*chunk) for chunk in recent),
        **value,
    )
    for request_id, _, trace_id, source in live:
        known = writer.live.add(request_id=request_id, trace_id=trace_id)
        if source is not None:
            known.source.CopyFrom(_source(source))


def _add_tombstones(piece: stored.Piece, value: Any) -> None:
    boots, deleted = value
    for (run, engine_id, boot_id), edges in boots:
        packed = np.array(edges, "<i8").tobytes()
        piece.boots.add(run=run, engine_id=engine_id, boot_id=boot_id, edges=packed)
    for (run, trace_id), reason in deleted:
        piece.deleted.add(run=run, trace_id=trace_id, reason=reason)


def _add_epochs(piece: stored.Piece, value: Any) -> None:
    for key, epoch in value:
        piece.epochs.add(writer=_key(key), epoch=epoch)


def _add_frames(piece: stored.Piece, value: Any) -> None:
    number, offsets, layout, run = value
    piece.frames.add(number=number, offsets=offsets, layout=layout, run=run)


_ITEMS: dict[str, Callable[[stored.Piece, Any], None]] = {
    "head": _add_head,
    "layout": _add_layout,
    "trace": _add_trace,
    "writer": _add_writer,
    "tombstones": _add_tombstones,
    "epochs": _add_epochs,
    "frames": _add_frames,
}


# ---------------------------------------------------------------------------- both


def _key(value: Any) -> stored.WriterKey:
    run, engine_id, shard = value
    return stored.WriterKey(run=run, engine_id=engine_id, shard=shard)


def _layout(data: str) -> stored.Layout:
    layout = pb.RoutingLayout.FromString(bytes.fromhex(data))
    return stored.Layout(
        layer_ids=layout.layer_ids,
        moe_layer_ids=layout.moe_layer_ids,
        num_hidden_layers=layout.num_hidden_layers,
        num_experts=layout.num_experts,
        top_k=layout.top_k,
    )


def _u32(numbers: Any) -> bytes:
    return np.array(numbers, U32).tobytes()
