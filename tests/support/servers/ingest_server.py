"""An IngestService for agent tests: strict about what it is sent, scripted in what it answers.

It keeps the plainest model of what ops mean: dictionaries from positions and slots to rows.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Iterator
from concurrent import futures
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np

from routetrace.codec.frame import decode_frame
from routetrace.codec.records import (
    DIGEST,
    NO_REQUEST,
    OF_NO_REQUEST,
    OP,
    U32,
    U64,
    OpKind,
    unpack,
)
from routetrace.common.errors import ERROR_METADATA_KEY, RouteTraceError
from routetrace.common.layout import ModelLayout
from routetrace.v1 import routetrace_pb2 as pb
from routetrace.v1.routetrace_pb2_grpc import (
    IngestServiceServicer,
    add_IngestServiceServicer_to_server,
)

Row = tuple[bytes, int]  # ids, weight version


NO_DRAFTS = 1 << 32


@dataclass
class Attempt:
    cached: dict[int, Row | None] = field(default_factory=dict)
    rows: dict[int, Row] = field(default_factory=dict)
    # position, count, reason; not compared, since neighbours may come as one or as two
    lost: list[tuple[int, int, int]] = field(default_factory=list, compare=False)


@dataclass
class Request:
    request_id: str
    facts: pb.RequestBegin
    attempts: list[Attempt]
    blocks: list[int]
    index: int = -1
    digests: dict[int, int] = field(default_factory=dict)
    drafts: int = NO_DRAFTS  # first position that may still be rejected
    known: int = 0  # leading tokens whose rows it has yet to inherit
    erased: set[int] = field(default_factory=set)  # positions of drafts whose KV was replaced since
    stops: list[int] = field(default_factory=list, compare=False)  # of each preemption
    had: list[int] = field(default_factory=list)  # tokens at each resume
    num_tokens: int = -1
    reason: int = 0

    def row(self, position: int) -> bytes | None:
        entry = self.attempts[-1].rows.get(position) or self.attempts[-1].cached.get(position)
        return entry[0] if entry else None

    def served(self) -> set[int]:
        """Positions of the last attempt that cannot be rejected any more."""
        return {p for p in self.attempts[-1].rows if p < self.drafts}

    @property
    def lost(self) -> list[tuple[int, int, int]]:
        """Position, count and reason, of all attempts."""
        return [entry for attempt in self.attempts for entry in attempt.lost]

    def lost_positions(self, reason: int) -> set[int]:
        return {p for start, n, why in self.lost if why == reason for p in range(start, start + n)}


class Model:
    """State after an engine's ops."""

    def __init__(self, block_size: int = 0) -> None:
        self.block_size = block_size
        self.slots: dict[int, Row] = {}
        self.live: dict[str, Request] = {}
        self.requests: list[Request] = []  # in the order in which they began

    def request(self, request_id: str) -> Request:
        """The newest of that name."""
        return next(r for r in reversed(self.requests) if r.request_id == request_id)

    def _slot(self, request: Request, position: int) -> int | None:
        if not self.block_size or position // self.block_size >= len(request.blocks):
            return None
        block = request.blocks[position // self.block_size]
        return block * self.block_size + position % self.block_size

    def _take(self, request: Request, computed: int, blocks: list[int], external: int) -> None:
        request.blocks, request.known = list(blocks), computed - external
        request.drafts, request.erased = NO_DRAFTS, set()
        self._forget_from(request, computed - external)
        request.attempts.append(Attempt(cached=dict.fromkeys(range(computed - external, computed))))

    def inherit(self, request_id: str) -> None:
        request = self.live[request_id]
        known, request.known = request.known, 0
        for position in range(known):
            slot = self._slot(request, position)
            row = None if slot is None else self.slots.get(slot)
            request.attempts[-1].cached[position] = row
        while known % max(self.block_size, 1):  # others may have written behind them
            self.slots.pop(self._slot(request, known), None)  # type: ignore[arg-type]
            known += 1

    def _forget_from(self, request: Request, position: int) -> None:
        for p in range(position, len(request.blocks) * self.block_size):
            self.slots.pop(self._slot(request, p), None)  # type: ignore[arg-type]

    def _confirm(self, request: Request, stop: int) -> None:
        """Drafts before `stop` cannot be rejected any more."""
        for p, row in request.attempts[-1].rows.items():
            slot = self._slot(request, p)
            if request.drafts <= p < stop and slot is not None and p not in request.erased:
                self.slots[slot] = row
        if request.drafts < stop:
            request.drafts = (
                stop if any(p >= stop for p in request.attempts[-1].rows) else NO_DRAFTS
            )

    def begin(
        self,
        request_id: str,
        facts: Any,
        computed: int,
        blocks: list[int],
        external: int = 0,
        index: int = -1,
    ) -> None:
        assert request_id not in self.live
        request = self.live[request_id] = Request(request_id, facts, [], [], index)
        self.requests.append(request)
        self._take(request, computed, blocks, external)

    def blocks(self, request_id: str, blocks: list[int]) -> None:
        self.live[request_id].blocks.extend(blocks)
        self._forget_blocks(blocks)

    def rows(self, request_id: str, position: int, rows: list[Row], drafts: int = 0) -> None:
        request = self.live[request_id]
        attempt = request.attempts[-1]
        if position < max([*attempt.rows, *attempt.cached], default=-1) + 1:
            self.rewind(request_id, position)
        sure = position + len(rows) - drafts
        self._confirm(request, sure)
        request.drafts = sure if drafts else NO_DRAFTS
        request.erased.difference_update(range(position, position + len(rows)))
        for p, row in enumerate(rows, position):
            attempt.rows[p] = row
            slot = self._slot(request, p)
            if slot is not None and p < sure:
                self.slots[slot] = row

    def slot_rows(self, slots: list[int], rows: list[Row]) -> None:
        self.slots.update(zip(slots, rows, strict=True))

    def rewind(self, request_id: str, position: int) -> None:
        request = self.live[request_id]
        attempt = request.attempts[-1]
        for kept in (attempt.rows, attempt.cached):
            for p in [p for p in kept if p >= position]:
                del kept[p]
        self._forget_from(request, position)
        if position <= request.drafts:
            request.drafts = NO_DRAFTS
        # What was taken back need not come any more.
        attempt.lost = [
            (start, min(n, position - start), why)
            for start, n, why in attempt.lost
            if not n or start < position
        ]

    def preempt(self, request_id: str, position: int) -> None:
        self._confirm(self.live[request_id], position)
        self.rewind(request_id, position)
        self.live[request_id].stops.append(position)
        self.live[request_id].blocks = []
        self.live[request_id].drafts = NO_DRAFTS

    def resume(self, request_id: str, computed: int, blocks: list[int], external: int = 0) -> None:
        self._take(self.live[request_id], computed, blocks, external)

    def finish(self, request_id: str, num_tokens: int, reason: int) -> None:
        request = self.live.pop(request_id)
        self._confirm(request, num_tokens - 1)
        self._forget_from(request, max(0, num_tokens - 1))
        request.blocks = []
        request.drafts = NO_DRAFTS
        request.num_tokens, request.reason = num_tokens, reason
        for attempt in request.attempts:
            for kept in (attempt.rows, attempt.cached):
                for p in [p for p in kept if p >= num_tokens - 1]:
                    del kept[p]

    def lost(
        self, request_id: str, position: int, count: int, reason: int, drafts: int = 0
    ) -> None:
        request = self.live[request_id]
        request.attempts[-1].lost.append((position, count, reason))
        for p in range(position, position + count):
            self.slots.pop(self._slot(request, p), None)  # type: ignore[arg-type]
        if count:
            self._confirm(request, position + count - drafts)

    def forget(self, slots: list[int]) -> None:
        for slot in slots:
            self.slots.pop(slot, None)

    def external(self, blocks: list[int]) -> None:
        self._erase(set(blocks))
        self._forget_blocks(blocks)

    def copy(self, sources: list[int], targets: list[int]) -> None:
        size = self.block_size
        held = [[self.slots.get(b * size + i) for i in range(size)] for b in sources]
        self.external(targets)
        for block, rows in zip(targets, held, strict=True):
            for i, row in enumerate(rows):
                if row is not None:
                    self.slots[block * size + i] = row

    def _erase(self, blocks: set[int]) -> None:
        """Drafts in blocks are not there any more, confirmed or not."""
        for request in self.live.values():
            for p in request.attempts[-1].rows:
                nth = p // self.block_size if self.block_size else len(request.blocks)
                if nth < len(request.blocks) and request.blocks[nth] in blocks:
                    request.erased.add(p)

    def _forget_blocks(self, blocks: list[int]) -> None:
        for block in blocks:
            for slot in range(block * self.block_size, (block + 1) * self.block_size):
                self.slots.pop(slot, None)

    def reset(self, count: int = 0) -> None:
        self._erase({block for request in self.live.values() for block in request.blocks})
        first = count * self.block_size  # of the slots that stay
        self.slots = {s: row for s, row in self.slots.items() if count and s >= first}

    def apply(self, header: pb.ChunkHeader, frames: list[np.ndarray]) -> None:
        """Apply a chunk; `frames` are [n, L, K]."""
        blocks = unpack(header.block_ids, U32, "block_ids").tolist()
        slots = unpack(header.slots, U64, "slots").tolist()
        digests = unpack(header.token_digests, DIGEST, "token_digests").tolist()
        used = [np.zeros(len(frame), int) for frame in frames]
        begun = []
        for op in unpack(header.ops, OP, "ops"):
            kind, request = int(op["kind"]), int(op["request"])
            position, count, at = int(op["position"]), int(op["count"]), int(op["blocks_at"])
            arg, version = int(op["arg"]), int(op["weight_version"])
            row, value = int(op["row"]), int(op["value"])
            name = ""
            if kind not in OF_NO_REQUEST and request != NO_REQUEST:
                name = header.request_ids[request]
            in_slots = kind in {OpKind.ROWS, OpKind.FORGET}
            assert in_slots or at + op["num_blocks"] <= len(blocks)
            some = blocks[at : at + int(op["num_blocks"])]
            if kind == OpKind.ROWS:
                part = frames[op["frame"]][row : row + count]
                assert len(part) == count > 0
                assert op["step"] > 0
                used[op["frame"]][row : row + count] += 1
                rows = [(r.tobytes(), version) for r in part]
                if request == NO_REQUEST:
                    assert not value
                    self.slot_rows(slots[at : at + count], rows)
                else:
                    self.rows(name, position, rows, value)
            elif kind == OpKind.BEGIN:
                begun.append(arg)
                self.begin(name, header.begins[arg], position, some, count, value)
            elif kind == OpKind.BLOCKS:
                self.blocks(name, some)
            elif kind == OpKind.REWIND:
                self.rewind(name, position)
            elif kind == OpKind.PREEMPT:
                self.preempt(name, position)
            elif kind == OpKind.RESUME:
                self.live[name].had.append(value)
                self.resume(name, position, some, count)
            elif kind == OpKind.FINISH:
                self.finish(name, count, arg)
            elif kind == OpKind.LOST:
                self.lost(name, position, count, arg, value)
            elif kind == OpKind.INHERIT:
                self.inherit(name)
            elif kind == OpKind.FORGET:
                assert at + count <= len(slots)
                self.forget(slots[at : at + count])
            elif kind == OpKind.DIGEST:
                assert row + count <= len(digests)
                self.live[name].digests.update(digests[row : row + count])
            elif kind == OpKind.EXTERNAL:
                self.external(some)
            elif kind == OpKind.COPY:
                self.copy(some[: len(some) // 2], some[len(some) // 2 :])
            elif kind == OpKind.RESET:
                self.reset(count)
        assert begun == list(range(len(header.begins)))
        assert all((rows == 1).all() for rows in used), "a row in no op, or in two"


def read_chunk(header: bytes, payload: bytes) -> tuple[pb.ChunkHeader, list[np.ndarray]]:
    """The parts of a chunk, decoded and checked against each other; frames are [n, L, K]."""
    parsed = pb.ChunkHeader.FromString(header)
    layout = ModelLayout.from_proto(parsed.layout)
    lengths = unpack(parsed.frame_lengths, U32, "frame_lengths").tolist()
    assert sum(lengths) == len(payload)
    frames, at = [], 0
    for length in lengths:
        ids = decode_frame(payload[at : at + length]).transpose(1, 0, 2)
        assert ids.shape[1:] == (len(layout.layer_ids), layout.top_k)
        frames.append(ids)
        at += length
    assert [len(f) for f in frames] == unpack(parsed.frame_rows, U32, "frame_rows").tolist()
    return parsed, frames


class IngestServer(IngestServiceServicer):
    """Serves on a port of its own until stopped; a context manager.

    `script`, if set, is asked about each chunk in sequence before it is stored: it returns None to
    store it, an ErrorDetail to reject it, or an exception to end the stream with.
    """

    def __init__(self, max_chunk_bytes: int = 8 << 20) -> None:
        self.max_chunk_bytes = max_chunk_bytes
        self.heartbeat_ms = 0  # asked for
        self.heartbeats: list[pb.Heartbeat] = []  # of all streams
        self.metadata: list[dict[str, str]] = []  # of each stream
        self.script: Callable[[pb.Chunk], pb.ErrorDetail | RouteTraceError | None] | None = None
        # By hello and metadata; returns the refusal of a stream.
        self.admit: Callable[[pb.Hello, dict[str, str]], RouteTraceError | None] | None = None
        self.hold = threading.Event()  # while clear, no chunk is looked at
        self.hold.set()
        self.changed = threading.Condition()
        self.failures: list[BaseException] = []  # what was wrong with the agent's messages
        self.port = 0
        self.boots = 0
        self.welcomes = 0
        self.rejects = 0
        self.forget()
        self.start()

    def forget(self) -> None:
        """Lose everything, as a server whose disk is gone."""
        self.boots += 1
        self.epoch = 0
        self.hello: pb.Hello | None = None
        self.next_sequence = 1
        self.chunks: list[pb.Chunk] = []
        self.model = Model()

    def start(self) -> None:
        self._server = grpc.server(
            futures.ThreadPoolExecutor(8),
            options=[("grpc.max_receive_message_length", 64 << 20), ("grpc.so_reuseport", 0)],
        )
        add_IngestServiceServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        self._server.start()

    def stop(self) -> None:
        """End all streams; the port is free afterwards."""
        self.hold.set()
        self._server.stop(0).wait()

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def rows(self) -> int:
        """Rows stored."""
        with self.changed:
            return sum(
                int(unpack(pb.ChunkHeader.FromString(c.header).frame_rows, U32, "").sum())
                for c in self.chunks
            )

    def wait_for(self, predicate: Callable[[], Any], timeout: float = 30) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.failures or predicate(), timeout)
        self.check()

    def check(self) -> None:
        if self.failures:
            raise self.failures[0]

    def __enter__(self) -> IngestServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self.check()

    def Ingest(
        self, request_iterator: Iterator[pb.IngestRequest], context: grpc.ServicerContext
    ) -> Iterator[pb.IngestResponse]:
        try:
            first = next(request_iterator)
            assert first.WhichOneof("message") == "hello"
            boot = self.boots
            metadata = dict(context.invocation_metadata())
            with self.changed:
                self.metadata.append(metadata)
                self.changed.notify_all()
            if self.admit and (refusal := self.admit(first.hello, metadata)):
                raise refusal
            yield pb.IngestResponse(welcome=self._welcome(first.hello))
            epoch = self.epoch
            for request in request_iterator:
                if request.WhichOneof("message") == "heartbeat":
                    assert self.heartbeat_ms, "a heartbeat that nobody asked for"
                    with self.changed:
                        self.heartbeats.append(request.heartbeat)
                        self.changed.notify_all()
                    continue
                assert request.WhichOneof("message") == "chunk"
                self.hold.wait()
                if not context.is_active() or boot != self.boots:
                    return
                with self.changed:
                    assert self.epoch == epoch
                    answer = self._take(request.chunk)
                yield answer
        except RouteTraceError as error:
            context.set_trailing_metadata(
                ((ERROR_METADATA_KEY, error.to_detail().SerializeToString()),)
            )
            context.abort(error.status, str(error))
        except StopIteration:
            pass
        except Exception as error:
            if context.is_active():
                with self.changed:
                    self.failures.append(error)
                    self.changed.notify_all()
                raise

    def _welcome(self, hello: pb.Hello) -> pb.Welcome:
        with self.changed:
            self.welcomes += 1
            if hello.epoch == 0 or hello.epoch != self.epoch:
                self.epoch = self.boots * 100 + self.welcomes
                self.next_sequence = 1
                self.model = Model(hello.block_size)
                self.chunks = []
            self.hello = hello
            self.changed.notify_all()
            return pb.Welcome(
                epoch=self.epoch,
                next_sequence=self.next_sequence,
                max_chunk_bytes=self.max_chunk_bytes,
                heartbeat_ms=self.heartbeat_ms,
            )

    def _take(self, chunk: pb.Chunk) -> pb.IngestResponse:
        assert zlib.crc32(chunk.header) == chunk.header_crc32
        assert zlib.crc32(chunk.payload) == chunk.payload_crc32
        assert len(chunk.header) + len(chunk.payload) <= self.max_chunk_bytes
        if chunk.sequence < self.next_sequence:
            assert chunk == self.chunks[chunk.sequence - 1], "other bytes under a stored number"
        elif chunk.sequence > self.next_sequence:
            detail = pb.ErrorDetail(kind=pb.ERROR_KIND_OUT_OF_SEQUENCE, retry_after_ms=1)
            assert self.rejects, "a gap that no rejection explains"
            return pb.IngestResponse(reject=pb.Reject(sequence=chunk.sequence, error=detail))
        else:
            answer = self.script(chunk) if self.script else None
            if isinstance(answer, RouteTraceError):
                raise answer
            if answer is not None:
                self.rejects += 1
                return pb.IngestResponse(reject=pb.Reject(sequence=chunk.sequence, error=answer))
            header, frames = read_chunk(chunk.header, chunk.payload)
            assert header.layout == self.hello.layout  # type: ignore[union-attr]
            self.model.apply(header, frames)
            self.chunks.append(chunk)
            self.next_sequence += 1
            self.changed.notify_all()
        return pb.IngestResponse(ack=pb.Ack(sequence=chunk.sequence))
