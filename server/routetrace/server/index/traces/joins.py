"""Lineage of the engine requests of one trace: which of them owns a position.

One trace id names the requests of several shards, of a prefill and a decode engine, of retries,
continued rollouts and the turns of a chat. Rows of different requests make up one token sequence
where digests prove that one was given what the other sampled, or where KV was handed over by name
(docs/rows.md, section 5). The result is computed from the reports of the sources and does not
depend on their order; nothing is ever merged, so that a late proof changes only the cells that it
concerns.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from routetrace.codec.records import FinishReason, Provenance
from routetrace.server.common.slices import at_once
from routetrace.server.index.traces.prefix_tree import STEP, Digests, PrefixTree, Reported
from routetrace.server.index.traces.sources import Source, WriterKey
from routetrace.server.index.traces.spans import FOREVER, Interval, merge, subtract
from routetrace.v1 import routetrace_pb2 as pb

#: Maximum labels of an incarnation; those of the earliest requests are ignored.
MAX_TRACE_LABELS = 64


@dataclass(slots=True, eq=False)
class Request:
    """Engine request as reported by all shards of its engine."""

    number: int
    """From 1, in order of arrival, dropped requests included."""
    index: int
    """Its place among the requests of the join."""
    members: list[tuple[int, Source]] = field(default_factory=list)
    """Sources with their index in the trace."""
    writers: set[WriterKey] = field(default_factory=set)
    """Writers of the sources."""
    own: Digests = field(default_factory=dict)
    """Digests that its shards reported."""
    successor: Request | None = None
    """Request that fully contains this one, if any."""
    sources: list[Source] = field(default_factory=list)
    """One source per shard that has reported the request."""
    prompt_len: int = 0
    """Length of the prompt; 0 while unknown."""
    num_tokens: int = 0
    """Final token count; 0 while unknown."""
    handed_over: bool = False
    """Whether the request ended with `handoff`."""
    tree: PrefixTree | None = None
    """Prefixes of all requests of the trace; None if it is the only one."""
    giver: Request | None = None
    """Request that handed over the external KV of its begin, by name."""

    def settle(self) -> None:
        """Set what follows from its sources: each change that matters makes a new join."""
        self.sources = [source for _, source in self.members]
        if len(self.sources) == 1:  # the usual case; the general path takes three times as long
            [source] = self.sources
            self.prompt_len = source.prompt_len
            self.num_tokens = source.num_tokens if source.ended else 0
            self.handed_over = source.finish_reason == FinishReason.HANDOFF
            return
        self.prompt_len = max(s.prompt_len for s in self.sources)
        self.num_tokens = max((s.num_tokens for s in self.sources if s.ended), default=0)
        self.handed_over = any(s.finish_reason == FinishReason.HANDOFF for s in self.sources)

    @property
    def digests(self) -> Digests:
        """Digests, also those of other requests with the same tokens."""
        return self.tree.digests(self.index) if self.tree else self.own

    @property
    def labels(self) -> dict[str, str]:
        """Labels given at its begin, by all shards."""
        return {key: text for s in self.sources for key, text in s.labels.items()}

    @property
    def nonce(self) -> int:
        """Name in handles; 0: none."""
        return max(source.nonce for source in self.sources)

    @property
    def began(self) -> float:
        """Unix time at which the first of its shards reported it."""
        return min(source.began for source in self.sources)

    @property
    def num_rows(self) -> int:
        """Number of rows if it has ended, else past every position."""
        return self.num_tokens - 1 if self.num_tokens else FOREVER

    @property
    def received_by(self) -> str:
        """Hand-over that its external KV came by; "": not known."""
        return _only({source.received_by for source in self.sources})

    @property
    def handed_over_by(self) -> str:
        """Hand-over that it ended with; "": none."""
        return _only({source.handed_over_by for source in self.sources if source.ended})

    @property
    def loaded(self) -> list[Interval]:
        """Positions of its begin's external KV that stayed as they were loaded."""
        lost = pb.MISSING_REASON_KV_UNKNOWN
        changed = merge(
            [
                *((s.position, s.stop) for source in self.sources for s in source.attempts[0]),
                *((n.start, n.stop) for s in self.sources for n in s.lost if n.reason != lost),
            ]
        )
        begun = merge(source.loaded for source in self.sources if source.loaded[1])
        return [left for interval in begun for left in subtract(interval, changed)]

    def disproved(self, other: Request) -> int:
        """Return the position from which on digests disprove the same tokens; FOREVER if none."""
        agreed = 0
        for position in sorted(self.own.keys() & other.own.keys()):
            if self.own[position] != other.own[position]:
                return agreed
            agreed = position
        return FOREVER


def _only(names: set[str]) -> str:
    """Return the name that all shards give; "" where they differ."""
    return names.pop() if len(names) == 1 else ""


class Owned(NamedTuple):
    """Positions [start, stop) of an incarnation, and the request that owns them."""

    owner: Request
    start: int
    stop: int


class Part(NamedTuple):
    """Positions [start, stop) at which rows of a request count."""

    request: Request
    start: int
    stop: int
    attempts: Sequence[int]
    """Attempts that count, in this order."""
    given: bool = False
    """Whether the KV behind the rows was handed over."""


class Incarnation:
    """Token sequence that ends with one request.

    Args:
        request: last request.
        owners: its chain, in the order of its positions; `request` is the last.
        ambiguous: positions that several requests may own, ascending and disjoint.
    """

    def __init__(
        self,
        request: Request,
        owners: list[Owned],
        ambiguous: list[Interval],
    ) -> None:
        self.request = request
        self._owners = owners
        self.ambiguous = ambiguous

    @property
    def continued(self) -> list[Request]:
        """Requests that it goes on from, in the order in which their tokens were sampled."""
        return [owner for owner, _, _ in self._owners[:-1]]

    def owned(self, *, latest: bool = False) -> list[Owned]:
        """Return which request owns which positions, ascending; ambiguous ones have no owner."""
        if latest:
            return [Owned(self.request, 0, FOREVER)]
        if not self.ambiguous:
            return self._owners
        return [
            Owned(owner, a, b)
            for owner, start, stop in self._owners
            for a, b in subtract((start, stop), self.ambiguous)
        ]

    @property
    def labels(self) -> dict[str, str]:
        """Labels of its request, and of those that it goes on from; the last one's count."""
        labels = self.request.labels
        for request in reversed(self.continued):
            labels = {**labels, **request.labels, **labels}
        return dict(islice(labels.items(), MAX_TRACE_LABELS))

    @property
    def num_tokens(self) -> int:
        """Final token count; 0 while unknown."""
        return 0 if self.request.handed_over else self.request.num_tokens

    @property
    def num_rows(self) -> int:
        """Positions 0 .. num_rows - 1 exist: N tokens have N - 1 rows."""
        if self.num_tokens:
            return self.num_tokens - 1
        most = self.request.num_rows
        ends = [min(most, s.end) for s in self.request.sources]
        return max([*ends, *(stop for _, _, stop in self._owners[:-1])])


def parts_of(owned: Owned, *, latest: bool = False) -> Iterator[Part]:
    """Yield where the rows of owned positions come from: each from the first part that has it."""
    owner, start, stop = owned
    attempts = range(max(len(s.attempts) for s in owner.sources))
    if latest:
        yield Part(owner, start, stop, attempts[::-1])
        yield from _handed_over(owner, [(start, stop)])
        return
    yield Part(owner, start, stop, attempts[:1])
    yield from _handed_over(owner, [(start, stop)])
    if attempts[1:]:
        yield Part(owner, start, stop, attempts[1:])


def _handed_over(owner: Request, wanted: list[Interval]) -> Iterator[Part]:
    """Yield the parts behind hand-overs, along which KV may have come a long way."""
    passed = {owner}
    while (giver := owner.giver) and giver not in passed:
        most = min(giver.num_rows, owner.disproved(giver))
        wanted = [
            (max(a, c), min(b, d, most))
            for a, b in wanted
            for c, d in owner.loaded
            if max(a, c) < min(b, d, most)
        ]
        last = max(len(s.attempts) for s in giver.sources) - 1
        for start, stop in wanted:
            yield Part(giver, start, stop, (last,), given=True)
        if last:
            return
        passed.add(giver)
        owner = giver


class Join:
    """Requests of a trace, and the incarnations that they make up.

    Args:
        sources: sources of the trace, in order of arrival.
        num_dropped: number of requests before them that the trace has dropped.
    """

    def __init__(self, sources: Sequence[Source], num_dropped: int = 0) -> None:
        at_once(self._make(sources, num_dropped))

    @classmethod
    def in_steps(
        cls, sources: Sequence[Source], num_dropped: int = 0
    ) -> Generator[None, None, Join]:
        """Make a join step by step; it is void if a source changes meanwhile."""
        join = cls.__new__(cls)
        yield from join._make(sources, num_dropped)
        return join

    def _make(self, sources: Sequence[Source], num_dropped: int) -> Generator[None, None, None]:
        self.requests = yield from _grouping(sources, num_dropped)
        self._num_dropped = num_dropped
        self._incarnations: dict[int, Incarnation] = {}
        self._tree: PrefixTree | None = None
        if len(self.requests) > 1:
            yield from self._prove()

    @property
    def numbers(self) -> range:
        """Numbers of the requests."""
        return range(self._num_dropped + 1, self._num_dropped + 1 + len(self.requests))

    def number_of(self, nonce: int) -> int:
        """Return the number of the last request with a nonce; 0 if there is none."""
        return next((r.number for r in reversed(self.requests) if r.nonce == nonce), 0)

    def incarnation(self, number: int) -> Incarnation:
        """Return the incarnation that ends with a request."""
        at_once(self.relate(number))
        return self._incarnations[number]

    def relate(self, number: int) -> Generator[None, None, None]:
        """Make the incarnation that ends with a request step by step."""
        if number in self._incarnations:
            return
        request = self.requests[self.numbers.index(number)]
        owners: list[Owned] = []
        ambiguous: list[Interval] = []
        stop, owner = FOREVER, request
        while True:
            before, proven = self._continued(owner, ambiguous)
            if before is None:
                break
            end = min(proven, before.num_rows, owner.prompt_len - 1)
            owners.append(Owned(owner, end, stop))
            stop, owner = end, before
            if not len(owners) % STEP:
                yield
        owners.append(Owned(owner, 0, stop))
        owners.reverse()
        self._incarnations[number] = Incarnation(request, owners, merge(ambiguous))

    def _continued(self, request: Request, ambiguous: list[Interval]) -> tuple[Request | None, int]:
        """Return the request that one goes on from, and the length of the proof.

        Positions that several requests may own are added to `ambiguous`.
        """
        if self._tree is None:
            return None, 0
        proven, found = self._tree.predecessors(request.index)
        if len(found) == 1:
            return self.requests[found[0]], proven
        candidates = [self.requests[index] for index in found]
        maker = _maker_of_last_slot(request, proven, candidates)
        if candidates and maker is None:
            first = min(candidate.prompt_len for candidate in candidates) - 1
            ambiguous.append((first, proven - 1))
        return maker, proven

    def request_of(self, source: Source) -> Request | None:
        """Return the request that a source reports; None if the trace has dropped it."""
        for request in reversed(self.requests):  # readers that wait follow a recent one
            if any(member.reports_as(source) for member in request.sources):
                return request
        return None

    @property
    def standing(self) -> list[int]:
        """Numbers of the requests that no other request contains."""
        return [r.number for r in self.requests if r.successor is None]

    def having(self, position: int, digest: int) -> list[Request]:
        """Return the requests with a digest, in order."""
        if self._tree:
            return [self.requests[i] for i in self._tree.having((position, digest))]
        return [r for r in self.requests if r.own.get(position) == digest]

    def _prove(self) -> Generator[None, None, None]:
        """Find requests that others continue, contain, or took KV from."""
        reported = []
        givers: dict[str, Request | None] = {}
        for request in self.requests:
            reported.append(
                Reported(request.own, request.prompt_len, request.num_tokens, request.handed_over)
            )
            if name := request.handed_over_by:
                givers[name] = None if name in givers else request
            if not len(reported) % STEP:
                yield
        self._tree = tree = yield from PrefixTree.in_steps(reported)
        for index, request in enumerate(self.requests):
            request.tree = tree
            successor = tree.successor(index)
            if successor is not None:
                request.successor = self.requests[successor]
            giver = givers.get(request.received_by) if request.received_by else None
            request.giver = giver if giver is not request else None
            if not index % STEP:
                yield


def _maker_of_last_slot(
    request: Request, proven: int, candidates: Sequence[Request]
) -> Request | None:
    """Return the candidate that made the row of the last position below `proven` from a slot.

    It must have sampled the token there: KV of their prompt does not tell candidates apart.
    """
    last: tuple[int, int] | None = None
    for source in request.sources:
        for span in source.attempts[0]:
            if span.provenance == Provenance.SLOT and span.position < proven:
                end = min(span.stop, proven) - 1
                if last is None or end > last[0]:
                    last = end, span.ref + end - span.position
    if last is None:
        return None
    position, ref = last
    for candidate in candidates:
        for source in candidate.sources if position >= candidate.prompt_len else ():
            for attempt in source.attempts:
                for span in attempt.between(position, position + 1):
                    if span.provenance == Provenance.FORWARD and span.ref == ref:
                        return candidate
    return None


def requests_of(sources: Sequence[Source], num_dropped: int = 0) -> list[Request]:
    """Group sources by engine request; `num_dropped` requests came before them."""
    return at_once(_grouping(sources, num_dropped))


def _grouping(sources: Sequence[Source], num_dropped: int) -> Generator[None, None, list[Request]]:
    requests: list[Request] = []
    by_name: dict[tuple[str, str, str], list[Request]] = {}
    # By name and writer: number of leading requests that have a source of the writer.
    seen: dict[tuple[tuple[str, str, str], WriterKey], int] = {}
    done = 0
    for index, source in enumerate(sources):
        name = source.name
        same = by_name.setdefault(name, [])
        first = seen.get((name, source.writer), 0)
        while first < len(same) and source.writer in same[first].writers:
            first += 1
        seen[name, source.writer] = first
        digests = dict(source.digests.tolist())
        home = next((r for r in same[first:] if _may_hold(r, source, digests)), None)
        if home is None:
            home = Request(num_dropped + len(requests) + 1, len(requests))
            requests.append(home)
            same.append(home)
        home.members.append((index, source))
        home.writers.add(source.writer)
        home.own = dict(sorted((home.own | digests).items())) if home.own else digests
        done += 1 + len(digests) // 4
        if done >= STEP:
            done = 0
            yield
    for index, request in enumerate(requests):
        request.settle()
        if not index % STEP:
            yield
    return requests


def _may_hold(request: Request, source: Source, digests: Digests) -> bool:
    """Whether a source can be another shard's source of a request, with the same tokens."""
    return source.writer not in request.writers and all(
        request.own.get(p, value) == value for p, value in digests.items()
    )
