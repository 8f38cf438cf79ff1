"""Workers: CPU of a server for each token, in and out, with N workers against one process.

    python benchmarks/workers.py [--workers 2] [--rounds 5] [--quick]

One run for each worker. A round sends every run the same chunks and reads all traces back, through
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

import psutil

from ingest.load import TOKENS, load, send_all
from measure import OWN_CORE, PEER_CORE, QWEN3, cpu_seconds, pin, ratios
from routetrace.client import RouteClient
from routetrace.server.access.partition import place
from routetrace.server.testing import ServerProcess, free_ports, run_server

_names = itertools.count()


def runs_of(workers: int) -> list[str]:
    """Return one run for each worker."""
    names = [f"job{i}" for i in range(100 * workers)]
    return [next(n for n in names if place(n, workers) == w) for w in range(workers)]


def cost(server: ServerProcess, first_port: int, workers: int, runs: list[str], size: int) -> float:
    """Return the server's CPU seconds a token: each run takes in `size` chunks and gives them."""
    begin, tokens = cpu_seconds(server.pid), 0
    for number, run in enumerate(runs):
        name = f"r{next(_names)}"
        part = load(QWEN3, size, message_bytes=1 << 20, name=name, num_blocks=1 << 12)
        # The raw stream of the load does not follow a redirect, as agents do.
        port = first_port + (number if workers > 1 else 0)
        send_all(f"127.0.0.1:{port}", QWEN3, run, part.messages)
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
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    size, rounds = (2, 1) if args.quick else (48, args.rounds)
    runs = runs_of(args.workers)
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
                    )
                )
                for pid in [server.pid, *_children(server.pid)]:
                    pin(PEER_CORE, pid)
                servers[workers] = server, port
            for number in range(rounds + 1):
                turns = list(servers.items())
                for workers, (server, port) in turns if number % 2 else reversed(turns):
                    found = cost(server, port, workers, runs, size)
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
