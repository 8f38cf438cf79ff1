"""Servers without disks over SeaweedFS: CPU for each token, replay, and take-over.

    PYTHONPATH=tests python benchmarks/servers.py [--rounds 5] [--quick] [--part cpu]

CPU: three runs go in at once and are read back: at a server with a disk, at one over the object
store, at one that keeps no payloads in memory ("cold"), and at three that share its partitions; all
in turns. Ratios of CPU seconds, beyond those of idle servers, do not depend on the number of cores.
CPU of the store itself is not in them.

Rates: an agent that computes 12,800 tokens/s and a reader, at the first two, at one that keeps a
second of payloads in memory, and at one that keeps the others on a local disk ("files").

Pace: acknowledgements and PUTs beside those of the model (scale/paced.py).

Replay: a store with 500 MB of chunks, whose server is killed and started again, and one whose
standby takes over; without and with a snapshot of the indexes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from capacity_costs import PACE, WORDS
from ingest.load import TOKENS, Load, load, send_all
from measure import OWN_CORE, PEER_CORE, QWEN3, Table, cpu_seconds, pin, ratios
from measure import rounds as in_turns
from routetrace.client import RouteClient
from routetrace.server.store.object.bucket import open_bucket
from routetrace.server.testing import ServerProcess, free_ports, run_server
from scale import paced
from scale_runs.shared import balanced, runs_of
from scale_runs.stores import seaweed
from support.servers.object_servers import owners_of

SERVERS = 3
#: Seconds of the lease where a server is killed.
LEASE = 2
#: Bytes of a chunk, and of the chunks that are replayed.
CHUNK, STORED = 1 << 20, 500_000_000

_names = itertools.count()


# ---------------------------------------------------------------------------- CPU


class Turn(NamedTuple):
    """CPU seconds of all servers for each token in and out, beyond those of idle servers."""

    incoming: float
    outgoing: float

    @property
    def both(self) -> float:
        """Of a token that goes in and out."""
        return self.incoming + self.outgoing


@dataclass
class Cell:
    """Servers that take turns with others.

    Attributes:
        servers: their processes.
        addresses: where each run is served: raw streams follow no redirect.
        idle: cores that all of them take without load.
        turns: by round.
    """

    servers: list[ServerProcess]
    addresses: list[str]
    idle: float = 0.0
    turns: list[Turn] = field(default_factory=list)

    def cpu(self) -> float:
        """Return the CPU seconds of all servers so far."""
        return sum(cpu_seconds(server.pid) for server in self.servers)

    def beyond_idle(self, work: Callable[[], Any]) -> float:
        """Return the CPU seconds of all servers for some work."""
        cpu, begin = self.cpu(), time.monotonic()
        work()
        return self.cpu() - cpu - self.idle * (time.monotonic() - begin)

    def turn(self, runs: Sequence[str], chunks: int) -> Turn:
        """Let each run take some chunks and give them."""
        loads = [_load(chunks) for _ in runs]
        tokens = sum(part.tokens for _, part in loads)
        work = [*zip(self.addresses, runs, loads, strict=True)]

        def send(one: tuple[str, str, tuple[str, Load]]) -> None:
            send_all(one[0], QWEN3, one[1], one[2][1].messages)

        def read(one: tuple[str, str, tuple[str, Load]]) -> None:
            with RouteClient(one[0], run=one[1]) as client:
                rows = sum(len(trace) for trace in client.get_many(_traces(*one[2])))
            if rows != one[2][1].tokens:
                raise SystemExit(f"{rows} rows of {one[2][1].tokens}")

        with ThreadPoolExecutor(len(work)) as pool:
            stored = self.beyond_idle(lambda: [*pool.map(send, work)])
            sent = self.beyond_idle(lambda: [*pool.map(read, work)])
        return Turn(stored / tokens, sent / tokens)


def _load(chunks: int) -> tuple[str, Load]:
    name = f"r{next(_names)}"
    return name, load(QWEN3, chunks, message_bytes=CHUNK, name=name, num_blocks=1 << 10)


def _traces(name: str, part: Load) -> list[str]:
    return [f"{name}-{i}" for i in range(part.tokens // (TOKENS - 1))]


def _object(endpoint: str, prefix: str, **settings: Any) -> dict[str, Any]:
    """Return the settings of a server over the object store."""
    return {
        "store": "object",
        "object_url": f"s3://bucket/{prefix}",
        "object_endpoint": endpoint,
        **settings,
    }


def _shared(stack: ExitStack, endpoint: str) -> Cell:
    """Start servers that share as many partitions; each owns one."""
    ports = [free_ports(SERVERS) for _ in range(SERVERS)]
    servers = [
        stack.enter_context(run_server(port=port, workers=SERVERS, **_object(endpoint, "shared")))
        for port in ports
    ]
    bucket = open_bucket("s3://bucket/shared", endpoint)
    until = time.monotonic() + 300
    # Until nothing is handed over any more: raw streams do not survive it.
    while not balanced(bucket, SERVERS, [server.target for server in servers]):
        if time.monotonic() > until:
            raise SystemExit(f"the partitions are not shared out: {owners_of(bucket, SERVERS)}")
        time.sleep(0.5)
    return Cell(servers, owners_of(bucket, SERVERS))


def children(pid: int) -> list[int]:
    return [child.pid for child in psutil.Process(pid).children(recursive=True)]


def measure_cpu(table: Table, endpoint: str, directory: Path, rounds: int) -> None:
    """Add the lines of CPU for each token."""
    runs = runs_of(SERVERS)
    chunks = 2 if table.quick else 48
    with ExitStack() as stack:

        def one(**settings: Any) -> Cell:
            server = stack.enter_context(run_server(**settings))
            return Cell([server], [server.target] * SERVERS)

        cells = {
            "disk": one(data_dir=directory / "disk"),
            "object": one(**_object(endpoint, "one")),
            "cold": one(**_object(endpoint, "cold", object_cache=0)),
            "shared": _shared(stack, endpoint),
        }
        for cell in cells.values():
            for server in cell.servers:
                for process in (server.pid, *children(server.pid)):
                    pin(PEER_CORE, process)
        seconds = 2 if table.quick else 20
        begun = {name: cell.cpu() for name, cell in cells.items()}
        time.sleep(seconds)
        for name, cell in cells.items():
            cell.idle = (cell.cpu() - begun[name]) / seconds
        for number in range(rounds + 1):
            names = list(cells)
            for name in names[number % len(names) :] + names[: number % len(names)]:
                turn = cells[name].turn(runs, chunks)
                if number:  # the first one fills caches and pools
                    cells[name].turns.append(turn)
    for name, cell in cells.items():
        table.add(f"{name}: CPU of a token in", [1e6 * t.incoming for t in cell.turns], "us", "")
        table.add(f"{name}: CPU of a token out", [1e6 * t.outgoing for t in cell.turns], "us", "")
        table.add(f"{name}: CPU while idle", 100 * cell.idle, "%", "one core, all servers")
    goals = {("object", "disk"): "<= 1.3"}
    for ours, theirs in (("object", "disk"), ("cold", "disk"), ("shared", "object")):
        goal = goals.get((ours, theirs), "")
        for way in ("both", "incoming", "outgoing"):
            mine, other = ([getattr(t, way) for t in cells[n].turns] for n in (ours, theirs))
            table.add(f"{ours}: {way}", ratios(mine, other), "x", theirs, goal * (way == "both"))
    # Each on a core of its own, which serves what its idle processes leave of it.
    alone, shared = cells["object"], cells["shared"]
    left = (1 - shared.idle / SERVERS) / (1 - alone.idle)
    beside = ratios([t.both for t in shared.turns], [t.both for t in alone.turns])
    speedup = [SERVERS * left / ratio for ratio in beside]
    table.add(f"{SERVERS} that share: throughput", speedup, "x", "object", ">= 2.7")


def measure_rates(table: Table, endpoint: str, directory: Path, rounds: int) -> None:
    """Add the line of CPU for each token of a real agent that is read at once."""
    seconds = "2" if table.quick else "8"
    program = str(Path(sys.executable).with_name("routetrace"))

    def cost(server: ServerProcess) -> float:
        command = [program, "bench", "load", "--json", "--target", server.target]
        command += ["--model", "qwen3-30b-a3b", "--seconds", seconds, "--readers", "1"]
        before = cpu_seconds(server.pid)
        done = subprocess.run([*command, *WORDS, *PACE], check=True, capture_output=True)
        rows = int(json.loads(done.stdout)["reads"]["rows"])
        return (cpu_seconds(server.pid) - before) / rows

    kinds = {
        "disk": {"data_dir": directory / "rates"},
        "object": _object(endpoint, "rates"),
        "cold": _object(endpoint, "rates-cold", object_cache=4 << 20),
        "files": _object(
            endpoint, "rates-files", object_cache=4 << 20, object_cache_dir=directory / "files"
        ),
    }
    with ExitStack() as stack:
        cells = {}
        for name, settings in kinds.items():
            server = stack.enter_context(run_server(**settings))
            pin(PEER_CORE, server.pid)
            cells[name] = partial(cost, server)
        found = in_turns(cells, rounds)
    for name, costs in found.items():
        table.add(f"{name}: CPU of an agent's token", [1e6 * c for c in costs], "us", "")
    for name, goal in (("object", "<= 1.3"), ("cold", ""), ("files", "")):
        beside = ratios(found[name], found["disk"])
        table.add(f"{name}: both, of an agent", beside, "x", "disk", goal)


def measure_pace(table: Table, endpoint: str, _: Path, __: int) -> None:
    """Add the lines of a server beside those of the model."""
    with run_server(**_object(endpoint, "paced")) as server:
        pin(PEER_CORE, server.pid)
        paced.measure(table, server, open_bucket("s3://bucket/paced", endpoint))


# ---------------------------------------------------------------------------- replay


@contextmanager
def _filled(table: Table, settings: dict[str, Any]) -> Iterator[tuple[ServerProcess, list[str]]]:
    """Start a server with stored chunks; yield it and its traces."""
    with run_server(**settings) as server:
        name, part = _load((20_000_000 if table.quick else STORED) // CHUNK + 1)
        send_all(server.target, QWEN3, "replay", part.messages)
        yield server, _traces(name, part)


def _again(server: ServerProcess, settings: dict[str, Any]) -> tuple[ServerProcess, float, float]:
    """Kill a server and start it again; return it, its CPU seconds and seconds until ready."""
    server.kill()
    begin = time.monotonic()
    started = run_server(timeout=300, **settings)
    seconds = time.monotonic() - begin
    return started, cpu_seconds(started.pid), seconds


def _snapshot(server: ServerProcess, traces: Sequence[str]) -> None:
    """Make the server write a snapshot: a tenth of its chunks become garbage."""
    with RouteClient(server.target, run="replay") as client:
        client.delete(*traces[: len(traces) // 10])
    until = time.monotonic() + 120
    while "dropped" not in server.log.read_text():
        if time.monotonic() > until:
            raise SystemExit("the server wrote no snapshot")
        time.sleep(0.2)
    time.sleep(1)


def _standby(port: int, settings: dict[str, Any]) -> Callable[[], ServerProcess]:
    """Start a server that stands by; the result waits until it has taken over."""
    pool = ThreadPoolExecutor(1)
    started = pool.submit(run_server, timeout=300, **{**settings, "listen": f"127.0.0.1:{port}"})
    pool.shutdown(wait=False)
    while not started.done():
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            break
        time.sleep(0.1)
    time.sleep(2 * LEASE)  # until it has seen the owner's signs of life
    return started.result


def measure_replay(table: Table, endpoint: str, directory: Path, rounds: int) -> None:
    """Add the lines of replay and take-over."""
    kinds: dict[str, dict[str, Any]] = {
        "disk": {"data_dir": directory / "replayed", "port": free_ports(1)},
        "object": {
            **_object(endpoint, "replayed", object_lease_seconds=LEASE),
            "port": free_ports(1),
        },
    }
    for settings in kinds.values():
        settings["sweep_interval_seconds"] = 2
    with ExitStack() as stack:
        servers, traces = {}, {}
        for kind, settings in kinds.items():
            servers[kind], traces[kind] = stack.enter_context(_filled(table, settings))
        for snapshot in ("without", "with"):
            if snapshot == "with":
                for kind, server in servers.items():
                    _snapshot(server, traces[kind])
            found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in kinds}
            for _ in range(rounds):
                for kind, settings in kinds.items():
                    servers[kind], *figures = _again(servers[kind], settings)
                    stack.enter_context(servers[kind])
                    found[kind].append((figures[0], figures[1]))
            for kind, values in found.items():
                what = f"{kind}, {snapshot} a snapshot"
                table.add(f"{what}: CPU until ready", [v[0] for v in values], "s", "", "<= 5")
                table.add(f"{what}: until ready", [v[1] for v in values], "s", "")
            late = []
            for _ in range(rounds):
                taken = _standby(free_ports(1), kinds["object"])
                begin = time.monotonic()
                servers["object"].kill()
                servers["object"] = stack.enter_context(taken())
                late.append(time.monotonic() - begin - LEASE)
            table.add(
                f"object, {snapshot} a snapshot: take-over", late, "s", f"+ {LEASE} s of lease"
            )


PARTS = {
    "cpu": measure_cpu,
    "rates": measure_rates,
    "pace": measure_pace,
    "replay": measure_replay,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="only that everything runs")
    parser.add_argument("--part", choices=PARTS, help="one part alone")
    args = parser.parse_args()
    table = Table(args.quick)
    pin(OWN_CORE)
    directory = Path(tempfile.mkdtemp(prefix="servers-"))
    try:
        with seaweed() as store:
            for part, measure in PARTS.items():
                if args.part in (None, part):
                    measure(table, store.endpoint, directory, 1 if args.quick else args.rounds)
    finally:
        shutil.rmtree(directory)


if __name__ == "__main__":
    main()
