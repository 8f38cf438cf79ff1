"""Chunks of a made-up engine: every chunk and every row is a function of a seed.

So whoever knows the seed and how far a writer got knows what must be served.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import lru_cache
from zlib import crc32

import numpy as np

from routetrace.codec.records import FinishReason, OpKind
from routetrace.common.layout import ModelLayout
from routetrace.v1 import routetrace_pb2 as pb
from support.agents.feeder import ChunkMaker, seal
from support.servers.client_server import rows_of

#: So many rows are possible that no two of a run are the same.
LAYOUT = ModelLayout((1, 2, 4, 5), 6, 64, 3)
RUN = "faults"

#: Seconds that short-lived traces live.
SHORT_TTL = 1

_LIVE_REQUESTS = 4


@dataclass(frozen=True)
class Part:
    """Rows [start, stop) of one request in one chunk."""

    request: int
    start: int
    stop: int
    begins: bool
    ends: bool


@dataclass
class Said:
    """State of a request so far: its first rows, and whether it ended."""

    rows: int = 0
    ended: bool = False


class Script:
    """The chunks of one engine, by sequence number from 1.

    Args:
        seed: of all of it.
        engine_id: the engine; others say other things under the same seed.
        longest: most rows of a request.
        boot: counts the boots of the engine; each says other things, of other traces.
    """

    def __init__(self, seed: int, engine_id: str, longest: int = 60, boot: int = 0) -> None:
        self.seed = seed
        self.engine_id = engine_id
        self._name = f"{engine_id}.{boot}" if boot else engine_id
        self._longest = longest
        self._rng = random.Random(f"script {seed} {self._name}")
        self._num_rows: list[int] = []
        self._live: dict[int, int] = {}  # request -> next row
        self._parts: list[list[Part]] = []
        self._key = (seed << 32) ^ crc32(self._name.encode())
        self.rows = lru_cache(256)(self._rows)

    def hello(self, epoch: int = 0) -> pb.Hello:
        """First message of a stream."""
        return pb.Hello(
            run=RUN,
            engine_id=self.engine_id,
            boot_id=f"{self._name} {self.seed}",
            epoch=epoch,
            layout=LAYOUT.to_proto(),
        )

    # ------------------------------------------------------------------ requests

    def trace_id(self, request: int) -> str:
        """The trace of a request; it has no other."""
        return f"{self._name}-{request}"

    def num_rows(self, request: int) -> int:
        """Rows of a request once it has ended; it has one token more."""
        while len(self._num_rows) <= request:
            self.parts(len(self._parts) + 1)
        return self._num_rows[request]

    def _rows(self, request: int) -> np.ndarray:
        """All its rows, [num_rows, L, K]."""
        return rows_of(LAYOUT, self.num_rows(request), (self._key << 20) + request)

    @staticmethod
    def is_short(request: int) -> bool:
        """Whether its trace lives for SHORT_TTL only."""
        return request % 5 == 4

    @staticmethod
    def is_deleted(request: int) -> bool:
        """Whether its trace is deleted once it has ended."""
        return request % 5 == 3

    # ------------------------------------------------------------------ chunks

    def parts(self, sequence: int) -> list[Part]:
        """Return the content of a chunk by its number."""
        while len(self._parts) < sequence:
            self._parts.append(self._next_parts())
        return self._parts[sequence - 1]

    def _next_parts(self) -> list[Part]:
        rng, live = self._rng, self._live
        begun = []
        while len(live) < _LIVE_REQUESTS and (not live or rng.random() < 0.5):
            request = len(self._num_rows)
            sizes = (1, rng.randint(2, 12), rng.randint(2, self._longest))
            self._num_rows.append(rng.choice(sizes))
            live[request] = 0
            begun.append(request)
        parts = []
        for request in sorted({*begun, *rng.sample(sorted(live), rng.randint(1, len(live)))}):
            start = live[request]
            stop = min(self._num_rows[request], start + rng.choice((1, 2, rng.randint(1, 40))))
            ends = stop == self._num_rows[request]
            parts.append(Part(request, start, stop, request in begun, ends))
            live[request] = stop
            if ends:
                del live[request]
        return parts

    def chunk(self, sequence: int) -> pb.Chunk:
        """The chunk of a number; the same bytes every time."""
        maker = ChunkMaker(LAYOUT)
        for part in self.parts(sequence):
            name = f"r{part.request}"
            if part.begins:
                begin = pb.RequestBegin(trace_id=self.trace_id(part.request), prompt_len=1)
                if self.is_short(part.request):
                    begin.ttl_seconds = SHORT_TTL
                maker.op(OpKind.BEGIN, name, arg=len(maker.begins), value=part.request)
                maker.begins.append(begin)
            maker.op(
                OpKind.ROWS,
                name,
                position=part.start,
                count=part.stop - part.start,
                frame=maker.frame(self.rows(part.request)[part.start : part.stop]),
                step=sequence,
                weight_version=sequence // 50,
            )
            if part.ends:
                maker.op(
                    OpKind.FINISH,
                    name,
                    count=self._num_rows[part.request] + 1,
                    arg=FinishReason.STOP,
                )
        return maker.make(sequence)

    def other(self, sequence: int) -> pb.Chunk:
        """Another chunk of the same number: valid, and nothing that the engine said."""
        header = pb.ChunkHeader(layout=LAYOUT.to_proto(), request_ids=[f"other {sequence}"])
        return seal(sequence, header.SerializeToString(), b"")

    def said(self, sequence: int) -> dict[int, Said]:
        """By request, what the chunks up to a number say."""
        said: dict[int, Said] = {}
        for number in range(1, sequence + 1):
            for part in self.parts(number):
                said[part.request] = Said(part.stop, part.ends)
        return said
