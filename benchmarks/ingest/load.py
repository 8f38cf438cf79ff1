"""An agent's messages, built beforehand: a benchmark of ingest measures the server alone.

Chunks are real ones: frames of recorded rows, BEGIN with the KV blocks of the prompt, BLOCKS, ROWS,
digests, FINISH, and the checksums of both parts. They leave through raw gRPC, as fast as
acknowledgements allow.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import grpc
import numpy as np

from measure import Shape
from routetrace.codec.frame import encode_frames
from routetrace.codec.records import DIGEST, OP, U32, FinishReason, OpKind, token_digests
from routetrace.v1 import routetrace_pb2 as pb

#: Tokens of a KV block.
BLOCK = 16
#: Rows of a frame: what an agent puts together before it compresses.
FRAME_ROWS = 256
#: Tokens of which a request was given the first.
TOKENS, PROMPT = 1537, 512
#: Messages under way: those of an agent.
WINDOW = 16

_METHOD = "/routetrace.v1.IngestService/Ingest"
_OPTIONS = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", 64 << 20)]


@dataclass(frozen=True)
class Load:
    """Messages of one stream, as they cross the wire.

    Attributes:
        messages: serialized IngestRequests; sequence numbers from 1 on.
        tokens: rows in all of them.
        payload_bytes: of the frames in them.
    """

    messages: list[bytes]
    tokens: int
    payload_bytes: int


@lru_cache(maxsize=4)
def _frames(shape: Shape, rows: int, count: int) -> list[list[bytes]]:
    """The frames of `count` requests of so many rows."""
    ids = shape.rows(4096)
    found = []
    for request in range(count):
        at = (np.arange(rows) + 331 * request) % len(ids)
        parts = [ids[at[i : i + FRAME_ROWS]] for i in range(0, rows, FRAME_ROWS)]
        found.append(encode_frames(parts, shape.layout))
    return found


def load(
    shape: Shape,
    messages: int,
    *,
    message_bytes: int = 1 << 20,
    tokens: int = TOKENS,
    name: str = "r",
    num_blocks: int = 1 << 16,
    ttl: int = 0,
) -> Load:
    """Messages of about `message_bytes`, each with whole requests of `tokens` tokens.

    Every request is a trace of its own, finished, with its digests; it lives `ttl` seconds.
    """
    frames = _frames(shape, tokens - 1, 16)
    per_request = sum(map(len, frames[0]))
    if per_request > message_bytes:
        tokens = max(2, int(tokens * message_bytes / per_request))
        frames = _frames(shape, tokens - 1, 16)
        per_request = sum(map(len, frames[0]))
    each = max(1, round(message_bytes / per_request))
    digests = token_digests(np.arange(tokens), (min(PROMPT, tokens // 2),))
    made, payload_bytes = [], 0
    # The same few payloads again and again: what differs is in the headers.
    payloads = {
        first: _sealed(b"".join(f for i in range(each) for f in frames[(first + i) % 16]))
        for first in range(16)
    }
    for number in range(messages):
        first = number * each % 16
        chosen = [frames[(first + i) % 16] for i in range(each)]
        names = [f"{name}-{number * each + i}" for i in range(each)]
        header = _header(shape, chosen, names, tokens, digests, number * each, num_blocks, ttl)
        payload, crc = payloads[first]
        chunk = pb.Chunk(
            sequence=number + 1,
            header_crc32=zlib.crc32(header),
            payload_crc32=crc,
            header=header,
            payload=payload,
        )
        made.append(pb.IngestRequest(chunk=chunk).SerializeToString())
        payload_bytes += len(payload)
    return Load(made, messages * each * (tokens - 1), payload_bytes)


def _sealed(payload: bytes) -> tuple[bytes, int]:
    return payload, zlib.crc32(payload)


def _header(
    shape: Shape,
    frames: list[list[bytes]],
    names: list[str],
    tokens: int,
    digests: np.ndarray,
    began: int,
    num_blocks: int,
    ttl: int,
) -> bytes:
    rows = tokens - 1
    counts = [min(FRAME_ROWS, rows - at) for at in range(0, rows, FRAME_ROWS)]
    per_request = -(-tokens // BLOCK)
    ops: list[bytes] = []
    blocks: list[int] = []
    for i in range(len(names)):
        first = (began + i) * per_request % (num_blocks - per_request)
        blocks += range(first, first + per_request)
        prompt = -(-min(PROMPT, tokens // 2) // BLOCK)
        ops.append(_op(OpKind.BEGIN, i, arg=i, value=began + i,
                       blocks_at=i * per_request, num_blocks=prompt))  # fmt: skip
        at, held = 0, prompt
        for number, count in enumerate(counts):
            # As it decodes beside others, it gets a block now and then, each with an op of its own.
            for block in range(held, -(-(at + count) // BLOCK)):
                ops.append(_op(OpKind.BLOCKS, i, blocks_at=i * per_request + block, num_blocks=1))
                held = block + 1
            ops.append(_op(OpKind.ROWS, i, position=at, count=count, step=began + i + 1,
                           frame=i * len(counts) + number, weight_version=1))  # fmt: skip
            at += count
        ops.append(_op(OpKind.DIGEST, i, row=i * len(digests), count=len(digests)))
        ops.append(_op(OpKind.FINISH, i, count=tokens, arg=int(FinishReason.STOP)))
    return pb.ChunkHeader(
        layout=shape.layout.to_proto(),
        request_ids=names,
        begins=[pb.RequestBegin(prompt_len=min(PROMPT, tokens // 2), ttl_seconds=ttl,
                                labels={"group": name[:5]}) for name in names],
        ops=b"".join(ops),
        block_ids=np.array(blocks, U32).tobytes(),
        frame_lengths=np.array([len(f) for one in frames for f in one], U32).tobytes(),
        frame_rows=np.array(counts * len(frames), U32).tobytes(),
        token_digests=np.concatenate([digests] * len(names)).astype(DIGEST).tobytes(),
    ).SerializeToString()  # fmt: skip


def _op(kind: OpKind, request: int, **fields: int) -> bytes:
    op = np.zeros(1, OP)
    op["kind"], op["request"] = kind, request
    for name, value in fields.items():
        op[name] = value
    return op.tobytes()


def hello(shape: Shape, run: str, engine: str = "e0", num_blocks: int = 1 << 16) -> bytes:
    """The first message of a stream that opens a new epoch."""
    return pb.IngestRequest(
        hello=pb.Hello(
            run=run,
            engine_id=engine,
            boot_id="boot",
            layout=shape.layout.to_proto(),
            block_size=BLOCK,
            num_blocks=num_blocks,
        )
    ).SerializeToString()


class Agent:
    """One ingest stream over a connection of its own, without what makes an agent of it."""

    def __init__(self, target: str, greeting: bytes) -> None:
        self._channel = grpc.insecure_channel(target, options=_OPTIONS)
        self._todo = threading.Semaphore(0)
        self._room = threading.Semaphore(WINDOW)
        self._messages: Sequence[bytes] = ()
        call: Any = self._channel.stream_stream(_METHOD)
        self._answers = call(self._requests(greeting), wait_for_ready=True, timeout=3600)
        self._stored = pb.IngestResponse.FromString(next(self._answers)).welcome.next_sequence - 1

    def _requests(self, greeting: bytes) -> Iterator[bytes]:
        yield greeting
        while self._todo.acquire() and self._messages:
            for message in self._messages:
                self._room.acquire()
                yield message

    def send(self, messages: Sequence[bytes]) -> float:
        """All of them, once; returns the seconds until the last is acknowledged."""
        self._messages = messages
        begin = time.perf_counter()
        self._todo.release()
        stop = self._stored + len(messages)
        while self._stored < stop:
            answer = pb.IngestResponse.FromString(next(self._answers))
            if answer.HasField("pace"):
                continue
            if answer.ack.sequence <= self._stored:
                raise SystemExit(f"not acknowledged: {answer}")
            self._room.release(answer.ack.sequence - self._stored)
            self._stored = answer.ack.sequence
        return time.perf_counter() - begin

    def close(self) -> None:
        """End the stream."""
        self._messages = ()
        self._todo.release()
        self._answers.cancel()
        self._channel.close()


def send_all(
    target: str, shape: Shape, run: str, messages: Sequence[bytes], engine_id: str = "e0"
) -> float:
    """Messages through one new stream; returns the seconds until the last is acknowledged."""
    agent = Agent(target, hello(shape, run, engine_id))
    try:
        return agent.send(messages)
    finally:
        agent.close()
