"""Chunks: ops and rows in columns, sealed into the bytes of a message."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from routetrace.codec.frame import Codec, encode_frames
from routetrace.codec.records import NO_REQUEST, OP, PACKED_OP, U32, U64, OpKind, unpack
from routetrace.common.checksum import crc32
from routetrace.common.layout import ModelLayout
from routetrace.v1 import routetrace_pb2 as pb

Ids = npt.NDArray[np.unsignedinteger[Any]]
Blocks = npt.NDArray[np.uint32]

NO_BLOCKS: Blocks = np.empty(0, U32)

_BLOCKS = int(OpKind.BLOCKS)

#: Ops whose facts are in the chunk already, in which they must stay.
_SETTLED = frozenset({OpKind.BEGIN, OpKind.FINISH})

#: Codecs of frames, by their names in the configuration; None: by the size of each frame.
CODECS: dict[str, Codec | None] = {"auto": None, "pack": Codec.PACK, "zstd": Codec.LAYER_ZSTD}

#: Level of zstd. 3 takes a third longer, for frames that are 0 to 0.3 % smaller.
LEVEL = 2

#: Bytes of a chunk before compression; larger messages cost no less per row.
TARGET_BYTES = 1 << 20
#: Most frames and ops of one chunk; the server numbers frames with 12 bits.
MAX_FRAMES = 1 << 12
MAX_OPS = 1 << 16


@dataclass(frozen=True)
class Chunk:
    """A sealed chunk, without its sequence number."""

    header: bytes
    """A serialized ChunkHeader."""
    payload: bytes
    """Its frames."""
    rows: int
    """Rows in them."""
    degraded: int = 0
    """Refusals by the server of the chunks that it replaces."""

    @property
    def nbytes(self) -> int:
        """Bytes of header and payload."""
        return len(self.header) + len(self.payload)

    def message(self, sequence: int) -> bytes:
        """Serialize an IngestRequest; protobuf would copy the chunk twice more."""
        header, payload = self.header, self.payload
        front = b"\x08%b\x15%b\x1d%b\x22%b" % (
            _varint(sequence),
            crc32(header).to_bytes(4, "little"),
            crc32(payload).to_bytes(4, "little"),
            _varint(len(header)),
        )
        middle = b"\x7a" + _varint(len(payload))
        size = len(front) + len(header) + len(middle) + len(payload)
        return b"".join((b"\x12", _varint(size), front, header, middle, payload))


def _varint(number: int) -> bytes:
    """Encode a number as a protobuf varint."""
    septets = bytearray()
    while number > 0x7F:
        septets.append(number & 0x7F | 0x80)
        number >>= 7
    septets.append(number)
    return bytes(septets)


class ChunkBuilder:
    """Collector of ops and rows, which it seals into chunks in order.

    Args:
        layout: columns of the rows.
        target_bytes: of a chunk, before compression.
        codec: of its frames; None: by the size of each.
    """

    def __init__(
        self,
        layout: ModelLayout,
        target_bytes: int = TARGET_BYTES,
        codec: Codec | None = None,
    ) -> None:
        self._layout = layout
        self._codec = codec
        self._layout_proto = layout.to_proto()
        self._base_bytes = self._layout_proto.ByteSize() + 64
        # At most: the frame's header, which grows by layers, and its two columns.
        self._frame_bytes = 32 + layout.num_hidden_layers // 8 + 10 * len(layout.layer_ids)
        self.ready: deque[Chunk] = deque()
        self._most = min(target_bytes, TARGET_BYTES)
        self.limit(TARGET_BYTES)
        self._clear()

    def limit(self, max_chunk_bytes: int) -> None:
        """Keep later chunks below the server's limit."""
        # Incompressible frames are up to 1.5 % larger than their rows.
        self._target = min(self._most, max_chunk_bytes * 31 // 32 - self._base_bytes)
        room, row_bytes = self._target - self._frame_bytes - 64, self._layout.row_bytes
        #: Most rows of one frame.
        self.max_rows = max(1, room // row_bytes)
        #: The same for slots alone, if each row belongs to another step.
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
        self._transfer_ids: list[str] = []
        self._frames: list[Ids] = []
        self._rows = 0
        #: Pending bytes, before compression.
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
        """Add a BEGIN op; `index` is the number of requests that began before it."""
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
        step: int = 0,
        value: int = 0,
    ) -> None:
        """Add an op without rows; EXTERNAL, RESET and COPY take no request."""
        if kind not in _SETTLED:
            self._room(4 * len(blocks))
        request = self._request(request_id) if request_id is not None else 0
        at, n = self._num_blocks, len(blocks)
        self._add(kind, 0, arg, request, position, count, 0, row, at, n, step, 0, value)
        if n:
            self._put_blocks(blocks)

    def finish(
        self, request_id: str, num_tokens: int, reason: int, unix_ms: int, transfer_id: str
    ) -> None:
        """Add a FINISH op; arguments as of `CaptureAgent.finish`, `transfer_id` "" for none."""
        name = len(transfer_id.encode())
        self._room(name)  # it must stay in the chunk of its op
        if transfer_id:
            self._transfer_ids.append(transfer_id)
            self.nbytes += name
        self.op(
            OpKind.FINISH,
            request_id,
            count=num_tokens,
            arg=reason,
            row=len(self._transfer_ids) if transfer_id else 0,
            value=unix_ms,
        )

    def blocks(self, request_ids: Sequence[str], blocks: Blocks) -> None:
        """Add BLOCKS ops: request i gets block i; one op for consecutive blocks of a request."""
        first = [i for i, name in enumerate(request_ids) if not i or name != request_ids[i - 1]]
        names = [request_ids[i] for i in first]
        counts = [stop - start for start, stop in pairwise([*first, len(request_ids)])]
        if not self._fits(len(first), blocks.nbytes + sum(map(len, names))):
            for name, i, n in zip(names, first, counts, strict=True):
                self.op(OpKind.BLOCKS, name, blocks=blocks[i : i + n])
            return
        # In a decode step one request in block_size gets a block: many ops at a time.
        pack, at = PACKED_OP.pack, self._num_blocks
        for name, i, n in zip(names, first, counts, strict=True):
            self._ops += pack(_BLOCKS, 0, 0, self._request(name), 0, 0, 0, 0, at + i, n, 0, 0, 0)
        self.nbytes += len(first) * OP.itemsize
        self._put_blocks(blocks)

    def digests(self, request_id: str, digests: npt.NDArray[Any]) -> None:
        """Add a DIGEST op for some records.DIGEST, if there are any."""
        if len(digests):
            self._room(digests.nbytes)
            self.op(OpKind.DIGEST, request_id, row=self._num_digests, count=len(digests))
            self._digests.append(digests)
            self._num_digests += len(digests)
            self.nbytes += digests.nbytes

    def rows(
        self, request_id: str, position: int, ids: Ids, step: int, version: int, tentative: int
    ) -> None:
        """Add a frame of rows [n, L, K] of one request, n <= max_rows.

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
        """Add a frame of rows [n, L, K] at `slots` [n]; `steps` are (step, rows of it)."""
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

    def forget(self, slots: npt.NDArray[np.uint64]) -> None:
        """Add FORGET ops for slots."""
        for at in range(0, len(slots), self.max_slot_rows):
            part = slots[at : at + self.max_slot_rows]
            self._room(part.nbytes)
            self._add(OpKind.FORGET, 0, 0, 0, 0, len(part), 0, 0, self._num_slots, 0, 0, 0, 0)
            self._slots.append(part)
            self._num_slots += len(part)
            self.nbytes += part.nbytes

    def seal(self, *, closed: bool = False) -> None:
        """Turn the pending ops and frames into a chunk; `closed`: the last one, in any case."""
        if not self._ops and not closed:
            return
        frames = encode_frames(
            self._frames, self._layout, codec=self._codec, level=LEVEL, validate=False
        )
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
            transfer_ids=self._transfer_ids,
            closed=closed,
        )
        chunk = Chunk(header.SerializeToString(), b"".join(frames), self._rows)
        self._clear()
        self.ready.append(chunk)

    def degrade(self, chunk: Chunk, reason: int) -> Chunk:
        """Return the replacement of a refused chunk: its events, and its rows as LOST.

        If that was refused as well, the replacement is a RESET alone, for a new epoch.
        """
        old = pb.ChunkHeader.FromString(chunk.header)
        new = pb.ChunkHeader(layout=self._layout_proto, closed=old.closed)
        ops = [(OpKind.RESET, *[0] * 12)]
        if not chunk.degraded:
            new.request_ids.extend(old.request_ids)
            new.begins.extend(old.begins)
            new.token_digests = old.token_digests
            new.transfer_ids.extend(old.transfer_ids)
            new.block_ids, new.slots = old.block_ids, old.slots
            ops = []
            for op in unpack(old.ops, OP, "ops").tolist():
                kind, request, count, at, drafts = op[0], op[3], op[5], op[8], op[12]
                if kind != OpKind.ROWS:
                    ops.append(op)
                elif request != NO_REQUEST:
                    ops.append((OpKind.LOST, 0, reason, *op[3:6], *[0] * 6, drafts))
                else:
                    ops.append((OpKind.FORGET, *[0] * 4, count, 0, 0, at, *[0] * 4))
        new.ops = np.array(ops, OP).tobytes()
        return Chunk(new.SerializeToString(), b"", 0, chunk.degraded + 1)

    def _room(self, nbytes: int) -> None:
        """Seal the pending chunk if an op and `nbytes` more would make it too large."""
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
