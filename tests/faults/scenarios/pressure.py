"""Quotas and capacity: the oldest finished traces go, or chunks are refused; none is half there."""

from __future__ import annotations

import time
from pathlib import Path

from faults.check import audit, check, read_all, temporary
from faults.scenarios.kill import scripts
from faults.script import RUN
from faults.serving import Server
from faults.writers import Job, Run, Writers, no_violations
from routetrace.client import RouteClient

_FOREVER = 1 << 30
_CHUNKS = "routetrace_ingest_chunks_total"
_BYTES = "routetrace_ingest_bytes_total"

#: Traces that are evicted before it is enough.
_MANY = 1000

#: Settings, and their bytes.
LIMITS = {"run_quota": 400_000, "store_capacity": 4 << 20}


def once(seed: int, processes: Writers, limit: str, policy: str, times: float) -> dict[str, float]:
    """Write several times what there is room for."""
    most = LIMITS[limit]
    with (
        temporary() as path,
        Server(Path(path), sweep_interval_seconds=0.3, when_full=policy, **{limit: most}) as server,
    ):
        processes.jobs([Job(seed, f"e{i}", longest=200) for i in range(2)])
        processes.run(Run(server.target, _FOREVER, again=True))
        deadline = time.monotonic() + 120
        while True:
            metrics = server.metrics()
            refused = metrics.get(f'routetrace_overloaded_total{{what="{limit}"}}', 0.0)
            evicted = _evicted(metrics)
            # Each of these small chunks takes a block of the store's, far more than its bytes.
            enough = metrics[_BYTES] > times * most or evicted > _MANY
            if policy == "evict" and enough and evicted > 5:
                break
            if policy == "refuse" and refused > 3:
                break
            check(
                time.monotonic() < deadline,
                f"{metrics[_BYTES]:.0f} bytes, {evicted:.0f} evicted, {refused:.0f} refused",
            )
            time.sleep(0.05)
        reports = processes.stop()
        no_violations(reports)
        for report in reports:
            # What was sent last may have been taken, and the answer not heard.
            check(report.known.sent - report.known.acked <= report.job.window, "a gap")
        pairs = list(zip(scripts(reports), (r.known for r in reports), strict=True))
        with RouteClient(server.target, run=RUN) as client:
            served = read_all(client, pairs, evicted=policy == "evict")
        metrics = server.metrics()
        evicted = _evicted(metrics)
        check((evicted > 0) == (policy == "evict"), f"{evicted:.0f} evicted, policy {policy}")
        acked = sum(r.known.acked for r in reports)
        sent = sum(r.known.sent for r in reports)
        check(acked <= metrics[_CHUNKS] <= sent, f"{acked} acknowledged of {metrics[_CHUNKS]:.0f}")
        check(server.stop() == 0, "no clean end")
        # A restart comes to the same.
        server.start()
        with RouteClient(server.target, run=RUN) as client:
            again = read_all(client, pairs, evicted=policy == "evict")
        check(again.complete <= served.complete, "evicted traces came back")
        check(server.stop() == 0, "no clean end")
        audit(Path(path))
    name = f"{limit}_{policy}"
    return {
        f"{name}_evicted": evicted,
        f"{name}_refused": refused,
        f"{name}_complete": served.complete,
        f"{name}_gone": served.gone,
    }


def _evicted(metrics: dict[str, float]) -> float:
    name = "routetrace_forgotten_traces_total"
    return sum(v for k, v in metrics.items() if k.startswith(name) and "expired" not in k)


def run(seed: int, *, times: float = 3.0, capacity: int = 1) -> dict[str, float]:
    """Figures of each limit under each policy."""
    figures: dict[str, float] = {}
    limits = list(LIMITS) if capacity else ["run_quota"]
    with Writers(2) as processes:
        for limit in limits:
            for policy in ("evict", "refuse"):
                figures.update(once(seed, processes, limit, policy, times))
    return figures
