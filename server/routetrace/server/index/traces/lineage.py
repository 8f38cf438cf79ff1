"""Lineage of one trace: which request owns a position, and whose passes made the KV behind it.

See docs/rows.md, section 5.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from routetrace.codec.records import UNKNOWN_VERSION, FinishReason
from routetrace.server.index.traces.prefix_tree import Digests, PrefixTree
from routetrace.server.index.traces.sources import Source, WriterKey
from routetrace.server.index.traces.spans import FOREVER, Interval, intersect, merge

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
    """Request that goes on from this one, if any; it is later in `order`."""
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
    def stopped(self) -> bool:
        """Whether it ended with `stop`, with a token that ends each answer."""
        return any(source.finish_reason == FinishReason.STOP for source in self.sources)

    @property
    def aborted(self) -> bool:
        """Whether it ended with `abort`: another request may be the answer then."""
        return any(source.finish_reason == FinishReason.ABORT for source in self.sources)

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
    def order(self) -> tuple[int, bool]:
        """Only a request that is later in this order goes on from another."""
        return self.prompt_len, not self.handed_over

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
    def kv_version(self) -> int:
        """Weight version of all KV that it could reuse at its begin; UNKNOWN_VERSION: not known."""
        versions = {source.kv_version for source in self.sources}
        return versions.pop() if len(versions) == 1 else UNKNOWN_VERSION

    @property
    def num_reused(self) -> int:
        """Tokens of its prompt whose KV it reused at its begin, as far as that is known.

        Passes go up: what lies below the first one stays as it was loaded, or in its slots.
        """
        return min(self.prompt_len, self._first_pass, *(s.loaded[1] for s in self.sources))

    @property
    def begun(self) -> list[Interval]:
        """Positions of its begin's external KV."""
        return merge(source.loaded for source in self.sources if source.loaded[1])

    @property
    def loaded(self) -> list[Interval]:
        """Positions of its begin's external KV that it kept, as far as that is known."""
        begun = self.begun
        first = self._first_pass if begun else 0
        return [(a, min(b, first)) for a, b in begun if a < first]

    @property
    def _first_pass(self) -> int:
        """First position that a pass of its begin computed; FOREVER: none did."""
        first = min(source.first_pass for source in self.sources)
        over = all(s.ended or len(s.attempts) > 1 for s in self.sources)
        return first if over or first != FOREVER else 0

    @property
    def attempts_that_sampled(self) -> list[int]:
        """Attempts that tokens were sampled from, ascending; at least one.

        The first is the first one that computed the whole prompt, or the last one. Each later one
        computed all tokens that the request had at its begin; where that number is not known, a
        position that none of those before had computed. The engine gives all shards the same number
        at a preemption; of several calls, the smallest counts. If no shard could report it, all
        rows of the attempt are lost.
        """
        last = max(len(s.attempts) for s in self.sources) - 1
        found: list[int] = []
        most = 0
        for attempt in range(last):
            stops = {s.stops[attempt] for s in self.sources if attempt < len(s.stops)} - {FOREVER}
            computed = min(stops, default=FOREVER)
            if computed >= (self._had(attempt) or most + 1 if found else self.prompt_len):
                found.append(attempt)
                most = max(most, computed) if stops else most
        computed = min(self.num_rows, max(s.computed(last) for s in self.sources))
        if not found or computed >= (self._had(last) or most + 1):
            found.append(last)
        return found

    def _had(self, attempt: int) -> int:
        """Return the tokens that it had at the begin of an attempt, not the first; 0: not known."""
        return max((s.had[attempt - 1] for s in self.sources if attempt <= len(s.had)), default=0)

    @property
    def first_that_sampled(self) -> int:
        """The attempt that the first token of the answer was sampled from."""
        return self.attempts_that_sampled[0]

    def disproved(self, other: Request) -> int:
        """Return the position from which on digests disprove the same tokens; FOREVER if none."""
        agreed, mine, theirs = 0, self.digests, other.digests
        for position in sorted(mine.keys() & theirs.keys()):
            if mine[position] != theirs[position]:
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
    givers: tuple[Request, ...] = ()
    """Requests along which its external KV was handed over by name, the last one first."""


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
        owners: its chain, in the order of its positions; `request` is the last. Several requests
            may own the positions before those of the first.
    """

    def __init__(self, request: Request, owners: list[Owned]) -> None:
        self.request = request
        self._owners = owners

    @property
    def continued(self) -> list[Request]:
        """Requests that it goes on from, in the order in which their tokens were sampled."""
        return [owned.owner for owned in self._owners[:-1]]

    def owned(self, *, latest: bool = False) -> list[Owned]:
        """Return which request owns which positions, ascending.

        Those before the first are ambiguous: they have no owner.
        """
        return [self._owners[-1]._replace(start=0)] if latest else self._owners

    @property
    def labels(self) -> dict[str, str]:
        """Labels of its request, and of those that it goes on from; the last one's count."""
        labels = self.request.labels
        for request in reversed(self.continued):
            labels = {**labels, **request.labels, **labels}
        return dict(islice(labels.items(), MAX_TRACE_LABELS))

    @property
    def num_tokens(self) -> int:
        """Final token count; 0 while unknown, as where no request goes on from a hand-over."""
        goes_on = self.request.handed_over and self.request.successor is None
        return 0 if goes_on else self.request.num_tokens

    @property
    def num_rows(self) -> int:
        """Positions 0 .. num_rows - 1 exist: N tokens have N - 1 rows."""
        if self.num_tokens:
            return self.num_tokens - 1
        most = self.request.num_rows
        ends = [min(most, s.end) for s in self.request.sources]
        return max([*ends, *(owned.stop for owned in self._owners[:-1])])


def parts_of(owned: Owned, *, latest: bool = False) -> Iterator[Part]:
    """Yield where the rows of owned positions come from: each from the first part that has it."""
    owner, start, stop, _ = owned
    if latest:
        attempts = range(max(len(s.attempts) for s in owner.sources))
        yield Part(owner, start, stop, attempts[::-1])
        yield from _handed_over(owned)
        return
    first, *later = owner.attempts_that_sampled
    yield Part(owner, start, stop, (first,))
    if not first:
        yield from _handed_over(owned)
    if later:
        yield Part(owner, start, stop, later)


def _handed_over(owned: Owned) -> Iterator[Part]:
    """Yield the parts behind hand-overs, along which KV may have come a long way."""
    taker, wanted = owned.owner, [(owned.start, owned.stop)]
    for giver in owned.givers:
        most = min(giver.num_rows, taker.disproved(giver))
        wanted = [(a, min(b, most)) for a, b in intersect(wanted, taker.loaded) if a < most]
        last = max(len(s.attempts) for s in giver.sources) - 1
        for start, stop in wanted:
            yield Part(giver, start, stop, (last,), given=True)
        if last:
            return
        taker = giver
