"""Every call of every agent, kept for ever, and what one agent's calls say of rows and slots.

Nothing is kept up to date: a question is answered by going back through the calls that bear on it.
A value is a set of rows, with None for "unknown": one element where the contract decides, several
where it leaves the choice.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

#: Expert ids by layer; what makes rows of different passes differ.
Ids = Mapping[int, tuple[int, ...]]


@dataclass(eq=False)
class Row:
    """One token's routing, as one forward pass computed it for one agent, taken or lost."""

    part: Part | None
    attempt: int
    position: int
    ids: Ids
    step: int
    version: int | None
    """None: nobody gave one."""
    draft: bool
    at: int
    lost: str = ""
    """Why its agent has no row of it; "" if it has one."""

    def __repr__(self) -> str:
        whose = f"{self.part.request_id}@{self.position}" if self.part else "slot"
        return f"<{whose} of step {self.step}{' draft' if self.draft else ''}>"


Value = frozenset["Row | None"]
UNKNOWN: Value = frozenset((None,))


@dataclass(eq=False)
class Run:
    """Consecutive rows of one request in one step, lost ones too."""

    at: int
    step: int
    attempt: int
    start: int
    rows: list[Row]

    @property
    def stop(self) -> int:
        return self.start + len(self.rows)


@dataclass(eq=False)
class Attempt:
    """One begin or resume."""

    at: int
    cached: int
    external: int
    blocks: list[int]
    version: int | None
    """The engine's at that moment."""
    had: int | None = None
    """How many tokens the request had, as the resume told; None: it told nothing."""
    inherits_at: int = -1
    surely: bool = True
    """Whether the contract says that it inherits: by its first rows, not by an early end."""


@dataclass(eq=False)
class Part:
    """One request, as one agent was told of it."""

    writer: Writer
    request_id: str
    trace_id: str
    prompt_len: int
    index: int
    """Requests that this agent began before."""
    prompt: tuple[int, ...] | None
    earlier_ends: tuple[int, ...]
    """Where the last four requests of the trace ended that gave this agent all their tokens; of an
    aborted one, its tail."""
    begun_at: int
    transfer: str
    """The hand-over that its external KV comes by, if the begin named one."""
    labels: Mapping[str, str]
    attempts: list[Attempt] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    rewinds: list[tuple[int, int, int]] = field(default_factory=list)
    """(at, position, last step that is meant)"""
    preempts: list[tuple[int, int, int]] = field(default_factory=list)
    """(at, attempt, computed tokens)"""
    ended_at: int = -1
    num_tokens: int = 0
    reason: str = ""
    handed: str = ""
    """The hand-over that it ended with."""
    tokens: tuple[int, ...] | None = None
    released_at: int = -1
    """When it gave up its blocks; -1 while it holds some."""

    def digests(self) -> dict[int, tuple[int, ...]]:
        """The tokens before each position at which both sides of a comparison have a digest."""
        known: dict[int, tuple[int, ...]] = {}
        for tokens, ends in ((self.prompt, self.earlier_ends), (self.tokens, self.ends())):
            if tokens is not None:
                at = {*range(64, len(tokens), 64), len(tokens), *ends}
                known.update({p: tokens[:p] for p in at if 0 < p <= len(tokens)})
        return known

    def ends(self) -> tuple[int, ...]:
        """Its last position, and where it was aborted all of its tail."""
        tail = range(max(self.prompt_len + 1, self.num_tokens - 64), self.num_tokens)
        return (*(tail if self.reason == "abort" else ()), self.num_tokens)

    def end(self, number: int = -1) -> int:
        """One past the last position of an attempt that was computed, or is cached."""
        number %= len(self.attempts)
        stop = self.attempts[number].cached
        over = self.attempts[number + 1].at if number + 1 < len(self.attempts) else 1 << 60
        runs = [r for r in self.runs if r.attempt == number]
        if runs:
            stop = runs[-1].stop
        for when, position, step in self.rewinds:
            if runs and runs[-1].step <= step and when < over:
                stop = min(stop, position)
        return min([stop, *(kept for _, of, kept in self.preempts if of == number)])


@dataclass(eq=False)
class Writer:
    """One agent: a shard of one boot of an engine."""

    engine_id: str
    boot_id: str
    shard: str
    layer_ids: tuple[int, ...]
    num_experts: int
    block_size: int
    num_blocks: int = 0
    """Without those of the host tier."""
    num_host_blocks: int = 0
    step: int = 0
    version: int | None = None
    model: str = ""
    declares: bool = False
    """Whether the deployment empties each store outside of the blocks at every update."""
    #: (at, weight version, whether it came from outside) of all KV that came into its blocks; None:
    #: of a version that nobody knows.
    kv: list[tuple[int, int | None, bool]] = field(default_factory=list)
    #: When it said that no KV is left outside of its blocks.
    emptied: list[int] = field(default_factory=list)
    #: Of `kv`, as far as somebody asked: (at, version known to be that, the last one of another
    #: version before; 0: none).
    came: list[tuple[int, int | None, int]] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)
    #: Of each slot: (at, row or None or the slot that it was copied from, whether it is certain),
    #: in order.
    effects: dict[int, list[tuple[int, Row | int | None, bool]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    #: When all slots of the engine's blocks became unknown.
    resets: list[int] = field(default_factory=list)
    #: When all slots did.
    losses: list[int] = field(default_factory=list)
    #: When a block was given to a request, or written by a copy, last.
    given: dict[int, int] = field(default_factory=dict)
    #: When a block was copied last.
    copied: dict[int, int] = field(default_factory=dict)


class Log:
    """All calls, in the order in which they were made."""

    def __init__(self) -> None:
        self.now = 0
        self.writers: list[Writer] = []
        self.parts: list[Part] = []
        self.deletions: list[tuple[int, str]] = []
        #: Traces of which calls may be missing at the server.
        self.unclear: set[str] = set()
        #: Whether the agents of requests that still run count as lost.
        self.settled = False
        #: Calls up to which all had arrived at some moment.
        self.flushes: list[int] = []

    def writer(self, writer: Writer) -> Writer:
        self.writers.append(writer)
        return writer

    # ------------------------------------------------------------------ calls

    def begin(
        self,
        writer: Writer,
        request_id: str,
        trace_id: str,
        prompt_len: int,
        cached: int,
        external: int,
        blocks: Sequence[int],
        prompt: Iterable[int] | None,
        transfer: str = "",
        labels: Mapping[str, str] | None = None,
    ) -> Part:
        self.now += 1
        trace_id = trace_id or request_id
        ended = [p for p in writer.parts if p.trace_id == trace_id and p.tokens]
        ends = [
            n
            for p in sorted(ended, key=lambda p: p.ended_at)[-4:]
            for n in p.ends()
            if n >= p.num_tokens - 8
        ]
        part = Part(
            writer,
            request_id,
            trace_id,
            prompt_len,
            len(writer.parts),
            None if prompt is None else tuple(int(t) for t in prompt),
            tuple(ends),
            self.now,
            transfer,
            labels or {},
        )
        writer.parts.append(part)
        self.parts.append(part)
        self._attempt(part, cached, external, blocks)
        return part

    def resume(
        self,
        part: Part,
        cached: int,
        blocks: Sequence[int],
        external: int,
        num_tokens: int | None = None,
    ) -> None:
        if part.released_at < 0:
            self.preempt(part, cached)
        self.now += 1
        part.released_at = -1
        self._attempt(part, cached, external, blocks)
        part.attempts[-1].had = num_tokens

    def _attempt(self, part: Part, cached: int, external: int, blocks: Sequence[int]) -> None:
        attempt = Attempt(self.now, cached, external, list(blocks), part.writer.version)
        if external:
            part.writer.kv.append((self.now, part.writer.version, True))
        part.attempts.append(attempt)
        size = part.writer.block_size
        for index, block in enumerate(attempt.blocks):
            # A block that holds cached tokens is a hit, not handed out newly.
            if index * size >= cached - external:
                part.writer.given[block] = self.now
            for position in range(index * size, (index + 1) * size):
                if position >= cached - external:
                    self._effect(part.writer, self._slot(part, attempt, position), None)

    def add_blocks(self, part: Part, blocks: Iterable[int]) -> None:
        self.now += 1
        for block in blocks:
            part.attempts[-1].blocks.append(block)
            part.writer.given[block] = self.now
            for slot in self._slots_of(part.writer, block):
                self._effect(part.writer, slot, None)

    def step(
        self,
        writer: Writer,
        runs: Iterable[tuple[Part, int, int]],
        rows: Sequence[Ids] | None,
    ) -> int:
        """A step, or a skip where there are no rows."""
        self.now += 1
        writer.step += 1
        writer.kv.append((self.now, None if rows is None else writer.version, False))
        at, told = 0, []
        for part, start, count in runs:
            told.append((part, start, [None] * count if rows is None else rows[at : at + count]))
            at += count
        first = {part for part, _, _ in told if part.attempts[-1].inherits_at < 0}
        for part, start, ids in sorted(told, key=lambda run: run[0] in first):
            if part.released_at < 0 and part.attempts[-1].inherits_at < 0:
                # Of several that inherit in one step, either may come first.
                self._inherit(part, len(first) == 1)
            self._run(part, start, ids)
        return writer.step

    def _inherit(self, part: Part, sure: bool) -> None:
        """The rest of the block that is cached in part becomes unknown once more."""
        attempt, size = part.attempts[-1], part.writer.block_size
        attempt.inherits_at = self.now
        known = attempt.cached - attempt.external
        for position in range(known, -(-known // size) * size if size else known):
            self._effect(part.writer, self._slot(part, attempt, position), None, sure)

    def _run(self, part: Part, start: int, ids: Sequence[Ids | None]) -> None:
        writer, attempt = part.writer, part.attempts[-1]
        if part.released_at >= 0:  # late
            for position in range(start, start + len(ids)):
                block = self._block(part, attempt, position)
                if block is not None and writer.copied.get(block, 0) > part.released_at:
                    writer.losses.append(self.now)
                if block is not None and writer.given.get(block, 0) <= part.released_at:
                    self._effect(writer, self._slot(part, attempt, position), None)
            return
        number = len(part.attempts) - 1
        rows: list[Row] = []
        for position, row_ids in enumerate(ids, start):
            bad = row_ids is not None and not valid_ids(row_ids, writer.num_experts)
            lost = "not_captured" if row_ids is None else "invalid_ids" if bad else ""
            draft = position > start and position >= part.prompt_len
            step, version = writer.step, writer.version
            row = Row(part, number, position, row_ids or {}, step, version, draft, self.now, lost)
            rows.append(row)
            self._effect(writer, self._slot(part, attempt, position), None if lost else row)
        part.runs.append(Run(self.now, writer.step, number, start, rows))

    def step_slots(self, writer: Writer, slots: Iterable[int], rows: Sequence[Ids]) -> int:
        self.now += 1
        writer.step += 1
        writer.kv.append((self.now, writer.version, False))
        for slot, ids in zip(slots, rows, strict=True):
            row = None
            if valid_ids(ids, writer.num_experts):
                row = Row(None, 0, -1, ids, writer.step, writer.version, False, self.now)
            self._effect(writer, slot, row)
        return writer.step

    def rewind(self, part: Part, position: int, step: int) -> None:
        self.now += 1
        if part.ended_at < 0:
            part.rewinds.append((self.now, position, step or part.writer.step))

    def preempt(self, part: Part, computed: int) -> None:
        self.now += 1
        part.preempts.append((self.now, len(part.attempts) - 1, computed))
        if part.released_at < 0:  # else it holds no blocks
            self._lose(part, computed)
            self._release(part, computed)

    def _lose(self, part: Part, stop: int) -> None:
        """Positions that passes of an attempt computed, and of which no row has come."""
        writer, number = part.writer, len(part.attempts) - 1
        rows = [row for run in part.runs if run.attempt == number for row in run.rows]
        ends = (row.position + 1 for row in rows if self.alive(row, self.now))
        start = max([part.attempts[-1].cached, *ends])
        facts = {}, writer.step, writer.version, False, self.now, "not_captured"
        lost = [Row(part, number, p, *facts) for p in range(start, stop)]
        if lost:
            part.runs.append(Run(self.now, writer.step, number, start, lost))

    def finish(
        self,
        part: Part,
        num_tokens: int,
        reason: str,
        tokens: Iterable[int] | None,
        transfer: str = "",
    ) -> None:
        self.now += 1
        if part.released_at < 0:
            self._release(part, num_tokens - 1)
        part.ended_at, part.num_tokens, part.reason = self.now, num_tokens, reason
        part.handed = transfer
        part.tokens = None if tokens is None else tuple(int(t) for t in tokens)

    def _release(self, part: Part, kept: int) -> None:
        attempt, size = part.attempts[-1], part.writer.block_size
        ran = attempt.inherits_at >= 0
        if not ran:
            attempt.surely = False
            self._inherit(part, False)
        for position in range(max(kept, 0), len(attempt.blocks) * size):
            self._effect(part.writer, self._slot(part, attempt, position), None, ran)
        part.released_at = self.now

    def external(self, writer: Writer, blocks: Iterable[int]) -> None:
        self.now += 1
        writer.kv.append((self.now, writer.version, True))
        for block in blocks:
            for slot in self._slots_of(writer, block):
                self._effect(writer, slot, None)

    def copy(self, writer: Writer, sources: Iterable[int], targets: Iterable[int]) -> None:
        self.now += 1
        for source, target in zip(sources, targets, strict=True):
            writer.copied[source] = writer.given[target] = self.now
            pairs = zip(self._slots_of(writer, source), self._slots_of(writer, target), strict=True)
            for one, other in pairs:
                writer.effects[other].append((self.now, one, True))

    def reset(self, writer: Writer) -> None:
        self.now += 1
        writer.resets.append(self.now)

    def emptied(self, writer: Writer) -> None:
        self.now += 1
        writer.emptied.append(self.now)

    def flushed(self) -> None:
        """All calls so far have arrived."""
        self.flushes.append(self.now)

    def set_version(self, writer: Writer, version: int | None) -> None:
        writer.version = version

    def delete(self, trace_id: str) -> None:
        """A reader deletes a trace; all calls before have arrived."""
        self.now += 1
        self.deletions.append((self.now, trace_id))

    # ------------------------------------------------------------------ arrival

    def sooner(self, part: Part, other: Part) -> bool:
        """Whether one begin arrived before another one for certain."""
        first = part.attempts[0]
        sent = first.inherits_at if first.cached else first.at
        if sent < 0:
            return False
        if part.writer is other.writer and sent < other.begun_at:
            return True
        return any(sent <= flush < other.begun_at for flush in self.flushes)

    # ------------------------------------------------------------------ slots

    def _effect(self, writer: Writer, slot: int | None, row: Row | None, sure: bool = True) -> None:
        if slot is not None:
            writer.effects[slot].append((self.now, row, sure))

    def _block(self, part: Part, attempt: Attempt, position: int) -> int | None:
        index = (
            position // part.writer.block_size if part.writer.block_size else len(attempt.blocks)
        )
        return attempt.blocks[index] if index < len(attempt.blocks) else None

    def _slot(self, part: Part, attempt: Attempt, position: int) -> int | None:
        block, size = self._block(part, attempt, position), part.writer.block_size
        return None if block is None else block * size + position % size

    @staticmethod
    def _slots_of(writer: Writer, block: int) -> range:
        return range(block * writer.block_size, (block + 1) * writer.block_size)

    def slot(self, writer: Writer, slot: int, at: int | None = None) -> Value:
        """The row that a slot names after the call `at`; after the last one if None."""
        at = self.now if at is None else at
        also_unknown = False
        found: set[Row | None] = set()
        written = -1
        for when, row, sure in reversed(writer.effects.get(slot, ())):
            if when > at:
                continue
            if found:
                # Requests that hit one prefix write the same KV to one slot in one step: the row of
                # either is right.
                if when != written or not isinstance(row, Row):
                    break
                found |= self.confirmed(row, at)
                continue
            host = slot >= writer.num_blocks * writer.block_size
            if any(
                when < reset <= at
                for reset in (*writer.losses, *(writer.emptied if host else writer.resets))
            ):
                return UNKNOWN
            if when in writer.losses:  # of the step whose late rows lost all slots, or of before
                also_unknown = True
            if not sure:
                also_unknown = True
                continue
            if row is None:
                return UNKNOWN
            if isinstance(row, int):  # what the other slot named before, whatever became of it
                found |= self.slot(writer, row, when - 1)
                break
            if row.part is not None and self.deleted(row.part, row.at):
                also_unknown = True  # computed for a trace that was deleted before
            found |= self.confirmed(row, at)
            written = when
        if also_unknown:
            found.add(None)
        return frozenset(found) or UNKNOWN

    # ------------------------------------------------------------------ rows

    def alive(self, row: Row, at: int) -> bool:
        """Whether nothing has rejected the row, up to the call `at`."""
        part, p = row.part, row.position
        if part is None:
            return True
        if any(
            row.at < run.at <= at and run.attempt == row.attempt and run.start <= p
            for run in part.runs
        ):
            return False
        if any(
            row.at < when <= at and position <= p and row.step <= step
            for when, position, step in part.rewinds
        ):
            return False
        if any(when <= at and n == row.attempt and kept <= p for when, n, kept in part.preempts):
            return False
        # Where an earlier attempt left KV, it stays: the end is that of the last one.
        last = row.attempt == len(part.attempts) - 1
        return not (last and 0 <= part.ended_at <= at and p >= part.num_tokens - 1)

    def confirmed(self, row: Row, at: int) -> Value:
        """The row if it may be served after the call `at`; None if it may still be rejected."""
        part = row.part
        if part is None:
            return frozenset((row,))
        if not self.alive(row, at):
            return UNKNOWN
        if not row.draft:
            return frozenset((row,))
        if any(row.at < run.at <= at and run.start > row.position for run in part.runs):
            return frozenset((row,))
        kept = any(
            when <= at and n == row.attempt and kept > row.position
            for when, n, kept in part.preempts
        )
        return frozenset((row,)) if kept or 0 <= part.ended_at <= at else UNKNOWN

    def own(self, part: Part, number: int, position: int) -> Value:
        """The row that an attempt computed itself, or lost."""
        if part.ended_at >= 0 and position >= part.num_tokens - 1:
            return UNKNOWN
        for run in reversed(part.runs):
            if run.attempt == number and run.start <= position < run.stop:
                row = run.rows[position - run.start]
                value = self.confirmed(row, self.now)
                # Whether a draft is lost before it is confirmed, the contract leaves open.
                unsure = row.lost and self.alive(row, self.now)
                return value | {row} if unsure else value
        return UNKNOWN

    def failed(self, parts: Iterable[Part], position: int) -> frozenset[bool]:
        """Whether KV from elsewhere was none, or may have been: a pass may still compute it.

        Passes go up: what the first attempt computed, lost or gave up at or before the position
        shows it. Rows that were taken back before the agent sent them may be unknown to the server.
        """
        parts = [*parts]
        over = all(part.ended_at >= 0 or len(part.attempts) > 1 for part in parts)
        above = unheard = False
        for part in parts:
            first = part.attempts[1].at if len(part.attempts) > 1 else self.now + 1
            given_up = [kept for _, number, kept in part.preempts if not number]
            given_up += [kept for when, kept, _ in part.rewinds if when < first]
            if any(kept <= position for kept in given_up):
                return frozenset((True,))
            for run in part.runs:
                if run.attempt or not run.rows:
                    continue
                if run.start <= position:
                    return frozenset((True,))
                above = above or any(self.alive(row, self.now) for row in run.rows)
                unheard = True
        if above or over:
            return frozenset((False,))
        return frozenset((True, False) if unheard else (True,))

    def cached(self, part: Part, number: int, position: int) -> Value:
        """The row that an attempt inherited."""
        attempt = part.attempts[number]
        if not 0 <= position < attempt.cached - attempt.external:
            return UNKNOWN
        if part.ended_at >= 0 and position >= part.num_tokens - 1:
            return UNKNOWN
        slot = self._slot(part, attempt, position)
        if slot is None:
            return UNKNOWN
        if attempt.inherits_at < 0:  # the contract does not say when the server hears of it
            return self.slot(part.writer, slot) | UNKNOWN
        value = self.slot(part.writer, slot, attempt.inherits_at)
        return value if attempt.surely else value | UNKNOWN

    def held(self, part: Part) -> bool:
        """Whether the server need not know of the request yet."""
        first = part.attempts[0]
        return first.cached > 0 and first.inherits_at < 0

    def deleted(self, part: Part, at: int) -> bool:
        """Whether a call `at` for this request came after the deletion of its trace."""
        return any(
            trace_id == part.trace_id and part.begun_at < when < at
            for when, trace_id in self.deletions
        )


def valid_ids(ids: Ids, num_experts: int) -> bool:
    """Whether every layer of a row has different experts that exist."""
    return all(
        len(set(layer)) == len(layer) and all(0 <= i < num_experts for i in layer)
        for layer in ids.values()
    )


Policy = Literal["as_sampled", "latest"]
