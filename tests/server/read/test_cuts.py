"""Layers cut out of stored frames: as `slice_frame` cuts them, and nothing else is read twice."""

from __future__ import annotations

import asyncio
import random

import numpy as np
import pytest

from routetrace.codec.frame import Codec, encode_frame, slice_frame
from routetrace.common.errors import Corrupt, InvalidArgument
from routetrace.common.layout import ModelLayout
from routetrace.server.common.metrics import Metrics
from routetrace.server.index.agents import Agents
from routetrace.server.index.journal import Clock
from routetrace.server.index.state import Frames, State
from routetrace.server.index.traces import refs
from routetrace.server.rows import cuts as cuts_module
from routetrace.server.rows import frames as frames_module
from routetrace.server.rows.cuts import Cuts
from routetrace.server.rows.frames import MESSAGE_BYTES, MOST_READ
from routetrace.server.rows.reader import Reader
from routetrace.server.rows.served import SERVED
from routetrace.server.store.interface import Record
from routetrace.server.store.memory import MemoryStore

LAYERS = tuple(range(2, 26, 2))


class Watched(MemoryStore):
    """Tells which bytes were asked for, and whether they might have been waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[list[tuple[int, int]]] = []
        self.waits: list[bool] = []

    def read(self, number, ranges, *, wait=True):
        self.asked.append(list(ranges))
        self.waits.append(wait)
        return super().read(number, ranges, wait=wait)


def frames_of(rng: np.random.Generator, num_experts: int) -> list[bytes]:
    """Some whose layers stand alone, and some whose layers share groups."""
    layout = ModelLayout(LAYERS, 26, num_experts, 4)
    made = []
    for rows in rng.choice([1, 7, 40, 300], 5).tolist():
        ids = rng.random((rows, len(LAYERS), num_experts)).argsort(-1)[..., :4]
        codec = Codec(int(rng.integers(2)))
        made.append(encode_frame(ids.astype(layout.dtype), layout, codec=codec))
    return made


@pytest.mark.parametrize("num_experts", [64, 384])
@pytest.mark.parametrize("seed", range(8))
def test_frames_are_cut_as_ever_and_read_no_further_than_needed(seed: int, num_experts: int):
    rng = random.Random(seed)
    frames = frames_of(np.random.default_rng(seed), num_experts)
    store = Watched()
    store.append(Record(1, b"header", b"".join(frames))).result(10)
    ends = np.cumsum([0, *map(len, frames)]).tolist()
    where = {refs.pack(1, i, 0) >> refs.ROW_BITS: (ends[i], len(f)) for i, f in enumerate(frames)}
    cuts = Cuts(store)
    for number in range(12):
        wanted = tuple(sorted(rng.sample(LAYERS, rng.randint(1, len(LAYERS) - 1))))
        some = dict(rng.sample(list(where.items()), rng.randint(1, len(frames))))
        pieces, sizes = cuts.read(1, where if not number else some, wanted, True)
        chosen = [frames[frame & refs.MAX_FRAMES - 1] for frame in (some if number else where)]
        expected = [slice_frame(frame, wanted) for frame in chosen]
        assert b"".join(pieces) == b"".join(expected)
        assert sizes == list(map(len, expected))
        read = sum(length for _, length in store.asked[-1])
        # The first time whole frames; from then on no header, and no group that is not sent.
        assert read == sum(map(len, chosen)) if not number else read < sum(sizes)


def test_few_headers_are_remembered(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cuts_module, "MAX_HEADERS", 3)
    frames = frames_of(np.random.default_rng(0), 64)
    store = Watched()
    store.append(Record(1, b"header", b"".join(frames))).result(10)
    ends = np.cumsum([0, *map(len, frames)]).tolist()
    cuts = Cuts(store)
    for _ in range(3):
        for i, frame in enumerate(frames):
            pieces, _ = cuts.read(1, {i: (ends[i], len(frame))}, (4, 6), True)
            assert b"".join(pieces) == slice_frame(frame, (4, 6))
    assert len(cuts._headers) == 3


def test_a_header_that_is_damaged_is_not_remembered():
    frame = bytearray(frames_of(np.random.default_rng(1), 64)[0])
    frame[12] ^= 1
    store = Watched()
    store.append(Record(1, b"header", bytes(frame))).result(10)
    cuts = Cuts(store)
    for _ in range(2):
        with pytest.raises(Corrupt):
            cuts.read(1, {0: (0, len(frame))}, (4,), True)


def test_a_layer_that_a_frame_lacks_is_refused_both_times():
    frame = frames_of(np.random.default_rng(2), 64)[0]
    store = Watched()
    store.append(Record(1, b"header", frame)).result(10)
    cuts = Cuts(store)
    for _ in range(2):
        with pytest.raises(InvalidArgument):
            cuts.read(1, {0: (0, len(frame))}, (3,), True)


def reader_of(lengths: list[int], layout: ModelLayout) -> tuple[Reader, Watched, np.ndarray]:
    """A reader of one chunk with frames of these lengths, and a row of each."""
    state, store = State(1.0), Watched()
    store.append(Record(1, b"header", bytes(sum(lengths)))).result(10)
    offsets = np.cumsum([0, *lengths]).astype(np.uint32)
    state.hold(1, Frames(offsets, layout, "run"))
    reader = Reader(store, state, Agents(state, Clock(), 1.0), Clock(), Metrics())
    rows = [(i, i + 1, refs.pack(1, i, 0), 1, 0, 0, 1, ()) for i in range(len(lengths))]
    return reader, store, np.array(rows, SERVED)


@pytest.mark.parametrize("asked", [LAYERS, LAYERS[:6], LAYERS[:1]])
def test_messages_are_as_full_as_they_may_be(asked: tuple[int, ...]):
    layout = ModelLayout(LAYERS, 26, 64, 4)
    rng = random.Random(0)
    lengths = [rng.randint(20_000, 90_000) for _ in range(200)]
    reader, _, rows = reader_of(lengths, layout)
    most = MESSAGE_BYTES * min(MOST_READ, len(LAYERS) / len(asked))
    batches = list(reader.frames.batches(rows, asked))
    assert [row for batch in batches for row in batch.rows] == rows.tolist()
    for batch, after in zip(batches, [*batches[1:], None], strict=True):
        size = sum(lengths[row[0]] for row in batch.rows)
        assert size <= most
        if after is not None:
            assert size + lengths[after.rows[0][0]] > most


def test_a_message_that_is_in_memory_needs_no_thread():
    reader, store, rows = reader_of([MESSAGE_BYTES // 2] * 2, ModelLayout(LAYERS, 26, 64, 4))
    [batch] = reader.frames.batches(rows, LAYERS)
    asyncio.run(reader.frames.fetch(batch, LAYERS))
    assert store.waits == [False]


def test_what_is_large_is_not_read_in_passing(monkeypatch: pytest.MonkeyPatch):
    layout = ModelLayout(LAYERS, 26, 64, 4)
    monkeypatch.setattr(frames_module, "AT_ONCE_BYTES", 1000)
    for lengths, waits in (([400, 600], [False]), ([400, 601], [True])):
        reader, store, rows = reader_of(lengths, layout)
        [batch] = reader.frames.batches(rows, LAYERS)
        fetched = asyncio.run(reader.frames.fetch(batch, LAYERS))
        assert fetched.frame_lengths == lengths
        assert store.waits == waits
