"""A simulated engine with continuous batching, which calls a capture agent.

It has KV blocks, chunked prefill, prefix caching within a step and across sessions, preemption by
recomputation, speculative decoding, and weight updates that empty the cache. Its forward passes
compute rows only.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from types import TracebackType

import numpy as np
import numpy.typing as npt

from routetrace.capture_agent import CaptureAgent
from routetrace.simulation.blocks import BlockPool
from routetrace.simulation.plan import ACCEPTED, BLOCK_SIZE, Load
from routetrace.simulation.rows import REJECTED, Rows
from routetrace.simulation.sessions import Session, Truth, sessions

_Ints = npt.NDArray[np.int64]


class Stopwatch:
    """Total CPU time of this thread inside `with` blocks."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._begun = 0.0

    def __enter__(self) -> None:
        self._begun = time.thread_time()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.seconds += time.thread_time() - self._begun


class Engine:
    """A simulated engine with an endless supply of sessions.

    A lane is a place in the batch. The state of lanes is in arrays, so that a step of decoding
    requests costs a few numpy calls.

    Args:
        load: the parameters.
        number: number of the engine.
        recorder: its capture agent.
        rows: source of its rows.
        on_begin: called with the name of each session that begins.
        on_end: called with the truth of each session that has ended.
    """

    def __init__(
        self,
        load: Load,
        number: int,
        recorder: CaptureAgent,
        rows: Rows,
        on_begin: Callable[[str], None],
        on_end: Callable[[Truth], None],
    ) -> None:
        self._load = load
        self._recorder = recorder
        self._rows = rows
        self._on_begin, self._on_end = on_begin, on_end
        self._rng = np.random.default_rng([load.seed, number, 1])
        self._pool = BlockPool(load.num_blocks)
        # Author of each cached block.
        self._block_author = [0] * load.num_blocks
        self._new = sessions(load, number)
        self._waiting: deque[Session] = deque()
        self._sessions: list[Session | None] = [None] * load.batch
        self._blocks: list[list[int]] = [[] for _ in range(load.batch)]
        self._next_author = number << 40
        self._version = 0
        self._admissions = 0
        # By lane. A lane without a session has known == computed == 0.
        arrays = np.zeros((8, load.batch), np.int64)
        self._handle, self._author, self._computed, self._known = arrays[:4]
        self._target, self._room, self._registered, self._age = arrays[4:]
        self.counts = dict.fromkeys(
            ("steps", "rows", "tokens", "sessions", "requests", "cached_tokens", "preemptions",
             "rejected_drafts", "weight_updates", "aborted"), 0,
        )  # fmt: skip
        recorder.set_weight_version(self._version)
        self.recording = Stopwatch()
        """CPU time in calls of the capture agent: the cost of tracing on the engine's thread."""

    # ------------------------------------------------------------------ a step

    def step(self) -> int:
        """Run one forward pass; return the number of rows it computed."""
        load = self._load
        if load.preemptions and self._rng.random() < load.preemptions / 1000:
            self._preempt(self._newest())
        counts = self._schedule()
        lanes = np.flatnonzero(counts)
        sizes, starts = counts[lanes], self._computed[lanes]
        kept = self._kept(lanes, sizes)
        total = int(sizes.sum())
        offsets = np.arange(total) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        authors = np.repeat(self._author[lanes], sizes)
        rejected = offsets >= np.repeat(kept, sizes)
        authors[rejected] |= REJECTED
        rows = self._rows.of(authors, np.repeat(starts, sizes) + offsets)
        with self.recording:
            self._recorder.step(rows, np.stack([self._handle[lanes], starts, sizes], axis=1))
        self.counts["steps"] += 1
        self.counts["rows"] += total
        self.counts["rejected_drafts"] += int(rejected.sum())
        self._settle(lanes, starts + kept)
        return total

    def update_weights(self) -> None:
        """Switch to the next weight version and empty the prefix cache."""
        self._version += 1
        self.counts["weight_updates"] += 1
        self._pool.reset()
        with self.recording:
            self._recorder.reset_prefix_cache()
            self._recorder.set_weight_version(self._version)
        for lane in np.flatnonzero(self._known).tolist():
            computed = int(self._computed[lane])
            self._session(lane).mark(computed, int(self._author[lane]), self._version)
            # A block computed by both versions is not shared.
            self._registered[lane] = -(-computed // BLOCK_SIZE)

    def stop(self) -> None:
        """Abort running requests and drop queued ones."""
        for lane in np.flatnonzero(self._known).tolist():
            self._end(lane, int(self._known[lane]), "abort")
        for session in self._waiting:
            if session.begun:
                self._record_end(session, session.known, "abort", whole=False)
            elif session.turn:  # between two turns
                self._on_end(session.truth(session.turns[session.turn - 1][1], time.monotonic()))
        self._waiting.clear()

    # ------------------------------------------------------------------ scheduling

    def _schedule(self) -> _Ints:
        """Return the number of rows of each lane in the next step."""
        load = self._load
        left = self._known - self._computed
        counts = np.zeros(load.batch, np.int64)
        decoding = left == 1
        counts[decoding] = 1
        if load.drafts:
            most = self._target[decoding] - self._known[decoding] - 1
            counts[decoding] += np.clip(most, 0, load.drafts)
        budget = load.prefill
        prefilling = np.flatnonzero(left > 1).tolist()
        for lane in prefilling:
            counts[lane] = min(int(left[lane]), budget)
            budget -= int(counts[lane])
        short = np.flatnonzero(self._computed + counts > self._room)
        for lane in short.tolist():
            self._extend(lane, counts)
        # After the last preemption: a registered block must be computed in this step.
        for lane in prefilling:
            self._register(lane, int(self._computed[lane] + counts[lane]))
        self._admit(counts, budget)
        return counts

    def _extend(self, lane: int, counts: _Ints) -> None:
        """Give a lane the blocks it needs, preempting others if necessary."""
        while counts[lane]:
            need = int(self._computed[lane] + counts[lane] - self._room[lane])
            count = -(-need // BLOCK_SIZE)
            if count <= self._pool.num_free:
                if count > 0:
                    blocks = self._pool.take(count)
                    self._blocks[lane] += blocks
                    self._room[lane] += count * BLOCK_SIZE
                    with self.recording:
                        self._recorder.add_blocks(int(self._handle[lane]), blocks)
                return
            victim = self._newest()
            counts[victim] = 0
            self._preempt(victim)

    def _kept(self, lanes: _Ints, sizes: _Ints) -> _Ints:
        """Return the kept rows of each run: drafts up to the first wrong one."""
        drafts = self._load.drafts
        if not drafts:
            return sizes
        right = self._rng.random((len(lanes), drafts)) < ACCEPTED
        accepted = np.cumprod(right, axis=1).sum(axis=1)
        decoding = self._known[lanes] - self._computed[lanes] == 1
        return np.where(decoding, np.minimum(sizes, 1 + accepted), sizes)

    def _settle(self, lanes: _Ints, computed: _Ints) -> None:
        """Apply the outcome of a step: positions computed, tokens sampled, requests ended."""
        self._computed[lanes] = computed
        sampled = lanes[computed >= self._known[lanes]]
        self.counts["tokens"] += int((self._computed[sampled] + 1 - self._known[sampled]).sum())
        self._known[sampled] = self._computed[sampled] + 1
        full = lanes[computed // BLOCK_SIZE > self._registered[lanes]]
        for lane in full.tolist():
            self._register(lane, int(self._computed[lane]))
        for lane in sampled[self._known[sampled] >= self._target[sampled]].tolist():
            self._end(lane, int(self._target[lane]), "stop")

    def _register(self, lane: int, stop: int) -> None:
        """Cache the full blocks of a lane before position `stop`."""
        first, last = int(self._registered[lane]), stop // BLOCK_SIZE
        if last <= first:
            return
        blocks, author = self._blocks[lane], int(self._author[lane])
        keys = self._session(lane).keys(first * BLOCK_SIZE, stop)
        for number, key in zip(range(first, last), keys, strict=True):
            self._pool.register(blocks[number], key)
            self._block_author[blocks[number]] = author
        self._registered[lane] = last

    # ------------------------------------------------------------------ requests

    def _admit(self, counts: _Ints, budget: int) -> None:
        """Begin and resume requests while lanes, prompt tokens and blocks are available."""
        for lane in np.flatnonzero(self._known == 0).tolist():
            if budget <= 0:
                return
            session = self._waiting.popleft() if self._waiting else next(self._new)
            count = self._start(lane, session, budget)
            if not count:
                self._waiting.appendleft(session)
                return
            counts[lane] = count
            budget -= count

    def _start(self, lane: int, session: Session, budget: int) -> int:
        """Give a request a lane; return its rows in this step, 0 for lack of blocks."""
        prompt, target = session.turns[session.turn]
        known = session.known if session.begun else prompt
        # At least one token is computed, for its logits.
        blocks = self._pool.hit(session.keys(0, known - 1))
        hit = len(blocks)
        cached = hit * BLOCK_SIZE
        count = min(known - cached, budget)
        fresh = -(-(cached + count) // BLOCK_SIZE) - hit
        if fresh > self._pool.num_free:
            self._pool.release(blocks)
            return 0
        blocks += self._pool.take(fresh)
        owner = -1
        for number in range(hit):
            if (author := self._block_author[blocks[number]]) != owner:
                owner = author
                session.mark(number * BLOCK_SIZE, author, self._version)
            session.settle((number + 1) * BLOCK_SIZE)
        self._next_author += 1
        session.mark(cached, self._next_author, self._version)
        self._record_start(session, cached, blocks)
        self._sessions[lane], self._blocks[lane] = session, blocks
        self._admissions += 1
        for array, value in (
            (self._handle, session.handle),
            (self._author, self._next_author),
            (self._computed, cached),
            (self._known, known),
            (self._target, target),
            (self._room, len(blocks) * BLOCK_SIZE),
            (self._registered, hit),
            (self._age, self._admissions),
        ):
            array[lane] = value
        self.counts["cached_tokens"] += cached
        self._register(lane, cached + count)
        return count

    def _record_start(self, session: Session, cached: int, blocks: list[int]) -> None:
        if session.begun:
            with self.recording:
                self._recorder.resume(session.handle, cached, block_ids=blocks)
            return
        if not session.turn:
            self.counts["sessions"] += 1
        self.counts["requests"] += 1
        prompt = session.turns[session.turn][0]
        tokens = session.tokens(prompt)
        with self.recording:
            session.handle = self._recorder.begin(
                f"{session.name}-t{session.turn}",
                trace_id=session.name,
                prompt_len=prompt,
                labels={"group": session.group},
                ttl_seconds=self._load.ttl,
                num_computed_tokens=cached,
                block_ids=blocks,
                prompt_token_ids=tokens,
            )
        session.begun = True
        if not session.turn:
            self._on_begin(session.name)

    def _newest(self) -> int:
        """Return the lane of the most recently admitted request."""
        return int(np.argmax(self._age))

    def _preempt(self, lane: int) -> None:
        if not self._known[lane]:
            return
        session, computed = self._session(lane), int(self._computed[lane])
        self.counts["preemptions"] += 1
        with self.recording:
            self._recorder.preempt(session.handle, computed)
        session.settle(computed)
        session.known = int(self._known[lane])
        self._leave(lane)
        self._waiting.appendleft(session)

    def _end(self, lane: int, num_tokens: int, reason: str) -> None:
        session, computed = self._session(lane), int(self._computed[lane])
        session.settle(computed)
        self._leave(lane)
        whole = computed == num_tokens - 1
        self._record_end(session, num_tokens, reason, whole)

    def _record_end(self, session: Session, num_tokens: int, reason: str, whole: bool) -> None:
        tokens = session.tokens(num_tokens)
        with self.recording:
            self._recorder.finish(session.handle, num_tokens, reason=reason, token_ids=tokens)
        session.begun = False
        session.turn += 1
        if reason == "stop" and session.turn < len(session.turns):
            self._waiting.append(session)
            return
        self.counts["aborted"] += reason == "abort"
        self._on_end(session.truth(num_tokens if whole else 0, time.monotonic()))

    def _leave(self, lane: int) -> None:
        self._pool.release(self._blocks[lane])
        self._sessions[lane], self._blocks[lane] = None, []
        for array in (self._computed, self._known, self._target, self._room, self._age):
            array[lane] = 0

    def _session(self, lane: int) -> Session:
        session = self._sessions[lane]
        assert session is not None
        return session
