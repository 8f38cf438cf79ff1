"""Joins of the engine requests of one trace.

One trace id names the requests of several shards, of a prefill and a decode engine, of retries,
continued rollouts and the turns of a chat. Rows of different requests make up one token sequence
only where digests prove that the tokens before them are the same. The result is computed from the
reports of the sources and does not depend on their order; nothing is ever merged, so that a late
proof changes only the cells that it concerns.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from routetrace.codec.records import FinishReason
from routetrace.server.common.slices import at_once
from routetrace.server.index.traces.prefix_tree import STEP, Digests, PrefixTree, Reported
from routetrace.server.index.traces.sources import Source, WriterKey
from routetrace.server.index.traces.spans import FOREVER

#: Maximum requests whose rows fill holes of an incarnation because they begin alike, oldest first.
MAX_ALIKE = 64

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

    def reached(self, attempt: int, position: int) -> bool:
        """Whether an attempt has a row at or after a position."""
        return any(
            attempt < len(s.attempts) and s.attempts[attempt].end > position for s in self.sources
        )

    def shares_first_sampled(self, other: Request) -> bool:
        """Whether digests prove that the other request has the same token after the prompt."""
        return self.tree is not None and self.tree.common(self.index, other.index) > self.prompt_len

    def goes_on_from(self, other: Request, proven: int) -> bool:
        """Whether it was given tokens that the other request sampled, or the KV of its prompt.

        Its first `proven` tokens are proven to be those of the other request.
        """
        # Only a request later in this order can continue another.
        if (other.prompt_len, not other.handed_over) >= (self.prompt_len, not self.handed_over):
            return False
        if other.handed_over and proven >= other.num_rows:
            return True
        return proven > other.prompt_len > 0


class Part(NamedTuple):
    """Rows [start, stop) that a request contributes to an incarnation."""

    request: Request
    stop: int
    start: int = 0
    sampled: bool = False
    """Whether only rows count that it computed in the attempt that sampled the next token."""


class Incarnation:
    """Token sequence that ends with one request.

    Args:
        request: last request.
        proven: result of `Join.proven`. The join itself holds its incarnations, and indexed objects
            must hold no cycles (`process.pauses`).
    """

    def __init__(self, request: Request, proven: list[tuple[Request, int]]) -> None:
        self.request = request
        self._proven = proven
        self._continued: list[Part] = []
        self._alike: list[Part] = []

    def divide(self) -> Generator[None, None, None]:
        """Tell requests that it goes on from and those that begin alike, before anything else."""
        continued, alike = self._continued, self._alike
        for index, (other, proven) in enumerate(self._proven):
            part = Part(other, min(proven, other.num_rows))
            (continued if self.request.goes_on_from(other, proven) else alike).append(part)
            if not index % STEP:
                yield
        # Of equal prompts, requests that sampled come before those that handed over; of several of
        # these, the KV of the last one was used.
        continued.sort(
            key=lambda p: (p.request.prompt_len, p.request.handed_over, -p.request.number)
        )
        alike.sort(key=lambda p: p.request.number)
        del alike[MAX_ALIKE:]

    @property
    def num_related(self) -> int:
        """Number of requests that begin alike, which bounds the time that its view takes."""
        return len(self._proven)

    @property
    def continued(self) -> list[Part]:
        """Requests that it goes on from, in the order in which their tokens were sampled."""
        return self._continued

    @property
    def as_sampled(self) -> list[Part]:
        """Whose row is served: of the first that has it.

        Last come other requests that were given the same tokens: their rows fill holes.
        """
        continued, alike = self._continued, self._alike
        return [*self._last_of_prompt, *continued, Part(self.request, FOREVER), *alike]

    @property
    def labels(self) -> dict[str, str]:
        """Labels of its request, and of those that it goes on from; the last one's count."""
        labels = self.request.labels
        for part in reversed(self.continued):
            labels = {**labels, **part.request.labels, **labels}
        return dict(islice(labels.items(), MAX_TRACE_LABELS))

    @property
    def _last_of_prompt(self) -> list[Part]:
        """Whose row comes first where the prompt ends, as it sampled the token that follows.

        That of the request itself, if it has one, unless it was given a token that another one
        sampled: an engine that was handed a prompt computes its last token again.
        """
        prompt_len = self.request.prompt_len
        last = prompt_len - 1
        continued = [part.request for part in self.continued if part.stop > last]
        given = [r for r in continued if self.request.shares_first_sampled(r)]
        if not continued:
            return []
        own = Part(self.request, prompt_len, last, sampled=True)
        return [*(Part(r, prompt_len, last) for r in given), own]

    @property
    def latest(self) -> list[Part]:
        """Parts in the order of the policy `latest`."""
        return [Part(self.request, FOREVER), *reversed(self._continued), *self._alike]

    @property
    def num_tokens(self) -> int:
        """Final token count; 0 while unknown."""
        return 0 if self.request.handed_over else self.request.num_tokens

    @property
    def num_rows(self) -> int:
        """Positions 0 .. num_rows - 1 exist: N tokens have N - 1 rows."""
        if self.num_tokens:
            return self.num_tokens - 1
        parts = [*self.continued, Part(self.request, self.request.num_rows)]
        return max(min(part.stop, s.end) for part in parts for s in part.request.sources)


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

    def incarnation(self, number: int) -> Incarnation:
        """Return the incarnation that ends with a request."""
        at_once(self.relate(number))
        return self._incarnations[number]

    def relate(self, number: int) -> Generator[None, None, None]:
        """Make the incarnation that ends with a request step by step."""
        if number in self._incarnations:
            return
        request = self.requests[self.numbers.index(number)]
        proven: list[tuple[Request, int]] = []
        for found in self.proven(request):
            proven.append(found)
            if not len(proven) % STEP:
                yield
        incarnation = Incarnation(request, proven)
        yield from incarnation.divide()
        self._incarnations[number] = incarnation

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

    def proven(self, request: Request) -> Iterator[tuple[Request, int]]:
        """Yield other requests that share a prefix of a request's prompt, and its proven length.

        Prefixes beyond the prompt do not count: only the request itself has rows of tokens that it
        sampled.
        """
        if self._tree:
            for other, position in self._tree.proven(request.index):
                yield self.requests[other], position

    def having(self, position: int, digest: int) -> list[Request]:
        """Return the requests with a digest, in order."""
        if self._tree:
            return [self.requests[i] for i in self._tree.having((position, digest))]
        return [r for r in self.requests if r.own.get(position) == digest]

    def _prove(self) -> Generator[None, None, None]:
        """Find requests that begin alike, and those that another one contains."""
        reported = []
        for request in self.requests:
            reported.append(
                Reported(request.own, request.prompt_len, request.num_tokens, request.handed_over)
            )
            if not len(reported) % STEP:
                yield
        self._tree = tree = yield from PrefixTree.in_steps(reported)
        for index, request in enumerate(self.requests):
            request.tree = tree
            successor = tree.successor(index)
            if successor is not None:
                request.successor = self.requests[successor]
            if not index % STEP:
                yield


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
