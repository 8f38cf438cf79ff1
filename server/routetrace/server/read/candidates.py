"""Requests that may be those of a sequence of tokens (docs/rows.md, section 9)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from routetrace.codec.records import DIGEST, UNKNOWN_VERSION, FinishReason
from routetrace.server.index.traces.lineage import Request
from routetrace.server.index.traces.sources import Source
from routetrace.server.index.traces.trace import Trace
from routetrace.server.read.sequences import Digests, TokenSequence


class Told(NamedTuple):
    """What a trace says of one of its requests."""

    trace: Trace
    number: int
    prompt_len: int
    num_tokens: int
    """0: not known."""
    handed_over: bool
    labels: Mapping[str, str]
    digests: Digests
    sources: Sequence[Source]
    request: Request | None
    """None: it is the only one of the trace."""

    @property
    def name(self) -> tuple[float, str, int]:
        """Name of the request, in the order in which equal ones are counted."""
        return self.trace.created, self.trace.key[1], self.number

    @property
    def prompt(self) -> list[tuple[int, int]]:
        """(position, digest) of its prompt; none if one of them is not known."""
        prompt: list[tuple[int, int]] = self.digests[
            self.digests["position"] == self.prompt_len
        ].tolist()
        return prompt


class Candidate(NamedTuple):
    """A request that may be the one of a sequence."""

    sequence: TokenSequence
    told: Told
    proven: int
    """Tokens of the sequence that are proven to be the request's."""


def told_of(trace: Trace) -> Iterator[Told]:
    """Yield the requests of a trace."""
    if len(trace.sources) == 1:  # the usual case, which needs no join
        [source] = trace.sources
        yield Told(
            trace,
            trace.num_dropped + 1,
            source.prompt_len,
            source.num_tokens if source.ended else 0,
            source.finish_reason == FinishReason.HANDOFF,
            source.labels,
            source.digests,
            trace.sources,
            None,
        )
        return
    for request in trace.join.requests:
        yield Told(
            trace,
            request.number,
            request.prompt_len,
            request.num_tokens,
            request.handed_over,
            request.labels,
            np.array([*request.digests.items()], DIGEST),
            request.sources,
            request,
        )


def ends_equally(sequence: TokenSequence, told: Told) -> bool:
    """Whether a request ends with the last token of a sequence, and has all before it."""
    # The usual case: to compare all digests takes five times as long.
    return bool(told.digests[-1:].tolist() == [(sequence.num_tokens, sequence.end)])


def candidate(sequence: TokenSequence, told: Told, proven: int) -> list[Candidate]:
    """Return a request if it is a candidate for a sequence; no digest of it differs."""
    length, tokens = sequence.num_tokens, told.num_tokens
    is_cut = told.prompt_len > 0 and length <= tokens
    if told.handed_over or not tokens or proven <= told.prompt_len:
        return []
    if not (is_cut or proven in (length, tokens)) or not has_labels(told, sequence):
        return []
    if sequence.versions and _newest_version(told) not in sequence.versions:
        return []
    return [Candidate(sequence, told, proven)]


def compared(sequence: TokenSequence, digests: Digests) -> tuple[int, bool]:
    """Return how many tokens are proven to be a request's, and whether a digest differs."""
    if not len(digests):
        return 0, False
    known, asked = digests["position"], sequence.digests["position"]
    at = np.minimum(np.searchsorted(known, asked), len(known) - 1)
    both = known[at] == asked
    equal = digests["value"][at] == sequence.digests["value"]
    return int(asked[both & equal].max(initial=0)), bool((both & ~equal).any())


def has_labels(told: Told, sequence: TokenSequence) -> bool:
    """Whether a request has the labels that are given for a sequence."""
    return all(told.labels.get(name) == text for name, text in sequence.labels.items())


def _newest_version(told: Told) -> int | None:
    """Return the greatest known weight version of the rows of a request; None: there is none."""
    newest = max(
        (spans.weight_versions[-1] for s in told.sources for spans in s.attempts if len(spans)),
        default=UNKNOWN_VERSION,
    )
    return None if newest == UNKNOWN_VERSION else newest


def is_one_pass(requests: Iterable[Told]) -> bool:
    """Whether the rows of all requests are those of the same passes."""
    passes = set()
    for told in requests:
        continues = told.request and told.trace.join.continued(told.request).equals
        if continues or any(s.external or len(s.attempts) > 1 for s in told.sources):
            return False
        rows = [(s.layout.layer_ids, s.attempts[0].tobytes()) for s in told.sources]
        if not all(spans for _, spans in rows):
            return False
        passes.add(tuple(sorted(rows)))
    return len(passes) == 1
