"""What the server knows of the requests that live: needed again if it loses its state."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

import numpy as np

from routetrace.capture_agent.chunks import Chunk, ChunkBuilder
from routetrace.v1 import routetrace_pb2 as pb
from routetrace.v1.layout import RoutingLayout
from routetrace.v1.records import DIGEST, NO_REQUEST, OP, U32, OpKind, unpack

#: Bytes that a request takes, beside what is counted.
_REQUEST_BYTES = 1024


@dataclass
class _Request:
    # Copies: a part of a message, or of an array, keeps all of it in memory.
    facts: bytes  # a RequestBegin
    index: int  # in which requests began
    blocks: array[int]
    end: int  # next position
    lost: tuple[int, int] | None = None  # nothing comes from this position on, and why
    preempted: bool = False
    digests: bytearray = field(default_factory=bytearray)  # records.DIGEST

    @property
    def nbytes(self) -> int:
        return _REQUEST_BYTES + len(self.facts) + 4 * len(self.blocks) + len(self.digests)


class Ledger:
    """Live requests as of the last acknowledged chunk."""

    def __init__(self) -> None:
        self._requests: dict[str, _Request] = {}
        #: Bytes of what is known.
        self.nbytes = 0

    def apply(self, chunk: Chunk) -> None:
        """A chunk was acknowledged."""
        header = pb.ChunkHeader.FromString(chunk.header)
        request_ids = list(header.request_ids)
        ops = unpack(header.ops, OP, "ops")
        blocks = unpack(header.block_ids, U32, "block_ids")
        digests = unpack(header.token_digests, DIGEST, "token_digests")
        # Whatever becomes of those that it tells of, they are counted again.
        before = sum(r.nbytes for r in map(self._requests.get, request_ids) if r)
        ops = ops[ops["request"] != NO_REQUEST]
        for kind, _, arg, index, position, count, _, row, at, num, _, _, value in ops.tolist():
            if kind in {OpKind.EXTERNAL, OpKind.RESET}:
                continue
            request_id = request_ids[index]
            if kind == OpKind.BEGIN:
                facts = header.begins[arg].SerializeToString()
                some = array("I", blocks[at : at + num].tobytes())
                self._requests[request_id] = _Request(facts, value, some, position)
            elif kind == OpKind.FINISH:
                self._requests.pop(request_id, None)
            elif request := self._requests.get(request_id):
                if kind == OpKind.BLOCKS:
                    request.blocks.frombytes(blocks[at : at + num].tobytes())
                elif kind == OpKind.ROWS:
                    request.end = position + count
                elif kind == OpKind.LOST and not count:
                    request.lost = (position, arg)
                elif kind == OpKind.LOST:
                    request.end = max(request.end, position + count)
                elif kind == OpKind.REWIND:
                    request.end = min(request.end, position)
                elif kind == OpKind.PREEMPT:
                    request.end = min(request.end, position)
                    request.blocks, request.preempted = array("I"), True
                elif kind == OpKind.DIGEST:
                    request.digests += digests[row : row + count].tobytes()
                elif kind == OpKind.RESUME:
                    request.end, request.preempted = position, False
                    request.blocks = array("I", blocks[at : at + num].tobytes())
        after = sum(r.nbytes for r in map(self._requests.get, request_ids) if r)
        self.nbytes += after - before

    def begin_anew(self, layout: RoutingLayout, block_size: int) -> list[Chunk]:
        """Chunks that tell a server without memory about the live requests."""
        builder = ChunkBuilder(layout, block_size)
        for request_id, request in self._requests.items():
            facts = pb.RequestBegin.FromString(request.facts)
            builder.begin(request_id, facts, request.index, 0, 0, np.array(request.blocks, U32))
            builder.digests(request_id, np.frombuffer(bytes(request.digests), DIGEST))
            if request.end:
                builder.op(
                    OpKind.LOST, request_id, arg=pb.MISSING_REASON_AGENT_LOST, count=request.end
                )
            if request.lost:
                position, reason = request.lost
                builder.op(OpKind.LOST, request_id, arg=reason, position=position)
            if request.preempted:
                builder.op(OpKind.PREEMPT, request_id, position=request.end)
        builder.seal()
        return list(builder.ready)
