"""One simulated engine: block pool, prefix cache, scheduler, forward passes.

It knows what is true because it is what happens: which forward pass computed the KV entry in each
slot, which drafts it rejected. What it tells comes later, in the orders in which engines tell it.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from oracle.kv_version import KvVersion
from oracle.pool import Pool
from oracle.request import Line, Request
from oracle.truth import (
    CUT,
    ENDS_PER_TRACE,
    NOBODY,
    Attempt,
    Bound,
    Record,
    RowStore,
    digest_positions,
    end_positions,
)
from oracle.world import EngineSpec, Shard, World
from routetrace.codec.records import UNKNOWN_VERSION
from routetrace.common.layout import ModelLayout

VOCABULARY = 4
"""Small, so that branches sample the same tokens for a while and drafts are accepted."""


@dataclass(frozen=True)
class Chances:
    """Probabilities of what happens to an engine, per step or per occasion."""

    abort: float = 0.01
    skip: float = 0.1
    """A running request is not scheduled."""
    external_in_place: float = 0.01
    host_write: float = 0.3
    """Cached blocks are copied to the host tier."""
    not_captured: float = 0.02
    """The routing of a pass is not captured."""
    redo: float = 0.05
    """A request computes its last tokens once more."""
    accept: float = 0.6
    """A draft token is the right one."""
    rewind_untold: float = 0.3
    """A rewind is left to the next rows, which start lower."""
    lag: float = 0.3
    """A shard is not told anything for the moment."""
    update: float = 0.01
    update_aborts: float = 0.3
    update_resets: float = 0.3
    """An update empties the prefix cache; and, apart from that, the memory of the CPU."""
    reset: float = 0.005
    no_version: float = 0.1
    """An update of the weights comes without their version."""
    late_version: float = 0.02
    """A version that did not come with its update comes now."""
    crash: float = 0.002
    mark: float = 0.1
    """A request has other labels than its tokens had before."""
    branch: float = 0.0
    """Another request begins with a block that accepted drafts have just filled."""
    preempt: float = 0.0
    """A running request is preempted, though there is room."""


@dataclass
class Run:
    """The rows of one request in one step."""

    request: Request
    attempt: Attempt
    start: int
    numbers: np.ndarray
    slots: np.ndarray
    held: np.ndarray
    """Rows that were in these slots before."""
    before: np.ndarray
    """Rows that the request had from there on."""
    drafts: int
    """How many of the last rows are of draft tokens."""
    kept: int
    """One past the last position that was not rejected."""
    ahead: list[int]
    """Tokens after it."""
    lines: list[Line] = field(default_factory=list)
    """Whose rows they are; known once they are told."""
    told: bool = False
    """Whether the request could still take them."""

    @property
    def stop(self) -> int:
        return self.start + len(self.numbers)


@dataclass
class Step:
    """One forward pass."""

    number: int
    runs: list[Run]
    told: bool = False


class Engine:
    """One engine, over all its boots.

    Args:
        spec: of which kind it is.
        layout: of the cluster's rows.
        store: where its rows go.
        world: where its agents come from.
        rng: of its choices.
        chances: of what happens to it.
        counts: of what happened; shared by all engines.
        before_begin: called with a record before it begins.
        on_bind: called with the trace id of a bound request, and what is true of it.
        elsewhere: the weights of which KV is that comes from a store of many engines.
    """

    def __init__(
        self,
        spec: EngineSpec,
        layout: ModelLayout,
        store: RowStore,
        world: World,
        rng: random.Random,
        chances: Chances,
        counts: dict[str, int],
        before_begin: Callable[[Engine, Record], None],
        on_bind: Callable[[str, Bound], None],
        elsewhere: Callable[[], int],
    ) -> None:
        self.spec = spec
        self.layout = layout
        self.store = store
        self.world = world
        self.rng = rng
        self.chances = chances
        self.counts = counts
        self.before_begin = before_begin
        self.on_bind = on_bind
        self.elsewhere = elsewhere
        held = {layer for shard in spec.shards for layer in shard.layer_ids}
        self.columns = layout.columns(sorted(held))
        self.alone = all(shard.size == 1 for shard in spec.shards)
        """Whether no positions are dealt among ranks."""
        assert self.alone or not spec.slot_only_twin, "ranks count their steps differently"
        assert not (spec.host_blocks and spec.slot_only_twin), "a twin names other rows"
        self.version = 0
        """Of its weights."""
        self.told_version: int | None = 0 if spec.tells_versions else None
        """As its agents know it."""
        self.boots = 0
        self.waiting: list[Request] = []
        self.done: list[Request] = []
        """Ended since somebody looked."""
        self.filled: list[Request] = []
        """Requests whose accepted drafts filled a block in the last step."""
        self.boot()

    def boot(self) -> None:
        """Starts with an empty cache and new agents."""
        spec = self.spec
        self.boots += 1
        self.boot_id = f"{spec.engine_id}-boot{self.boots}"
        self.pool = Pool(spec, self.counts)
        self.running: list[Request] = []
        self.flying: Step | None = None
        self.untold: list[Step] = []
        """Passes that wrote to slots, and whose rows were not told yet."""
        self.steps = 0
        self.ends: dict[str, deque[set[int]]] = {}
        self.loaded: list[int] = []
        """Blocks whose loading the slot-only agents are still to be told."""
        self.lines = [self._connect(spec, shard) for shard in spec.shards]
        self.twins: list[Line] = []
        if spec.slot_only_twin:
            twin = replace(spec, engine_id=f"{spec.engine_id}-slots")
            self.twins = [self._connect(twin, shard) for shard in spec.shards]
        self.proves = KvVersion(spec.empties == "declared", spec.host_blocks > 0)
        if self.told_version is not None:
            self._tell_version(self.told_version)

    def _connect(self, spec: EngineSpec, shard: Shard) -> Line:
        sink = self.world.connect(spec, shard, self.boot_id)
        return Line(sink, shard, self.layout.columns(list(shard.layer_ids)))

    @property
    def capacity(self) -> int:
        """Tokens that fit, with what drafts and steps in flight need beyond."""
        spec = self.spec
        return (spec.num_blocks - 1) * spec.block_size - 2 * (spec.draft_tokens + 2)

    def held(self) -> list[tuple[list[int], np.ndarray]]:
        """Blocks of running requests, and the numbers of the rows that their slots name."""
        for run in self.flying.runs if self.flying else ():
            if not run.told and (run.before != NOBODY).any():
                return []  # it has overwritten rows, and nobody was told
        size = self.pool.block_size
        of = [
            (r.blocks, self.pool.slots_of(r.blocks, 0, len(r.blocks) * size)) for r in self.running
        ]
        hosts = sorted(self.pool.host.values())
        of.append((hosts, self.pool.slots_of(hosts, 0, len(hosts) * size)))
        named = self.named_slots()
        return [(list(b), named[slots]) for b, slots in of if b]

    def named_slots(self) -> np.ndarray:
        """Numbers of the rows that all slots name."""
        return self._named(self.pool.slots)

    def _named(self, numbers: np.ndarray) -> np.ndarray:
        """Numbers of the rows in all slots, without those that the slots do not name."""
        return self.store.in_slots(numbers, self.pool.copied)

    @property
    def idle(self) -> bool:
        return not (self.running or self.waiting or self.flying)

    @property
    def begun(self) -> list[Request]:
        """Requests that have begun and not ended."""
        return [*self.running, *(r for r in self.waiting if r.record)]

    def submit(self, request: Request, *, next_one: bool = False) -> None:
        self.waiting.insert(0 if next_one else len(self.waiting), request)

    # ------------------------------------------------------------------ what is told

    def deliver(self) -> None:
        """Tells everything that was held back."""
        for line in (*self.lines, *self.twins):
            line.deliver()

    def _deliver_some(self) -> None:
        """Tells some shards something, in any order among them."""
        lines = [*self.lines, *self.twins]
        self.rng.shuffle(lines)
        for line in lines:
            late = len(lines) > 1 and self.rng.random() < self.chances.lag
            line.deliver(self.rng.randrange(len(line) + 1) if late else None)

    def _tell(self, method: str, *args: Any) -> None:
        """All agents, the slot-only ones too."""
        for line in (*self.lines, *self.twins):
            line.tell(method, *args)

    def _about(self, method: str, request: Request, *args: Any, **named: Any) -> None:
        for line in self.lines:
            line.about(method, request, *args, **named)

    # ------------------------------------------------------------------ a step

    def step(self) -> None:
        """Schedules and computes one forward pass, and tells what is known by then."""
        before = self.flying
        self.filled = []
        step = self._schedule()
        if not self.spec.asynchronous:
            if step:
                self._tell_rows(step)
                self._take_outcome(step)
            self._deliver_some()
            return
        # The outcome of the pass before comes after this one was scheduled; its rows came before
        # it, but perhaps only now.
        if before and not before.told:
            self._tell_rows(before)
        self.flying = step
        when = self.rng.choice(("at once", "after the outcome", "after the next is scheduled"))
        if step and when == "at once":
            self._tell_rows(step)
        if before:
            self._take_outcome(before)
        if step and when == "after the outcome":
            self._tell_rows(step)
        self._deliver_some()

    def drain(self) -> None:
        """Ends the pass in flight."""
        step, self.flying = self.flying, None
        if step:
            if not step.told:
                self._tell_rows(step)
            self._take_outcome(step)

    def set_weight_version(
        self, version: int, *, reset: bool = False, empty: bool = False, abort: bool = False
    ) -> None:
        """New weights, between two passes."""
        self.drain()
        if abort:
            for request in self.begun:
                self._finish(request, "abort")
        self.version = version
        self.counts["weight_updates"] += 1
        if self.spec.tells_versions:
            late = self.rng.random() < self.chances.no_version
            self._tell_version(None if late else version)
        if reset:
            self.reset_prefix_cache()
        if empty:
            self.reset_external_kv()

    def tell_late_version(self) -> None:
        """The version of weights that run already, if nobody told it."""
        if self.spec.tells_versions and self.told_version is None:
            self.drain()
            self.counts["late_versions"] += 1
            self._tell_version(self.version)

    def _tell_version(self, version: int | None) -> None:
        self.told_version = self.proves.version = version
        self._tell("set_weight_version", version)

    def reset_prefix_cache(self) -> None:
        """Forgets the prefix cache; of what still runs, nobody knows the slots any more."""
        self.drain()
        if not self.alone and any(self.pool.refs):
            return  # as in _load_in_place
        self.counts["resets"] += 1
        self._tell("reset_prefix_cache")
        self.proves.reset_prefix_cache(live=bool(self.begun))
        self.pool.reset()
        for request in self.running:
            request.nodes = []

    def reset_external_kv(self) -> None:
        """KV in the memory of the CPU is gone, and so is that in stores that others fill."""
        self.drain()
        self.counts["emptied"] += 1
        hosts = self.pool.empty_outside()
        if self.spec.empties == "told":
            self._tell("reset_external_kv")
            self.pool.forget(hosts)
            self.proves.reset_external_kv(live=bool(self.begun))

    def crash(self) -> None:
        """Dies, and boots again; the agents say nothing more."""
        begun = self.begun
        self.world.crash(self.spec.engine_id)
        if self.twins:
            self.world.crash(f"{self.spec.engine_id}-slots")
        for request in begun:
            request.outcome = "crash"
            request.running = False
        self.counts["crashes"] += 1
        self.waiting = [r for r in self.waiting if not r.record]
        self.done += begun
        self.boot()

    # ------------------------------------------------------------------ scheduling

    def _schedule(self) -> Step | None:
        rng, spec, chances = self.rng, self.spec, self.chances
        begun = self.begun
        if begun and rng.random() < chances.abort:
            self._finish(rng.choice(begun), "abort")
        for run in self.flying.runs if self.flying else ():
            # What goes back is often given up while it is under way.
            again = run.request.running and (run.before != NOBODY).any() and not run.told
            if again and rng.random() < 0.5:
                self._finish(run.request, "abort")
        if spec.offload and self.pool.node_of and rng.random() < chances.external_in_place:
            self._load_in_place()
        if self._may_copy() and self.pool.node_of and rng.random() < chances.host_write:
            self._write_to_host()
        while self.waiting and len(self.running) < spec.max_running and rng.random() < 0.8:
            if not self._admit(self.waiting[0]):
                break
            self.running.append(self.waiting.pop(0))
            if rng.random() < 0.5:
                break  # the others may come behind
        budget = spec.chunk_tokens
        chosen: list[tuple[Request, int, list[int]]] = []
        for request in list(self.running):
            if not request.running or not budget or rng.random() < chances.skip:
                continue
            if chances.preempt and rng.random() < chances.preempt:
                self._preempt(request)
                continue
            # Those of asynchronous engines are in flight nearly always.
            if rng.random() < chances.redo * (10 if spec.asynchronous else 1):
                self._redo(request)
            left = len(request.ahead) - request.ahead_computed
            count = min(left, budget)
            if count > 8 and rng.random() < 0.3:
                count = rng.randint(8, count)
            most = min(spec.draft_tokens, budget - count) if left == 1 else 0
            drafts = [rng.randrange(VOCABULARY) for _ in range(rng.randint(0, most))]
            if self._make_room(request, request.ahead_computed + count + len(drafts)):
                chosen.append((request, count, drafts))
                budget -= count + len(drafts)
        chosen = [c for c in chosen if c[0].running]
        if not spec.asynchronous:
            self._admit_behind(chosen, budget)
        return self._forward(chosen) if chosen else None

    def _admit_behind(self, chosen: list[tuple[Request, int, list[int]]], budget: int) -> None:
        """Admits requests that reuse blocks which the pass to come computes.

        Some of them join that pass at once.
        """
        for request, count, _ in chosen:
            self._register(request, request.computed + count)
        while self.waiting and len(self.running) < self.spec.max_running:
            request = self.waiting[0]
            if self.rng.random() < 0.2 or not self._admit(request, chosen):
                break
            self.running.append(self.waiting.pop(0))
            if self.pool.free and self.rng.random() < 0.3:
                new = self.pool.allocate()
                request.blocks.append(new)
                self._about("add_blocks", request, [new])
            room = len(request.blocks) * self.pool.block_size - request.computed
            count = min(len(request.tokens) - request.computed, budget, room)
            if count and self.rng.random() < 0.8:
                chosen.append((request, count, []))
                budget -= count
                self._register(request, request.computed + count)

    def _redo(self, request: Request) -> None:
        """Goes back some tokens: they are computed once more, into the same slots.

        It leaves out requests in flight, engines whose agents get different reports, and blocks
        that another request reads: no engine writes those.
        """
        record, attempt = request.record, request.attempt
        own = request.ahead_computed - attempt.given
        if own < 1 or not self.alone or self.twins or self._in_flight(request):
            return
        assert record is not None
        start = request.ahead_computed - self.rng.randint(1, min(own, 4))
        blocks = request.blocks[start // self.pool.block_size :]
        if any(self.pool.refs[block] > 1 for block in blocks):
            return
        old = attempt.rows[start:].tolist()
        record.discarded += [(p, n) for p, n in enumerate(old, start) if n != NOBODY]
        request.computed = request.ahead_computed = start
        attempt.again = min(attempt.again, start)
        self.counts["redone"] += 1

    def _make_room(self, request: Request, num_tokens: int) -> bool:
        """Gets blocks for so many tokens, from the request that began to run last if need be."""
        pool, new = self.pool, []
        while len(request.blocks) * pool.block_size < num_tokens:
            if not pool.free:
                victim = self.running[-1]
                if victim is request:
                    break
                self._preempt(victim)
                continue
            new.append(pool.allocate())
            request.blocks.append(new[-1])
        if new:
            self._about("add_blocks", request, new)
        if len(request.blocks) * pool.block_size < num_tokens:
            self._preempt(request)
            return False
        return True

    def _admit(
        self, request: Request, chosen: Sequence[tuple[Request, int, list[int]]] = ()
    ) -> bool:
        """Begins or resumes a request with what the cache has of it; False if there is no room.

        Some of it is in the cache once the pass has run in which `chosen` are.
        """
        pool, rng = self.pool, self.rng
        if request.record is None and any(r.request_id == request.request_id for r in self.begun):
            return False  # its name is taken
        tokens = request.tokens
        path = pool.path(tokens, len(tokens) - 1)
        num_local = next((i for i, n in enumerate(path) if n not in pool.cached), len(path))
        num_full = num_local
        host = (self.spec.offload or self.spec.host_blocks) and not request.remote
        host = host and (request.record or not request.takes)
        tier = pool.offloaded
        if self.spec.host_blocks:
            tier, host = pool.host, host and self._may_copy()
        if host and rng.random() < 0.8:
            while num_full < len(path) and path[num_full] in tier:
                num_full += 1
        found = path[num_local:num_full]
        copied = found if self.spec.host_blocks else []
        restored = [] if copied else [pool.offloaded[node] for node in found]
        computed = num_full * pool.block_size
        # After a preemption it is loaded once more, or computed.
        if request.remote and (request.record is None or rng.random() < 0.5):
            # Of prompts that were handed over whole, some engines compute the last token again.
            at_most = min(request.remote, len(tokens) - 1)
            computed = max(computed, at_most - (rng.random() < 0.2))
        external = computed - (num_local + len(copied)) * pool.block_size
        local = [pool.cached[n] for n in path[:num_local]]
        inside = None if copied else self._ends_inside(tokens, num_local, chosen)
        if not external and (donor := inside):
            computed = len(donor.prompt)
            local.append(donor.blocks[num_local])
            num_local += 1
            self.counts["shared_in_part"] += 1
        total = -(-(computed + 1) // pool.block_size)
        total += rng.randint(0, (len(tokens) + 1) // pool.block_size + 1 - total)
        if sum(1 for b in local if not pool.refs[b]) + total - num_local > len(pool.free):
            return False
        begins = request.record is None
        if begins:
            request.record = self._record(request)
            self.before_begin(self, request.record)
        for block in local:
            pool.take(block)
        if copied:
            self._tell_flying()
        new = [pool.allocate() for _ in range(total - num_local)]
        if copied:
            self.counts["host_loads"] += len(copied)
            self._copy([pool.host[node] for node in copied], new[: len(copied)])
        request.blocks = [*local, *new]
        start = computed
        if external and request.fails and self.alone:
            self.counts["failed_transfers"] += 1
            start = rng.choice((computed - external, rng.randrange(computed - external, computed)))
        request.nodes = path[: start // pool.block_size]
        for node, block in zip(request.nodes, request.blocks, strict=False):
            pool.register(node, block)
        request.computed = request.ahead_computed = start
        request.running = True
        record = request.record
        assert record is not None
        size = request.most + 3 * (self.spec.draft_tokens + 2)
        record.attempts.append(Attempt(size, computed - external, computed))
        if begins:
            record.kv_version = self.proves.of(computed - external, external)
            self.counts["kv_versions"] += computed > 0 and record.kv_version is not None
        if external:
            self.proves.loaded()
            self.counts["external_loads"] += 1
            self.counts["external_rows"] += external
            self._load(request, computed - external, computed, restored)
            loaded = request.blocks[num_local : -(-computed // pool.block_size)]
            self._twins_forget(loaded)
        if begins:
            self._tell_begin(request, computed, external)
        else:
            self._tell_resume(request, computed, external)
        return True

    def _load(
        self, request: Request, start: int, stop: int, restored: Sequence[np.ndarray]
    ) -> None:
        """KV from elsewhere comes into the blocks of a request."""
        pool, source = self.pool, request.source
        if request.remote:
            if source is not None and source.record is not None:
                kv = source.record.attempts[-1].kv(start, stop)
            else:
                # Passes of engines that report to nobody; they are in no answer.
                weights = self.elsewhere()
                kv = self.store.draw(stop - start, UNKNOWN_VERSION, weights)
            pool.kv[pool.slots_of(request.blocks, start, stop)] = kv
            return
        for block, kv in zip(request.blocks[start // pool.block_size :], restored, strict=False):
            pool.load(block, kv)

    def _ends_inside(
        self, tokens: list[int], nth: int, chosen: Sequence[tuple[Request, int, list[int]]]
    ) -> Request | None:
        """A request that ends with this pass, and leaves its last block to another: the nth."""
        for request, count, _ in chosen:
            n = len(request.prompt)
            if (
                (request.computed + count, request.most) == (n, n + 1)
                and (n // self.pool.block_size, tokens[:n]) == (nth, request.tokens)
                and n % self.pool.block_size > 0
                and n < len(tokens)
                and self.pool.refs[request.blocks[nth]] == 1  # one other writes behind it
            ):
                return request
        return None

    def _inherit(self, request: Request, ranks: set[int] | None = None) -> None:
        """A request takes the rows that the slots of its cached tokens name by now.

        Args:
            request: which one.
            ranks: the context-parallel ranks that have its rows for the first time; None: all.
        """
        attempt, cached = request.attempt, request.attempt.cached
        if cached:
            places = self.pool.slots_of(request.blocks, 0, cached)
            told = self._told_slots()
            slots, named = told[places], self._named(told)[places]
            dealt = np.where(slots == NOBODY, NOBODY, self.store.ranks[slots])
            attempt.inherit(named, dealt, None if self.alone else ranks)
        if cached and not attempt.cached:
            known = int((attempt.rows[:cached] != NOBODY).sum())
            self.counts["cached_rows"] += known
            self.counts["unknown_rows"] += cached - known

    def _told_slots(self) -> np.ndarray:
        """Numbers of the rows in all slots, without those of passes that were not told yet.

        Such a pass may compute tokens again, in slots from which other requests have yet to inherit
        the rows that were told before.
        """
        slots = self.pool.slots.copy()
        for step in reversed(self.untold):
            for run in reversed(step.runs):
                slots[run.slots] = run.held
        return slots

    def _keep(self, request: Request, stop: int) -> None:
        """A request gives up its blocks; what they hold from a position on was not kept."""
        self._inherit(request)
        for position, number, _ in request.drafts:
            self.store.named[number] = position < stop
        request.drafts = []
        size = len(request.blocks) * self.pool.block_size
        given_up = self.pool.slots_of(request.blocks, min(stop, size), size)
        numbers = self.pool.slots[given_up]
        self.store.named[numbers[numbers != NOBODY]] = False
        self.pool.copied[given_up] = False

    def _record(self, request: Request) -> Record:
        spec = self.spec
        record = Record(
            spec.engine_id,
            self.boot_id,
            request.request_id,
            request.trace_id,
            len(request.prompt),
            self.columns,
            list(request.prompt),
            model=spec.model,
        )
        record.took = request.takes or ""
        record.continued = request.continues and request.continues.record
        if spec.tells_tokens:
            ends = self.ends.get(request.trace_id, ())
            record.told_at = digest_positions(len(request.prompt))
            record.told_at |= {n for n in set[int]().union(*ends) if n < len(request.prompt)}
        return record

    def _tell_begin(self, request: Request, computed: int, external: int) -> None:
        self.counts["requests"] += 1
        same = request.trace_id == request.request_id and self.rng.random() < 0.5
        for line in self.lines:
            line.begin(
                request,
                trace_id=None if same else request.trace_id,
                prompt_len=len(request.prompt),
                labels={"request": request.request_id},
                num_computed_tokens=computed,
                num_external_tokens=external,
                block_ids=list(request.blocks),
                prompt_token_ids=list(request.prompt) if self.spec.tells_tokens else None,
                transfer_id=request.takes,
            )

    def _tell_resume(self, request: Request, computed: int, external: int) -> None:
        """The tokens that it has are sure: what a pass in flight sampled was kept or dropped when
        it was preempted."""
        self.counts["resumes"] += 1
        assert not (self.flying and any(run.request is request for run in self.flying.runs))
        if self.spec.tells_had:
            request.attempt.had = len(request.tokens)
        self._about(
            "resume",
            request,
            computed,
            block_ids=list(request.blocks),
            num_external_tokens=external,
            num_tokens=request.attempt.had or None,
        )

    def _load_in_place(self) -> None:
        """Some cached blocks are loaded from elsewhere once more."""
        self._tell_flying()
        # A rank that has no rows of a request yet inherits later than others: the contract leaves
        # open which of its cached rows are known then.
        cached = [b for b in sorted(self.pool.node_of) if self.alone or not self.pool.refs[b]]
        if not cached:
            return
        blocks = self.rng.sample(cached, min(len(cached), self.rng.randint(1, 4)))
        self.proves.loaded()
        self.counts["external_loads"] += 1
        self.counts["external_rows"] += len(blocks) * self.pool.block_size
        self.pool.forget(blocks)
        for block in blocks:
            self.pool.reload(block)
        for line in self.lines:
            line.tell("mark_external", blocks)
        self._twins_forget(blocks)

    def _tell_flying(self) -> None:
        """Tells the rows of the pass in flight, as slots do not say whose KV comes into them."""
        if self.flying and not self.flying.told:
            self._tell_rows(self.flying)

    def _may_copy(self) -> bool:
        """Whether KV may be copied now, which tells the pass in flight.

        Requests that compute tokens again are not told before it is known whether they go on: what
        they have sampled is of the pass before.
        """
        runs = self.flying.runs if self.flying and not self.flying.told else []
        again = any(run.request.running and (run.before != NOBODY).any() for run in runs)
        return self.spec.host_blocks > 0 and not again

    def _write_to_host(self) -> None:
        """Some cached blocks are copied to the host tier, a few of them once more."""
        self._tell_flying()
        pool, rng = self.pool, self.rng
        nodes = [n for n in sorted(pool.cached) if n not in pool.host or rng.random() < 0.1]
        nodes = rng.sample(nodes, min(len(nodes), rng.randint(1, 4), self.spec.host_blocks))
        self.counts["host_writes"] += len(nodes)
        if nodes:
            self._copy([pool.cached[n] for n in nodes], [pool.host_block(n) for n in nodes])

    def _copy(self, sources: list[int], targets: list[int]) -> None:
        """KV is copied, behind the pass in flight."""
        self.pool.copy(sources, targets, self._named(self._told_slots()))
        for line in self.lines:
            line.tell("copy_blocks", sources, targets)

    def _twins_forget(self, blocks: list[int]) -> None:
        """Slots are loaded once the pass in flight is done: it may write to those of a request that
        it does not know to be gone."""
        if self.twins and self.flying and not self.flying.told:
            self.loaded += blocks
            return
        for twin in self.twins:
            twin.tell("mark_external", list(blocks))

    # ------------------------------------------------------------------ computing

    def _forward(self, chosen: list[tuple[Request, int, list[int]]]) -> Step:
        """Computes rows, accepts drafts and samples tokens, on the device."""
        rng = self.rng
        rng.shuffle(chosen)
        total = sum(count + len(drafts) for _, count, drafts in chosen)
        known = self.told_version is not None
        told = self.version if known else UNKNOWN_VERSION
        numbers = self.store.draw(total, told, self.version)
        self.counts["rows"] += total
        runs: list[Run] = []
        samples: list[Request] = []
        for request, count, drafts in chosen:
            start = request.ahead_computed
            known, stop = start + count, start + count + len(drafts)
            own, numbers = numbers[: stop - start], numbers[stop - start :]
            kept = known
            if known == len(request.ahead):
                while kept < stop and rng.random() < self.chances.accept:
                    kept += 1
                samples.append(request)
                new = [*drafts[: kept - known], rng.randrange(VOCABULARY)]
                says = request.says[len(request.ahead) - len(request.prompt) :][: len(new)]
                request.ahead = [*request.ahead, *says, *new[len(says) :]]
            request.ahead_computed = kept
            before = request.attempt.rows[start:].copy()
            request.attempt.rows[start:] = NOBODY
            slots = self.pool.slots_of(request.blocks, start, stop)
            held = self.pool.slots[slots]
            self.pool.kv[slots] = own
            self.pool.slots[slots] = NOBODY
            self.pool.copied[slots] = False
            self.pool.slots[slots[: kept - start]] = own[: kept - start]
            request.attempt.rows[start:kept] = own[: kept - start]
            self.counts["rejected_rows"] += stop - kept
            run = Run(
                request,
                request.attempt,
                start,
                own,
                slots,
                held,
                before,
                stop - known,
                kept,
                request.ahead,
            )
            runs.append(run)
        for run in runs:
            slots = self.pool.slots_of(run.request.blocks, 0, run.kept)
            run.attempt.read(self.pool.kv[slots], samples=run.request in samples)
        self.steps += 1
        self.untold.append(Step(self.steps, runs))
        return self.untold[-1]

    def _tell_rows(self, step: Step) -> None:
        """Tells what a pass chose, late or not, to those who computed it."""
        step.told = True
        self.untold = [one for one in self.untold if one is not step]
        rows = self.store.rows(np.concatenate([run.numbers for run in step.runs]))
        for run in step.runs:
            request, record = run.request, run.request.record
            assert record is not None
            run.told = request.running and run.attempt is request.attempt
            if run.told:
                run.attempt.start_again(run.start)
                run.attempt.lost[run.start :] = False
                first = max(run.start + 1, record.prompt_len)
                alone = run.drafts or self.alone
                record.tentative = (min(first, run.stop) if alone else run.stop, run.stop)
            else:
                self.counts["late_rows"] += len(run.numbers)
        ranks = self._deal(step)
        # More often where it confirms drafts: the rows of the next pass would confirm them, too.
        confirms = any(run.request.drafts for run in step.runs)
        captured = self.rng.random() >= self.chances.not_captured * (5 if confirms else 1)
        self._name(step, ranks, captured)
        self.proves.ran(captured=captured)
        for line in self.lines:
            mine = None if ranks is None else ranks == line.shard.rank
            runs: list[tuple[Request, int, int]] = []
            at = 0
            for run in step.runs:
                n = len(run.numbers)
                if mine is None:
                    parts = [(0, n)]
                else:
                    edges = np.flatnonzero(np.diff(mine[at : at + n], prepend=False, append=False))
                    parts = [(int(a), int(b)) for a, b in edges.reshape(-1, 2)]
                if parts:
                    run.lines.append(line)
                runs += [(run.request, run.start + a, b - a) for a, b in parts]
                at += n
            if not captured:
                line.skip(step.number, runs)
            elif runs or self.rng.random() < 0.3:
                told = rows if mine is None else rows[mine]
                line.step(step.number, told[:, line.columns], runs)
        if self.twins:
            slots = np.concatenate([run.slots for run in step.runs])
            for twin in self.twins:
                twin.step_slots(step.number, rows[:, twin.columns], slots)
            for run in step.runs:
                if run.told:
                    run.request.last_twin_step = step.number
            if self.loaded:
                loaded, self.loaded = self.loaded, []
                self._twins_forget(loaded)

    def _name(self, step: Step, ranks: np.ndarray | None, captured: bool) -> None:
        """Works out which rows slots name once a pass was told, by the rules for drafts."""
        at = 0
        for run in step.runs:
            n, request = len(run.numbers), run.request
            dealt = np.zeros(n, int) if ranks is None else ranks[at : at + n]
            at += n
            if not run.told:
                continue
            assert request.record is not None
            self.store.ranks[run.numbers] = dealt
            self.store.named[run.before[run.before != NOBODY]] = False  # rejected, all of them
            for rank in np.unique(dealt).tolist():
                mine = np.flatnonzero(dealt == rank) + run.start
                first = int(mine[0])
                for position, number, _ in (d for d in request.drafts if d[2] == rank):
                    self.store.named[number] = position < first
                request.drafts = [d for d in request.drafts if d[2] != rank]
                for position in mine.tolist() if captured else ():
                    number = int(run.numbers[position - run.start])
                    if position == first or position < request.record.prompt_len:
                        self.store.named[number] = True
                    else:
                        request.drafts.append((position, number, rank))
            if not captured:
                self.counts["skipped_rows"] += n
                rows = run.attempt.rows[run.start : run.stop]
                rows[rows == run.numbers] = NOBODY  # later passes may have come in between
                run.attempt.skipped[run.start : run.stop] = True
                run.attempt.lost[run.start : run.kept] = True
        at = 0
        for run in step.runs:  # after all that the pass has computed
            dealt = np.zeros(1, int) if ranks is None else ranks[at : at + len(run.numbers)]
            at += len(run.numbers)
            if run.told:
                self._inherit(run.request, {*dealt.tolist()})

    def _deal(self, step: Step) -> np.ndarray | None:
        """The context-parallel rank that computes each row; None if there is only one.

        A chunk of a prompt is dealt in a zigzag, so that all ranks have as much to attend to, or in
        equal parts; a token and the drafts behind it are computed by one rank.
        """
        if self.alone:
            return None
        size = self.spec.shards[0].size
        ranks = []
        for run in step.runs:
            n = len(run.numbers)
            if run.drafts or n < 2 * size:
                ranks.append(np.full(n, self.rng.randrange(size)))
            elif self.rng.random() < 0.5:
                part = np.arange(n) * 2 * size // n
                ranks.append(np.minimum(part, 2 * size - 1 - part))
            else:
                ranks.append(np.arange(n) * size // n)
        return np.concatenate(ranks)

    # ------------------------------------------------------------------ outcomes

    def _take_outcome(self, step: Step) -> None:
        """The scheduler learns what a pass led to."""
        for run in step.runs:
            request = run.request
            if not request.running or run.attempt is not request.attempt:
                continue
            request.tokens = run.ahead[: request.most]
            request.computed = min(run.kept, len(request.tokens))
            self._register(request, request.computed)
            size = self.pool.block_size
            # A rank without rows of a request inherits later than others: drafts are confirmed or
            # not by then.
            if self.alone and run.drafts and (run.start + 1) // size < request.computed // size:
                self.filled.append(request)
            if len(request.tokens) == request.most:
                self._finish(request, request.end or self.rng.choice(("stop", "length")))
            elif run.kept < run.stop:
                self.counts["rewinds"] += 1
                self._tell_rewind(run, step)

    def _tell_rewind(self, run: Run, step: Step) -> None:
        """Drafts were rejected. The rows of the next pass, if they were told, began lower."""
        # Of context-parallel ranks another one may get the rows that begin lower.
        if self.alone and self.rng.random() < self.chances.rewind_untold:
            return
        overtaken = self.flying is not None and self.flying is not step and self.flying.told
        named = overtaken or self.rng.random() < 0.5
        for line in run.lines:
            line.rewind(run.request, run.kept, step.number if named else 0)

    def _register(self, request: Request, stop: int) -> None:
        """Full blocks of known tokens before a position can be found from now on."""
        pool = self.pool
        parent = request.nodes[-1] if request.nodes else 0
        for i in range(len(request.nodes), stop // pool.block_size):
            start = i * pool.block_size
            parent = pool.node(parent, request.tokens[start : start + pool.block_size])
            request.nodes.append(parent)
            pool.register(parent, request.blocks[i])

    def _preempt(self, request: Request) -> None:
        """Takes a request's blocks away; it starts over later."""
        record = request.record
        assert record is not None
        self.counts["preemptions"] += 1
        stop = request.computed
        for run in self._in_flight(request):
            # Its pass is in flight: the tokens that it samples are kept or not, its rows as well.
            keeps = len(run.ahead) < request.most and self.rng.random() < 0.5
            if keeps:
                request.tokens = run.ahead
                if (run.told or self._goes_on(run)) and self.rng.random() < 0.5:
                    stop = run.kept
            if not run.told and stop == run.kept:
                self.counts["lost_late"] += stop - run.start
                run.attempt.rows[run.start :] = NOBODY
                run.attempt.lost[run.start : stop] = run.attempt.skipped[run.start : stop] = True
            if run.told and stop < run.kept:
                sure = min(run.kept, max(run.start + 1, record.prompt_len))
                positions = range(run.start, sure)
                record.discarded += zip(positions, run.numbers.tolist(), strict=False)
        slots = self.pool.slots_of(request.blocks, 0, request.computed)
        request.attempt.read(self.pool.kv[slots], samples=False)
        self._keep(request, stop)
        request.attempt.rows[stop:] = NOBODY
        request.attempt.unknown[stop:] = request.attempt.lost[stop:] = False
        record.tentative = (0, 0)
        request.computed = request.attempt.stop = stop
        self._about("preempt", request, stop)
        request.ahead = request.tokens
        self._release(request)
        self.waiting.insert(0, request)

    def _goes_on(self, run: Run) -> bool:
        """Whether all before a pass is computed and sure, so that it confirms no rejected draft."""
        sure = all(position < run.start for position, _, _ in run.request.drafts)
        return sure and bool((run.before == NOBODY).all())

    def _in_flight(self, request: Request) -> list[Run]:
        """The rows of a request whose outcome nobody knows yet: at most those of one pass."""
        runs = self.flying.runs if self.flying else []
        return [run for run in runs if run.request is request and run.attempt is request.attempt]

    def _finish(self, request: Request, reason: str) -> None:
        record = request.record
        assert record is not None
        for run in self._in_flight(request):
            if not run.told:
                request.attempt.rows[run.start :] = run.before  # they come late
            if request.running and self.rng.random() < 0.5:  # its KV can be hit
                self._register(request, min(run.kept, len(request.tokens)))
        if request.running:
            self._keep(request, len(request.tokens) - 1)
        self.counts["aborts"] += reason == "abort"
        self.counts["handoffs"] += reason == "handoff"
        tokens = request.tokens
        record.tokens = list(tokens)
        record.reason = request.outcome = reason
        record.tentative = (0, 0)
        gives = request.gives if reason == request.end else None
        record.gave = gives or ""
        told = list(tokens) if self.spec.tells_tokens else None
        self._about(
            "finish",
            request,
            len(tokens),
            reason=reason,
            token_ids=told,
            transfer_id=gives,
        )
        if told:
            ends = end_positions(len(request.prompt), len(tokens), reason)
            record.told_at |= digest_positions(len(tokens)) | ends
            earlier = self.ends.setdefault(request.trace_id, deque(maxlen=ENDS_PER_TRACE))
            earlier.append({n for n in ends if n >= len(tokens) - CUT})
        if self.twins and request.last_twin_step and request.computed:
            self._bind(request)
        if request.running:
            self._release(request)
        else:
            self.waiting.remove(request)
        self.done.append(request)

    def _release(self, request: Request) -> None:
        request.running = False
        self.running.remove(request)
        self.pool.release(request.blocks)
        request.blocks, request.nodes = [], []
        request.last_twin_step = 0

    def _bind(self, request: Request) -> None:
        """Names the request behind its slots, before anybody else gets them."""
        self.counts["binds"] += 1
        for twin in self.twins:
            twin.deliver()
        slots = self.pool.slots_of(request.blocks, 0, request.computed)
        rows = self.pool.slots[slots]
        bound = Bound(len(request.tokens), request.computed, rows, self.columns)
        trace_id = f"{request.trace_id}@slots"
        self.on_bind(trace_id, bound)
        self.world.bind(
            f"{self.spec.engine_id}-slots",
            request.request_id,
            trace_id,
            list(request.blocks),
            len(request.tokens),
            min(request.computed, len(request.tokens) - 1),
            self.twins[0].steps[request.last_twin_step],
            list(request.tokens) if self.spec.tells_tokens else None,
        )
