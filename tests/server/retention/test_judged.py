"""A retirement or eviction takes only what is still as it was when it was chosen.

Traces are chosen while chunks are being committed. One of these may begin the next request of a
trace that has ended: that trace stays, at once and after any restart.
"""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace

import grpc
import numpy as np
import pytest

from routetrace.codec.records import FinishReason, OpKind
from routetrace.common.layout import ModelLayout
from routetrace.server.common.slices import IN_TURNS
from routetrace.server.core import Core
from routetrace.server.index import journal as journal_module
from routetrace.server.index.apply import apply_record
from routetrace.server.index.journal import Journal
from routetrace.server.index.records.record import (
    Sums,
    decode_record,
    encode_chunk,
    encode_delete,
    encode_open,
    encode_renew,
)
from routetrace.server.index.state import State
from routetrace.server.read.catalog import Renewal
from routetrace.server.retention.memory import INDEX_SHARE, Memory
from routetrace.server.settings.config import ServerConfig
from routetrace.server.store.interface import Record
from routetrace.server.store.memory import MemoryStore
from routetrace.v1 import routetrace_pb2 as pb
from routetrace.v1 import routetrace_pb2_grpc as pb_grpc
from support.agents.feeder import ChunkMaker
from support.waiting import wait_for

LAYOUT = ModelLayout((0, 2), 3, 16, 2)
WRITER = ("run", "e", "")
KEY = ("run", "session")
TTL = 1000.0
ROWS = np.zeros((4, 2, 2), np.uint8)
ROWS[:, :, 1] = 1


def turn(number: int, *, ends: bool, trace_id: str = "session") -> ChunkMaker:
    chunk = ChunkMaker(LAYOUT)
    begin(chunk, number, trace_id)
    if ends:
        end(chunk, number)
    return chunk


def begin(chunk: ChunkMaker, number: int, trace_id: str = "session") -> None:
    chunk.begins.append(pb.RequestBegin(trace_id=trace_id))
    chunk.op(OpKind.BEGIN, f"turn {number}", arg=len(chunk.begins) - 1, value=number)
    frame = chunk.frame(ROWS)
    chunk.op(OpKind.ROWS, f"turn {number}", count=len(ROWS), frame=frame, step=number + 1)


def end(chunk: ChunkMaker, number: int) -> None:
    stop = FinishReason.STOP
    chunk.op(OpKind.FINISH, f"turn {number}", count=len(ROWS) + 1, arg=int(stop))


def opened() -> bytes:
    return encode_open(
        0, WRITER, epoch=1, boot_id="b", layout=LAYOUT, block_size=0, num_blocks=0
    )  # fmt: skip


def stored(maker: ChunkMaker, sequence: int, now: float = 1.0) -> bytes:
    chunk = maker.make(sequence)
    sums = Sums(chunk.header_crc32, chunk.payload_crc32)
    return encode_chunk(WRITER, 1, sequence, sums, now, chunk.header)


def replayed(records: list[bytes], cut: int) -> State:
    """The state after a restart with a snapshot after `cut` records."""
    before, after = State(TTL), State(TTL)
    for number, record in enumerate(records[:cut], 1):
        apply_record(before, number, record)
    after.load(list(before.dump()))
    for number, record in enumerate(records[cut:], cut + 1):
        apply_record(after, number, record)
    return after


#: What comes between the choice, after two records, and the removal; and whether the trace stays.
MEANWHILE = {
    "nothing": ([], False),
    "its next turn": ([stored(turn(1, ends=False), 2)], True),
    "its next turn, which has ended": ([stored(turn(1, ends=True), 2)], True),
    "another one of its id": (
        [encode_delete(1, "run", ["session"], "deleted"), stored(turn(1, ends=False), 2)],
        True,
    ),
    "another trace": ([stored(turn(1, ends=False, trace_id="other"), 2)], False),
    "a longer lease": ([encode_renew(1, "run", ["session"], TTL)], False),
}


@pytest.mark.parametrize("meanwhile", MEANWHILE)
def test_what_changed_since_it_was_chosen_stays(meanwhile):
    between, stays = MEANWHILE[meanwhile]
    # The same time everywhere: the clock may step back between two starts.
    removal = encode_delete(1, "run", ["session", "none"], "retired", judged=2)
    records = [opened(), stored(turn(0, ends=True), 1), *between, removal]
    state = State(TTL)
    for number, record in enumerate(records, 1):
        result = apply_record(state, number, record)
    assert result == (not stays)
    assert (KEY in state.traces.traces) == stays
    fate = state.tombstones.fate(KEY)
    assert (fate is not None and fate.reason == "retired") == (not stays)
    (writer,) = state.writers.values()
    assert all(not source.forgotten for _, source in writer.live.values())
    for cut in range(len(records) + 1):
        assert list(replayed(records, cut).dump()) == list(state.dump()), cut


def test_a_deletion_by_name_takes_what_there_is():
    state = State(TTL)
    deletion = encode_delete(1, "run", ["session"], "deleted")
    assert not decode_record(deletion).delete.judged
    records = [opened(), stored(turn(0, ends=True), 1), stored(turn(1, ends=False), 2)]
    for number, record in enumerate(records, 1):
        apply_record(state, number, record)
    assert apply_record(state, 4, deletion) == 1
    assert KEY not in state.traces.traces


@pytest.mark.parametrize(("keep_longer", "left"), [(False, 10), (True, TTL)])
def test_a_renewal_may_keep_longer_leases(keep_longer: bool, left: float):
    renewal = encode_renew(1, "run", ["session", "none"], 10, keep_longer=keep_longer)
    records = [opened(), stored(turn(0, ends=True), 1), renewal]
    state = replayed(records, 3)
    trace = state.traces.traces[KEY]
    assert (trace.ttl, trace.expires) == (left, 1 + left)
    for cut in range(len(records)):
        assert list(replayed(records, cut).dump()) == list(state.dump()), cut


async def test_a_lease_that_is_lengthened_after_the_check_stays():
    """Callers without scope admin may end no lease earlier, however long their check takes."""
    core = Core(MemoryStore(), ServerConfig(default_ttl_seconds=TTL))
    await core.start()
    now = core.journal.clock.now()
    await core.journal.append(opened())
    await core.journal.append(stored(turn(0, ends=True), 1, now))
    catalog, trace = core._traces._catalog("run"), core.state.traces.traces[KEY]
    before = trace.expires
    asked: list[int] = []
    renewal = Renewal("run", ["session"], 10, refuse=lambda: asked.append(1))
    await catalog.renew(renewal, IN_TURNS)
    assert (asked, trace.expires) == ([1], before)
    await catalog.renew(renewal._replace(refuse=None), IN_TURNS)
    assert trace.expires < before
    await core.stop()


async def test_the_rest_of_a_record_counts_as_a_later_change(monkeypatch):
    """A trace may look ended in the middle of a chunk that begins its next turn."""
    times = iter(range(1 << 30))
    clock = SimpleNamespace(monotonic=lambda: next(times), time=lambda: 0.0)
    monkeypatch.setattr(journal_module, "time", clock)
    monkeypatch.setattr(journal_module, "SLICE_SECONDS", 1)  # a step
    store, state = MemoryStore(), State(TTL)
    journal = Journal(store, state)
    await journal.append(opened())
    assert journal.applied == 1
    await journal.append(stored(turn(0, ends=False), 1))
    assert journal.applied == 2
    chunk = ChunkMaker(LAYOUT)
    end(chunk, 0)
    for _ in range(200):
        chunk.op(OpKind.RESET)
    begin(chunk, 1)
    applied = journal.append(stored(chunk, 2))
    (source,) = state.traces.traces[KEY].sources
    while not source.ended:
        journal._apply_stored()
    assert state.number == 3
    assert not applied.done()
    assert len(state.traces.traces[KEY].sources) == 1
    judged = journal.applied
    assert await journal.append(encode_delete(1, "run", ["session"], "quota", judged=judged)) == 0
    assert journal.applied == 4
    assert len(state.traces.traces[KEY].sources) == 2


class SlowStore(MemoryStore):
    """Commits at once or, while it holds, when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.holds = False
        self.waiting: list[Future[None]] = []

    def append(self, record: Record) -> Future[None]:
        done = super().append(record)
        if not self.holds:
            return done
        self.waiting.append(Future())
        return self.waiting[-1]

    def commit(self) -> None:
        self.holds = False
        for late in self.waiting:
            late.set_result(None)
        self.waiting.clear()

    async def has(self, count: int) -> None:
        """Return once so many records wait for their commit."""
        await asyncio.to_thread(wait_for, lambda: len(self.waiting) == count)


class Service:
    """A server in this process, one engine's stream and calls, on one event loop."""

    def __init__(self, store: SlowStore) -> None:
        self.core = Core(store, ServerConfig(store="memory"))
        self.server = grpc.aio.server()
        self.core.add_to(self.server)
        port = self.server.add_insecure_port("127.0.0.1:0")
        self.channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
        self.reads = pb_grpc.TraceServiceStub(self.channel)
        self.sequence = 0

    async def __aenter__(self) -> Service:
        await self.core.start()
        await self.server.start()
        self.stream = pb_grpc.IngestServiceStub(self.channel).Ingest()
        hello = pb.Hello(run="run", engine_id="e", boot_id="b", layout=LAYOUT.to_proto())
        await self.stream.write(pb.IngestRequest(hello=hello))
        assert (await self.stream.read()).HasField("welcome")
        return self

    async def __aexit__(self, *_: object) -> None:
        self.stream.cancel()
        await self.channel.close()
        await self.core.stop()
        await self.server.stop(None)

    async def send(self, chunk: ChunkMaker) -> None:
        self.sequence += 1
        await self.stream.write(pb.IngestRequest(chunk=chunk.make(self.sequence)))

    async def acknowledged(self) -> None:
        answer = await self.stream.read()
        while answer.HasField("pace"):
            answer = await self.stream.read()
        assert answer.ack.sequence == self.sequence, answer

    async def put(self, chunk: ChunkMaker) -> None:
        await self.send(chunk)
        await self.acknowledged()

    async def state_of(self, trace_id: str, incarnation: int = 0) -> int:
        """The TraceState; 0 if the trace is gone."""
        request = pb.StatTraceRequest(run="run", trace_id=trace_id, incarnation=incarnation)
        try:
            return int((await self.reads.StatTrace(request)).info.state)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.NOT_FOUND:
                raise
            return 0

    async def remove(self, reason: str, monkeypatch: pytest.MonkeyPatch) -> int:
        """Retire all traces, or evict the oldest one that has ended; return how many went."""
        counter = self.core.metrics.forgotten.labels(reason)
        before = counter._value.get()
        if reason == "retired":
            answer = await self.reads.RetireTraces(pb.RetireTracesRequest(run="run"))
            assert answer.num_retired == counter._value.get() - before
        else:
            await self._fill(reason, monkeypatch)
            await self.core.retention._evict(await self.core.retention.memory.look())
        return int(counter._value.get() - before)

    async def _fill(self, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
        limits: dict[str, int] = {}
        retention = self.core.retention
        if reason == "quota":
            limits["run_quota"] = int(self.core.state.run_bytes["run"] / 0.95)
        elif reason == "memory":
            config = self.core.config.model_copy(update={"memory_limit": 1})
            counted = (await Memory(self.core.state, config, time.time).look()).total()
            limits["memory_limit"] = int(counted / INDEX_SHARE / 0.95)
        else:
            stats = MemoryStore.stats(self.core.store)  # type: ignore[arg-type]
            full = replace(stats, capacity_bytes=int(stats.used_bytes / 0.95))
            monkeypatch.setattr(self.core.store, "stats", lambda: full)
        config = self.core.config.model_copy(update=limits)
        monkeypatch.setattr(retention, "_config", config)
        monkeypatch.setattr(retention, "memory", Memory(self.core.state, config, time.time))


@pytest.mark.parametrize("reason", ["retired", "quota", "capacity", "memory"])
async def test_a_turn_that_begins_while_its_trace_is_removed_runs_on(reason, monkeypatch):
    store = SlowStore()
    async with Service(store) as service:
        await service.put(turn(0, ends=True))
        await service.put(turn(1, ends=True, trace_id="other"))
        store.holds = True
        await service.send(turn(2, ends=False))
        await store.has(1)
        removal = asyncio.create_task(service.remove(reason, monkeypatch))
        await store.has(2)
        store.commit()
        # An eviction had chosen the older one alone.
        assert await removal == (reason == "retired")
        await service.acknowledged()
        assert await service.state_of("session", 2) == pb.TRACE_STATE_RUNNING
        assert bool(await service.state_of("other")) == (reason != "retired")

        # A restart sees the same.
        again = Core(store, ServerConfig(store="memory"))
        again.journal.recover()
        assert list(again.state.dump()) == list(service.core.state.dump())

        last = ChunkMaker(LAYOUT)
        end(last, 2)
        await service.put(last)
        assert await service.state_of("session", 2) == pb.TRACE_STATE_COMPLETE
        # The next one takes what has ended by now.
        assert await service.remove(reason, monkeypatch) == 1
        gone = "session" if reason == "retired" else "other"
        assert not await service.state_of(gone)
