"""What a reader must get, worked out from what the engines did.

Plain on purpose: it compares tokens where the server compares digests, and goes through all
requests of a trace where the server has an index.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from functools import cache
from itertools import combinations
from typing import Literal

import numpy as np

from routetrace.common.layout import ModelLayout

Policy = Literal["as_sampled", "latest"]
PrefixRows = Literal["same_version", "any_version", "never"]
Candidate = tuple[np.ndarray, int]
"""(ids [K], weight version) that may be served in a cell."""

DIGEST_EVERY = 64
ENDS_PER_TRACE = 4
"""Ends of earlier requests of a trace that an agent remembers."""

NOBODY = -1
"""In place of a row number: no forward pass, or nobody knows which."""

ALL_REASONS = frozenset(
    ("not_yet", "not_captured", "kv_unknown", "agent_lost", "aborted", "other_version")
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
        self.ranks = np.full(1024, NOBODY)
        """The context-parallel rank that each row was dealt to; NOBODY before the deal."""
        self.named = np.zeros(1024, bool)
        """Whether the slot that a row is in names it, by what the agents were told: they heard of
        it, it cannot be a rejected draft, and its request kept it."""
        self.size = 0

    def draw(self, n: int, version: int) -> np.ndarray:
        """Numbers [n] of new rows, computed by a weight version."""
        first, self.size = self.size, self.size + n
        while self.size > len(self.versions):
            self._choices = np.concatenate([self._choices, np.zeros_like(self._choices)])
            self.versions = np.concatenate([self.versions, np.zeros_like(self.versions)])
            self.ranks = np.concatenate([self.ranks, np.full_like(self.ranks, NOBODY)])
            self.named = np.concatenate([self.named, np.zeros_like(self.named)])
        self._choices[first : self.size] = self._rng.integers(
            len(self._ids), size=(n, self.num_layers), dtype=np.uint16
        )
        self.versions[first : self.size] = version
        return np.arange(first, self.size)

    def in_slots(self, numbers: np.ndarray) -> np.ndarray:
        """Numbers of the rows in slots, without those that the slots do not name."""
        known = (numbers != NOBODY) & self.named[numbers]
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
        self.skipped = np.zeros(size, bool)
        """Positions that were computed, and not captured."""
        self.cached = known
        """Leading tokens whose rows some rank has yet to inherit."""
        self._inherited: set[int] = set()

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
    told_at: set[int] = field(default_factory=set)
    """Positions whose token digest the server knows."""
    attempts: list[Attempt] = field(default_factory=list)
    external: bool = False
    reason: str = ""
    """How it ended; "" while it runs, or if it never ended."""
    discarded: list[tuple[int, int]] = field(default_factory=list)
    """(position, row) computed, told, and then given up by a preemption."""
    tentative: tuple[int, int] = (0, 0)
    """Positions of the last told step that may still be rejected, as far as anybody was told."""
    serial: int = 0
    """In the order in which requests begin."""
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

    @property
    def order(self) -> tuple[int, bool]:
        """Only what comes later in it can go on from a request."""
        return self.prompt_len, not self.handed_over

    def limit(self, proven: int) -> int:
        """One past the last row that it has for a request with so many of its tokens."""
        return min(proven, self.num_tokens - 1) if self.reason else proven


def digest_positions(n: int) -> set[int]:
    """Where the tokens of a sequence of n tokens can be compared."""
    return {*range(DIGEST_EVERY, n, DIGEST_EVERY), n}


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
    prompt_len: int = 0
    engine_id: str = ""
    prefix: dict[int, dict[int, set[str]]] = field(default_factory=dict)
    """By position: rows of other traces that may stand in, by number, and whose they are."""
    certain: set[int] = field(default_factory=set)
    """Positions at which one of them must."""
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
    known_at = _closed(records)
    uncertain = not all(r.settled for r in records)
    first_lost = next((i for i, r in enumerate(records) if not r.begin_settled), len(records))
    result = []
    for i, record in enumerate(records):
        proven = {
            other: _proven(known_at, other, record) for other in records if other is not record
        }
        absorbed = any(_absorbs(known_at, b, record) for b in records if b is not record)
        if uncertain:
            answer = _servable(record, proven, store, weight_version)
        else:
            answer = _exact(record, known_at, proven, store, policy, weight_version)
        answer.number = i + 1 if i < first_lost else 0
        answer.counted = not absorbed
        answer.prompt_len, answer.engine_id = record.prompt_len, record.engine_id
        result.append(answer)
    return result


# ---------------------------------------------------------------------------- who belongs together


def _same(a: Record, b: Record) -> int:
    """Leading tokens that two requests have in common."""
    for i, (x, y) in enumerate(zip(a.tokens, b.tokens, strict=False)):
        if x != y:
            return i
    return min(len(a.tokens), len(b.tokens))


def _closed(records: list[Record]) -> dict[Record, set[int]]:
    """Positions at which the tokens of each request are known, by its own word or another's."""
    known_at = {r: set(r.told_at) for r in records}
    pairs = [(a, b, _same(a, b)) for a, b in combinations(records, 2)]
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


def _proven(known_at: dict[Record, set[int]], a: Record, b: Record) -> int:
    """Tokens of b's prompt that are known to be a's too."""
    most = min(_same(a, b), b.prompt_len)
    return max((q for q in known_at[a] & known_at[b] if q <= most), default=0)


def _continues(b: Record, a: Record, proven: int) -> bool:
    """Whether b was given tokens that a sampled, or a's KV."""
    if not (a.order < b.order and a.prompt_len > 0):
        return False
    return proven > a.prompt_len or (a.handed_over and proven >= a.num_tokens - 1)


def _absorbs(known_at: dict[Record, set[int]], b: Record, a: Record) -> bool:
    """Whether all of a is a part of b."""
    proven = _proven(known_at, a, b)
    if not (a.reason and _continues(b, a, proven)):
        return False
    return proven >= a.num_tokens or (a.handed_over and proven >= a.num_tokens - 1)


# ---------------------------------------------------------------------------- what is served


def _exact(
    record: Record,
    known_at: dict[Record, set[int]],
    proven: dict[Record, int],
    store: RowStore,
    policy: Policy,
    weight_version: int | None,
) -> Expected:
    """An incarnation of which everything is known."""
    arrival = {other: i for i, other in enumerate(proven)}
    before = [a for a, q in proven.items() if _continues(record, a, q)]
    before.sort(key=lambda a: (a.prompt_len, a.handed_over, -arrival[a]))
    alike = [a for a, q in proven.items() if q and a not in before]
    told = [(a, a.limit(proven[a])) for a in before]
    own = (record, record.num_tokens - 1)
    others = [(a, a.limit(proven[a])) for a in alike]
    if record.handed_over:
        num_tokens = 0
        num_rows = max(_end(a, stop) for a, stop in [*told, own])
    else:
        num_tokens = record.num_tokens
        num_rows = num_tokens - 1
    sampled = policy == "as_sampled"
    parts = [*told, own, *others] if sampled else [own, *told[::-1], *others]
    last: list[tuple[int, list[int]]] = []
    if sampled and record.prompt_len <= num_rows:  # else it was aborted before
        last = _last_of_prompt(known_at, record, told)

    def fill(version: int | None) -> np.ndarray:
        numbers = _fill(parts, num_rows, store, policy, version)
        for number, columns in reversed(last):
            if version in (None, store.versions[number]):
                numbers[record.prompt_len - 1, columns] = number
        return numbers

    any_version = fill(None)
    numbers = any_version if weight_version is None else fill(weight_version)
    reasons = _reasons([*told, own], num_rows, store.num_layers)
    # Of its rows all columns are there, or none.
    unfiltered = [
        frozenset() if (any_version[p] != NOBODY).any() else reasons[p, 0] for p in range(num_rows)
    ]
    if weight_version is not None:
        reasons[any_version != NOBODY] = frozenset(("other_version",))
    known = numbers != NOBODY
    cells, versions = store.cells(numbers), store.versions[numbers]
    answer = Expected(0, True, num_tokens, num_rows, cells, known, versions, reasons)
    answer._store, answer.unfiltered = store, unfiltered
    return answer


def _last_of_prompt(
    known_at: dict[Record, set[int]], record: Record, told: list[tuple[Record, int]]
) -> list[tuple[int, list[int]]]:
    """(row number, columns) of those that come first at the last position of the prompt.

    First those of requests whose next token it is proven to have been given, then its own: of the
    attempt that came there first, if a forward pass computed it.
    """
    last = record.prompt_len - 1
    before = [a for a, stop in told if stop > last]
    first: list[tuple[int, list[int]]] = []
    for a in before:
        same = _same(a, record)
        if any(record.prompt_len < q <= same for q in known_at[a] & known_at[record]):
            rows = [int(attempt.rows[last]) for attempt in a.attempts]
            first += [(number, a.columns) for number in rows if number != NOBODY][:1]
    for attempt in record.attempts if before else ():
        if (attempt.rows[last:] != NOBODY).any():
            if attempt.given <= last and attempt.rows[last] != NOBODY:
                first.append((int(attempt.rows[last]), record.columns))
            break
    return first


def _end(record: Record, stop: int) -> int:
    """One past the last row before a position that was computed."""
    held = [np.flatnonzero((a.rows != NOBODY)[:stop] | a.skipped[:stop]) for a in record.attempts]
    return max((int(h[-1]) + 1 for h in held if len(h)), default=0)


def _fill(
    parts: list[tuple[Record, int]],
    num_rows: int,
    store: RowStore,
    policy: Policy,
    weight_version: int | None,
) -> np.ndarray:
    """[num_rows, L] row numbers: of the first part, and its first attempt, that has one."""
    numbers = np.full((num_rows, store.num_layers), NOBODY)
    for record, limit in parts:
        for attempt in record.attempts if policy == "as_sampled" else record.attempts[::-1]:
            stop = min(limit, num_rows)
            rows = attempt.rows[:stop]
            there = rows != NOBODY
            if weight_version is not None:
                there &= store.versions[rows] == weight_version
            for column in record.columns:
                free = there & (numbers[:stop, column] == NOBODY)
                numbers[:stop, column][free] = rows[free]
    return numbers


def _reasons(parts: list[tuple[Record, int]], num_rows: int, num_layers: int) -> np.ndarray:
    """[num_rows, L] why a cell may be missing; the last part is the request itself."""
    record, _ = parts[-1]
    default = {"aborted" if record.reason == "abort" else "not_captured"}
    if record.handed_over or (record.external and record.told_at):
        default.add("not_yet")  # something may still come
    reasons = np.full((num_rows, num_layers), frozenset(default), object)
    for part, limit in parts:
        # Where only another request says so, it depends on whether this one got there.
        why = frozenset({"kv_unknown"} if part is record else {"kv_unknown", *default})
        stop = min(limit, num_rows)
        for attempt in part.attempts:
            for column in part.columns:
                reasons[:stop, column][attempt.unknown[:stop]] = why
    for part, limit in parts:
        skipped = [np.flatnonzero(a.skipped[: min(limit, num_rows)]) for a in part.attempts]
        for position in {p for found in skipped for p in found.tolist()}:
            for column in part.columns:
                reasons[position, column] |= {"not_captured", *default}
    return reasons


def _servable(
    record: Record, proven: dict[Record, int], store: RowStore, weight_version: int | None
) -> Expected:
    """An incarnation of which nobody knows how much of it reached the server."""
    servable: dict[tuple[int, int], set[int]] = defaultdict(set)
    heard_of = {-1}  # positions, of which rows may be unknown as well
    size = max(len(a.rows) for r in (record, *proven) for a in r.attempts)
    for part, stop in [(record, size), *proven.items()]:
        # Digests that got lost make the proven part shorter, never longer.
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
    num_tokens = 0 if record.handed_over else record.num_tokens
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
        _store=store,
        _servable=servable,
    )


# ---------------------------------------------------------------------------- what stands in


def add_prefix_rows(
    answers: list[Expected],
    records: list[Record],
    others: list[Record],
    store: RowStore,
    prefix_rows: PrefixRows,
    weight_version: int | None,
) -> None:
    """Adds the rows of other traces that stand in where nobody knows who computed the KV.

    Args:
        answers: what is expected of each request of a trace.
        records: these requests.
        others: requests of all other traces.
        store: the rows.
        prefix_rows: of which weights: those of the request's own first row, or any.
        weight_version: that is asked for; None: any.
    """
    known_at = _closed(records)
    of_trace: dict[str, list[Record]] = defaultdict(list)
    for other in others:
        of_trace[other.trace_id].append(other)
    closed: dict[str, dict[Record, set[int]]] = {}
    for answer, record in zip(answers, records, strict=True):
        holes = _holes(answer, record)
        if not holes:
            continue
        wanted = _versions(record, store, every=answer.uncertain)
        sure: set[int] = set()
        for other in others:
            same = min(_same(record, other), record.prompt_len)
            if not same:
                continue
            if other.trace_id not in closed:
                closed[other.trace_id] = _closed(of_trace[other.trace_id])
            both = known_at[record] & closed[other.trace_id][other]
            proven = max((q for q in both if q <= same), default=0)
            settled = all(r.settled for r in of_trace[other.trace_id])
            for position, number in _computed(other):
                if position >= other.limit(proven) or position not in holes:
                    continue
                if prefix_rows == "any_version" or int(store.versions[number]) in wanted:
                    rows = answer.prefix.setdefault(position, {})
                    rows.setdefault(number, set()).add(other.trace_id)
                    if settled and holes[position] and (position, number) not in other.discarded:
                        sure.add(position)
        answer.certain = sure if not answer.uncertain else set()
        if weight_version is not None:
            _only(answer, store, weight_version)


def _holes(answer: Expected, record: Record) -> dict[int, bool]:
    """Positions of the prompt at which rows may stand in; True: they must, if there are any."""
    holes = {}
    for position in range(min(record.prompt_len, answer.num_rows)):
        reasons = answer.unfiltered[position] if answer.unfiltered else ALL_REASONS
        if "kv_unknown" in reasons:
            holes[position] = reasons == {"kv_unknown"}
    return holes


def _versions(record: Record, store: RowStore, *, every: bool) -> set[int]:
    """The weight version of the first row that a request computed itself; of `every` one."""
    versions = set()
    for attempt in record.attempts:
        rows = attempt.rows[attempt.given :]
        numbers = rows[rows != NOBODY]
        versions.update(store.versions[numbers if every else numbers[:1]].tolist())
        if versions and not every:
            break
    if every:
        versions.update(store.versions[[number for _, number in record.discarded]].tolist())
    return versions


def _computed(record: Record) -> list[tuple[int, int]]:
    """(position, row) of what forward passes of a request computed and nobody rejected."""
    found = [] if record.settled else list(record.discarded)
    for attempt in record.attempts:
        rows = attempt.rows.copy()
        rows[: attempt.given] = NOBODY
        if attempt is record.attempts[-1]:
            rows[slice(*record.tentative)] = NOBODY
        found += [(p, int(rows[p])) for p in np.flatnonzero(rows != NOBODY).tolist()]
    return found


def _only(answer: Expected, store: RowStore, weight_version: int) -> None:
    """Leaves out rows of other weights; which ones were chosen before is not told."""
    for position, rows in [*answer.prefix.items()]:
        left = {n: traces for n, traces in rows.items() if store.versions[n] == weight_version}
        if len(left) < len(rows):
            other = frozenset({"other_version"})
            if position not in answer.certain:
                other |= answer.unfiltered[position]
            answer.reasons[position][~answer.known[position]] = other
            answer.certain.discard(position)
        if left:
            answer.prefix[position] = left
        else:
            del answer.prefix[position]


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
