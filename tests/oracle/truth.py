"""What a reader must get, worked out from what the engines did; section 5 of docs/rows.md.

Plain on purpose: it compares tokens where the server compares digests, and goes through all
requests of a trace where the server has an index. Besides the row that the rules name for a cell it
knows the passes that did make the KV there, whatever anybody was told: `Expected.behind`.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from functools import cache
from itertools import combinations, pairwise
from typing import Literal

import numpy as np

from oracle.world import MODEL
from routetrace.common.layout import ModelLayout

Policy = Literal["as_sampled", "latest"]
PrefixRows = Literal["unique", "any", "never"]
Candidate = tuple[np.ndarray, int]
"""(ids [K], weight version) that may be served in a cell."""

DIGEST_EVERY = 64
TAIL, CUT = 64, 8
"""Last positions of an aborted request at each of which its tokens can be compared; those of them
that its agent remembers for later prompts."""

ENDS_PER_TRACE = 4
"""Earlier requests of a trace whose ends an agent remembers."""

NOBODY = -1
"""In place of a row number: no forward pass, or nobody knows which."""

NOT_WRITTEN = -2
"""In place of a row number: no KV so far."""

LOST = -3
"""In place of a row number: a pass computed it, and there is no row of it. No other is served."""

NOWHERE = range(0)

ALL_REASONS = frozenset(
    (
        *("not_yet", "not_captured", "kv_unknown", "agent_lost", "aborted", "ambiguous"),
        "other_version",
    )
)


@cache
def _picks(num_experts: int, top_k: int) -> np.ndarray:
    """[16384, K] choices of distinct experts, in the order of a router."""
    keys = np.random.default_rng(0).random((1 << 14, num_experts))
    return np.argsort(keys, axis=1)[:, :top_k]


class RowStore:
    """Every row that any forward pass chose, by its number."""

    def __init__(self, layout: ModelLayout, seed: int) -> None:
        self.num_layers = len(layout.layer_ids)
        self._ids = _picks(layout.num_experts, layout.top_k).astype(layout.dtype)
        self._rng = np.random.default_rng(seed)
        self._choices = np.zeros((1024, self.num_layers), np.uint16)
        self.versions = np.zeros(1024, np.int64)
        self.weights = np.zeros(1024, np.int64)
        """The weight version that computed each row, whatever anybody was told."""
        self.ranks = np.full(1024, NOBODY)
        """The context-parallel rank that each row was dealt to; NOBODY before the deal."""
        self.named = np.zeros(1024, bool)
        """Whether the slot that a row is in names it, by what the agents were told: they heard of
        it, it cannot be a rejected draft, and its request kept it."""
        self.size = 0

    def draw(self, n: int, version: int, weights: int = 0) -> np.ndarray:
        """Numbers [n] of new rows, of the weight version that was told, and of the true one."""
        first, self.size = self.size, self.size + n
        while self.size > len(self.versions):
            self._choices = np.concatenate([self._choices, np.zeros_like(self._choices)])
            self.versions = np.concatenate([self.versions, np.zeros_like(self.versions)])
            self.weights = np.concatenate([self.weights, np.zeros_like(self.weights)])
            self.ranks = np.concatenate([self.ranks, np.full_like(self.ranks, NOBODY)])
            self.named = np.concatenate([self.named, np.zeros_like(self.named)])
        self._choices[first : self.size] = self._rng.integers(
            len(self._ids), size=(n, self.num_layers), dtype=np.uint16
        )
        self.versions[first : self.size] = version
        self.weights[first : self.size] = weights
        return np.arange(first, self.size)

    def in_slots(self, numbers: np.ndarray, copied: np.ndarray) -> np.ndarray:
        """Numbers of the rows in slots, without those that the slots do not name.

        What was copied from a slot that named it is named, whatever became of that slot.
        """
        known = (numbers != NOBODY) & (self.named[numbers] | copied)
        return np.where(known, numbers, NOBODY)

    def rows(self, numbers: np.ndarray) -> np.ndarray:
        """[n, L, K] of numbers [n]."""
        rows: np.ndarray = self._ids[self._choices[numbers]]
        return rows

    def cells(self, numbers: np.ndarray) -> np.ndarray:
        """[n, L, K]: in each column the ids of row numbers [n, L]; of NOBODY, anything."""
        cells: np.ndarray = self._ids[self._choices[numbers, np.arange(self.num_layers)]]
        return cells

    def cell(self, number: int, column: int) -> Candidate:
        return self._ids[self._choices[number, column]], int(self.versions[number])


class _Kv:
    """Who made the KV at each position, and who did before."""

    def __init__(self, size: int) -> None:
        self.last = np.full(size, NOT_WRITTEN)
        self.makers: list[set[int]] = [set() for _ in range(size)]


class Attempt:
    """One pass over the positions of a request."""

    def __init__(self, size: int, known: int, computed: int) -> None:
        self.rows = np.full(size, NOBODY)
        """Number of the row at each position; those of rejected drafts are not here."""
        self.unknown = np.zeros(size, bool)
        """Positions whose KV was there, and nobody knows who computed it."""
        self.unknown[known:computed] = True
        self.given = computed
        """Leading tokens that were computed before."""
        self.had = 0
        """Tokens that the request had when it began, as its resume told; 0: it told none."""
        self.external = range(known, computed)
        """Positions whose KV is from elsewhere, as it began."""
        self.skipped = np.zeros(size, bool)
        """Positions that were computed, and not captured, rejected or not."""
        self.lost = np.zeros(size, bool)
        """Those of them that nothing rejected; no rows are there."""
        self.stop = 0
        """Computed tokens, once it is over."""
        self.cached = known
        """Leading tokens whose rows some rank has yet to inherit."""
        self.again = size
        """First position that was computed once more (rows.md, 4)."""
        self._inherited: set[int] = set()
        # Of all its passes, and of those that sampled: the KV that they read.
        self._read = [_Kv(size), _Kv(size)]

    def read(self, kv: np.ndarray, *, samples: bool) -> None:
        """A pass has read the KV of the first positions, which those passes made."""
        for one in self._read[: 1 + samples]:
            for position in np.flatnonzero(one.last[: len(kv)] != kv).tolist():
                one.makers[position].add(int(kv[position]))
            one.last[: len(kv)] = kv

    def behind(self, position: int, *, every: bool = False) -> set[int]:
        """The passes that made the KV at a position from which it sampled.

        With `every`, passes before the first one that sampled count, too. So does the last pass
        over positions that were computed once more: its row is served (rows.md, 4).
        """
        every_pass, those_that_sampled = self._read
        one = every_pass if every else those_that_sampled
        if position >= len(one.makers):
            return set()
        latest = {int(every_pass.last[position])} if position >= self.again else set()
        return one.makers[position] | latest - {NOT_WRITTEN}

    @property
    def sampled(self) -> bool:
        """Whether one of its passes sampled, whatever became of the token."""
        return bool(self._read[1].makers[0])

    def kv(self, start: int, stop: int) -> np.ndarray:
        """The passes that made the KV at positions [start, stop), as it was read last."""
        kv = np.full(stop - start, NOBODY)
        held = self._read[0].last[start:stop]
        kv[: len(held)] = np.maximum(held, NOBODY)
        return kv

    def start_again(self, position: int) -> None:
        """External KV from a position on did not come, and is computed."""
        self.given = min(self.given, position)
        self.unknown[position:] = False

    def inherit(self, numbers: np.ndarray, ranks: np.ndarray, those: set[int] | None) -> None:
        """Takes the rows in the slots of its cached tokens.

        Args:
            numbers: [cached] of the rows that the slots name by now; NOBODY: none.
            ranks: [cached] that the rows in the slots were dealt to.
            those: the ranks that inherit now, of which each does so once; None: all others.
        """
        if those is None:
            now = ~np.isin(ranks, [*self._inherited])
        else:
            now = np.isin(ranks, [*(those - self._inherited)])
        self._inherited |= those or set()
        self.rows[: self.cached][now] = numbers[now]
        self.unknown[: self.cached] = self.rows[: self.cached] == NOBODY
        if those is None:
            self.cached = 0


@dataclass(eq=False)
class Record:
    """What is true of one engine request."""

    engine_id: str
    boot_id: str
    request_id: str
    trace_id: str
    prompt_len: int
    columns: list[int]
    """Of the layers that the engine's agents see."""
    tokens: list[int]
    """The prompt; once it has ended, all tokens."""
    model: str = MODEL
    kv_version: int | None = None
    """That of KV that it could reuse when it began; None: nobody can say."""
    told_at: set[int] = field(default_factory=set)
    """Positions whose token digest the server knows."""
    attempts: list[Attempt] = field(default_factory=list)
    took: str = ""
    """The transfer id that its begin gave."""
    gave: str = ""
    """The transfer id that it ended with."""
    continued: Record | None = None
    """The request whose sampled tokens its caller put into its prompt, last of them."""
    reason: str = ""
    """How it ended; "" while it runs, or if it never ended."""
    discarded: list[tuple[int, int]] = field(default_factory=list)
    """(position, row) computed, told, and then given up by a preemption."""
    tentative: tuple[int, int] = (0, 0)
    """Positions of the last told step that may still be rejected, as far as anybody was told."""
    serial: int = 0
    """In the order in which requests begin."""
    barriers: int = 0
    """Barriers before it began."""
    updates: int = 0
    """Updates of all engines before it began."""
    begin_settled: bool = False
    """Whether the server has its begin for certain."""
    settled: bool = False
    """Whether the server has all of it for certain."""

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) if self.reason else 0

    @property
    def handed_over(self) -> bool:
        return self.reason == "handoff"

    def limit(self, proven: int) -> int:
        """One past the last row that it has for a request with so many of its tokens."""
        return min(proven, self.num_tokens - 1) if self.reason else proven

    def computed(self, position: int, number: int) -> bool:
        """Whether a forward pass of its own made that row."""
        return (position, number) in self.discarded or any(
            position >= a.given and a.rows[position] == number
            for a in self.attempts
            if position < len(a.rows)
        )


def digest_positions(n: int) -> set[int]:
    """Where the tokens of a sequence of n tokens can be compared."""
    return {*range(DIGEST_EVERY, n, DIGEST_EVERY), n}


def end_positions(prompt_len: int, n: int, reason: str) -> set[int]:
    """Where a request of n tokens ended, as far as its caller may have been told."""
    return {n, *(range(max(prompt_len + 1, n - TAIL), n) if reason == "abort" else ())}


@dataclass
class Expected:
    """One incarnation of a trace, cell by cell. L: columns of the cluster's layout."""

    number: int
    """From 1, in order of arrival; 0: a crash makes it unknown."""
    counted: bool
    """Whether no other request absorbed it."""
    num_tokens: int
    """0: the end is unknown."""
    num_rows: int
    ids: np.ndarray
    """[num_rows, L, K]; of meaning where `known`."""
    known: np.ndarray
    """[num_rows, L] bool."""
    versions: np.ndarray
    """[num_rows, L] int64 weight versions; of meaning where `known`."""
    reasons: np.ndarray
    """[num_rows, L] of frozenset[str]: the reasons that may be given where a cell is not known."""
    uncertain: bool = False
    """Whether nobody can say what reached the server: requests that run, or died with their agent.
    Then each cell may be missing, or be one of `candidates`; num_tokens may be told as 0, and
    num_rows is an upper bound."""
    aborted: bool = False
    prompt_len: int = 0
    engine_id: str = ""
    sources: list[str] = field(default_factory=list)
    """By position: the provenance of its row, "" where there is none; empty if nobody can say."""
    behind: list[set[int]] = field(default_factory=list)
    """By position: the passes behind the KV that its owner sampled from, by the book-keeping of the
    world alone; see makers()."""
    otherwise: bool = False
    """Whether the rules name other requests as its chain than its callers did."""
    owners: list[tuple[Record, range]] = field(default_factory=list)
    """Who owns which positions; all who may, if it is uncertain."""
    ambiguous: dict[Record, range] = field(default_factory=dict)
    """Positions of owners that several requests sampled alike."""
    prefix: dict[int, dict[int, str]] = field(default_factory=dict)
    """By position: rows that may stand in, by number, and the traces that they are of."""
    certain: set[int] = field(default_factory=set)
    """Positions at which one of them must."""
    stood_for: dict[int, set[int]] = field(default_factory=dict)
    """By position: the true weights of the KV that rows stand in for; with NOBODY, nobody knows."""
    unfiltered: list[frozenset[str]] = field(default_factory=list)
    """By position, why rows of any weights may be missing; empty if they are not, or if it is
    uncertain."""
    _store: RowStore | None = None
    _servable: dict[tuple[int, int], set[int]] = field(default_factory=dict)

    def candidates(self, position: int, layer_column: int) -> list[Candidate]:
        """Every row that may be served in a cell."""
        own: list[Candidate] = []
        if not self.uncertain and position < self.num_rows and self.known[position, layer_column]:
            ids = self.ids[position, layer_column]
            own = [(ids, int(self.versions[position, layer_column]))]
        numbers = {
            *self._servable.get((position, layer_column), ()),
            *self.prefix.get(position, ()),
        }
        return own + [self.row(number, layer_column) for number in sorted(numbers)]

    def row(self, number: int, layer_column: int) -> Candidate:
        """A cell of a row that is told by its number."""
        assert self._store is not None
        return self._store.cell(number, layer_column)

    def makers(self, position: int) -> list[int]:
        """Rows of which one must be served at a position, or none; [] if the world cannot say."""
        behind = self.behind[position] if position < len(self.behind) else {NOBODY}
        return [] if NOBODY in behind else sorted(behind)

    @property
    def there(self) -> np.ndarray:
        """[num_rows, L] bool: cells that must be there."""
        there = self.known.copy()
        there[sorted(self.certain)] = True
        return there

    @property
    def possible(self) -> np.ndarray:
        """[num_rows, L] bool: cells that may be there; of meaning if it is not uncertain."""
        possible = self.known.copy()
        possible[sorted(self.prefix)] = True
        return possible


def expected(
    records: list[Record], store: RowStore, policy: Policy, weight_version: int | None
) -> list[Expected]:
    """Every incarnation of a trace, absorbed ones too.

    Args:
        records: all its engine requests, in order of arrival.
        store: the rows.
        policy: which of several rows is served.
        weight_version: only rows that it computed; None: of any.
    """
    lineage = Lineage(records, store.num_layers)
    uncertain = not all(r.settled for r in records)
    first_lost = next((i for i, r in enumerate(records) if not r.begin_settled), len(records))
    result = []
    for i, record in enumerate(records):
        if uncertain:
            answer = _servable(lineage, record, store, weight_version)
        else:
            answer = _exact(lineage, record, store, policy, weight_version)
        answer.number = i + 1 if i < first_lost else 0
        answer.counted = not any(lineage.absorbs(b, record) for b in records if b is not record)
        answer.prompt_len, answer.engine_id = record.prompt_len, record.engine_id
        answer.aborted = record.reason == "abort"
        result.append(answer)
    return result


# ---------------------------------------------------------------------------- who belongs together


def same_tokens(a: Record, b: Record) -> int:
    """Leading tokens that two requests have in common."""
    low, high = 0, min(len(a.tokens), len(b.tokens))
    while low < high:
        middle = (low + high + 1) // 2
        if a.tokens[low:middle] == b.tokens[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def closed(records: list[Record]) -> dict[Record, set[int]]:
    """Positions at which the tokens of each request are known, by its own word or another's."""
    known_at = {r: set(r.told_at) for r in records}
    pairs = [(a, b, same_tokens(a, b)) for a, b in combinations(records, 2)]
    changed = True
    while changed:
        changed = False
        for a, b, same in pairs:
            proven = max((q for q in known_at[a] & known_at[b] if q <= same), default=0)
            both = {q for q in known_at[a] | known_at[b] if q <= proven}
            for one in (a, b):
                if not both <= known_at[one]:
                    known_at[one] |= both
                    changed = True
    return known_at


class Lineage:
    """Which requests of a trace go on from which, as far as the rules know.

    Args:
        records: all its engine requests.
        num_layers: columns of the cluster's layout.
    """

    def __init__(self, records: list[Record], num_layers: int) -> None:
        self.records = records
        self.num_layers = num_layers
        self._known_at = closed(records)

    def proven(self, a: Record, b: Record) -> int:
        """Tokens of b's prompt that are known to be a's too."""
        most = min(same_tokens(a, b), b.prompt_len)
        return max((q for q in self._known_at[a] & self._known_at[b] if q <= most), default=0)

    def sampled(self, b: Record, *, handed_over: bool = False) -> dict[Record, int]:
        """Requests of which b was given tokens that they sampled, and how many tokens in all.

        Those that ended with a hand-over, or all others.
        """
        others = (a for a in self.records if a is not b and a.handed_over == handed_over)
        return {a: q for a in others if (q := self.proven(a, b)) > a.prompt_len > 0}

    def before(self, b: Record) -> tuple[Record | None, range]:
        """The request that b continues, and positions of b that are ambiguous."""
        sampled = self.sampled(b)
        proven = max(sampled.values(), default=0)
        last = [a for a, q in sampled.items() if q == proven]
        # Of these tokens, a request with a longer prompt sampled none.
        named = self.sampled(b, handed_over=True)
        handed = [h for h, q in named.items() if q >= proven > h.prompt_len]
        if not last or self.sources(b) in [[h] for h in handed]:
            return None, NOWHERE
        taken_up = [self.sources(a) for a in last]
        among = [*last, *(h for h in handed if [h] not in taken_up)]
        if len(among) > 1:
            first = b.attempts[0]
            taken = np.flatnonzero(first.rows[: min(proven, first.external.start)] != NOBODY)
            for position in taken[-1:].tolist():
                for a in among:
                    if position >= a.prompt_len and a.computed(position, int(first.rows[position])):
                        return (None if a.handed_over else a), NOWHERE
        elif not any(self._perhaps_sampled(c, last[0], b) for c in self.records):
            return last[0], NOWHERE
        return None, range(proven - 1)

    def _perhaps_sampled(self, c: Record, a: Record, b: Record) -> bool:
        """Whether c may have sampled the tokens that b was given, though only a is proven to."""
        if c is a or not c.reason or c.handed_over:
            return False
        if a.reason == "stop" and a.num_tokens <= self.proven(a, b):
            return False
        return (
            self.proven(c, a) == c.prompt_len == a.prompt_len
            and c.num_tokens > self.proven(c, b)
            and not self._differ(c, b)
        )

    def chain(self, record: Record) -> list[Record]:
        """The requests that a request goes on from, and itself."""
        before, _ = self.before(record)
        return [*(self.chain(before) if before else ()), record]

    def owners(self, record: Record, policy: Policy) -> list[tuple[Record, range]]:
        """Who owns which positions."""
        owners, start = [], 0
        for a, b in pairwise(self.chain(record) if policy == "as_sampled" else [record]):
            stop = min(self.proven(a, b), a.num_tokens) - 1
            owners.append((a, range(start, stop)))
            start = stop
        return [*owners, (record, range(start, len(record.attempts[0].rows)))]

    def sources(self, record: Record) -> list[Record]:
        """The requests that ended with the hand-over which a request names."""
        ended = (r for r in self.records if r.reason and r is not record)
        return [r for r in ended if record.took and r.gave == record.took]

    def rows(self, record: Record, policy: Policy) -> tuple[np.ndarray, np.ndarray]:
        """[n, L] row numbers at the positions of an owner, and [n, L] their provenance."""
        parts = [self._of(record, attempt) for attempt in record.attempts]
        if policy == "latest":
            parts.reverse()
            parts.append(self._handed(record, ()))
        else:
            count = those_that_sampled(record)
            parts = [parts[i] for i in count]
            if not count[0]:
                parts.insert(1, self._handed(record, ()))
        numbers, names = _first(parts)
        return np.where(numbers == LOST, NOBODY, numbers), names

    def _of(self, record: Record, attempt: Attempt) -> tuple[np.ndarray, np.ndarray]:
        numbers = np.full((len(attempt.rows), self.num_layers), NOBODY)
        numbers[:, record.columns] = np.where(attempt.lost, LOST, attempt.rows)[:, None]
        names = np.full(numbers.shape, "forward", object)
        names[: attempt.given] = "slot"
        return numbers, names

    def _handed(self, record: Record, seen: tuple[Record, ...]) -> tuple[np.ndarray, np.ndarray]:
        """Rows behind the hand-over that a request names."""
        first, sources = record.attempts[0], self.sources(record)
        numbers = np.full((len(first.rows), self.num_layers), NOBODY)
        names = np.full(numbers.shape, "handoff", object)
        if len(sources) != 1 or sources[0] in seen:
            return numbers, names
        (source,) = sources
        parts = [self._of(source, source.attempts[-1])]
        if len(source.attempts) == 1:
            parts.append(self._handed(source, (*seen, record)))
        given, _ = _first(parts)
        stop = min(first.external.stop, source.num_tokens - 1, self._disproven(record, source))
        for position in range(first.external.start, stop):
            if not first.unknown[position]:
                break  # passes go up from here, or it was given up
            numbers[position] = given[position]
        return numbers, names

    def _disproven(self, a: Record, b: Record) -> int:
        """The position from which digests disprove that one handed its KV to the other."""
        if not self._differ(a, b):
            return len(a.tokens) + len(b.tokens)
        both, same = self._known_at[a] & self._known_at[b], same_tokens(a, b)
        return max((q for q in both if q <= same), default=0)

    def _differ(self, a: Record, b: Record) -> bool:
        """Whether digests of two requests at one position differ."""
        same = same_tokens(a, b)
        return any(q > same for q in self._known_at[a] & self._known_at[b])

    def absorbs(self, b: Record, a: Record) -> bool:
        """Whether a is no incarnation of its own, as b goes on from it."""
        longer = b.prompt_len > a.prompt_len
        taken_over = a.handed_over and b.prompt_len == a.prompt_len and not b.handed_over
        if not a.reason or not (longer or taken_over):
            return False
        proven = self.proven(a, b)
        if 0 < a.prompt_len < a.num_tokens <= proven:
            return True
        return a.handed_over and (0 < a.prompt_len <= proven or self.sources(b) == [a])

    def cut(self, b: Record) -> tuple[Record, range]:
        """The aborted request that b's caller went on from with no more tokens than it got, and
        positions that it must own, as tokens of both are known there; else b, and nowhere."""
        a = b.continued
        if a is None or a.reason != "abort" or not (a.told_at and b.told_at):
            return b, NOWHERE
        cut = max(a.prompt_len + 1, a.num_tokens - TAIL) <= b.prompt_len <= same_tokens(a, b)
        return (a, range(a.prompt_len - 1, b.prompt_len - 1)) if cut else (b, NOWHERE)

    def told_otherwise(self, record: Record) -> bool:
        """Whether a chain names a request that no caller continued."""
        meant, one = set(), record.continued
        while one is not None:
            meant.add(one)
            one = one.continued
        return not meant.issuperset(self.chain(record)[:-1])


def that_sampled(record: Record) -> int:
    """The attempt that sampled: the first preempted one that computed the whole prompt, else the
    last."""
    earlier = record.attempts[:-1]
    whole = (i for i, attempt in enumerate(earlier) if attempt.stop >= record.prompt_len)
    return next(whole, len(earlier))


def those_that_sampled(record: Record) -> list[int]:
    """The attempt that sampled, and those behind it that sampled again."""
    first = that_sampled(record)
    count, most = [first], record.attempts[first].stop
    for i, attempt in enumerate(record.attempts[first + 1 :], first + 1):
        had = attempt.had or most + 1
        last = attempt is record.attempts[-1]
        behind = slice(had - 1, record.num_tokens - 1) if last else slice(0)
        held = (attempt.rows != NOBODY) | attempt.lost
        # Of an attempt that is not over, `stop` is 0.
        if attempt.stop >= had or held[behind].any():
            count.append(i)
            most = max(most, attempt.stop)
    return count


def _first(parts: list[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """Of each cell the first row that there is, or LOST if it was lost before; and its name."""
    size = max(len(numbers) for numbers, _ in parts)
    found = np.full((size, parts[0][0].shape[1]), NOBODY)
    names = np.full(found.shape, "", object)
    for numbers, of in parts:
        n = len(numbers)
        free = (found[:n] == NOBODY) & (numbers != NOBODY)
        found[:n][free], names[:n][free] = numbers[free], of[free]
    return found, names


# ---------------------------------------------------------------------------- what is served


def _exact(
    lineage: Lineage, record: Record, store: RowStore, policy: Policy, weight_version: int | None
) -> Expected:
    """An incarnation of which everything is known."""
    num_tokens, num_rows = record.num_tokens, record.num_tokens - 1
    if record.handed_over and not any(lineage.absorbs(b, record) for b in lineage.records):
        owners = lineage.owners(record, "as_sampled")
        num_tokens, num_rows = 0, max(_end(a, min(p.stop, num_rows)) for a, p in owners)
    shape = (num_rows, store.num_layers)
    numbers = np.full(shape, NOBODY)
    reasons = np.full(shape, frozenset(), object)
    names = np.full(shape, "", object)
    behind: list[set[int]] = []
    owners = [
        (owner, positions[: max(0, num_rows - positions.start)])
        for owner, positions in lineage.owners(record, policy)
    ]
    vague = {}
    for owner, positions in owners:
        here = slice(positions.start, positions.stop)
        rows, of = lineage.rows(owner, policy)
        count = _that_count(owner, policy)
        numbers[here], names[here] = rows[here], of[here]
        _, ambiguous = lineage.before(owner)
        vague[owner] = ambiguous
        aborted, sampled = lineage.cut(owner) if policy == "as_sampled" else (owner, NOWHERE)
        of_aborted = _that_count(aborted, policy)
        for position in positions:
            who = (aborted, of_aborted) if position in sampled else (owner, count)
            behind.append(_behind(*who, position))
            reasons[position] = _reasons(owner, count, position)
            if position in ambiguous and policy == "as_sampled":
                numbers[position] = NOBODY
                reasons[position] = frozenset({"ambiguous"})
    # Of its rows all columns are there, or none.
    there = numbers != NOBODY
    unfiltered = [frozenset() if there[p].any() else reasons[p, 0] for p in range(num_rows)]
    if weight_version is not None:
        other = there & (store.versions[numbers] != weight_version)
        numbers[other], reasons[other] = NOBODY, frozenset({"other_version"})
    known, cells, versions = numbers != NOBODY, store.cells(numbers), store.versions[numbers]
    answer = Expected(0, True, num_tokens, num_rows, cells, known, versions, reasons)
    answer._store, answer.unfiltered, answer.behind = store, unfiltered, behind
    answer.sources = [str(max(names[p])) if known[p].any() else "" for p in range(num_rows)]
    answer.owners, answer.ambiguous = owners, vague
    answer.otherwise = lineage.told_otherwise(record)
    return answer


def _end(record: Record, stop: int) -> int:
    """One past the last row before a position that was computed."""
    held = [np.flatnonzero((a.rows != NOBODY)[:stop] | a.lost[:stop]) for a in record.attempts]
    return max((int(h[-1]) + 1 for h in held if len(h)), default=0)


def _that_count(record: Record, policy: Policy) -> list[Attempt]:
    """The attempts whose rows count."""
    every = range(len(record.attempts))
    count = those_that_sampled(record) if policy == "as_sampled" else every
    return [record.attempts[i] for i in count]


def _behind(record: Record, count: list[Attempt], position: int) -> set[int]:
    """The passes behind the KV at a position that a request sampled from.

    Of attempts that count though they ended before they sampled, all passes.
    """
    if record.num_tokens == record.prompt_len:
        return set()  # there is no answer
    return set().union(
        *(a.behind(position, every=a in count and not a.sampled) for a in record.attempts)
    )


def _reasons(record: Record, count: list[Attempt], position: int) -> frozenset[str]:
    """Why a row of an owner may be missing, of whose attempts some count."""
    if any(a.lost[position] for a in count):
        return frozenset({"not_captured"})
    default = {"aborted" if record.reason == "abort" else "not_captured"}
    if record.handed_over:
        default.add("not_yet")  # something may still come
    unknown = any(a.unknown[position] for a in record.attempts)
    if not unknown and position in record.attempts[0].external:
        default.add("kv_unknown")  # what did not come was given up before it was computed
    return frozenset({"kv_unknown"} if unknown else default)


def _servable(
    lineage: Lineage, record: Record, store: RowStore, weight_version: int | None
) -> Expected:
    """An incarnation of which nobody knows how much of it reached the server."""
    servable: dict[tuple[int, int], set[int]] = defaultdict(set)
    heard_of = {-1}  # positions, of which rows may be unknown as well
    size = len(record.attempts[0].rows)
    # Digests that got lost make the proven part shorter, never longer.
    parts = {record: size, **{a: q - 1 for a, q in lineage.sampled(record).items()}}
    owners = [(part, range(min(stop, size))) for part, stop in parts.items()]
    behind: list[set[int]] = [set() for _ in range(size)]
    if record.num_tokens != record.prompt_len:  # else there is no answer
        for part, positions in owners:
            for p in positions:
                behind[p] |= set().union(*(a.behind(p, every=True) for a in part.attempts))
    more = [*parts]
    while more:
        new = [r for r in lineage.sources(more.pop()) if r not in parts]
        parts |= dict.fromkeys(new, size)
        more += new
    for part, stop in parts.items():
        found = list(part.discarded)
        for attempt in part.attempts:
            rows = attempt.rows.copy()
            if attempt is part.attempts[-1]:
                rows[slice(*part.tentative)] = NOBODY
            found += [(p, int(rows[p])) for p in np.flatnonzero(rows != NOBODY).tolist()]
            heard_of.update(np.flatnonzero((attempt.unknown | attempt.skipped)[:stop]).tolist())
        for position, number in found:
            if position >= stop:
                continue
            heard_of.add(position)
            if weight_version in (None, store.versions[number]):
                for column in part.columns:
                    servable[position, column].add(number)
    num_tokens = record.num_tokens
    num_rows = max(heard_of | {num_tokens - 2}) + 1
    shape = (num_rows, store.num_layers)
    return Expected(
        number=0,
        counted=True,
        num_tokens=num_tokens,
        num_rows=num_rows,
        ids=store.cells(np.zeros(shape, np.int64)),
        known=np.zeros(shape, bool),
        versions=np.zeros(shape, np.int64),
        reasons=np.full(shape, ALL_REASONS, object),
        uncertain=True,
        behind=behind,
        owners=owners,
        _store=store,
        _servable=servable,
    )


@dataclass(eq=False)
class Bound:
    """A request that a bind made of slots."""

    num_tokens: int
    num_computed_tokens: int
    rows: np.ndarray
    """Row numbers in its slots at that moment."""
    columns: list[int]

    def expected(self, number: int, store: RowStore, weight_version: int | None) -> Expected:
        """Bound requests have no prompt length, so none of them is joined."""
        num_rows = self.num_tokens - 1
        numbers = np.full((num_rows, store.num_layers), NOBODY)
        computed = min(self.num_computed_tokens, num_rows)
        numbers[:computed, self.columns] = self.rows[:computed, None]
        reasons = np.full(numbers.shape, frozenset(("not_captured",)), object)
        reasons[:computed, self.columns] = frozenset(("kv_unknown",))
        known = numbers != NOBODY
        versions = store.versions[numbers]
        if weight_version is not None:
            other = known & (versions != weight_version)
            reasons[other] = frozenset(("other_version",))
            known &= ~other
        cells = store.cells(numbers)
        return Expected(number, True, self.num_tokens, num_rows, cells, known, versions, reasons)
