"""kill -9 of the server under load: what was acknowledged is served, once, in its order."""

from __future__ import annotations

import random
import time
from pathlib import Path

from faults.check import Served, audit, check, read_all, temporary
from faults.script import RUN, Script
from faults.serving import Server
from faults.writers import Job, Report, Run, Writers, no_violations
from routetrace.client import RouteClient

#: So that every kind of change is under way: group commits, sweeps with snapshots, replays.
SETTINGS = {"sweep_interval_seconds": 0.1, "agent_timeout_seconds": 1.0}
_ENOUGH = 1 << 30
_CHUNKS = "routetrace_ingest_chunks_total"


def scripts(reports: list[Report]) -> list[Script]:
    """Reports of the writers."""
    return [Script(r.job.seed, r.job.engine_id, r.job.longest) for r in reports]


def once(writers: Writers, seed: int, ack_mode: str, num_writers: int) -> dict[str, int]:
    """One kill, from an empty directory to an audit of the files."""
    rng = random.Random(f"kill {seed} {ack_mode}")
    jobs = [
        Job(
            seed,
            f"e{i}",
            window=rng.choice((1, 4, 16, 30)),
            deletes=True,
            reads=ack_mode == "fsync" and i == 0,
            longest=rng.choice((20, 60, 400)),
        )
        for i in range(num_writers)
    ]
    settings = {**SETTINGS, "ack_mode": ack_mode}
    with temporary() as path, Server(Path(path), **settings) as server:
        writers.jobs(jobs)
        writers.run(Run(server.target, _ENOUGH))
        # The moment is what is drawn: around the first chunk, or behind it.
        deadline = time.monotonic() + 60 if rng.random() < 0.5 else 0.0
        while deadline and not server.metrics().get(_CHUNKS):
            check(time.monotonic() < deadline, "no chunk was acknowledged")
            time.sleep(0.02)
        time.sleep(0.05 + rng.random())
        server.kill()
        reports = writers.reports()
        if rng.random() < 0.3:
            server.start_and_kill(rng.uniform(0.2, 1.5))
        server.start()
        # Nobody has resent anything: this is what the files held.
        known = [r.known for r in reports]
        if ack_mode == "memory":
            lost = _lost(server, reports)
        else:
            lost = 0
            with RouteClient(server.target, run=RUN) as client:
                served = read_all(client, list(zip(scripts(reports), known, strict=True)))
        acked = sum(k.acked for k in known)
        limit = max(k.sent for k in known) + 30
        if not lost:
            writers.run(Run(server.target, limit))
            reports = writers.reports()
            no_violations(reports)
            check(all(r.known.acked >= limit for r in reports), "writers did not get through")
            known = [r.known for r in reports]
            with RouteClient(server.target, run=RUN) as client:
                served = read_all(client, list(zip(scripts(reports), known, strict=True)))
        else:
            served = Served()
        check(server.stop() == 0, "no clean end")
        chunks = audit(Path(path))
        return {
            "kills": 1,
            "acked_at_kill": acked,
            "chunks": sum(k.acked for k in known),
            "lost": lost,
            "stored_in_the_end": chunks,
            "rows_compared": served.rows,
            "deleted": sum(len(k.deleted) for k in known),
            "reads": sum(r.reads for r in reports),
        }


def _lost(server: Server, reports: list[Report]) -> int:
    """Acknowledged chunks that the server does not ask for, nor has; its documented loss."""
    import grpc

    from faults.check import compare
    from routetrace.v1 import routetrace_pb2 as pb
    from routetrace.v1 import routetrace_pb2_grpc as pb_grpc

    lost = 0
    for report, script in zip(reports, scripts(reports), strict=True):
        with grpc.insecure_channel(server.target) as channel:
            hello = pb.IngestRequest(hello=script.hello(report.epoch))
            call = pb_grpc.IngestServiceStub(channel).Ingest(iter([hello]))
            welcome = next(call).welcome
            call.cancel()
        stored = welcome.next_sequence - 1 if welcome.epoch == report.epoch else 0
        check(stored <= report.known.sent, f"chunk {stored} of {report.known.sent}")
        lost += max(0, report.known.acked - stored)
        report.known.acked = stored
        report.known.deleted.clear()  # a delete that was acknowledged may be lost as well
        # What is there is still a prefix, and exact.
        with RouteClient(server.target, run=RUN) as client:
            compare(client, script, report.known)
    return lost


def run(seed: int, *, seeds: int = 3, memory_seeds: int = 1, writers: int = 3) -> dict[str, int]:
    """Figures of several kills in fsync mode and some in memory mode."""
    total: dict[str, int] = {}
    with Writers(min(writers, 3)) as processes:
        for i in range(seeds + memory_seeds):
            mode = "fsync" if i < seeds else "memory"
            try:
                figures = once(processes, seed + i, mode, writers)
            except BaseException as error:
                error.args = (f"seed {seed + i}, {mode}: {error}",)
                raise
            if mode == "fsync":
                check(not figures["lost"], f"seed {seed + i}: {figures['lost']} chunks lost")
            for name, value in figures.items():
                key = f"memory_{name}" if mode == "memory" else name
                total[key] = total.get(key, 0) + value
            if i % 10 == 9:
                print(f"  kill: up to seed {seed + i}: {total}", flush=True)
    return total
