"""Writers of raw ingest streams, in processes of their own, that know each acknowledgement.

A writer speaks a Script over one stream, checks that the answers are those of the contract, and
deletes and reads some of what it wrote. When the stream breaks, it stops and says how far it got,
or goes on by itself, as asked.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import random
import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import grpc
import numpy as np

from faults.check import Known, Step
from faults.script import RUN, Script
from routetrace.client import AsyncRouteClient
from routetrace.common.errors import NotFound, RouteTraceError
from routetrace.common.target import FAILOVER_OPTIONS, targets_of
from routetrace.v1 import routetrace_pb2 as pb
from routetrace.v1 import routetrace_pb2_grpc as pb_grpc

_OPTIONS = [
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 500),
    *FAILOVER_OPTIONS.items(),
]

#: Seconds until a writer that goes on by itself tries again.
_AGAIN_S = 0.02


@dataclass(frozen=True)
class Job:
    """One writer."""

    seed: int
    engine_id: str
    window: int = 16
    deletes: bool = False
    """Deletes the traces of `Script.is_deleted`, once they have ended."""
    reads: bool = False
    """Reads what was acknowledged, and compares it."""
    distrusts: bool = False
    """After a reconnect sends all that it has no acknowledgement of, whatever the Welcome says."""
    longest: int = 60


@dataclass(frozen=True)
class Run:
    """Work of the writers until they report."""

    target: str
    limit: int
    """Stop once so many chunks are acknowledged."""
    again: bool = False
    """Connect anew when the stream breaks; else that ends the run."""
    pace_s: float = 0.0
    """Seconds between two chunks."""
    patience_s: float | None = None
    """Seconds without an answer after which a stream is given up; None: any time."""
    targets: Mapping[str, str] = field(default_factory=dict)
    """Target of the stream of an engine, where it is another one."""


@dataclass
class Report:
    """Results over all runs."""

    job: Job
    known: Known
    epoch: int = 0
    connections: int = 0
    resent_stored: int = 0
    """Chunks sent although the Welcome said that they are stored."""
    duplicates: int = 0
    """Acknowledgements of those."""
    rejects: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    """Statuses that streams ended with."""
    reads: int = 0
    read_errors: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    """All progress."""

    def note(self, what: str, number: int) -> None:
        """Note progress."""
        self.steps.append(Step(time.monotonic(), what, number))


class _Writer:
    def __init__(self, job: Job) -> None:
        self.job = job
        self.script = Script(job.seed, job.engine_id, job.longest)
        self.report = Report(job, Known())
        self._rng = random.Random(f"writer {job}")
        self._next = 1
        self._stored = 0  # as the Welcome said
        self._outstanding: deque[tuple[int, int]] = deque()
        self._turn = 0  # of sending anew from the first chunk that is not acknowledged
        self._not_before = 0.0
        self._changed = asyncio.Condition()
        self._ended: deque[int] = deque()  # requests that may be read and deleted
        self._readable: list[int] = []
        self._attempts = 0
        self._told = 0  # chunks whose ends were noted

    async def run(self, run: Run, stop: asyncio.Event) -> Report:
        helpers = []
        if self.job.deletes:
            helpers.append(asyncio.create_task(self._delete(run.target)))
        if self.job.reads:
            helpers.append(asyncio.create_task(self._read(run.target)))
        try:
            while not stop.is_set() and self.report.known.acked < run.limit:
                try:
                    await self._stream(run, stop)
                except grpc.RpcError as error:
                    # So asyncio's gRPC says that a call had ended when it was written to.
                    broken = error.details() == "Internal error from Core"
                    self.report.errors["broken" if broken else error.code().name] += 1
                except asyncio.InvalidStateError:
                    self.report.errors["broken"] += 1
                if not run.again:
                    break
                if self.report.known.acked < run.limit:
                    await _wait(stop, _AGAIN_S)
        finally:
            for helper in helpers:
                helper.cancel()
            await asyncio.gather(*helpers, return_exceptions=True)
        return self.report

    async def _stream(self, run: Run, stop: asyncio.Event) -> None:
        report, known = self.report, self.report.known
        targets = targets_of(run.targets.get(self.job.engine_id, run.target))
        self._attempts += 1
        target = targets[self._attempts % len(targets)]
        async with grpc.aio.insecure_channel(target, options=_OPTIONS) as channel:
            call = pb_grpc.IngestServiceStub(channel).Ingest()
            await call.write(pb.IngestRequest(hello=self.script.hello(report.epoch)))
            reading = asyncio.create_task(call.read())
            await asyncio.wait({reading}, timeout=run.patience_s)
            if not reading.done():
                reading.cancel()
                call.cancel()
                return
            answer = reading.result()
            if answer is grpc.aio.EOF:
                report.errors[(await call.code()).name] += 1
                return
            report.connections += 1
            self._welcome(answer.welcome)
            sender = asyncio.create_task(self._send(call, run))
            stopped = asyncio.create_task(stop.wait())
            try:
                while known.acked < run.limit:
                    reading = asyncio.create_task(call.read())
                    await asyncio.wait(
                        {reading, stopped}, timeout=run.patience_s, return_when="FIRST_COMPLETED"
                    )
                    if not reading.done():
                        reading.cancel()
                        return
                    answer = reading.result()
                    if answer is grpc.aio.EOF:
                        report.errors[(await call.code()).name] += 1
                        return
                    await self._take(answer)
            finally:
                stopped.cancel()
                sender.cancel()
                await asyncio.gather(sender, return_exceptions=True)
                call.cancel()

    def _welcome(self, welcome: pb.Welcome) -> None:
        report, known = self.report, self.report.known
        stored = welcome.next_sequence - 1
        if report.epoch and welcome.epoch != report.epoch:
            report.violations.append(f"epoch {report.epoch} is unknown: {welcome.epoch} opened")
        elif not known.acked <= stored <= known.sent:
            report.violations.append(
                f"the server has chunk {stored}; acknowledged {known.acked}, sent {known.sent}"
            )
        report.epoch = welcome.epoch
        self._stored = stored
        if not self.job.distrusts:
            known.acked = max(known.acked, stored)
            report.note("acked", stored)
            self._note_ends()
        self._next = known.acked + 1
        self._outstanding.clear()
        self._turn += 1
        self._not_before = 0.0

    async def _send(self, call: Any, run: Run) -> None:
        known = self.report.known
        while True:
            async with self._changed:
                await self._changed.wait_for(
                    lambda: len(self._outstanding) < self.job.window and self._next <= run.limit
                )
                pause = self._not_before - time.monotonic()
                if pause <= 0:
                    sequence = self._next
                    self._next += 1
                    known.sent = max(known.sent, sequence)
                    self.report.note("sent", sequence)
                    self.report.resent_stored += sequence <= self._stored
                    self._outstanding.append((sequence, self._turn))
            if pause > 0:
                await asyncio.sleep(pause)
                continue
            await call.write(pb.IngestRequest(chunk=self.script.chunk(sequence)))
            if run.pace_s:
                await asyncio.sleep(run.pace_s)

    async def _take(self, answer: pb.IngestResponse) -> None:
        if answer.HasField("pace"):
            return
        report, known = self.report, self.report.known
        async with self._changed:
            said = answer.reject if answer.HasField("reject") else answer.ack
            if not self._outstanding:
                report.violations.append(f"an answer to nothing: {answer}")
                return
            sequence, turn = self._outstanding.popleft()
            if answer.HasField("ack"):
                # One stands for all that follow each other by their numbers, up to its own.
                report.duplicates += sequence <= self._stored
                while sequence < said.sequence and self._outstanding:
                    if self._outstanding[0][0] != sequence + 1:
                        break
                    sequence, turn = self._outstanding.popleft()
                    report.duplicates += sequence <= self._stored
            if said.sequence != sequence:
                report.violations.append(f"answer {said.sequence} to chunk {sequence}")
            if answer.HasField("ack"):
                known.acked = max(known.acked, sequence)
                report.note("acked", sequence)
                self._note_ends()
            elif turn == self._turn:
                error = answer.reject.error
                report.rejects[pb.ErrorKind.Name(error.kind).removeprefix("ERROR_KIND_")] += 1
                if not error.retry_after_ms:
                    report.violations.append(f"chunk {sequence} refused for good: {error.message}")
                self._turn += 1
                self._next = known.acked + 1
                self._not_before = time.monotonic() + error.retry_after_ms / 1000
            self._changed.notify_all()

    def _note_ends(self) -> None:
        for sequence in range(self._told + 1, self.report.known.acked + 1):
            for part in self.script.parts(sequence):
                if part.ends and self.script.is_deleted(part.request):
                    self._ended.append(part.request)
                elif part.ends and not self.script.is_short(part.request):
                    self._readable.append(part.request)
        self._told = max(self._told, self.report.known.acked)

    async def _delete(self, target: str) -> None:
        async with AsyncRouteClient(target, run=RUN, timeout=3600) as client:
            while True:
                async with self._changed:
                    await self._changed.wait_for(lambda: self._ended)
                request = self._ended[0]
                self.report.note("deleting", request)
                self.report.known.deleting.add(request)
                with suppress(NotFound):  # an earlier attempt, whose answer got lost
                    await client.delete(self.script.trace_id(request))
                self.report.known.deleted.add(request)
                self.report.note("deleted", request)
                self._ended.popleft()

    async def _read(self, target: str) -> None:
        async with AsyncRouteClient(target, run=RUN, timeout=3600) as client:
            while True:
                async with self._changed:
                    await self._changed.wait_for(lambda: self._readable)
                request = self._rng.choice(self._readable[-200:])
                name = self.script.trace_id(request)
                try:
                    trace = await client.get(name)
                except RouteTraceError as error:
                    self.report.violations.append(f"{name}, acknowledged: {error!r}")
                    continue
                if not np.array_equal(trace.topk_ids, self.script.rows(request)):
                    self.report.violations.append(f"{name}, acknowledged: other rows")
                self.report.reads += 1


async def _wait(event: asyncio.Event, seconds: float) -> None:
    with suppress(asyncio.TimeoutError):
        await asyncio.wait_for(event.wait(), seconds)


async def _serve(pipe: Connection) -> None:
    loop = asyncio.get_running_loop()
    writers: list[_Writer] = []
    stop = asyncio.Event()
    running: asyncio.Task[Any] | None = None

    async def run(what: Run) -> None:
        pipe.send(await asyncio.gather(*(w.run(what, stop) for w in writers)))

    while True:
        try:
            command, value = await loop.run_in_executor(None, pipe.recv)
        except EOFError:
            return
        if command == "jobs":
            writers = [_Writer(job) for job in value]
        elif command == "run":
            stop.clear()
            running = asyncio.create_task(run(value))
        elif command == "stop":
            stop.set()
            if running:
                await asyncio.wait({running})


def _main(pipe: Connection) -> None:
    asyncio.run(_serve(pipe))


class Writers:
    """Processes of writers; used for one set of jobs after the other.

    Args:
        processes: so many.
    """

    def __init__(self, processes: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for _ in range(processes):
            ours, theirs = context.Pipe()
            process = context.Process(target=_main, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        self._busy: list[Connection] = []

    def jobs(self, jobs: Sequence[Job]) -> None:
        """Make new writers, dealt to the processes."""
        self._busy = []
        for i, pipe in enumerate(self._pipes):
            mine = list(jobs[i :: len(self._pipes)])
            pipe.send(("jobs", mine))
            if mine:
                self._busy.append(pipe)

    def run(self, run: Run) -> None:
        """Let all of them run."""
        for pipe in self._busy:
            pipe.send(("run", run))

    def stop(self) -> list[Report]:
        """End the run; as `reports`."""
        for pipe in self._busy:
            pipe.send(("stop", None))
        return self.reports()

    def reports(self, timeout: float = 300.0) -> list[Report]:
        """Wait until the run is over.

        Raises:
            TimeoutError: if it does not end.
        """
        deadline = time.monotonic() + timeout
        reports: list[Report] = []
        for pipe in self._busy:
            if not pipe.poll(max(0.0, deadline - time.monotonic())):
                raise TimeoutError(f"writers did not get through in {timeout} s")
            reports += pipe.recv()
        return sorted(reports, key=lambda r: r.job.engine_id)

    def close(self) -> None:
        """End the processes."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(5)
            if process.is_alive():
                process.kill()

    def __enter__(self) -> Writers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def no_violations(reports: Iterable[Report]) -> None:
    """Raise Violation if a writer saw something that must not be."""
    from faults.check import check

    for report in reports:
        check(not report.violations, f"{report.job.engine_id}: {'; '.join(report.violations[:3])}")
