"""The decoders of the server: chunks and what they do, records, snapshots."""

from __future__ import annotations

import logging
import random
import zlib
from contextlib import suppress
from functools import cache
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from faults.fuzz.mutate import frames_of, lengths_of, mutate_bytes, mutate_frame, mutate_message
from faults.fuzz.targets import LAYOUTS, Target, pack_parts, unpack_parts
from routetrace.codec.records import NO_REQUEST, OP, SPAN, OpKind, Provenance
from routetrace.common.errors import InvalidArgument, RouteTraceError
from routetrace.common.layout import ModelLayout
from routetrace.server.core import Core
from routetrace.server.index.apply import apply_record
from routetrace.server.index.chunk import check_payload, check_sums, parse_header
from routetrace.server.index.records.format import HEAD, UnsupportedFormat
from routetrace.server.index.records.record import (
    Sums,
    decode_record,
    encode_chunk,
    encode_delete,
    encode_open,
    encode_renew,
)
from routetrace.server.index.state import State
from routetrace.server.index.traces import refs
from routetrace.server.rows.served import segments_of
from routetrace.server.rows.view import Segment, covered, view
from routetrace.server.settings.config import ServerConfig
from routetrace.server.store.interface import Record
from routetrace.server.store.memory import MemoryStore
from routetrace.simulation.small_engine import SmallEngine
from routetrace.v1 import routetrace_pb2 as pb
from support.agents.feeder import ChunkMaker, Feeder
from support.servers.client_server import rows_of

WRITER = ("run", "engine", "")


class Recording(Feeder):
    """A feeder that keeps its chunks."""

    def __init__(self, layout: ModelLayout) -> None:
        self.layout = layout
        self.names: list[str] = []
        self.version = self.step_number = 0
        self.sequence = 1
        self.chunk = ChunkMaker(layout)
        self.chunks: list[pb.Chunk] = []

    def flush(self) -> None:
        if self.chunk.ops:
            self.chunks.append(self.chunk.make(self.sequence))
            self.sequence += 1
            self.chunk = ChunkMaker(self.layout)


@cache
def runs() -> list[tuple[pb.Hello, list[pb.Chunk]]]:
    """Messages of agents whose engines misbehave."""
    found = []
    for seed, layout in enumerate((*LAYOUTS, *LAYOUTS)):
        sink = Recording(layout)
        sim = SmallEngine(sink, layout, seed, num_blocks=14)
        for i in range(6):
            prompt = [sim.rng.randrange(4) for _ in range(sim.rng.randint(1, 14))]
            sim.submit(f"r{i % 4}", prompt, sim.rng.randint(1, 9))
        while sim.step():
            if sim.rng.random() < 0.3:
                sink.flush()
        for name, engine in (("d0", [1] * 70), ("d0", [1] * 70 + [2] * 9)):
            handle = sink.begin(name, prompt_token_ids=engine, prompt_len=len(engine))
            sink.step(rows_of(layout, len(engine)), [(handle, 0, len(engine))], tentative=2)
            sink.finish(handle, len(engine) + 1, token_ids=[*engine, 3])
        sink.step_slots(rows_of(layout, 5), [1, 2, 3, 40, 41])
        sink.flush()
        hello = pb.Hello(
            run="run", engine_id="engine", boot_id="boot", layout=layout.to_proto(),
            block_size=4, num_blocks=14,
        )  # fmt: skip
        found.append((hello, sink.chunks))
    return found


def reseal(chunk: pb.Chunk) -> None:
    """Make the checksums right."""
    chunk.header_crc32 = zlib.crc32(chunk.header)
    chunk.payload_crc32 = zlib.crc32(chunk.payload)


def new_core() -> Core:
    """A server without its sockets."""
    logging.getLogger("routetrace").setLevel(logging.CRITICAL)
    return Core(MemoryStore(1 << 30), ServerConfig(store="memory"))


class ChunkTarget(Target):
    """chunk.py and apply.py: what is taken can be applied, and what is applied can be read."""

    name = "chunk"

    def samples(self, rng: random.Random) -> bytes:
        hello, chunks = rng.choice(runs())
        first = rng.randrange(len(chunks))
        some = chunks[first : first + rng.choice((1, 3, 8))]
        return pack_parts([m.SerializeToString() for m in (hello, *some)])

    def mutate(self, rng: random.Random, data: bytes) -> bytes:
        head, *parts = unpack_parts(data) or [b""]
        if not parts:
            return mutate_bytes(rng, data)
        i = rng.randrange(len(parts))
        chunk = pb.Chunk()
        try:
            chunk.ParseFromString(parts[i])
            header = pb.ChunkHeader.FromString(chunk.header)
        except DecodeError:
            return mutate_bytes(rng, data)
        kind = rng.randrange(10)
        if kind == 0:
            chunk.header = mutate_bytes(rng, chunk.header)
        elif kind == 1:
            parts.insert(rng.randrange(len(parts)), parts[i])
        elif kind == 2 and chunk.payload:
            frames = frames_of(header.frame_lengths, chunk.payload) or [b""]
            frames[0] = mutate_frame(rng, frames[0])
            chunk.payload, header.frame_lengths = b"".join(frames), lengths_of(frames)
            chunk.header = header.SerializeToString()
        else:
            mutate_message(rng, header)
            chunk.header = header.SerializeToString()
        if rng.random() < 0.98:
            reseal(chunk)
        parts[i] = chunk.SerializeToString()
        return pack_parts([head, *parts])

    def one_input(self, data: bytes) -> bool:
        head, *parts = unpack_parts(data) or [b""]
        try:
            hello = pb.Hello.FromString(head)
            layout = ModelLayout.from_proto(hello.layout)
        except (DecodeError, InvalidArgument):
            return False
        core = new_core()
        state = core.state
        writer = apply_record(state, 1, _opened(layout, 4, 14))
        told: dict[int, set[tuple[str, int]]] = {}
        taken = False
        for number, part in enumerate(parts, 2):
            try:
                chunk = pb.Chunk.FromString(part)
                check_sums(chunk)
                parsed = parse_header(chunk.header, layout, writer.slots)
                check_payload(parsed, chunk.payload, layout)
            except (DecodeError, RouteTraceError):
                continue
            sums = Sums(chunk.header_crc32, chunk.payload_crc32)
            record = encode_chunk(WRITER, 1, writer.sequence + 1, sums, 0.0, chunk.header)
            assert apply_record(state, number, record, parsed)
            _learn(told, number, parsed)
            taken = True
        for trace in [*state.traces.oldest_first()]:
            _check_trace(core, trace, told)
        copy = State(state.default_ttl)
        copy.load(state.dump())
        assert b"".join(copy.dump()) == b"".join(state.dump())
        return taken


class StormTarget(ChunkTarget):
    """The same with very many ops of a few kinds: time must not grow with their square."""

    name = "storm"

    def samples(self, rng: random.Random) -> bytes:
        hello, _ = rng.choice(runs())
        return pack_parts([m.SerializeToString() for m in (hello, _storm(rng, hello))])


def _opened(layout: ModelLayout, block_size: int, num_blocks: int) -> bytes:
    return encode_open(
        0, WRITER, epoch=1, boot_id="boot", layout=layout, block_size=block_size,
        num_blocks=num_blocks,
    )  # fmt: skip


def _learn(told: dict[int, set[tuple[str, int]]], number: int, parsed: Any) -> None:
    """Which rows were said to be which positions of which request."""
    for op in np.array(parsed.ops, OP):
        if op["kind"] != OpKind.ROWS:
            continue
        request = int(op["request"])
        for i in range(int(op["count"])):
            ref = refs.pack(number, int(op["frame"]), int(op["row"]) + i)
            known = told.setdefault(ref, set())
            if request != NO_REQUEST:
                known.add((parsed.request_ids[request], int(op["position"]) + i))


def _check_trace(core: Core, trace: Any, told: dict[int, set[tuple[str, int]]]) -> None:
    """Every incarnation can be described and read, and claims nothing that was not said."""
    reader = core.reader
    reader.find(*trace.key)
    for number in trace.join.standing[:50]:
        incarnation = trace.join.incarnation(number)
        known = reader.known(trace, incarnation)
        info = reader.describe(known)
        assert pb.TraceInfo.FromString(info.SerializeToString()) == info
        for policy in (pb.READ_POLICY_AS_SAMPLED, pb.READ_POLICY_LATEST):
            selection = reader.select(known, 0, 0, (), policy)
            rows = reader.rows(known, selection)
            segments = segments_of(rows)
            assert segments == view(incarnation, selection), "what it was before"
            missing = reader.missing(info.state, known, selection, rows)
            _check_segments(core.state, trace, segments, told)
            for layer in selection.layers[:2]:
                there = covered(trace.sources, segments, layer)
                gaps = [
                    (m.start, m.stop) for m in missing if layer in m.layer_ids or not m.layer_ids
                ]
                # Together they are everything, once.
                at = 0
                for start, stop in sorted([*there, *gaps]):
                    assert start == at, f"layer {layer}: {start} follows {at}"
                    at = stop
                assert at == selection.stop


def _check_segments(
    state: State, trace: Any, segments: list[Segment], told: dict[int, set[tuple[str, int]]]
) -> None:
    packed = np.zeros(1, SPAN)
    ends: dict[int, int] = {}
    for index, attempt, span, layers in segments:
        source = trace.sources[index]
        assert 0 <= span.position < span.stop <= 1 << 31
        for layer in layers or source.layout.layer_ids:
            assert ends.get(layer, 0) <= span.position, "a cell twice"
            ends[layer] = span.stop
        frames = state.frames[refs.chunk_of(span.ref)]
        assert refs.frame_of(span.ref) + 1 < len(frames.offsets)
        packed[0] = (
            span.position, span.length, 0, refs.row_of(span.ref), attempt, span.provenance, 0,
            span.weight_version,
        )  # fmt: skip
        for i in {0, span.length - 1}:
            known = told[span.ref + i]  # a row that somebody reported
            if span.provenance == Provenance.FORWARD:
                assert (source.request_id, span.position + i) in known


def _storm(rng: random.Random, hello: pb.Hello) -> pb.Chunk:
    layout = ModelLayout.from_proto(hello.layout)
    maker = ChunkMaker(layout)
    n = rng.choice((500, 5000))
    ops = np.zeros(n, OP)
    kinds = rng.sample([k for k in OpKind if k not in {OpKind.ROWS, OpKind.DIGEST}], 2)
    ops["kind"] = np.random.default_rng(rng.randrange(99)).choice(
        np.array([*kinds, OpKind.ROWS], np.uint8), n
    )
    is_begin, is_rows = ops["kind"] == OpKind.BEGIN, ops["kind"] == OpKind.ROWS
    steps = np.arange(n) * rng.choice((0, 1, 3))
    ops["position"] = np.where(is_begin, 0, steps)
    ops["count"] = np.where(is_rows | (ops["kind"] == OpKind.LOST), 1, 0)
    ops["count"][ops["kind"] == OpKind.FINISH] = 3
    ops["arg"] = np.where(is_begin, np.cumsum(is_begin) - 1, 1)
    ops["row"][is_rows] = np.arange(is_rows.sum())
    ops["value"][is_begin] = rng.choice((0, np.arange(is_begin.sum())))
    rows = np.repeat(rows_of(layout, 1), max(1, int(is_rows.sum())), axis=0)
    maker.frame(rows)
    maker.begins = [pb.RequestBegin(trace_id="t")] * int(is_begin.sum())
    maker.requests = ["a"]
    begin = np.zeros(1, OP)
    begin["kind"], begin["arg"] = OpKind.BLOCKS, 0
    begin["num_blocks"] = 14
    maker.blocks = list(range(14))
    maker.ops = [begin, ops]
    return maker.make(1)


# ------------------------------------------------------------------ what is on disk


def _records(rng: random.Random) -> list[bytes]:
    hello, chunks = rng.choice(runs())
    layout = ModelLayout.from_proto(hello.layout)
    records = [_opened(layout, hello.block_size, hello.num_blocks)]
    for sequence, chunk in enumerate(chunks, 1):
        sums = Sums(chunk.header_crc32, chunk.payload_crc32)
        records.append(encode_chunk(WRITER, 1, sequence, sums, float(sequence), chunk.header))
    records.append(encode_renew(9.0, "run", ["r0", "?"], 5))
    records.append(encode_delete(9.0, "run", ["r1"], "deleted"))
    return records


class RecordTarget(Target):
    """record.py and the replay: a record that cannot be applied is left out, whatever it holds."""

    name = "record"

    def samples(self, rng: random.Random) -> bytes:
        return pack_parts(_records(rng))

    def mutate(self, rng: random.Random, data: bytes) -> bytes:
        parts = unpack_parts(data)
        if not parts:
            return data
        i = rng.randrange(len(parts))
        if rng.random() < 0.7:
            with suppress(DecodeError, RouteTraceError):
                record = decode_record(parts[i])
                mutate_message(rng, record)
                parts[i] = HEAD + record.SerializeToString()
                return pack_parts(parts)
        parts[i] = mutate_bytes(rng, parts[i])
        return pack_parts(parts)

    def one_input(self, data: bytes) -> bool:
        core = new_core()
        for number, record in enumerate(unpack_parts(data), 1):
            core.store.append(Record(number, record, b"")).result()
        try:
            core.journal.recover()
        except UnsupportedFormat:
            return False
        return bool(core.state.traces.traces)


class SnapshotTarget(Target):
    """State.load: a snapshot whose checksums are right and whose content is not."""

    name = "snapshot"

    def samples(self, rng: random.Random) -> bytes:
        core = new_core()
        for number, record in enumerate(_records(rng), 1):
            apply_record(core.state, number, record)
        (piece,) = core.state.dump()
        return piece

    def one_input(self, data: bytes) -> bool:
        state = State(1.0)
        try:
            state.load([data])
        except RouteTraceError:
            return False
        return True
