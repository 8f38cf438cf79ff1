"""A chunk on its way in: checked against everything that can be checked without knowing the past.

What passes here can be stored and applied; applying never fails. Routing is not decoded: of a frame
only the header is read.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError

from routetrace.server.refs import MAX_FRAMES, MAX_ROWS
from routetrace.server.slot_map import SlotMap
from routetrace.v1 import routetrace_pb2 as pb
from routetrace.v1.errors import Corrupt, InvalidArgument
from routetrace.v1.frame import read_header
from routetrace.v1.layout import RoutingLayout
from routetrace.v1.records import DIGEST, NO_REQUEST, OP, U32, U64, FinishReason, OpKind, unpack

MAX_ID_LENGTH = 512
MAX_LABELS = 64
MAX_LABEL_LENGTH = 1024
MAX_POSITION = 1 << 31
MAX_OPS = 1 << 17
#: Request ids, and begins, of one chunk.
MAX_REQUESTS = 1 << 16
#: Rows of one chunk, and the bytes of their ids.
MAX_CHUNK_ROWS = 1 << 20
MAX_DECODED_BYTES = 256 << 20

_WITH_BLOCKS = (OpKind.BEGIN, OpKind.RESUME, OpKind.BLOCKS, OpKind.EXTERNAL)
_WITHOUT_REQUEST = (OpKind.EXTERNAL, OpKind.RESET)


@dataclass(frozen=True, slots=True)
class ParsedChunk:
    """The columns of a chunk header, checked."""

    request_ids: list[str]
    begins: list[pb.RequestBegin]
    ops: npt.NDArray[Any]
    """records.OP."""
    block_ids: list[int]
    slots: npt.NDArray[np.uint64]
    frame_lengths: npt.NDArray[np.uint32]
    frame_rows: npt.NDArray[np.uint32]
    token_digests: npt.NDArray[Any]
    """records.DIGEST."""


def check_id(field: str, value: str, *, required: bool = True) -> None:
    """Raises InvalidArgument unless `value` is an id of a sensible length."""
    if len(value) > MAX_ID_LENGTH or (required and not value):
        raise InvalidArgument(
            field=field,
            value=value if len(value) <= 40 else f"{value[:40]}... ({len(value)} characters)",
            expected=f"{1 if required else 0} to {MAX_ID_LENGTH} characters",
        )


def check_begin(begin: pb.RequestBegin) -> None:
    """Raises InvalidArgument unless the facts of a request are in bounds."""
    check_id("begins.trace_id", begin.trace_id, required=False)
    if len(begin.labels) > MAX_LABELS:
        raise InvalidArgument(
            field="begins.labels", value=len(begin.labels), expected=f"at most {MAX_LABELS} labels"
        )
    for key, text in begin.labels.items():
        if not key or len(key) + len(text) > MAX_LABEL_LENGTH:
            raise InvalidArgument(
                field="begins.labels",
                value=f"{key[:40]}={text[:40]}",
                expected=f"a key, and at most {MAX_LABEL_LENGTH} characters together",
            )


def check_sums(chunk: pb.Chunk) -> None:
    """Raises Corrupt unless header and payload are what the agent sent."""
    for field, data, crc in (
        ("header_crc32", chunk.header, chunk.header_crc32),
        ("payload_crc32", chunk.payload, chunk.payload_crc32),
    ):
        actual = zlib.crc32(data)
        if actual != crc:
            raise Corrupt(field=field, value=f"{crc:#010x}", expected=f"{actual:#010x}")


def parse_header(data: bytes, layout: RoutingLayout, slots: SlotMap) -> ParsedChunk:
    """Reads and checks a ChunkHeader.

    Args:
        data: the serialized ChunkHeader.
        layout: columns that the Hello announced.
        slots: the slot map that the chunk is for.

    Raises:
        InvalidArgument: naming the first field that is out of bounds.
    """
    try:
        header = pb.ChunkHeader.FromString(data)
    except DecodeError as error:
        raise InvalidArgument(
            field="header", value=f"{len(data)} bytes", expected="a serialized ChunkHeader"
        ) from error
    for field, entries in (("request_ids", header.request_ids), ("begins", header.begins)):
        if len(entries) > MAX_REQUESTS:
            raise InvalidArgument(
                field=field, value=f"{len(entries)} entries", expected=f"at most {MAX_REQUESTS}"
            )
    sent = RoutingLayout.from_proto(header.layout)
    if sent != layout:
        raise InvalidArgument(field="layout", value=sent, expected=f"the Hello's, {layout}")
    for request_id in header.request_ids:
        check_id("request_ids", request_id)
    for begin in header.begins:
        check_begin(begin)
    chunk = ParsedChunk(
        request_ids=list(header.request_ids),
        begins=list(header.begins),
        ops=unpack(header.ops, OP, "ops"),
        block_ids=unpack(header.block_ids, U32, "block_ids").tolist(),
        slots=unpack(header.slots, U64, "slots"),
        frame_lengths=unpack(header.frame_lengths, U32, "frame_lengths"),
        frame_rows=unpack(header.frame_rows, U32, "frame_rows"),
        token_digests=unpack(header.token_digests, DIGEST, "token_digests"),
    )
    _check_frames(chunk, layout.row_bytes)
    _check_ops(chunk, slots.num_blocks, slots.num_blocks * slots.block_size)
    return chunk


def _check_frames(chunk: ParsedChunk, row_bytes: int) -> None:
    num_frames = len(chunk.frame_lengths)
    if len(chunk.frame_rows) != num_frames or num_frames > MAX_FRAMES:
        raise InvalidArgument(
            field="frame_rows",
            value=f"{len(chunk.frame_rows)} entries",
            expected=f"{num_frames} (one per frame, at most {MAX_FRAMES})",
        )
    _all(
        "frame_rows",
        chunk.frame_rows,
        (chunk.frame_rows >= 1) & (chunk.frame_rows <= MAX_ROWS),
        f"1 to {MAX_ROWS} rows",
    )
    most = min(MAX_CHUNK_ROWS, MAX_DECODED_BYTES // row_bytes)
    _at_most("frame_rows", chunk.frame_rows, most, "rows in one chunk")


def _check_ops(chunk: ParsedChunk, num_blocks: int, num_slots: int) -> None:
    ops = chunk.ops
    if len(ops) > MAX_OPS:
        raise InvalidArgument(field="ops", value=len(ops), expected=f"at most {MAX_OPS} ops")
    kind, request = ops["kind"], ops["request"]
    _all(
        "ops.kind",
        kind,
        (kind >= min(OpKind)) & (kind <= max(OpKind)),
        f"{int(min(OpKind))} to {int(max(OpKind))}",
    )
    rows = ops[kind == OpKind.ROWS]
    by_slot = rows["request"] == NO_REQUEST
    _all(
        "ops.request",
        request,
        (request < len(chunk.request_ids))
        | np.isin(kind, _WITHOUT_REQUEST)
        | ((kind == OpKind.ROWS) & (request == NO_REQUEST)),
        f"an index below {len(chunk.request_ids)}",
    )
    begins = ops[kind == OpKind.BEGIN]
    _all(
        "ops.arg",
        begins["arg"],
        begins["arg"] < len(chunk.begins),
        f"an index below {len(chunk.begins)}",
    )
    reasons = ops[kind == OpKind.FINISH]["arg"]
    _all("ops.arg", reasons, np.isin(reasons, list(FinishReason)), "a FinishReason")
    reasons = ops[kind == OpKind.LOST]["arg"]
    _all("ops.arg", reasons, np.isin(reasons, pb.MissingReason.values()), "a MissingReason")
    _once("ops.arg", begins["arg"], "begin")

    starts = ops[np.isin(kind, (OpKind.BEGIN, OpKind.RESUME))]
    _all(
        "ops.count",
        starts["count"],
        starts["count"] <= starts["position"],
        "num_external_tokens of at most num_computed_tokens",
    )
    _all(
        "ops.value",
        rows["value"],
        rows["value"] <= np.where(by_slot, 0, rows["position"].astype(np.uint64) + rows["count"]),
        "at most position + count, and 0 for slots alone",
    )
    digests = ops[kind == OpKind.DIGEST]
    end = digests["row"].astype(np.int64) + digests["count"]
    _all("ops.row", digests["row"], end <= len(chunk.token_digests), "a range of token_digests")
    position = ops["position"].astype(np.int64)
    _all(
        "ops.position",
        position,
        position + ops["count"] <= MAX_POSITION,
        f"position + count of at most {MAX_POSITION}",
    )
    _all("ops.frame", rows["frame"], rows["frame"] < len(chunk.frame_rows), "a frame of the chunk")
    end = rows["row"].astype(np.int64) + rows["count"]
    _all(
        "ops.count",
        rows["count"],
        (rows["count"] >= 1) & (end <= chunk.frame_rows[rows["frame"]]),
        "at least 1 and no more rows than the frame has",
    )
    num = ops["num_blocks"]
    end = ops["blocks_at"].astype(np.int64) + num
    _all(
        "ops.num_blocks",
        num,
        (num == 0)
        | (np.isin(kind, _WITH_BLOCKS) & (end <= len(chunk.block_ids)) & (num <= num_blocks)),
        f"a range of block_ids, of at most num_blocks = {num_blocks}, where blocks are named",
    )
    end = rows["blocks_at"].astype(np.int64) + rows["count"]
    _all(
        "ops.blocks_at", rows["blocks_at"], ~by_slot | (end <= len(chunk.slots)), "a range of slots"
    )
    # Each entry of a column is for one op: what ops cost is bounded by the bytes of the chunk.
    _at_most("ops.num_blocks", num, len(chunk.block_ids), "block ids, each named once")
    _at_most("ops.count", digests["count"], len(chunk.token_digests), "digests, each named once")
    _at_most("ops.count", rows["count"][by_slot], len(chunk.slots), "slots, each named once")
    _at_most("ops.count", rows["count"], int(chunk.frame_rows.sum()), "rows, each named once")
    block_ids = np.asarray(chunk.block_ids, np.int64)
    _all("block_ids", block_ids, block_ids < num_blocks, f"ids below num_blocks = {num_blocks}")
    _all("slots", chunk.slots, chunk.slots < num_slots, f"slots below {num_slots}")


def _all(field: str, values: npt.NDArray[Any], good: npt.NDArray[np.bool_], expected: str) -> None:
    if not good.all():
        at = int(np.argmin(good))
        raise InvalidArgument(field=f"{field}[{at}]", value=int(values[at]), expected=expected)


def _at_most(field: str, values: npt.NDArray[Any], most: int, what: str) -> None:
    total = int(values.sum(dtype=np.int64))
    if total > most:
        raise InvalidArgument(
            field=field, value=f"{total} in all", expected=f"at most {most} {what}"
        )


def _once(field: str, values: npt.NDArray[Any], what: str) -> None:
    if len(np.unique(values)) != len(values):
        raise InvalidArgument(
            field=field, value=f"{len(values)} ops", expected=f"a {what} of its own for each"
        )


def check_payload(chunk: ParsedChunk, payload: bytes, layout: RoutingLayout) -> None:
    """Checks that the payload is the frames that the header announces, by their own headers.

    Raises:
        InvalidArgument: if a frame is not what the header says.
        Corrupt: if a frame header is damaged.
    """
    if int(chunk.frame_lengths.sum(dtype=np.int64)) != len(payload):
        raise InvalidArgument(
            field="payload",
            value=f"{len(payload)} bytes",
            expected=f"{int(chunk.frame_lengths.sum(dtype=np.int64))}, the sum of frame_lengths",
        )
    view = memoryview(payload)
    at = 0
    for i, (length, rows) in enumerate(
        zip(chunk.frame_lengths.tolist(), chunk.frame_rows.tolist(), strict=True)
    ):
        frame = read_header(view[at : at + length])
        at += length
        for field, value, expected in (
            ("frame_bytes", frame.frame_bytes, length),
            ("num_rows", frame.num_rows, rows),
            ("layer_ids", frame.layer_ids, layout.layer_ids),
            ("num_experts", frame.num_experts, layout.num_experts),
            ("top_k", frame.top_k, layout.top_k),
        ):
            if value != expected:
                raise InvalidArgument(
                    field=f"frame[{i}].{field}", value=value, expected=str(expected)
                )
