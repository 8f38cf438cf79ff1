"""Scale: whether a token costs the same where there are many agents, or many traces.

Costs are CPU seconds of the server for each token that it stores; a ratio compares the same chunks
at the large end and at the small one.
"""

from __future__ import annotations

import itertools
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ingest.load import Agent, hello, load, send_all
from measure import OWN_CORE, PEER_CORE, QWEN3, Shape, Table, area, cpu_seconds, pin, ratios, rss
from routetrace.client import RouteClient
from routetrace.common.layout import ModelLayout
from routetrace.server.testing import ServerProcess, run_server

#: One layer: the indexes are what they are for a large model, and payloads take little disk.
SMALL = Shape("one layer", "", ModelLayout((0,), 1, 64, 4))
#: A payload's blocks and their checksums take 8 bytes for each 16 KiB.
_TABLE_SHARE = 8 / 16384
#: Of a large model, compressed.
_PAYLOAD_PER_TOKEN = 290

_names = itertools.count()


def measure(table: Table) -> None:
    """See the module."""
    pin(OWN_CORE)
    directory = Path(tempfile.mkdtemp(prefix="rows-scale-"))
    try:
        with run_server(data_dir=directory / "agents", log_level="error") as server:
            pin(PEER_CORE, server.pid)
            _agents(table, server)
        with run_server(data_dir=directory / "memory", sweep_interval_seconds=2) as server:
            pin(PEER_CORE, server.pid)
            _memory(table, server)
        with run_server(
            data_dir=directory / "traces", log_level="error", sweep_interval_seconds=5
        ) as server:
            pin(PEER_CORE, server.pid)
            _traces(table, server)
    finally:
        shutil.rmtree(directory)


def _agents(table: Table, server: ServerProcess) -> None:
    many = 16 if table.quick else 256
    rounds = 1 if table.quick else 5
    one = load(QWEN3, (rounds + 1) * many, message_bytes=256 << 10, num_blocks=1 << 12)
    tokens = one.tokens / (rounds + 1)

    def agent(name: str) -> Agent:
        return Agent(server.target, hello(QWEN3, name, num_blocks=1 << 12))

    single = agent("single")
    with ThreadPoolExecutor(many) as pool:
        crowd = list(pool.map(agent, (f"crowd{i}" for i in range(many))))
        costs: dict[str, list[float]] = {"single": [], "crowd": []}
        for number in range(rounds + 1):
            part = one.messages[number * many : (number + 1) * many]
            begin = cpu_seconds(server.pid)
            single.send(part)
            middle = cpu_seconds(server.pid)
            list(pool.map(lambda a, n=number: a.send(one.messages[n : n + 1]), crowd))
            end = cpu_seconds(server.pid)
            if number:
                costs["single"].append((middle - begin) / tokens)
                costs["crowd"].append((end - middle) / tokens)
        for each in [single, *crowd]:
            each.close()
    table.add(
        f"cost of a token, 1 -> {many} agents",
        ratios(costs["crowd"], costs["single"]),
        "x",
        "server CPU, the same chunks from one agent",
        "<= 1.25",
    )


def _memory(table: Table, server: ServerProcess) -> None:
    """Many finished traces of 1.5 k tokens, two or three a chunk, as chunks of 1 MB have them."""
    pool = 1 << 12
    each = 300 if table.quick else 1500

    def fill() -> int:
        name = f"m{next(_names)}"
        one = load(SMALL, each, message_bytes=10_000, name=name, num_blocks=pool)
        send_all(server.target, SMALL, "memory", one.messages)
        return one.tokens

    fill()
    fill()  # so that caches, pools, and the record of the last chunks are as full as they get
    time.sleep(0 if table.quick else 5)  # a sweep or two
    before, tokens = rss(server.pid), 0
    for _ in range(1 if table.quick else 4):
        tokens += fill()
    time.sleep(0 if table.quick else 5)
    grown = rss(server.pid) - before
    table.add(
        "server memory beside the payload",
        grown / tokens + _TABLE_SHARE * _PAYLOAD_PER_TOKEN,
        "B/token",
        f"growth of the process over {tokens / 1e6:.1f} M tokens, blocks of 16",
        "<= 12",
    )


def _traces(table: Table, server: ServerProcess) -> None:
    few, many = (200, 2000) if table.quick else (1000, 100_000)
    rounds = 1 if table.quick else 4
    held = 0

    def fill(count: int, run: str, ttl: int = 0) -> int:
        # Short ones, many in a chunk: only that they are there matters.
        one = load(SMALL, max(1, count // 84), message_bytes=12_800, tokens=33,
                   name=f"f{next(_names)}", num_blocks=1 << 12, ttl=ttl)  # fmt: skip
        send_all(server.target, SMALL, run, one.messages)
        return one.tokens // 32

    def cost() -> float:
        one = load(QWEN3, 8 if table.quick else 96, message_bytes=1 << 20, num_blocks=1 << 12)
        begin = cpu_seconds(server.pid)
        send_all(server.target, QWEN3, f"cost{next(_names)}", one.messages)
        return (cpu_seconds(server.pid) - begin) / one.tokens

    held += fill(few, "few")
    cost()
    small = [cost() for _ in range(rounds)]
    while held < many:
        held += fill(min(many - held, 20_000), "many")
    large = [cost() for _ in range(rounds)]
    table.add(
        f"cost of a token, {few:,} -> {many:,} traces",
        [value / statistics.median(small) for value in large],
        "x",
        "server CPU, the same chunks beside few traces",
        "<= 1.25",
    )
    # A fifth more, which expire together: the sweep that finds them writes a snapshot of the rest.
    fill(many // 5, "gone", ttl=4 if table.quick else 12)
    with RouteClient(server.target, run="gone") as client:
        worst = _longest(client.server_info, 10 if table.quick else 24)
        if client.server_info().num_traces:
            raise SystemExit("no sweep was seen")
    table.add(
        f"longest stall of the loop, sweeps with {held:,} traces", worst, "ms", "an answer's time"
    )


def _longest(ask: Callable[[], object], seconds: float) -> float:
    """The longest that an answer took, in milliseconds."""
    worst, stop = 0.0, time.monotonic() + seconds
    while time.monotonic() < stop:
        begin = time.perf_counter()
        ask()
        worst = max(worst, time.perf_counter() - begin)
        threading.Event().wait(0.001)
    return worst * 1e3


if __name__ == "__main__":
    area(measure)
