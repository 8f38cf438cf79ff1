"""Rows that stand in for KV of which no row is proven, by docs/rows.md section 6.

Of which weight version the KV is that a request could reuse, which rows of other requests are
candidates for one of its cells, and which of them a reader gets. Where the order of calls at the
server, or what has arrived there, is not certain, every possibility is in the answer.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Literal, NamedTuple

from second_model.log import UNKNOWN, Log, Part, Row, Writer

if TYPE_CHECKING:
    from second_model.answers import Answers, Request

PrefixRows = Literal["never", "unique", "any"]

# ---------------------------------------------------------------------------- KV version


def kv_versions(log: Log, request: Request) -> set[int | None]:
    """The KV version that the server may know of a request; None: unknown."""
    told = {kv_version(part) for part in request.parts}
    if len(told) > 1:
        return {None}
    return told | {None} if any(log.held(part) for part in request.parts) else told


def kv_version(part: Part) -> int | None:
    """The version that an agent gives at a begin for all KV that its engine could reuse."""
    writer, begin = part.writer, part.attempts[0]
    if begin.version is None or not begin.cached:
        return None
    if begin.external < begin.cached:
        reset = _last(writer, writer.resets, begin.at)
        if not reset or not _all_of(writer, begin.version, reset, begin.at):
            return None
    from_outside = begin.external or writer.num_host_blocks
    if from_outside and not _outside_is_of(writer, begin.version, begin.at):
        return None
    return begin.version


def _outside_is_of(writer: Writer, version: int | None, at: int) -> bool:
    """Whether, before the call `at`, all KV outside of an engine's blocks is of one version."""
    if writer.declares:
        return True
    emptied = _last(writer, writer.emptied, at)
    reset = _last(writer, writer.resets, emptied)
    return bool(reset) and _all_of(writer, version, reset, at)


def _all_of(writer: Writer, version: int | None, since: int, until: int) -> bool:
    """Whether all KV that came into an engine's blocks between two calls is of a version."""
    came = writer.came
    for at, present, outside in writer.kv[len(came) :]:
        if at >= until:
            break
        known = None if outside and not _outside_is_of(writer, present, at) else present
        last, of, other = came[-1] if came else (0, known, 0)
        came.append((at, known, other if of == known else last))
    number = bisect_left(came, until, key=itemgetter(0))
    last, of, other = came[number - 1] if number else (0, None, 0)
    return last < since or (of == version and other < since)


def _last(writer: Writer, calls: Sequence[int], until: int) -> int:
    """The last of some calls; 0 if there is none, or if a request was live at it."""
    last = next((c for c in reversed(calls) if c < until), 0)
    return 0 if _live(writer, last) else last


def _live(writer: Writer, at: int) -> bool:
    """Whether a request had begun at a call, and had not ended; a preempted one goes on."""
    return any(p.begun_at < at and not 0 <= p.ended_at < at for p in writer.parts)


# ---------------------------------------------------------------------------- candidates


class Candidate(NamedTuple):
    """A row that may stand in, of the pass that computed it."""

    request: Request
    attempt: int
    row: Row
    sure: bool
    """Whether the contract decides that it is one."""

    @property
    def trace_id(self) -> str:
        return self.request.first.trace_id


def candidates(
    answers: Answers, owner: Request, position: int, version: int
) -> dict[int, list[Candidate]]:
    """The candidates for the holes of one position, by layer."""
    log, found = answers.log, defaultdict(list)
    for other, proven in answers.alike(owner):
        if position >= proven or (other.num_tokens and position >= other.num_tokens - 1):
            continue
        for part in other.parts:
            for number in range(len(part.attempts)):
                value = log.own(part, number, position)
                sure = None not in value and part.trace_id not in log.unclear
                for row in value - UNKNOWN:
                    if row is not None and not row.lost and row.version == version:
                        for layer in part.writer.layer_ids:
                            found[layer].append(Candidate(other, number, row, sure))
    return found


def same_model(a: Request, b: Request) -> bool:
    """Whether the agents of two requests gave the same model."""
    models = {(p.writer.model, p.writer.num_experts) for r in (a, b) for p in r.parts}
    return len(models) == 1 and all(model for model, _ in models)


# ---------------------------------------------------------------------------- policies


def the_only_one(found: Mapping[int, list[Candidate]], layer: int) -> tuple[frozenset[Row], bool]:
    """The rows that "unique" may serve at a layer, and whether it must serve one.

    A pass counts at all layers of the position, those of which the owner has rows included.
    """
    passes: dict[tuple[Request, int], bool] = {}
    for one in (c for of in found.values() for c in of):
        name = one.request, one.attempt
        passes[name] = passes.get(name, False) or one.sure
    surely = {name for name, sure in passes.items() if sure}
    mine = [c for c in found.get(layer, ()) if surely <= {(c.request, c.attempt)}]
    return frozenset(c.row for c in mine), len(passes) == 1 and any(c.sure for c in mine)


def the_first(
    answers: Answers, reader: Request, found: Iterable[Candidate]
) -> tuple[frozenset[Row], bool]:
    """The rows that "any" may serve at a layer, and whether it must serve one."""
    found, firsts = [*found], list[Candidate]()

    def precedes(one: Candidate, other: Candidate) -> bool:
        return _precedes(answers, reader.first.trace_id, one, other)

    for one in found:
        if one.sure and not any(precedes(first, one) for first in firsts):
            firsts = [one, *(first for first in firsts if not precedes(one, first))]
    rows = (c.row for c in found if not any(precedes(first, c) for first in firsts))
    return frozenset(rows), bool(firsts)


def _precedes(answers: Answers, mine: str, one: Candidate, other: Candidate) -> bool:
    """Whether a candidate comes before another one for certain, for a reader of a trace."""
    if one.request is other.request:
        return one.attempt < other.attempt
    a, b, sooner = one.trace_id, other.trace_id, answers.appeared
    if a == b:
        return began_before(answers.log, [one.request], [other.request])
    if mine in (a, b):
        return a == mine
    if sooner(a, mine) and (sooner(mine, b) or sooner(b, a)):
        return True
    return sooner(mine, a) and sooner(a, b)


def began_before(log: Log, some: Iterable[Request], others: Iterable[Request]) -> bool:
    """Whether the first begin of some requests arrived before that of others for certain."""
    parts = [part for request in some for part in request.parts]
    return all(any(log.sooner(part, later) for part in parts) for r in others for later in r.parts)
