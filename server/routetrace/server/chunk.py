"""A chunk on its way in: checked against everything that can be checked without knowing the past.

What passes here can be stored and applied; applying never fails. Routing is not decoded: of a frame
only the header is read.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError

from routetrace.server.checksums import Payload, running
from routetrace.server.refs import MAX_FRAMES, MAX_ROWS
from routetrace.server.slot_map import SlotMap
from routetrace.server.wire import Chunk
from routetrace.v1 import routetrace_pb2 as pb
from routetrace.v1.errors import Corrupt, InvalidArgument
from routetrace.v1.frame import read_header
from routetrace.v1.frame_check import PlainFrames
from routetrace.v1.layout import RoutingLayout
from routetrace.v1.records import (
    DIGEST,
    NO_REQUEST,
    OP,
    PACKED_OP,
    U32,
    U64,
    FinishReason,
    OpKind,
    unpack,
)

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

# Plain numbers: to compare with an enum's member takes five times as long.
BEGIN, BLOCKS, ROWS = int(OpKind.BEGIN), int(OpKind.BLOCKS), int(OpKind.ROWS)
REWIND, PREEMPT, RESUME = int(OpKind.REWIND), int(OpKind.PREEMPT), int(OpKind.RESUME)
FINISH, LOST, DIGESTS = int(OpKind.FINISH), int(OpKind.LOST), int(OpKind.DIGEST)
EXTERNAL, RESET = int(OpKind.EXTERNAL), int(OpKind.RESET)
_WITH_BLOCKS = {BEGIN, RESUME, BLOCKS, EXTERNAL}
_WITHOUT_REQUEST = {EXTERNAL, RESET}
_FIELDS = OP.names or ()
_FIRST_KIND, _LAST_KIND = int(min(OpKind)), int(max(OpKind))
_FINISH_REASONS = {*FinishReason}
_MISSING_REASONS = {*pb.MissingReason.values()}


@dataclass(frozen=True, slots=True)
class ParsedChunk:
    """The columns of a chunk header, checked."""

    request_ids: list[str]
    begins: list[pb.RequestBegin]
    ops: list[tuple[int, ...]]
    """The fields of records.OP of each."""
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


def check_sums(chunk: Chunk) -> list[int]:
    """Checks that header and payload are what the agent sent.

    Returns:
        The running checksums of the payload, which the store needs too.

    Raises:
        Corrupt: if they are not.
    """
    sums = running(chunk.payload)
    for field, actual, crc in (
        ("header_crc32", zlib.crc32(chunk.header), chunk.header_crc32),
        ("payload_crc32", sums[-1] if sums else 0, chunk.payload_crc32),
    ):
        if actual != crc:
            raise Corrupt(field=field, value=f"{crc:#010x}", expected=f"{actual:#010x}")
    return sums


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
    if header.layout != _proto_of(layout):
        sent = RoutingLayout.from_proto(header.layout)
        if sent != layout:
            raise InvalidArgument(field="layout", value=sent, expected=f"the Hello's, {layout}")
    for request_id in header.request_ids:
        check_id("request_ids", request_id)
    for begin in header.begins:
        check_begin(begin)
    unpack(header.ops, OP, "ops")
    chunk = ParsedChunk(
        request_ids=list(header.request_ids),
        begins=list(header.begins),
        ops=[*PACKED_OP.iter_unpack(header.ops)],
        block_ids=unpack(header.block_ids, U32, "block_ids").tolist(),
        slots=unpack(header.slots, U64, "slots"),
        frame_lengths=unpack(header.frame_lengths, U32, "frame_lengths"),
        frame_rows=unpack(header.frame_rows, U32, "frame_rows"),
        token_digests=unpack(header.token_digests, DIGEST, "token_digests"),
    )
    _check_frames(chunk, layout.row_bytes)
    _check_ops(chunk, slots.num_blocks, slots.num_blocks * slots.block_size)
    return chunk


@lru_cache(maxsize=64)
def _plain_frames(layout: RoutingLayout) -> PlainFrames:
    return PlainFrames(layout)


@lru_cache(maxsize=64)
def _proto_of(layout: RoutingLayout) -> pb.RoutingLayout:
    return layout.to_proto()


def _check_frames(chunk: ParsedChunk, row_bytes: int) -> None:
    num_frames = len(chunk.frame_lengths)
    if len(chunk.frame_rows) != num_frames or num_frames > MAX_FRAMES:
        raise InvalidArgument(
            field="frame_rows",
            value=f"{len(chunk.frame_rows)} entries",
            expected=f"{num_frames} (one per frame, at most {MAX_FRAMES})",
        )
    rows = chunk.frame_rows.tolist()
    if rows and not 1 <= min(rows) <= max(rows) <= MAX_ROWS:
        good = (chunk.frame_rows >= 1) & (chunk.frame_rows <= MAX_ROWS)
        _all("frame_rows", chunk.frame_rows, good, f"1 to {MAX_ROWS} rows")
    most = min(MAX_CHUNK_ROWS, MAX_DECODED_BYTES // row_bytes)
    _at_most("frame_rows", sum(rows), most, "rows in one chunk")


def _check_ops(chunk: ParsedChunk, num_blocks: int, num_slots: int) -> None:
    """Holds each op against the columns that it points into.

    Most chunks have tens of ops: a loop is done with them before numpy has begun.
    """
    if len(chunk.ops) > MAX_OPS:
        raise InvalidArgument(field="ops", value=len(chunk.ops), expected=f"at most {MAX_OPS} ops")
    if max(chunk.block_ids, default=-1) >= num_blocks:
        block_ids = np.array(chunk.block_ids)
        _all("block_ids", block_ids, block_ids < num_blocks, f"ids below num_blocks = {num_blocks}")
    if len(chunk.slots):
        _all("slots", chunk.slots, chunk.slots < num_slots, f"slots below {num_slots}")
    frame_rows = chunk.frame_rows.tolist()
    num_requests, num_frames = len(chunk.request_ids), len(frame_rows)
    begun: set[int] = set()
    digests = slots = rows = blocks = 0
    wrong = expected = ""
    for index, op in enumerate(chunk.ops):
        kind, _, arg, request, position, count, frame, row, at, num, _, _, value = op
        if not _FIRST_KIND <= kind <= _LAST_KIND:
            wrong, expected = "kind", f"{int(_FIRST_KIND)} to {int(_LAST_KIND)}"
        elif position + count > MAX_POSITION:
            wrong, expected = "position", f"position + count of at most {MAX_POSITION}"
        elif num and (kind not in _WITH_BLOCKS or num > num_blocks):
            wrong = "num_blocks"
            expected = f"at most num_blocks = {num_blocks}, where blocks are named, and else 0"
        elif num and at + num > len(chunk.block_ids):
            wrong, expected = "num_blocks", "a range of block_ids"
        elif kind == ROWS:
            rows += count
            if frame >= num_frames:
                wrong, expected = "frame", "a frame of the chunk"
            elif not 1 <= count <= frame_rows[frame] - row:
                wrong, expected = "count", "at least 1 and no more rows than the frame has"
            elif request != NO_REQUEST:
                if request >= num_requests:
                    wrong, expected = "request", f"an index below {num_requests}"
                elif value > position + count:
                    wrong, expected = "value", "at most position + count"
            else:
                slots += count
                if value:
                    wrong, expected = "value", "0 for slots alone"
                elif at + count > len(chunk.slots):
                    wrong, expected = "blocks_at", "a range of slots"
        elif request >= num_requests and kind not in _WITHOUT_REQUEST:
            wrong, expected = "request", f"an index below {num_requests}"
        elif kind in (BEGIN, RESUME):
            if count > position:
                wrong = "count"
                expected = "num_external_tokens of at most num_computed_tokens"
            elif kind == BEGIN:
                if arg >= len(chunk.begins) or arg in begun:
                    wrong = "arg"
                    expected = f"an index below {len(chunk.begins)}, a begin of its own for each"
                begun.add(arg)
        elif kind == FINISH:
            if arg not in _FINISH_REASONS:
                wrong, expected = "arg", "a FinishReason"
        elif kind == LOST:
            if arg not in _MISSING_REASONS:
                wrong, expected = "arg", "a MissingReason"
        elif kind == DIGESTS:
            digests += count
            if row + count > len(chunk.token_digests):
                wrong, expected = "row", "a range of token_digests"
        blocks += num
        if wrong:
            raise InvalidArgument(
                field=f"ops.{wrong}[{index}]",
                value=op[_FIELDS.index(wrong)],
                expected=expected,
            )
    # Each entry of a column is for one op: what ops cost is bounded by the bytes of the chunk.
    _at_most("ops.num_blocks", blocks, len(chunk.block_ids), "block ids, each named once")
    _at_most("ops.count", digests, len(chunk.token_digests), "digests, each named once")
    _at_most("ops.count", slots, len(chunk.slots), "slots, each named once")
    _at_most("ops.count", rows, sum(frame_rows), "rows, each named once")


def _all(field: str, values: npt.NDArray[Any], good: npt.NDArray[np.bool_], expected: str) -> None:
    if len(values) and not good.all():
        at = int(np.argmin(good))
        raise InvalidArgument(field=f"{field}[{at}]", value=int(values[at]), expected=expected)


def _at_most(field: str, total: int, most: int, what: str) -> None:
    if total > most:
        raise InvalidArgument(
            field=field, value=f"{total} in all", expected=f"at most {most} {what}"
        )


def check_payload(chunk: ParsedChunk, payload: Payload, layout: RoutingLayout) -> None:
    """Checks that the payload is the frames that the header announces, by their own headers.

    Raises:
        InvalidArgument: if a frame is not what the header says.
        Corrupt: if a frame header is damaged.
    """
    lengths = chunk.frame_lengths.tolist()
    if sum(lengths) != len(payload):
        raise InvalidArgument(
            field="payload",
            value=f"{len(payload)} bytes",
            expected=f"{sum(lengths)}, the sum of frame_lengths",
        )
    plain = _plain_frames(layout)
    view = memoryview(payload)
    at = 0
    for i, (length, rows) in enumerate(zip(lengths, chunk.frame_rows.tolist(), strict=True)):
        part = view[at : at + length]
        at += length
        if plain.has(part, rows):
            continue
        frame = read_header(part)
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
