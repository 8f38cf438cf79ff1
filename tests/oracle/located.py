"""Which requests the rows of token ids are of; section 9 of docs/rows.md.

Where the server compares digests, this compares tokens at the positions of which digests are known.
It leaves out requests that `bind` made, and the limits for many keys and many traces.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import permutations
from typing import NamedTuple

Tokens = tuple[int, ...]
Labels = Mapping[str, str]

NOT_FOUND, AMBIGUOUS = "not_found", "ambiguous"
KEY = ("adapter", "kv_cache_dtype")
"""Labels that digests include."""


class Found(NamedTuple):
    """The request of a sequence."""

    trace_id: str
    incarnation: int
    num_tokens: int
    proven: int
    num_equal: int


Answer = Found | str
"""A request, or why there is none: NOT_FOUND, AMBIGUOUS."""


@dataclass(eq=False)
class Request:
    """A request and what was reported of it.

    Attributes:
        tokens: prompt and answer; of a running one, also what it has not sampled yet.
        prompt_len: as it was reported; 0 if it was not.
        number: in its trace, from 1 on.
        told: positions of which its agent reported the digest.
        versions: known weight versions of its rows.
        reason: of its end; "" while it runs.
    """

    engine: str
    trace_id: str
    tokens: Tokens
    prompt_len: int
    labels: Labels
    number: int = 0
    told: set[int] = field(default_factory=set)
    versions: set[int] = field(default_factory=set)
    reason: str = ""

    @property
    def key(self) -> list[str | None]:
        return key_of(self.labels)

    @property
    def indexed(self) -> set[int]:
        """Positions by whose digests it is found."""
        first = (self.prompt_len // 64 + 1) * 64
        behind = {p for p in self.told if p > self.prompt_len and (p % 64 or p == max(self.told))}
        return self.told & ({self.prompt_len, first} | behind)

    def has(self, labels: Labels | None) -> bool:
        """Whether it is compared where these labels are given, and has them."""
        labels = labels or {}
        if any(name in labels for name in KEY) and self.key != key_of(labels):
            return False
        return all(self.labels.get(name) == value for name, value in labels.items())


def key_of(labels: Labels) -> list[str | None]:
    return [labels.get(name) for name in KEY]


def same(a: Tokens, b: Tokens) -> int:
    """Leading tokens that are equal."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))


def ends_of(n: int) -> set[int]:
    """Positions of the digests of a list of token ids."""
    return {*range(64, n, 64), n} - {0}


def closed(requests: Sequence[Request]) -> dict[Request, set[int]]:
    """Positions of the known digests of requests of one trace, those known by others included."""
    known = {one: set(one.told) for one in requests}
    grown = True
    while grown:
        grown = False
        for a, b in permutations(requests, 2):
            most = same(a.tokens, b.tokens) if a.key == b.key else 0
            proven = max((p for p in known[a] & known[b] if p <= most), default=0)
            new = {p for p in known[b] if p < proven} - known[a]
            known[a] |= new
            grown = grown or bool(new)
    return known


class Run:
    """All requests of a run, and what `locate` has to answer."""

    def __init__(self) -> None:
        self.traces: dict[str, list[Request]] = {}
        """In order of their begin; without those that were deleted."""
        self._ends: defaultdict[tuple[str, str], deque[set[int]]]
        """By engine and trace, where its last requests ended: digests of later prompts."""
        self._ends = defaultdict(lambda: deque(maxlen=4))

    def begin(self, one: Request, *, tells: bool = True) -> None:
        """Begin a request; the agent may be given the ids of its prompt."""
        self.traces.setdefault(one.trace_id, []).append(one)
        one.number = len(self.traces[one.trace_id])
        if tells:
            ends = set().union(*self._ends[one.engine, one.trace_id])
            one.told |= ends_of(one.prompt_len) | {p for p in ends if p <= one.prompt_len}

    def finish(self, one: Request, reason: str, *, tells: bool = True) -> None:
        """End a request; the agent may be given all its token ids."""
        n = len(one.tokens)
        one.reason = reason
        if tells:
            first = max(one.prompt_len + 1, n - 64)
            tail = {*range(first, n)} if reason == "abort" else set()
            one.told |= ends_of(n) | tail
            self._ends[one.engine, one.trace_id].append({n} | {p for p in tail if p >= n - 8})

    def locate(
        self,
        sequences: Sequence[Tokens],
        *,
        weight_versions: Collection[int] | None = None,
        labels: Labels | list[Labels | None] | None = None,
        indexes: Sequence[int | None] | None = None,
        equal: str = "refuse",
    ) -> list[Answer]:
        """Return what the call with these arguments has to answer."""
        each = labels if isinstance(labels, list) else [labels] * len(sequences)
        known = {one: p for trace in self.traces.values() for one, p in closed(trace).items()}
        answers: list[Answer] = []
        for i, tokens in enumerate(sequences):
            n = len(tokens)
            ends = {p for one in known for p in Compared(tokens, one, known[one], set()).asked}
            all_ends = ends_of(n) | {*range(n - 8, n)} | ends
            looked_at = self._looked_at(tokens, {n}), self._looked_at(tokens, all_ends)
            for traces in looked_at[n % 64 == 0 :]:
                among = [
                    Compared(tokens, one, known[one], ends)
                    for one in known
                    if one.has(each[i]) and one.trace_id in traces
                ]
                found, unsure = equals(among, n, weight_versions), False
                if found and found[0].proven == n:
                    break
            else:
                rivals = [Compared(tokens, x, known[x], ends) for x in known if x.has(each[i])]
                unsure = are_unsure(found, rivals)
            turn = None if indexes is None else indexes[i]
            if turn is None and equal == "any" and found:
                turn = -1 - [*sequences[:i]].count(tokens) % len(found)  # from the newest back
            if unsure or (len(found) > 1 and turn is None):
                answers.append(AMBIGUOUS)
                continue
            chosen = found[turn:][:1] if len(found) > 1 else found
            answers += [one.found(len(found)) for one in chosen] or [NOT_FOUND]
        return answers

    def _looked_at(self, tokens: Tokens, ends: set[int]) -> set[str]:
        """Traces with a request that is found by one of these positions."""
        return {
            one.trace_id
            for trace in self.traces.values()
            for one in trace
            if any(p <= same(tokens, one.tokens) for p in one.indexed & ends)
        }


class Compared:
    """A request beside a sequence: how far digests prove them equal, and whether one differs."""

    def __init__(self, tokens: Tokens, one: Request, known: set[int], ends: set[int]) -> None:
        self.one, self.known, self.n = one, known, len(tokens)
        most = same(tokens, one.tokens)
        both = known & (ends_of(self.n) | {*range(self.n - 8, self.n)} | ends)
        self.proven = max((p for p in both if p <= most), default=0)
        self.disproved = any(p > most for p in both)

    @property
    def asked(self) -> set[int]:
        """Where the request ends, if the sequence may continue it."""
        m = len(self.one.tokens)
        may = self.one.reason and self.one.prompt_len < self.proven and not self.disproved
        return {m} if may and m < self.n else set()

    def is_candidate(self, versions: Collection[int] | None) -> bool:
        """Whether it may be the one; of these weight versions, if some are given."""
        if versions is not None and max(self.one.versions, default=None) not in versions:
            return False
        n, p, m = self.n, self.proven, len(self.one.tokens)
        if self.one.reason in ("", "handoff") or self.disproved or p <= self.one.prompt_len:
            return False
        return p == n or p == m < n or (p < n <= m and self.one.prompt_len > 0)

    def may_have_sampled(self) -> bool:
        """Whether it may have the tokens behind the last digest."""
        return not self.disproved and (not self.one.reason or len(self.one.tokens) >= self.n)

    @property
    def knows_prompt(self) -> bool:
        """Whether there is a digest at the end of its prompt."""
        return self.one.prompt_len in self.known

    def has_prompt_of(self, other: Compared) -> bool:
        """Whether it is another request whose prompt has the same length, and digest there."""
        a, b, p = self.one, other.one, self.one.prompt_len
        if a is b or p != b.prompt_len or not (self.knows_prompt and other.knows_prompt):
            return False
        return a.key == b.key and a.tokens[:p] == b.tokens[:p]

    def found(self, num_equal: int) -> Found:
        one = self.one
        return Found(one.trace_id, one.number, len(one.tokens), self.proven, num_equal)


def equals(among: Sequence[Compared], n: int, versions: Collection[int] | None) -> list[Compared]:
    """Return the equal candidates for n tokens."""
    candidates = [one for one in among if one.is_candidate(versions)]
    proven = max((one.proven for one in candidates), default=0)
    return [one for one in candidates if one.proven == proven]


def are_unsure(equal: Sequence[Compared], every: Sequence[Compared]) -> bool:
    """Whether another request may be the one, where none has all tokens."""
    mine = [one.one for one in equal]
    others = [x for x in every if x.one not in mine and x.may_have_sampled()]
    return any(not a.knows_prompt or any(a.has_prompt_of(x) for x in others) for a in equal)
