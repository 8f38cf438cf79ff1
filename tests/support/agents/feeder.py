"""The smallest agent: turns what a sink hears into chunks at once, without lingering."""

from __future__ import annotations

import queue
import zlib

import numpy as np

from routetrace.codec.frame import encode_frame
from routetrace.codec.records import (
    DIGEST,
    NO_REQUEST,
    OP,
    U32,
    U64,
    UNKNOWN_VERSION,
    FinishReason,
    OpKind,
    token_digests,
)
from routetrace.common.layout import ModelLayout
from routetrace.common.security import Security
from routetrace.v1 import routetrace_pb2 as pb
from routetrace.v1 import routetrace_pb2_grpc as pb_grpc

#: Longest life of a stream [s]: more than that of any module's fixtures on a busy machine.
_LONGEST_S = 3600


class ChunkMaker:
    """Collects ops and frames of one chunk."""

    def __init__(self, layout: ModelLayout) -> None:
        self.layout = layout
        self.requests: list[str] = []
        self.begins: list[pb.RequestBegin] = []
        self.ops: list[np.ndarray] = []
        self.blocks: list[int] = []
        self.slots: list[int] = []
        self.digests: list[tuple[int, int]] = []
        self.transfer_ids: list[str] = []
        self.frames: list[bytes] = []
        self.frame_rows: list[int] = []
        self.closed = False

    def op(self, kind: OpKind, request: str | None = None, *, blocks=(), **fields) -> None:
        op = np.zeros(1, OP)
        op["kind"] = kind
        if request is not None:
            if request not in self.requests:
                self.requests.append(request)
            op["request"] = self.requests.index(request)
        op["blocks_at"], op["num_blocks"] = len(self.blocks), len(blocks)
        self.blocks += blocks
        for name, value in fields.items():
            op[name] = value
        self.ops.append(op)

    def frame(self, rows: np.ndarray) -> int:
        self.frames.append(encode_frame(rows, self.layout))
        self.frame_rows.append(len(rows))
        return len(self.frames) - 1

    def make(self, sequence: int) -> pb.Chunk:
        header = pb.ChunkHeader(
            layout=self.layout.to_proto(),
            request_ids=self.requests,
            begins=self.begins,
            ops=b"".join(op.tobytes() for op in self.ops),
            block_ids=np.array(self.blocks, U32).tobytes(),
            slots=np.array(self.slots, U64).tobytes(),
            frame_lengths=np.array([len(f) for f in self.frames], U32).tobytes(),
            frame_rows=np.array(self.frame_rows, U32).tobytes(),
            token_digests=np.array(self.digests, DIGEST).tobytes(),
            transfer_ids=self.transfer_ids,
            closed=self.closed,
        ).SerializeToString()
        return seal(sequence, header, b"".join(self.frames))


def seal(sequence: int, header: bytes, payload: bytes) -> pb.Chunk:
    return pb.Chunk(
        sequence=sequence,
        header_crc32=zlib.crc32(header),
        payload_crc32=zlib.crc32(payload),
        header=header,
        payload=payload,
    )


class Stream:
    """One ingest stream, spoken by hand."""

    def __init__(self, target: str, hello: pb.Hello, security: Security | None = None) -> None:
        security = security or Security()
        self.channel = security.channel(
            target,
            [("grpc.max_receive_message_length", 64 << 20), ("grpc.use_local_subchannel_pool", 1)],
        )
        self._out: queue.SimpleQueue[pb.IngestRequest | None] = queue.SimpleQueue()
        self._in = pb_grpc.IngestServiceStub(self.channel).Ingest(
            iter(self._out.get, None), timeout=_LONGEST_S, metadata=security.metadata()
        )
        self._out.put(pb.IngestRequest(hello=hello))
        self.welcome = next(self._in).welcome

    def send(self, chunk: pb.Chunk) -> None:
        self._out.put(pb.IngestRequest(chunk=chunk))

    def receive(self) -> pb.IngestResponse:
        """The next reply to a chunk."""
        return next(answer for answer in self._in if not answer.HasField("pace"))

    def close(self) -> None:
        self._out.put(None)
        list(self._in)
        self.channel.close()


class Feeder:
    """A sink for SmallEngine; every flush() is one acknowledged chunk."""

    def __init__(
        self,
        target: str,
        layout: ModelLayout,
        *,
        run: str = "default",
        engine_id: str = "e0",
        shard: str = "",
        boot_id: str = "boot",
        epoch: int = 0,
        block_size: int = 0,
        num_blocks: int = 0,
        security: Security | None = None,
        attributes: dict[str, str] | None = None,
        model: int = 0,
        says_unknown_versions: bool = True,
    ) -> None:
        self.layout = layout
        self.hello = pb.Hello(
            run=run,
            engine_id=engine_id,
            shard=shard,
            boot_id=boot_id,
            epoch=epoch,
            layout=layout.to_proto(),
            block_size=block_size,
            num_blocks=num_blocks,
            attributes=attributes,
            model=model,
            says_unknown_versions=says_unknown_versions,
        )
        self.stream = Stream(target, self.hello, security)
        self.sequence = self.stream.welcome.next_sequence
        self.names: list[str] = []
        self.version = 0
        self.step_number = 0
        self.chunk = ChunkMaker(layout)
        self.last = b""
        """Last chunk that was sent."""

    def begin(self, request_id, *, trace_id="", prompt_len=0, labels=None, num_computed_tokens=0,
              num_external_tokens=0, block_ids=(), ttl_seconds=0, prompt_token_ids=None,
              ends=(), transfer_id="", nonce=0, kv_weight_version=None) -> int:  # fmt: skip
        self.chunk.begins.append(
            pb.RequestBegin(
                trace_id=trace_id,
                prompt_len=prompt_len,
                labels=labels,
                ttl_seconds=ttl_seconds,
                transfer_id=transfer_id,
                nonce=nonce,
                kv_weight_version=kv_weight_version,
            )
        )
        self.chunk.op(
            OpKind.BEGIN,
            request_id,
            blocks=list(block_ids),
            position=num_computed_tokens,
            count=num_external_tokens,
            arg=len(self.chunk.begins) - 1,
            value=len(self.names),
        )
        if num_computed_tokens > num_external_tokens:
            self.chunk.op(OpKind.INHERIT, request_id)
        self.names.append(request_id)
        self.digest(len(self.names) - 1, prompt_token_ids, ends)
        return len(self.names) - 1

    def digest(self, handle, token_ids, ends=()) -> None:
        if token_ids is not None:
            digests = token_digests(np.asarray(token_ids), ends)
            self.chunk.op(OpKind.DIGEST, self.names[handle], row=len(self.chunk.digests),
                          count=len(digests))  # fmt: skip
            self.chunk.digests += digests.tolist()

    def step(self, rows: np.ndarray, runs, tentative: int = 0) -> None:
        self.step_number += 1
        at = 0
        for handle, position, count in np.asarray(runs).tolist():
            self.chunk.op(
                OpKind.ROWS,
                self.names[handle],
                position=position,
                count=count,
                frame=self.chunk.frame(rows[at : at + count]),
                step=self.step_number,
                weight_version=self.version,
                value=tentative,
            )
            at += count

    def step_slots(self, rows: np.ndarray, slots) -> None:
        self.step_number += 1
        at = len(self.chunk.slots)
        self.chunk.slots += list(slots)
        self.chunk.op(OpKind.ROWS, count=len(rows), frame=self.chunk.frame(rows),
                      step=self.step_number, weight_version=self.version)  # fmt: skip
        self.chunk.ops[-1]["request"] = NO_REQUEST
        self.chunk.ops[-1]["blocks_at"] = at

    def add_blocks(self, handle, block_ids) -> None:
        self.chunk.op(OpKind.BLOCKS, self.names[handle], blocks=list(block_ids))

    def rewind(self, handle, position) -> None:
        self.chunk.op(OpKind.REWIND, self.names[handle], position=position)

    def preempt(self, handle, num_computed_tokens) -> None:
        self.chunk.op(OpKind.PREEMPT, self.names[handle], position=num_computed_tokens)

    def resume(self, handle, num_computed_tokens, *, block_ids=(), num_external_tokens=0,
               num_tokens=0) -> None:  # fmt: skip
        self.chunk.op(
            OpKind.RESUME,
            self.names[handle],
            position=num_computed_tokens,
            count=num_external_tokens,
            blocks=list(block_ids),
            value=num_tokens,
        )
        if num_computed_tokens > num_external_tokens:
            self.chunk.op(OpKind.INHERIT, self.names[handle])

    def finish(self, handle, num_tokens, *, reason="stop", token_ids=None, unix_ms=0,
               transfer_id="") -> None:  # fmt: skip
        self.digest(handle, token_ids)
        if transfer_id:
            self.chunk.transfer_ids.append(transfer_id)
        self.chunk.op(
            OpKind.FINISH,
            self.names[handle],
            count=num_tokens,
            arg=FinishReason[reason.upper()],
            row=len(self.chunk.transfer_ids) if transfer_id else 0,
            value=unix_ms,
        )

    def set_weight_version(self, version) -> None:
        self.version = UNKNOWN_VERSION if version is None else version

    def flush(self) -> None:
        if not self.chunk.ops and not self.chunk.closed:
            return
        chunk = self.chunk.make(self.sequence)
        self.last = chunk.SerializeToString()
        self.stream.send(chunk)
        answer = self.stream.receive()
        assert answer.ack.sequence == self.sequence, answer
        self.sequence += 1
        self.chunk = ChunkMaker(self.layout)

    def close(self, *, closed: bool = False) -> None:
        """End the stream; `closed`: as an agent that was closed, else as one that is gone."""
        self.chunk.closed = closed
        self.flush()
        self.stream.close()
