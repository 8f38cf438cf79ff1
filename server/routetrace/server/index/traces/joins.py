"""Joins of the engine requests of one trace.

One trace id names the requests of several shards, of a prefill and a decode engine, of retries,
continued rollouts and the turns of a chat. Rows of different requests make up one token sequence
where digests prove that one was given what the other sampled, or where KV was handed over by name
(docs/rows.md, section 5). The result is computed from the reports of the sources and does not
depend on their order; nothing is ever merged, so that a late proof changes only the cells that it
concerns.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import NamedTuple

from routetrace.codec.records import Provenance
from routetrace.server.common.slices import at_once
from routetrace.server.index.traces.lineage import Incarnation, Owned, Request
from routetrace.server.index.traces.prefix_tree import STEP, Digests, PrefixTree, Reported
from routetrace.server.index.traces.sources import Source, WriterKey
from routetrace.server.index.traces.spans import FOREVER

#: Maximum requests with one prompt that are compared; where there are more, all are rivals.
_MAX_ALIKE = 64


class Continued(NamedTuple):
    """Which request another one continues, and why."""

    before: Request | None
    """The request; None: none, or several may be it."""
    proven: int = 0
    """Tokens that it, or each that may be it, shares with the other one's prompt."""
    equals: tuple[Request, ...] = ()
    """Requests that share as many, or may: it, and its rivals."""
    slot: int = -1
    """Last position below `proven` that it took from a slot, if there are several; -1: none."""


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
        # By index, as requests that name each other must make no cycle (`process.pauses`).
        self._givers: dict[int, int] = {}
        self._ended: dict[str, list[int]] = {}
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
        stop, owner = FOREVER, request
        while True:
            before, proven, _, _ = self.continued(owner)
            if before is None:
                break
            end = min(proven - 1, before.num_rows)
            owners.append(Owned(owner, end, stop, self._givers_of(owner)))
            stop, owner = end, before
            if not len(owners) % STEP:
                yield
        owners.append(Owned(owner, max(0, proven - 1), stop, self._givers_of(owner)))
        owners.reverse()
        self._incarnations[number] = Incarnation(request, owners)

    def continued(self, request: Request) -> Continued:
        """Return the request that one goes on from."""
        if self._tree is None:
            return Continued(None)
        proven, found = self._tree.predecessors(request.index)
        if not found:
            return Continued(None)
        sampled = [self.requests[index] for index in found]
        if self._givers.get(request.index) in [one.index for one in sampled if one.handed_over]:
            return Continued(None)  # the name says whose tokens they are
        # Who took KV over goes on from the request that handed it over: they are no rivals.
        taken = {self._givers.get(one.index) for one in sampled if not one.handed_over}
        equals = tuple(r for r in sampled if not (r.handed_over and r.index in taken))
        if len(equals) > 1:
            maker, slot = _maker_of_last_slot(request, proven, equals)
            if maker and maker.handed_over:
                return Continued(None)
            return Continued(maker, proven, equals, slot)
        [only] = equals
        rivals = self._alike(only, request, proven)
        return Continued(None if rivals else only, proven, (only, *rivals))

    def _alike(self, request: Request, taker: Request, proven: int) -> list[Request]:
        """Return requests with the same prompt that may have sampled the tokens as well.

        Args:
            request: request that shares the longest prefix with the prompt of `taker`.
            taker: request that was given the tokens.
            proven: length of that prefix.
        """
        if (request.stopped and 0 < request.num_tokens <= proven) or not self._tree:
            return []
        others = [self.requests[index] for index in self._tree.alike(request.index)]
        if len(others) > _MAX_ALIKE:
            return others[:_MAX_ALIKE]
        return [
            one
            for one in others
            if one not in (request, taker) and not one.handed_over
            if one.num_tokens > self.proven(one, taker) and taker.disproved(one) == FOREVER
        ]

    def proven(self, request: Request, other: Request) -> int:
        """Return the number of tokens that a request shares with the prompt of another one."""
        return self._tree.shared(request.index, other.index) if self._tree else 0

    def named(self, request: Request) -> list[Request]:
        """Return the other requests that ended with the hand-over that one began with."""
        ended = self._ended.get(request.received_by, ())
        return [self.requests[index] for index in ended if index != request.index]

    def _givers_of(self, request: Request) -> tuple[Request, ...]:
        """Return the requests along which the KV of a request was handed over, the last first."""
        passed = [request.index]
        while (index := self._givers.get(passed[-1])) is not None and index not in passed:
            passed.append(index)
        return tuple(self.requests[index] for index in passed[1:])

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
        """Find which requests go on from others, and which took KV from others."""
        reported = []
        for request in self.requests:
            reported.append(
                Reported(request.own, request.prompt_len, request.num_tokens, request.handed_over)
            )
            if name := request.handed_over_by:
                self._ended.setdefault(name, []).append(request.index)
            if not len(reported) % STEP:
                yield
        self._tree = tree = yield from PrefixTree.in_steps(reported)
        taken: list[tuple[Request, Request]] = []
        for index, request in enumerate(self.requests):
            request.tree = tree
            successor = tree.successor(index)
            if successor is not None:
                request.successor = self.requests[successor]
            ended = self._ended.get(request.received_by, ())
            # More than two are several others: they may be very many.
            if len(ended) <= 2 and len(others := self.named(request)) == 1:
                [giver] = others
                self._givers[index] = giver.index
                if giver.handed_over and request.order > giver.order:
                    taken.append((giver, request))
            if not index % STEP:
                yield
        for giver, taker in taken:
            giver.successor = giver.successor or taker


def _maker_of_last_slot(
    request: Request, proven: int, candidates: Sequence[Request]
) -> tuple[Request | None, int]:
    """Return the candidate that made the row of the last position below `proven` from a slot.

    It must have sampled the token there: KV of their prompt does not tell candidates apart.

    Returns:
        The candidate, None if there is none; the position, -1 if no slot was read.
    """
    last: tuple[int, int] | None = None
    for source in request.sources:
        for span in source.attempts[0]:
            if span.provenance == Provenance.SLOT and span.position < proven:
                end = min(span.stop, proven) - 1
                if last is None or end > last[0]:
                    last = end, span.ref + end - span.position
    if last is None:
        return None, -1
    position, ref = last
    for candidate in candidates:
        for source in candidate.sources if position >= candidate.prompt_len else ():
            for attempt in source.attempts:
                for span in attempt.between(position, position + 1):
                    if span.provenance == Provenance.FORWARD and span.ref == ref:
                        return candidate, position
    return None, position


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
