"""The derived state: replaying records, with snapshots at any point, always leads to the same."""

from __future__ import annotations

import random
from itertools import chain
from unittest.mock import Mock

import numpy as np
import pytest
from feeder import ChunkMaker, Feeder
from hypothesis import given
from hypothesis import strategies as st
from sim_engine import SimEngine

from routetrace.server.apply import apply_record
from routetrace.server.config import ServerConfig
from routetrace.server.core import Core
from routetrace.server.record import Sums, encode_chunk, encode_control, layout_to_hex
from routetrace.server.slot_map import SlotMap, SlotRun
from routetrace.server.spans import Span, SpanList, merge, subtract
from routetrace.server.state import State
from routetrace.server.store import MemoryStore
from routetrace.v1.errors import Overloaded
from routetrace.v1.layout import RoutingLayout

LAYOUT = RoutingLayout((0, 2), 3, 16, 2)
WRITER = ("run", "engine", "")


class Recorder(Feeder):
    """A feeder that writes records in place of sending chunks."""

    def __init__(self) -> None:
        self.layout = LAYOUT
        self.names: list[str] = []
        self.version = 0
        self.step_number = 0
        self.sequence = 1
        self.chunk = ChunkMaker(LAYOUT)
        opened = encode_control(
            "open",
            0,
            writer=WRITER,
            epoch=1,
            boot_id="boot",
            layout=layout_to_hex(LAYOUT),
            block_size=4,
            num_blocks=14,
        )
        self.records = [opened]

    def flush(self) -> None:
        if self.chunk.ops:
            chunk = self.chunk.make(self.sequence)
            sums = Sums(chunk.header_crc32, chunk.payload_crc32)
            self.records.append(
                encode_chunk(WRITER, 1, self.sequence, sums, len(self.records), chunk.header)
            )
            self.sequence += 1
            self.chunk = ChunkMaker(LAYOUT)


def records(seed: int) -> list[bytes]:
    recorder = Recorder()
    sim = SimEngine(recorder, LAYOUT, seed, num_blocks=14)
    for i in range(15):
        prompt = [sim.rng.randrange(4) for _ in range(sim.rng.randint(1, 9))]
        sim.submit(f"r{i}", prompt, 8)
    while sim.step():
        if sim.rng.random() < 0.3:
            recorder.flush()
        if sim.rng.random() < 0.1:
            victim = f"r{sim.rng.randrange(15)}"
            kind = sim.rng.choice(["delete", "renew"])
            recorder.records.append(
                encode_control(kind, 0, run="run", trace_ids=[victim, "none"], ttl=5)
            )
    recorder.flush()
    return recorder.records


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
            assert cut.traces.run_counts == whole.traces.run_counts
    assert list(cut.dump()) == list(whole.dump())
    assert set(chain.from_iterable(cut.marks())) == set(chain.from_iterable(whole.marks()))
    assert whole.traces.traces


def test_a_record_out_of_sequence_counts_for_nothing():
    state = State(100)
    some = records(0)
    chunks = [i for i, r in enumerate(some) if b'"kind":"chunk"' in r[:40]]
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


writes = st.lists(
    st.tuples(
        st.lists(st.integers(0, 31), min_size=1, max_size=9),
        st.integers(0, 2),
        st.sampled_from(["write", "write run", "forget run", "blocks", "all"]),
    ),
    max_size=12,
)


@given(writes, st.lists(st.integers(0, 7), min_size=1, max_size=5), st.integers(0, 12))
def test_the_slot_map_equals_a_dict_of_slots(steps, block_ids, last_step):
    slots, naive = SlotMap(4, 8), {}
    for step, (some, version, kind) in enumerate(steps, 1):
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
                naive = {s: e for s, e in naive.items() if s not in held.values()}
        elif kind == "blocks":
            blocks = {s // 4 for s in some}
            slots.forget_blocks(sorted(blocks))
            naive = {s: e for s, e in naive.items() if s // 4 not in blocks}
        elif len(some) > 8:
            slots.forget_all()
            naive = {}
    slots = SlotMap.load(slots.dump())
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


async def test_a_sweep_that_finds_no_room_tries_again():
    store = MemoryStore()
    core = Core(store, ServerConfig(store="memory"))
    await core.start()
    for record in records(0):
        await core.journal.append(record, b"")
    core.journal.state.traces.traces.clear()
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
