"""Search for the incarnation of a trace that token ids prove. No I/O."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from routetrace.client._core.assemble import Want
from routetrace.client._core.config import Config
from routetrace.client._core.reads import called, converted, value_of
from routetrace.client._core.steps import Emit, Part, Plan, Sleep
from routetrace.client.alignment import Compared, Proof, compare_tokens
from routetrace.client.stat import FinishReason, TraceFacts, TraceStat, TraceState, facts_from_proto
from routetrace.client.trace import Trace
from routetrace.common.errors import (
    DeadlineExceeded,
    Incomplete,
    InvalidArgument,
    NotFound,
    Overloaded,
    RouteTraceError,
    Unavailable,
    counted,
)
from routetrace.v1 import routetrace_pb2 as pb

#: Seconds that a read waits for the incarnation that the server chooses before others are looked
#: at; then twice as long, and so on.
_FIRST_WAIT = 2.0
#: Seconds between two looks, which double up to the second number.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0
#: Proofs that say enough where no other incarnation can have the tokens.
_ALONE = (Proof.PROMPT, Proof.BEGINS)
#: Incarnations that an error describes.
_MOST_NAMED = 4


class Seen(NamedTuple):
    """An incarnation that was compared with the tokens."""

    number: int
    proof: Proof
    compared: Compared
    num_tokens: int | None
    has_digests: bool
    running: bool
    answers: bool
    """Whether it is complete, and was not aborted."""
    may_have_sampled: bool
    """Whether its prompt is shorter than the tokens, as far as is known."""

    @property
    def words(self) -> str:
        """Why the tokens do not prove it."""
        _, agreed, differs = self.compared
        name = f"incarnation {self.number}"
        if self.proof is Proof.DIFFERS:
            return f"{name} agrees before position {agreed} and differs before {differs}"
        if self.proof is Proof.SHORT:
            return f"{name} has {counted(self.num_tokens or 0, 'token')}"
        if self.proof is Proof.PROMPT:
            return f"{name} has them in its prompt, and another one may have sampled them"
        if self.running:
            return f"{name} agrees before position {agreed}, and has not ended"
        if self.has_digests:
            return f"{name} agrees before position {agreed}, and has no digest behind it"
        return f"{name} has no token digests"


class Search:
    """Incarnations of a trace, compared with tokens.

    Args:
        config: configuration of the client.
        trace_id: the trace.
        token_ids: [n] from position 0 on, prompt and output; not empty.
    """

    def __init__(
        self, config: Config, trace_id: str, token_ids: npt.NDArray[np.integer[Any]]
    ) -> None:
        self._config = config
        self._trace_id = trace_id
        self._token_ids = token_ids
        self._seen: dict[int, Seen] = {}
        self._count = 0

    def see(self, facts: TraceFacts) -> Proof:
        """Compare an incarnation with the tokens."""
        compared = compare_tokens(self._token_ids, facts)
        proof = Proof.of(compared, len(self._token_ids), facts)
        complete = facts.state is TraceState.COMPLETE
        self._count = facts.num_incarnations
        self._seen[facts.incarnation] = Seen(
            facts.incarnation,
            proof,
            compared,
            facts.num_tokens,
            len(facts.token_digests) > 0,
            facts.state is TraceState.RUNNING,
            complete and facts.finish_reason is not FinishReason.ABORT,
            facts.prompt_len is None or facts.prompt_len < len(self._token_ids),
        )
        return proof

    def having(self, *proofs: Proof) -> list[Seen]:
        """Return the incarnations that are proven so far, newest first."""
        return [self._seen[n] for n in sorted(self._seen)[::-1] if self._seen[n].proof in proofs]

    def look(self, least: int = 1) -> Part[int | None]:
        """Look at all incarnations; return the number of the one that the tokens prove, or None.

        Args:
            least: number of incarnations below which none is looked at.
        """
        try:
            described = yield from self._called(pb.DescribeTraceRequest(omit_origins=True))
            numbers = {one.number for one in described.incarnations}
            self._seen = {n: seen for n, seen in self._seen.items() if n in numbers}
            for number in sorted(numbers) if len(numbers) >= least else ():
                seen = self._seen.get(number)
                if seen and seen.proof is Proof.DIFFERS:
                    continue  # which is so for good
                answer = yield from self._called(pb.StatTraceRequest(incarnation=number))
                self.see(converted(lambda a: TraceStat(**facts_from_proto(a.info)), answer))
        except NotFound:  # it was deleted, or has not begun
            return None
        # Where only the beginning is proven, another one may have the same beginning.
        possible = self.having(Proof.BEGINS, Proof.NONE)
        whole = self.having(Proof.WHOLE)
        # Nor did a request sample its own prompt where another one may have.
        if not any(seen.may_have_sampled for seen in (*whole, *possible)):
            whole = self.having(Proof.WHOLE, Proof.PROMPT)
        for chosen in [seen for seen in whole if seen.answers] or whole:
            return chosen.number
        if len(possible) == 1 and possible[0].proof is Proof.BEGINS:
            return possible[0].number
        return None

    def _called(self, request: Any) -> Part[Any]:
        request.run, request.trace_id = self._config.run, self._trace_id
        method = type(request).__name__.removesuffix("Request")
        return (yield from called(method, request, self._config.timeout))

    def refusal(self, field: str = "token_ids", *, waited: bool = True) -> InvalidArgument:
        """Return the error where the tokens prove no incarnation.

        Args:
            field: the argument.
            waited: whether the read waited for a request that may not have begun.
        """
        every = self.having(*Proof)
        parts = [seen.words for seen in every[:_MOST_NAMED]]
        if len(every) > _MOST_NAMED:
            parts.append(f"{len(every) - _MOST_NAMED} more")
        late = "" if waited else ', or wait_for="end" where its request may not have arrived'
        return InvalidArgument(
            field=field,
            value=counted(len(self._token_ids), "token"),
            expected=f"all tokens, prompt and output, of trace {self._trace_id!r}, which has "
            f"{counted(self._count, 'incarnation')}: {'; '.join(parts)}",
            remedy=f"use the nonce of the answer's handle, or incarnation={late}",
        )


def read_proven(
    search: Search,
    want: Want,
    read: Callable[[Want, float, bool], Plan[Trace]],
    wait: float | None,
) -> Plan[Trace]:
    """Read the incarnation of a trace that tokens prove.

    Args:
        search: its incarnations.
        want: the read; with an incarnation or nonce, no other one is read.
        read: returns the plan of a read: of a `Want`, with the seconds that it may wait, and
            whether that is the last wait.
        wait: seconds to wait for the incarnation; None: not at all.

    Raises:
        InvalidArgument: if the tokens prove none.
    """
    if want.incarnation or want.nonce:
        trace = yield from value_of(read(want, wait or 0.0, True))
        if search.see(trace) in (Proof.DIFFERS, Proof.SHORT):
            raise search.refusal()
        yield Emit(trace)
        return
    until = time.monotonic() + (wait or 0.0)
    number: int | None = None
    failure: RouteTraceError | None = None
    part, last = _FIRST_WAIT, False
    while number is None and not last:
        left = max(0.0, until - time.monotonic())
        last = left <= part
        try:
            trace = yield from value_of(read(want, min(left, part), last))
        except (Unavailable, Overloaded):
            if last:
                raise
        except (DeadlineExceeded, Incomplete, InvalidArgument) as error:
            failure, last = error, last or not isinstance(error, DeadlineExceeded)
            number = yield from search.look()
        else:
            proof = search.see(trace)
            if proof is Proof.WHOLE or (proof in _ALONE and trace.num_incarnations == 1):
                yield Emit(trace)
                return
            failure, last = None, True
            del trace  # not kept during the wait
            number = yield from search.look()
        part *= 2
    refusal = partial(search.refusal, waited=wait is not None)
    pause = _FIRST_PAUSE
    while number is None:
        left = until - time.monotonic()
        possible = search.having(Proof.BEGINS, Proof.NONE)
        if failure and (possible or (left <= 0 and not search.having(Proof.DIFFERS))):
            raise failure
        if left <= 0 or any(seen.num_tokens and not seen.has_digests for seen in possible):
            raise refusal()
        yield Sleep(min(pause, left), RouteTraceError(), left)
        pause = min(2 * pause, _LONGEST_PAUSE)
        number = yield from search.look()
    left = max(0.0, until - time.monotonic())
    trace = yield from value_of(read(replace(want, incarnation=number), left, True))
    if search.see(trace) not in (*_ALONE, Proof.WHOLE):  # the id was deleted and used again
        raise refusal()
    yield Emit(trace)
