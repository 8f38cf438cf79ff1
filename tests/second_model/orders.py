"""Orders of calls that the docstrings of CaptureAgent allow, by a little engine.

The engine knows tokens: each slot holds the tokens before and at it whose KV was written there, so
that a prefix hit is offered where the KV is really that of the same tokens, and nowhere else. An
*event* is what one decision of an engine tells: the calls that belong together, with their
arguments. `Engine.events` lists all that may come next; `every` goes through all orders of them,
and `random_order` draws one.

Requests are named A, B, C in the order in which they begin, blocks are taken from the end of one
list, and tokens follow from their place, so orders that differ in names alone come once.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, NamedTuple

from oracle.marks import MARKS, marked

Call = tuple[Any, ...]
Event = tuple[Call, ...]
Tokens = tuple[int, ...]


class Family(NamedTuple):
    """A corner of all orders that is small enough to go through."""

    name: str
    block_size: int = 4
    num_blocks: int = 12
    prompt_len: int = 2
    requests: int = 2
    depth: int = 8
    drafts: tuple[int, ...] = (0,)
    """Numbers of drafts that a decode step may have."""
    ends: tuple[str, ...] = ("stop",)
    same_trace: bool = False
    own_trace: bool = True
    joint: bool = False
    """Whether one step may hold rows of several requests."""
    late: int = 0
    """Most late steps of a request."""
    skips: bool = False
    chunks: bool = False
    preempts: bool = False
    counted: bool = False
    """Whether a preemption may count a pass whose row comes late."""
    sessions: bool = False
    """Whether a request may get further tokens when it resumes."""
    rewinds: bool = False
    early_blocks: bool = False
    externals: bool = False
    decode_engine: bool = False
    resets: bool = False
    emptied: bool = False
    """Whether engines say that no KV is left outside of their blocks."""
    fresh: bool = False
    """Whether they say at first that none is left anywhere."""
    declares: bool = False
    """Whether KV outside is declared to be gone at each update."""
    strangers: str = ""
    """Engines that have another model."""
    versions: bool = False
    flushes: bool = False
    deletes: bool = False
    sharded: bool = False
    partial: bool = True
    """Whether a hit may end inside a block."""
    invalid: bool = False
    turns: bool = True
    """Whether a request may go on from all tokens of an earlier one."""
    same_prompt: bool = True
    prompts: tuple[int, ...] = ()
    """Lengths of prompts; (prompt_len,) if empty."""
    transfers: tuple[str, ...] = ()
    """Hand-overs that a request may end with, and one with external KV begin with."""
    failures: bool = False
    """Whether external KV may turn out not to have come: all is computed."""
    twins: bool = False
    """Whether all requests sample the same tokens."""
    cuts: bool = False
    """Whether a turn may go on from less than an aborted one sampled."""
    version: int | None = 0
    """The weight version at first; None: nobody gave one."""
    marks: int = 1
    """Labels that a prompt may have; see oracle/marks.py."""
    host_blocks: int = 0
    """Blocks of a host tier, to which the first block of a request may be copied, and back."""


@dataclass
class Req:
    """A request as its engine sees it."""

    name: str
    seed: int
    """What its samples depend on, beside their place."""
    engine: str
    trace: str
    prompt_len: int
    tokens: Tokens
    blocks: list[int]
    computed: int
    base: int = -1
    """Position of the last row that is no draft, while drafts behind it are open."""
    open_drafts: int = 0
    status: str = "running"
    stepped: bool = False
    late: int = 0
    held_blocks: tuple[int, ...] = ()
    given: int = 0
    """Tokens up to the last one that it got with a resume."""

    def sampled(self, position: int) -> int:
        return 1000 * (self.seed + 1) + 2 * position

    def grown(self, count: int) -> Tokens:
        """Its tokens, and further ones that somebody gives it, so many in all."""
        return (*self.tokens, *(700 + p for p in range(len(self.tokens), count)))

    def outcome(self, accepted: int) -> tuple[Tokens, int]:
        """Tokens and computed tokens once so many drafts were accepted."""
        if self.base < 0:
            return self.tokens, self.computed
        drafts = tuple(self.sampled(p) + 1 for p in range(self.base + 1, self.base + 1 + accepted))
        tokens = self.tokens[: self.base + 1] + drafts
        return (*tokens, self.sampled(len(tokens))), self.base + 1 + accepted


@dataclass
class Engine:
    """Engines, their KV and their requests, and what they may tell next."""

    family: Family
    requests: list[Req] = field(default_factory=list)
    #: Of each engine: blocks that are free, the next one last.
    free: dict[str, list[int]] = field(default_factory=dict)
    #: Of each engine and slot: the tokens up to and at the one whose KV is there.
    kv: dict[tuple[str, int], Tokens] = field(default_factory=dict)
    steps: dict[str, int] = field(default_factory=dict)
    version: int | None = None
    versions: int = 1
    """The next weight version."""
    events_before: int = 0
    every_way: bool = False
    """Whether a resume may tell its number of tokens in each way, or in one by its place."""
    flushed: bool = True
    last: Event = ()
    deleted: tuple[str, ...] = ()
    last_step: dict[str, int] = field(default_factory=dict)
    """Of each request: the step of its last rows, while a late rewind may name it."""
    loaded: tuple[tuple[str, int], ...] = ()
    """Engines and blocks that were copied back from a host tier."""

    def __post_init__(self) -> None:
        if not self.free:
            self.version = self.family.version
            self.free = {e: list(range(self.family.num_blocks))[::-1] for e in ("e", "d")}

    def copy(self) -> Engine:
        return replace(
            self,
            requests=[replace(r, blocks=list(r.blocks)) for r in self.requests],
            free={e: list(b) for e, b in self.free.items()},
            kv=dict(self.kv),
            steps=dict(self.steps),
            last_step=dict(self.last_step),
        )

    # ------------------------------------------------------------------ what may come next

    def events(self) -> list[Event]:
        f = self.family
        found: list[Event] = [*self._begins(), *self._steps()]
        for r in self.requests:
            if r.status == "running":
                found += self._ends(r)
                if f.early_blocks and not r.stepped and len(r.blocks) < 3 and self.free[r.engine]:
                    found.append((("add", r.name, (self.free[r.engine][-1],)),))
            if r.status == "preempted":
                found += self._resumes(r)
        if f.rewinds:
            found += self._rewinds()
        if self.requests and not self.flushed:
            if f.flushes:
                found.append((("flush",),))
            if f.sharded and self.last[0][0] != "sync":
                found.append((("sync",),))
        if f.versions and self.requests and self.last[0][0] != "version":
            found += [(("version", v),) for v in (self.versions, None) if v != self.version]
        if self.requests:
            kinds = ["reset"] * f.resets + ["emptied"] * f.emptied
            engines = "ed" if f.decode_engine and f.emptied else "e"
            found += [((k, e),) for k in kinds for e in engines if self.last[0] != (k, e)]
        if f.externals and self.last[:1] and self.last[0][0] not in ("external", "version"):
            found += [
                (("external", r.engine, (r.blocks[0],)),)
                for r in self.requests
                if r.status == "ended" and r.blocks and r.blocks[0] in self.free[r.engine]
            ]
        if f.host_blocks and self.requests and self.last[0][0] != "copy":
            found += self._copies("e")
        if f.deletes:
            found += [
                (("flush",), ("delete", t))
                for t in sorted({r.trace for r in self.requests if r.stepped})
                if t not in self.deleted
            ]
        return found

    def _copies(self, engine: str) -> Iterator[Event]:
        f = self.family
        host = range(f.num_blocks, f.num_blocks + f.host_blocks)
        firsts = {(*r.blocks, *r.held_blocks)[0] for r in self.requests if r.stepped}
        for target in host:
            for source in sorted(firsts):
                yield (("copy", engine, (source,), (target,)),)
            if (engine, target * f.block_size) in self.kv and self.free[engine]:
                yield (("copy", engine, (target,), (self.free[engine][-1],)),)

    def _begins(self) -> Iterator[Event]:
        f, number = self.family, len(self.requests)
        if number == f.requests:
            return
        name = "ABCDEFGH"[number]
        traces = ["t"] if number == 0 or f.same_trace else []
        if number and f.own_trace:
            traces.append(f"t{name}")
        prompts = (
            {
                tuple(marked(range(1, n + 1), mark)): None
                for n in f.prompts or (f.prompt_len,)
                for mark in range(f.marks)
            }
            if f.same_prompt or not number
            else {}
        )
        if f.turns:
            for q in self.requests:
                if q.status == "ended" and q.computed >= q.prompt_len:
                    prompts[(*q.tokens, 7 + number)] = None
                    if f.cuts and len(q.tokens) > q.prompt_len + 1:
                        prompts[(*q.tokens[:-1], 7 + number)] = None
                        prompts[q.tokens[:-1]] = None
        engines = ("e", "d") if f.decode_engine and number else ("e",)
        for engine, trace, prompt in product(engines, traces, prompts):
            yield from self._begin(engine, name, trace, prompt)

    def _begin(self, engine: str, name: str, trace: str, prompt: Tokens) -> Iterator[Event]:
        f, size = self.family, self.family.block_size
        # Lookahead for two tokens, so that steps need no blocks before they are due.
        total = -(-(len(prompt) + (0 if f.early_blocks else 2)) // size)
        seen = set()
        for hit, blocks in self._hits(engine, prompt):
            for cached in {hit, hit // size * size} if not f.partial else {hit}:
                if not f.partial and cached % size:
                    continue
                kept = blocks[: -(-cached // size)]
                new = self._take(engine, total - len(kept), kept)
                if new is None or (cached, kept) in seen:
                    continue
                if not self._may_write(engine, prompt, cached, kept):
                    continue
                seen.add((cached, kept))
                yield (("begin", engine, name, trace, prompt, cached, 0, (*kept, *new)),)
        if f.externals or engine == "d":
            new = self._take(engine, total, ())
            for cached in {len(prompt) - 1, len(prompt)} if engine == "d" else {len(prompt) - 1}:
                if new is not None and cached:
                    for named in ((), *((t,) for t in f.transfers)):
                        yield (("begin", engine, name, trace, prompt, cached, cached, new, *named),)

    def _hits(self, engine: str, prompt: Tokens) -> Iterator[tuple[int, tuple[int, ...]]]:
        """(cached tokens, blocks that hold them), nothing cached included."""
        size = self.family.block_size
        yield 0, ()
        held = [
            (q, q.blocks if q.status == "running" else list(q.held_blocks))
            for q in self.requests
            if q.engine == engine
        ]
        for q, blocks in (*held, *((None, [b]) for e, b in self.loaded if e == engine)):
            hit = 0
            while hit < min(len(prompt) - 1, len(blocks) * size):
                slot = blocks[hit // size] * size + hit % size
                soon = (
                    q is not None
                    and q.status == "running"
                    and q.tokens[: hit + 1] == prompt[: hit + 1]
                    and hit >= q.computed
                    and q.computed < q.prompt_len
                )
                if not soon and self.kv.get((engine, slot)) != prompt[: hit + 1]:
                    break
                hit += 1
            # Blocks that were given away since hold other KV, unless a hit shares them.
            if hit:
                yield hit, tuple(blocks[: -(-hit // size)])

    def _may_write(self, engine: str, tokens: Tokens, cached: int, kept: tuple[int, ...]) -> bool:
        """Whether the rest of the last hit block is its own, or gets the same KV from all."""
        if cached % self.family.block_size == 0 or kept[-1] in self.free[engine]:
            return True
        stop = len(kept) * self.family.block_size
        return all(
            stop <= min(q.prompt_len, len(tokens)) and q.tokens[:stop] == tokens[:stop]
            for q in self.requests
            if q.engine == engine and kept[-1] in q.blocks
        )

    def _take(self, engine: str, count: int, but: tuple[int, ...]) -> tuple[int, ...] | None:
        free = [b for b in reversed(self.free[engine]) if b not in but]
        return tuple(free[:count]) if len(free) >= count else None

    def _runs(self, r: Req) -> list[tuple[Call, ...]]:
        """Runs that one request may have in the next step: (name, start, count) with blocks."""
        f, found = self.family, []
        if r.status == "running":
            if r.computed < len(r.tokens) - 1 or (r.base < 0 and r.computed < r.prompt_len):
                # Prompt, or all that a preempted request computes again.
                left = len(r.tokens) - r.computed
                found.append((r.name, r.computed, left))
                if f.chunks and left > 1:
                    found.append((r.name, r.computed, 1))
                if f.failures and r.name in self._external_names and not r.stepped:
                    starts = {s for s in (0, r.prompt_len // 2) if s < r.computed}
                    found += [(r.name, s, r.prompt_len - s) for s in sorted(starts)]
            else:
                for accepted in range(r.open_drafts + 1):
                    _, computed = r.outcome(accepted)
                    found += [(r.name, computed, 1 + drafts) for drafts in f.drafts]
        elif r.status in ("ended", "preempted") and r.late < f.late and r.stepped:
            start = len(r.tokens) - 1 + r.late
            if start < len(r.held_blocks) * f.block_size:
                found.append((r.name, start, 1))
        return found

    def _steps(self) -> Iterator[Event]:
        f = self.family
        choices = [(None, *self._runs(r)) for r in self.requests]
        for picked in product(*choices):
            runs = tuple(run for run in picked if run)
            if not runs or (len(runs) > 1 and not f.joint):
                continue
            for engine in {self._req(run[0]).engine for run in runs}:
                mine = tuple(run for run in runs if self._req(run[0]).engine == engine)
                if len(mine) < len(runs):
                    break
                for kind in ("step", "skip", "bad") if f.skips else ("step",):
                    if kind == "bad" and not f.invalid:
                        continue
                    event = self._step(engine, kind, mine)
                    if event:
                        yield event

    def _step(self, engine: str, kind: str, runs: tuple[Any, ...]) -> Event | None:
        size, calls = self.family.block_size, []
        after = self.copy()
        for name, start, count in runs:
            r = after._req(name)
            if r.status != "running":
                continue
            need = -(-(start + count + 2) // size) - len(r.blocks)
            if need > 0:
                new = after._take(engine, need, ())
                if new is None:
                    return None
                calls.append(("add", name, new))
                after.apply((calls[-1],))
        calls.append((kind, engine, runs))
        after.apply((calls[-1],))
        for name, start, _ in runs:  # cached tokens must be there by the end of the step
            r = after._req(name)
            if r.status == "running" and not self._req(name).stepped and start:
                external = r.name in self._external_names
                for p in range(0 if external else start):
                    slot = r.blocks[p // size] * size + p % size
                    if after.kv.get((engine, slot)) != r.tokens[: p + 1]:
                        return None
        return tuple(calls)

    _external_names: frozenset[str] = frozenset()

    def _ends(self, r: Req) -> Iterator[Event]:
        f = self.family
        if r.computed < r.prompt_len and r.base < 0:
            if "abort" in f.ends and r.stepped:
                yield (("finish", r.name, r.tokens, "abort", r.computed),)
        else:
            for accepted in range(r.open_drafts + 1):
                tokens, computed = r.outcome(accepted)
                for reason, named in product(f.ends, ((), *((t,) for t in f.transfers))):
                    if reason == "handoff" and r.engine == "d":
                        continue
                    yield (("finish", r.name, tokens, reason, computed, *named),)
                    if accepted and not named:  # the last accepted draft is a stop token
                        yield (("finish", r.name, tokens[:-1], reason, computed - 1),)
            tokens, computed = r.outcome(0)
            for back in range(1, f.late + 1):  # its last steps were under way when it stopped
                if len(tokens) - back > max(r.prompt_len, r.given) and "stop" in f.ends:
                    yield (("finish", r.name, tokens[:-back], "stop", computed - back),)
        if f.preempts and r.stepped and r.computed >= r.prompt_len:
            for accepted in range(r.open_drafts + 1):
                tokens, computed = r.outcome(accepted)
                yield (("preempt", r.name, tokens, computed),)
            slots = len(r.blocks) * f.block_size
            if f.counted and r.base < 0 and r.computed == len(r.tokens) - 1 < slots:
                tokens, late = (*r.tokens, r.sampled(len(r.tokens))), (r.name, r.computed, 1)
                preempt = ("preempt", r.name, tokens, r.computed + 1)
                yield (preempt, ("step", r.engine, (late,)))

    def _resumes(self, r: Req) -> Iterator[Event]:
        """Most tell how many tokens there are, some with further ones, and some tell nothing."""
        size, n = self.family.block_size, len(r.tokens)
        ways = ((n,), (), (n,), (n + 2,) if self.family.sessions else (n,))
        seen = set()
        for hit, blocks in self._hits(r.engine, r.tokens):
            cached = hit if self.family.partial else hit // size * size
            kept = blocks[: -(-cached // size)]
            for told in ways if self.every_way else (ways[(self.events_before + cached) % 4],):
                tokens = r.grown(max(told, default=0))
                new = self._take(r.engine, -(-(len(tokens) + 2) // size) - len(kept), kept)
                if (
                    new is not None
                    and (cached, kept, told) not in seen
                    and self._may_write(r.engine, tokens, cached, kept)
                ):
                    seen.add((cached, kept, told))
                    yield (("resume", r.name, cached, (*kept, *new), *told),)

    def _rewinds(self) -> Iterator[Event]:
        if self.last and self.last[-1][0] == "rewind":
            return
        for r in self.requests:
            if r.status == "running" and r.open_drafts:
                for accepted in range(r.open_drafts):
                    step = self.last_step[r.name]
                    yield (("rewind", r.name, r.base + 1 + accepted, step),)

    # ------------------------------------------------------------------ what it does

    def _req(self, name: str) -> Req:
        return self.requests["ABCDEFGH".index(name)]

    def apply(self, event: Event) -> None:
        for call in event:
            getattr(self, f"_on_{call[0]}")(*call[1:])
        self.last = event
        self.events_before += 1
        self.flushed = event[-1][0] == "flush"

    def _hold(self, engine: str, blocks: tuple[int, ...]) -> None:
        self.free[engine] = [b for b in self.free[engine] if b not in blocks]
        for q in self.requests:  # a step that was under way is over when its blocks are given away
            if q.engine == engine and q.status != "running" and {*q.held_blocks} & {*blocks}:
                q.late = self.family.late

    def _forget(self, engine: str, blocks: tuple[int, ...], cached: int) -> None:
        """Blocks that are handed out newly hold nothing that a request could hit."""
        size = self.family.block_size
        for block in blocks[-(-cached // size) :]:
            for slot in range(block * size, (block + 1) * size):
                self.kv.pop((engine, slot), None)

    def _on_begin(
        self,
        engine: str,
        name: str,
        trace: str,
        prompt: Tokens,
        cached: int,
        external: int,
        blocks: tuple[int, ...],
        *_: str,
    ) -> None:
        size = self.family.block_size
        seed = 0 if self.family.twins else len(self.requests)
        r = Req(name, seed, engine, trace, len(prompt), prompt, list(blocks), cached)
        self.requests.append(r)
        self._hold(engine, blocks)
        self._forget(engine, blocks, cached)
        if cached == len(prompt):  # the token behind it came along with the KV
            r.tokens = (*prompt, 900)
        if external:
            self._external_names = self._external_names | {name}
            for p in range(cached):
                self.kv[engine, blocks[p // size] * size + p % size] = prompt[: p + 1]

    def _on_add(self, name: str, blocks: tuple[int, ...]) -> None:
        r = self._req(name)
        self._hold(r.engine, blocks)
        self._forget(r.engine, blocks, 0)
        r.blocks += blocks

    def _on_step(self, engine: str, runs: tuple[tuple[str, int, int], ...]) -> None:
        size = self.family.block_size
        self.steps[engine] = self.steps.get(engine, 0) + 1
        for name, start, count in runs:
            r = self._req(name)
            if r.status != "running":
                blocks, tokens = list(r.held_blocks), r.tokens
                r.late += 1
                while len(tokens) < start + count:
                    tokens = (*tokens, r.sampled(len(tokens)))
            else:
                if r.base >= 0 and r.open_drafts:
                    r.tokens, r.computed = r.outcome(start - r.base - 1)
                blocks, tokens = r.blocks, r.tokens
                drafts = start + count - len(tokens)
                if drafts > 0:
                    first = len(tokens)
                    tokens = tokens + tuple(r.sampled(first + i) + 1 for i in range(drafts))
                r.stepped = True
                self.last_step[name] = self.steps[engine]
                r.base, r.open_drafts = -1, 0
                if drafts > 0:
                    r.base, r.open_drafts, r.computed = start, drafts, start + 1
                else:
                    r.computed = start + count
                    if r.computed == len(r.tokens):
                        r.tokens = (*r.tokens, r.sampled(r.computed))
            for p in range(start, start + count):
                if p // size < len(blocks):
                    self.kv[engine, blocks[p // size] * size + p % size] = tokens[: p + 1]

    _on_skip = _on_bad = _on_step

    def _end(self, name: str, tokens: Tokens, computed: int, status: str) -> None:
        r = self._req(name)
        r.tokens, r.computed, r.base, r.open_drafts = tokens, computed, -1, 0
        r.status, r.late = status, 0
        r.held_blocks, r.blocks = tuple(r.blocks), []
        others = {b for q in self.requests if q.engine == r.engine for b in q.blocks}
        self.free[r.engine] += [b for b in reversed(r.held_blocks) if b not in others]

    def _on_finish(self, name: str, tokens: Tokens, _: str, computed: int, *__: str) -> None:
        self._end(name, tokens, computed, "ended")

    def _on_preempt(self, name: str, tokens: Tokens, computed: int) -> None:
        self._end(name, tokens, computed, "preempted")

    def _on_resume(self, name: str, cached: int, blocks: tuple[int, ...], told: int = 0) -> None:
        r = self._req(name)
        if told > len(r.tokens):
            r.tokens, r.given = r.grown(told), told
        self._hold(r.engine, blocks)
        self._forget(r.engine, blocks, cached)
        r.blocks, r.computed, r.status = list(blocks), cached, "running"
        r.stepped = False

    def _on_rewind(self, name: str, position: int, _: int) -> None:
        r = self._req(name)
        r.tokens, r.computed = r.outcome(position - r.base - 1)
        r.base, r.open_drafts = -1, 0

    def _on_external(self, engine: str, blocks: tuple[int, ...]) -> None:
        size = self.family.block_size
        for block in blocks:  # what is loaded is the KV that a later request asks for, or other
            for slot in range(block * size, (block + 1) * size):
                self.kv.setdefault((engine, slot), ())

    def _on_copy(self, engine: str, sources: tuple[int, ...], targets: tuple[int, ...]) -> None:
        size = self.family.block_size
        for source, target in zip(sources, targets, strict=True):
            for i in range(size):
                self.kv.pop((engine, target * size + i), None)
                if (tokens := self.kv.get((engine, source * size + i))) is not None:
                    self.kv[engine, target * size + i] = tokens
            if target < self.family.num_blocks:
                self.loaded = (*self.loaded, (engine, target))
                for q in self.requests:  # as in _hold
                    if q.status != "running" and target in q.held_blocks:
                        q.late = self.family.late

    def _on_reset(self, engine: str) -> None:
        held = {b for q in self.requests if q.engine == engine for b in q.blocks}
        size, f = self.family.block_size, self.family
        held |= {*range(f.num_blocks, f.num_blocks + f.host_blocks)}
        self.kv = {
            (e, slot): t for (e, slot), t in self.kv.items() if e != engine or slot // size in held
        }

    def _on_emptied(self, _: str) -> None:
        pass

    def _on_version(self, version: int | None) -> None:
        self.version, self.versions = version, self.versions + (version is not None)

    def _on_delete(self, trace: str) -> None:
        self.deleted = (*self.deleted, trace)

    def _on_flush(self) -> None:
        pass

    _on_sync = _on_flush


def every(family: Family, depth: int | None = None) -> Iterator[tuple[Event, ...]]:
    """All orders of `depth` events, and those that end before."""
    limit = family.depth if depth is None else depth

    def walk(engine: Engine, order: tuple[Event, ...]) -> Iterator[tuple[Event, ...]]:
        events = engine.events() if len(order) < limit else []
        if not events:
            yield order
        for event in events:
            after = engine.copy()
            after.apply(event)
            yield from walk(after, (*order, event))

    yield from walk(Engine(family), ())


def random_order(
    family: Family, length: int, rng: random.Random, like: Callable[[Event], float]
) -> tuple[Event, ...]:
    """One order of about `length` events; `like` weighs them."""
    engine, order = Engine(family), []
    for _ in range(length):
        events = engine.events()
        if not events:
            break
        event = rng.choices(events, [like(e) for e in events])[0]
        engine.apply(event)
        order.append(event)
    return tuple(order)


def legal(family: Family, order: Iterable[Event]) -> bool:
    """Whether the docstrings allow the order."""
    engine = Engine(family, every_way=True)
    for event in order:
        if event not in engine.events():
            return False
        engine.apply(event)
    return True


FAMILIES = (
    Family("drafts", 1, 24, drafts=(0, 1), late=2, same_prompt=False, skips=True),
    Family("drafts", 4, 8, drafts=(0, 1), late=2, ends=("stop", "abort"), same_prompt=False),
    Family("two drafts", 4, 8, drafts=(0, 2), late=2, ends=("stop", "handoff"), same_prompt=False),
    Family("late skips", 4, 8, late=2, skips=True, invalid=True, preempts=True, same_prompt=False),
    Family("rewinds", 4, 8, drafts=(0, 2), rewinds=True, flushes=True, same_prompt=False),
    Family(
        "hand-over",
        4,
        8,
        drafts=(0,),
        ends=("stop", "handoff"),
        same_trace=True,
        own_trace=False,
        decode_engine=True,
        versions=True,
        transfers=("x",),
    ),
    Family(
        "hand-over that fails",
        4,
        8,
        prompt_len=5,
        ends=("stop", "handoff"),
        same_trace=True,
        own_trace=False,
        decode_engine=True,
        turns=False,
        transfers=("x",),
        failures=True,
        skips=True,
        preempts=True,
    ),
    Family(
        "hand-over to two shards",
        4,
        8,
        prompt_len=5,
        ends=("stop", "handoff"),
        same_trace=True,
        own_trace=False,
        decode_engine=True,
        sharded=True,
        turns=False,
        transfers=("x",),
        failures=True,
    ),
    Family(
        "hand-over along hops",
        4,
        8,
        requests=3,
        ends=("stop", "handoff"),
        same_trace=True,
        own_trace=False,
        decode_engine=True,
        externals=True,
        transfers=("x", "y"),
        version=None,
    ),
    Family(
        "hand-over at a digest",
        64,
        4,
        prompt_len=63,
        ends=("stop", "handoff"),
        same_trace=True,
        own_trace=False,
        decode_engine=True,
        transfers=("x",),
    ),
    Family(
        "turns that are cut at a digest",
        64,
        6,
        prompt_len=62,
        requests=3,
        drafts=(0, 2),
        ends=("stop", "abort"),
        same_trace=True,
        own_trace=False,
        decode_engine=True,
        cuts=True,
    ),
    Family(
        "samples",
        4,
        8,
        prompt_len=4,
        same_trace=True,
        own_trace=False,
        joint=True,
        turns=False,
        early_blocks=True,
    ),
    Family(
        "samples",
        1,
        24,
        prompt_len=2,
        requests=3,
        same_trace=True,
        joint=True,
        turns=False,
        ends=("abort",),
        chunks=True,
        depth=7,
    ),
    Family(
        "deletion",
        4,
        8,
        requests=2,
        same_trace=True,
        own_trace=False,
        deletes=True,
        sharded=True,
        turns=False,
    ),
    Family("restored KV", 4, 8, prompt_len=5, externals=True, versions=True, turns=False),
    Family(
        "restored KV of no version",
        4,
        8,
        prompt_len=5,
        externals=True,
        versions=True,
        turns=False,
        version=None,
    ),
    Family(
        "restored KV, declared",
        4,
        12,
        prompt_len=5,
        requests=4,
        same_trace=True,
        decode_engine=True,
        externals=True,
        versions=True,
        preempts=True,
        flushes=True,
        declares=True,
    ),
    Family(
        "restored KV, told",
        4,
        12,
        prompt_len=5,
        requests=4,
        decode_engine=True,
        externals=True,
        versions=True,
        resets=True,
        emptied=True,
        fresh=True,
        turns=False,
    ),
    Family(
        "cached KV of nobody",
        4,
        8,
        prompt_len=4,
        requests=3,
        prompts=(4, 5),
        decode_engine=True,
        versions=True,
        resets=True,
        fresh=True,
        skips=True,
        invalid=True,
        chunks=True,
    ),
    Family(
        "restored KV in two shards",
        4,
        12,
        prompt_len=5,
        requests=3,
        externals=True,
        versions=True,
        resets=True,
        emptied=True,
        fresh=True,
        sharded=True,
        turns=False,
    ),
    Family(
        "restored KV of two models",
        4,
        12,
        prompt_len=5,
        requests=3,
        decode_engine=True,
        externals=True,
        declares=True,
        turns=False,
        strangers="d",
    ),
    Family(
        "labels",
        4,
        8,
        prompt_len=5,
        externals=True,
        same_trace=True,
        turns=False,
        marks=len(MARKS),
        declares=True,
    ),
    Family("preemption", 1, 24, preempts=True, late=2, drafts=(0, 1), ends=("stop",), turns=False),
    Family("preemption", 4, 8, preempts=True, late=1, versions=True, requests=1, ends=("abort",)),
    Family(
        "drafts and preemption",
        4,
        9,
        requests=3,
        preempts=True,
        late=1,
        drafts=(0, 1),
        ends=("stop", "abort"),
        turns=False,
        same_trace=True,
    ),
    Family(
        "attempts that sample nothing",
        *(4, 12),
        prompt_len=3,
        requests=1,
        preempts=True,
        counted=True,
        sessions=True,
        late=1,
        chunks=True,
        skips=True,
        externals=True,
        ends=("stop", "abort"),
        turns=False,
    ),
    Family("resets", 4, 8, resets=True, flushes=True, externals=True),
    Family("turns", 4, 8, requests=3, same_trace=True, own_trace=False, same_prompt=False),
    Family(
        "retries",
        4,
        8,
        requests=3,
        same_trace=True,
        own_trace=False,
        ends=("stop", "abort"),
        cuts=True,
        versions=True,
    ),
    Family("equal siblings", 1, 24, requests=3, same_trace=True, own_trace=False, twins=True),
    Family(
        "equal siblings",
        4,
        10,
        requests=4,
        same_trace=True,
        own_trace=False,
        decode_engine=True,
        twins=True,
        transfers=("x",),
        ends=("stop", "abort"),
    ),
    Family(
        "rivals elsewhere",
        *(4, 8),
        requests=3,
        same_trace=True,
        own_trace=False,
        decode_engine=True,
        cuts=True,
        ends=("stop", "abort"),
    ),
    Family(
        "rivals that hand over",
        *(1, 24),
        requests=3,
        same_trace=True,
        own_trace=False,
        twins=True,
        cuts=True,
        ends=("stop", "handoff"),
    ),
    Family("reuse", 1, 10, requests=3, drafts=(0, 1), ends=("stop", "abort")),
    Family("host tier", 4, 8, prompt_len=5, host_blocks=1, versions=True, turns=False),
    Family("host tier", 1, 24, host_blocks=2, resets=True, flushes=True, turns=False),
    Family(
        "host tier and late rows",
        *(4, 8),
        prompt_len=3,
        host_blocks=1,
        drafts=(0, 2),
        late=2,
        ends=("stop", "abort"),
        turns=False,
    ),
)
