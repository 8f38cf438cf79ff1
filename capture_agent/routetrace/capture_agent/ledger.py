"""What the server knows of the requests that live: needed again if it loses its state."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from routetrace.capture_agent.chunks import Chunk, ChunkBuilder
from routetrace.v1 import routetrace_pb2 as pb
from routetrace.v1.layout import RoutingLayout
from routetrace.v1.records import DIGEST, NO_REQUEST, OP, U32, OpKind, unpack


@dataclass
class _Request:
    facts: pb.RequestBegin
    index: int  # in which requests began
    blocks: list[int]
    end: int  # next position
    lost: tuple[int, int] | None = None  # nothing comes from this position on, and why
    preempted: bool = False
    digests: list[npt.NDArray[Any]] = field(default_factory=list)


class Ledger:
    """Live requests as of the last acknowledged chunk."""

    def __init__(self) -> None:
        self._requests: dict[str, _Request] = {}

    def apply(self, chunk: Chunk) -> None:
        """A chunk was acknowledged."""
        header = pb.ChunkHeader.FromString(chunk.header)
        ops = unpack(header.ops, OP, "ops")
        blocks = unpack(header.block_ids, U32, "block_ids")
        digests = unpack(header.token_digests, DIGEST, "token_digests")
        ops = ops[ops["request"] != NO_REQUEST]
        for kind, _, arg, index, position, count, _, row, at, num, _, _, value in ops.tolist():
            if kind in {OpKind.EXTERNAL, OpKind.RESET}:
                continue
            request_id = header.request_ids[index]
            if kind == OpKind.BEGIN:
                self._requests[request_id] = _Request(
                    header.begins[arg], value, blocks[at : at + num].tolist(), position
                )
            elif kind == OpKind.FINISH:
                self._requests.pop(request_id, None)
            elif request := self._requests.get(request_id):
                if kind == OpKind.BLOCKS:
                    request.blocks += blocks[at : at + num].tolist()
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
                    request.blocks, request.preempted = [], True
                elif kind == OpKind.DIGEST:
                    request.digests.append(digests[row : row + count])
                elif kind == OpKind.RESUME:
                    request.end, request.preempted = position, False
                    request.blocks = blocks[at : at + num].tolist()

    def begin_anew(self, layout: RoutingLayout, block_size: int) -> list[Chunk]:
        """Chunks that tell a server without memory about the live requests."""
        builder = ChunkBuilder(layout, block_size)
        for request_id, request in self._requests.items():
            blocks = np.array(request.blocks, U32)
            builder.begin(request_id, request.facts, request.index, 0, 0, blocks)
            for digests in request.digests:
                builder.digests(request_id, digests)
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
