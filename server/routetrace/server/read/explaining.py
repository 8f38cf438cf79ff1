"""Reasons for one cell: who owns its position, where its row comes from, and what was refused.

The join and the view decide (docs/rows.md, section 5). This module asks them, and puts their
answers into words.
"""

# Over 400 lines: most of them are the words for each rule of that page.

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from routetrace.codec.records import UNKNOWN_VERSION, Provenance
from routetrace.common.errors import InvalidArgument
from routetrace.server.common.slices import Turns
from routetrace.server.index.traces.joins import Continued
from routetrace.server.index.traces.lineage import Owned, Request, parts_of
from routetrace.server.index.traces.spans import FOREVER, Interval, Span
from routetrace.server.rows.reader import Reader
from routetrace.server.rows.served import Known, segments_of
from routetrace.server.rows.view import Segment, Selection
from routetrace.v1 import routetrace_pb2 as pb

#: Maximum members of the chain, and refused candidates, of an answer.
MAX_SHOWN = 64

#: Maximum requests of the trace that are looked at, newest first.
_MAX_LOOKED_AT = 1024

#: Maximum numbers of requests in a sentence.
_MAX_NAMED = 8

_STAND_IN = (
    'read with prefix_rows "unique" or "any": rows of another request stand in, which has the same '
    "tokens and weights, but need not be of the same pass"
)
#: What rows need to stand in for KV of no known weight version.
_NO_VERSION = (
    "have rows of other requests stand in, for which the weight version of the KV must be known at "
    "the begin: tell the agent the version and each reset_prefix_cache, and of KV from elsewhere "
    "reset_external_kv, or declare external_kv_emptied"
)

#: What each MissingReason rests on, and what helps; those that depend on the cell are in
#: `_Cell.add_missing`.
_REASONS = {
    pb.MISSING_REASON_NOT_YET: (
        "the request runs, and no agent has reported the position yet",
        'read with wait_for "end", which waits until the request has ended',
    ),
    pb.MISSING_REASON_NOT_CAPTURED: (
        "no agent reported a row: the pass was skipped, or never reported",
        "look for warnings of the agent in the log of the engine",
    ),
    pb.MISSING_REASON_QUEUE_FULL: (
        "the agent did not record the request, as its queue was full",
        "give the agent more queue_bytes, or a spill_dir",
    ),
    pb.MISSING_REASON_INVALID_IDS: (
        "the agent dropped the row: its ids are out of range, repeated, or were never written",
        "check num_experts of the agent's layout",
    ),
    pb.MISSING_REASON_AGENT_LOST: (
        "the agent was lost during the request",
        "look in the engine's log for why its process ended; the row does not come back",
    ),
    pb.MISSING_REASON_AGENT_CLOSED: (
        "the agent was closed, and finish() was never called for the request",
        "call finish() for each request before close(); with vLLM or SGLang, end or abort the "
        "requests before the engine is shut down",
    ),
    pb.MISSING_REASON_REJECTED: (
        "the server refused the chunk that held the row",
        "look for the cause in the logs of agent and server",
    ),
    pb.MISSING_REASON_CORRUPT: (
        "the stored bytes are lost, or do not match their checksum",
        "check the disk of the server",
    ),
    pb.MISSING_REASON_ABORTED: (
        "the request was aborted before it computed the position",
        "drop the sample, or mask its missing rows",
    ),
}


def cell_of(reader: Reader, known: Known, request: pb.ExplainCellRequest) -> Selection:
    """Return the selection of the requested cell.

    Raises:
        InvalidArgument: if the trace has no such position, or the model no such MoE layer.
    """
    layers, position = known.layout.layer_ids, request.position
    layer = request.layer_id if request.HasField("layer_id") else layers[0]
    if layer not in layers:
        raise InvalidArgument(
            field="layer_id",
            value=layer,
            expected=f"one of the {len(layers)} MoE layers {layers[0]}..{layers[-1]}",
        )
    if known.num_tokens and position >= known.num_rows:
        raise InvalidArgument(
            field="position",
            value=position,
            expected=f"below {known.num_rows}, the number of rows of {known.num_tokens} tokens",
        )
    version = request.weight_version if request.HasField("weight_version") else None
    policy = request.policy or pb.READ_POLICY_AS_SAMPLED
    return reader.select(known, position, position + 1, (layer,), policy, version)


async def explained(
    reader: Reader, known: Known, selection: Selection, turns: Turns
) -> pb.ExplainCellResponse:
    """Return the reasons for one cell at the time of the call.

    Those for refused candidates may include changes of the next milliseconds.

    Args:
        reader: reads traces.
        known: view of the incarnation.
        selection: the cell.
        turns: slices of the caller's work.
    """
    cell = _Cell(known, selection)
    answer = pb.ExplainCellResponse(
        incarnation=known.incarnation.request.number, layer_id=cell.layer
    )
    cell.add_owner(answer)
    found = segments_of(reader.rows(known, replace(selection, weight_version=None)))
    row = found[0] if found else None
    if row is not None and selection.weight_version in (None, row.span.weight_version):
        cell.add_row(answer, row)
    else:
        rows = reader.rows(known, selection)
        [missing] = reader.missing(reader.state_of(known), known, selection, rows)
        answer.missing = missing.reason
        cell.add_missing(answer, row)
    refused = cell.refused(row)
    answer.num_refused = len(refused)
    async for request, attempt, _ in turns.over(refused[:MAX_SHOWN]):
        answer.refused.add(
            request=_message(request),
            attempt=attempt,
            reason=cell.attempt_refused(attempt - 1) if attempt else cell.request_refused(request),
        )
    return answer


class _Cell:
    """One cell of an incarnation, and the request that owns its position."""

    def __init__(self, known: Known, selection: Selection) -> None:
        self._known = known
        self._join = known.trace.join
        self.position, self.layer = selection.start, selection.layers[0]
        self._latest = selection.policy == pb.READ_POLICY_LATEST
        self._parts = known.incarnation.owned(latest=self._latest)
        self._members = [one.owner for one in self._parts]
        self._place = {one: i for i, one in enumerate(self._members)}
        self._found: dict[Request, Continued] = {}
        mine = (one for one in self._parts if one.start <= self.position < one.stop)
        self._owned = next(mine, None)
        self.owner = self._owned.owner if self._owned else None
        self._before = self._next = None
        if self.owner is not None:
            at = self._place[self.owner]
            self._before = self._members[at - 1] if at else None
            self._next = self._members[at + 1] if at + 1 < len(self._members) else None

    def _continued(self, request: Request) -> Continued:
        """Return the request that one goes on from; each is worked out once."""
        if request not in self._found:
            self._found[request] = self._join.continued(request)
        return self._found[request]

    # ------------------------------------------------------------------ owner

    def add_owner(self, answer: pb.ExplainCellResponse) -> None:
        """Add the chain, the owner and the reason for it."""
        at = self._parts.index(self._owned) if self._owned else 0
        first = max(0, min(at - MAX_SHOWN // 2, len(self._parts) - MAX_SHOWN))
        for number, one in enumerate(self._parts[first : first + MAX_SHOWN], first + 1):
            after = self._members[number] if number < len(self._members) else None
            answer.chain.add(
                request=_message(one.owner),
                proven=self._continued(after).proven if after else 0,
                start=one.start,
                stop=0 if one.stop == FOREVER else one.stop,
            )
        answer.num_members = len(self._parts)
        if self.owner:
            answer.owner.CopyFrom(_message(self.owner))
        answer.owner_reason = self._owner_reason()

    def _owner_reason(self) -> str:
        if self._latest:
            return "with the policy latest, the last request owns all positions"
        if self.owner is None:
            return self._ambiguous()
        parts = []
        if self._before is not None:
            start = self._owned.start if self._owned else 0
            parts.append(f"it continues {_name(self._before)}, from position {start} on")
        if self._next is not None:
            found, prompt = self._continued(self._next), self.owner.prompt_len
            text = f"{_name(self._next)} continues it: digests prove that its first {found.proven} "
            text += f"tokens stand in that prompt, and its own prompt has {prompt}"
            if len(found.equals) > 1:
                text += f"; {len(found.equals)} requests share as many, and this one computed the "
                text += f"row that {_name(self._next)} took from a slot at position {found.slot}"
            parts.append(text)
        if not parts:
            found = self._continued(self.owner)
            parts.append("it continues no other request")
            if found.equals:
                text = f"it may continue {_names(found.equals)}, but owns the positions behind"
                parts = [f"{text} their tokens"]
        return "; ".join(parts)

    def _ambiguous(self) -> str:
        first = self._members[0]
        found = self._continued(first)
        text = f"{_name(first)} may continue any of {_names(found.equals)}: "
        if any(self._join.proven(one, first) < found.proven for one in found.equals):
            return (
                f"{text}{_name(found.equals[0])} shares {found.proven} tokens with its prompt, and "
                "no digests show that the others, with the same prompt, sampled other tokens"
            )
        text += "each shares "
        text += f"{found.proven} tokens with its prompt, and "
        if found.slot < 0:
            return f"{text}in its first attempt it took none of them from a slot"
        return f"{text}none computed the row that it took from a slot at position {found.slot}"

    # ------------------------------------------------------------------ row

    def add_row(self, answer: pb.ExplainCellResponse, row: Segment) -> None:
        """Add the row, the rule that gave it, and the evidence."""
        owned, position = self._owned, self.position
        assert owned is not None  # ambiguous positions have no rows
        source = self._known.sources[row.source]
        reporter = next(r for r in (owned.owner, *owned.givers) if source in r.sources)
        [stored] = source.attempts[row.attempt].between(position, position + 1)
        own = "own_slot" if stored.provenance == Provenance.SLOT else "own_pass"
        given = row.span.provenance == Provenance.HANDOFF
        sampled = owned.owner.first_that_sampled
        later = not (given or self._latest) and row.attempt != sampled
        answer.rule = "handoff" if given else "later_attempt" if later else own
        maker = reporter if own == "own_pass" else self._maker(stored.ref)
        answer.row.CopyFrom(
            pb.CellRow(
                computed_by=_message(maker) if maker else None,
                shard=source.writer.shard,
                attempt=row.attempt,
                weight_version=row.span.weight_version,
                reported_by=_message(reporter),
                transfer_id=_taker_of(reporter, owned).received_by if given else "",
            )
        )
        if given:
            answer.evidence.extend(self._hand_overs(reporter))
        elif later:
            answer.evidence.append(
                f"attempt {sampled + 1}, which sampled the answer, has no row here"
            )
        elif self._latest:
            answer.evidence.append(f"attempt {row.attempt + 1} is the last one with a row here")
        elif len(source.attempts) > 1:
            answer.evidence.append(self._why_sampled(owned.owner))
        text = f"attempt {row.attempt + 1} of {_name(reporter)}"
        if own == "own_pass":
            answer.evidence.append(f"{text} computed the position in a forward pass")
            return
        answer.evidence.append(f"{text} took the position from a slot of its KV cache")
        answer.evidence.append(
            f"a forward pass of {_name(maker)} computed the row in that slot"
            if maker
            else "no request of this trace that was looked at computed the row in that slot"
        )

    def _why_sampled(self, owner: Request) -> str:
        sampled, count = owner.first_that_sampled, owner.prompt_len
        if not count:
            return f"attempt {sampled + 1} counts first, as the length of the prompt is not known"
        text = f"attempt {sampled + 1} sampled the answer: it is the"
        stops = (stop for s in owner.sources for stop in s.stops[sampled : sampled + 1])
        if any(count <= stop < FOREVER for stop in stops):
            return (
                f"{text} first one that was preempted after it had computed the whole prompt of "
                f"{count} tokens"
            )
        return f"{text} last one, and those before were preempted within the prompt"

    def _hand_overs(self, reporter: Request) -> Iterator[str]:
        """Yield the evidence for the hand-overs on the way from a request to the owner."""
        assert self._owned is not None
        taker = self._owned.owner
        for giver in self._owned.givers:
            [interval] = [i for i in taker.loaded if _in(self.position, [i])]
            yield (
                f"{_name(taker)} began with KV from elsewhere, and no pass of it computed the "
                f"positions {_positions(interval)} again"
            )
            yield (
                f"it began with the transfer_id {taker.received_by!r}, and {_name(giver)} alone "
                "ended with the same one"
            )
            yield f"no digests show that their tokens differ up to position {self.position}"
            if giver is reporter:
                return
            yield f"the last attempt of {_name(giver)} has no row of its own here"
            taker = giver

    def _maker(self, ref: int) -> Request | None:
        """Return the request whose forward pass computed a row; None if it is not found."""
        forward = Provenance.FORWARD
        for request in self._looked_at():
            for attempt in range(max(len(s.attempts) for s in request.sources)):
                for span in self._spans(request, attempt):
                    if span.provenance == forward and span.ref == ref:
                        return request
        return None

    # ------------------------------------------------------------------ missing

    def add_missing(self, answer: pb.ExplainCellResponse, other: Segment | None) -> None:
        """Add the evidence for the reason, and what helps.

        Args:
            answer: answer with the reason.
            other: row of another weight version, if there is one.
        """
        evidence, remedy = _REASONS.get(answer.missing, ("", ""))
        if answer.missing == pb.MISSING_REASON_AMBIGUOUS:
            remedy = (
                "keep the engine's prefix cache on, so that slots show which of the equal "
                "requests is continued, or give each of them a trace id of its own"
            )
        elif answer.missing == pb.MISSING_REASON_OTHER_VERSION and other is not None:
            version = other.span.weight_version
            known = version != UNKNOWN_VERSION
            evidence = f"the row was computed by {_version(version)}"
            remedy = "read without weight_version" + (f", or with {version}" if known else "")
        elif answer.missing == pb.MISSING_REASON_KV_UNKNOWN and self.owner is not None:
            evidence, remedy = self._kv_unknown(self.owner)
        if evidence:
            answer.evidence.append(evidence)
        other_reasons = pb.MISSING_REASON_AMBIGUOUS, pb.MISSING_REASON_OTHER_VERSION
        if answer.missing not in other_reasons and (attempt := self._lost_by()) is not None:
            answer.evidence.append(
                f"the row was of attempt {attempt + 1}, and no other attempt supplies it"
            )
        answer.remedy = remedy

    def _lost_by(self) -> int | None:
        """Return which of several attempts lost the cell; None: there is one alone, or none did."""
        at, owned = self.position, self._owned
        if owned is None or max(len(s.attempts) for s in owned.owner.sources) == 1:
            return None
        parts = (p for p in parts_of(owned, latest=self._latest) if p.start <= at < p.stop)
        for part in parts:
            for attempt in part.attempts:
                for source in part.request.sources:
                    lost = source.lost_in(attempt)
                    if lost and self.layer in source.layout.column and lost.overlaps(at, at + 1):
                        return None if part.given else attempt
        return None

    def _kv_unknown(self, owner: Request) -> tuple[str, str]:
        """Return why the KV of the position is unknown, and what helps."""
        if not _in(self.position, owner.begun):
            text = "the KV came from a slot whose writer is unknown"
            if any(source.external for source in owner.sources):
                text = "the KV was loaded from elsewhere, or came from a slot of unknown writer"
            return text, self._stand_in(owner)
        text = f"{_name(owner)} began with KV from elsewhere, and "
        why, remedy = self._no_hand_over(owner)
        return f"{text}{why}", ", or ".join(filter(None, (remedy, self._stand_in(owner))))

    def _stand_in(self, owner: Request) -> str:
        """Return how rows of other requests can stand in; "" if they cannot."""
        if self.position >= owner.num_reused or owner.first_that_sampled:
            return ""
        return _NO_VERSION if owner.kv_version == UNKNOWN_VERSION else _STAND_IN

    def _no_hand_over(self, owner: Request) -> tuple[str, str]:
        """Return why no named hand-over gives a row of external KV, and what helps."""
        sampled, name, named = owner.first_that_sampled, owner.received_by, self._join.named(owner)
        if sampled and not self._latest:
            return f"attempt {sampled + 1}, which sampled the answer, did not take it", ""
        if not _in(self.position, owner.loaded):
            return (
                "a pass may have computed it again: one began at or below the position, or none "
                "has begun yet",
                "",
            )
        if not name:
            return (
                "without a transfer_id",
                "name the hand-over: give one transfer_id to finish of the request that hands its "
                "KV over, and to begin of the request that takes it",
            )
        if not named:
            return (
                f"no other request of this trace ended with its transfer_id {name!r}",
                "give that transfer_id to finish of the request that hands its KV over, too",
            )
        if len(named) > 1:
            return (
                f"{len(named)} requests ended with its transfer_id {name!r}: {_names(named)}",
                "give each hand-over a transfer_id of its own",
            )
        return f"the hand-over {name!r} gives no row: {self._giver_refused(owner, named[0])}", ""

    def _giver_refused(self, owner: Request, giver: Request) -> str:
        """Return why the request behind a named hand-over does not give the row."""
        differ = owner.disproved(giver)
        if self.position >= differ:
            return f"the tokens of {_name(giver)} differ {_behind(differ)}"
        if self.position >= giver.num_rows:
            return f"{_name(giver)} has rows of its first {giver.num_rows} positions only"
        last = max(len(s.attempts) for s in giver.sources) - 1
        if self._spans(giver, last):
            return f"{_name(owner)} has a row of its own, or did not keep the KV"
        return f"the last attempt of {_name(giver)} has no row here"

    # ------------------------------------------------------------------ refused

    def refused(self, row: Segment | None) -> list[tuple[Request, int, int]]:
        """Return (request, attempt from 1 or 0, shared tokens) of refused candidates, best first.

        Args:
            row: row of any weight version, if there is one.
        """
        source = self._known.sources[row.source] if row else None
        found = []
        if self.owner is not None:
            number = max(len(s.attempts) for s in self.owner.sources)
            own = source in self.owner.sources
            found += [
                (self.owner, attempt + 1, 0)
                for attempt in range(number)
                if self._spans(self.owner, attempt) and not (own and row and attempt == row.attempt)
            ]
        found += [
            (one, 0, 0) for one in self._members if one is not self.owner and self._has_row(one)
        ][-MAX_SHOWN:]
        others = [
            (one, 0, self._join.proven(one, self._rival(one)))
            for one in self._looked_at()
            if one not in self._place and source not in one.sources
        ]
        if self._latest:  # no other one may own the position
            others = [one for one in others if one[0].handed_over]
        others.sort(key=lambda one: one[2], reverse=True)
        return [*found, *others]

    def attempt_refused(self, attempt: int) -> str:
        """Return why an attempt of the owner with a row does not give it."""
        assert self.owner is not None
        sampled = self.owner.first_that_sampled
        if self._latest:
            return "a later attempt computed the position, too"
        if attempt < sampled:
            return f"attempt {sampled + 1} counts: the first that sampled the answer, or the last"
        if attempt not in self.owner.attempts_that_sampled:
            return "it did not compute the last token that the request had: nothing was sampled"
        return f"it came after attempt {sampled + 1}, which sampled the answer"

    def request_refused(self, request: Request) -> str:
        """Return why a request neither owns the position nor hands the row over."""
        owner, b = self.owner, self._rival(request)
        if request in self._place:
            return f"it has a row here, too, but {'is not' if owner else 'may not be'} the owner"
        if owner is not None:
            named = self._join.named(owner)
            if request in named and len(named) > 1:
                return (
                    f"it is one of {len(named)} requests that ended with the transfer_id "
                    f"{owner.received_by!r}"
                )
            if request in named:
                return f"it handed its KV over, but {self._giver_refused(owner, request)}"
        if request.handed_over:
            text = "it ended with handoff, so its rows count only behind a hand-over with an id"
            if owner is None or not owner.begun:
                return text
            if not owner.received_by:
                return f"{text}, and {_name(owner)} began without a transfer_id"
            return f"{text}, and {_name(owner)} began with another one, {owner.received_by!r}"
        return self._not_continued(request, b)

    def _not_continued(self, request: Request, b: Request) -> str:
        """Return why a request is not the one that another one continues."""
        prompt, differ = request.prompt_len, b.disproved(request)
        if not prompt:
            return "the length of its prompt is not known"
        if not (request.own and b.own):
            return f"its tokens, or those of {_name(b)}, are not known, as no digests were given"
        proven, found = self._join.proven(request, b), self._continued(b)
        if proven <= prompt and request in found.equals:
            return f"it has the same prompt as another one that {_name(b)} may continue"
        if proven <= prompt:
            if differ < b.prompt_len:
                return f"its tokens differ from those of {_name(b)} {_behind(differ)}"
            if request.num_tokens == prompt:
                return "it sampled nothing"
            return (
                f"it sampled nothing that stands in the prompt of {_name(b)}: they share {proven} "
                f"tokens, and its own prompt has {prompt}"
            )
        best = found.before or next((one for one in found.equals if one is not request), None)
        if best is None:
            return f"it is not the one that {_name(b)} continues"
        text = f"it shares {proven} tokens with the prompt of {_name(b)}"
        if proven < found.proven:
            return f"{text}, and {_name(best)} shares more, {found.proven}"
        if found.before is None:
            return f"{text}, {_name(best)} shares as many, and no slot decides between them"
        return (
            f"{text}, {_name(best)} shares as many, and computed the row that {_name(b)} took from "
            f"a slot at position {found.slot}"
        )

    def _rival(self, request: Request) -> Request:
        """Return the member of the chain that would have to continue a request."""
        owner = self.owner or self._members[0]
        if self._next is None or self._join.proven(request, owner) > request.prompt_len > 0:
            return owner
        return self._next

    # ------------------------------------------------------------------ rows of requests

    def _looked_at(self) -> Sequence[Request]:
        return self._join.requests[: -_MAX_LOOKED_AT - 1 : -1]

    def _spans(self, request: Request, attempt: int) -> list[Span]:
        """Return the spans of the cell that an attempt has, by shard."""
        position = self.position
        return [
            span
            for source in request.sources
            if self.layer in source.layout.column and attempt < len(source.attempts)
            if position < source.confirmed(attempt)
            for span in source.attempts[attempt].between(position, position + 1)
        ]

    def _has_row(self, request: Request) -> bool:
        attempts = range(max(len(s.attempts) for s in request.sources))
        return any(self._spans(request, attempt) for attempt in attempts)


def _taker_of(giver: Request, owned: Owned) -> Request:
    """Return the request that took its KV from another one."""
    passed = (owned.owner, *owned.givers)
    return passed[passed.index(giver) - 1]


def _message(request: Request) -> pb.EngineRequest:
    engine_id, request_id, _ = request.sources[0].name
    return pb.EngineRequest(number=request.number, request_id=request_id, engine_id=engine_id)


def _name(request: Request) -> str:
    return f"request {request.number}"


def _names(requests: Sequence[Request]) -> str:
    numbers = [str(one.number) for one in requests[:_MAX_NAMED]]
    if len(requests) > _MAX_NAMED:
        numbers.append(f"{len(requests) - _MAX_NAMED} more")
    if len(numbers) == 1:
        return f"request {numbers[0]}"
    return f"requests {', '.join(numbers[:-1])} and {numbers[-1]}"


def _version(version: int) -> str:
    return (
        "an unknown weight version" if version == UNKNOWN_VERSION else f"weight version {version}"
    )


def _behind(position: int) -> str:
    return f"at or behind position {position}, up to which digests agree"


def _positions(interval: Interval) -> str:
    return f"[{interval[0]}, {interval[1]})"


def _in(position: int, intervals: Sequence[Interval]) -> bool:
    return any(start <= position < stop for start, stop in intervals)
