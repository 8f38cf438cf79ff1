"""`make test-scale`: servers without disks over SeaweedFS, under load.

Each round hits the owner or the store once: kill -9, SIGSTOP that wakes after the take-over,
SIGTERM, or a store that stands still for 8 s. Writers know each acknowledgement and read what was
acknowledged; an agent with its own reader is compared row by row. After the last round one server
starts anew, and everything is read again. Then several servers share partitions (`shared`), and no
read misses what was acknowledged before it began (`real_time`). With `--before`, servers of another
version are upgraded one by one in place of all this (`upgrade`).
"""

from __future__ import annotations

import argparse
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

from faults.check import check, read_all, temporary
from faults.scenarios.kill import scripts
from faults.script import RUN
from faults.writers import Job, Run, Writers, no_violations
from routetrace.client import RouteClient
from routetrace.common.errors import InvalidArgument
from routetrace.server.store.object.bucket import open_bucket
from routetrace.server.store.object.probe import check_conditions
from scale_runs import real_time, shared, stores, upgrade
from support.agents.routed_engine import Engine
from support.servers.object_servers import ObjectServer
from support.waiting import wait_for

BOUND_S = 120.0
HITS = ("kill", "stall", "stop", "store")


def probes() -> dict[str, int]:
    """Refuse a gateway that races, and take those that do not."""
    for name in ("seaweed", "moto", "rclone"):
        with getattr(stores, name)() as store:
            bucket = open_bucket("s3://bucket/probe", store.endpoint)
            if name == "rclone":
                try:
                    check_conditions(bucket)
                except InvalidArgument as error:
                    print(f"  rclone: {error.message}")
                    continue
                raise AssertionError("rclone was not refused")
            check_conditions(bucket)
    return {"stores probed": 3}


def hit(kind: str, servers: list[ObjectServer], store: stores.Store, client: RouteClient) -> float:
    """Hit the owner or the store; return the seconds until the other server served."""
    # Its health may change between two looks: one answer names the owner.
    serving: list[ObjectServer] = []
    wait_for(lambda: serving.extend(s for s in servers if s.serves) or serving, BOUND_S)
    owner = serving[0]
    other = next(s for s in servers if s is not owner)
    wait_for(lambda: other.stands_by, BOUND_S)
    begun = time.monotonic()
    if kind == "store":
        store.pause()
        time.sleep(8)  # what this scenario is about
        store.resume()
        wait_for(lambda: owner.serves or other.serves, BOUND_S)
        return time.monotonic() - begun - 8
    if kind == "kill":
        owner.kill()
    elif kind == "stall":
        owner.signal(signal.SIGSTOP)
    else:
        check(owner.stop() == 0, "no clean end")
    wait_for(lambda: other.serves, BOUND_S)
    seconds = time.monotonic() - begun
    client.get("r0", wait_for="end", timeout=BOUND_S)
    if kind == "stall":
        owner.signal(signal.SIGCONT)
        wait_for(lambda: owner.health() == "NOT_SERVING", BOUND_S)
    else:
        owner.start()
    return seconds


def chaos(seed: int, rounds: int) -> dict[str, int]:
    """Rounds of hits under load; every acknowledged row is compared."""
    rng = random.Random(f"scale {seed}")
    took: dict[str, list[float]] = {kind: [] for kind in HITS}
    with ExitStack() as stack:
        store = stack.enter_context(stores.seaweed())
        directory = Path(stack.enter_context(temporary()))
        settings = {"sweep_interval_seconds": 0.5, "agent_timeout_seconds": 5}
        servers = [ObjectServer(directory, store.endpoint, **settings) for _ in range(2)]
        for server in servers:
            stack.enter_context(server)
            wait_for(lambda: any(s.serves for s in servers), BOUND_S)
        target = ",".join(s.target for s in servers)
        writers = stack.enter_context(Writers(2))
        jobs = [
            Job(seed, f"w{i}", window=rng.choice((4, 16)), reads=i == 0, deletes=i == 1)
            for i in range(3)
        ]
        writers.jobs(jobs)
        writers.run(Run(target, 1 << 30, again=True, pace_s=0.02))
        engine = Engine(target, "agents")
        client = stack.enter_context(RouteClient(target, run="agents", timeout=BOUND_S))
        engine.generate(5)
        for number in range(rounds):
            kind = HITS[number % len(HITS)]
            took[kind].append(hit(kind, servers, store, client))
            engine.generate(50)
            print(f"  {kind}: {took[kind][-1]:.1f} s until a server served", flush=True)
        reports = writers.stop()
        no_violations(reports)
        engine.compare(client)
        engine.end()
        # From the bucket alone: both servers end, and one starts anew.
        for server in servers:
            server.kill()
        servers[0].start()
        wait_for(lambda: servers[0].serves, BOUND_S)
        compared = engine.compare(client)
        with RouteClient(target, run=RUN, timeout=BOUND_S) as reader:
            pairs = [(s, r.known) for s, r in zip(scripts(reports), reports, strict=True)]
            served = read_all(reader, pairs)
    for kind, seconds in took.items():
        if seconds:
            print(f"  {kind}: {min(seconds):.1f} to {max(seconds):.1f} s")
    return {
        "hits": rounds,
        "chunks acknowledged": sum(r.known.acked for r in reports),
        "reads under load": sum(r.reads for r in reports),
        "rows compared": served.rows + 20 * compared,
        "lost": 0,
        "wrong": 0,
    }


def oracle(seed: int, cells: int) -> None:
    """Run the oracle's world of take-overs over SeaweedFS."""
    with stores.seaweed() as store:
        flags = ["--seed", str(seed), "--cells", str(cells), "--world", "taken"]
        flags += ["--object-url", "s3://bucket/oracle", "--object-endpoint", store.endpoint]
        subprocess.run([sys.executable, "-m", "oracle", *flags], check=True)


def main() -> int:
    """Return 0 if nothing was lost or wrong."""
    parser = argparse.ArgumentParser("python -m scale_runs", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=1, help="runs of the load")
    parser.add_argument("--rounds", type=int, default=8, help="hits of each run")
    parser.add_argument("--shared", type=int, default=6, help="hits of servers that share")
    parser.add_argument("--real-time", type=int, default=12, help="hits under two clients")
    parser.add_argument("--cells", type=int, default=1_000_000, help="of the oracle; 0: none")
    parser.add_argument("--before", type=Path, help="checkout of the version to upgrade from")
    args = parser.parse_args()
    if args.before:
        args.rounds = args.shared = args.real_time = args.cells = 0
    figures = Counter({} if args.before else probes())
    for seed in range(args.seed, args.seed + args.seeds):
        print(f"seed {seed}", flush=True)
        if args.before:
            figures.update(upgrade.upgrade(seed, args.before))
        if args.rounds:
            figures.update(chaos(seed, args.rounds))
        if args.shared:
            figures.update(shared.chaos(seed, args.shared))
        if args.real_time:
            with stores.seaweed() as store:
                figures.update(real_time.chaos(seed, args.real_time, store.endpoint))
    if args.cells:
        oracle(args.seed, args.cells)
    for name, figure in figures.items():
        print(f"  {name:<28}{figure:>12,}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
