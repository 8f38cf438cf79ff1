"""Servers of the version before, replaced one by one by this one, under load.

Agents and clients are of this version throughout. An engine and a reader of one run in each
partition go through; every row is compared.
"""

from __future__ import annotations

import random
import time
from contextlib import ExitStack
from pathlib import Path

from faults.check import check, temporary
from routetrace.server.store.object.bucket import open_bucket
from scale_runs import stores
from scale_runs.shared import BOUND_S, Load, balanced, hit, runs_of
from support.servers.object_servers import ObjectServer
from support.waiting import wait_for

#: Reads of each load before the next server is upgraded.
READS = 200


def upgrade(seed: int, before: Path) -> dict[str, int]:
    """Upgrade each server in turn; every row is compared.

    Args:
        seed: of the number of servers and partitions, and of the order.
        before: checkout of the version before.
    """
    rng = random.Random(f"upgrade {seed}")
    count, partitions = rng.choice([(2, 1), (2, 2), (3, 3)])
    print(f"  upgrade of {count} servers with {partitions} partitions", flush=True)
    with ExitStack() as stack:
        store = stack.enter_context(stores.seaweed())
        directory = Path(stack.enter_context(temporary()))
        bucket = open_bucket("s3://bucket/runs", store.endpoint)
        servers = [
            ObjectServer(directory, store.endpoint, partitions, before, sweep_interval_seconds=0.5)
            for _ in range(count)
        ]
        for server in servers:
            stack.enter_context(server)
        targets = [server.target for server in servers]
        if partitions == 1:
            wait_for(lambda: one_serves(servers), BOUND_S)
        else:
            wait_for(lambda: balanced(bucket, partitions, targets), BOUND_S)
        loads = [Load(",".join(targets), run) for run in runs_of(partitions)]
        for server in rng.sample(servers, count):
            for load in loads:
                load.go_on(READS)
            server.checkout = None
            if partitions == 1:
                seconds, again = replace(server, servers)
            else:
                seconds, again = hit("stop", bucket, partitions, server, servers)
            print(f"  {seconds:.1f} s to others, {again:.1f} s until all were back", flush=True)
        rows = sum(load.end() for load in loads)
        for load in loads:
            load.client.close()
    return {
        "servers upgraded": count,
        "rows through upgrades": rows,
        "reads through upgrades": sum(load.reads for load in loads),
    }


def one_serves(servers: list[ObjectServer]) -> bool:
    """Whether one server serves and the others stand by."""
    return [s.serves for s in servers].count(True) == 1 and (
        [s.stands_by for s in servers].count(True) == len(servers) - 1
    )


def replace(server: ObjectServer, servers: list[ObjectServer]) -> tuple[float, float]:
    """Stop a server and start it; return the seconds until one serves, and until all are back."""
    begun = time.monotonic()
    check(server.stop() == 0, "no clean end")
    wait_for(lambda: any(s.serves for s in servers), BOUND_S)
    seconds = time.monotonic() - begun
    server.start()
    begun = time.monotonic()
    wait_for(lambda: one_serves(servers), BOUND_S)
    return seconds, time.monotonic() - begun
