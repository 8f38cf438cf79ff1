"""Attacks of a token that may read, delete and retire its own run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable
from concurrent.futures import ThreadPoolExecutor

import grpc

from neighbours.attacking import RUN, Attack, hold_streams, outcome
from neighbours.tenants import LAYOUT
from routetrace.v1 import routetrace_pb2 as pb
from routetrace.v1 import routetrace_pb2_grpc as pb_grpc
from support.servers.client_server import rows_of

_PER_CHANNEL = 32
_LARGE_ROWS = 10_000


def stalled(attack: Attack, count: int = 1100) -> None:
    """Open reads of a large trace, and take one message of each."""
    feeder = attack.feeder("large")
    handle = feeder.begin("large", prompt_len=_LARGE_ROWS)
    rows = rows_of(LAYOUT, 250)
    for at in range(0, _LARGE_ROWS, len(rows)):
        feeder.step(rows, [(handle, at, len(rows))])
        feeder.flush()
    feeder.finish(handle, _LARGE_ROWS + 1)
    feeder.flush()
    feeder.close()
    channels = [attack.access.channel() for _ in range(-(-count // _PER_CHANNEL))]
    attack.prepared()
    calls = []

    def take_one(number: int) -> None:
        stub = pb_grpc.TraceServiceStub(channels[number // _PER_CHANNEL])
        request = pb.GetTraceRequest(run=RUN, trace_id="large")
        call = stub.GetTrace(request, metadata=attack.access.metadata)
        calls.append(call)
        try:
            next(call)
            attack.count("OK")
        except grpc.RpcError as error:
            attack.count(outcome(error))

    pool = ThreadPoolExecutor(64)
    futures = [pool.submit(take_one, number) for number in range(count)]
    attack.pause()
    for future in futures:
        future.cancel()
    for channel in channels:
        channel.close()
    pool.shutdown()


def waiting(attack: Attack, count: int = 20_500, per_channel: int = 500) -> None:
    """Wait for traces that never begin."""
    attack.prepared()
    asyncio.run(_wait(attack, count, per_channel))


async def _wait(attack: Attack, count: int, per_channel: int) -> None:
    def wait(channel: grpc.aio.Channel, number: int) -> AsyncIterable[object]:
        request = pb.GetTraceRequest(run=RUN, trace_id=f"w{number}", wait_for=pb.WAIT_FOR_END)
        metadata = attack.access.metadata
        return pb_grpc.TraceServiceStub(channel).GetTrace(request, metadata=metadata)

    await hold_streams(attack, wait, count, per_channel)


def list_by_state(attack: Attack, traces: int = 30_000, threads: int = 4) -> None:
    """List the traces of a state that none has."""
    attack.store(traces)
    with attack.access.channel() as channel:
        stub = pb_grpc.TraceServiceStub(channel)
        request = pb.ListTracesRequest(run=RUN, states=[pb.TRACE_STATE_RUNNING])
        attack.prepared()
        attack.repeat(threads, 1000, lambda _: attack.call(stub.ListTraces, request, 60))


def watch(attack: Attack, traces: int = 30_000, count: int = 1000) -> None:
    """Watch a run of many traces, from many connections."""
    attack.store(traces)
    attack.prepared()
    asyncio.run(_watch(attack, count))


async def _watch(attack: Attack, count: int) -> None:
    def start(channel: grpc.aio.Channel, _: int) -> AsyncIterable[object]:
        request = pb.WatchTracesRequest(run=RUN)
        stub = pb_grpc.TraceServiceStub(channel)
        return stub.WatchTraces(request, metadata=attack.access.metadata)

    await hold_streams(attack, start, count, _PER_CHANNEL)


def retire(attack: Attack, traces: int = 30_000) -> None:
    """Retire all traces, as a trainer does after a step."""
    attack.store(traces)
    with attack.access.channel() as channel:
        stub = pb_grpc.TraceServiceStub(channel)
        attack.prepared()
        request = pb.RetireTracesRequest(run=RUN, through_weight_version=1 << 40)
        if response := attack.call(stub.RetireTraces, request, 120):
            attack.count("retired", response.num_retired)


def growing(attack: Attack, requests: int = 4090) -> None:
    """Ask for the state of a trace of many engine requests, each time that one is added."""
    feeder = attack.feeder("grower")
    row = rows_of(LAYOUT, 1)

    def add(number: int) -> None:
        handle = feeder.begin(f"g{number}", trace_id="growing", prompt_len=1)
        feeder.step(row, [(handle, 0, 1)])
        feeder.finish(handle, 2)

    for number in range(requests):
        add(number)
        if number % 500 == 499:
            feeder.flush()
    feeder.flush()
    with attack.access.channel() as channel:
        stub = pb_grpc.TraceServiceStub(channel)
        request = pb.StatTraceRequest(run=RUN, trace_id="growing")
        attack.prepared()
        number = requests
        while not attack.over:
            add(number)
            feeder.flush()
            number += 1
            attack.call(stub.StatTrace, request, 60)
    feeder.close()


def blocks(attack: Attack, ids: int = 8_000_000, threads: int = 2) -> None:
    """Read millions of blocks, each the same one."""
    feeder = attack.feeder("pool", block_size=1, num_blocks=64)
    with attack.access.channel() as channel:
        stub = pb_grpc.TraceServiceStub(channel)
        request = pb.GetBlocksRequest(
            run=RUN, engine_id="pool", block_ids=[1] * ids, num_tokens=ids
        )

        def read(_: int) -> None:
            try:
                list(stub.GetBlocks(request, timeout=60, metadata=attack.access.metadata))
                attack.count("OK")
            except grpc.RpcError as error:
                attack.count(outcome(error))

        attack.prepared()
        attack.repeat(threads, 1000, read)
    feeder.close()
