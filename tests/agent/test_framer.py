"""The framer against events applied one by one: the same rows, however long they lingered."""

from __future__ import annotations

import random
import zlib
from collections import Counter
from contextlib import contextmanager
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routetrace.capture_agent.agent import _cut
from routetrace.capture_agent.counters import Word
from routetrace.capture_agent.pipeline.chunks import Chunk, ChunkBuilder
from routetrace.capture_agent.pipeline.intake import Intake
from routetrace.capture_agent.pipeline.linger import LANE_BITS, Linger
from routetrace.capture_agent.pipeline.pressure import Pressure
from routetrace.capture_agent.pipeline.trace_ends import TraceEnds
from routetrace.codec.frame import invalid_rows
from routetrace.codec.records import OP, PACKED_OP, U32, FinishReason, OpKind, TokenDigest, unpack
from routetrace.common.layout import ModelLayout
from routetrace.simulation.small_engine import SmallEngine
from routetrace.v1 import routetrace_pb2 as pb
from support.servers.ingest_server import NO_DRAFTS, Model, read_chunk

LAYOUT = ModelLayout((1, 2), 4, 300, 2)
BLOCK = 4
#: Blocks of the host tier.
HOST = 8
#: Hypothesis' own generators can shrink, but are ten times slower.
SEEDS = st.integers(0, 1 << 32).map(random.Random)
PRESSURES = tuple(Pressure)
INVALID, FULL = pb.MISSING_REASON_INVALID_IDS, pb.MISSING_REASON_QUEUE_FULL


class Framed:
    """A framer, and the model of what it sends; its methods are those of CaptureAgent."""

    def __init__(
        self, *, num_blocks: int = 16, frame_rows: int = 8, linger: float = 5, layout=LAYOUT
    ) -> None:
        self.num_blocks = num_blocks
        self.layout = layout
        self.block_size = BLOCK if num_blocks else 0
        self.builder = ChunkBuilder(layout)
        self.dropped: Counter[Word] = Counter()
        self.intake = Intake(
            layout, self.block_size, num_blocks + HOST, frame_rows, self.builder, self._drop
        )
        self.model = Model(self.block_size)
        self.naive = Model(self.block_size)
        self.frame_rows: list[int] = []  # rows of each frame sent
        self.chunk_bytes: list[int] = []
        self.now = 0.0
        self.linger = linger
        self.version = 0
        self.number = 0
        self.offered = 0
        self.names: dict[int, str] = {}
        self.last_step: dict[int, int] = {}
        self.first_draft: dict[int, int] = {}  # in that step
        self.preempted: set[int] = set()
        self.starting: dict[int, None] = {}  # are yet to inherit, in order
        self.gone: dict[int, dict[int, int | None]] = {}  # the blocks that requests held last
        self.held: dict[int, dict[int, int]] = {}  # the same, whoever got them since
        self.copied: dict[int, set[int]] = {}  # those of them that were copied since
        self.free = list(range(32))
        self.going_on: list = []  # the last step, and the spans of one that goes on from it
        self.again = 0  # steps that were told so
        self.unseen: set[int] = set()  # began before the framer died

    def tick(self) -> None:
        """Send rows that have lingered long enough."""
        self.intake.tick(self.now - self.linger)

    def _drop(self, word: Word, rows: int) -> None:
        self.dropped[word] += rows

    def seal(self) -> None:
        self.builder.seal()
        while self.builder.ready:
            chunk = self.builder.ready.popleft()
            header, frames = read_chunk(chunk.header, chunk.payload)
            assert chunk.rows == sum(map(len, frames))
            self.frame_rows += map(len, frames)
            self.chunk_bytes.append(chunk.nbytes)
            self.model.apply(header, frames)

    # The calls of an engine, to both.

    def begin(
        self,
        name,
        *,
        num_computed_tokens=0,
        num_external_tokens=0,
        block_ids=(),
        prompt_token_ids=None,
        **facts,
    ):
        handle = (len(self.names) + 1) << LANE_BITS | self.free.pop()
        self.names[handle] = name
        blocks = np.array(block_ids, U32).tobytes()
        proto = pb.RequestBegin(**facts)
        prompt = None if prompt_token_ids is None else np.array(prompt_token_ids, U32).tobytes()
        block_ids = list(block_ids)
        index = len(self.names) - 1
        computed = num_computed_tokens, num_external_tokens
        self.intake.event(
            "begin", handle, name, proto.SerializeToString(), index, *computed, blocks, prompt
        )
        self.naive.begin(name, proto, num_computed_tokens, block_ids, num_external_tokens, index)
        self._hand_out(handle, block_ids, num_computed_tokens - num_external_tokens)
        return handle

    def _hand_out(self, handle, block_ids, cached=0):
        """A request gets blocks; those that it has not cached are another one's no more."""
        new = block_ids[-(-cached // BLOCK) :]
        for held in self.gone.values():
            held.update({nth: None for nth, block in held.items() if block in new})
        if cached:
            self.starting[handle] = None

    def _start(self, handle):
        """Requests take the rows of their cached tokens with their first rows, or at their end."""
        if handle in self.starting:
            del self.starting[handle]
            self.naive.inherit(self.names[handle])

    def _leave(self, handle):
        if handle not in self.preempted:
            self.copied[handle] = set()
            self.gone[handle] = dict(enumerate(self.naive.live[self.names[handle]].blocks))
            self.held[handle] = dict(self.gone[handle])

    def _late(self, handle, position, count):
        """The pass has written there, unless somebody else got the block since."""
        copied = {p // BLOCK for p in range(position, position + count)} & self.copied[handle]
        if copied and handle not in self.unseen:  # of their copies nothing is known
            self.naive.reset()
        for p in range(position, position + count):
            block = self.gone[handle].get(p // BLOCK)
            if block is not None:
                self.naive.slots.pop(block * BLOCK + p % BLOCK, None)

    def add_blocks(self, handle, block_ids):
        self._hand_out(handle, block_ids)
        self.intake.add_blocks(np.full(len(block_ids), handle), np.array(block_ids, U32))
        self.naive.blocks(self.names[handle], block_ids)

    @contextmanager
    def _untouched(self, handle):
        """Calls for a request that began before the framer died change no slot of others."""
        request = self.naive.live[self.names[handle]]
        blocks = request.blocks
        if handle in self.unseen:
            request.blocks = []
        yield
        request.blocks = blocks

    def rewind(self, handle, position, step=0):
        self.intake.event("rewind", handle, position, step)
        self._start(handle)
        done = step and self.last_step.get(handle, 0) > step
        if not done:
            with self._untouched(handle):
                self.naive.rewind(self.names[handle], position)
        return not done

    def preempt(self, handle, num_tokens):
        self._start(handle)
        self._leave(handle)
        self.intake.event("preempt", handle, num_tokens)
        with self._untouched(handle):
            self.naive.preempt(self.names[handle], num_tokens)
        self.naive.live[self.names[handle]].blocks = []
        self.preempted.add(handle)

    def resume(self, handle, num_computed_tokens, *, block_ids=(), num_external_tokens=0):
        computed = num_computed_tokens, num_external_tokens
        self.intake.event("resume", handle, *computed, np.array(block_ids, U32).tobytes())
        resumed = self.names[handle], num_computed_tokens, list(block_ids), num_external_tokens
        self.naive.resume(*resumed)
        self._hand_out(handle, block_ids, num_computed_tokens - num_external_tokens)
        self.preempted.discard(handle)

    def finish(self, handle, num_tokens, reason="stop", token_ids=None):
        why = int(FinishReason[reason.upper()])
        tokens = None if token_ids is None else np.array(token_ids, U32).tobytes()
        self._start(handle)
        self._leave(handle)
        self.intake.event("finish", handle, num_tokens, why, tokens, 1_790_000_000_123)
        self.going_on = []
        name = self.names[handle]
        with self._untouched(handle):
            self.naive.finish(name, num_tokens, why)
        self.naive.request(name).blocks = []
        self.free.append(handle & (1 << LANE_BITS) - 1)

    def external(self, block_ids):
        self.intake.event("external", np.array(block_ids, U32).tobytes())
        self.naive.external(block_ids)

    def copy(self, sources, targets):
        for handle, held in self.gone.items():
            blocks = self.held[handle]
            self.copied[handle] |= {nth for nth, block in blocks.items() if block in sources}
            held.update({nth: None for nth, block in held.items() if block in targets})
        ids = [np.array(blocks, U32).tobytes() for blocks in (sources, targets)]
        self.intake.event("copy", *ids)
        self.naive.copy(sources, targets)

    def reset_prefix_cache(self):
        self.intake.event("reset", self.num_blocks)
        self.naive.reset(self.num_blocks)

    def set_weight_version(self, version):
        self.version = version

    def step(self, rows, spans, cuts=(), lost=()):
        """`cuts` are rows at which the ring has it in parts; those of `lost` found no room."""
        spans = np.asarray(spans, np.int64).T
        self.number += 1
        ended = np.array([self.names[h] not in self.naive.live for h in spans[0].tolist()], bool)
        if ended.any():  # as the agent does
            self.intake.event("late", spans[:, ended].tobytes())
            for span in spans[:, ended].T.tolist():
                self._late(*span)
            kept = np.repeat(~ended, spans[2])
            cuts = [int(kept[:cut].sum()) for cut in cuts]
            spans, rows = spans[:, ~ended], rows[kept]
        self.offered += len(rows)
        edges = sorted({0, *cuts, len(rows)})
        for i, (start, stop) in enumerate(pairwise(edges)):
            self._part(rows[start:stop], _cut(spans, start, stop), i in lost)
        return self.number

    def _part(self, rows, spans, is_lost):
        if is_lost:
            self.dropped[Word.REFUSED] += len(rows)
            gone = [(handle, p, p + n, FULL, self.number) for handle, p, n in spans.T.tolist()]
            self.intake.event("lost", gone, b"")
            self.going_on = []
        else:
            data = rows.copy().reshape(len(rows), -1).view(np.uint8)
            facts = self.now, self.number, self.version
            if [self.number - 1, *spans.tolist()] == self.going_on:
                self.intake.again(*facts, data)
                self.again += 1
            else:
                self.intake.step(*facts, spans.copy(), data)
            after = np.array([spans[0], spans[1] + spans[2], spans[2]])
            self.going_on = [self.number, *after.tolist()]
            data[:] = 0xAA  # the ring is used again
        bad = invalid_rows(rows, self.layout.num_experts)
        turns = {h: i for i, h in enumerate(self.starting, 1)}
        starts = np.cumsum(spans[2]) - spans[2]
        in_turn = [(*span, at) for span, at in zip(spans.T.tolist(), starts.tolist(), strict=True)]
        for handle, position, count, at in sorted(in_turn, key=lambda span: turns.get(span[0], 0)):
            name = self.names[handle]
            if handle in self.preempted:
                self._late(handle, position, count)
                continue
            self._start(handle)
            first = position + 1
            if self.last_step.get(handle) == self.number:
                first = min(position, self.first_draft[handle])
            self.last_step[handle], self.first_draft[handle] = self.number, first
            if position < max(self.naive_end(name), 0):
                self.naive.rewind(name, position)
            request = self.naive.live[name]
            sure = max(first, request.facts.prompt_len)
            for p, row, is_bad in zip(
                range(position, position + count), rows[at:], bad[at:], strict=False
            ):
                # A pass confirms what it follows, whatever became of its own rows.
                drafts = max(0, p + 1 - sure)
                if is_lost or is_bad:
                    self.naive.lost(name, p, 1, FULL if is_lost else INVALID, drafts)
                else:
                    self.naive.rows(name, p, [(row.tobytes(), self.version)], drafts)
            request.drafts = sure

    def naive_end(self, name: str) -> int:
        request = self.naive.live[name]
        known = [*request.attempts[-1].rows, *request.attempts[-1].cached]
        known += [start + n - 1 for start, n, _ in request.attempts[-1].lost]
        return max(known, default=-1) + 1

    def step_slots(self, rows, slots):
        self.number += 1
        self.offered += len(rows)
        data = rows.copy().reshape(len(rows), -1).view(np.uint8)
        column = np.array(slots, np.uint64)
        self.intake.step_slots(self.now, self.number, self.version, column, data)
        data[:], column[:] = 0xAA, 0
        for slot, row, bad in zip(slots, rows, invalid_rows(rows, 300), strict=True):
            self.naive.slots.pop(slot, None)
            if not bad:
                self.naive.slots[slot] = (row.tobytes(), self.version)

    def die(self) -> None:
        """The framer is gone with all that it holds; another one goes on, in a new epoch."""
        self.unseen.update(self.names)
        self.dropped.clear()
        self.frame_rows, self.offered = [], 0
        self.builder = ChunkBuilder(self.layout)
        self.intake = Intake(
            self.layout,
            self.block_size,
            self.num_blocks + HOST,
            self.intake._frame_rows,
            self.builder,
            self._drop,
            follows=True,
        )
        self.model = Model(self.block_size)

    def end(self) -> None:
        self.intake.flush()
        self.seal()
        assert self.intake.nbytes == 0
        dropped = sum(self.dropped.values()) - self.dropped[Word.UNREPORTED]  # which are requests
        assert self.offered == sum(self.frame_rows) + dropped

    def compare(self, *, verifies: bool = True, confirmed: bool = True) -> None:
        """Whether lingering made no difference, with `confirmed` also to which rows are drafts.

        Where an engine rejects tokens that it sampled, rows that confirmed a draft may leave with
        its rejection, unsent. Rows that were not sent confirm nothing: without `verifies`, slots
        of drafts, and what later requests inherit of them, may be unknown, and never another row.
        """
        assert [r.request_id for r in self.model.requests] == [
            r.request_id for r in self.naive.requests
        ]
        for ours, truth in zip(self.model.requests, self.naive.requests, strict=True):
            assert len(ours.attempts) == len(truth.attempts), ours.request_id
            for attempt, true in zip(ours.attempts, truth.attempts, strict=True):
                assert attempt.rows == true.rows, ours.request_id
                assert attempt.cached.keys() == true.cached.keys(), ours.request_id
                known = {p: row for p, row in attempt.cached.items() if row is not None}
                assert known.items() <= true.cached.items(), ours.request_id
                assert attempt.cached == true.cached or not verifies, ours.request_id
            for reason in (INVALID, FULL):
                assert ours.lost_positions(reason) == truth.lost_positions(reason)
            for name in ("num_tokens", "reason", "blocks", "facts", "index"):
                assert getattr(ours, name) == getattr(truth, name)
            assert ours.served() <= truth.served(), ours.request_id
            exact = verifies and confirmed
            assert ours.served() == truth.served() or not exact, ours.request_id
        assert self.model.slots.items() <= self.naive.slots.items()
        assert self.model.slots == self.naive.slots or not verifies

    def compare_lossy(self) -> None:
        """Whether all that was sent is right, even if much was not sent."""
        truths = {r.request_id: r for r in self.naive.requests}
        for ours in self.model.requests:
            truth = truths[ours.request_id]
            for attempt in ours.attempts:
                rows = {**attempt.cached, **attempt.rows}
                known = {p: row for p, row in rows.items() if row is not None}
                assert any(
                    known.items() <= {**a.cached, **a.rows}.items() for a in truth.attempts
                ), (ours, truth)
        assert self.model.slots.items() <= self.naive.slots.items()


@settings(max_examples=25)
@given(
    st.integers(0, 1 << 32),
    st.integers(1, 12),
    st.sampled_from([0, 3, 1e9]),
    st.sampled_from([0.0, 0.1, 0.5]),
)
def test_a_bad_engine(seed, frame_rows, linger, sealing):
    """Preemption, rejected drafts, prefix caching, weight updates, chunked prefill."""
    framed = Framed(frame_rows=frame_rows, linger=linger)
    sim = SmallEngine(framed, LAYOUT, seed, num_blocks=16, block_size=BLOCK)
    for i in range(12):
        prompt = [sim.rng.randrange(2) for _ in range(sim.rng.randint(1, 14))]
        sim.submit(f"r{i}", prompt, sim.rng.randint(1, 10))
    while sim.step():
        framed.now += sim.rng.choice([0, 1, 2])
        if sim.rng.random() < sealing:
            framed.tick()
            framed.seal()
    framed.end()
    framed.compare()


@settings(max_examples=12)
@given(SEEDS, st.sampled_from([1, 3, 40]))
def test_steps_that_go_on_are_as_any_others(rng, frame_rows):
    """Whatever is told in between: blocks that change hands, ends, drafts, weights, time."""
    framed = Framed(num_blocks=64, frame_rows=frame_rows)
    random_rows = np.random.default_rng(rng.randrange(1 << 32))
    free = list(range(64))

    def begin():
        blocks = [free.pop(0)]
        handle = framed.begin(
            f"r{len(framed.names)}", block_ids=blocks, prompt_len=rng.choice([1, 9])
        )
        return [handle, 0, blocks]

    live = [begin() for _ in range(4)]
    for _ in range(120):
        for one in live:  # blocks for the next row, sometimes for many
            while len(one[2]) * BLOCK <= one[1] + rng.choice([0, 0, 3]) and free:
                one[2].append(free.pop(0))
                framed.add_blocks(one[0], one[2][-1:])
        live = [one for one in live if len(one[2]) * BLOCK > one[1]]
        kind = rng.random()
        if live and (kind < 0.04 or not free):
            handle, end, blocks = live.pop(rng.randrange(len(live)))
            framed.finish(handle, end + 1)
            free += blocks
        elif kind < 0.08 and len(free) > 4:
            live.append(begin())
        elif kind < 0.12 and live:
            one = rng.choice(live)
            one[1] = max(0, one[1] - rng.randint(0, 2))
            framed.rewind(one[0], one[1])
        elif kind < 0.14:
            framed.set_weight_version(framed.version + 1)
        elif kind < 0.2:
            framed.now += rng.choice([1, 9])
            framed.tick()
        elif kind < 0.24:
            framed.seal()
        elif kind < 0.26:
            framed.external([rng.randrange(64)])
        if live:
            rows = random_rows.permuted(np.tile(np.arange(300), (len(live), 2, 1)), axis=2)
            rows = rows[..., :2].astype(LAYOUT.dtype)
            if rng.random() < 0.05:
                rows[0] = 7
            framed.step(rows, [(handle, end, 1) for handle, end, _ in live])
            for one in live:
                one[1] += 1
    framed.end()
    framed.compare()
    assert framed.again > 10


def test_rows_of_steps_that_go_on_leave_before_their_block_changes_hands():
    """Be it one that its request began with, or one that it got later."""
    for number, block in ((3, 0), (7, 2)):  # so many rows; the last of them are in that block
        framed = Framed(num_blocks=8, frame_rows=40)
        one, two = framed.begin("one", block_ids=[0]), framed.begin("two", block_ids=[1, 3])
        framed.add_blocks(one, [2])
        rows = np.random.default_rng(0).permuted(np.tile(np.arange(300), (2, 2, 1)), axis=2)
        for at in range(number):
            framed.step(rows[..., :2].astype(LAYOUT.dtype), [(one, at, 1), (two, at, 1)])
        assert framed.again == number - 1
        framed.add_blocks(two, [block])
        framed.step(rows[:1, :, 2:4].astype(LAYOUT.dtype), [(two, number, 1)])
        framed.end()
        framed.compare()
        assert not any(slot // BLOCK == block for slot in framed.model.slots)


class Reckless:
    """An engine without reason, that keeps one rule: a block has one writer at a time."""

    def __init__(self, sink: Framed, rng: random.Random, invalid: float, losses: float = 0) -> None:
        self.sink, self.rng, self.invalid, self.losses = sink, rng, invalid, losses
        self.splits = rng.random() < 0.5  # steps come in parts
        self.verifies = rng.random() < 0.5  # rejects drafts, never a token that it sampled
        self.live: dict[int, list[int]] = {}  # handle -> blocks
        self.ends: dict[int, int] = {}
        self.preempted: set[int] = set()
        self.ended: list[int] = []
        self.done: list[list[int]] = []  # block lists that may be cached
        self.count = 0

    def act(self) -> None:
        actions = [self.begin, self.step, self.step, self.step, self.step, self.rewind]
        actions += [self.finish, self.preempt, self.resume, self.weights, self.forget, self.grow]
        actions += [self.share, self.move]
        self.rng.choice(actions)()

    def _free(self) -> list[int]:
        held = {b for blocks in self.live.values() for b in blocks}
        return [b for b in range(16) if b not in held]

    def _grant(self, n: int, cached: list[int] | None = None) -> list[int]:
        free = [b for b in self._free() if b not in (cached or ())]
        blocks = self.rng.sample(free, min(n, len(free)))
        self.done = [[] if set(old) & set(blocks) else old for old in self.done]
        return blocks

    def _full(self, block: int, index: int) -> bool:
        """Nobody writes to it any more."""
        return all(
            self.ends[h] >= (blocks.index(block) + 1) * BLOCK and blocks.index(block) == index
            for h, blocks in self.live.items()
            if block in blocks
        )

    def _start(self) -> tuple[int, list[int]]:
        rng = self.rng
        cached: list[int] = []
        donors = [*self.done, *self.live.values()]
        if donors and rng.random() < 0.7:
            for i, block in enumerate(rng.choice(donors)[: rng.randint(0, 4)]):
                if not self._full(block, i):
                    break
                cached.append(block)
        computed = len(cached) * BLOCK
        # The last cached block may be used in part, and then is written to.
        if cached and not any(cached[-1] in blocks for blocks in self.live.values()):
            computed -= rng.randint(0, 3)
        return computed, [*cached, *self._grant(rng.randint(0, 3), cached)]

    def begin(self) -> None:
        if len(self.live) > 5:
            return
        computed, blocks = self._start()
        name = f"r{self.count}"
        self.count += 1
        external = self.rng.choice([0, 0, self.rng.randint(0, computed)])
        handle = self.sink.begin(
            name,
            num_computed_tokens=computed,
            num_external_tokens=external,
            block_ids=blocks,
            prompt_len=self.rng.choice([0, self.rng.randint(1, 30)]),
        )
        self.live[handle], self.ends[handle] = blocks, computed

    def _running(self) -> int | None:
        running = [h for h in self.live if h not in self.preempted]
        return self.rng.choice(running) if running else None

    def _may_write(self, handle: int, position: int) -> bool:
        return not any(
            b in others
            for other, others in self.live.items()
            if other != handle
            for b in self.live[handle][position // BLOCK :]
        )

    def step(self) -> None:
        rng = self.rng
        spans: list[tuple[int, int, int]] = []
        # Blocks that this step may write to or confirm drafts of.
        written = {
            block
            for handle, blocks in self.live.items()
            if handle not in self.preempted
            for block in blocks[self._sure(handle) // BLOCK :]
        }
        for _ in range(rng.randint(1, 5)):
            handle = self._running()
            if handle is None:
                return
            position = self.ends[handle]
            if rng.random() < 0.1:
                position = max(0, position - rng.randint(1, 5))  # without a rewind before
                if self.verifies:
                    position = max(position, self.sink.first_draft.get(handle, 0))
            elif rng.random() < 0.1:
                position += rng.randint(1, 5)  # a gap
            if not self._may_write(handle, min(position, self.ends[handle])):
                continue
            count = rng.choice([1, 1, 1, 2, 5, 11])
            spans.append((handle, position, count))
            written.update(self.live[handle][position // BLOCK :])  # a rewind without a call
            self.ends[handle] = position + count
        late = [*self.preempted, *self.ended]
        if late and rng.random() < 0.3:
            handle = rng.choice(sorted(late))
            position = max(0, self.ends[handle] - rng.randint(0, 5))
            held = self.sink.gone[handle]
            if not {held.get(p // BLOCK) for p in (position, position + 1)} & written:
                spans.insert(0, (handle, position, 2))
        n = sum(count for _, _, count in spans)
        if spans:
            cuts = rng.sample(range(1, n), rng.randint(0, min(3, n - 1))) if self.splits else []
            lost = [i for i in range(len(cuts) + 1) if rng.random() < self.losses]
            self.sink.step(self.rows(n), spans, cuts, lost)

    def _sure(self, handle: int) -> int:
        """Leading tokens of a request that no rejected draft can take back."""
        return min(self.ends[handle], self.sink.first_draft.get(handle, self.ends[handle]))

    def share(self) -> None:
        """A request starts on blocks that another one computes in the same step."""
        donor = self._running()
        if donor is None or len(self.live) > 5:
            return
        blocks, end = self.live[donor], self.ends[donor]
        full = min(len(blocks), end // BLOCK + self.rng.randint(1, 3))
        count = full * BLOCK - end
        if count < 1 or not self._may_write(donor, end):
            return
        cached = blocks[:full]
        self.ends[donor] = end + count
        if not all(self._full(block, i) for i, block in enumerate(cached)):
            self.ends[donor] = end
            return
        name = f"r{self.count}"
        self.count += 1
        new = self._grant(1, cached)
        handle = self.sink.begin(name, num_computed_tokens=full * BLOCK, block_ids=[*cached, *new])
        self.live[handle], self.ends[handle] = [*cached, *new], full * BLOCK + 2
        spans = [(donor, end, count), (handle, full * BLOCK, 2)]
        self.rng.shuffle(spans)
        self.sink.step(self.rows(count + 2), spans)

    def rows(self, n: int) -> np.ndarray:
        ids = np.array([self.rng.sample(range(300), 2) for _ in range(2 * n)], np.uint16)
        for row in range(n):
            if self.rng.random() < self.invalid:
                ids[2 * row + self.rng.randrange(2)] = self.rng.choice([(7, 7), (5, 300)])
        return ids.reshape(n, 2, 2)

    def rewind(self) -> None:
        handle = self._running()
        if handle is not None:
            position = max(0, self.ends[handle] - self.rng.randint(0, 6))
            if self.verifies:
                position = max(position, self.sink.first_draft.get(handle, 0))
            if self._may_write(handle, position):
                step = self.rng.choice([0, max(0, self.sink.number - self.rng.randint(0, 2))])
                if self.sink.rewind(handle, position, step):
                    self.ends[handle] = min(self.ends[handle], position)

    def grow(self) -> None:
        handle = self._running()
        if handle is not None:
            blocks = self._grant(self.rng.randint(1, 2))
            # A block that is granted now holds nothing yet.
            if blocks and self.ends[handle] <= len(self.live[handle]) * BLOCK:
                self.live[handle] += blocks
                self.sink.add_blocks(handle, blocks)

    def preempt(self) -> None:
        if self.preempted and self.rng.random() < 0.2:  # an engine may repeat it
            self.sink.preempt(self.rng.choice(sorted(self.preempted)), self.rng.randint(0, 30))
            return
        handle = self._running()
        if handle is not None:
            self.done.append(self.live[handle][: self.ends[handle] // BLOCK])
            num_tokens = max(0, self.ends[handle] - self.rng.randint(-1, 3))
            self.sink.preempt(handle, num_tokens)
            self.live[handle] = []
            self.ends[handle] = min(self.ends[handle], num_tokens)
            self.preempted.add(handle)

    def resume(self) -> None:
        if self.preempted:
            handle = self.rng.choice(sorted(self.preempted))
            computed, blocks = self._start()
            external = self.rng.choice([0, self.rng.randint(0, computed)])
            self.sink.resume(handle, computed, block_ids=blocks, num_external_tokens=external)
            self.live[handle], self.ends[handle] = blocks, computed
            self.preempted.discard(handle)

    def finish(self) -> None:
        if self.live and self.rng.random() < 0.5:
            handle = self.rng.choice(sorted(self.live))
            num_tokens = max(0, self.ends[handle] + self.rng.randint(-2, 2))
            self.sink.finish(handle, num_tokens, self.rng.choice(["stop", "length", "abort"]))
            self.done.append(self.live.pop(handle)[: self.ends[handle] // BLOCK])
            self.preempted.discard(handle)
            self.ended = [*self.ended[-3:], handle]

    def weights(self) -> None:
        self.sink.set_weight_version(self.rng.randint(-3, 3))

    def move(self) -> None:
        """KV goes to the host tier, or comes back into blocks that nobody has."""
        rng, host = self.rng, range(16, 16 + HOST)
        if rng.random() < 0.5:
            # Any slots, those of drafts and of blocks under way too.
            sources = rng.sample(range(16), rng.randint(1, 3))
            self.sink.copy(sources, rng.sample(host, len(sources)))
        elif targets := self._grant(rng.randint(1, 3)):
            self.sink.copy(rng.sample(host, len(targets)), targets)
            self.done.append(targets)

    def forget(self) -> None:
        if self.rng.random() < 0.2:
            self.sink.reset_prefix_cache()
        elif self.rng.random() < 0.5:
            self.sink.external(self._grant(2))


@settings(max_examples=30)
@given(SEEDS, st.sampled_from([0.0, 0.05]), st.sampled_from([0.0, 0.1]), st.booleans())
def test_an_engine_without_reason(rng, invalid, losses, small):
    framed = Framed(frame_rows=rng.choice([1, 4, 16, 64]), linger=rng.choice([0, 2, 1e9]))
    if small:
        framed.builder.limit(700)  # chunks and frames of a few rows
    engine = Reckless(framed, rng, invalid, losses)
    for _ in range(80):
        engine.act()
        framed.now += rng.choice([0, 1])
        if rng.random() < 0.1:
            framed.tick()
        if rng.random() < 0.1:
            framed.seal()
    framed.end()
    framed.compare(verifies=engine.verifies, confirmed=not (invalid or losses))
    if small:
        assert max(framed.chunk_bytes, default=0) <= 700


@settings(max_examples=50)
@given(SEEDS)
def test_what_is_dropped_for_memory_leaves_no_wrong_row(rng):
    framed = Framed(frame_rows=rng.choice([4, 16, 64]), linger=rng.choice([0, 2, 1e9]))
    engine = Reckless(framed, rng, 0.02)
    muted = False
    for _ in range(80):
        engine.act()
        framed.now += rng.choice([0, 1])
        if rng.random() < 0.1:
            framed.tick()
        if rng.random() < 0.05:
            framed.intake.shed(rng.choice([1, 100, 1000]))
        if rng.random() < 0.05:
            muted = not muted
        framed.intake.pressure = PRESSURES[muted + (muted and rng.random() < 0.3)]
        if rng.random() < 0.1:
            framed.seal()
    if rng.random() < 0.5:
        framed.intake.pressure = Pressure.NORMAL
    framed.intake.report()  # as flush() of the agent does
    framed.end()
    framed.compare_lossy()


@settings(max_examples=50)
@given(SEEDS, st.sampled_from([0.0, 0.05]), st.sampled_from([0.0, 0.1]))
def test_a_framer_that_follows_a_dead_one_sends_what_began_since_and_no_wrong_row(
    rng, invalid, losses
):
    framed = Framed(frame_rows=rng.choice([1, 4, 16, 64]), linger=rng.choice([0, 2, 1e9]))
    engine = Reckless(framed, rng, invalid, losses)
    since = 0
    deaths = {rng.randint(1, 60) for _ in range(rng.randint(1, 2))}
    for action in range(80):
        if action in deaths:
            framed.die()
            since = len(framed.naive.requests)
        engine.act()
        framed.now += rng.choice([0, 1])
        if rng.random() < 0.1:
            framed.tick()
        if rng.random() < 0.1:
            framed.seal()
    framed.end()
    framed.compare_lossy()
    began = framed.naive.requests[since:]
    assert [r.request_id for r in framed.model.requests] == [r.request_id for r in began]
    for ours, truth in zip(framed.model.requests, began, strict=True):
        assert [a.rows for a in ours.attempts] == [a.rows for a in truth.attempts]
        assert ours.lost_positions(FULL) == truth.lost_positions(FULL)
        assert (ours.index, ours.num_tokens) == (truth.index, truth.num_tokens)


def test_a_late_row_of_a_request_of_before_makes_shared_slots_unknown():
    """Its blocks are not known; another request writes into one that it shares in part."""
    framed, rows = Framed(), valid_rows(8)
    before = framed.begin("before", block_ids=[3, 4])
    framed.step(rows[:1], [(before, 0, 1)])
    framed.die()
    framed.finish(before, 2)
    sharing = framed.begin("sharing", num_computed_tokens=1, block_ids=[3])
    other = framed.begin("other", block_ids=[9])
    framed.step(rows[1:4], [(sharing, 1, 1), (sharing, 2, 1), (other, 0, 1)])
    framed.step(rows[4:5], [(sharing, 3, 1)])
    framed.intake.flush()
    framed.seal()
    assert {3 * BLOCK + 1, 9 * BLOCK} <= framed.model.slots.keys()
    framed.step(rows[5:6], [(before, 1, 1)])
    framed.end()
    assert 3 * BLOCK + 1 not in framed.model.slots
    framed.compare_lossy()


def test_late_rows_of_requests_of_before_leave_the_slots_of_others():
    framed, rows = Framed(), valid_rows(8)
    before = framed.begin("before", block_ids=[3, 4])
    framed.step(rows[:1], [(before, 0, 1)])
    framed.die()
    after = framed.begin("after", block_ids=[5])
    framed.step(rows[1:3], [(after, 0, 1), (before, 1, 1)])
    framed.finish(before, 3)
    framed.step(rows[3:5], [(after, 1, 1), (before, 2, 1)])
    framed.end()
    assert framed.model.slots.keys() == {5 * BLOCK, 5 * BLOCK + 1}
    assert framed.dropped == {Word.UNSEEN: 1}


def test_a_resume_without_memory_into_a_block_shared_in_part_makes_it_not_new():
    """So a late row of the request that held the block before makes its slot unknown."""
    framed, rows = Framed(), valid_rows(8)
    former = framed.begin("former", block_ids=[3])
    framed.step(rows[:1], [(former, 0, 1)])
    framed.preempt(former, 1)
    framed.intake.pressure = Pressure.FULL
    unnamed = framed.begin("unnamed", block_ids=[6])
    framed.preempt(unnamed, 0)
    framed.intake.pressure = Pressure.NORMAL
    framed.resume(unnamed, 1, block_ids=[3])
    framed.finish(unnamed, 2)
    last = framed.begin("last", num_computed_tokens=1, block_ids=[3])
    framed.step(rows[1:3], [(last, 1, 2)])
    framed.step(rows[3:4], [(last, 3, 1)])
    framed.intake.flush()
    framed.seal()
    assert 3 * BLOCK + 1 in framed.model.slots
    framed.step(rows[4:5], [(former, 1, 1)])
    framed.end()
    assert 3 * BLOCK + 1 not in framed.model.slots


@settings(max_examples=30)
@given(SEEDS)
def test_the_newest_go_first_and_no_more_than_have_to(rng):
    framed = Framed(num_blocks=0, frame_rows=64, linger=1e9)
    handles = [framed.begin(f"r{i}") for i in range(rng.randint(1, 12))]
    held = dict.fromkeys(handles, 0)
    rows = valid_rows(64)
    for _ in range(rng.randint(1, 10)):
        handle = rng.choice(handles)
        count = rng.randint(1, 64 - held[handle]) if held[handle] < 60 else 0
        if count:
            framed.step(rows[:count], [(handle, held[handle], count)])
            held[handle] += count
    waiting = [h for h in handles if 0 < held[h] < 64]
    target = rng.randint(1, 200) * LAYOUT.row_bytes
    over = framed.intake.nbytes - target
    framed.intake.shed(over)
    lost = [h for h in waiting if not framed.intake._framer._requests[h & 0xFFFFF].kept]
    assert lost == waiting[len(waiting) - len(lost) :]
    assert framed.intake.nbytes == sum(held[h] for h in waiting if h not in lost) * 8
    assert framed.intake.nbytes <= max(target, 0) or len(lost) == len(waiting)
    if lost:
        assert framed.intake.nbytes + held[lost[0]] * 8 > target
    framed.end()


def test_what_began_without_memory_is_told_by_its_name_and_end():
    framed = Framed()
    tokens = np.arange(200) % 7
    first = framed.begin("first", trace_id="t", prompt_len=70, prompt_token_ids=tokens[:70])
    framed.finish(first, 100, token_ids=tokens[:100])
    framed.intake.pressure = Pressure.FULL
    named = framed.begin(
        "named", trace_id="t", prompt_len=150, prompt_token_ids=tokens[:150], block_ids=[1, 2],
        labels={"adapter": "math"},
    )  # fmt: skip
    framed.step(valid_rows(4), [(named, 0, 4)])
    framed.intake.pressure = Pressure.EXHAUSTED
    late, gone = framed.begin("late", labels={"a": "b"}), framed.begin("gone")
    framed.finish(gone, 5)
    framed.intake.pressure = Pressure.FULL
    framed.finish(late, 7)
    framed.finish(named, 200, token_ids=tokens)
    framed.intake.pressure = Pressure.NORMAL
    framed.end()
    _, named_request, late_request = framed.model.requests
    assert named_request.lost == late_request.lost == [(0, 0, FULL)]
    assert (named_request.num_tokens, late_request.num_tokens) == (200, 7)
    assert named_request.blocks == []
    assert late_request.facts.labels == {"a": "b"}
    # What proves that it goes on from the one before, and so is the newer of the two.
    assert named_request.digests == {100: TokenDigest("math").update(tokens[:100])}
    assert framed.dropped == {Word.QUEUE_FULL: 4, Word.UNREPORTED: 1}


def test_nothing_is_told_of_slots_while_memory_is_short():
    framed = Framed()
    framed.step_slots(valid_rows(4), [0, 1, 2, 3])
    framed.intake.pressure = Pressure.FULL
    for _ in range(100):
        framed.step_slots(valid_rows(4), [0, 1, 2, 3])
        framed.external([1, 2])
        framed.reset_prefix_cache()
    framed.seal()
    assert sum(framed.chunk_bytes) < 1000
    framed.intake.pressure = Pressure.NORMAL
    framed.step_slots(valid_rows(1), [9])
    framed.intake.flush()
    framed.seal()
    assert set(framed.model.slots) == {9}
    assert framed.dropped[Word.QUEUE_FULL] == 400


@pytest.mark.parametrize("change", ["step_slots", "external", "copy", "reset", "begin", "forget"])
@pytest.mark.parametrize("end", ["memory", "flush", "close"])
def test_changes_of_slots_in_a_shortage_are_reported_at_its_end_and_at_a_flush(change, end):
    framed = Framed()
    framed.step_slots(valid_rows(8), [*range(8)])
    framed.intake.flush()
    framed.seal()
    assert set(framed.model.slots) == {*range(8)}
    framed.intake.pressure = Pressure.FULL
    if change == "step_slots":
        framed.step_slots(valid_rows(1), [1])
    elif change == "external":
        framed.external([0])
    elif change == "copy":
        framed.copy([0], [1])
    elif change == "reset":
        framed.reset_prefix_cache()
    elif change == "begin":
        framed.begin("r", block_ids=[0])
    else:
        framed.intake.event("forget", np.array([3], np.uint64).tobytes())
    if end == "memory":
        framed.intake.pressure = Pressure.NORMAL
    elif end == "flush":
        framed.intake.report()
    else:
        framed.intake.close()
    framed.seal()
    assert not framed.model.slots


def test_rows_before_a_resume_that_cannot_be_reported_are_taken_back():
    """The server knows of no further attempt, so nothing says which one sampled."""
    framed = Framed(num_blocks=64)
    handle = framed.begin("r", prompt_len=9, block_ids=[0, 1])
    framed.step(valid_rows(4), [(handle, 0, 4)])
    framed.intake.flush()
    framed.intake.pressure = Pressure.FULL
    framed.step(valid_rows(1), [(handle, 4, 1)])
    framed.preempt(handle, 5)
    framed.resume(handle, 0, block_ids=[2, 3])
    framed.intake.pressure = Pressure.NORMAL
    framed.preempt(handle, 7)
    framed.resume(handle, 0, block_ids=[2, 3])
    framed.finish(handle, 10)
    framed.seal()
    [request] = framed.model.requests
    [attempt] = request.attempts
    assert (attempt.lost[-1], request.num_tokens) == ((0, 0, FULL), 10)


def test_what_a_resume_without_memory_writes_into_shared_blocks_is_not_known():
    """It goes back into cached blocks of which another request made the rows."""
    framed = Framed(num_blocks=64)
    gone = framed.begin("gone", prompt_len=3 * BLOCK, block_ids=[0])
    framed.step(valid_rows(1), [(gone, 0, 1)])
    framed.intake.pressure = Pressure.FULL
    framed.step(valid_rows(1), [(gone, 1, 1)])
    framed.preempt(gone, 2)
    framed.resume(gone, 0, block_ids=[0])
    framed.preempt(gone, 0)
    framed.intake.pressure = Pressure.NORMAL
    first = framed.begin("first", block_ids=[1, 2])
    framed.step(valid_rows(2 * BLOCK), [(first, 0, 2 * BLOCK)])
    framed.finish(first, 2 * BLOCK + 1)
    framed.resume(gone, 2 * BLOCK, block_ids=[1, 2, 3])
    framed.step(valid_rows(1), [(gone, 2 * BLOCK, 1)])
    framed.intake.flush()
    framed.seal()
    assert set(framed.model.slots) == {*range(BLOCK, 3 * BLOCK)}
    framed.step(valid_rows(3), [(gone, 2 * BLOCK - 2, 3)])
    framed.finish(gone, 2 * BLOCK + 2)
    framed.seal()
    assert set(framed.model.slots) == {*range(BLOCK, 3 * BLOCK - 2)}


@pytest.mark.parametrize("preempted", [False, True])
def test_a_request_of_a_shortage_costs_its_own_blocks_alone_later(preempted):
    framed = Framed(num_blocks=64)
    framed.intake.pressure = Pressure.FULL
    gone = framed.begin("gone", block_ids=[0])
    framed.intake.pressure = Pressure.NORMAL
    first = framed.begin("first", block_ids=[1, 2])
    framed.step(valid_rows(2 * BLOCK), [(first, 0, 2 * BLOCK)])
    framed.finish(first, 2 * BLOCK + 1)
    # Block 2 is evicted for the request that nobody follows.
    if preempted:
        framed.preempt(gone, 0)
        framed.resume(gone, 0, block_ids=[2])
    else:
        framed.add_blocks(gone, [2])
    framed.begin("second", num_computed_tokens=BLOCK, block_ids=[1, 3])
    framed.intake.flush()
    framed.seal()
    assert set(framed.model.slots) == {*range(BLOCK, 2 * BLOCK)}


@settings(max_examples=30)
@given(SEEDS, st.sampled_from([0.0, 0.02]), st.booleans())
def test_slots_alone(rng, invalid, small):
    framed = Framed(linger=rng.choice([0, 2, 1e9]))
    if small:
        framed.builder.limit(700)
    engine = Reckless(framed, rng, invalid)
    for _ in range(40):
        n = rng.choice([1, 3, 20, 40])
        framed.step_slots(engine.rows(n), rng.sample(range(64), n))
        framed.now += rng.choice([0, 1])
        if rng.random() < 0.1:
            engine.weights()
        if rng.random() < 0.05:
            engine.forget()
        if rng.random() < 0.2:
            framed.tick()
        if rng.random() < 0.1:
            framed.seal()
    framed.end()
    if invalid:
        assert framed.model.slots.items() <= framed.naive.slots.items()
    else:
        assert framed.model.slots == framed.naive.slots
    if small:
        assert max(framed.chunk_bytes) <= 700


def valid_rows(n: int, layout: ModelLayout = LAYOUT, seed: int = 0) -> np.ndarray:
    keys = np.random.default_rng(seed).random((n, len(layout.layer_ids), layout.num_experts))
    return np.argsort(keys, axis=2)[..., : layout.top_k].astype(layout.dtype)


def test_a_request_that_writes_into_blocks_it_shares_is_flushed_for_the_next_to_share_them():
    framed = Framed(frame_rows=64)
    rows = valid_rows(9)
    first = framed.begin("first", block_ids=[5])
    framed.step(rows[:4], [(first, 0, 4)])
    framed.finish(first, 5)
    framed.begin("other")  # on the lane of the first
    second = framed.begin("second", prompt_len=6, num_computed_tokens=4, block_ids=[5, 6])
    framed.rewind(second, 2)
    framed.step(rows[4:8], [(second, 2, 4)])
    third = framed.begin("third", num_computed_tokens=4, block_ids=[5])
    framed.finish(third, 5)
    framed.end()
    framed.compare()
    third = framed.model.request("third")
    assert [third.row(p) for p in range(4)] == [rows[i].tobytes() for i in (0, 1, 4, 5)]


def test_frames_are_as_large_as_they_may_be():
    framed = Framed(num_blocks=0, frame_rows=256, linger=1)
    a, b = framed.begin("a"), framed.begin("b")
    rows = valid_rows(5000)
    framed.step(rows[:4096], [(a, 0, 4096)])  # a long prefill: frames of 512
    framed.step(rows[:300], [(b, 0, 300)])  # more than a frame: all of it
    for p in range(300, 555):
        framed.step(rows[p : p + 1], [(b, p, 1)])
    framed.seal()
    assert framed.frame_rows == [*[512] * 8, 300]
    framed.step(rows[555:556], [(b, 555, 1)])  # the 256th that lingers
    framed.step(rows[556:560], [(b, 556, 4)])
    framed.seal()
    assert framed.frame_rows[9:] == [256]
    framed.now = 0.99
    framed.tick()
    assert not framed.builder
    framed.now = 1.0
    framed.tick()
    framed.seal()
    assert framed.frame_rows[10:] == [4]
    framed.finish(b, 561)
    framed.end()
    framed.compare()


def test_steps_of_a_window_keep_their_numbers():
    """A bind to some step must not miss rows that share a frame with later ones."""
    framed = Framed()
    for i in range(3):
        framed.step_slots(valid_rows(2), [2 * i, 2 * i + 1])
    framed.intake.flush()
    framed.builder.seal()
    header, frames = read_chunk(framed.builder.ready[0].header, framed.builder.ready[0].payload)
    ops = np.frombuffer(header.ops, [("", "V32"), ("step", "<u8"), ("", "V16")])
    assert ops["step"].tolist() == [1, 2, 3]
    assert [len(f) for f in frames] == [6]


def test_digests_tell_the_tokens_at_grid_positions_and_at_ends():
    framed = Framed()
    tokens = np.arange(300) % 7
    first = framed.begin("r", prompt_len=70, prompt_token_ids=tokens[:70])
    framed.finish(first, 100, token_ids=tokens[:100])
    # The next turn is told where the one before ended; another trace is not.
    second = framed.begin("s", trace_id="r", prompt_len=150, prompt_token_ids=tokens[:150])
    framed.finish(second, 300, token_ids=tokens)
    framed.begin("other", prompt_len=150, prompt_token_ids=tokens[:150])
    # Another prompt than was told at the start: the end is what counts.
    fourth = framed.begin("t", prompt_len=70, prompt_token_ids=tokens[:70] + 1)
    framed.finish(fourth, 70, token_ids=tokens[:70])
    framed.end()
    expected = {n: TokenDigest().update(tokens[:n]) for n in range(301)}
    positions = [set(r.digests) for r in framed.model.requests]
    assert positions == [
        {64, 70, 100},
        {64, 100, 128, 150, 192, 256, 300},
        {64, 128, 150},
        {64, 70},
    ]
    for request in framed.model.requests:
        assert request.digests == {n: expected[n] for n in request.digests}


def test_an_aborted_request_has_digests_to_its_last_token():
    """Its caller may have got fewer tokens than the engine sampled, and goes on from those."""
    framed = Framed()
    tokens = np.arange(400) % 7

    def told(name, trace_id, prompt_len, num_tokens, reason):
        prompt = tokens[:prompt_len]
        facts = {"trace_id": trace_id, "prompt_len": prompt_len, "prompt_token_ids": prompt}
        framed.finish(framed.begin(name, **facts), num_tokens, reason, tokens[:num_tokens])
        framed.seal()
        digests = framed.model.requests[-1].digests
        assert digests == {n: TokenDigest().update(tokens[:n]) for n in digests}
        return set(digests)

    assert told("a", "t", 70, 100, "abort") == {64, *range(70, 101)}
    # The next prompt has the ends of the one before, as far as it reaches; so has a turn behind it.
    assert told("b", "t", 98, 250, "abort") == {64, *range(92, 99), 128, 192, *range(186, 251)}
    grid, ends = {64, 128, 192, 256, 320}, {*range(92, 101), *range(242, 251)}
    assert told("c", "t", 300, 330, "stop") == grid | ends | {300, 330}
    assert told("d", "t", 340, 350, "length") == grid | ends | {330, 340, 350}
    # Any other end has one digest; an abort in the prompt, too.
    for reason in ("stop", "length", "handoff"):
        assert told(reason, reason, 70, 100, reason) == {64, 70, 100}
    assert told("none", "u", 70, 70, "abort") == {64, 70}
    assert told("then", "u", 80, 90, "stop") == {64, 70, 80, 90}


def test_a_trace_remembers_its_last_ends_and_not_too_many_traces(monkeypatch):
    monkeypatch.setattr("routetrace.capture_agent.pipeline.trace_ends.MAX_TRACES", 3)
    ends = TraceEnds()
    for n in range(6):
        ends.add("a", range(n, n + 1))
    assert ends.of("a") == (2, 3, 4, 5)
    for name in ("b", "c", "a", "d"):
        ends.add(name, range(8, 10))
    assert [ends.of(name) for name in "abcd"] == [(3, 4, 5, 8, 9), (), (8, 9), (8, 9)]


def test_drafts_are_told_until_something_follows_them():
    framed = Framed(num_blocks=0, frame_rows=4)
    handle = framed.begin("r", prompt_len=3)

    def drafts():
        framed.end()
        return framed.model.requests[0].drafts

    framed.step(valid_rows(6), [(handle, 0, 6)])
    assert drafts() == 3
    framed.step(valid_rows(3), [(handle, 4, 3)])  # two were kept
    assert drafts() == 5
    framed.step(valid_rows(1), [(handle, 7, 1)])
    assert drafts() == NO_DRAFTS
    framed.step(valid_rows(5), [(handle, 8, 5)])
    framed.rewind(handle, 10)
    assert drafts() == 9
    framed.preempt(handle, 10)
    assert drafts() == NO_DRAFTS


def test_a_late_row_overwrites_rows_of_earlier_steps_that_linger():
    """Another request has rewound into a block that it shares with the one that has ended."""
    framed = Framed(frame_rows=64, linger=1e9)
    one = framed.begin("one", block_ids=[0, 1])
    framed.step(valid_rows(6), [(one, 0, 6)])
    framed.finish(one, 7)
    two = framed.begin("two", prompt_len=9, block_ids=[0, 2], num_computed_tokens=4)
    framed.step(valid_rows(1), [(two, 4, 1)])
    framed.step(valid_rows(2), [(two, 2, 2)])
    framed.step(valid_rows(1), [(one, 3, 1)])
    framed.begin("three", block_ids=[0, 3], num_computed_tokens=4)
    framed.end()
    framed.compare()
    assert 2 in framed.model.slots
    assert 3 not in framed.model.slots


def test_a_step_that_is_split_is_tentative_as_a_whole():
    framed = Framed(num_blocks=0, frame_rows=2)
    framed.builder.limit(700)
    handle = framed.begin("r", prompt_len=1)
    n = 3 * framed.builder.max_rows
    framed.step(valid_rows(n), [(handle, 0, n)])
    framed.end()
    assert len(framed.frame_rows) >= 3
    assert framed.model.requests[0].drafts == 1


def test_what_the_ring_cuts_is_one_step():
    """A token and its drafts, of which the first part, or the last, may find no room."""
    for lost, drafts, rows in (((), 11, 5), ((0,), 11, 3), ((1,), 11, 2), ((0, 1), NO_DRAFTS, 0)):
        framed = Framed(num_blocks=0)
        handle = framed.begin("r", prompt_len=10, num_computed_tokens=10)
        framed.step(valid_rows(5), [(handle, 10, 5)], [2], lost)
        framed.end()
        framed.compare()
        request = framed.model.requests[0]
        assert (request.drafts, len(request.attempts[0].rows)) == (drafts, rows)


def test_an_op_that_ends_before_the_drafts_says_so():
    framed = Framed(num_blocks=0)
    handle = framed.begin("r", prompt_len=2)
    rows = valid_rows(5)
    rows[4] = 0  # the only draft, and no router chose that
    framed.step(rows[:3], [(handle, 0, 3)])
    framed.step(rows[3:], [(handle, 3, 2)])
    framed.end()
    framed.compare()
    assert framed.model.requests[0].served() == {0, 1, 2, 3}


def test_what_stands_for_a_refused_chunk_says_all_but_its_rows():
    framed = Framed()
    tokens = np.arange(70)
    framed.begin("first", prompt_len=70, prompt_token_ids=tokens)
    handle = framed.begin(
        "second",
        num_computed_tokens=4,
        num_external_tokens=3,
        block_ids=[2, 3],
        prompt_len=70,
        prompt_token_ids=tokens + 1,
    )
    framed.step(valid_rows(2), [(handle, 4, 2)])
    framed.intake.flush()
    framed.builder.seal()
    chunk = framed.builder.ready.popleft()
    refused = pb.MISSING_REASON_REJECTED
    instead = framed.builder.degrade(chunk, refused)
    told, model = Model(BLOCK), Model(BLOCK)
    told.apply(*read_chunk(chunk.header, chunk.payload))
    model.apply(*read_chunk(instead.header, instead.payload))
    for ours, truth in zip(model.requests, told.requests, strict=True):
        for name in ("request_id", "facts", "index", "blocks", "digests"):
            assert getattr(ours, name) == getattr(truth, name)
        assert len(ours.digests) == 2
    second = model.request("second")
    assert (second.attempts[0].rows, second.lost) == ({}, [(4, 2, refused)])


def test_several_runs_of_a_request_in_a_step_begin_one_time():
    framed = Framed(num_blocks=0)
    handle = framed.begin("r")
    framed.step(valid_rows(6), [(handle, 0, 2), (handle, 2, 2), (handle, 6, 2)])
    framed.end()
    framed.compare()
    assert framed.model.requests[0].served() == {0}


def test_a_late_rewind_knows_of_steps_that_found_no_room():
    framed = Framed(num_blocks=0)
    handle = framed.begin("r")
    first = framed.step(valid_rows(4), [(handle, 0, 4)])
    framed.step(valid_rows(4), [(handle, 2, 4)], lost=[0])
    assert not framed.rewind(handle, 2, first)
    framed.step(valid_rows(2), [(handle, 6, 2)])
    framed.end()
    framed.compare()
    request = framed.model.requests[0]
    assert request.lost == [(2, 4, FULL)]
    assert set(request.attempts[0].rows) == {0, 1, 6, 7}


def test_memory_is_freed_newest_first_and_readers_hear_of_it():
    framed = Framed(num_blocks=0, frame_rows=64)
    handles = [framed.begin(f"r{i}") for i in range(4)]
    framed.step(valid_rows(40), [(h, 0, 10) for h in handles])
    size = framed.intake.nbytes
    framed.intake.shed(size // 4 + 1)  # one request is not enough
    framed.step(valid_rows(4), [(h, 10, 1) for h in handles])
    for handle in handles:
        framed.finish(handle, 12)
    framed.end()
    assert [len(r.attempts[0].rows) for r in framed.model.requests] == [11, 11, 0, 0]
    assert [r.lost for r in framed.model.requests] == [[], [], [(0, 0, FULL)], [(0, 0, FULL)]]
    assert +framed.dropped == {Word.QUEUE_FULL: 22}


def test_requests_that_never_end_are_told_at_the_end():
    framed = Framed(num_blocks=0)
    handle = framed.begin("r")
    framed.step(valid_rows(3), [(handle, 0, 3)])
    framed.intake.close()
    framed.seal()
    request = framed.model.requests[0]
    assert len(request.attempts[0].rows) == 3
    assert request.lost == [(3, 0, pb.MISSING_REASON_AGENT_LOST)]


def test_lanes_and_rows_are_used_again():
    linger = Linger(row_bytes=4, frame_rows=64)
    rng = random.Random(0)
    truth: dict[int, list[bytes]] = {}
    value = 0
    for _ in range(400):
        lane = rng.choice([0, 1, 63, 64, 200])
        if lane not in truth:
            linger.begin(lane, 0, 0)
            truth[lane] = []
        if rng.random() < 0.2:
            assert [bytes(r) for r in linger.take(np.array([lane]))] == truth[lane]
            truth[lane] = []
        elif len(truth[lane]) < 50:
            rows = np.arange(value, value + 12, dtype=np.uint8).reshape(3, 4)
            value = (value + 12) % 200
            linger.extend(0.0, 1, 0, np.array([lane]), np.array([3]), rows)
            truth[lane] += [bytes(r) for r in rows]
        assert linger.rows == sum(map(len, truth.values()))


@given(st.integers(1, (1 << 64) - 1), st.binary(max_size=300), st.integers(0, 1 << 15))
def test_a_message_is_what_protobuf_writes(sequence, header, size):
    payload = bytes(size)
    message = Chunk(header, payload, 0).message(sequence)
    chunk = pb.IngestRequest.FromString(message).chunk
    assert (chunk.sequence, chunk.header, chunk.payload) == (sequence, header, payload)
    assert chunk.header_crc32 == zlib.crc32(header)
    assert chunk.payload_crc32 == zlib.crc32(payload)
    assert not size or not header or pb.IngestRequest(chunk=chunk).SerializeToString() == message


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 3)), max_size=40),
    st.sampled_from([3, 300]),
    st.sampled_from([2048, 1 << 20]),
)
def test_blocks_of_many_requests_are_told_as_if_one_by_one(given_to, name_length, target_bytes):
    builder = ChunkBuilder(LAYOUT, target_bytes)
    builder.op(OpKind.BLOCKS, "other", blocks=np.array([7, 8], U32))
    names = [str(i) * name_length for i, n in given_to for _ in range(n)]
    builder.blocks(names, np.arange(100, 100 + len(names), dtype=U32))
    builder.seal()
    told: list[tuple[str, int]] = []
    ops = 0
    for chunk in builder.ready:
        header, _ = read_chunk(chunk.header, chunk.payload)
        # By one op and the name of its request at most: those are not known of beforehand.
        assert len(chunk.header) <= target_bytes + name_length + 2 * OP.itemsize
        blocks = unpack(header.block_ids, U32, "block_ids").tolist()
        for op in unpack(header.ops, OP, "ops"):
            ops += 1
            assert op["kind"] == OpKind.BLOCKS
            at, n = int(op["blocks_at"]), int(op["num_blocks"])
            told += [(header.request_ids[op["request"]], block) for block in blocks[at : at + n]]
    assert told == [("other", 7), ("other", 8), *zip(names, range(100, 1000), strict=False)]
    # Those that a request gets in a row are told in one go.
    assert ops == 1 + sum(a != b for a, b in pairwise(["other", *names]))


def test_a_packed_op_is_the_record():
    fields = range(1, 1 + len(OP.fields or {}))
    assert PACKED_OP.pack(*fields) == np.array(tuple(fields), OP).tobytes()


def test_what_is_due_goes_with_what_came_before_it_and_nothing_else_does():
    framed = Framed(num_blocks=0, frame_rows=64)
    early, late = framed.begin("early"), framed.begin("late")
    framed.intake.step(1.0, 1, 0, np.array([[early], [0], [2]]), framed_bytes(2))
    framed.intake.step(2.0, 2, 0, np.array([[late], [0], [3]]), framed_bytes(3))
    assert framed.intake.oldest == 1.0
    framed.intake.tick(1.5)
    assert framed.intake.oldest == 2.0
    framed.intake.tick(2.0)
    assert framed.intake.oldest == np.inf
    framed.seal()
    assert framed.frame_rows == [2, 3]


def framed_bytes(n):
    return np.ascontiguousarray(valid_rows(n)).reshape(n, -1).view(np.uint8)
