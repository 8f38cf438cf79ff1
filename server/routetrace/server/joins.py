"""Which engine requests of one trace belong together.

A trace id is used again and again: by the shards of an engine, by the prefill and the decode engine
of a disaggregated pair, by retries, by continued rollouts, by the turns of a session. Rows of
different requests make up one token sequence only where digests prove that the tokens before them
are the same. All of this is worked out from what the sources reported, whatever the order in which
their agents were heard; nothing is ever merged, so that a proof that comes late changes nothing
that it does not have to.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from routetrace.server.spans import FOREVER
from routetrace.v1.records import FinishReason

if TYPE_CHECKING:
    from routetrace.server.trace_index import Source, WriterKey

Digests = dict[int, int]
"""Position -> digest of the tokens before it; ascending."""

Prefix = tuple[int, int]
"""(position, digest): the tokens of a sequence before a position."""


@dataclass(slots=True, eq=False)
class Request:
    """One engine request, as all shards of its engine report it."""

    number: int
    """From 1, in order of arrival."""
    members: list[tuple[int, Source]] = field(default_factory=list)
    """Its sources, with their index in the trace."""
    writers: set[WriterKey] = field(default_factory=set)
    """Of its sources."""
    digests: Digests = field(default_factory=dict)
    """Also those that follow from other requests with the same tokens."""
    successor: Request | None = None
    """A request that all of it is a part of."""

    @property
    def sources(self) -> list[Source]:
        """One for each shard that was heard of."""
        return [source for _, source in self.members]

    @property
    def prompt_len(self) -> int:
        """Tokens that it was given; 0 if untold."""
        return max(s.prompt_len for s in self.sources)

    @property
    def num_tokens(self) -> int:
        """Final token count; 0 while unknown."""
        return max((s.num_tokens for s in self.sources if s.ended), default=0)

    @property
    def handed_over(self) -> bool:
        """Whether another engine was to go on."""
        return any(s.finish_reason == FinishReason.HANDOFF for s in self.sources)

    @property
    def num_rows(self) -> int:
        """Its rows if it has ended, else past every position."""
        return self.num_tokens - 1 if self.num_tokens else FOREVER

    def goes_on_from(self, other: Request, proven: int) -> bool:
        """Whether it was given tokens that the other one sampled, or the KV of its prompt.

        `proven` tokens at the start of its prompt are the other's too.
        """
        # Only what comes later in this order can go on from a request.
        if (other.prompt_len, not other.handed_over) >= (self.prompt_len, not self.handed_over):
            return False
        if other.handed_over and proven >= other.num_rows:
            return True
        return proven > other.prompt_len > 0


class Part(NamedTuple):
    """What a request gives to an incarnation: its rows of positions before `stop`."""

    request: Request
    stop: int


class Incarnation:
    """The token sequence that ends with one request.

    Args:
        request: that one.
        proven: what `Join.proven` says of it. Not the join itself, which knows its incarnations:
            what is indexed holds no cycles (`Retention.freeze`).
    """

    def __init__(self, request: Request, proven: list[tuple[Request, int]]) -> None:
        self.request = request
        self._proven = proven

    @cached_property
    def _parts(self) -> tuple[list[Part], list[Part]]:
        continued: list[Part] = []
        alike: list[Part] = []
        for other, proven in self._proven:
            part = Part(other, min(proven, other.num_rows))
            (continued if self.request.goes_on_from(other, proven) else alike).append(part)
        # Of several that handed over the same prompt, the last one's KV was used.
        continued.sort(key=lambda p: (p.request.prompt_len, -p.request.number))
        alike.sort(key=lambda p: p.request.number)
        return continued, alike

    @property
    def continued(self) -> list[Part]:
        """Requests that it goes on from, in the order in which their tokens were sampled."""
        return self._parts[0]

    @property
    def as_sampled(self) -> list[Part]:
        """Whose row is served: of the first that has it.

        Last come other requests that were given the same tokens: their rows fill holes.
        """
        continued, alike = self._parts
        return [*continued, Part(self.request, FOREVER), *alike]

    @property
    def latest(self) -> list[Part]:
        """The same for the latest rows."""
        continued, alike = self._parts
        return [Part(self.request, FOREVER), *reversed(continued), *alike]

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
        return max(min(stop, s.end) for request, stop in parts for s in request.sources)


class Join:
    """The requests of a trace, and the incarnations that they make up.

    Args:
        sources: of the trace, in order of arrival.
    """

    def __init__(self, sources: Sequence[Source]) -> None:
        self.requests = _requests(sources)
        self._incarnations: dict[int, Incarnation] = {}
        self._holders: dict[Prefix, list[Request]] = {}
        if len(self.requests) > 1:
            self._prove()

    def incarnation(self, number: int) -> Incarnation:
        """The one that ends with a request."""
        if number not in self._incarnations:
            request = self.requests[number - 1]
            self._incarnations[number] = Incarnation(request, [*self.proven(request)])
        return self._incarnations[number]

    @property
    def standing(self) -> list[int]:
        """Numbers of those that no other one contains."""
        return [r.number for r in self.requests if r.successor is None]

    def proven(self, request: Request) -> Iterator[tuple[Request, int]]:
        """Other requests that share tokens with a request's prompt, and how many for certain.

        Not beyond the prompt: for what the request sampled itself it has no rows but its own.
        """
        seen = {request.number}
        for prefix in reversed(request.digests.items()):
            if prefix[0] <= request.prompt_len:
                for other in self._holders.get(prefix, ()):
                    if other.number not in seen:
                        seen.add(other.number)
                        yield other, prefix[0]

    def _prove(self) -> None:
        """Spreads digests among requests, and finds those that are a part of another."""
        _spread([r for r in self.requests if r.digests])
        given: dict[Prefix, list[Request]] = {}
        for request in self.requests:
            prompt_len = request.prompt_len
            for prefix in request.digests.items():
                self._holders.setdefault(prefix, []).append(request)
                if prefix[0] <= prompt_len:
                    given.setdefault(prefix, []).append(request)
        for request in self.requests:
            whole = request.num_tokens - request.handed_over
            for position, digest in request.digests.items():
                if 0 < whole <= position:
                    for other in given.get((position, digest), ()):
                        if other.goes_on_from(request, position):
                            request.successor = other  # the newest, in the end


def _requests(sources: Sequence[Source]) -> list[Request]:
    """Sources of the same engine request, together."""
    requests: list[Request] = []
    by_name: dict[tuple[str, str, str], list[Request]] = {}
    # By name and writer: how many requests, from the first on, have the writer's view already.
    seen: dict[tuple[tuple[str, str, str], WriterKey], int] = {}
    for index, source in enumerate(sources):
        name = (source.writer.engine_id, source.request_id, source.occurrence)
        same = by_name.setdefault(name, [])
        first = seen.get((name, source.writer), 0)
        while first < len(same) and source.writer in same[first].writers:
            first += 1
        seen[name, source.writer] = first
        digests = dict(source.digests.tolist())
        home = next((r for r in same[first:] if _may_hold(r, source, digests)), None)
        if home is None:
            home = Request(len(requests) + 1)
            requests.append(home)
            same.append(home)
        home.members.append((index, source))
        home.writers.add(source.writer)
        home.digests = dict(sorted((home.digests | digests).items()))
    return requests


def _may_hold(request: Request, source: Source, digests: Digests) -> bool:
    """Whether a source can be another shard's view of a request, with the same tokens."""
    return source.writer not in request.writers and all(
        request.digests.get(p, value) == value for p, value in digests.items()
    )


def _spread(requests: list[Request]) -> None:
    """Where requests agree, what one knows of the tokens before, all do.

    A digest stands for all tokens before its position, so those of one sequence follow each other:
    for each prefix the next shorter one that anybody knows is found, the longest first.
    """
    shorter: dict[Prefix, set[Prefix]] = {}
    for request in requests:
        prefixes = list(request.digests.items())
        shorter.setdefault(prefixes[0], set())
        for one, longer in pairwise(prefixes):
            shorter.setdefault(longer, set()).add(one)
    before: dict[Prefix, Prefix] = {}
    for prefix in sorted(shorter, reverse=True):
        known = sorted(shorter[prefix], reverse=True)
        before.update((prefix, one) for one in known[:1])
        for longer, one in pairwise(known):
            if one[0] < longer[0]:
                shorter[longer].add(one)
    for request in requests:
        *_, prefix = request.digests.items()
        chain = [prefix]
        while prefix in before:
            prefix = before[prefix]
            chain.append(prefix)
        request.digests = dict(reversed(chain))
