"""Reads in real time across take-overs: of servers in this process in many random orders, and of
real ones that are killed, stopped, and stand still; `make test-scale` has more of these."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import pytest
from obstore.store import MemoryStore as MemoryBucket

from faults.check import Step, Violation, check
from faults.real_time import NOTHING, Read, Seen, check_history
from faults.script import RUN, Script
from oracle.harness import Clock, _Context, _Here, _Server
from routetrace.client._core.messages import parser_of
from routetrace.server.core import Core
from routetrace.server.settings.config import ServerConfig
from routetrace.server.store.object.bucket import Bucket
from routetrace.server.store.object.lease import Lease
from routetrace.server.store.object.store import ObjectStore
from routetrace.v1 import routetrace_pb2 as pb
from scale_runs import real_time
from support.servers.fake_s3 import FakeS3

SEED = 20
LEASE_S = 10.0
_PAUSES = (0, 30, 200)
CONFIG = ServerConfig(store="memory", agent_timeout_seconds=1e6, default_ttl_seconds=1 << 31)
PARSE = parser_of(pb.GetTraceResponse)


class Stepped(Lease):
    """A lease without threads."""

    def acquire(self, waiting: object) -> None:
        assert self.held


class Node:
    """A server whose event loop and lease go on when they are told to.

    Args:
        bucket: of the log, which all share.
        clock: of the leases.
        name: of the server.
    """

    def __init__(self, bucket: Bucket, clock: Clock, name: str) -> None:
        self._bucket, self._clock, self.name = bucket, clock, name
        self._loop = asyncio.new_event_loop()
        self._loop.set_default_executor(_Here(1))
        self.starts = 0
        self.asleep = {"loop": 0, "lease": 0}
        """Turns for which its event loop, or its lease, stands still."""
        self._begin()

    def _begin(self) -> None:
        self._lease = Stepped(self._bucket, self.name, LEASE_S, self._clock.now)
        self._store = ObjectStore(self._bucket, self._lease)
        self.server: _Server | None = None

    def look(self) -> None:
        """Do what the threads of the lease do once."""
        if self.server is None:
            self._lease.stand_by(lambda _: None)
            if self._lease.held:
                self.server = _Server(self._loop, Core(self._store, CONFIG))
                self.starts += 1
        elif self._lease.lost:
            self.end()
            self._begin()
        else:
            self._lease.beat()

    def step(self, count: int) -> None:
        """Let what is ready in the loop go on, up to where it waits again, some times."""
        for _ in range(count):
            self._loop.call_soon(self._loop.stop)
            self._loop.run_forever()

    def task(self, awaitable: Any) -> asyncio.Task[Any]:
        """Begin a call."""
        return self._loop.create_task(awaitable)

    def read(self, request: pb.GetTraceRequest) -> asyncio.Task[Any]:
        """Begin a read."""
        assert self.server
        method = self.server._handlers["GetTrace"]
        parsed = method.request_deserializer(request.SerializeToString())
        return self.task(self.server._collect(method, parsed))

    def delete(self, trace_id: str) -> asyncio.Task[Any]:
        """Begin a deletion."""
        assert self.server
        request = pb.DeleteTraceRequest(run=RUN, trace_id=trace_id)
        method = self.server._handlers["DeleteTrace"]
        parsed = method.request_deserializer(request.SerializeToString())
        return self.task(method.unary_unary(parsed, _Context()))

    def end(self) -> None:
        """Drop all calls, and leave the store."""
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0))
        self._store.close()

    def close(self) -> None:
        """End it for good."""
        self.end()
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()


class Orders:
    """Two servers, one writer, and readers of both, in one random order.

    Args:
        seed: of the order.
    """

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(f"orders {seed}")
        self._clock = Clock(1e6)
        bucket = Bucket(MemoryBucket(), "memory")
        self.nodes = [Node(bucket, self._clock, name) for name in "ab"]
        self.script = Script(seed, "e0", longest=8)
        self.turn = 0
        self.steps: list[Step] = []
        self.reads: list[Read] = []
        self.counts: Counter[str] = Counter()
        self._reading: list[tuple[int, Node, int, asyncio.Task[Any]]] = []
        self._deleting: list[tuple[int, asyncio.Task[Any]]] = []
        self._ended: list[int] = []
        self._epoch = self._acked = self._sent = self._most = self._newest = 0
        self._stream: tuple[Node, asyncio.Queue[Any], Any] | None = None
        self._answer: asyncio.Task[Any] | None = None

    def run(self, turns: int) -> None:
        """Take so many turns."""
        rng = self._rng
        actions = self._feed, self._hang_up, self._read, self._delete, self._look
        weights = 8, 3, 8, 1, 4
        while self.turn < turns:
            self.turn += 1
            self._clock.advance(rng.uniform(0, 0.05 * LEASE_S))
            if rng.random() < 0.02:  # the threads of a lease may wake last
                loop = rng.choice(_PAUSES)
                asleep = {"loop": loop, "lease": loop + rng.choice(_PAUSES)}
                rng.choice(self.nodes).asleep = asleep
            for node in self.nodes:
                node.asleep = {which: max(0, n - 1) for which, n in node.asleep.items()}
            rng.choices(actions, weights)[0](rng.choice(self.nodes))
            for node in rng.sample(self.nodes, 2):
                if not node.asleep["loop"]:
                    node.step(rng.choice((0, 1, 5, 20)))
            if self._answer or self._deleting:
                time.sleep(0.0002)  # a commit is made in a thread of its own
            self._take()

    def _note(self, what: str, number: int) -> None:
        self.steps.append(Step(self.turn, what, number))

    def _look(self, node: Node) -> None:
        if not node.asleep["lease"]:
            node.look()

    def _read(self, node: Node) -> None:
        request = max(0, self._newest + self._rng.randint(-6, 1))
        if node.server is None or Script.is_short(request):
            return
        name = self.script.trace_id(request)
        task = node.read(pb.GetTraceRequest(run=RUN, trace_id=name))
        self._reading.append((self.turn, node, request, task))

    def _delete(self, node: Node) -> None:
        if node.server is not None and self._ended:
            request = self._rng.choice(self._ended)
            self._note("deleting", request)
            self._deleting.append((request, node.delete(self.script.trace_id(request))))

    def _feed(self, node: Node) -> None:
        if self._stream is None:
            if node.server is not None:
                pipe: asyncio.Queue[Any] = asyncio.Queue()
                pipe.put_nowait(pb.IngestRequest(hello=self.script.hello(self._epoch)))
                self._stream = node, pipe, node.server.stream(_incoming(pipe))
                self._next()
        elif self._answer is None or self._sent < self._acked + 4:
            self._sent += 1
            self._most = max(self._most, self._sent)
            self._note("sent", self._sent)
            self._stream[1].put_nowait(pb.IngestRequest(chunk=self.script.chunk(self._sent)))

    def _hang_up(self, _: Node) -> None:
        """Give a stream up, most often one of a server that stands still; nobody tells it."""
        if self._stream and (self._stream[0].asleep["loop"] or self._rng.random() < 0.1):
            self._stream = self._answer = None

    def _next(self) -> None:
        assert self._stream
        node, _, responses = self._stream
        self._answer = node.task(anext(responses))

    def _take(self) -> None:
        """Take the answers that are there."""
        if self._answer is not None and self._answer.done():
            try:
                self._told(self._answer.result())
                self._next()
            except (grpc.RpcError, asyncio.CancelledError, StopAsyncIteration):
                self.counts["streams ended"] += 1
                self._stream = self._answer = None
        for read in [read for read in self._reading if read[3].done()]:
            self._reading.remove(read)
            begun, node, request, task = read
            seen = self._seen(task)
            if seen is not None:
                self.reads.append(Read(begun - 0.5, self.turn, node.name, request, seen))
        for request, task in [d for d in self._deleting if d[1].done()]:
            self._deleting.remove((request, task))
            if not task.cancelled() and task.exception() is None:
                self._note("deleted", request)
                self.counts["deleted"] += 1
                if request in self._ended:
                    self._ended.remove(request)

    def _told(self, answer: pb.IngestResponse) -> None:
        before = self._acked
        if answer.HasField("welcome"):
            stored = answer.welcome.next_sequence - 1
            check(before <= stored <= self._most, f"it has {stored}, acknowledged {before}")
            check(self._epoch in (0, answer.welcome.epoch), "another epoch")
            self._epoch, self._acked, self._sent = answer.welcome.epoch, stored, stored
        elif answer.HasField("ack"):
            self._acked = max(before, answer.ack.sequence)
        elif answer.HasField("reject"):
            raise StopAsyncIteration
        if self._acked > before:
            self._note("acked", self._acked)
        for sequence in range(before + 1, self._acked + 1):
            parts = self.script.parts(sequence)
            self._newest = max([self._newest, *(part.request for part in parts)])
            self._ended += [p.request for p in parts if p.ends and Script.is_deleted(p.request)]

    def _seen(self, task: asyncio.Task[Any]) -> Seen | None:
        """Return what an answer says; None if there is none."""
        if task.cancelled():
            return None
        if error := task.exception():
            assert isinstance(error, grpc.RpcError), error
            code: Any = error.code()  # type: ignore[attr-defined]
            self.counts[code.name] += 1
            check(code.name in ("NOT_FOUND", "UNAVAILABLE"), f"{code}")
            return NOTHING if code.name == "NOT_FOUND" else None
        self.counts["answered"] += 1
        info = PARSE(task.result()[-1]).head.end.info
        return Seen(rows=info.num_rows, ended=bool(info.num_tokens))

    def judge(self) -> int:
        """Check all reads; return their number."""
        return check_history(self.script, self.steps, self.reads)

    def close(self) -> None:
        """End it."""
        for node in self.nodes:
            node.close()


async def _incoming(pipe: asyncio.Queue[Any]) -> AsyncIterator[Any]:
    while True:
        yield await pipe.get()


@pytest.fixture
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def judged(seed: int, turns: int) -> Orders:
    orders = Orders(seed)
    try:
        orders.run(turns)
    finally:
        orders.close()
    orders.judge()
    return orders


@pytest.mark.usefixtures("quiet")
def test_in_any_order_of_pauses_and_take_overs_no_read_misses_what_was_acknowledged():
    counts: Counter[str] = Counter()
    for seed in range(SEED, SEED + 16):
        orders = judged(seed, 800)
        counts += orders.counts
        counts["take-overs"] += sum(node.starts for node in orders.nodes) - 1
    assert counts["answered"] > 200
    assert counts["UNAVAILABLE"] > 100
    assert counts["take-overs"] > 10


@pytest.mark.usefixtures("quiet")
def test_the_orders_show_a_server_that_answers_once_its_lease_is_over(monkeypatch):
    held = property(lambda lease: not lease.lost and lease._end > 0)
    monkeypatch.setattr(Stepped, "held", held)

    def judge_all() -> None:
        for seed in range(30):
            judged(seed, 800)

    with pytest.raises(Violation, match="acknowledged"):
        judge_all()


@pytest.mark.slow
def test_no_read_misses_what_real_servers_acknowledged(monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "any")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "any")
    with FakeS3() as s3:
        figures = real_time.chaos(SEED, 2, s3.endpoint)
    assert figures["reads judged"] > 100
    assert figures["chunks they may not miss"] > 10


# ---------------------------------------------------------------------------- the judge

SCRIPT = Script(SEED, "e0", longest=8)
FIRST = SCRIPT.parts(1)[0]
SEEN = Seen(rows=FIRST.stop, ended=FIRST.ends)
STEPS = [Step(1, "sent", 1), Step(2, "acked", 1)]


def read(begun: float, ended: float, seen: Seen) -> Read:
    return Read(begun, ended, "a", FIRST.request, seen)


def test_reads_that_an_acknowledgement_overlaps_may_see_it_or_not():
    for seen in (NOTHING, SEEN):
        assert check_history(SCRIPT, STEPS, [read(1.5, 2.5, seen), read(3, 4, SEEN)]) == 2


@pytest.mark.parametrize(
    "reads",
    [
        [read(3, 4, NOTHING)],  # acknowledged before
        [read(0, 0.5, SEEN)],  # not sent yet
        [read(1.1, 1.2, SEEN), read(1.3, 2.5, NOTHING)],  # seen before
        [read(1.1, 1.2, SEEN), read(3, 4, Seen(rows=SEEN.rows + 1))],  # nobody sent it
    ],
)
def test_the_judge_sees_reads_that_cannot_be_right(reads):
    with pytest.raises(Violation):
        check_history(SCRIPT, STEPS, reads)


def test_a_deletion_is_seen_from_its_acknowledgement_on():
    steps = [*STEPS, Step(3, "deleting", FIRST.request), Step(5, "deleted", FIRST.request)]
    for seen in (NOTHING, SEEN):
        assert check_history(SCRIPT, steps, [read(2.5, 4, seen), read(6, 7, NOTHING)]) == 2
    for wrong in ([read(6, 7, SEEN)], [read(2.5, 3.5, NOTHING), read(4, 6, SEEN)]):
        with pytest.raises(Violation):
            check_history(SCRIPT, steps, wrong)
