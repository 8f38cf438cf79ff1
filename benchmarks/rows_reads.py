"""Reads: what a trainer waits for, against sockets, Redis and Arrow Flight with the same bytes.

A real server with its store on disk (warm in the page cache), filled by a real agent: requests of
the shape of Qwen3-30B-A3B that decode side by side, in the frames that the agent makes of them. The
rivals keep the same compressed bytes in memory, in a process of their own on the server's core, and
have nothing to look up, to check, or to put together.
"""

# zstandard takes any buffer, whatever its stubs say; redis is not installed where types are
# checked.
# pyright: reportMissingImports=false, reportArgumentType=false
from __future__ import annotations

import asyncio
import contextlib
import itertools
import multiprocessing
import os
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import numpy as np
import zstandard
from measure import (
    OWN_CORE,
    PEER_CORE,
    QWEN3,
    Table,
    area,
    cpu_seconds,
    pin,
    progress,
    ratios,
    rounds,
    seconds,
)

from routetrace.capture_agent import AgentConfig, CaptureAgent
from routetrace.client import MicroBatch, Plan, Rank, RouteClient, Sample, make_plan
from routetrace.server.testing import ServerProcess, run_server
from routetrace.v1 import routetrace_pb2 as pb
from routetrace.v1.frame import decode_frames, read_header

LAYOUT = QWEN3.layout
LONG = 32_768
MEDIUM = 2_000
SMALL = 128
#: Requests that decode side by side.
LANES = 4

Array = np.ndarray[Any, np.dtype[Any]]


def measure(table: Table) -> None:
    pin(OWN_CORE)
    with (
        tempfile.TemporaryDirectory(prefix="reads-") as data_dir,
        run_server(data_dir=data_dir) as server,
        RouteClient(server.target) as client,
    ):
        with progress("fill the server"):
            ids = draw(LONG)
            long = fill(server.target, ids, "long", LANES, LONG, lanes=LANES)
            count = 100 if table.quick else 250
            medium = fill(server.target, ids, "medium", count, MEDIUM, lanes=50)
            small = fill(server.target, ids, "small", 16, SMALL, lanes=16)
        pin(PEER_CORE, server.pid)
        get_long(table, client, server, long[0])
        get_medium(table, client, server, medium)
        transfer(table, client, server, long)
        ranks(table, client, server, long)
        get_small(table, client, small)
        readers(table, server, medium)


def draw(count: int) -> Array:
    """[count, L, K]: the k that win a race among experts, whose popularity differs by layer.

    No rows come again, as recorded ones would: zstd would find those.
    """
    layers, experts, k = len(LAYOUT.layer_ids), LAYOUT.num_experts, LAYOUT.top_k
    slowness = np.exp(np.random.default_rng(0).normal(0, 1, (layers, experts))).astype(np.float32)
    rng = np.random.default_rng(1)
    rows = np.empty((count, layers, k), LAYOUT.dtype)
    for first in range(0, count, 1024):
        some = rows[first : first + 1024]
        times = rng.standard_exponential((len(some), layers, experts), np.float32) * slowness
        # Positive floats are in the order of their bits; the low ones name the expert.
        keys = times.view(np.uint32)
        keys &= ~np.uint32(experts - 1)
        keys |= np.arange(experts, dtype=np.uint32)
        keys.partition(k - 1, axis=-1)
        some[:] = np.sort(keys[..., :k], axis=-1) & np.uint32(experts - 1)
    return rows


def fill(target: str, ids: Array, name: str, count: int, tokens: int, lanes: int) -> list[str]:
    """Requests that are prefilled, then decode `lanes` at a time; returns their ids."""
    prompt = min(1500, tokens // 4)
    config = AgentConfig(target=target, engine_id=name, layout=LAYOUT, ring_bytes=256 << 20)
    names = [f"{name}-{number}" for number in range(count)]
    with CaptureAgent(config) as agent:
        for first in range(0, count, lanes):
            some = range(first, min(first + lanes, count))
            handles = [agent.begin(names[number], prompt_len=prompt) for number in some]
            start = [1361 * number % len(ids) for number in some]
            for handle, at in zip(handles, start, strict=True):
                rows = ids[(at + np.arange(prompt)) % len(ids)]
                agent.step(rows, [(handle, 0, prompt)])
            places = np.array(start)
            for position in range(prompt, tokens - 1):
                runs = [(handle, position, 1) for handle in handles]
                agent.step(ids[(places + position) % len(ids)], runs)
                if position * len(handles) % 65_536 == 0:
                    agent.flush(60)
            for handle in handles:
                agent.finish(handle, tokens)
            agent.flush(60)
        if agent.stats().dropped_rows:
            raise RuntimeError(f"the agent dropped rows: {agent.stats()}")
    return names


# ---------------------------------------------------------------------------- the same bytes


class Raw:
    """Messages of reads as they come off the wire: the client's own method, and no more.

    Args:
        target: of the server.
    """

    def __init__(self, target: str) -> None:
        options = [("grpc.max_receive_message_length", 64 << 20)]
        self._channel = grpc.insecure_channel(target, options)
        self._get: Any = self._channel.unary_stream(
            "/routetrace.v1.TraceService/GetTrace",
            request_serializer=pb.GetTraceRequest.SerializeToString,
        )

    def messages(self, name: str) -> list[bytes]:
        """All messages of a trace."""
        return list(self._get(pb.GetTraceRequest(run="default", trace_id=name)))

    def transfer(self, name: str) -> int:
        """Takes all messages of a trace; returns their bytes."""
        return sum(
            len(data) for data in self._get(pb.GetTraceRequest(trace_id=name, run="default"))
        )

    def frames(self, name: str) -> list[bytes]:
        """The frames of a trace, by position: what a rival is given."""
        found: list[tuple[int, bytes]] = []
        number = 0
        for data in self.messages(name):
            message = pb.GetTraceResponse.FromString(data)
            spans = np.frombuffer(message.spans, np.dtype("<u4,<u4,<u4,V16"))
            where = {int(frame): int(position) for position, _, frame, _ in reversed(spans)}
            at = 0
            for length in np.frombuffer(message.frame_lengths, "<u4").tolist():
                found.append((where[number], message.payload[at : at + length]))
                at += length
                number += 1
        return [frame for _, frame in sorted(found)]

    def close(self) -> None:
        self._channel.close()


class Planes:
    """The zstd frames of a trace, and where each goes: what a reader without headers works with.

    Args:
        frames: of the trace, in order.
    """

    def __init__(self, frames: list[bytes]) -> None:
        self.data: list[bytes] = []
        self.places: list[tuple[int, int, int, int]] = []  # first layer, layers, first row, rows
        self.rows = 0
        for frame in frames:
            header = read_header(frame)
            layer = 0
            for layers, (a, b) in zip(
                header.group_layers, itertools.pairwise(header.group_offsets), strict=True
            ):
                self.data.append(frame[a:b])
                self.places.append((layer, layers, self.rows, header.num_rows))
                layer += layers
            self.rows += header.num_rows
        self.payload = b"".join(self.data)
        self.lengths = [len(plane) for plane in self.data]

    @property
    def shape(self) -> tuple[int, int, int]:
        return len(LAYOUT.layer_ids), self.rows, LAYOUT.top_k

    def pieces(self, size: int) -> list[bytes]:
        """The payload in pieces of about as many bytes, whole zstd frames each."""
        pieces: list[list[bytes]] = [[]]
        held = 0
        for plane in self.data:
            if held + len(plane) > size:
                pieces.append([])
                held = 0
            pieces[-1].append(plane)
            held += len(plane)
        return [b"".join(piece) for piece in pieces]

    def whole(self) -> list[bytes]:
        """One zstd frame for all rows of a layer, in their place."""
        ids = np.empty(self.shape, np.uint8)
        self.decode(memoryview(self.payload), ids)
        context = zstandard.ZstdCompressor(level=3)
        return [context.compress(layer) for layer in ids]

    def decode(self, payload: memoryview, out: Array) -> None:
        """All of them, in one call of zstd, copied to their place."""
        parts, at = [], 0
        for length in self.lengths:
            parts.append(payload[at : at + length])
            at += length
        self.unpack(parts, iter(self.places), out)

    def unpack(
        self, parts: list[memoryview], places: Iterator[tuple[int, int, int, int]], out: Array
    ) -> None:
        """Some of them, to the places that are next."""
        contents = zstandard.ZstdDecompressor().multi_decompress_to_buffer(parts)
        for content, (layer, layers, first, rows) in zip(contents, places, strict=False):
            if layers == 1:
                out[layer, first : first + rows].data.cast("B")[:] = memoryview(content)
            else:
                group = np.frombuffer(content, np.uint8).reshape(layers, rows, -1)
                out[layer : layer + layers, first : first + rows] = group


# ---------------------------------------------------------------------------- rivals


def _child(function: Callable[..., None], *args: Any) -> tuple[Any, Any]:
    """Starts a rival on the server's core; returns what it said first."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process: Any = context.Process(target=function, args=(there, *args), daemon=True)
    process.start()
    pin(PEER_CORE, process.pid or 0)
    return here.recv(), process


@contextlib.contextmanager
def rival(function: Callable[..., None], *args: Any) -> Iterator[tuple[Any, int]]:
    """A rival for a while: what it said first, and its pid."""
    said, process = _child(function, *args)
    try:
        yield said, process.pid or 0
    finally:
        process.terminate()
        process.join()


def serve_tcp(pipe: Any, payloads: list[bytes]) -> None:
    """Sends payload i whenever it is sent the number i."""
    os.sched_setaffinity(0, {PEER_CORE})
    listener = socket.create_server(("127.0.0.1", 0))
    pipe.send(listener.getsockname()[1])
    while True:
        peer, _ = listener.accept()
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while len(number := peer.recv(4)) == 4:
            peer.sendall(payloads[struct.unpack("<I", number)[0]])


class Tcp:
    """The client of `serve_tcp`."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def ask(self, number: int) -> None:
        self._socket.sendall(struct.pack("<I", number))

    def receive(self, into: memoryview) -> None:
        while into:
            into = into[self._socket.recv_into(into) :]

    def close(self) -> None:
        self._socket.close()


def serve_empty(pipe: Any) -> None:
    """A gRPC server whose only call says nothing."""
    os.sched_setaffinity(0, {PEER_CORE})

    async def nothing(_: bytes, __: Any) -> bytes:
        return b""

    async def serve() -> None:
        server = grpc.aio.server()
        handlers: Any = {"Nothing": grpc.unary_unary_rpc_method_handler(nothing)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("empty", handlers),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        pipe.send(f"127.0.0.1:{port}")
        await server.wait_for_termination()

    asyncio.run(serve())


def serve_flight(pipe: Any, traces: list[list[bytes]]) -> None:
    """Sends the messages of trace i for the ticket i, each as a batch of one value."""
    os.sched_setaffinity(0, {PEER_CORE})
    import pyarrow as pa
    from pyarrow import flight

    schema = pa.schema([("message", pa.large_binary())])
    batches = [
        [pa.record_batch([pa.array([m], pa.large_binary())], schema) for m in messages]
        for messages in traces
    ]

    class Server(flight.FlightServerBase):  # type: ignore[misc]
        def do_get(self, _: Any, ticket: Any) -> Any:
            wanted = batches[int(ticket.ticket)]
            reader = pa.RecordBatchReader.from_batches(schema, wanted)
            return flight.RecordBatchStream(reader)

    server = Server("grpc://127.0.0.1:0")
    pipe.send(f"grpc://127.0.0.1:{server.port}")
    server.serve()


# ---------------------------------------------------------------------------- the rows


def get_long(table: Table, client: RouteClient, server: ServerProcess, name: str) -> None:
    """One trace of 32k tokens, into an array of the caller."""
    raw = Raw(server.target)
    planes = Planes(raw.frames(name))
    raw.close()
    whole = planes.whole()
    out = np.zeros(planes.shape, np.uint8)
    plan = plan_of([name], Rank(layer_ids=LAYOUT.layer_ids), LONG)
    ours = np.zeros(plan.shape, np.uint8)
    with rival(serve_tcp, [planes.payload, b"".join(whole)]) as (port, _):
        tcp = Tcp(port)
        buffer = memoryview(bytearray(len(planes.payload)))
        decompressor = zstandard.ZstdDecompressor()

        def as_frames() -> None:
            """All bytes, then all planes in one call of zstd."""
            tcp.ask(0)
            tcp.receive(buffer)
            planes.decode(buffer, out)

        def as_layers() -> None:
            """A layer's bytes, then its only zstd frame, straight to its place; 48 times."""
            tcp.ask(1)
            for layer, data in enumerate(whole):
                part = buffer[: len(data)]
                tcp.receive(part)
                with decompressor.stream_reader(part) as reader:
                    reader.readinto(out[layer].data.cast("B"))

        def fetch() -> None:
            client.fetch(plan, out=ours)

        for rivals in (as_frames, as_layers):
            out[:] = 255
            rivals()
            fetch()
            assert (out == ours[:, : planes.rows]).all(), rivals
        found = rounds(
            {
                "ours": seconds(fetch),
                "frames": seconds(as_frames),
                "layers": seconds(as_layers),
                "get": seconds(lambda: client.get(name)),
                "decode": seconds(lambda: planes.decode(memoryview(planes.payload), out)),
            },
            4 if table.quick else 20,
        )
        tcp.close()
    against = "plain TCP of the same bytes + bare zstd"
    speed = ratios(found["frames"], found["ours"])
    table.add("get of 32k tokens into an array: throughput", speed, "x", against, ">= 0.85")
    table.add("get of 32k tokens: throughput", ratios(found["frames"], found["get"]), "x", against)
    speed = ratios(found["layers"], found["ours"])
    against = "the same with one zstd frame per layer"
    table.add("get of 32k tokens into an array: throughput", speed, "x", against)
    bare = ratios(found["ours"], found["decode"])
    table.add("get of 32k tokens into an array: time", bare, "x", "bare zstd decode, no transfer")


def get_medium(table: Table, client: RouteClient, server: ServerProcess, names: list[str]) -> None:
    """1,000 traces of 2k tokens: in each of four rounds as many as there are, one by one."""
    if not shutil.which("redis-server"):
        print("no redis-server here: its row is left out", file=sys.stderr)
        return
    import redis

    raw = Raw(server.target)
    frames = {name: raw.frames(name) for name in names}
    raw.close()
    spans = {name: list(map(len, frames[name])) for name in names}
    shape = (len(LAYOUT.layer_ids), MEDIUM - 1, LAYOUT.top_k)

    def decode(name: str, blob: bytes) -> Array:
        """What is in a blob, with its checksums, as `get` decodes it."""
        ids = np.empty(shape, np.uint8)
        view, at, row, parts = memoryview(blob), 0, 0, []
        for length in spans[name]:
            frame = view[at : at + length]
            rows = read_header(frame).num_rows
            parts.append((frame, LAYOUT.layer_ids, ids[:, row : row + rows]))
            at, row = at + length, row + rows
        for _ in decode_frames(parts):
            pass
        return ids

    with redis_server() as port:
        store = redis.Redis(port=port)
        for name in names:
            store.set(name, b"".join(frames[name]))
        frames.clear()

        def ours() -> None:
            for trace in client.get_many(names):
                assert len(trace) == MEDIUM - 1

        def theirs() -> None:
            for name in names:
                decode(name, store.get(name))

        def pipelined(depth: int = 8) -> None:
            for first in range(0, len(names), depth):
                some = names[first : first + depth]
                pipeline = store.pipeline(transaction=False)
                for name in some:
                    pipeline.get(name)
                for name, blob in zip(some, pipeline.execute(), strict=True):
                    decode(name, blob)

        cells = {
            "ours": seconds(ours),
            "redis": seconds(theirs),
            "pipelined": seconds(pipelined),
        }
        found = rounds(cells, 2 if table.quick else 4)
        store.close()
    what = "get_many of 1,000 x 2k tokens: throughput"
    speed = ratios(found["redis"], found["ours"])
    table.add(what, speed, "x", "redis-py GET of the same blobs + the same decode", ">= 1.3")
    speed = ratios(found["pipelined"], found["ours"])
    table.add(what, speed, "x", "the same in pipelines of 8")


@contextlib.contextmanager
def redis_server() -> Iterator[int]:
    """A Redis that keeps nothing on disk, on the server's core."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = int(probe.getsockname()[1])
    with tempfile.TemporaryDirectory(prefix="redis-") as where:
        command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--dir", where]
        command += ["--save", "", "--appendonly", "no"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            pin(PEER_CORE, process.pid)
            deadline = time.monotonic() + 10
            while True:
                try:
                    socket.create_connection(("127.0.0.1", port)).close()
                    break
                except OSError:
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(0.02)
            yield port
        finally:
            process.terminate()
            process.wait()


def transfer(table: Table, client: RouteClient, server: ServerProcess, names: list[str]) -> None:
    """The same messages through gRPC from the store, and through Arrow Flight from memory."""
    try:
        from pyarrow import flight
    except ImportError:
        print("no pyarrow here: its rows are left out", file=sys.stderr)
        return
    raw = Raw(server.target)
    traces = [raw.messages(name) for name in names]
    turn = itertools.cycle(range(len(names)))
    decoded = {name: Planes(raw.frames(name)) for name in names}
    out = np.zeros(decoded[names[0]].shape, np.uint8)
    plans = [plan_of([name], Rank(layer_ids=LAYOUT.layer_ids), LONG) for name in names]
    place = np.zeros(plans[0].shape, np.uint8)
    bare = [planes.pieces(1 << 20) for planes in decoded.values()]
    with rival(serve_flight, [*traces, *bare]) as (location, _):
        peer = flight.connect(location)

        def stream(number: int) -> Iterator[Any]:
            for chunk in peer.do_get(flight.Ticket(str(number).encode())):
                yield chunk.data

        def theirs() -> None:
            assert sum(batch.nbytes for batch in stream(next(turn))) > 8 << 20

        def ours() -> None:
            assert raw.transfer(names[next(turn)]) > 8 << 20

        def theirs_decoded() -> None:
            number = next(turn)
            planes = decoded[names[number]]
            lengths, places = iter(planes.lengths), iter(planes.places)
            for batch in stream(len(names) + number):
                view, at, parts = memoryview(batch.column(0)[0].as_buffer()), 0, []
                while at < len(view):
                    length = next(lengths)
                    parts.append(view[at : at + length])
                    at += length
                planes.unpack(parts, places, out)

        def ours_decoded() -> None:
            client.fetch(plans[next(turn)], out=place)

        found = rounds(
            {
                "ours": seconds(ours),
                "theirs": seconds(theirs),
                "ours decoded": seconds(ours_decoded),
                "theirs decoded": seconds(theirs_decoded),
            },
            4 if table.quick else 20,
        )
        peer.close()
    raw.close()
    speed = ratios(found["theirs"], found["ours"])
    what = "stream of 32k tokens, not decoded: throughput"
    table.add(what, speed, "x", "Arrow Flight do_get, same messages, in memory", ">= 0.9")
    speed = ratios(found["theirs decoded"], found["ours decoded"])
    what = "stream of 32k tokens, decoded: throughput"
    table.add(what, speed, "x", "Arrow Flight do_get + bare zstd", ">= 0.9")


def plan_of(names: list[str], rank: Rank, tokens: int) -> Plan:
    samples = [Sample.of(name, tokens) for name in names]
    return make_plan(LAYOUT, MicroBatch.padded(samples, tokens), rank)


def ranks(table: Table, client: RouteClient, server: ServerProcess, names: list[str]) -> None:
    """Each of 32 ranks takes its slice of a batch: PP4, CP2, TP4 with sequence parallelism."""
    stage = len(LAYOUT.layer_ids) // 4
    splits = [
        Rank(
            layer_ids=LAYOUT.layer_ids[p * stage : (p + 1) * stage],
            cp_size=2,
            cp_rank=c,
            sp_size=4,
            sp_rank=t,
        )
        for p in range(4)
        for c in range(2)
        for t in range(4)
    ]
    plans = [plan_of(names, split, LONG) for split in splits]
    whole = plan_of(names, Rank(layer_ids=LAYOUT.layer_ids), LONG)
    outs = {plan.shape: np.zeros(plan.shape, np.uint8) for plan in (*plans, whole)}

    def fetch(plan: Plan) -> int:
        rows = client.fetch(plan, out=outs[plan.shape])
        assert rows.coverage == 1
        return rows.stats.bytes_fetched

    everything = fetch(whole)
    share = [fetch(plan) / everything for plan in plans[:: 8 if table.quick else 1]]
    what = "a rank of 32 takes its slice:"
    table.add(f"{what} bytes", share, "x", "all rows of the batch", "<= 0.04")
    some = itertools.cycle(plans)
    used: dict[str, list[float]] = {"slice": [], "all": []}

    def cell(name: str, plan: Callable[[], Plan], repeat: int) -> Callable[[], float]:
        def run() -> float:
            before, start = cpu_seconds(server.pid), time.perf_counter()
            for _ in range(repeat):
                fetch(plan())
            took = (time.perf_counter() - start) / repeat
            used[name].append((cpu_seconds(server.pid) - before) / repeat)
            return took

        return run

    cells = {"slice": cell("slice", lambda: next(some), 16), "all": cell("all", lambda: whole, 1)}
    found = rounds(cells, 3 if table.quick else 12)
    time_ratio = ratios(found["slice"], found["all"])
    table.add(f"{what} time", time_ratio, "x", "one rank that takes all rows", "<= 0.04")
    cpu = float(np.mean(used["slice"][1:]) / np.mean(used["all"][1:]))
    table.add(f"{what} server CPU", cpu, "x", "one rank that takes all rows")


def get_small(table: Table, client: RouteClient, names: list[str]) -> None:
    """A short request, one at a time: the median of many, against a call that says nothing."""
    calls = 50 if table.quick else 300
    turn = itertools.cycle(names)
    with rival(serve_empty) as (target, _), grpc.insecure_channel(target) as channel:
        empty: Any = channel.unary_unary("/empty/Nothing")

        def p50(call: Callable[[], Any]) -> Callable[[], float]:
            def cell() -> float:
                took = []
                for _ in range(calls):
                    start = time.perf_counter()
                    call()
                    took.append(time.perf_counter() - start)
                return float(np.median(took))

            return cell

        cells = {
            "get": p50(lambda: client.get(next(turn))),
            "empty": p50(lambda: empty(b"")),
            "stat": p50(lambda: client.stat(next(turn))),
        }
        found = rounds(cells, 4 if table.quick else 12)
    against = "an empty unary gRPC call, Python on both sides"
    what = f"get of {SMALL} tokens: p50"
    table.add(what, ratios(found["get"], found["empty"]), "x", against, "<= 2")
    table.add("stat: p50", ratios(found["stat"], found["empty"]), "x", against)
    table.add(what, [value * 1e6 for value in found["get"]], "us", "this machine")


def readers(table: Table, server: ServerProcess, names: list[str]) -> None:
    """What a token costs with 64 readers at a time, each with its own traces, and with one."""
    raws = [Raw(server.target) for _ in range(64)]
    reads = 64 if table.quick else 256
    used: dict[int, list[float]] = {1: [], 64: []}

    def cell(count: int) -> Callable[[], float]:
        def run() -> float:
            todo = iter([names[i * 7 % len(names)] for i in range(reads)])
            lock = threading.Lock()

            def read(raw: Raw) -> None:
                while True:
                    with lock:
                        name = next(todo, None)
                    if name is None:
                        return
                    raw.transfer(name)

            before, start = cpu_seconds(server.pid), time.perf_counter()
            threads = [threading.Thread(target=read, args=(raw,)) for raw in raws[:count]]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            took = time.perf_counter() - start
            used[count].append(cpu_seconds(server.pid) - before)
            return took

        return run

    found = rounds({"1": cell(1), "64": cell(64)}, 3 if table.quick else 8)
    for raw in raws:
        raw.close()
    cpu = ratios(used[64][1:], used[1][1:])
    what = "64 readers at a time:"
    table.add(f"{what} server CPU per token", cpu, "x", "1 reader", "<= 1.25")
    took = ratios(found["64"], found["1"])
    table.add(f"{what} time per token", took, "x", "1 reader", "<= 1.25")


if __name__ == "__main__":
    area(measure)
