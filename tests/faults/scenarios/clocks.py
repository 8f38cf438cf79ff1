"""Wall clocks that jump, of the server and of agents: order, completeness and expiry stay."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from faults.check import Known, audit, check, read_all, temporary
from faults.scenarios.kill import scripts
from faults.scenarios.torn import Load
from faults.script import RUN, SHORT_TTL, Script
from faults.serving import Server
from faults.writers import Job, Run, Writers, no_violations
from routetrace.client import RouteClient
from routetrace.common.errors import NotFound

DAY = 86400
_FOREVER = 1 << 30


def _put(path: Path, seconds: int) -> None:
    part = path.with_name("part")
    part.write_text(str(seconds))
    part.replace(path)


@contextmanager
def _jumping_here(rng: random.Random) -> Iterator[None]:
    """The wall clock of this process, where agents run, is somewhere else at each look."""
    real, real_ns = time.time, time.time_ns
    time.time = lambda: real() + rng.uniform(-DAY, DAY)
    time.time_ns = lambda: real_ns() + rng.randint(-DAY, DAY) * 10**9
    try:
        yield
    finally:
        time.time, time.time_ns = real, real_ns


def once(seed: int, processes: Writers, jumps: int) -> dict[str, float]:
    """A server whose clock jumps by up to a day while it is written to, and a bit while away."""
    rng = random.Random(f"clocks {seed}")
    with temporary() as path:
        clock = Path(path) / "clock"
        _put(clock, 0)
        python = [sys.executable, "-m", "faults.skewed", str(clock)]
        with (
            Server(
                Path(path) / "data",
                python=python,
                sweep_interval_seconds=0.2,
                agent_timeout_seconds=1.0,
                default_ttl_seconds=3600,
            ) as server,
            Load(seed, server.target, step_s=0.03) as load,
        ):
            processes.jobs([Job(seed, f"e{i}", deletes=True, reads=True) for i in range(2)])
            processes.run(Run(server.target, _FOREVER, again=True, pace_s=0.005))
            with _jumping_here(rng):
                for _ in range(jumps):
                    time.sleep(rng.uniform(0.2, 0.6))  # the moment is what is drawn
                    _put(clock, rng.choice((-DAY, -3600, -60, 60, 3600, DAY)))
            # While it is away, nobody can tell a jump from the time that passes: a short one.
            _put(clock, 60)
            server.kill()
            server.start()
            _put(clock, -DAY)
            reports = processes.stop()
            limit = max(r.known.sent for r in reports) + 20
            processes.run(Run(server.target, limit, again=True))
            reports = processes.reports()
            no_violations(reports)
            check(all(r.known.acked >= limit for r in reports), "writers did not get through")
            with RouteClient(server.target, run=RUN) as client:
                pairs = list(zip(scripts(reports), (r.known for r in reports), strict=True))
                rows = read_all(client, pairs).rows
                expired = _expired(client, pairs)
            cells = load.finish()
            check(server.stop() == 0, "no clean end")
        audit(Path(path) / "data")
    return {"jumps": jumps + 3, "rows_compared": rows, "cells_compared": cells, "expired": expired}


def _expired(client: RouteClient, pairs: list[tuple[Script, Known]]) -> int:
    """Short-lived traces that have ended go, whatever the clock says; returns how many."""
    deadline = time.monotonic() + 20 * SHORT_TTL
    gone = 0
    for script, known in pairs:
        said = script.said(known.acked)
        for request in [r for r, s in said.items() if s.ended and script.is_short(r)]:
            while True:
                try:
                    client.stat(script.trace_id(request))
                except NotFound:
                    gone += 1
                    break
                check(time.monotonic() < deadline, f"{script.trace_id(request)} does not expire")
                time.sleep(0.05)
    return gone


def run(seed: int, *, runs: int = 1, jumps: int = 4) -> dict[str, float]:
    """Figures of several servers."""
    total: dict[str, float] = {}
    with Writers(2) as processes:
        for i in range(runs):
            for name, value in once(seed + i, processes, jumps).items():
                total[name] = total.get(name, 0) + value
    return total
