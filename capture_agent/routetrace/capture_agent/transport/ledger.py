"""State of live requests as the server has it, to report again if the server loses it."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

import numpy as np

from routetrace.capture_agent.pipeline.chunks import Chunk, ChunkBuilder
from routetrace.codec.records import (
    DIGEST,
    NO_REQUEST,
    OF_NO_REQUEST,
    PACKED_OP,
    U32,
    OpKind,
    unpack,
)
from routetrace.common.layout import ModelLayout
from routetrace.v1 import routetrace_pb2 as pb

#: Bytes that a request takes, beside its counted parts.
_REQUEST_BYTES = 1024

# As numbers: hashing a member of an enum takes longer than the rest of an op.
_ROWS, _BLOCKS = int(OpKind.ROWS), int(OpKind.BLOCKS)


@dataclass
class _Request:
    # Copies: a part of a message or of an array would keep the whole in memory.
    facts: bytes  # a RequestBegin
    index: int  # number of requests that began before
    blocks: array[int]
    end: int  # next position
    lost: tuple[int, int] | None = None  # position from which on all rows are lost, reason
    preempted: int | None = None  # computed tokens of the attempt in progress, if it is preempted
    # Computed tokens of the attempts before; None: their end was not reported.
    stops: list[int | None] = field(default_factory=list)
    had: list[int] = field(default_factory=list)  # tokens at the begin of each attempt behind them
    digests: bytearray = field(default_factory=bytearray)  # records.DIGEST

    @property
    def nbytes(self) -> int:
        arrays = 4 * len(self.blocks) + 16 * len(self.stops)
        return _REQUEST_BYTES + len(self.facts) + arrays + len(self.digests)


class Ledger:
    """Live requests as of the last acknowledged chunk."""

    def __init__(self) -> None:
        self._requests: dict[str, _Request] = {}
        #: Bytes in memory.
        self.nbytes = 0

    def apply(self, chunk: Chunk) -> None:
        """Apply an acknowledged chunk."""
        header = pb.ChunkHeader.FromString(chunk.header)
        request_ids = list(header.request_ids)
        ops = PACKED_OP.iter_unpack(header.ops)
        block_ids = unpack(header.block_ids, U32, "block_ids").tobytes()
        digests = unpack(header.token_digests, DIGEST, "token_digests")
        for kind, _, arg, index, position, count, _, row, at, num, _, _, value in ops:
            if index == NO_REQUEST or kind in OF_NO_REQUEST:
                continue
            request = self._requests.get(request_ids[index])
            # Nearly all ops are one of these two.
            if kind == _ROWS:
                if request:
                    request.end = position + count
                continue
            if kind == _BLOCKS:
                if request:
                    request.blocks.frombytes(block_ids[4 * at : 4 * (at + num)])
                    self.nbytes += 4 * num
                continue
            self.nbytes -= request.nbytes if request else 0
            blocks = block_ids[4 * at : 4 * (at + num)]
            if kind == OpKind.BEGIN:
                facts = header.begins[arg].SerializeToString()
                request = _Request(facts, value, array("I", blocks), position)
                self._requests[request_ids[index]] = request
            elif kind == OpKind.FINISH:
                self._requests.pop(request_ids[index], None)
                request = None
            elif request:
                if kind == OpKind.LOST and not count:
                    request.lost = (position, arg)
                elif kind == OpKind.LOST:
                    request.end = max(request.end, position + count)
                elif kind == OpKind.REWIND:
                    request.end = min(request.end, position)
                elif kind == OpKind.PREEMPT:
                    request.end = min(request.end, position)
                    request.blocks = array("I")
                    known = position if request.preempted is None else request.preempted
                    request.preempted = min(known, position)
                elif kind == OpKind.DIGEST:
                    request.digests += digests[row : row + count].tobytes()
                elif kind == OpKind.RESUME:
                    request.stops.append(request.preempted)
                    request.had.append(value)
                    request.end, request.preempted = position, None
                    request.blocks = array("I", blocks)
            self.nbytes += request.nbytes if request else 0

    def forget(self, chunk: Chunk) -> None:
        """Forget the requests that a chunk names."""
        for request_id in pb.ChunkHeader.FromString(chunk.header).request_ids:
            if request := self._requests.pop(request_id, None):
                self.nbytes -= request.nbytes

    def begin_anew(self, layout: ModelLayout) -> list[Chunk]:
        """Return chunks that report the live requests to a server without memory of them."""
        builder = ChunkBuilder(layout)
        for request_id, request in self._requests.items():
            facts = pb.RequestBegin.FromString(request.facts)
            blocks, gone = np.array(request.blocks, U32), pb.MISSING_REASON_AGENT_LOST
            builder.begin(request_id, facts, request.index, 0, 0, blocks)
            builder.digests(request_id, np.frombuffer(bytes(request.digests), DIGEST))
            for stop, had in zip(request.stops, request.had, strict=True):
                if stop:
                    builder.op(OpKind.LOST, request_id, arg=gone, count=stop)
                if stop is not None:
                    builder.op(OpKind.PREEMPT, request_id, position=stop)
                builder.op(OpKind.RESUME, request_id, blocks=blocks, value=had)
            if request.end:
                builder.op(OpKind.LOST, request_id, arg=gone, count=request.end)
            if request.lost:
                position, reason = request.lost
                builder.op(OpKind.LOST, request_id, arg=reason, position=position)
            if request.preempted is not None:
                builder.op(OpKind.PREEMPT, request_id, position=request.preempted)
        builder.seal()
        return list(builder.ready)
