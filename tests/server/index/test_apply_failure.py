"""A committed record that cannot be applied: the server stops, and a restart is without it."""

from __future__ import annotations

import asyncio
import logging
import signal

import pytest

from routetrace.common.errors import Corrupt, InvalidArgument, Unavailable
from routetrace.common.layout import ModelLayout
from routetrace.common.limits import MAX_BLOCK_SIZE, MAX_SLOTS
from routetrace.server import daemon
from routetrace.server.access.lifecycle import ServerState
from routetrace.server.common.slices import at_once
from routetrace.server.core import Core
from routetrace.server.index import apply, journal
from routetrace.server.index.records.record import decode_record, encode_open, encode_renew
from routetrace.server.index.slot_map import SlotMap
from routetrace.server.index.traces.sources import WriterKey
from routetrace.server.settings.config import ServerConfig
from routetrace.server.store.interface import Record
from routetrace.server.store.memory import MemoryStore
from routetrace.stored import format5_pb2 as stored
from support.agents.recorder import pointed_into, records

WRITER = WriterKey("run", "engine", "")
CONFIG = ServerConfig(store="memory", default_ttl_seconds=10**6)


def chunks_that_release(some: list[bytes]) -> list[int]:
    """Numbers of records that release a request's blocks, some of them after other ops."""
    found: dict[int, None] = {}
    release = apply._Applier._release

    def note(self, source, position):
        release(self, source, position)
        found[self.number] = None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(apply._Applier, "_release", note)
        core = Core(MemoryStore(), CONFIG)
        for number, record in enumerate(some, 1):
            apply.apply_record(core.state, number, record)
    assert len(found) >= 3
    return [*found]


@pytest.fixture
def failing(monkeypatch):
    """Numbers of records whose first released request fails, after the ops before it."""
    numbers: set[int] = set()
    release = apply._Applier._release

    def fail(self, source, position):
        if self.number in numbers:
            raise RuntimeError("injected")
        release(self, source, position)

    monkeypatch.setattr(apply._Applier, "_release", fail)
    return numbers


def recovered(store: MemoryStore) -> Core:
    core = Core(store, CONFIG)
    core.journal.recover()
    return core


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("snapshot", [False, True])
def test_a_replay_leaves_no_part_of_a_record_that_fails(seed, snapshot, failing, caplog):
    some = records(seed)
    victims = chunks_that_release(some)[1:3]
    store = MemoryStore()
    for number, record in enumerate(some, 1):
        store.append(Record(number, record, b"")).result()
        if snapshot and number == victims[0] - 1:
            before = recovered(store)
            store.compact(at_once(before.journal.snapshot()), ())
    failing.update(victims)
    core = recovered(store)
    for victim in victims:
        assert f"record {victim} cannot be applied" in caplog.text
    assert not pointed_into(core.state) & set(victims), "a part of the record is in the state"
    # The last number of the writer counts, so that a chunk that is sent again is acknowledged.
    last = max(
        record.chunk.sequence for record in map(decode_record, some) if record.HasField("chunk")
    )
    assert core.state.writers[WRITER].sequence == last
    # What the victims left out is what a state is that never saw a part of them.
    clean = Core(MemoryStore(), CONFIG)
    for number, record in enumerate(some, 1):
        if number in victims:
            apply.leave_out(clean.state, number, record)
        else:
            apply.apply_record(clean.state, number, record)
    assert [*core.state.dump()] == [*clean.state.dump()]


def test_too_many_records_that_fail_end_the_start(failing, monkeypatch):
    monkeypatch.setattr(journal, "MAX_LEFT_OUT", 2)
    some = records(0)
    store = MemoryStore()
    for number, record in enumerate(some, 1):
        store.append(Record(number, record, b"")).result()
    failing.update(range(len(some) + 1))
    with pytest.raises(Corrupt, match="cannot be applied"):
        recovered(store)


async def test_a_failure_in_the_middle_of_a_chunk_stops_the_server(failing, caplog):
    some = records(0)
    victim = chunks_that_release(some)[1]
    failing.add(victim)
    store = MemoryStore()
    core = Core(store, CONFIG)
    await core.start()
    results = [core.journal.append(record) for record in some[: victim + 1]]
    outcomes = await asyncio.gather(*results, return_exceptions=True)
    assert not any(isinstance(outcome, Exception) for outcome in outcomes[: victim - 1])
    # The record itself, and the one that was stored behind it: neither is acknowledged.
    for outcome in outcomes[victim - 1 :]:
        assert isinstance(outcome, Unavailable)
        assert f"record {victim}" in outcome.message
    assert core.state.number == victim, "nothing is applied after the failure"
    assert core.failed.is_set()
    assert core.lifecycle.state is ServerState.FAILED
    with pytest.raises(Unavailable, match="failed"):
        core.lifecycle.check_ready()
    with pytest.raises(Unavailable, match=f"record {victim}"):
        core.journal.append(encode_renew(1.0, "run", ["r0"], 5))
    with pytest.raises(Unavailable):
        at_once(core.journal.snapshot())
    with pytest.raises(Unavailable):
        await core.sweep()
    assert f"record {victim} cannot be applied" in caplog.text
    assert [record.levelno for record in caplog.records].count(logging.ERROR) == 1
    await core.stop()
    again = Core(store, CONFIG)
    await again.start()
    assert again.ready
    assert again.state.number == victim + 1
    assert victim not in pointed_into(again.state)
    results = [again.journal.append(record) for record in some[victim + 1 :]]
    await asyncio.gather(*results)


def test_drafts_of_an_engine_without_blocks_are_confirmed():
    """Found by the failure above: the slot map of such an engine has block size 0."""
    assert [*SlotMap(0, 0).kept([], 0, 4, 0)] == []


@pytest.mark.parametrize(
    ("block_size", "num_blocks"), [(MAX_BLOCK_SIZE + 1, 1), (4, MAX_SLOTS // 4 + 1)]
)
def test_a_writer_with_more_slots_than_a_server_accepts_is_left_out(block_size, num_blocks, caplog):
    """Found by the fuzzer: a block of 283,035,858 slots took gigabytes when it was used."""
    refused, accepted = (
        encode_open(
            0.0, ("run", name, ""), epoch=1, boot_id="boot", layout=ModelLayout((0,), 1, 2, 1),
            block_size=size, num_blocks=count,
        )
        for name, size, count in (("refused", block_size, num_blocks), ("accepted", 4, 10))
    )  # fmt: skip
    store = MemoryStore()
    for number, record in enumerate((refused, accepted), 1):
        store.append(Record(number, record, b"")).result()
    state = recovered(store).state
    assert [key.engine_id for key in state.writers] == ["accepted"]
    assert "record 1 cannot be applied and is left out" in caplog.text
    message = stored.SlotMap(block_size=block_size, num_blocks=num_blocks, room=64)
    with pytest.raises(InvalidArgument, match="at most"):
        SlotMap.load(message)


async def test_the_process_ends_with_an_error_that_names_the_record(failing, monkeypatch):
    """As a supervisor restarts what ends with an error; SIGTERM ends it without one."""
    made: list[Core] = []
    ready = asyncio.Event()

    class Watched(Core):
        async def start(self) -> None:
            await super().start()
            made.append(self)
            ready.set()

    monkeypatch.setattr(daemon, "Core", Watched)
    config = ServerConfig(listen="127.0.0.1:0", store="memory", drain_seconds=0.1)
    task = asyncio.create_task(daemon._serve(config))
    await asyncio.wait_for(ready.wait(), 60)
    some = records(0)
    victim = chunks_that_release(some)[0]
    failing.add(victim)
    results = [made[0].journal.append(record) for record in some[:victim]]
    await asyncio.gather(*results, return_exceptions=True)
    with pytest.raises(daemon.ServeError, match=f"record {victim} cannot be applied"):
        await asyncio.wait_for(task, 60)
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().remove_signal_handler(number)
