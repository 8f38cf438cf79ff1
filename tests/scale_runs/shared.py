"""Servers that share the partitions of one bucket: each is hit in turn, and gets its share again.

Engines and readers of one run in each partition go through; every row is compared. Two or three
servers, two to four partitions, and runs in one or in all of them, by the seed.
"""

from __future__ import annotations

import json
import random
import signal
import time
from contextlib import ExitStack
from pathlib import Path
from threading import Event, Thread

import numpy as np

from faults.check import check, temporary
from routetrace.client import RouteClient
from routetrace.server.access.partition import place
from routetrace.server.store.object.bucket import Bucket, open_bucket
from scale_runs import stores
from support.agents.routed_engine import Engine
from support.servers.object_servers import ObjectServer, owned_by
from support.waiting import wait_for

BOUND_S = 240.0
HITS = ("kill", "stall", "stop")
BATCH = 20


class Load:
    """An engine of one run that never rests, and a reader of what it has made."""

    def __init__(self, target: str, run: str) -> None:
        self.run = run
        self.engine = Engine(target, run)
        self.client = RouteClient(target, run=run, timeout=BOUND_S)
        self.reads = 0
        self.failures: list[BaseException] = []
        self._stop = Event()
        self._threads = [Thread(target=self._guarded, args=(f,)) for f in (self._make, self._read)]
        for thread in self._threads:
            thread.start()

    def _guarded(self, work: object) -> None:
        try:
            while not self._stop.wait(0.1):
                work()  # type: ignore[operator]
        except BaseException as error:
            self.failures.append(error)

    def _make(self) -> None:
        if self.engine.agent.stats().in_flight_rows < 20 * 500:  # an outage makes no drops
            self.engine.generate(1)

    def _read(self) -> None:
        names = list(self.engine.rows)
        for name in random.sample(names, min(BATCH, len(names))):
            trace = self.client.get(name, wait_for="end", timeout=BOUND_S)
            np.testing.assert_array_equal(trace.topk_ids, self.engine.rows[name])
            self.reads += 1

    def go_on(self, reads: int) -> None:
        """Wait until some more reads are done."""
        until = self.reads + reads
        wait_for(lambda: self.reads >= until or self.failures, BOUND_S)

    def end(self) -> int:
        """Stop, then compare every row; return their number."""
        self._stop.set()
        for thread in self._threads:
            thread.join(BOUND_S)
            check(not thread.is_alive(), "a caller hangs")
        for failure in self.failures:
            raise failure
        self.engine.end()
        return 20 * self.engine.compare(self.client)


def runs_of(partitions: int) -> list[str]:
    """Return one run of each partition."""
    found: dict[int, str] = {}
    number = 0
    while len(found) < partitions:
        found.setdefault(place(f"run-{number}", partitions), f"run-{number}")
        number += 1
    return [found[partition] for partition in range(partitions)]


def chaos(seed: int, hits: int) -> dict[str, int]:
    """Hit one server after the other under load; every row is compared."""
    rng = random.Random(f"shared {seed}")
    count, partitions = rng.choice([(2, 2), (2, 4), (3, 3), (3, 4)])
    spread = rng.choice(([], ["*"]))
    how = "; runs lie in all" if spread else ""
    print(f"  {count} servers share {partitions} partitions{how}", flush=True)
    took: dict[str, list[float]] = {kind: [] for kind in HITS}
    with ExitStack() as stack:
        store = stack.enter_context(stores.seaweed())
        directory = Path(stack.enter_context(temporary()))
        bucket = open_bucket("s3://bucket/runs", store.endpoint)
        servers = [
            ObjectServer(
                directory,
                store.endpoint,
                partitions,
                sweep_interval_seconds=0.5,
                spread_runs=json.dumps(spread),
            )
            for _ in range(count)
        ]
        for server in servers:
            stack.enter_context(server)
        targets = [server.target for server in servers]
        wait_for(lambda: balanced(bucket, partitions, targets), BOUND_S)
        target = ",".join(targets)
        loads = [Load(target, run) for run in runs_of(partitions)]
        for number in range(hits):
            kind = HITS[number % len(HITS)]
            server = rng.choice(servers)
            seconds, balance = hit(kind, bucket, partitions, server, servers)
            took[kind].append(seconds)
            moves = sum(server.log.count("handing over") for server in servers)
            print(
                f"  {kind}: {seconds:.1f} s to others, {balance:.1f} s to balance, "
                f"{moves} hand-overs until now",
                flush=True,
            )
        rows = sum(load.end() for load in loads)
        for load in loads:  # of those servers that own some
            check(load.run in load.client.server_info().runs, "a run is missing")
            load.client.close()
    for kind, figures in took.items():
        if figures:
            print(f"  shared, {kind}: {min(figures):.1f} to {max(figures):.1f} s")
    return {
        "hits of sharing servers": hits,
        "rows of sharing servers": rows,
        "reads of sharing servers": sum(load.reads for load in loads),
    }


def balanced(bucket: Bucket, partitions: int, targets: list[str]) -> bool:
    """Whether each server owns its share."""
    owned = [len(owned_by(bucket, partitions, target)) for target in targets]
    return sum(owned) == partitions and max(owned) - min(owned) <= 1


def hit(
    kind: str,
    bucket: Bucket,
    partitions: int,
    server: ObjectServer,
    servers: list[ObjectServer],
) -> tuple[float, float]:
    """Hit a server; return the seconds until others own its partitions, and until all share."""
    others = [other for other in servers if other is not server]
    begun = time.monotonic()
    if kind == "kill":
        server.kill()
    elif kind == "stall":
        server.signal(signal.SIGSTOP)
    else:
        check(server.stop() == 0, "no clean end")
    wait_for(
        lambda: sum(len(owned_by(bucket, partitions, o.target)) for o in others) == partitions,
        BOUND_S,
    )
    seconds = time.monotonic() - begun
    if kind == "stall":
        server.signal(signal.SIGCONT)
    else:
        server.start()
    begun = time.monotonic()
    wait_for(lambda: balanced(bucket, partitions, [s.target for s in servers]), BOUND_S)
    return seconds, time.monotonic() - begun
