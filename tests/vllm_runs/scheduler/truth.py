"""Expected reads of the runs of vllm_runs.scheduler, and their comparison.

Worked out from three things: which tokens the model was fed, which row it chose for each, and which
row computed what lies in each KV slot.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from routetrace.client import UNKNOWN_VERSION, Trace, TraceState
from routetrace.common.layout import ModelLayout

LAYOUT = ModelLayout((1, 2, 4), 6, 16, 2)
BLOCK = 16
MAX_LEN = 400
MAX_POSITIONS = MAX_LEN + 8
"""Of a request, rejected drafts included."""

#: In place of the number of a row: none was computed; nobody knows which one it was; it was not
#: captured; it is not kept, whatever came of it. All are below the numbers of rows.
NOBODY, UNKNOWN, PAUSED, GIVEN_UP = -1, -2, -3, -4
_REASONS = {UNKNOWN: "kv_unknown", PAUSED: "not_captured", GIVEN_UP: "not_captured"}

Ints = np.ndarray


class Rows:
    """Every row that the fake model chose, by its number."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self.ids = np.zeros((1 << 14, len(LAYOUT.layer_ids), LAYOUT.top_k), np.uint8)
        self.versions = np.zeros(1 << 14, np.int64)
        self.size = 0

    def choose(self, n: int) -> Ints:
        """Ids [n, L, 2] that a router could have chosen."""
        layers, experts = len(LAYOUT.layer_ids), LAYOUT.num_experts
        ids = np.empty((n, layers, 2), np.int64)
        ids[..., 0] = self._rng.integers(experts, size=(n, layers))
        ids[..., 1] = (ids[..., 0] + self._rng.integers(1, experts, size=(n, layers))) % experts
        return ids

    def keep(self, ids: Ints, version: int) -> Ints:
        """Numbers [n] of new rows, computed by a weight version."""
        first, self.size = self.size, self.size + len(ids)
        while self.size > len(self.ids):
            self.ids = np.concatenate([self.ids, np.zeros_like(self.ids)])
            self.versions = np.concatenate([self.versions, np.zeros_like(self.versions)])
        self.ids[first : self.size] = ids
        self.versions[first : self.size] = version
        return np.arange(first, self.size)


class Attempt:
    """One pass over the positions of a request."""

    def __init__(self) -> None:
        self.numbers = np.full(MAX_POSITIONS, NOBODY)
        """[MAX_POSITIONS] of the row at each position, or why there is none."""
        self.fed = np.full(MAX_POSITIONS, -1)
        """[MAX_POSITIONS] the token that the row was computed for."""
        self.sampled = False
        """Whether vLLM delivered a token that it sampled."""

    def put(self, start: int, numbers: Ints, fed: Ints) -> None:
        """Rows were computed. What was computed behind them before is taken back.

        So it is where KV from elsewhere turns out not to have arrived: what was computed on it is
        computed again, and the answer goes on from that. Of the KV nobody knows more than before.
        """
        stop = start + len(numbers)
        self.numbers[start:stop], self.fed[start:stop] = numbers, fed
        behind = self.numbers[stop:]
        behind[behind != UNKNOWN] = NOBODY

    def give_up(self, start: int) -> None:
        """Rows at and after a position are not kept, whatever comes of them."""
        behind = self.numbers[start:]
        behind[(behind >= 0) | (behind == PAUSED)] = GIVEN_UP


@dataclass(eq=False)
class Life:
    """One engine request."""

    request_id: str
    trace_id: str
    shown: list[int]
    """What its client knows: prompt and answer."""
    max_tokens: int
    kept: bool = True
    """Whether its routing is to be kept."""
    labels: dict[str, str] = field(default_factory=dict)
    session: bool = False
    waits: bool = False
    """Whether a session has answered all its input."""
    inputs: deque[list[int] | None] = field(default_factory=deque)
    """More input of a session, which its scheduler has not got to; None ends it."""
    chat: Chat | None = None
    reason: str = ""
    """How it ended."""
    ended_at: int = 0
    """Steps before it ended."""
    preempted: bool = False
    hurt: bool = False
    """Whether some of it may be lost, since capture broke down."""
    external: bool = False
    """Whether some of its KV came from elsewhere."""
    attempts: list[Attempt] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    drafts: list[int] = field(default_factory=list)
    """Those that the step which runs has to judge."""
    next: int | None = None
    """Position of the last token that the model sampled and was not fed, where the scheduler may
    not know it; None while it does."""
    fed: Ints = field(default_factory=lambda: np.full(MAX_POSITIONS, -1))
    """[MAX_POSITIONS] the tokens as the model knows them, drafts of the step that runs included."""
    prompt_len: int = field(init=False)

    def __post_init__(self) -> None:
        self.prompt_len = len(self.shown)

    @property
    def that_sampled(self) -> list[Attempt]:
        """The attempts of which vLLM delivered a token, else the last."""
        return [a for a in self.attempts if a.sampled] or self.attempts[-1:]


@dataclass(eq=False)
class Chat:
    """Turns of one conversation in one trace."""

    trace_id: str
    lives: list[Life] = field(default_factory=list)


class Slots:
    """The slots of a KV cache."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._numbers = np.full(num_blocks * BLOCK, NOBODY)
        self._tokens = np.full(num_blocks * BLOCK, -1)

    def written(self, blocks: Sequence[int]) -> int:
        """Return the number of these blocks that have been in use."""
        return int((self._numbers[np.array(blocks, np.int64) * BLOCK] != NOBODY).sum())

    def write(self, life: Life, start: int, stop: int, numbers: Ints) -> None:
        """Rows of a request were computed, into its blocks."""
        slots = _slots(life, start, stop)
        self._numbers[slots] = np.where(numbers < 0, UNKNOWN, numbers)
        self._tokens[slots] = life.fed[start:stop]

    def give_up(self, life: Life, start: int) -> None:
        """A pass goes back: what was computed behind it is taken back, though vLLM may hit it."""
        ends = np.flatnonzero(life.attempts[-1].numbers[start:] >= 0)
        if len(ends):
            self._numbers[_slots(life, start, start + int(ends[-1]) + 1)] = UNKNOWN

    def load(self, blocks: Sequence[int]) -> None:
        """KV comes from elsewhere: nobody here knows what computed it."""
        for block in blocks:
            self._numbers[block * BLOCK : (block + 1) * BLOCK] = UNKNOWN
            self._tokens[block * BLOCK : (block + 1) * BLOCK] = -1

    def hit(self, life: Life, stop: int) -> bool:
        """Leading tokens of a request are in its blocks already.

        Returns:
            Whether they are those tokens, as far as that is known.
        """
        slots = _slots(life, 0, stop)
        tokens = self._tokens[slots]
        attempt = life.attempts[-1]
        attempt.numbers[:stop] = self._numbers[slots]
        attempt.fed[:stop] = life.fed[:stop]
        return not ((tokens != life.fed[:stop]) & (tokens >= 0)).any()


def _slots(life: Life, start: int, stop: int) -> Ints:
    positions = np.arange(start, stop)
    slots: Ints = np.array(life.blocks)[positions // BLOCK] * BLOCK + positions % BLOCK
    return slots


@dataclass
class Expected:
    """Expected result of a read."""

    numbers: Ints
    """[tokens - 1] of the rows, or below 0."""
    reasons: list[set[str]]
    """[tokens - 1] why a row may be missing; empty where it must be there. None at all: any may
    be, for any reason."""


def expected(lives: Sequence[Life]) -> Expected:
    """The rows of a trace: of each position, those of the turn that has it, of the first pass that
    sampled and has one.

    A turn has the positions of its tokens, without the last, which the next one is fed.
    """
    last = lives[-1]
    tokens = np.array(last.shown)
    numbers = np.full(len(tokens) - 1, NOBODY)
    reasons: list[set[str]] = [set() for _ in numbers]
    start = 0
    for life in (*(life for life in lives[:-1] if len(life.shown) > life.prompt_len), last):
        stop = min(len(numbers), len(life.shown) - 1)
        here, wanted = slice(start, stop), tokens[start:stop]
        lost = np.zeros(len(wanted), bool)  # an attempt computed it, and no other one supplies it
        for attempt in life.that_sampled:
            found = attempt.numbers[here]
            new = (attempt.fed[here] == wanted) & (numbers[here] < 0) & ~lost
            numbers[here][new & (found >= 0)] = found[new & (found >= 0)]
            lost |= new & (found == PAUSED)
        for position in (start + np.flatnonzero(numbers[here] < 0)).tolist():
            fed = [
                a.numbers[position] for a in life.attempts if a.fed[position] == tokens[position]
            ]
            why = reasons[position]
            why |= {name for code, name in _REASONS.items() if code in fed}
            if life.reason == "abort" and (not why or (numbers[position:] < 0).all()):
                why.add("aborted")
        start = stop
    return Expected(numbers, reasons)


@dataclass
class Tally:
    """Counts of comparisons and findings."""

    requests: int = 0
    rows: int = 0
    """Rows that are there and right, or wrong."""
    wrong: int = 0
    lost: int = 0
    """Rows that are missing, and should not be."""
    missing: Counter[str] = field(default_factory=Counter)
    """Rows that must be missing, and are, by reason."""
    counts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def __iadd__(self, other: Tally) -> Tally:
        self.requests += other.requests
        self.rows += other.rows
        self.wrong += other.wrong
        self.lost += other.lost
        self.missing += other.missing
        self.counts += other.counts
        self.faults += other.faults
        self.seconds += other.seconds
        return self

    def __str__(self) -> str:
        missing = " ".join(f"{n} {reason}" for reason, n in sorted(self.missing.items()))
        return (
            f"{self.requests} requests, {self.rows} rows compared, {self.wrong} wrong, "
            f"{self.lost} lost, missing by right: {missing or 'none'}; {self.seconds:.0f} s\n"
            f"    {' · '.join(f'{n} {name}' for name, n in sorted(self.counts.items()))}"
        )


def compare(tally: Tally, rows: Rows, lives: Sequence[Life], trace: Trace) -> None:
    """Compare a trace, cell by cell."""
    last, truth = lives[-1], expected(lives)
    tally.requests += len(lives)
    if last.hurt:
        # Its end may be unknown, and any row missing; none may be wrong.
        trace = trace.tokens(0, min(len(trace), len(truth.numbers)))
        truth = Expected(truth.numbers[: len(trace)], [])
        tally.missing["hurt"] += len(last.shown) - 1 - int(trace.valid.all(axis=1).sum())
    faults = [] if last.hurt else list(_facts(last, truth, trace))
    if len(trace) == len(truth.numbers) and trace.layer_ids == LAYOUT.layer_ids:
        faults += _rows(tally, rows, truth, trace)
    else:
        faults.append(f"{len(trace)} rows of layers {trace.layer_ids}")
    name = f"{last.trace_id!r} ({last.reason}, {len(last.attempts)} attempts)"
    tally.faults += [f"{name}: {fault}" for fault in faults]


def _rows(tally: Tally, rows: Rows, truth: Expected, trace: Trace) -> Iterator[str]:
    numbers, valid = truth.numbers, trace.valid
    there = numbers >= 0
    right = there & (trace.topk_ids == rows.ids[np.maximum(numbers, 0)]).all(axis=(1, 2))
    wrong, lost = valid.any(axis=1) & ~right, there & ~valid.all(axis=1)
    if not truth.reasons:
        lost[:] = False
    tally.rows += int(valid.any(axis=1).sum())
    tally.wrong += int(wrong.sum())
    tally.lost += int(lost.sum())
    for name, where in (("wrong", wrong), ("lost", lost)):
        if where.any():
            p = int(where.argmax())
            served = trace.topk_ids[p].tolist() if valid[p].any() else "nothing"
            yield f"{where.sum()} {name} rows, the first at {p}: {served} for row {numbers[p]}"
    for part in trace.missing if truth.reasons else ():
        tally.missing[part.reason] += part.stop - part.start
        for p in range(part.start, min(part.stop, len(numbers))):
            if part.reason not in truth.reasons[p] and not there[p]:
                yield f"{p} is missing as {part.reason}, not {truth.reasons[p]}"
                break
    versions = np.full(len(numbers), UNKNOWN_VERSION)
    for start, stop, version in trace.weight_versions:
        versions[start:stop] = UNKNOWN_VERSION if version is None else version
    other = right & valid.all(axis=1) & (versions != rows.versions[np.maximum(numbers, 0)])
    if other.any():
        p = int(other.argmax())
        yield f"weights {versions[p]} at {p} instead of {rows.versions[numbers[p]]}"


def _facts(last: Life, truth: Expected, trace: Trace) -> Iterator[str]:
    whole = bool((truth.numbers >= 0).all())
    state = TraceState.COMPLETE if whole else TraceState.INCOMPLETE
    labels = dict(last.labels)
    if last.request_id[1:2] == "_":
        labels["sample"] = last.request_id[0]
    for name, value, wanted in (
        ("state", trace.state, state),
        ("num_tokens", trace.num_tokens, len(last.shown)),
        ("finish_reason", trace.finish_reason, last.reason),
        ("num_attempts", trace.num_attempts, max(1, len(last.attempts))),
        ("labels", trace.labels, labels),
        ("num_incarnations", trace.num_incarnations, 1),
    ):
        if value != wanted:
            yield f"{name} is {value}, not {wanted}"
    if not trace.verify_tokens(last.shown):
        yield "no digest of its tokens"
