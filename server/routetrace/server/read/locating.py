"""Search for the engine requests whose rows sequences of tokens take (docs/rows.md, section 9).

Agents and clients report digests of tokens; no token ids come here.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from routetrace.codec.records import DIGEST_EVERY, LOCATED, U32, Outcome
from routetrace.server.common.slices import Turns
from routetrace.server.index.traces.trace import Trace
from routetrace.server.index.traces.trace_index import TraceIndex
from routetrace.server.read.candidates import (
    Candidate,
    candidate,
    compared,
    ends_equally,
    has_labels,
    is_one_pass,
    told_of,
)
from routetrace.server.read.sequences import TokenSequence, sequences_of
from routetrace.v1 import routetrace_pb2 as pb

#: Maximum traces that are looked at for one digest, the newest ones.
MAX_HOLDERS = 256

#: Keys of digests that a response names.
MAX_KEYS = 16

#: Sequences whose digests are looked up at a time.
_LOOKED_UP = 16


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
        self._forms = sequences_of(request)
        self._num_keys = request.num_keys or 1
        self._sequences = self._forms[: len(self._forms) // self._num_keys]
        self._wanted: dict[tuple[int, int], None] = {}
        self._doubtful: set[int] = set()

    async def response(self) -> pb.LocateSequencesResponse:
        """Return the response."""
        found, keys = await self._whole()
        equal = [_equal(each) for each in self._by_sequence(found)]
        # Of a request that goes on behind a multiple, the index has only the first one.
        left = [
            i
            for i, sequence in enumerate(self._sequences)
            if not equal[i] or sequence.num_tokens % DIGEST_EVERY == 0
        ]
        for at in range(0, len(left), _LOOKED_UP):
            some = left[at : at + _LOOKED_UP]
            found = await self._all([f for i in some for f in self._forms[i :: len(equal)]])
            for place, i in enumerate(some):
                under = found[place * self._num_keys : (place + 1) * self._num_keys]
                equal[i] = _equal([one for each in under for one in each])
            await self._exclude([equal[i] for i in some])
        traces: dict[str, int] = {}
        located: list[tuple[int, ...]] = []
        async for sequence, each in self._turns.over(zip(self._sequences, equal, strict=True)):
            outcome, chosen = self._chosen(sequence, each)
            where = 0, 0, 0
            if chosen is not None:
                told = chosen.told
                trace = traces.setdefault(told.trace.key[1], len(traces))
                where = trace, told.number, told.num_tokens
            proven = (each[0].proven, len(each)) if outcome != Outcome.NOT_FOUND else (0, 0)
            located.append((outcome, *where, *proven))
        return pb.LocateSequencesResponse(
            trace_ids=traces,
            located=np.array(located, LOCATED).tobytes(),
            digest_keys=keys,
            wanted=np.array([*self._wanted], U32).tobytes(),
        )

    def _by_sequence(self, found: Sequence[list[Candidate]]) -> Iterable[list[Candidate]]:
        """Return the candidates for each sequence, under all keys."""
        if self._num_keys == 1:
            return found
        count = len(self._sequences)
        return ([one for each in found[i::count] for one in each] for i in range(count))

    async def _whole(self) -> tuple[list[list[Candidate]], list[str]]:
        """Return the requests that have all tokens of each sequence, found by its end, and keys."""
        ends = np.array([form.end for form in self._forms], np.uint64)
        held = await self._holders(self._run, ends)
        every: list[list[Candidate]] = []
        async for form, traces in self._turns.over(zip(self._forms, held.traces, strict=True)):
            found = []
            for trace in traces:
                for told in told_of(await self._joined(trace)):
                    if ends_equally(form, told) or compared(form, told.digests)[0] == (
                        form.num_tokens
                    ):
                        found += candidate(form, told, form.num_tokens)
            every.append(found)
        return every, held.keys

    async def _all(self, forms: Sequence[TokenSequence]) -> list[list[Candidate]]:
        """Return all requests that have the beginning of each of some sequences, or more."""
        held = await self._holders(
            self._run, np.concatenate([form.digests["value"] for form in forms])
        )
        every: list[list[Candidate]] = []
        at = 0
        async for form in self._turns.over(forms):
            size = len(form.digests)
            traces = {id(t): t for each in held.traces[at : at + size] for t in each}
            at += size
            found: list[Candidate] = []
            for trace in traces.values():
                for told in told_of(await self._joined(trace)):
                    proven, differs = compared(form, told.digests)
                    if differs or proven <= told.prompt_len:
                        continue
                    found += candidate(form, told, proven)
                    if proven < told.num_tokens < form.num_tokens:
                        self._wanted[form.number, told.num_tokens] = None
            every.append(found)
        return every

    async def _joined(self, trace: Trace) -> Trace:
        if not trace.is_joined:
            async for _ in self._turns.over(trace.join_in_steps()):
                pass
        return trace

    async def _exclude(self, equals: Iterable[Sequence[Candidate]]) -> None:
        """Find sequences that may be those of other requests with the prompt of a candidate."""
        partly: list[tuple[TokenSequence, set[tuple[float, str, int]], tuple[int, int]]] = []
        for equal in equals:
            names = {each.told.name for each in equal}
            for form, told, proven in equal:
                if proven < form.num_tokens:
                    if not told.prompt:  # any request may have it
                        self._doubtful.add(form.number)
                    partly += [(form, names, prompt) for prompt in told.prompt]
        values = np.array([value for _, _, (_, value) in partly], np.uint64)
        held = await self._holders(self._run, values)
        async for (form, names, prompt), traces, more in self._turns.over(
            zip(partly, held.traces, held.more, strict=True)
        ):
            if more:
                self._doubtful.add(form.number)
            for trace in traces if form.number not in self._doubtful else ():
                for other in told_of(await self._joined(trace)):
                    if (
                        not 0 < other.num_tokens < form.num_tokens
                        and other.name not in names
                        and prompt in other.prompt
                        and has_labels(other, form)
                        and not compared(form, other.digests)[1]
                    ):
                        self._doubtful.add(form.number)

    def _chosen(
        self, sequence: TokenSequence, equal: Sequence[Candidate]
    ) -> tuple[Outcome, Candidate | None]:
        """Return which of the equal candidates is meant."""
        if not equal:
            return Outcome.NOT_FOUND, None
        if sequence.number in self._doubtful:
            return Outcome.AMBIGUOUS, None
        if len(equal) == 1 or is_one_pass(c.told for c in equal):
            return Outcome.FOUND, equal[0]
        if not sequence.choice:
            return Outcome.AMBIGUOUS, None
        index = sequence.choice - 1
        if self._wraps:  # older ones may be of older weights
            return Outcome.FOUND, equal[-1 - index % len(equal)]
        if index >= len(equal):
            return Outcome.NOT_FOUND, None
        return Outcome.FOUND, equal[index]


def _equal(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return the candidates with the most proven tokens, in the order in which they count."""
    if len(candidates) < 2:
        return [*candidates]
    proven = max(c.proven for c in candidates)
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
