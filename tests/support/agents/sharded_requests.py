"""Requests of one boot of an engine, reported by each of its shards in its own time."""

from __future__ import annotations

import random

import numpy as np

from routetrace.codec.records import FinishReason, OpKind
from routetrace.common.layout import ModelLayout
from routetrace.server.index.records.record import Sums, encode_chunk, encode_open
from routetrace.v1 import routetrace_pb2 as pb
from support.agents.feeder import ChunkMaker

LAYOUT = ModelLayout((0, 2), 3, 16, 2)
STAGES = [LAYOUT.select((0,)), LAYOUT.select((2,))]
ROWS = np.zeros((3, 1, 2), np.uint8)
ROWS[:, :, 1] = 1


class Engine:
    """Requests of one boot; each shard reports them in its own time, as one or two chunks."""

    def __init__(self, rng: random.Random, name: str, shards: list[str]) -> None:
        self.name = name
        self.requests = [(f"r{rng.randrange(4)}", f"t{rng.randrange(3)}") for _ in range(6)]
        self.sequence = dict.fromkeys(shards, 0)
        self.queues: dict[str, list[tuple[str, int]]] = {}
        for shard in shards:
            events = self.queues[shard] = []
            for index in range(len(self.requests)):
                # A BEGIN may be held back behind that of a later request of another id.
                late = events and events[-1][0] == "begin" and rng.random() < 0.3
                if late and self.requests[events[-1][1]][0] != self.requests[index][0]:
                    events.insert(-1, ("begin", index))
                else:
                    events.append(("begin", index))
                if rng.random() < 0.8:
                    events.append(("end", index))
            # An id is used again only after the request before it has ended.
            for index, (request_id, _) in enumerate(self.requests):
                later = [i for i, r in enumerate(self.requests) if r[0] == request_id and i > index]
                if later and ("end", index) not in events:
                    events.insert(events.index(("begin", later[0])), ("end", index))

    def opens(self) -> list[bytes]:
        return [
            encode_open(
                0, ("run", self.name, shard), epoch=1, boot_id="boot",
                layout=self.layout(shard), block_size=0, num_blocks=0,
            )
            for shard in self.queues
        ]  # fmt: skip

    @staticmethod
    def layout(shard: str) -> ModelLayout:
        return STAGES[int(shard[2:]) % 2] if shard else STAGES[0]

    def chunk(self, shard: str, kind: str, index: int, now: float) -> bytes:
        request_id, trace_id = self.requests[index]
        maker = ChunkMaker(self.layout(shard))
        if kind == "begin":
            maker.begins.append(pb.RequestBegin(trace_id=trace_id, prompt_len=1))
            maker.op(OpKind.BEGIN, request_id, value=index)
        else:
            maker.op(OpKind.ROWS, request_id, count=3, frame=maker.frame(ROWS), step=1)
            maker.op(OpKind.FINISH, request_id, count=4, arg=FinishReason.STOP)
        self.sequence[shard] += 1
        chunk = maker.make(self.sequence[shard])
        sums = Sums(chunk.header_crc32, chunk.payload_crc32)
        writer = ("run", self.name, shard)
        return encode_chunk(writer, 1, self.sequence[shard], sums, now, chunk.header)
