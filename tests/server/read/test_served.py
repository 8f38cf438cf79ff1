"""Cached sources of reads: equal to a fresh look-up, and never older than their trace."""

from __future__ import annotations

import asyncio
import errno
import os
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from routetrace.codec.records import SPAN, U32
from routetrace.common.errors import Corrupt
from routetrace.common.layout import ModelLayout
from routetrace.server.common.metrics import Metrics
from routetrace.server.core import Core
from routetrace.server.index.agents import Agents
from routetrace.server.index.journal import Clock
from routetrace.server.index.state import Frames, State
from routetrace.server.index.traces import refs
from routetrace.server.index.traces.sources import Source, WriterKey
from routetrace.server.index.traces.spans import Span, merge
from routetrace.server.index.traces.trace import Trace
from routetrace.server.rows import answers, served
from routetrace.server.rows.frames import Fetched
from routetrace.server.rows.reader import Reader
from routetrace.server.rows.sending import Answer, Piece
from routetrace.server.rows.served import SERVED, Known, Memory, cut, segments_of
from routetrace.server.rows.view import Segment, Selection, view
from routetrace.server.settings.config import ServerConfig
from routetrace.server.store.disk.store import DiskStore
from routetrace.server.store.interface import Record
from routetrace.server.store.memory import MemoryStore
from routetrace.v1 import routetrace_pb2 as pb

NUM_TOKENS = 41
#: What each shard holds: two of them a layer more than its stage.
SHARDS = ((0, 1, 2), (2, 3), (4, 5))
LAYERS = (0, 1, 2, 3, 4, 5)

spans = st.lists(
    st.tuples(st.integers(0, 45), st.integers(1, 20), st.integers(1, 3), st.integers(0, 2)),
    max_size=6,
)
ranges = st.lists(st.tuples(st.integers(0, 50), st.integers(1, 9)), max_size=4).map(
    lambda found: tuple(merge((a, a + n) for a, n in found))
)


def trace_of(
    shards: list[list[tuple[int, int, int, int]]], held: tuple[tuple[int, ...], ...] = SHARDS
) -> Trace:
    """A request of several shards and attempts."""
    trace = Trace(("run", "t"), 1, 1.0, 0.0, 0.0, 0.0)
    for number, (layers, found) in enumerate(zip(held, shards, strict=True)):
        source = Source(
            WriterKey("run", "engine", f"pp{number}"),
            1,
            "r",
            "boot/0",
            ModelLayout(layers, 6, 8, 2, LAYERS),
        )
        for i, (position, length, version, attempt) in enumerate(found):
            while len(source.attempts) <= attempt:
                source.attempts.append(type(source.attempts[0])())
            ref = refs.pack(1 + number, i, 0)
            source.attempts[attempt].append(Span(position, length, ref, version, 1))
        source.ended, source.num_tokens = True, NUM_TOKENS
        trace.sources.append(source)
    return trace


def cells(trace: Trace, segments: list[Segment], layers: tuple[int, ...]):
    """Return the source of each cell; a cell that occurs twice is an error."""
    found: dict[tuple[int, int], tuple[int, int, int, int]] = {}
    for source, attempt, span, chosen in segments:
        held = set(chosen or trace.sources[source].layout.layer_ids)
        for layer in set(layers) & held:
            for i in range(span.length):
                cell = span.position + i, layer
                assert cell not in found
                found[cell] = (source, attempt, span.ref + i, span.weight_version)
    return found


@given(
    st.tuples(spans, spans, spans),
    ranges,
    st.sets(st.sampled_from(LAYERS), min_size=1).map(lambda layers: tuple(sorted(layers))),
    st.sampled_from([pb.READ_POLICY_AS_SAMPLED, pb.READ_POLICY_LATEST]),
    st.sampled_from([None, 1, 2]),
)
def test_what_is_cut_is_what_a_look_up_gives(shards, ranges, layers, policy, version):
    trace = trace_of(list(shards))
    incarnation = trace.join.incarnation(1)
    start, stop = (ranges[0][0], ranges[-1][1]) if ranges else (0, NUM_TOKENS - 1)
    selection = Selection(start, stop, layers, policy, version, ranges)
    memory = Memory(State(1.0))
    for _ in range(2):  # the second time from memory
        rows = memory.served(memory.known(trace, incarnation), selection)
        assert (np.diff(rows["position"]) >= 0).all()
        segments = segments_of(rows)
        whole = view(incarnation, selection)
        expected = [s for s in whole if version in (None, s.span.weight_version)]
        assert cells(trace, segments, layers) == cells(trace, expected, layers)


stages = st.lists(
    st.sets(st.sampled_from(LAYERS), min_size=1).map(lambda layers: tuple(sorted(layers))),
    min_size=3,
    max_size=3,
)


@given(
    st.tuples(spans, spans, spans),
    stages,
    st.sampled_from([pb.READ_POLICY_AS_SAMPLED, pb.READ_POLICY_LATEST]),
    st.sampled_from([None, 1, 2]),
)
def test_each_cell_is_of_the_first_pass_that_has_it(shards, held, policy, version):
    """Sources divide the layers in any way; each layer read alone gives the same.

    A weight version chooses among these rows: it never brings up those of another attempt.
    """
    trace = trace_of(list(shards), held)
    memory, known = Memory(State(1.0)), Known(trace, trace.join.incarnation(1))
    rounds = range(max(len(source.attempts) for source in trace.sources))
    if policy == pb.READ_POLICY_LATEST:
        rounds = reversed(rounds)
    first: dict[tuple[int, int], tuple[int, int, int, int]] = {}
    for attempt in rounds:
        for number, source in enumerate(trace.sources):
            for span in source.attempts[attempt] if attempt < len(source.attempts) else ():
                for i in range(span.length):
                    if span.position + i < NUM_TOKENS - 1:
                        for layer in source.layout.layer_ids:
                            row = number, attempt, span.ref + i, span.weight_version
                            first.setdefault((span.position + i, layer), row)
    whole = Selection(0, NUM_TOKENS - 1, LAYERS, policy, version)
    first = {cell: row for cell, row in first.items() if version in (None, row[3])}
    assert cells(trace, segments_of(memory.served(known, whole)), LAYERS) == first
    for layer in LAYERS:
        alone = replace(whole, layers=(layer,))
        expected = {cell: row for cell, row in first.items() if cell[1] == layer}
        assert cells(trace, segments_of(memory.served(known, alone)), (layer,)) == expected


def test_what_is_remembered_is_never_older_than_its_trace():
    stages = ((0, 1), (2, 3), (4, 5))
    trace = trace_of([[(0, 20, 1, 0)], [(0, 20, 1, 0)], [(0, 20, 1, 0)]], stages)
    incarnation = trace.join.incarnation(1)
    memory = Memory(State(1.0))
    asked = [
        Selection(0, 40, LAYERS),
        Selection(0, 40, (4, 5)),
        Selection(0, 40, LAYERS, weight_version=1),
    ]
    before = [memory.served(memory.known(trace, incarnation), selection) for selection in asked]
    again = [memory.served(memory.known(trace, incarnation), selection) for selection in asked]
    assert all(one is two for one, two in zip(before, again, strict=True))
    assert not memory.known(trace, incarnation).complete
    for source in trace.sources:
        source.remove(10)  # the engine took rows back
        source.attempts[-1].append(Span(10, 30, refs.pack(9, 0, 0), 1, 1))
    trace.changes += 1
    for selection in asked:
        segments = segments_of(memory.served(memory.known(trace, incarnation), selection))
        expected = segments_of(Memory(State(1.0)).served(Known(trace, incarnation), selection))
        assert cells(trace, segments, LAYERS) == cells(trace, expected, LAYERS)
    assert memory.known(trace, incarnation).complete


def test_no_more_is_remembered_than_a_bound(monkeypatch):
    monkeypatch.setattr(served, "MAX_REMEMBERED", 1000)
    memory = Memory(State(1.0))
    traces = [trace_of([[(0, 20, 1, 0)], [], []]) for _ in range(100)]
    for trace in traces:
        memory.served(memory.known(trace, trace.join.incarnation(1)), Selection(0, 40, (0, 1)))
    assert 0 < len(memory._found) < 20
    oldest, newest = traces[0].join.incarnation(1), traces[-1].join.incarnation(1)
    assert oldest not in memory._found
    assert newest in memory._found


def test_cutting_keeps_the_row_of_each_position():
    rows = np.array([(0, 10, 100, 1, 0, 0, 1, ()), (10, 20, 500, 1, 0, 0, 1, ())], SERVED)
    parts = cut(rows, [(3, 5), (8, 12), (19, 30)])
    assert parts[["position", "stop", "ref"]].tolist() == [
        (3, 5, 103),
        (8, 10, 108),
        (10, 12, 500),
        (19, 20, 509),
    ]
    assert rows["position"].tolist() == [0, 10], "what is remembered stays as it was"


@pytest.mark.parametrize("size", [0, 1, 127, 128, 16_383, 16_384, 2_097_151, 2_097_152])
def test_messages_are_what_protobuf_would_make_of_them(size):
    payload = bytes(size)
    rows = np.array([(5, 9, refs.pack(3, 2, 7), 4, 0, 1, 2, ())], SERVED)
    pieces = [payload[: size // 2], memoryview(payload)[size // 2 :]]
    fetched = Fetched(rows.tolist(), [0], [size], pieces, [])
    info, end = pb.TraceInfo(trace_id="t"), pb.ReadEnd(num_spans=1)
    message = pb.GetTraceResponse.FromString(answers.message(Piece(info, fetched, 6, end)))
    assert (message.info, message.end, message.payload) == (info, end, payload)
    assert np.frombuffer(message.frame_lengths, U32).tolist() == [size]
    assert np.frombuffer(message.spans, SPAN).tolist() == [(5, 4, 6, 7, 1, 2, 0, 4)]
    alone = pb.GetTraceResponse.FromString(answers.message(Piece(end=end)))
    assert alone == pb.GetTraceResponse(end=end, crc32=alone.crc32)


def test_a_read_that_would_wait_for_the_disk_says_so(tmp_path, monkeypatch):
    payload = os.urandom(100_000)
    store = DiskStore(tmp_path, capacity_bytes=1 << 24)
    try:
        store.append(Record(1, b"header", payload)).result(10)
        assert store.read(1, [(10, 50_000)], wait=False) == [payload[10:50_010]]
        preadv = os.preadv

        def cold(file, buffers, offset, flags=0):
            if flags & os.RWF_NOWAIT:
                raise BlockingIOError(errno.EAGAIN, "it is not in memory")
            return preadv(file, buffers, offset, flags)

        monkeypatch.setattr(os, "preadv", cold)
        with pytest.raises(BlockingIOError):
            store.read(1, [(10, 50_000)], wait=False)
        monkeypatch.setattr(
            os, "preadv", lambda *args: preadv(*args) - 1 if args[3] else preadv(*args)
        )
        with pytest.raises(BlockingIOError):  # only a part is in memory
            store.read(1, [(10, 50_000)], wait=False)
        assert store.read(1, [(10, 50_000)]) == [payload[10:50_010]]
        assert not store.stats().damaged_records
    finally:
        store.close()


class SlowStore:
    """Chunks of two frames; has to be waited for, and one of them is damaged."""

    def read(self, number, ranges, *, wait=True):
        if not wait:
            raise BlockingIOError
        if number == 2:
            raise Corrupt("damaged")
        return [bytes([number]) * length for _, length in ranges]


def test_what_can_not_be_read_is_told_apart_from_what_comes_later():
    layout = ModelLayout((0, 1), 2, 8, 2)
    state = State(1.0)
    for number in (1, 2, 3):
        state.hold(number, Frames(np.array([0, 10, 30], np.uint32), layout, "run"))
    reader = Reader(SlowStore(), state, Agents(state, Clock(), 1.0), Clock(), Metrics())
    where = [(1, 1), (2, 0), (3, 0), (1, 0), (4, 0), (3, 2)]  # no chunk 4, no frame 2
    rows = np.array(
        [(i, i + 1, refs.pack(*frame, 5), 1, 0, 0, 1, ()) for i, frame in enumerate(where)], SERVED
    )
    [batch] = reader.frames.batches(rows, (0, 1))
    fetched = asyncio.run(reader.frames.fetch(batch, (0, 1)))
    assert [row[0] for row in fetched.unread] == [1, 2, 4, 5]
    assert [row[0] for row in fetched.rows] == [0, 3]
    assert fetched.frames == [0, 1]
    assert fetched.frame_lengths == [20, 10]
    assert b"".join(fetched.payload) == bytes([1]) * 30


async def test_what_comes_while_rows_are_sent_is_missing_from_them(monkeypatch):
    core = Core(MemoryStore(), ServerConfig(store="memory"))
    trace = trace_of([[(0, 10, 1, 0)]], held=(LAYERS,))
    incarnation = trace.join.incarnation(1)
    known = core.reader.known(trace, incarnation)
    selection = core.reader.select(known, 0, 0, ())
    fetch = core.reader.frames.fetch

    async def meanwhile(rows, layers):
        trace.sources[0].attempts[0].append(Span(10, NUM_TOKENS - 11, refs.pack(9, 0, 0), 1, 1))
        trace.changes += 1
        assert core.reader.known(trace, incarnation).complete
        return await fetch(rows, layers)

    monkeypatch.setattr(core.reader.frames, "fetch", meanwhile)
    info = core.reader.describe(known)
    steps = []
    step = core.admission.pace.step

    async def noted(owner):
        steps.append(owner)
        await step(owner)

    monkeypatch.setattr(core.admission.pace, "step", noted)
    messages = core._traces._send(Answer(core.reader, info, known, selection), "run r")
    [message] = [pb.GetTraceResponse.FromString(m) async for m in messages]
    assert steps == ["run r"]
    # Nothing could be read of the first ten: there is no chunk behind them.
    gaps = {(m.start, m.stop): m.reason for m in message.end.missing}
    assert gaps[0, 10] == pb.MISSING_REASON_CORRUPT
    assert (10, NUM_TOKENS - 1) in gaps
