"""Scale: whether a token costs the same where there are many agents, or many traces.

Costs are CPU seconds of the server for each token that it stores; a ratio compares the same chunks
at the large end and at the small one. And whether any work holds the event loop (scale/mixed.py).
"""

from __future__ import annotations

import itertools
import shutil
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ingest.load import Agent, hello, load, send_all
from measure import OWN_CORE, PEER_CORE, QWEN3, Table, area, cpu_seconds, pin, ratios, rss
from routetrace.server.testing import ServerProcess, run_server
from scale import mixed
from scale.mixed import SMALL

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
        with run_server(data_dir=directory / "traces", log_level="error") as server:
            pin(PEER_CORE, server.pid)
            _traces(table, server)
        (directory / "mixed").mkdir()
        _holds(table, directory / "mixed")
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
    )


def _traces(table: Table, server: ServerProcess) -> None:
    few, many = (200, 2000) if table.quick else (1000, 100_000)
    rounds = 1 if table.quick else 4
    held = 0

    def cost() -> float:
        one = load(QWEN3, 8 if table.quick else 96, message_bytes=1 << 20, num_blocks=1 << 12)
        begin = cpu_seconds(server.pid)
        send_all(server.target, QWEN3, f"cost{next(_names)}", one.messages)
        return (cpu_seconds(server.pid) - begin) / one.tokens

    held += len(mixed.fill(server.target, "few", few))
    cost()
    small = [cost() for _ in range(rounds)]
    while held < many:
        held += len(mixed.fill(server.target, "many", min(many - held, 20_000)))
    large = [cost() for _ in range(rounds)]
    table.add(
        f"cost of a token, {few:,} -> {many:,} traces",
        [value / statistics.median(small) for value in large],
        "x",
        "server CPU, the same chunks beside few traces",
    )


def _holds(table: Table, directory: Path) -> None:
    """How long the event loop is held at most, once the server is warm."""
    traces, seconds = (10_000, 5) if table.quick else (100_000, 30)
    found = mixed.holds(directory, traces=traces, seconds=seconds)
    for hold in sorted(found, reverse=True, key=lambda hold: hold.cpu)[:10]:
        print(f"  {1e3 * hold.cpu:5.1f} ms of {1e3 * hold.wall:5.1f}  {hold.name}", file=sys.stderr)
    worst = max(found, key=lambda hold: hold.cpu)
    table.add(
        "longest hold of the loop under the mixed load",
        1e3 * worst.cpu,
        "ms",
        f"CPU time of a callback: {worst.name}",
        "<= 5",
    )
    table.add(
        "longest hold of the loop under the mixed load, by the clock",
        1e3 * max(hold.wall for hold in found),
        "ms",
        "turns of other processes included",
    )


if __name__ == "__main__":
    area(measure)
