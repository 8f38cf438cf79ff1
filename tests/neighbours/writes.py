"""Attacks of a token that may feed its own runs."""

from __future__ import annotations

from contextlib import suppress

import grpc
import numpy as np

from neighbours.attacking import RUN, Attack, begins, outcome
from neighbours.tenants import LAYOUT
from routetrace.codec.records import FinishReason, OpKind
from routetrace.v1 import routetrace_pb2 as pb
from routetrace.v1 import routetrace_pb2_grpc as pb_grpc
from support.agents.feeder import ChunkMaker, Stream
from support.servers.client_server import rows_of


def bind_step(attack: Attack, calls: int = 60, ids: int = 7_600_000) -> None:
    """Bind requests to a step that never comes."""
    _bind(attack, calls, calls, ids, 1 << 63)


def bind_blocks(attack: Attack, ids: int = 8_000_000, threads: int = 2) -> None:
    """Bind requests of millions of blocks."""
    _bind(attack, threads, 1000, ids, 0)


def _bind(attack: Attack, threads: int, calls: int, ids: int, step: int) -> None:
    feeder = attack.feeder("pool", block_size=1, num_blocks=64)
    feeder.step_slots(rows_of(LAYOUT, 1), [0])
    feeder.flush()
    block_ids = [1] * ids

    def bind(number: int) -> None:
        # A connection takes the messages of its calls one after the other.
        with attack.access.channel() as channel:
            stub = pb_grpc.IngestServiceStub(channel)
            request = pb.BindRequestRequest(
                run=RUN, engine_id="pool", request_id=f"b{number}", block_ids=block_ids,
                num_tokens=ids, step=step,
            )  # fmt: skip
            call = stub.BindRequest.future(request, timeout=60, metadata=attack.access.metadata)
            while not attack.over and not call.done():
                attack.pause(0.05)
            call.cancel()
            with suppress(grpc.FutureCancelledError):
                error = call.exception()
                attack.count(outcome(error) if error else "OK")

    attack.prepared()
    attack.repeat(threads, calls, bind)
    feeder.close()


def many_begins(attack: Attack, chunks: int = 6, requests: int = 60_000) -> None:
    """Send chunks that are full of requests without rows."""
    stream = attack.stream("beginner")
    headers = [begins(number * requests, requests, "b") for number in range(chunks)]
    attack.prepared()
    sequence = 1
    for header in headers:
        if attack.over:
            break
        sequence += attack.ask(stream, sequence, header) == "OK"
    stream.channel.close()


def slot_maps(attack: Attack, writers: int = 12, slots: int = 1 << 25) -> None:
    """Open engines of the largest pools, and reset their caches."""
    maker = ChunkMaker(LAYOUT)
    maker.op(OpKind.RESET)
    header = maker.make(1).header
    attack.prepared()
    streams: list[Stream] = []

    def open_one(number: int) -> None:
        try:
            stream = attack.stream(f"pool-{number}", block_size=16, num_blocks=slots // 16)
        except grpc.RpcError as error:
            attack.count(outcome(error))
            return
        streams.append(stream)
        attack.ask(stream, 1, header)

    attack.repeat(4, writers, open_one)
    attack.pause()
    for stream in streams:
        stream.channel.close()


def crash_loop(attack: Attack, names: int = 600) -> None:
    """Open writers under new names, and hang up."""
    attack.prepared()

    def crash(number: int) -> None:
        try:
            stream = attack.stream(f"pod-{number}")
        except grpc.RpcError as error:
            attack.count(outcome(error))
            attack.pause(0.01)
            return
        attack.count("OK")
        stream.channel.close()

    attack.repeat(4, names, crash)


def fill(attack: Attack, mib: int = 80) -> None:
    """Store finished traces until the store is full, and go on."""
    stream = attack.stream("filler")
    rows = rows_of(LAYOUT, 1000)
    attack.prepared()
    stored = 0
    sequence = 1
    while stored < mib << 20 and not attack.over:
        maker = ChunkMaker(LAYOUT)
        name = f"f{sequence}"
        maker.begins.append(pb.RequestBegin(prompt_len=1))
        maker.op(OpKind.BEGIN, name, value=sequence - 1)
        for at in range(0, 8000, len(rows)):
            frame = maker.frame(np.roll(rows, sequence + at, 1))
            maker.op(OpKind.ROWS, name, position=at, count=len(rows), frame=frame, step=sequence)
        maker.op(OpKind.FINISH, name, count=8001, arg=FinishReason.STOP)
        chunk = maker.make(sequence)
        if attack.ask(stream, sequence, chunk.header, chunk.payload) == "OK":
            sequence += 1
            stored += len(chunk.payload)
        else:
            attack.pause(0.05)
    attack.count("MiB stored", stored >> 20)
    stream.channel.close()


def fill_index(attack: Attack, stored: int = 80_000, chunks: int = 10) -> None:
    """Store finished traces until they take half of the memory limit, and some go for others."""
    attack.store(stored)
    stream = attack.stream("indexer")
    headers = [begins(number * 2000, 2000, "x") for number in range(chunks)]
    attack.prepared()
    sent = 0
    while sent < chunks and not attack.over:
        if attack.ask(stream, sent + 1, headers[sent]) == "OK":
            sent += 1
        else:
            attack.pause(0.05)
    with attack.access.channel() as channel:
        info = pb_grpc.TraceServiceStub(channel).GetServerInfo
        request = pb.GetServerInfoRequest(run=RUN)
        while not attack.over:
            found = info(request, timeout=60, metadata=attack.access.metadata)
            if found.num_traces < stored + 2000 * sent:
                break
            attack.pause(0.2)
    stream.channel.close()


def heartbeat(attack: Attack, reasons: int = 200_000, taken: int = 2500) -> None:
    """Report unknown reasons for drops: too many, then as many as are taken."""
    streams = [attack.stream("beating"), attack.stream("beating on")]
    reports = [
        pb.Heartbeat(dropped_rows={f"reason-{i:07d}": i + 1 for i in range(count)})
        for count in (reasons, taken)
    ]
    attack.prepared()
    streams[0]._out.put(pb.IngestRequest(heartbeat=reports[0]))
    while not attack.over:
        streams[1]._out.put(pb.IngestRequest(heartbeat=reports[1]))
        attack.count("heartbeats")
        attack.pause(0.005)
    for stream in streams:
        stream.channel.close()
