"""A simulated engine that behaves as badly as real ones do, and knows the truth.

It has a block pool with prefix caching by token prefix, LRU reuse, chunked prefill, speculative
decoding with rejected drafts, preemption by recomputation, and weight updates. Every forward pass
draws new random rows: a row served in the wrong place shows. It reports to a sink with the methods
of CaptureAgent.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np

from routetrace.v1.layout import RoutingLayout


@dataclass
class SimRequest:
    name: str
    tokens: list[int]
    max_tokens: int
    prompt_len: int
    handle: int = -1
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    reported: int = 0  # one past the last position that was handed to the sink
    running: bool = False
    begun: bool = False
    # position -> (row, weight version); None: the KV was there and nobody knows who computed it.
    # The first attempt that has a position wins; rejected drafts are taken out again.
    attempts: list[dict[int, tuple[np.ndarray, int] | None]] = field(default_factory=list)

    def truth(self, policy: str) -> dict[int, tuple[np.ndarray, int] | None]:
        rows: dict[int, tuple[np.ndarray, int] | None] = {}
        attempts = self.attempts if policy == "as_sampled" else self.attempts[::-1]
        for attempt in attempts:
            for position, row in attempt.items():
                if rows.get(position) is None and position < len(self.tokens) - 1:
                    rows[position] = row
        return rows


class SimEngine:
    def __init__(
        self,
        sink,
        layout: RoutingLayout,
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
        self.refs = [0] * num_blocks
        self.free: OrderedDict[int, None] = OrderedDict((i, None) for i in range(num_blocks))
        self.cached: dict[tuple[int, ...], int] = {}
        self.key_of: dict[int, tuple[int, ...]] = {}
        self.slots: dict[int, tuple[np.ndarray, int] | None] = {}
        self.waiting: list[SimRequest] = []
        self.running: list[SimRequest] = []
        self.done: list[SimRequest] = []
        self.version = 0
        self.counts: dict[str, int] = dict.fromkeys(
            ("rows", "preemptions", "rewinds", "cached", "updates", "aborts"), 0
        )

    # ------------------------------------------------------------------ blocks

    def _allocate(self) -> int | None:
        if not self.free:
            return None
        block, _ = self.free.popitem(last=False)
        key = self.key_of.pop(block, None)
        if key is not None:
            del self.cached[key]
        self.refs[block] = 1
        for offset in range(self.block_size):
            self.slots[block * self.block_size + offset] = None
        return block

    def _hit(self, tokens: list[int]) -> list[int]:
        blocks = []
        for end in range(self.block_size, len(tokens), self.block_size):
            block = self.cached.get(tuple(tokens[:end]))
            if block is None:
                break
            blocks.append(block)
        return blocks

    def _release(self, request: SimRequest) -> None:
        for block in reversed(request.blocks):
            self.refs[block] -= 1
            if not self.refs[block]:
                self.free[block] = None
        request.blocks = []

    def _register(self, request: SimRequest) -> None:
        known = min(request.computed, len(request.tokens))
        for i in range(known // self.block_size):
            key = tuple(request.tokens[: (i + 1) * self.block_size])
            block = request.blocks[i]
            if key not in self.cached and block not in self.key_of:
                self.cached[key] = block
                self.key_of[block] = key

    def slot(self, request: SimRequest, position: int) -> int:
        block = request.blocks[position // self.block_size]
        return block * self.block_size + position % self.block_size

    # ------------------------------------------------------------------ requests

    def submit(self, name: str, prompt: list[int], max_tokens: int) -> None:
        self.waiting.append(SimRequest(name, list(prompt), max_tokens, len(prompt)))

    def _admit(self, request: SimRequest) -> bool:
        hit = self._hit(request.tokens)
        for block in hit:
            if not self.refs[block]:
                del self.free[block]
            self.refs[block] += 1
        request.blocks = hit
        first = self._allocate()
        if first is None:
            self._release(request)
            return False
        request.blocks = [*hit, first]
        request.computed = len(hit) * self.block_size
        request.attempts.append(
            {p: self.slots[self.slot(request, p)] for p in range(request.computed)}
        )
        self.counts["cached"] += request.computed
        if request.begun:
            self.sink.resume(request.handle, request.computed, request.blocks)
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

    def _preempt(self, request: SimRequest) -> None:
        self.counts["preemptions"] += 1
        self._reject(request)
        self.sink.preempt(request.handle, request.computed)
        self._release(request)
        self.running.remove(request)
        self.waiting.insert(0, request)

    def _reject(self, request: SimRequest) -> None:
        """Drafts of the last step that were not kept; told one step late, as engines do."""
        for position in [p for p in request.attempts[-1] if p >= request.computed]:
            del request.attempts[-1][position]
        if request.reported > request.computed:
            self.counts["rewinds"] += 1

    def _finish(self, request: SimRequest, reason: str) -> None:
        self._reject(request)
        self.sink.finish(request.handle, len(request.tokens), reason)
        self._release(request)
        self.running.remove(request)
        self.done.append(request)

    # ------------------------------------------------------------------ a step

    def step(self) -> bool:
        rng = self.rng
        if rng.random() < 0.02:
            self.version += 1
            self.counts["updates"] += 1
            self.sink.set_weight_version(self.version)
        while self.waiting and len(self.running) < 5 and rng.random() < 0.8:
            if not self._admit(self.waiting[0]):
                break
            self.running.append(self.waiting.pop(0))
        if self.running and rng.random() < 0.02:
            self.counts["aborts"] += 1
            self._finish(rng.choice(self.running), "abort")
        scheduled: list[tuple[SimRequest, int, list[int]]] = []
        for request in list(self.running):
            if request not in self.running or rng.random() < 0.1:
                continue
            left = len(request.tokens) - request.computed
            drafts: list[int] = []
            if left == 1:
                # The real tokens, had they been known, as often as not.
                drafts = [rng.randrange(4) for _ in range(rng.randint(0, self.draft_tokens))]
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

    def _forward(self, scheduled: list[tuple[SimRequest, int, list[int]]]) -> None:
        rng = self.rng
        total = sum(count for _, count, _ in scheduled)
        rows = self._draw(total)
        runs = []
        at = 0
        for request, count, _ in scheduled:
            if request.reported > request.computed:
                self.sink.rewind(request.handle, request.computed)
            for p in [p for p in request.attempts[-1] if p >= request.computed]:
                del request.attempts[-1][p]
            runs.append((request.handle, request.computed, count))
            for i in range(count):
                entry = (rows[at + i], self.version)
                request.attempts[-1][request.computed + i] = entry
                self.slots[self.slot(request, request.computed + i)] = entry
            request.reported = request.computed + count
            at += count
        self.counts["rows"] += total
        self.sink.step(rows, np.array(runs, np.int64))
        for request, count, drafts in scheduled:
            known = len(request.tokens) - request.computed
            if count < known:
                request.computed += count
                self._register(request)
                continue
            accepted = 0
            while accepted < len(drafts) and rng.random() < 0.6:
                accepted += 1
            request.tokens += drafts[:accepted]
            request.computed = len(request.tokens)
            request.tokens.append(rng.randrange(4))
            if accepted < len(drafts):
                self.counts["rewinds"] += 1
            self._register(request)
            if len(request.tokens) - request.prompt_len >= request.max_tokens:
                # A stop inside accepted drafts cuts tokens that were computed already.
                request.tokens = request.tokens[: request.prompt_len + request.max_tokens]
                request.computed = min(request.computed, len(request.tokens))
                self._finish(request, "length")

    def _draw(self, n: int) -> np.ndarray:
        layout = self.layout
        keys = self.np_rng.random((n, len(layout.layer_ids), layout.num_experts))
        return np.argsort(keys, axis=-1)[..., : layout.top_k].astype(layout.dtype)
