"""The derived state: replaying records, with snapshots at any point, always leads to the same."""

from __future__ import annotations

import asyncio
import gc
import random
from collections.abc import Generator, Iterator
from contextlib import ExitStack
from itertools import chain
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from routetrace.codec.records import OpKind
from routetrace.common.errors import Overloaded
from routetrace.server.common import slices
from routetrace.server.core import Core
from routetrace.server.index import apply
from routetrace.server.index import state as state_module
from routetrace.server.index.apply import apply_record
from routetrace.server.index.records.record import (
    decode_record,
    encode_delete,
)
from routetrace.server.index.slot_map import SlotMap, SlotRun
from routetrace.server.index.state import State
from routetrace.server.index.traces import refs
from routetrace.server.index.traces.refs import CHUNK_SHIFT
from routetrace.server.index.traces.spans import Span, SpanList, merge, subtract
from routetrace.server.index.traces.tombstones import Fate
from routetrace.server.retention import retention
from routetrace.server.settings.config import ServerConfig
from routetrace.server.store.memory import MemoryStore
from routetrace.stored import format5_pb2 as stored
from support.agents.recorder import LAYOUT, Recorder, pointed_into, records

_EVER = 4 * 10**9


@pytest.mark.parametrize("seed", range(6))
def test_a_snapshot_anywhere_changes_nothing(seed):
    whole, cut, kept = State(100), State(100), State(100)
    rng = random.Random(seed)
    for number, record in enumerate(records(seed), 1):
        apply_record(whole, number, record)
        apply_record(cut, number, record)
        apply_record(kept, number, record)
        if rng.random() < 0.3:
            pieces = list(cut.dump())
            # What was packed for one snapshot is used for the next one, unless it has changed.
            assert list(kept.dump()) == pieces
            cut = State(100)
            cut.load(pieces)
            assert list(cut.dump()) == pieces
            assert cut.run_bytes == whole.run_bytes
            assert cut.traces.counts() == whole.traces.counts()
    assert list(cut.dump()) == list(whole.dump())
    assert set(chain.from_iterable(cut.marks())) == set(chain.from_iterable(whole.marks()))
    assert whole.traces.traces


def test_a_record_out_of_sequence_counts_for_nothing():
    state = State(100)
    some = records(0)
    chunks = [i for i, r in enumerate(some) if decode_record(r).HasField("chunk")]
    for number, record in enumerate(some[: chunks[3]], 1):
        apply_record(state, number, record)
    before = list(state.dump())
    counted = apply_record(state, 1000, some[chunks[4]])
    assert counted is False
    state.number = chunks[3]
    state.release(1000)  # known as garbage, so that its space comes back
    assert list(state.dump()) == before


spans = st.lists(
    st.tuples(st.integers(0, 60), st.integers(1, 12), st.booleans()), min_size=1, max_size=12
)


@given(spans, st.integers(0, 70), st.tuples(st.integers(0, 70), st.integers(0, 70)))
def test_span_lists_equal_a_dict_of_positions(steps, cut, hole):
    spans, naive = SpanList(), {}
    ref = 0
    for position, length, contiguous in steps:
        ref += 0 if contiguous else 7
        spans.append(Span(position, length, ref, 0, 1))
        naive = {p: r for p, r in naive.items() if p < position}
        naive |= {position + i: ref + i for i in range(length)}
        ref += length

    def check() -> None:
        seen = {s.position + i: s.ref + i for s in spans for i in range(s.length)}
        assert seen == naive
        assert spans.end == max(naive, default=-1) + 1
        positions = [s.position for s in spans]
        assert positions == sorted(positions)

    check()
    start, stop = sorted(hole)
    spans.remove(start, stop)
    naive = {p: r for p, r in naive.items() if not start <= p < stop}
    check()
    spans.truncate(cut)
    naive = {p: r for p, r in naive.items() if p < cut}
    check()
    assert list(SpanList(spans.tobytes())) == list(spans)


intervals = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 9)), max_size=8)


@given(intervals, st.integers(0, 30), st.integers(0, 20))
def test_intervals_equal_sets_of_positions(pairs, start, length):
    claimed = merge((a, a + n) for a, n in pairs)
    taken = {p for a, b in claimed for p in range(a, b)}
    assert taken == {p for a, n in pairs for p in range(a, a + n)}
    rest = subtract((start, start + length), claimed)
    assert {p for a, b in rest for p in range(a, b)} == set(range(start, start + length)) - taken


def reloaded(slots: SlotMap) -> SlotMap:
    message = stored.SlotMap()
    slots.dump(message)
    return SlotMap.load(message)


writes = st.lists(
    st.tuples(
        st.lists(st.integers(0, 31), min_size=1, max_size=9),
        st.integers(0, 2),
        st.sampled_from(
            ["write", "write run", "write run", "forget run", "blocks", "copy", "first", "all"]
        ),
    ),
    max_size=12,
)


@given(
    writes,
    st.integers(0, 12),
    st.lists(st.integers(0, 7), min_size=1, max_size=5),
    st.integers(0, 12),
)
def test_the_slot_map_equals_a_dict_of_slots(steps, saved, block_ids, last_step):
    slots, naive = SlotMap(4, 8), {}
    for step, (some, version, kind) in enumerate(steps, 1):
        _change(slots, naive, step, some, version, kind)
        if step == saved:
            slots = reloaded(slots)
    _check_slots(slots, naive, block_ids, last_step)
    _check_slots(reloaded(slots), naive, block_ids, last_step)


@pytest.mark.parametrize("blocks", [8, 100, 20_000])
@pytest.mark.parametrize("seed", range(4))
def test_the_slot_map_of_an_engine_that_runs_for_long(seed, blocks):
    """Which comes to use more and more of its blocks, or soon one of the last."""
    rng = random.Random(seed)
    slots, naive = SlotMap(4, blocks), {}
    kinds = ["write run"] * 12 + ["write", "forget run", "forget run", "blocks", "all"]
    kinds += ["copy"] * 4 + ["first"]
    for step in range(1, 1200):
        used = blocks if rng.random() < 0.002 else min(blocks, 4 + step // 8)
        some = [rng.randrange(4 * used) for _ in range(rng.randint(1, 9))]
        _change(slots, naive, step, some, rng.randrange(3), rng.choice(kinds), blocks)
        asked = rng.sample(range(used + 2 if used < blocks else blocks), 5)
        _check_slots(slots, naive, asked, rng.choice([0, step - 3]))
        if rng.random() < 0.01:
            slots = reloaded(slots)


def _change(slots, naive, step, some, version, kind, num_blocks=8):
    """One change, and what it means slot by slot."""
    if kind == "write":
        ref = step << 28
        slots.write(np.array(some), ref, version, step)
        naive |= {slot: (ref + i, version, step) for i, slot in enumerate(some)}
    elif kind in ("write run", "forget run"):
        # Blocks in any order, some of them twice; from the middle of one to that of another.
        blocks, start = [s // 4 for s in some], some[0] % 9
        stop = min(start + some[-1], 4 * len(blocks))
        held = {p: blocks[p // 4] * 4 + p % 4 for p in range(start, stop)}
        if kind == "write run":
            run = SlotRun(start, some[-1], step << 28, version)
            slots.write_run(blocks, run, step)
            naive |= {s: ((step << 28) + p - start, version, step) for p, s in held.items()}
        else:
            slots.forget_run(blocks, start, start + some[-1])
            for slot in held.values():
                naive.pop(slot, None)
    elif kind == "blocks":
        blocks = {s // 4 for s in some}
        slots.forget_blocks(sorted(blocks))
        for slot in [s for s in naive if s // 4 in blocks]:
            del naive[slot]
    elif kind == "copy":
        # Some of them sources and targets, some targets of two.
        sources, targets = [s // 4 for s in some], [s % num_blocks for s in some]
        held = [[naive.get(block * 4 + i) for i in range(4)] for block in sources]
        slots.copy(sources, targets)
        for block, entries in zip(targets, held, strict=True):
            for i, entry in enumerate(entries):
                naive.pop(block * 4 + i, None)
                if entry:
                    naive[block * 4 + i] = entry
    elif kind == "first":
        count = 1 + some[0] % num_blocks
        slots.forget_all(count)
        for slot in [s for s in naive if s < 4 * count]:
            del naive[slot]
    elif len(some) > 8:
        slots.forget_all()
        naive.clear()


def _check_slots(slots, naive, block_ids, last_step):
    stop = len(block_ids) * 4 - 1
    seen = {}
    for run in slots.resolve(block_ids, 1, stop, last_step):
        seen |= {run.position + i: (run.ref + i, run.weight_version) for i in range(run.length)}
    expected = {}
    for position in range(1, stop):
        entry = naive.get(block_ids[position // 4] * 4 + position % 4)
        if entry and (not last_step or entry[2] <= last_step):
            expected[position] = entry[:2]
    assert seen == expected
    assert set(slots.chunks().tolist()) == {ref >> 28 for ref, _, _ in naive.values()}


def test_whole_blocks_of_one_run_take_no_slots():
    """Slots of an engine and of a snapshot share memory: 24 bytes a slot otherwise."""
    slots = SlotMap(4, 64)
    for request in range(8):
        blocks = [*range(8 * request, 8 * request + 8)]
        slots.forget_run(blocks, 0, 1 << 32)
        slots.write_run(blocks, SlotRun(0, 20, (request + 1) << 28, 1), 1)
        slots.write_run(blocks, SlotRun(20, 11, (request + 9) << 28, 1), 2)
    assert not slots.kept_slot_by_slot
    assert not reloaded(slots).kept_slot_by_slot
    slots.write_run([0, 1], SlotRun(2, 4, 17 << 28, 1), 3)
    assert slots.kept_slot_by_slot == 2
    slots.forget_blocks([0, 1, 2])
    assert not slots.kept_slot_by_slot


@pytest.mark.parametrize(("block_size", "num_blocks"), [(0, 0), (16, 0), (4, 64)])
def test_an_empty_slot_map_comes_back(block_size, num_blocks):
    """Engines that tell no blocks have none of any size."""
    slots = reloaded(SlotMap(block_size, num_blocks))
    assert (slots.block_size, slots.num_blocks) == (block_size, num_blocks)
    assert not slots.chunks().size


async def test_a_sweep_that_finds_no_room_tries_again():
    store = MemoryStore()
    core = Core(store, ServerConfig(store="memory"))
    await core.start()
    for record in records(0):
        await core.journal.append(record)
    for key in [trace.key for trace in core.state.traces.oldest_first()]:
        core.state.traces.remove(key)
    core.journal.state.writers.clear()
    garbage = set(core.state.frames)
    assert garbage
    compact, store.compact = store.compact, Mock(side_effect=Overloaded("full"))
    with pytest.raises(Overloaded):
        await core.sweep()
    assert set(core.state.frames) == garbage, "still stored: their space must come back one day"
    store.compact = compact
    await core.sweep()
    assert not core.state.frames


async def test_what_expired_is_told_trace_by_trace_though_no_record_is_applied():
    """Told together at the next record, tens of thousands would hold the event loop."""
    core = Core(MemoryStore(), ServerConfig(store="memory"))
    await core.start()
    for record in records(0):
        await core.journal.append(record)
    changes, state = core.journal.changes, core.state
    keys = [trace.key for trace in state.traces.oldest_first()]
    assert len(keys) > 3
    waits = [asyncio.ensure_future(changes.wait(key, 3600)) for key in keys]
    other = asyncio.ensure_future(changes.wait(("run", "another"), 3600))
    await asyncio.sleep(0)
    async with core.journal.still():
        for number, _ in enumerate(core.retention._expiring(_EVER), 1):
            await asyncio.sleep(0)
            assert not state.touched
            assert sum(wait.done() for wait in waits) == number
    assert all(wait.done() for wait in waits)
    assert not other.done()
    other.cancel()


async def test_chunks_are_looked_at_again_after_a_change_alone(monkeypatch):
    core = Core(MemoryStore(), ServerConfig(store="memory", default_ttl_seconds=1 << 31))
    await core.start()
    for record in records(0):
        await core.journal.append(record)
    state, marks, looked = core.state, core.state.marks, []
    monkeypatch.setattr(state, "marks", lambda: looked.append(state.number) or marks())
    pins = core.reader.frames._pins

    async def looks() -> bool:
        looked.clear()
        for _ in range(3):
            await core.sweep()
        return bool(looked)

    await looks()
    assert not await looks()
    key, trace = next(iter(state.traces.traces.items()))
    state.touch(trace, core.journal.clock.now())
    assert await looks()
    pins[1] += 1
    assert await looks()
    del pins[1]
    assert await looks(), "a read has ended"
    assert not await looks()
    state.forget(key, Fate("deleted"))
    assert await looks()
    state.writers.popitem()
    assert await looks()
    await core.journal.append(records(0)[0])
    assert await looks()
    assert not await looks()
    await core.stop()


async def test_records_wait_while_the_journal_is_still():
    core = Core(MemoryStore(), ServerConfig(store="memory"))
    await core.start()
    some = records(0)
    half = len(some) // 2
    for record in some[:half]:
        await core.journal.append(record)
    before = list(core.state.dump())
    async with core.journal.still():
        results = [core.journal.append(record) for record in some[half:]]
        for _ in range(50):
            await asyncio.sleep(0)
        assert not any(result.done() for result in results)
        assert core.state.number == half
        assert list(core.state.dump()) == before
    await asyncio.gather(*results)
    assert core.state.number == len(some)


@pytest.mark.parametrize("seed", range(6))
async def test_snapshots_hold_one_moment_whatever_arrives_meanwhile(seed, monkeypatch):
    """Records arrive, large ones in parts, between any two slices of sweeps; then a restart."""
    monkeypatch.setattr(slices, "SLICE_SECONDS", -1.0)
    monkeypatch.setattr(state_module, "_PACKED", 1)
    monkeypatch.setattr(retention, "_SNAPSHOT_RECORDS", 1)
    store = MemoryStore()
    core = Core(store, ServerConfig(store="memory", default_ttl_seconds=_EVER))
    await core.start()
    rng = random.Random(seed)
    # Without leases that end: sweeps delete such traces without a record.
    some = [record for record in records(seed) if not decode_record(record).HasField("renew")]
    results = []
    begun, snapshot_of = asyncio.Event(), core.journal.snapshot

    def noted() -> Generator[None, None, Any]:
        begun.set()
        return (yield from snapshot_of())

    monkeypatch.setattr(core.journal, "snapshot", noted)

    async def arrive() -> None:
        for number, record in enumerate(some):
            if number == len(some) // 2:
                await begun.wait()  # the rest arrives between the slices of a snapshot
            payload = b"rows" if decode_record(record).HasField("chunk") else b""
            results.append(asyncio.get_running_loop().create_future())
            core.journal.submit(
                record, lambda _, error, to=results[-1]: to.set_result(error), payload
            )
            for _ in range(rng.choice((0, 1, 5, 200))):
                await asyncio.sleep(0)

    arriving = asyncio.ensure_future(arrive())
    moments = set()
    while not arriving.done():
        await core.sweep()
        if snapshot := store.load_snapshot():
            moments.add(snapshot[0])
            again = State(_EVER)
            again.load(snapshot[1])
            expected = State(_EVER)
            for number, record in enumerate(some[: again.number], 1):
                apply_record(expected, number, record)
            # The same but for the chunks that were dropped.
            kept = {*again.frames}
            for number in {*expected.frames} - kept:
                expected.release(number)
            assert list(again.dump()) == list(expected.dump())
    await core.journal.settled()
    assert not any(result.result() for result in results)
    assert moments


@pytest.mark.parametrize("seed", range(12))
async def test_nothing_that_is_pointed_into_goes_while_a_sweep_is_between_its_slices(
    seed, monkeypatch
):
    """Records are applied, and readers come and go, between any two traces that are looked at."""
    monkeypatch.setattr(slices, "SLICE_SECONDS", -1.0)
    store = MemoryStore()
    core = Core(store, ServerConfig(store="memory", default_ttl_seconds=10**6))
    await core.start()
    state, rng = core.state, random.Random(seed)
    reads: list[tuple[ExitStack, set[int]]] = []

    def check() -> None:
        needed = pointed_into(state).union(*(chunks for _, chunks in reads))
        assert needed <= set(state.frames)
        assert needed <= set(store.numbers())

    def read() -> None:
        """Some trace's rows are on their way from now on; the trace may be forgotten meanwhile."""
        trace = rng.choice([*state.traces.oldest_first()])
        refs = [span.ref for s in trace.sources for a in s.attempts for span in a]
        stack = ExitStack()
        stack.enter_context(
            core.reader.frames.pinned(np.array([(ref,) for ref in refs], [("ref", "i8")]))
        )
        reads.append((stack, {ref >> CHUNK_SHIFT for ref in refs}))

    def records_of_the_run() -> Iterator[None]:
        for record in records(seed):
            payload = b"rows" if decode_record(record).HasField("chunk") else b""
            core.journal.submit(record, lambda *_: None, payload)
            yield

    async def live() -> None:
        for _ in records_of_the_run():
            for _ in range(rng.choice((0, 0, 1, 5, 20))):
                await asyncio.sleep(0)
                check()
            if state.traces.traces and rng.random() < 0.3:
                read()
            if reads and rng.random() < 0.3:
                reads.pop(rng.randrange(len(reads)))[0].close()
        await core.journal.settled()

    living = asyncio.ensure_future(live())
    while not living.done():
        await core.sweep()
        await asyncio.sleep(0)
    await living
    check()
    for stack, _ in reads:
        stack.close()
    await core.sweep()
    before = len(state.frames)
    assert before < state.number / 2, "sweeps dropped something on the way"


async def test_a_callback_that_raises_keeps_nobody_waiting():
    core = Core(MemoryStore(), ServerConfig(store="memory"))
    await core.start()

    def fails(result, error):
        raise RuntimeError("a fault of the caller")

    core.journal.submit(next(iter(records(1))), fails, b"")
    await core.journal.settled()


@pytest.mark.parametrize("way", ["begin", "resume"])
def test_rows_that_a_request_takes_over_while_marks_are_made_are_marked(way):
    """A chunk that slots alone point into is taken over by a trace, and then leaves the slots."""
    state, recorder = State(100), Recorder()
    rows = np.tile(np.array([0, 1], np.uint8), (4, 2, 1))

    def apply() -> None:
        recorder.flush()
        for record in recorder.records[state.number :]:
            apply_record(state, state.number + 1, record)

    other = recorder.begin("other", block_ids=[5, 6])
    recorder.step(rows, [(other, 0, 4)])
    recorder.preempt(other, 4)
    apply()
    gone = recorder.begin("gone", block_ids=[0])
    recorder.step(rows, [(gone, 0, 4)])
    recorder.finish(gone, 5)
    apply()
    taken = state.number
    state.forget(("run", "gone"), Fate("deleted"))
    assert taken in pointed_into(state)
    marks = state.marks()
    marked = set(next(marks))
    if way == "begin":
        recorder.begin("new", block_ids=[0, 1], num_computed_tokens=4)
    else:
        recorder.resume(other, 4, block_ids=[0, 1])
    recorder.chunk.op(OpKind.RESET)
    apply()
    assert taken in pointed_into(state)
    assert taken in marked.union(*marks)


def test_what_is_indexed_goes_without_the_garbage_collector():
    """It is frozen out of its sight: a cycle would stay for good."""

    def indexed() -> int:
        kinds = ("Trace", "Source", "Join", "Request", "SpanList", "Writer", "SlotMap")
        return sum(type(thing).__name__ in kinds for thing in gc.get_objects())

    gc.collect()
    gc.disable()
    try:
        before = indexed()
        state = State(100)
        for number, record in enumerate(records(0), 1):
            apply_record(state, number, record)
        for trace in state.traces.oldest_first():
            for number in trace.join.standing:
                assert trace.join.incarnation(number).owned()
        del trace
        assert indexed() > before + 20
        for key in [trace.key for trace in state.traces.oldest_first()]:
            state.forget(key, Fate("deleted"))
        state.writers.clear()
        assert indexed() == before
    finally:
        gc.enable()


def valid_rows(count: int) -> np.ndarray:
    shape = count, len(LAYOUT.layer_ids), LAYOUT.top_k
    return np.broadcast_to(np.arange(LAYOUT.top_k, dtype=np.uint8), shape).copy()


@pytest.mark.parametrize("restart", [False, True])
def test_an_unseen_request_that_rewinds_leaves_no_row_behind(restart: bool) -> None:
    """Its trace was deleted and its trace id began again; its blocks are still its own."""
    recorder = Recorder()
    unseen = recorder.begin("unseen", trace_id="t", block_ids=[0])
    recorder.step(valid_rows(4), [(unseen, 0, 4)])
    recorder.flush()
    recorder.records.append(encode_delete(0, "run", ["t"], "deleted"))
    recorder.begin("another", trace_id="t", block_ids=[5])
    recorder.flush()
    before = len(recorder.records)
    recorder.rewind(unseen, 2)
    recorder.step(valid_rows(2), [(unseen, 2, 2)])
    recorder.flush()
    recorder.begin("hit", num_computed_tokens=4, block_ids=[0, 6])
    recorder.flush()
    state = State(1e9)
    for number, record in enumerate(recorder.records, 1):
        if restart and number == before + 1:
            pieces = list(state.dump())
            state = State(1e9)
            state.load(pieces)
        apply_record(state, number, record)
    assert sorted(trace_id for _, trace_id in state.traces.traces) == ["hit", "t"]
    (source,) = state.traces.traces["run", "hit"].sources
    held = [(s.position, s.length, refs.chunk_of(s.ref)) for s in source.attempts[0]]
    # Record 1 opens the writer; the rows are in those of the first and of the third chunk.
    assert held == [(0, 2, 2), (2, 2, before + 1)]


def test_the_oldest_of_too_many_running_requests_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever hits its blocks gets none of its rows: a later pass may have replaced some."""
    monkeypatch.setattr(apply, "MAX_LIVE", 2)
    recorder = Recorder()
    oldest = recorder.begin("oldest", trace_id="t", block_ids=[0])
    recorder.step(valid_rows(4), [(oldest, 0, 4)])
    for name in ("second", "third"):
        recorder.begin(name, block_ids=[])
    recorder.rewind(oldest, 2)
    recorder.step(valid_rows(2), [(oldest, 2, 2)])
    recorder.begin("hit", num_computed_tokens=4, block_ids=[0, 6])
    recorder.flush()
    state = State(1e9)
    for number, record in enumerate(recorder.records, 1):
        apply_record(state, number, record)
    (source,) = state.traces.traces["run", "hit"].sources
    assert list(source.attempts[0]) == []
    (first,) = state.traces.traces["run", "t"].sources
    assert (first.end, first.ended) == (0, False)
