"""Workers: CPU of a server for each token, in and out, with N workers against one process.

    python benchmarks/workers.py [--workers 2] [--spread] [--rounds 5] [--quick]

One run for each worker; with --spread, one run in all of them, with an engine for each. A round
sends each the same chunks and reads all traces back, through
the first port: at the server with one process, and at the one with N workers. Both take turns. The
ratio of CPU seconds of all server processes does not depend on the number of cores; the throughput
of N workers on N cores is N times that of one process, divided by it.
"""

from __future__ import annotations

import argparse
import itertools
import shutil
import statistics
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import psutil

from ingest.load import TOKENS, load, send_all
from measure import OWN_CORE, PEER_CORE, QWEN3, cpu_seconds, pin, ratios
from routetrace.client import RouteClient
from routetrace.server.access.partition import Partition
from routetrace.server.testing import ServerProcess, free_ports, run_server

_names = itertools.count()


class Feed(NamedTuple):
    """Part of the load, for one worker."""

    run: str
    engine_id: str


def feeds(workers: int, *, spread: bool) -> list[Feed]:
    """Return one part of the load for each worker."""
    partition = Partition(0, workers, spread=("job",) if spread else ())
    names = [str(i) for i in range(100 * workers)]
    each = [Feed("job", f"e{n}") if spread else Feed(f"job{n}", "e0") for n in names]
    return [next(f for f in each if partition.of(*f) == w) for w in range(workers)]


def cost(
    server: ServerProcess, first_port: int, workers: int, parts: list[Feed], size: int
) -> float:
    """Return the server's CPU seconds a token: it takes in `size` chunks of each and gives them."""
    begin, tokens = cpu_seconds(server.pid), 0
    for number, (run, engine_id) in enumerate(parts):
        name = f"r{next(_names)}"
        part = load(QWEN3, size, message_bytes=1 << 20, name=name, num_blocks=1 << 12)
        # The raw stream of the load does not follow a redirect, as agents do.
        port = first_port + (number if workers > 1 else 0)
        send_all(f"127.0.0.1:{port}", QWEN3, run, part.messages, engine_id)
        tokens += part.tokens
        with RouteClient(server.target, run=run) as client:
            ids = [f"{name}-{i}" for i in range(part.tokens // (TOKENS - 1))]
            rows = sum(len(trace) for trace in client.get_many(ids))
        if rows != part.tokens:
            raise SystemExit(f"{rows} rows of {part.tokens}")
    return (cpu_seconds(server.pid) - begin) / tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--spread", action="store_true", help="one run in all workers")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    size, rounds = (2, 1) if args.quick else (48, args.rounds)
    parts = feeds(args.workers, spread=args.spread)
    costs: dict[int, list[float]] = {1: [], args.workers: []}
    directory = Path(tempfile.mkdtemp(prefix="workers-"))
    pin(OWN_CORE)
    try:
        with ExitStack() as stack:
            servers = {}
            for workers in costs:
                port = free_ports(workers)
                server = stack.enter_context(
                    run_server(
                        data_dir=directory / str(workers),
                        port=port,
                        workers=workers,
                        log_level="error",
                        spread_runs='["job"]' if args.spread and workers > 1 else "[]",
                    )
                )
                for pid in [server.pid, *_children(server.pid)]:
                    pin(PEER_CORE, pid)
                servers[workers] = server, port
            for number in range(rounds + 1):
                turns = list(servers.items())
                for workers, (server, port) in turns if number % 2 else reversed(turns):
                    found = cost(server, port, workers, parts, size)
                    if number:  # the first one fills caches and pools
                        costs[workers].append(found)
                        print(f"round {number}, workers {workers}: {1e6 * found:.3f} us/token")
    finally:
        shutil.rmtree(directory)
    beside = ratios(costs[args.workers], costs[1])
    low, *_, high = sorted(beside)
    print(
        f"server CPU a token, {args.workers} workers / 1 process: {statistics.median(beside):.3f} "
        f"({low:.3f} to {high:.3f})"
    )


def _children(pid: int) -> list[int]:
    return [child.pid for child in psutil.Process(pid).children(recursive=True)]


if __name__ == "__main__":
    main()
