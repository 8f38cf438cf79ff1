"""Chunks: ops and rows in columns, sealed into the bytes that are sent."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from routetrace.v1 import routetrace_pb2 as pb
from routetrace.v1.frame import encode_frames
from routetrace.v1.layout import RoutingLayout
from routetrace.v1.records import NO_REQUEST, OP, PACKED_OP, U32, U64, OpKind, unpack

Ids = npt.NDArray[np.unsignedinteger[Any]]
Blocks = npt.NDArray[np.uint32]

NO_BLOCKS: Blocks = np.empty(0, U32)

_BLOCKS = int(OpKind.BLOCKS)

#: Of zstd. 3 takes a third longer, for frames that are 0 to 0.3 % smaller.
LEVEL = 2

#: Bytes of a chunk, before compression: above this messages are not any cheaper.
TARGET_BYTES = 1 << 20
#: Frames and ops of one chunk at most; the server numbers frames with 12 bits.
MAX_FRAMES = 1 << 12
MAX_OPS = 1 << 16


@dataclass(frozen=True)
class Chunk:
    """A sealed chunk, as it will be sent; only its sequence number is still open."""

    header: bytes
    """A serialized ChunkHeader."""
    payload: bytes
    """Its frames."""
    rows: int
    """Rows in them."""
    degraded: int = 0
    """How often the server refused what it stands for."""

    @property
    def nbytes(self) -> int:
        """Bytes of header and payload."""
        return len(self.header) + len(self.payload)

    def message(self, sequence: int) -> bytes:
        """As it is sent: an IngestRequest, which protobuf would copy two times more."""
        header, payload = self.header, self.payload
        front = b"\x08%b\x15%b\x1d%b\x22%b" % (
            _varint(sequence),
            zlib.crc32(header).to_bytes(4, "little"),
            zlib.crc32(payload).to_bytes(4, "little"),
            _varint(len(header)),
        )
        middle = b"\x7a" + _varint(len(payload))
        size = len(front) + len(header) + len(middle) + len(payload)
        return b"".join((b"\x12", _varint(size), front, header, middle, payload))


def _varint(number: int) -> bytes:
    """A number as protobuf writes it."""
    septets = bytearray()
    while number > 0x7F:
        septets.append(number & 0x7F | 0x80)
        number >>= 7
    septets.append(number)
    return bytes(septets)


class ChunkBuilder:
    """Collects ops and rows in order and seals them into chunks.

    Args:
        layout: columns of the rows.
        block_size: tokens per KV block; 0 if slots are not told.
        target_bytes: of a chunk, before compression.
    """

    def __init__(
        self, layout: RoutingLayout, block_size: int, target_bytes: int = TARGET_BYTES
    ) -> None:
        self._layout = layout
        self._block_size = block_size
        self._layout_proto = layout.to_proto()
        self._base_bytes = self._layout_proto.ByteSize() + 64
        # At most: the frame's header, which grows by layers, and its two columns.
        self._frame_bytes = 32 + layout.num_hidden_layers // 8 + 10 * len(layout.layer_ids)
        self.ready: deque[Chunk] = deque()
        self._most = min(target_bytes, TARGET_BYTES)
        self.limit(TARGET_BYTES)
        self._clear()

    def limit(self, max_chunk_bytes: int) -> None:
        """Keeps chunks sealed from now on below what the server takes."""
        # Incompressible frames are up to 1.5 % larger than their rows.
        self._target = min(self._most, max_chunk_bytes * 31 // 32 - self._base_bytes)
        room, row_bytes = self._target - self._frame_bytes - 64, self._layout.row_bytes
        #: Rows of one frame at most.
        self.max_rows = max(1, room // row_bytes)
        #: The same for slots alone, if each row is of a step of its own.
        self.max_slot_rows = max(1, room // (row_bytes + U64.itemsize + OP.itemsize))

    def _clear(self) -> None:
        self._ops = bytearray()  # of PACKED_OP
        self._request_ids: dict[str, int] = {}
        self._begins: list[pb.RequestBegin] = []
        self._blocks: list[bytes] = []
        self._num_blocks = 0
        self._slots: list[npt.NDArray[np.uint64]] = []
        self._num_slots = 0
        self._digests: list[npt.NDArray[Any]] = []
        self._num_digests = 0
        self._frames: list[Ids] = []
        self._rows = 0
        #: Bytes of what is pending, before compression.
        self.nbytes = 0

    def __bool__(self) -> bool:
        """Whether anything is pending."""
        return bool(self._ops)

    def begin(
        self,
        request_id: str,
        facts: pb.RequestBegin,
        index: int,
        num_computed_tokens: int,
        num_external_tokens: int,
        blocks: Blocks,
    ) -> None:
        """Adds a BEGIN op; `index` is the number of requests that began before it."""
        self._room(facts.ByteSize() + 4 * len(blocks))
        self._begins.append(facts)
        self.nbytes += facts.ByteSize()
        self.op(
            OpKind.BEGIN,
            request_id,
            arg=len(self._begins) - 1,
            position=num_computed_tokens,
            count=num_external_tokens,
            blocks=blocks,
            value=index,
        )

    def op(
        self,
        kind: OpKind,
        request_id: str | None = None,
        *,
        arg: int = 0,
        position: int = 0,
        count: int = 0,
        row: int = 0,
        blocks: Blocks = NO_BLOCKS,
        value: int = 0,
    ) -> None:
        """Adds an op without rows; EXTERNAL and RESET take no request."""
        if kind != OpKind.BEGIN:  # its facts must stay in its chunk
            self._room(4 * len(blocks))
        request = self._request(request_id) if request_id is not None else 0
        at, n = self._num_blocks, len(blocks)
        self._add(kind, 0, arg, request, position, count, 0, row, at, n, 0, 0, value)
        if n:
            self._put_blocks(blocks)

    def blocks(self, request_ids: Sequence[str], blocks: Blocks) -> None:
        """Adds BLOCKS ops: request i gets block i; one op for what a request gets in a row."""
        first = [i for i, name in enumerate(request_ids) if not i or name != request_ids[i - 1]]
        names = [request_ids[i] for i in first]
        counts = [stop - start for start, stop in pairwise([*first, len(request_ids)])]
        if not self._fits(len(first), blocks.nbytes + sum(map(len, names))):
            for name, i, n in zip(names, first, counts, strict=True):
                self.op(OpKind.BLOCKS, name, blocks=blocks[i : i + n])
            return
        # Most decode steps bring a block to one request in block_size: many to tell of at a time.
        pack, at = PACKED_OP.pack, self._num_blocks
        for name, i, n in zip(names, first, counts, strict=True):
            self._ops += pack(_BLOCKS, 0, 0, self._request(name), 0, 0, 0, 0, at + i, n, 0, 0, 0)
        self.nbytes += len(first) * OP.itemsize
        self._put_blocks(blocks)

    def digests(self, request_id: str, digests: npt.NDArray[Any]) -> None:
        """Adds a DIGEST op for some records.DIGEST, if there are any."""
        if len(digests):
            self._room(digests.nbytes)
            self.op(OpKind.DIGEST, request_id, row=self._num_digests, count=len(digests))
            self._digests.append(digests)
            self._num_digests += len(digests)
            self.nbytes += digests.nbytes

    def rows(
        self, request_id: str, position: int, ids: Ids, step: int, version: int, tentative: int
    ) -> None:
        """Adds a frame of rows [n, L, K] of one request, n <= max_rows.

        The last `tentative` positions up to its end may be rejected drafts.
        """
        self._room(self._frame_bytes + ids.nbytes)
        frame, n = len(self._frames), len(ids)
        request = self._request(request_id)
        self._add(OpKind.ROWS, 0, 0, request, position, n, frame, 0, 0, 0, step, version, tentative)
        self._frame(ids)

    def slot_rows(
        self,
        ids: Ids,
        slots: npt.NDArray[np.uint64],
        steps: Sequence[tuple[int, int]],
        version: int,
    ) -> None:
        """Adds a frame of rows [n, L, K] at `slots` [n]; `steps` are (step, rows of it)."""
        self._room(self._frame_bytes + ids.nbytes + slots.nbytes + OP.itemsize * len(steps))
        frame = len(self._frames)
        row = 0
        for step, n in steps:
            at = self._num_slots + row
            self._add(OpKind.ROWS, 0, 0, NO_REQUEST, 0, n, frame, row, at, 0, step, version, 0)
            row += n
        self._slots.append(slots)
        self._num_slots += len(slots)
        self.nbytes += slots.nbytes
        self._frame(ids)

    def seal(self) -> None:
        """Turns what is pending into a chunk."""
        if not self._ops:
            return
        frames = encode_frames(self._frames, self._layout, level=LEVEL, validate=False)
        header = pb.ChunkHeader(
            layout=self._layout_proto,
            request_ids=list(self._request_ids),
            begins=self._begins,
            ops=bytes(self._ops),
            block_ids=b"".join(self._blocks),
            slots=b"".join(slots.tobytes() for slots in self._slots),
            frame_lengths=np.array([len(f) for f in frames], U32).tobytes(),
            frame_rows=np.array([len(f) for f in self._frames], U32).tobytes(),
            token_digests=b"".join(digests.tobytes() for digests in self._digests),
        )
        chunk = Chunk(header.SerializeToString(), b"".join(frames), self._rows)
        self._clear()
        self.ready.append(chunk)

    def degrade(self, chunk: Chunk, reason: int) -> Chunk:
        """What stands for a chunk that was refused: its events, and its rows as LOST.

        Where that was refused as well, only that nothing is known of the slots any more.
        """
        old = pb.ChunkHeader.FromString(chunk.header)
        new = pb.ChunkHeader(layout=self._layout_proto)
        ops = [(OpKind.RESET, *[0] * 12)]
        if not chunk.degraded:
            new.request_ids.extend(old.request_ids)
            new.begins.extend(old.begins)
            new.token_digests = old.token_digests
            blocks = [unpack(old.block_ids, U32, "block_ids")]
            slots = unpack(old.slots, U64, "slots")
            ops, at = [], len(blocks[0])
            for op in unpack(old.ops, OP, "ops").tolist():
                kind, request, position, count, slots_at = op[0], op[3], op[4], op[5], op[8]
                if kind != OpKind.ROWS:
                    ops.append(op)
                elif request != NO_REQUEST:
                    ops.append((OpKind.LOST, 0, reason, request, position, count, *[0] * 7))
                else:
                    touched = self.blocks_of(slots[slots_at : slots_at + count])
                    blocks.append(touched)
                    ops.append((OpKind.EXTERNAL, *[0] * 7, at, len(touched), 0, 0, 0))
                    at += len(touched)
            new.block_ids = b"".join(b.tobytes() for b in blocks)
        new.ops = np.array(ops, OP).tobytes()
        return Chunk(new.SerializeToString(), b"", 0, chunk.degraded + 1)

    def blocks_of(self, slots: npt.NDArray[np.uint64]) -> Blocks:
        """The blocks that slots belong to, each once."""
        return np.unique(slots // self._block_size).astype(U32)

    def _room(self, nbytes: int) -> None:
        """Seals what is pending if an op and `nbytes` more would make it too large."""
        if not self._fits(1, nbytes):
            self.seal()

    def _fits(self, ops: int, nbytes: int) -> bool:
        return (
            self.nbytes + nbytes + ops * OP.itemsize <= self._target
            and len(self._ops) + ops * OP.itemsize <= MAX_OPS * OP.itemsize
            and len(self._frames) < MAX_FRAMES
        )

    def _put_blocks(self, blocks: Blocks) -> None:
        self._blocks.append(blocks.tobytes())
        self._num_blocks += len(blocks)
        self.nbytes += 4 * len(blocks)

    def _request(self, request_id: str) -> int:
        if request_id not in self._request_ids:
            self._request_ids[request_id] = len(self._request_ids)
            self.nbytes += len(request_id)
        return self._request_ids[request_id]

    def _add(self, *op: int) -> None:
        self._ops += PACKED_OP.pack(*op)
        self.nbytes += OP.itemsize

    def _frame(self, ids: Ids) -> None:
        self._frames.append(ids)
        self._rows += len(ids)
        self.nbytes += self._frame_bytes + ids.nbytes
