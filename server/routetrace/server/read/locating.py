"""Search for the engine requests whose rows sequences of tokens take (docs/rows.md, section 9).

Agents and clients report digests of tokens; no token ids come here.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from routetrace.codec.records import (
    DIGEST,
    DIGEST_EVERY,
    LOCATED,
    U32,
    UNKNOWN_VERSION,
    FinishReason,
    Outcome,
    unpack,
)
from routetrace.common.errors import InvalidArgument
from routetrace.common.limits import check_labels
from routetrace.server.common.slices import Turns
from routetrace.server.index.traces.lineage import Request
from routetrace.server.index.traces.sources import Source
from routetrace.server.index.traces.trace import Trace
from routetrace.server.index.traces.trace_index import TraceIndex
from routetrace.server.read.checks import at_most
from routetrace.v1 import routetrace_pb2 as pb

#: Maximum sequences of a call.
MAX_SEQUENCES = 4096

#: Maximum traces that are looked at for one digest, the newest ones.
MAX_HOLDERS = 256

#: Keys of digests that a response names.
MAX_KEYS = 16

_MAX_WEIGHT_VERSIONS = 1024

#: Sequences whose digests are looked up at a time.
_LOOKED_UP = 16

Digests = npt.NDArray[Any]
"""[n] of DIGEST, ascending."""


class Held(NamedTuple):
    """Traces that may have requests with some digests."""

    traces: list[list[Trace]]
    """Of each digest, at most MAX_HOLDERS."""
    more: list[bool]
    """Of each digest, whether there are more."""
    keys: list[str]
    """The newest keys of the digests of the run."""


Holders = Callable[[str, npt.NDArray[np.uint64]], Awaitable[Held]]
"""Returns the traces of a run that may have requests with some digests."""


class _Sequence(NamedTuple):
    """Tokens that are looked for."""

    number: int
    num_tokens: int
    digests: Digests
    labels: Mapping[str, str]
    versions: frozenset[int]
    choice: int
    """Which of several equal requests is meant, from 1; 0: none."""
    end: int
    """Digest of all tokens."""


class _Told(NamedTuple):
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


class _Candidate(NamedTuple):
    told: _Told
    proven: int


class Search:
    """Search for the requests of the sequences of one call.

    Args:
        request: the call.
        holders: returns the traces that may have requests with some digests.
        turns: slices of the caller.

    Raises:
        InvalidArgument: if the columns of the call contradict each other.
    """

    def __init__(self, request: pb.LocateSequencesRequest, holders: Holders, turns: Turns) -> None:
        self._run = request.run
        self._holders = holders
        self._turns = turns
        self._wraps = request.choices_wrap
        self._sequences = _sequences(request)
        self._wanted: dict[tuple[int, int], None] = {}
        self._doubtful: set[int] = set()

    async def response(self) -> pb.LocateSequencesResponse:
        """Return the response."""
        candidates, keys = await self._whole()
        # Of a request that goes on behind a multiple, the index has only the first one.
        left = [
            i
            for i, sequence in enumerate(self._sequences)
            if not candidates[i] or sequence.num_tokens % DIGEST_EVERY == 0
        ]
        for at in range(0, len(left), _LOOKED_UP):
            some = left[at : at + _LOOKED_UP]
            for i, found in zip(some, await self._all(some), strict=True):
                candidates[i] = _equal(found)
            await self._exclude(some, candidates)
        traces: dict[str, int] = {}
        located: list[tuple[int, ...]] = []
        async for sequence, found in self._turns.over(
            zip(self._sequences, candidates, strict=True)
        ):
            outcome, chosen = self._chosen(sequence, found)
            where = 0, 0, 0
            if chosen is not None:
                told = chosen.told
                trace = traces.setdefault(told.trace.key[1], len(traces))
                where = trace, told.number, told.num_tokens
            equal = (found[0].proven, len(found)) if outcome != Outcome.NOT_FOUND else (0, 0)
            located.append((outcome, *where, *equal))
        return pb.LocateSequencesResponse(
            trace_ids=traces,
            located=np.array(located, LOCATED).tobytes(),
            digest_keys=keys,
            wanted=np.array([*self._wanted], U32).tobytes(),
        )

    async def _whole(self) -> tuple[list[list[_Candidate]], list[str]]:
        """Return the requests that have all tokens of each sequence, found by its end, and keys."""
        ends = np.array([s.end for s in self._sequences], np.uint64)
        held = await self._holders(self._run, ends)
        every: list[list[_Candidate]] = []
        async for sequence, traces in self._turns.over(
            zip(self._sequences, held.traces, strict=True)
        ):
            found = []
            for trace in traces:
                for told in _told(await self._joined(trace)):
                    if _ends_equally(sequence, told) or _compared(sequence, told.digests)[0] == (
                        sequence.num_tokens
                    ):
                        found += _candidate(sequence, told, sequence.num_tokens)
            every.append(_equal(found) if len(found) > 1 else found)
        return every, held.keys

    async def _all(self, numbers: Sequence[int]) -> list[list[_Candidate]]:
        """Return all requests that have the beginning of each of some sequences, or more."""
        some = [self._sequences[i] for i in numbers]
        held = await self._holders(
            self._run, np.concatenate([sequence.digests["value"] for sequence in some])
        )
        every: list[list[_Candidate]] = []
        at = 0
        async for i, sequence in self._turns.over(zip(numbers, some, strict=True)):
            size = len(sequence.digests)
            traces = {id(t): t for each in held.traces[at : at + size] for t in each}
            at += size
            found: list[_Candidate] = []
            for trace in traces.values():
                for told in _told(await self._joined(trace)):
                    proven, differs = _compared(sequence, told.digests)
                    if differs or proven <= told.prompt_len:
                        continue
                    found += _candidate(sequence, told, proven)
                    if told.prompt_len > 0 and proven < told.num_tokens < sequence.num_tokens:
                        self._wanted[i, told.num_tokens] = None
            every.append(found)
        return every

    async def _joined(self, trace: Trace) -> Trace:
        if not trace.is_joined:
            async for _ in self._turns.over(trace.join_in_steps()):
                pass
        return trace

    async def _exclude(
        self, numbers: Sequence[int], candidates: Sequence[Sequence[_Candidate]]
    ) -> None:
        """Find sequences that may be those of other requests with the prompt of a candidate."""
        partly: list[tuple[int, tuple[int, int]]] = []
        for i in numbers:
            for each in candidates[i]:
                if each.proven < self._sequences[i].num_tokens:
                    if not each.told.prompt:  # any request may have it
                        self._doubtful.add(i)
                    partly += [(i, prompt) for prompt in each.told.prompt]
        values = np.array([value for _, (_, value) in partly], np.uint64)
        held = await self._holders(self._run, values)
        async for (i, prompt), traces, more in self._turns.over(
            zip(partly, held.traces, held.more, strict=True)
        ):
            sequence = self._sequences[i]
            known = {candidate.told.name for candidate in candidates[i]}
            if more:
                self._doubtful.add(i)
            for trace in traces if i not in self._doubtful else ():
                for other in _told(await self._joined(trace)):
                    if (
                        not 0 < other.num_tokens < sequence.num_tokens
                        and other.name not in known
                        and prompt in other.prompt
                        and _has_labels(other, sequence)
                        and not _compared(sequence, other.digests)[1]
                    ):
                        self._doubtful.add(i)

    def _chosen(
        self, sequence: _Sequence, equal: Sequence[_Candidate]
    ) -> tuple[Outcome, _Candidate | None]:
        """Return which of the equal candidates is meant."""
        if not equal:
            return Outcome.NOT_FOUND, None
        if sequence.number in self._doubtful:
            return Outcome.AMBIGUOUS, None
        if len(equal) == 1 or _is_one_pass(c.told for c in equal):
            return Outcome.FOUND, equal[0]
        if not sequence.choice:
            return Outcome.AMBIGUOUS, None
        index = sequence.choice - 1
        if index >= len(equal) and not self._wraps:
            return Outcome.NOT_FOUND, None
        return Outcome.FOUND, equal[index % len(equal)]


def _equal(candidates: Sequence[_Candidate]) -> list[_Candidate]:
    """Return the candidates with the most proven tokens, in the order in which they count."""
    proven = max((c.proven for c in candidates), default=0)
    return sorted((c for c in candidates if c.proven == proven), key=lambda c: c.told.name)


def held_here(index: TraceIndex, run: str, digests: npt.NDArray[np.uint64]) -> Held:
    """Return the traces of a worker that may have requests with some digests."""
    which, serials = index.tokens.holders(run, digests)
    # Of each digest, the newest traces, and some more: an entry may be there twice, or obsolete.
    ends = np.searchsorted(which, which, "right")
    newest = ends - np.arange(len(which)) <= 4 * MAX_HOLDERS
    traces: list[list[Trace]] = [[] for _ in digests]
    for i, serial in zip(which[newest].tolist(), serials[newest].tolist(), strict=True):
        trace = index.by_serial.get(serial)
        if trace and trace.key[0] == run and trace not in traces[i][-1:]:
            traces[i].append(trace)
    more = [len(each) > MAX_HOLDERS for each in traces]
    keys = index.tokens.keys(run, MAX_KEYS)
    return Held([each[-MAX_HOLDERS:] for each in traces], more, keys)


def _sequences(request: pb.LocateSequencesRequest) -> list[_Sequence]:
    """Check the columns of a call; return its sequences."""
    lengths = unpack(request.num_tokens, U32, "num_tokens")
    counts = unpack(request.num_digests, U32, "num_digests")
    digests = unpack(request.token_digests, DIGEST, "token_digests")
    choices = unpack(request.choices, U32, "choices")
    size = len(lengths)
    at_most("num_tokens", size, MAX_SEQUENCES)
    at_most("weight_versions", len(request.weight_versions), _MAX_WEIGHT_VERSIONS)
    for name, column in (("num_digests", counts), ("choices", choices)):
        if len(column) != size and (name != "choices" or len(column)):
            raise InvalidArgument(
                field=name, value=f"{len(column)} numbers", expected=f"{size}, one a sequence"
            )
    if len(request.labels) not in (0, 1, size):
        raise InvalidArgument(
            field="labels", value=f"{len(request.labels)} sets", expected=f"0, 1 or {size}"
        )
    ends = np.cumsum(counts, dtype=np.int64)
    if (counts == 0).any() or (ends[-1] if size else 0) != len(digests):
        raise InvalidArgument(
            field="num_digests",
            value=f"{int(counts.sum(dtype=np.int64))} digests of {size} sequences",
            expected=f"{len(digests)}, at least one for each",
        )
    position = digests["position"].astype(np.int64)
    rises = np.diff(position, prepend=0) > 0
    rises[ends[:-1]] = position[ends[:-1]] > 0
    if size and not (rises.all() and (position[ends - 1] == lengths).all()):
        raise InvalidArgument(
            field="token_digests",
            value="positions that do not ascend to the end of their sequence",
            expected="ascending ones above 0, the last one at num_tokens",
        )
    sets = []
    for each in request.labels:
        check_labels("labels", each.labels)
        sets.append(dict(each.labels))
    versions = frozenset(request.weight_versions)
    parts = [digests[a:b] for a, b in pairwise([0, *ends.tolist()])]
    values = digests["value"][ends - 1].tolist()
    chosen = choices.tolist() or [0] * size
    return [
        _Sequence(
            i,
            length,
            parts[i],
            sets[i if len(sets) == size else 0] if sets else {},
            versions,
            chosen[i],
            values[i],
        )
        for i, length in enumerate(lengths.tolist())
    ]


def _told(trace: Trace) -> Iterator[_Told]:
    """Yield the requests of a trace."""
    if len(trace.sources) == 1:  # the usual case, which needs no join
        [source] = trace.sources
        yield _Told(
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
        yield _Told(
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


def _ends_equally(sequence: _Sequence, told: _Told) -> bool:
    """Whether a request ends with the last token of a sequence, and has all before it."""
    # The usual case: to compare all digests takes five times as long.
    return bool(told.digests[-1:].tolist() == [(sequence.num_tokens, sequence.end)])


def _candidate(sequence: _Sequence, told: _Told, proven: int) -> list[_Candidate]:
    """Return a request if it is a candidate for a sequence; no digest of it differs."""
    length, tokens = sequence.num_tokens, told.num_tokens
    is_cut = told.prompt_len > 0 and length <= tokens
    if told.handed_over or not tokens or proven <= told.prompt_len:
        return []
    if not (is_cut or proven in (length, tokens)) or not _has_labels(told, sequence):
        return []
    if sequence.versions and _newest_version(told) not in sequence.versions:
        return []
    return [_Candidate(told, proven)]


def _compared(sequence: _Sequence, digests: Digests) -> tuple[int, bool]:
    """Return how many tokens are proven to be a request's, and whether a digest differs."""
    if not len(digests):
        return 0, False
    known, asked = digests["position"], sequence.digests["position"]
    at = np.minimum(np.searchsorted(known, asked), len(known) - 1)
    both = known[at] == asked
    equal = digests["value"][at] == sequence.digests["value"]
    return int(asked[both & equal].max(initial=0)), bool((both & ~equal).any())


def _has_labels(told: _Told, sequence: _Sequence) -> bool:
    return all(told.labels.get(name) == text for name, text in sequence.labels.items())


def _newest_version(told: _Told) -> int | None:
    """Return the greatest known weight version of the rows of a request; None: there is none."""
    newest = max(
        (spans.weight_versions[-1] for s in told.sources for spans in s.attempts if len(spans)),
        default=UNKNOWN_VERSION,
    )
    return None if newest == UNKNOWN_VERSION else newest


def _is_one_pass(requests: Iterable[_Told]) -> bool:
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
