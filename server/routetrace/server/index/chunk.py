"""Checks of an incoming chunk that need no earlier chunk.

A chunk that passes can be stored and applied. Routing is not decoded: only frame headers are read.
"""

# Over 400 lines: one check after another of the fields of one message.

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError

from routetrace.codec.frame import read_header
from routetrace.codec.frame_check import PlainFrames
from routetrace.codec.records import (
    DIGEST,
    NO_REQUEST,
    OF_NO_REQUEST,
    OP,
    PACKED_OP,
    U32,
    U64,
    FinishReason,
    OpKind,
    unpack,
)
from routetrace.common.checksum import crc32
from routetrace.common.errors import Corrupt, InvalidArgument
from routetrace.common.layout import ModelLayout
from routetrace.common.limits import MAX_NONCE, MAX_POSITION, check_id, check_labels
from routetrace.server.common.slices import at_once, converted
from routetrace.server.index.slot_map import SlotMap
from routetrace.server.index.traces.refs import MAX_FRAMES, MAX_ROWS
from routetrace.server.wire.checksums import Payload, running
from routetrace.server.wire.messages import Chunk
from routetrace.server.wire.pieces import PIECE_BYTES, pieces
from routetrace.v1 import routetrace_pb2 as pb

MAX_OPS = 1 << 17
#: Maximum request ids, and begins, of one chunk.
MAX_REQUESTS = 1 << 15
#: Entries and ops that are checked at a time.
_CHECKED = 256
#: Numbers that are converted at a time.
_LISTED = 1 << 13
#: Maximum requests of one boot of an engine.
MAX_BEGUN = 1 << 62
#: Maximum rows of one chunk, and bytes of their ids.
MAX_CHUNK_ROWS = 1 << 20
MAX_DECODED_BYTES = 256 << 20
#: Maximum blocks of a request that is named by its blocks.
MAX_BLOCKS = 1 << 21

# Plain numbers: comparing with an enum member takes five times as long.
BEGIN, BLOCKS, ROWS = int(OpKind.BEGIN), int(OpKind.BLOCKS), int(OpKind.ROWS)
REWIND, PREEMPT, RESUME = int(OpKind.REWIND), int(OpKind.PREEMPT), int(OpKind.RESUME)
FINISH, LOST, DIGESTS = int(OpKind.FINISH), int(OpKind.LOST), int(OpKind.DIGEST)
EXTERNAL, RESET = int(OpKind.EXTERNAL), int(OpKind.RESET)
INHERIT, FORGET, COPY = int(OpKind.INHERIT), int(OpKind.FORGET), int(OpKind.COPY)
_WITH_BLOCKS = {BEGIN, RESUME, BLOCKS, EXTERNAL, COPY}
_FIELDS = OP.names or ()
_FIRST_KIND, _LAST_KIND = int(min(OpKind)), int(max(OpKind))
_FINISH_REASONS = {*FinishReason}
_MISSING_REASONS = {*pb.MissingReason.values()}

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class ParsedChunk:
    """Checked columns of a chunk header."""

    request_ids: list[str]
    begins: list[pb.RequestBegin]
    ops: list[tuple[int, ...]]
    """Fields of records.OP per op."""
    block_ids: list[int]
    slots: npt.NDArray[np.uint64]
    frame_lengths: npt.NDArray[np.uint32]
    frame_rows: npt.NDArray[np.uint32]
    token_digests: npt.NDArray[Any]
    """records.DIGEST."""
    transfer_ids: list[str]
    closed: bool
    """Whether it is the last one of an agent that was closed."""


def check_begin(begin: pb.RequestBegin) -> None:
    """Raise InvalidArgument unless ids and labels of a begin are valid."""
    check_id("begins.trace_id", begin.trace_id, required=False)
    check_id("begins.transfer_id", begin.transfer_id, required=False)
    check_labels("begins.labels", begin.labels)
    if begin.nonce >= MAX_NONCE:
        raise InvalidArgument(
            field="begins.nonce", value=begin.nonce, expected=f"less than {MAX_NONCE}"
        )


def check_sums(chunk: Chunk) -> list[int]:
    """Check header and payload against the checksums of the agent.

    Returns:
        The running checksums of the payload, which the store needs too.

    Raises:
        Corrupt: if they are not.
    """
    sums = running(chunk.payload)
    for field, actual, crc in (
        ("header_crc32", crc32(chunk.header), chunk.header_crc32),
        ("payload_crc32", sums[-1] if sums else 0, chunk.payload_crc32),
    ):
        if actual != crc:
            raise Corrupt(field=field, value=f"{crc:#010x}", expected=f"{actual:#010x}")
    return sums


def parse_header(data: bytes, layout: ModelLayout, slots: SlotMap) -> ParsedChunk:
    """Parse and check a ChunkHeader at once; see `parse_in_steps`."""
    return at_once(parse_in_steps(data, layout, slots))


def parse_in_steps(
    data: bytes, layout: ModelLayout, slots: SlotMap
) -> Generator[None, None, ParsedChunk]:
    """Parse and check a ChunkHeader, step by step.

    Args:
        data: serialized ChunkHeader.
        layout: layout of the Hello.
        slots: slot map of the writer.

    Raises:
        InvalidArgument: naming the first invalid field.
    """
    header = yield from _parsed(data)
    if header.layout != _proto_of(layout):
        sent = ModelLayout.from_proto(header.layout)
        if sent != layout:
            raise InvalidArgument(field="layout", value=sent, expected=f"the Hello's, {layout}")
    request_ids = yield from _each(header.request_ids, partial(check_id, "request_ids"))
    begins = yield from _each(header.begins, check_begin)
    transfer_ids = yield from _each(header.transfer_ids, partial(check_id, "transfer_ids"))
    ops = unpack(header.ops, OP, "ops")
    if len(ops) > MAX_OPS:
        raise InvalidArgument(field="ops", value=len(ops), expected=f"at most {MAX_OPS} ops")
    block_ids = unpack(header.block_ids, U32, "block_ids")
    _check_block_ids(block_ids, slots.num_blocks)
    chunk = ParsedChunk(
        request_ids=request_ids,
        begins=begins,
        ops=(yield from converted(header.ops, _CHECKED * OP.itemsize, PACKED_OP.iter_unpack)),
        block_ids=(yield from converted(block_ids, _LISTED, np.ndarray.tolist)),
        slots=unpack(header.slots, U64, "slots"),
        frame_lengths=unpack(header.frame_lengths, U32, "frame_lengths"),
        frame_rows=unpack(header.frame_rows, U32, "frame_rows"),
        token_digests=unpack(header.token_digests, DIGEST, "token_digests"),
        transfer_ids=transfer_ids,
        closed=header.closed,
    )
    _check_frames(chunk, layout.row_bytes)
    yield
    yield from _check_ops(chunk, slots.num_blocks, slots.num_blocks * slots.block_size)
    return chunk


def _parsed(data: bytes) -> Generator[None, None, pb.ChunkHeader]:
    header = pb.ChunkHeader()
    try:
        for piece in pieces(data, pb.ChunkHeader) if len(data) > PIECE_BYTES else (data,):
            header.MergeFromString(piece)
            for field, entries in (
                ("request_ids", header.request_ids),
                ("begins", header.begins),
                ("transfer_ids", header.transfer_ids),
            ):
                _at_most(field, len(entries), MAX_REQUESTS, "entries")
            yield
    except DecodeError as error:
        raise InvalidArgument(
            field="header", value=f"{len(data)} bytes", expected="a serialized ChunkHeader"
        ) from error
    return header


def _each(entries: Sequence[_T], check: Callable[[_T], None]) -> Generator[None, None, list[_T]]:
    """Return the entries of a field as a list, each of them checked."""
    checked: list[_T] = []
    for entry in entries:
        check(entry)
        checked.append(entry)
        if not len(checked) % _CHECKED:
            yield
    return checked


@lru_cache(maxsize=64)
def _plain_frames(layout: ModelLayout) -> PlainFrames:
    return PlainFrames(layout)


@lru_cache(maxsize=64)
def _proto_of(layout: ModelLayout) -> pb.RoutingLayout:
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


def _check_ops(chunk: ParsedChunk, num_blocks: int, num_slots: int) -> Iterator[None]:
    """Check each op against the columns that it points into.

    Most chunks have tens of ops, for which a loop is faster than numpy.
    """
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
        elif num and (kind not in _WITH_BLOCKS or num > num_blocks * (1 + (kind == COPY))):
            wrong, expected = "num_blocks", f"at most {num_blocks}, and 0 for ops without blocks"
        elif num and (at + num > len(chunk.block_ids) or (kind == COPY and num % 2)):
            wrong, expected = "num_blocks", "a range of block_ids; of COPY in pairs"
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
        elif kind == FORGET:
            slots += count
            if at + count > len(chunk.slots):
                wrong, expected = "blocks_at", "a range of slots"
        elif request >= num_requests and kind not in OF_NO_REQUEST:
            wrong, expected = "request", f"an index below {num_requests}"
        elif kind in (BEGIN, RESUME):
            if count > position:
                wrong, expected = "count", "num_external_tokens of at most num_computed_tokens"
            elif kind == BEGIN:
                if arg >= len(chunk.begins) or arg in begun:
                    wrong = "arg"
                    expected = f"an index below {len(chunk.begins)}, a begin of its own for each"
                elif value >= MAX_BEGUN:
                    wrong, expected = "value", f"less than {MAX_BEGUN} requests before it"
                begun.add(arg)
            elif value > MAX_POSITION:
                wrong, expected = "value", f"at most {MAX_POSITION} tokens"
        elif kind == FINISH:
            if arg not in _FINISH_REASONS:
                wrong, expected = "arg", "a FinishReason"
            elif row > len(chunk.transfer_ids):
                wrong, expected = "row", "0, or a transfer id of the chunk from 1"
        elif kind == LOST:
            if arg not in _MISSING_REASONS:
                wrong, expected = "arg", "a MissingReason"
            elif value > position + count:
                wrong, expected = "value", "at most position + count"
        elif kind == DIGESTS:
            digests += count
            if row + count > len(chunk.token_digests):
                wrong, expected = "row", "a range of token_digests"
        blocks += num
        if not index % _CHECKED:
            yield
        if wrong:
            raise InvalidArgument(
                field=f"ops.{wrong}[{index}]",
                value=op[_FIELDS.index(wrong)],
                expected=expected,
            )
    # Each column entry belongs to one op, which bounds the cost of ops by the size of the chunk.
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


def check_payload(chunk: ParsedChunk, payload: Payload, layout: ModelLayout) -> None:
    """Check the frame headers of a payload against the chunk header.

    Raises:
        InvalidArgument: if a frame differs from the chunk header.
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


def blocks_of(
    slots: SlotMap, block_ids: Sequence[int] | npt.NDArray[np.uint32], num_tokens: int
) -> npt.NDArray[np.uint32]:
    """Return the blocks of a request's first tokens; further ids are ignored.

    Args:
        slots: slot map of a writer.
        block_ids: blocks of the request, in order; any number of them, valid or not.
        num_tokens: tokens whose slots are meant.

    Raises:
        InvalidArgument: if there are more than the engine has, or than MAX_BLOCKS, or one is not
            below num_blocks.
    """
    # Cut first: there may be millions of ids.
    ids = np.asarray(block_ids[: num_needed(slots, len(block_ids), num_tokens)], U32)
    _check_block_ids(ids, slots.num_blocks)
    return ids


def num_needed(slots: SlotMap, count: int, num_tokens: int) -> int:
    """Return how many of a request's `count` block ids its first tokens need.

    Raises:
        InvalidArgument: if these are more than the engine has, or than MAX_BLOCKS.
    """
    needed = min(count, -(-num_tokens // max(slots.block_size, 1)))
    most = min(slots.num_blocks, MAX_BLOCKS)
    if needed > most:
        raise InvalidArgument(
            field="block_ids",
            value=f"{needed} ids",
            expected=f"at most {most}; num_blocks is {slots.num_blocks}"
            if slots.num_blocks
            else "none, as the agent reports no slots: its block_size is 0",
        )
    return needed


def _check_block_ids(ids: npt.NDArray[np.uint32], num_blocks: int) -> None:
    _all("block_ids", ids, ids < num_blocks, f"ids below num_blocks = {num_blocks}")
