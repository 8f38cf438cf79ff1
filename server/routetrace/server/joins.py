"""Which engine requests of one trace belong together.

A trace id is used again and again: by the shards of an engine, by the prefill and the decode engine
of a disaggregated pair, by retries, by continued rollouts, by the turns of a session. Rows of
different requests make up one token sequence only where digests prove that the tokens before them
are the same. All of this is worked out from what the sources reported, whatever the order in which
their agents were heard; nothing is ever merged, so that a proof that comes late changes nothing
that it does not have to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import TYPE_CHECKING, NamedTuple

from routetrace.server.spans import FOREVER
from routetrace.v1.records import FinishReason

if TYPE_CHECKING:
    from routetrace.server.trace_index import Source

Digests = dict[int, int]
"""Position -> digest of the tokens before it."""


@dataclass(slots=True, eq=False)
class Request:
    """One engine request, as all shards of its engine report it."""

    number: int
    """From 1, in order of arrival."""
    members: list[tuple[int, Source]] = field(default_factory=list)
    """Its sources, with their index in the trace."""
    digests: Digests = field(default_factory=dict)
    """Also those that follow from other requests with the same tokens."""

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


class Part(NamedTuple):
    """What a request gives to an incarnation: its rows of positions before `stop`."""

    request: Request
    stop: int


@dataclass(slots=True, eq=False)
class Incarnation:
    """The token sequence that ends with one request."""

    request: Request
    continued: list[Part] = field(default_factory=list)
    """Requests that it goes on from, in the order in which their tokens were sampled."""
    alike: list[Part] = field(default_factory=list)
    """Other requests that were given the same tokens: their rows fill holes."""
    successor: Request | None = None
    """A request that all of it is a part of."""

    @property
    def as_sampled(self) -> list[Part]:
        """Whose row is served: of the first that has it."""
        return [*self.continued, Part(self.request, FOREVER), *self.alike]

    @property
    def latest(self) -> list[Part]:
        """The same for the latest rows."""
        return [Part(self.request, FOREVER), *reversed(self.continued), *self.alike]

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


class Join(NamedTuple):
    """The incarnations of a trace."""

    all: list[Incarnation]
    """Of every request, by its number - 1."""

    @property
    def standing(self) -> list[Incarnation]:
        """Those that no other one goes on from."""
        return [i for i in self.all if i.successor is None]


def join(sources: Sequence[Source]) -> Join:
    """Works out the incarnations of a trace from its sources, in order of arrival."""
    requests = _requests(sources)
    incarnations = [Incarnation(r) for r in requests]
    if len(requests) > 1:
        _close(requests)
        for whole in incarnations:
            _find_parts(whole, incarnations)
    return Join(incarnations)


def _requests(sources: Sequence[Source]) -> list[Request]:
    """Sources of the same engine request, together."""
    requests: list[Request] = []
    by_name: dict[tuple[str, str, str], list[Request]] = {}
    for index, source in enumerate(sources):
        same = by_name.setdefault(
            (source.writer.engine_id, source.request_id, source.occurrence), []
        )
        digests = dict(source.digests.tolist())
        home = next((r for r in same if _may_hold(r, source, digests)), None)
        if home is None:
            home = Request(len(requests) + 1)
            requests.append(home)
            same.append(home)
        home.members.append((index, source))
        home.digests |= digests
    return requests


def _may_hold(request: Request, source: Source, digests: Digests) -> bool:
    """Whether a source can be another shard's view of a request, with the same tokens."""
    return all(other.writer != source.writer for other in request.sources) and all(
        request.digests.get(p, value) == value for p, value in digests.items()
    )


def _close(requests: list[Request]) -> None:
    """Spreads digests: where two requests agree, what one knows of the tokens before, both do."""
    changed = True
    while changed:
        changed = False
        for a, b in combinations(requests, 2):
            proven = _agreed(a, b, FOREVER)
            for one, other in ((a, b), (b, a)):
                news = {
                    p: value
                    for p, value in one.digests.items()
                    if p <= proven and p not in other.digests
                }
                other.digests |= news
                changed = changed or bool(news)


def _agreed(a: Request, b: Request, limit: int) -> int:
    """The last position up to `limit` before which both have the same tokens for certain."""
    if len(b.digests) < len(a.digests):
        a, b = b, a
    return max((p for p, v in a.digests.items() if p <= limit and b.digests.get(p) == v), default=0)


def _find_parts(whole: Incarnation, incarnations: list[Incarnation]) -> None:
    """Finds what other requests contribute to an incarnation, and which of them it goes on from."""
    request = whole.request
    for other in incarnations:
        part = other.request
        if part is request:
            continue
        # Not beyond the prompt: what this request sampled itself has no rows but its own.
        proven = _agreed(part, request, request.prompt_len)
        if not proven:
            continue
        stop = min(proven, part.num_rows)
        goes_on = proven > part.prompt_len > 0
        takes_over = part.handed_over and proven >= part.num_rows
        if _order(part) < _order(request) and (goes_on or takes_over):
            whole.continued.append(Part(part, stop))
            if takes_over or 0 < part.num_tokens <= proven:
                other.successor = request
        else:
            whole.alike.append(Part(part, stop))
    # Of several that handed over the same prompt, the last one's KV was used.
    whole.continued.sort(key=lambda p: (p.request.prompt_len, -p.request.number))


def _order(request: Request) -> tuple[int, bool]:
    """Only what comes later in this order can go on from a request."""
    return request.prompt_len, not request.handed_over
