"""A small simulated engine for tests, with random rows and the truth in memory.

It has prefix caching by tokens, LRU reuse of blocks, chunked prefill, speculative decoding with
rejected drafts, preemption by recomputation, aborts and weight updates. Every forward pass draws
new random rows, so a row in the wrong place shows. `engine.Engine` is the fast one for loads.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from routetrace.capture_agent import CaptureAgent
from routetrace.common.layout import ModelLayout
from routetrace.simulation.blocks import BlockPool

#: A row and the weight version that computed it; None if the KV entry has no known row.
Entry = tuple[npt.NDArray[np.unsignedinteger[Any]], int] | None

#: Token ids are below this, so that prompts and drafts coincide often.
_VOCABULARY = 4
_MAX_RUNNING = 5


@dataclass
class SmallRequest:
    """One request, its tokens so far, and its rows."""

    name: str
    tokens: list[int]
    max_tokens: int
    """Tokens to sample."""
    prompt_len: int
    handle: int = -1
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    """Positions with a valid KV entry."""
    reported: int = 0
    """One past the last position handed to the sink."""
    begun: bool = False
    attempts: list[dict[int, Entry]] = field(default_factory=list)
    """Entry by position for each attempt, without rejected drafts."""

    def truth(self, policy: str) -> dict[int, Entry]:
        """Return the entry by position that a read with this policy must give."""
        rows: dict[int, Entry] = {}
        attempts = self.attempts[::-1]
        if policy == "as_sampled":
            attempts = self.attempts[self._first_that_sampled() :]
        for attempt in attempts:
            for position, row in attempt.items():
                if rows.get(position) is None and position < len(self.tokens) - 1:
                    rows[position] = row
        return rows

    def _first_that_sampled(self) -> int:
        """The first attempt that reached the last token of the prompt; the last if none did."""
        last = self.prompt_len - 1
        for number, attempt in enumerate(self.attempts):
            if any(p >= last and row is not None for p, row in attempt.items()):
                return number
        return max(0, len(self.attempts) - 1)


class SmallEngine:
    """An engine that reports to a sink and keeps the truth.

    Args:
        sink: a capture agent, or an object with its methods.
        layout: columns of the rows.
        seed: random seed.
        num_blocks: KV blocks.
        block_size: slots of a block.
        draft_tokens: maximum drafts per decoding step.
    """

    def __init__(
        self,
        sink: CaptureAgent,
        layout: ModelLayout,
        seed: int,
        *,
        num_blocks: int = 24,
        block_size: int = 4,
        draft_tokens: int = 3,
    ) -> None:
        self.sink = sink
        self.layout = layout
        self.rng = random.Random(seed)
        self.np_rng = np.random.default_rng(seed)
        self.block_size = block_size
        self.draft_tokens = draft_tokens
        self.pool = BlockPool(num_blocks)
        self.slots: dict[int, Entry] = {}
        self.waiting: list[SmallRequest] = []
        self.running: list[SmallRequest] = []
        self.done: list[SmallRequest] = []
        self.version = 0
        sink.set_weight_version(self.version)
        self.counts: dict[str, int] = dict.fromkeys(
            ("rows", "preemptions", "rewinds", "cached", "updates", "aborts"), 0
        )

    def submit(self, name: str, prompt: list[int], max_tokens: int) -> None:
        """Queue a request."""
        self.waiting.append(SmallRequest(name, list(prompt), max_tokens, len(prompt)))

    def step(self) -> bool:
        """Run one step; return whether requests remain."""
        rng = self.rng
        if rng.random() < 0.02:
            self.version += 1
            self.counts["updates"] += 1
            self.sink.set_weight_version(self.version)
        while self.waiting and len(self.running) < _MAX_RUNNING and rng.random() < 0.8:
            if not self._admit(self.waiting[0]):
                break
            self.running.append(self.waiting.pop(0))
        if self.running and rng.random() < 0.02:
            self.counts["aborts"] += 1
            self._finish(rng.choice(self.running), "abort")
        scheduled: list[tuple[SmallRequest, int, list[int]]] = []
        for request in list(self.running):
            if request not in self.running or rng.random() < 0.1:
                continue
            left = len(request.tokens) - request.computed
            drafts: list[int] = []
            if left == 1:
                count = rng.randint(0, self.draft_tokens)
                drafts = [rng.randrange(_VOCABULARY) for _ in range(count)]
            count = min(left, rng.randint(1, 9)) + len(drafts)
            while len(request.blocks) * self.block_size < request.computed + count:
                block = self._allocate()
                if block is None:
                    victim = self.running[-1]
                    self._preempt(victim)
                    scheduled = [s for s in scheduled if s[0] is not victim]
                    if victim is request:
                        break
                    continue
                request.blocks.append(block)
                self.sink.add_blocks(request.handle, [block])
            if request in self.running:
                scheduled.append((request, count, drafts))
        if scheduled:
            self._forward(scheduled)
        return bool(self.running or self.waiting)

    # ------------------------------------------------------------------ blocks

    def _allocate(self) -> int | None:
        if not self.pool.num_free:
            return None
        (block,) = self.pool.take(1)
        for offset in range(self.block_size):
            self.slots[block * self.block_size + offset] = None
        return block

    def _hit(self, tokens: list[int]) -> list[int]:
        """Take the cached blocks of a prefix that leaves at least one token to compute."""
        ends = range(self.block_size, len(tokens), self.block_size)
        return self.pool.hit(tuple(tokens[:end]) for end in ends)

    def _release(self, request: SmallRequest) -> None:
        self.pool.release(request.blocks)
        request.blocks = []

    def _register(self, request: SmallRequest) -> None:
        known = min(request.computed, len(request.tokens))
        for i in range(known // self.block_size):
            key = tuple(request.tokens[: (i + 1) * self.block_size])
            self.pool.register(request.blocks[i], key)

    def _slot(self, request: SmallRequest, position: int) -> int:
        block = request.blocks[position // self.block_size]
        return block * self.block_size + position % self.block_size

    # ------------------------------------------------------------------ requests

    def _admit(self, request: SmallRequest) -> bool:
        hit = request.blocks = self._hit(request.tokens)
        first = self._allocate()
        if first is None:
            self._release(request)
            return False
        request.blocks = [*hit, first]
        request.computed = len(hit) * self.block_size
        request.attempts.append(
            {p: self.slots[self._slot(request, p)] for p in range(request.computed)}
        )
        self.counts["cached"] += request.computed
        if request.begun:
            self.sink.resume(request.handle, request.computed, block_ids=request.blocks)
        else:
            request.handle = self.sink.begin(
                request.name,
                prompt_len=request.prompt_len,
                num_computed_tokens=request.computed,
                block_ids=request.blocks,
                labels={"sample": request.name},
            )
            request.begun = True
        request.reported = request.computed
        return True

    def _preempt(self, request: SmallRequest) -> None:
        self.counts["preemptions"] += 1
        self._reject(request)
        self.sink.preempt(request.handle, request.computed)
        self._release(request)
        self.running.remove(request)
        self.waiting.insert(0, request)

    def _reject(self, request: SmallRequest) -> None:
        """Drop the rejected drafts of the last step; engines report them one step late."""
        self._forget_drafts(request)
        if request.reported > request.computed:
            self.counts["rewinds"] += 1

    def _forget_drafts(self, request: SmallRequest) -> None:
        for position in [p for p in request.attempts[-1] if p >= request.computed]:
            del request.attempts[-1][position]

    def _finish(self, request: SmallRequest, reason: str) -> None:
        self._reject(request)
        self.sink.finish(request.handle, len(request.tokens), reason=reason)
        self._release(request)
        self.running.remove(request)
        self.done.append(request)

    # ------------------------------------------------------------------ a forward pass

    def _forward(self, scheduled: list[tuple[SmallRequest, int, list[int]]]) -> None:
        total = sum(count for _, count, _ in scheduled)
        rows = self._draw(total)
        runs = []
        at = 0
        for request, count, _ in scheduled:
            if request.reported > request.computed:
                self.sink.rewind(request.handle, request.computed)
            self._forget_drafts(request)
            runs.append((request.handle, request.computed, count))
            for i in range(count):
                entry = (rows[at + i], self.version)
                request.attempts[-1][request.computed + i] = entry
                self.slots[self._slot(request, request.computed + i)] = entry
            request.reported = request.computed + count
            at += count
        self.counts["rows"] += total
        self.sink.step(rows, np.array(runs, np.int64))
        for request, count, drafts in scheduled:
            self._sample(request, count, drafts)

    def _sample(self, request: SmallRequest, count: int, drafts: list[int]) -> None:
        if count < len(request.tokens) - request.computed:
            request.computed += count
            self._register(request)
            return
        accepted = 0
        while accepted < len(drafts) and self.rng.random() < 0.6:
            accepted += 1
        request.tokens += drafts[:accepted]
        request.computed = len(request.tokens)
        request.tokens.append(self.rng.randrange(_VOCABULARY))
        if accepted < len(drafts):
            self.counts["rewinds"] += 1
        self._register(request)
        if len(request.tokens) - request.prompt_len >= request.max_tokens:
            # A stop inside accepted drafts cuts tokens that are already computed.
            request.tokens = request.tokens[: request.prompt_len + request.max_tokens]
            request.computed = min(request.computed, len(request.tokens))
            self._finish(request, "length")

    def _draw(self, count: int) -> npt.NDArray[np.unsignedinteger[Any]]:
        layout = self.layout
        keys = self.np_rng.random((count, len(layout.layer_ids), layout.num_experts))
        return np.argsort(keys, axis=-1)[..., : layout.top_k].astype(layout.dtype)
