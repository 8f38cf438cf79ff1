"""A sink that believes what an engine tells, by sections 1 to 3 of docs/rows.md.

A second look at the engines: it has a dict for the slots and a dict for the rows of each attempt,
and shares no code with the truth. It asserts that the calls are ones that an engine may make.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from oracle.world import EngineSpec


@dataclass
class Heard:
    """What one shard was told of a request."""

    name: str
    prompt_len: int
    blocks: list[int] = field(default_factory=list)
    """Those that it holds, or held last."""
    attempts: list[dict[int, bytes | None]] = field(default_factory=list)
    """Rows by position; None where the KV is there, and its row is not known."""
    lost: list[set[int]] = field(default_factory=list)
    """Of each attempt: positions that were computed, and not captured; nothing rejected them."""
    had: list[int] = field(default_factory=list)
    """Of each attempt: the tokens that its resume told; 0: none."""
    drafts: dict[int, bytes] = field(default_factory=dict)
    """Rows that nothing confirmed yet."""
    unnamed: set[int] = field(default_factory=set)
    """Drafts whose slots stay unknown when they are confirmed."""
    last_step: int = 0
    cached: int = 0
    """Leading tokens whose rows it has yet to inherit."""
    started: int = 0
    """In the order of starts."""
    released: int = 0
    """When it gave up its blocks, by the listener's count of calls."""
    preempted: bool = False
    num_tokens: int | None = None

    @property
    def takes_rows(self) -> bool:
        return not self.preempted and self.num_tokens is None


class Listener:
    """What one shard of one boot of an engine was told.

    Args:
        spec: of the engine.
        log: where every call goes.
    """

    def __init__(self, spec: EngineSpec, log: list[Any]) -> None:
        self.spec = spec
        self.log = log
        self.requests: list[Heard] = []
        self.slots: dict[int, bytes] = {}
        """The row of each slot that names one."""
        self.steps = 0
        self._calls = 0
        self._given: dict[int, int] = {}
        """When a block was newly given to a request, or copied into, by the count of calls."""
        self._copied: dict[int, int] = {}
        """When a block was copied elsewhere."""

    # ------------------------------------------------------------------ slots

    def _slot(self, heard: Heard, position: int) -> int:
        size = self.spec.block_size
        return heard.blocks[position // size] * size + position % size

    def _unname(self, heard: Heard, start: int, stop: int | None = None) -> None:
        """The slots of positions [start, stop) become unknown; without stop, all later ones."""
        end = len(heard.blocks) * self.spec.block_size
        for position in range(start, end if stop is None else stop):
            self.slots.pop(self._slot(heard, position), None)

    def _forget(self, blocks: list[int]) -> None:
        size = self.spec.block_size
        for block in blocks:
            assert 0 <= block < self.spec.num_blocks + self.spec.host_blocks
            for slot in range(block * size, (block + 1) * size):
                self.slots.pop(slot, None)

    def _give(self, blocks: list[int]) -> None:
        """Blocks are newly given to a request."""
        assert all(block < self.spec.num_blocks for block in blocks)
        held = {b for h in self.requests if h.takes_rows for b in h.blocks}
        assert not held & {*blocks}, "two requests hold a new block"
        self._calls += 1
        self._given.update(dict.fromkeys(blocks, self._calls))
        self._forget(blocks)

    # ------------------------------------------------------------------ rows of a request

    def _start(self, heard: Heard, computed: int, external: int, blocks: list[int]) -> None:
        size = self.spec.block_size
        assert 0 <= external <= computed < len(blocks) * size + 1
        known = computed - external
        if known % size:  # only full blocks are shared, and the last one of a request that ends
            assert not external
            shared = blocks[known // size]
            assert any(
                h.takes_rows and shared in h.blocks and h.prompt_len == known for h in self.requests
            )
        self._give(blocks[-(-known // size) :])
        heard.blocks, heard.preempted = list(blocks), False
        self._unname(heard, known)
        heard.attempts.append(dict.fromkeys(range(computed)))
        heard.lost.append(set())
        heard.had.append(0)
        heard.cached = known
        heard.started = sum(len(h.attempts) for h in self.requests)

    def _inherit(self, heard: Heard) -> None:
        """Takes the rows that the slots of its cached tokens name by now."""
        size, known = self.spec.block_size, heard.cached
        for position in range(known):
            heard.attempts[-1][position] = self.slots.get(self._slot(heard, position))
        if known % size:
            self._unname(heard, known, known + size - known % size)
        heard.cached = 0

    def _confirm(self, heard: Heard, stop: int) -> None:
        """Drafts before a position were accepted: their slots name them."""
        for position in [p for p in heard.drafts if p < stop]:
            row = heard.drafts.pop(position)
            if position not in heard.unnamed:
                self.slots[self._slot(heard, position)] = row

    def _reject(self, heard: Heard, position: int) -> None:
        """Rows at a position and behind it were never computed, or are computed once more."""
        rows = heard.attempts[-1]
        for p in [p for p in rows if p >= position]:
            del rows[p]
            self.slots.pop(self._slot(heard, p), None)
        heard.drafts = {p: row for p, row in heard.drafts.items() if p < position}
        heard.lost[-1] = {p for p in heard.lost[-1] if p < position}

    def _release(self, heard: Heard, stop: int) -> None:
        """A request gives up its blocks, which were kept up to a position."""
        self._inherit(heard)
        self._confirm(heard, stop)
        self._unname(heard, stop)
        heard.drafts = {}
        self._calls += 1
        heard.released = self._calls

    # ------------------------------------------------------------------ calls about a request

    def begin(self, request_id: str, **told: Any) -> int:
        self.log.append(("begin", request_id, told))
        assert all(h.name != request_id or h.num_tokens is not None for h in self.requests)
        tokens = told["prompt_token_ids"]
        assert tokens is None or len(tokens) == told["prompt_len"]
        heard = Heard(request_id, told["prompt_len"])
        self._start(
            heard, told["num_computed_tokens"], told["num_external_tokens"], told["block_ids"]
        )
        self.requests.append(heard)
        heard.started = sum(len(h.attempts) for h in self.requests)
        return len(self.requests) - 1

    def add_blocks(self, handle: int, block_ids: list[int]) -> None:
        self.log.append(("blocks", handle, block_ids))
        heard = self.requests[handle]
        assert heard.takes_rows
        self._give(block_ids)
        heard.blocks += block_ids

    def rewind(self, handle: int, position: int, *, step: int = 0) -> None:
        self.log.append(("rewind", handle, position, step))
        heard = self.requests[handle]
        assert heard.takes_rows
        if not step or heard.last_step <= step:
            self._inherit(heard)
            self._reject(heard, position)

    def preempt(self, handle: int, num_computed_tokens: int) -> None:
        self.log.append(("preempt", handle, num_computed_tokens))
        heard = self.requests[handle]
        assert heard.takes_rows
        self._release(heard, num_computed_tokens)
        rows, lost = heard.attempts[-1], heard.lost[-1]
        end = max((*rows, *lost), default=-1) + 1
        heard.attempts[-1] = {p: row for p, row in rows.items() if p < num_computed_tokens}
        heard.lost[-1] = {p for p in lost if p < num_computed_tokens}
        heard.lost[-1] |= {*range(end, num_computed_tokens)}  # their rows come late
        heard.preempted = True

    def resume(
        self,
        handle: int,
        num_computed_tokens: int,
        *,
        block_ids: list[int],
        num_external_tokens: int = 0,
        num_tokens: int | None = None,
    ) -> None:
        self.log.append(
            ("resume", handle, num_computed_tokens, block_ids, num_external_tokens, num_tokens)
        )
        heard = self.requests[handle]
        assert heard.preempted
        assert heard.num_tokens is None
        kept = max((*heard.attempts[-1], *heard.lost[-1]), default=-1) + 1
        self._start(heard, num_computed_tokens, num_external_tokens, block_ids)
        if num_tokens is not None:
            # Its last token is one that no pass has computed so far.
            assert num_tokens > max(num_computed_tokens, kept)
            assert num_tokens >= max(heard.prompt_len, *heard.had)
            heard.had[-1] = num_tokens

    def finish(
        self,
        handle: int,
        num_tokens: int,
        *,
        reason: str,
        token_ids: Any = None,
        transfer_id: str | None = None,
    ) -> None:
        self.log.append(("finish", handle, num_tokens, reason, token_ids, transfer_id))
        heard = self.requests[handle]
        assert heard.num_tokens is None
        assert num_tokens >= max(heard.had)
        assert token_ids is None or len(token_ids) == num_tokens
        if not heard.preempted:
            self._release(heard, num_tokens - 1)
        heard.num_tokens = num_tokens

    # ------------------------------------------------------------------ calls about the engine

    def mark_external(self, block_ids: list[int]) -> None:
        self.log.append(("external", list(block_ids)))
        self._forget(block_ids)
        for heard in self.requests:
            size = self.spec.block_size
            heard.unnamed |= {p for p in heard.drafts if heard.blocks[p // size] in block_ids}

    def copy_blocks(self, sources: list[int], targets: list[int]) -> None:
        self.log.append(("copy", list(sources), list(targets)))
        assert len(sources) == len(targets) == len({*targets})
        held = {b for h in self.requests if h.takes_rows for b in h.blocks}
        assert not held & {*targets}, "a block of a request is written over"
        size = self.spec.block_size
        rows = [[self.slots.get(block * size + i) for i in range(size)] for block in sources]
        self._forget(targets)
        for block, named in zip(targets, rows, strict=True):
            self.slots |= {block * size + i: row for i, row in enumerate(named) if row is not None}
        self._calls += 1
        self._given.update(dict.fromkeys(targets, self._calls))
        self._copied.update(dict.fromkeys(sources, self._calls))

    def reset_prefix_cache(self) -> None:
        self.log.append("reset")
        first = self.spec.num_blocks * self.spec.block_size
        self.slots = {slot: row for slot, row in self.slots.items() if slot >= first}
        for heard in self.requests:
            heard.unnamed |= {*heard.drafts}

    def reset_external_kv(self) -> None:
        self.log.append("reset external")
        first = self.spec.num_blocks * self.spec.block_size
        self.slots = {slot: row for slot, row in self.slots.items() if slot < first}

    def set_weight_version(self, version: int | None) -> None:
        self.log.append(("version", version))

    # ------------------------------------------------------------------ steps

    def step(self, rows: np.ndarray, runs: np.ndarray) -> int:
        self.log.append((rows.tobytes(), runs.tolist()))
        assert runs[:, 2].sum() == len(rows)
        if not len(rows):
            return 0
        self._pass(runs, [row.tobytes() for row in rows])
        return self.steps

    def skip(self, runs: np.ndarray) -> int:
        self.log.append(("skip", runs.tolist()))
        if not len(runs):
            return 0
        self._pass(runs, [None] * int(runs[:, 2].sum()))
        return self.steps

    def _pass(self, runs: np.ndarray, rows: list[bytes | None]) -> None:
        """One forward pass; rows of None were not captured."""
        self.steps += 1
        left, of = iter(rows), dict[int, dict[int, bytes | None]]()
        for handle, start, count in runs.tolist():
            assert count > 0
            given = of.setdefault(handle, {})
            assert all(p < start for p in given), "positions of a request ascend"
            given.update((p, next(left)) for p in range(start, start + count))
        told = [(self.requests[handle], given) for handle, given in of.items()]
        # Those that inherit come behind those that they may inherit from.
        told.sort(key=lambda one: one[0].started if one[0].cached else 0)
        for heard, given in told:
            if heard.takes_rows:
                self._inherit(heard)
                self._take(heard, given)
            else:
                self._take_late(heard, given)

    def _take(self, heard: Heard, given: dict[int, bytes | None]) -> None:
        first = min(given)
        self._confirm(heard, first)
        self._reject(heard, first)
        heard.unnamed = set()
        heard.last_step = self.steps
        for position, row in given.items():
            slot = self._slot(heard, position)
            self.slots.pop(slot, None)
            if row is None:
                heard.lost[-1].add(position)
                continue
            heard.attempts[-1][position] = row
            if position == first or position < heard.prompt_len:
                self.slots[slot] = row
            else:
                heard.drafts[position] = row

    def _take_late(self, heard: Heard, given: dict[int, bytes | None]) -> None:
        """The request gave up its blocks: nobody knows what the pass left in them."""
        blocks = {heard.blocks[p // self.spec.block_size] for p in given}
        assert all(self._copied.get(block, 0) < heard.released for block in blocks), (
            "a copy of what a pass in flight may have written"
        )
        for position in given:
            block = heard.blocks[position // self.spec.block_size]
            if self._given.get(block, 0) < heard.released:
                self.slots.pop(self._slot(heard, position), None)

    def step_slots(self, rows: np.ndarray, slots: np.ndarray) -> int:
        self.log.append((rows.tobytes(), slots.tolist()))
        assert len(rows) == len(slots) == len(np.unique(slots))
        self.slots.update(zip(slots.tolist(), (row.tobytes() for row in rows), strict=True))
        self.steps += 1
        return self.steps

    # ------------------------------------------------------------------ what it believes

    def taking_rows(self) -> Iterator[Heard]:
        return (heard for heard in self.requests if heard.takes_rows)
