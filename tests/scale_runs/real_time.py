"""Real time across take-overs: no read misses what was acknowledged before it began.

Writers note each acknowledgement; two clients, one for each server, note each answer with its
times. Meanwhile servers are killed, stopped, and paused for about as long as a lease lasts, so that
one may resume and still act as the owner. Writers soon turn to the other server. Readers wait for
the one that is paused: their answers are the most likely to be stale. `faults/real_time.py` judges
all of them together.
"""

from __future__ import annotations

import asyncio
import random
import signal
import threading
import time
from collections import Counter
from contextlib import ExitStack
from itertools import cycle, islice
from pathlib import Path

import numpy as np

from faults.check import check, temporary
from faults.real_time import NOTHING, Read, Seen, check_history
from faults.scenarios.kill import scripts
from faults.script import RUN, Script
from faults.writers import Job, Run, Writers, no_violations
from routetrace.client import AsyncRouteClient
from routetrace.common.errors import DeadlineExceeded, NotFound, Overloaded, Unavailable
from support.servers.object_servers import ObjectServer
from support.waiting import wait_for

BOUND_S = 120.0
LEASE_S = 2.0
HITS = ("stall", "nap", "kill", "stop")
#: Calls of each client at a time, and how long one of them waits. Short ones are not repeated.
_AT_ONCE = 16
_TIMEOUTS_S = (0.3, 0.3, 1.0, 5.0)
#: Requests around the newest one that are read.
_BACK, _AHEAD = 8, 5


class Client:
    """A thread that reads the newest traces of some writers from one server.

    Args:
        target: the server.
        jobs: of the writers.
    """

    def __init__(self, target: str, jobs: list[Job]) -> None:
        self.target = target
        self.reads: list[list[Read]] = [[] for _ in jobs]
        self.errors: Counter[str] = Counter()
        self.failures: list[BaseException] = []
        self._scripts = [Script(job.seed, job.engine_id, job.longest) for job in jobs]
        self._newest = [0] * len(jobs)
        self._rng = random.Random(f"client {target}")
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def end(self) -> None:
        """Stop, once all answers are there.

        Raises:
            Violation: if rows were wrong.
        """
        self._stop.set()
        self._thread.join(BOUND_S)
        check(not self._thread.is_alive(), "a client hangs")
        for failure in self.failures:
            raise failure

    def _run(self) -> None:
        try:
            asyncio.run(self._read_all())
        except BaseException as error:
            self.failures.append(error)

    async def _read_all(self) -> None:
        async with AsyncRouteClient(self.target, run=RUN) as client:
            await asyncio.gather(*(self._read_on(client) for _ in range(_AT_ONCE)))

    async def _read_on(self, client: AsyncRouteClient) -> None:
        while not self._stop.is_set():
            writer = self._rng.randrange(len(self._scripts))
            newest = self._newest[writer]
            request = max(0, newest + self._rng.randint(-_BACK, _AHEAD))
            if Script.is_short(request):
                continue
            timeout = self._rng.choice(_TIMEOUTS_S)
            begun = time.monotonic()
            try:
                seen = await self._read(client, self._scripts[writer], request, timeout)
            except (Unavailable, Overloaded, DeadlineExceeded) as error:
                self.errors[type(error).__name__] += 1
                await asyncio.sleep(0.02)
                continue
            read = Read(begun, time.monotonic(), self.target, request, seen)
            self.reads[writer].append(read)
            if seen > NOTHING:
                self._newest[writer] = max(self._newest[writer], request)

    @staticmethod
    async def _read(client: AsyncRouteClient, script: Script, request: int, timeout: float) -> Seen:
        name = script.trace_id(request)
        try:
            trace = await client.get(name, missing="mask", timeout=timeout)
        except NotFound:
            return NOTHING
        check(trace.valid.all(), f"{name}: holes: {'; '.join(map(str, trace.missing))}")
        rows = script.rows(request)[: len(trace)]
        check(np.array_equal(trace.topk_ids, rows), f"{name}: other rows")
        return Seen(rows=len(trace), ended=bool(trace.num_tokens))


def hit(kind: str, servers: list[ObjectServer], rng: random.Random) -> tuple[float, float]:
    """Hit the owner; return when it stood still, and when it went on: (0, 0) if it did not.

    Args:
        kind: one of HITS. "nap": it stands still for about as long as a lease lasts; "stall": until
            another server serves, and then some time.
        servers: all of them.
        rng: of the moments.
    """
    serving: list[ObjectServer] = []
    wait_for(lambda: serving.extend(s for s in servers if s.serves) or serving, BOUND_S)
    owner, others = serving[0], [s for s in servers if s is not serving[0]]
    wait_for(lambda: all(s.stands_by for s in others), BOUND_S)
    if kind in ("kill", "stop"):
        if kind == "kill":
            owner.kill()
        else:
            check(owner.stop() == 0, "no clean end")
        wait_for(lambda: any(s.serves for s in others), BOUND_S)
        owner.start()
        return 0.0, 0.0
    owner.signal(signal.SIGSTOP)
    begun = time.monotonic()
    if kind == "stall":
        wait_for(lambda: any(s.serves for s in others), BOUND_S)
    # The moment is what is drawn: around the end of the lease, or some writes behind it.
    time.sleep(rng.uniform(0.5, 1.5) if kind == "stall" else rng.uniform(0.8, 2.5) * LEASE_S)
    ended = time.monotonic()
    owner.signal(signal.SIGCONT)
    return begun, ended


def chaos(seed: int, hits: int, endpoint: str) -> dict[str, int]:
    """Hit owners under load, and judge all reads; return counts.

    Args:
        seed: of what is said, and of the moments; the machine decides the rest.
        hits: so many, of each kind in turn.
        endpoint: of the object store.

    Raises:
        AssertionError: if a read missed what it had to see.
    """
    rng = random.Random(f"real time {seed}")
    pauses: list[tuple[float, float]] = []
    with ExitStack() as stack:
        directory = Path(stack.enter_context(temporary()))
        settings = {"sweep_interval_seconds": 0.5, "object_lease_seconds": LEASE_S}
        servers = [ObjectServer(directory, endpoint, **settings) for _ in range(2)]
        for server in servers:
            stack.enter_context(server)
            wait_for(lambda: any(s.serves for s in servers), BOUND_S)
        target = ",".join(s.target for s in servers)
        jobs = [Job(seed, f"w{i}", window=4, deletes=True, longest=30) for i in range(2)]
        writers = stack.enter_context(Writers(1))
        writers.jobs(jobs)
        writers.run(Run(target, 1 << 30, again=True, pace_s=0.02, patience_s=0.5))
        clients = [Client(s.target, jobs) for s in servers]
        try:
            for kind in islice(cycle(HITS), hits):
                pauses += [hit(kind, servers, rng)]
            wait_for(lambda: any(s.serves for s in servers), BOUND_S)
        finally:  # a wait that fails says less
            reports = writers.stop()
            for client in clients:
                client.end()
            no_violations(reports)
            judged = 0
            for number, (report, script) in enumerate(zip(reports, scripts(reports), strict=True)):
                reads = [read for client in clients for read in client.reads[number]]
                judged += check_history(script, report.steps, reads)
    waited = [
        read
        for client in clients
        for reads in client.reads
        for read in reads
        if any(begun < read.begun < ended < read.ended for begun, ended in pauses)
    ]
    return {
        "hits under readers": hits,
        "reads judged": judged,
        "reads that waited for a server": len(waited),
        "reads refused": sum(sum(client.errors.values()) for client in clients),
        "chunks they may not miss": sum(report.known.acked for report in reports),
    }
