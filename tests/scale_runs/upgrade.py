"""Servers of the version before, replaced one by one by this one, under load.

Agents and clients are of this version throughout. An engine and a reader of one run in each
partition go through; every row is compared.
"""

from __future__ import annotations

import random
from contextlib import ExitStack
from pathlib import Path

from faults.check import temporary
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
        wait_for(lambda: balanced(bucket, partitions, targets), BOUND_S)
        loads = [Load(",".join(targets), run) for run in runs_of(partitions)]
        for server in rng.sample(servers, count):
            for load in loads:
                load.go_on(READS)
            server.checkout = None
            seconds, balance = hit("stop", bucket, partitions, server, servers)
            print(f"  {seconds:.1f} s to others, {balance:.1f} s to balance", flush=True)
        rows = sum(load.end() for load in loads)
        for load in loads:
            load.client.close()
    return {
        "servers upgraded": count,
        "rows through upgrades": rows,
        "reads through upgrades": sum(load.reads for load in loads),
    }
