"""SIGTERM under load, once and in a row: a clean end in time, and nothing acknowledged is lost."""

from __future__ import annotations

import random
import time
from pathlib import Path

from faults.check import audit, check, read_all, temporary
from faults.scenarios.kill import scripts
from faults.scenarios.torn import Load
from faults.script import RUN
from faults.serving import Server
from faults.writers import Job, Run, Writers, no_violations
from routetrace.client import RouteClient

DRAIN_S = 5.0
#: For the store's last commit, and a machine that has other things to do.
_SLACK_S = 5.0
_FOREVER = 1 << 30


def run(seed: int, *, restarts: int = 2, every_s: float = 1.0) -> dict[str, float]:
    """Figures of a server that is restarted again and again while agents and writers go on."""
    rng = random.Random(f"drain {seed}")
    slowest = 0.0
    with (
        temporary() as path,
        Writers(2) as processes,
        Server(
            Path(path),
            drain_seconds=DRAIN_S,
            agent_timeout_seconds=1.0,
            sweep_interval_seconds=0.2,
        ) as server,
        Load(seed, server.target, step_s=0.03) as load,
    ):
        processes.jobs([Job(seed, f"w{i}", deletes=True, reads=True) for i in range(3)])
        processes.run(Run(server.target, _FOREVER, again=True, pace_s=0.002))
        for _ in range(restarts):
            time.sleep(every_s * rng.uniform(0.5, 1.5))  # the moment is what is drawn
            begun = time.monotonic()
            code = server.stop()
            took = time.monotonic() - begun
            check(code == 0, f"exit code {code}")
            check(took < DRAIN_S + _SLACK_S, f"the end took {took:.1f} s")
            slowest = max(slowest, took)
            server.start()
        reports = processes.stop()
        limit = max(r.known.sent for r in reports) + 10
        processes.run(Run(server.target, limit, again=True))
        reports = processes.reports()
        no_violations(reports)
        check(all(r.known.acked >= limit for r in reports), "writers did not get through")
        statuses = {status for r in reports for status in r.errors}
        # The server's gRPC cancels streams that it has not handed over when the server stops.
        ends = {"UNAVAILABLE", "CANCELLED", "broken"}
        check(statuses <= ends, f"streams ended with {statuses}")
        with RouteClient(server.target, run=RUN) as client:
            pairs = list(zip(scripts(reports), (r.known for r in reports), strict=True))
            rows = read_all(client, pairs).rows
        cells = load.finish()
        check(server.stop() == 0, "no clean end")
        audit(Path(path))
    return {
        "restarts": restarts,
        "slowest_end_s": slowest,
        "chunks": sum(r.known.acked for r in reports),
        "reads": sum(r.reads for r in reports),
        "rows_compared": rows,
        "cells_compared": cells,
    }
