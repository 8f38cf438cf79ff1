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

import itertools
import shutil
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
    Table,
    area,
    cpu_seconds,
    pin,
    progress,
    ratios,
    rounds,
    seconds,
)
from reads.batches import batches
from reads.buffer import into_one_buffer
from reads.load import LAYOUT, Array, draw, fill, plan_of
from reads.locating import locating
from reads.rivals import Tcp, redis_server, rival, serve_empty, serve_flight, serve_tcp
from reads.wire import Planes, Raw
from routetrace.client import FetchPlan, Rank, RouteClient
from routetrace.codec.frame import decode_frames, read_header
from routetrace.server.testing import ServerProcess, run_server

LONG = 32_768
MEDIUM = 2_000
SMALL = 128
#: Requests that decode side by side.
LANES = 4


def measure(table: Table) -> None:
    pin(OWN_CORE)
    with (
        tempfile.TemporaryDirectory(prefix="reads-") as data_dir,
        run_server(data_dir=data_dir) as server,
        RouteClient(server.target) as client,
    ):
        with progress("fill the server"):
            ids = draw(LONG)
            rows = 8 if table.quick else 1
            long = fill(server.target, ids, "long", LANES, LONG, lanes=LANES, rows=rows)
            count = 50 if table.quick else 250
            medium = fill(server.target, ids, "medium", count, MEDIUM, lanes=50, rows=rows)
            small = fill(server.target, ids, "small", 16, SMALL, lanes=16, rows=rows)
        pin(PEER_CORE, server.pid)
        get_long(table, client, server, long[0])
        get_medium(table, client, server, medium)
        batches(table, client, server, ids)
        locating(table, server, ids)
        into_one_buffer(table, client, server.target, ids)
        transfer(table, client, server, long)
        ranks(table, client, server, long)
        get_small(table, server, client, small)
        readers(table, server, medium)


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
            2 if table.quick else 20,
        )
        tcp.close()
    against = "plain TCP of the same bytes + bare zstd"
    speed = ratios(found["frames"], found["ours"])
    table.add("get of 32k tokens into an array: throughput", speed, "x", against)
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
    from redis._parsers import _RESP2Parser

    raw = Raw(server.target)
    frames = {name: raw.frames(name) for name in names}
    raw.close()
    spans = {name: list(map(len, frames[name])) for name in names}
    shape = (len(LAYOUT.layer_ids), MEDIUM - 1, LAYOUT.top_k)

    def decode(name: str, blob: bytes) -> Array:
        """Decode a blob and check its checksums, as `get` does."""
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
        # What redis-py parses with where hiredis, an extra of it, is not installed.
        pool = redis.ConnectionPool(port=port, parser_class=_RESP2Parser)
        plain = redis.Redis(connection_pool=pool)
        for name in names:
            store.set(name, b"".join(frames[name]))
        frames.clear()

        def ours() -> None:
            for trace in client.get_many(names):
                assert len(trace) == MEDIUM - 1

        def theirs(client: Any) -> None:
            for name in names:
                decode(name, client.get(name))

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
            "hiredis": seconds(lambda: theirs(store)),
            "plain": seconds(lambda: theirs(plain)),
            "pipelined": seconds(pipelined),
        }
        found = rounds(cells, 2 if table.quick else 4)
        plain.close()
        store.close()
    what = "get_many of 1,000 x 2k tokens: throughput"
    for parser, against in (
        ("hiredis", "redis-py with hiredis: GET + the same decode"),
        ("plain", "redis-py alone: GET + the same decode"),
    ):
        table.add(what, ratios(found[parser], found["ours"]), "x", against)
    speed = ratios(found["pipelined"], found["ours"])
    table.add(what, speed, "x", "redis-py with hiredis, in pipelines of 8")


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
            2 if table.quick else 20,
        )
        peer.close()
    raw.close()
    speed = ratios(found["theirs"], found["ours"])
    what = "stream of 32k tokens, not decoded: throughput"
    table.add(what, speed, "x", "Arrow Flight do_get, same messages, in memory")
    speed = ratios(found["theirs decoded"], found["ours decoded"])
    what = "stream of 32k tokens, decoded: throughput"
    table.add(what, speed, "x", "Arrow Flight do_get + bare zstd")


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

    def fetch(plan: FetchPlan) -> int:
        rows = client.fetch(plan, out=outs[plan.shape])
        assert rows.coverage == 1
        return rows.stats.bytes_fetched

    everything = fetch(whole)
    share = [fetch(plan) / everything for plan in plans[:: 8 if table.quick else 1]]
    what = "a rank of 32 takes its slice:"
    table.add(f"{what} bytes", share, "x", "all rows of the batch")
    some = itertools.cycle(plans)
    used: dict[str, list[float]] = {"slice": [], "all": []}

    def cell(name: str, plan: Callable[[], FetchPlan], repeat: int) -> Callable[[], float]:
        def run() -> float:
            before, start = cpu_seconds(server.pid), time.perf_counter()
            for _ in range(repeat):
                fetch(plan())
            took = (time.perf_counter() - start) / repeat
            used[name].append((cpu_seconds(server.pid) - before) / repeat)
            return took

        return run

    cells = {"slice": cell("slice", lambda: next(some), 8), "all": cell("all", lambda: whole, 1)}
    found = rounds(cells, 2 if table.quick else 12)
    time_ratio = ratios(found["slice"], found["all"])
    table.add(f"{what} time", time_ratio, "x", "one rank that takes all rows")
    cpu = float(np.mean(used["slice"][1:]) / np.mean(used["all"][1:]))
    table.add(f"{what} server CPU", cpu, "x", "one rank that takes all rows")


def get_small(table: Table, server: ServerProcess, client: RouteClient, names: list[str]) -> None:
    """A short request, one at a time: the median of many, against a call that says nothing."""
    calls = 50 if table.quick else 300
    turn = itertools.cycle(names)
    raw = Raw(server.target)
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
            "raw": p50(lambda: raw.transfer(next(turn))),
            "empty": p50(lambda: empty(b"")),
            "stat": p50(lambda: client.stat(next(turn))),
        }
        found = rounds(cells, 2 if table.quick else 12)
    against = "an empty unary gRPC call, Python on both sides"
    what = f"get of {SMALL} tokens: p50"
    table.add(what, ratios(found["get"], found["empty"]), "x", against, "<= 2")
    table.add(f"{what}, not decoded", ratios(found["raw"], found["empty"]), "x", against)
    raw.close()
    table.add("stat: p50", ratios(found["stat"], found["empty"]), "x", against)
    table.add(what, [value * 1e6 for value in found["get"]], "us", "this machine")


def readers(table: Table, server: ServerProcess, names: list[str]) -> None:
    """Measure the cost of a token with 64 concurrent readers, of different traces, and with one."""
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

    found = rounds({"1": cell(1), "64": cell(64)}, 2 if table.quick else 8)
    for raw in raws:
        raw.close()
    cpu = ratios(used[64][1:], used[1][1:])
    what = "64 readers at a time:"
    table.add(f"{what} server CPU per token", cpu, "x", "1 reader")
    took = ratios(found["64"], found["1"])
    table.add(f"{what} time per token", took, "x", "1 reader")


if __name__ == "__main__":
    area(measure)
