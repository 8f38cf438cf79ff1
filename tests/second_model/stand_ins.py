"""Which rows stand in for those of KV whose pass nobody knows, by section 6 of docs/rows.md."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import product
from typing import TYPE_CHECKING, Literal, NamedTuple

from second_model.log import Log, Part, Row, Writer

if TYPE_CHECKING:
    from second_model.answers import Answers, Request

PrefixRows = Literal["never", "unique", "any"]

Weights = frozenset["int | None"]
"""Versions of some KV; None is among them where one is not known."""

UNKNOWN_WEIGHTS: Weights = frozenset((None,))


class Candidate(NamedTuple):
    """What a forward pass may have left for a cell."""

    request: Request
    attempt: int
    rows: frozenset[Row]
    sure: bool
    """Whether one of them is there for certain."""


# ---------------------------------------------------------------------------- KV versions


def kv_version(part: Part) -> int | None:
    """The weight version of all KV that the engine could reuse at a begin, if calls tell it."""
    first, writer = part.attempts[0], part.writer
    found = Weights()
    if first.cached > first.external:
        found |= _inside(writer, first.at)
    if first.external or (writer.num_host_blocks and first.cached):
        found |= _outside(writer, first.at, first.version)
    return first.version if found <= {first.version} else None


def _inside(writer: Writer, at: int) -> Weights:
    """Weights of the KV that was in an engine's blocks before a call."""
    since = max((reset for reset in writer.resets if reset < at), default=-1)
    return UNKNOWN_WEIGHTS if since < 0 or _live(writer, since) else _came(writer, since, at)


def _outside(writer: Writer, at: int, version: int | None) -> Weights:
    """Weights of the KV that could be loaded by a call, made while the engine had a version."""
    if writer.declares:
        return frozenset((version,))
    since = max((emptied for emptied in writer.emptied if emptied < at), default=-1)
    if since < 0 or _live(writer, since):
        return UNKNOWN_WEIGHTS
    # What was in its blocks then may have been written there later.
    return _inside(writer, since) | _came(writer, since, at)


def _came(writer: Writer, since: int, at: int) -> Weights:
    """Weights of the KV that came into an engine's blocks between two calls."""
    known = writer.came.setdefault(since, [])
    # Loads are worked out once and for all: what was before them does not change.
    done = known[-1][0] if known else since
    for when, version, loaded in writer.kv:
        if done < when < at:
            wrong = loaded and not _outside(writer, when, version) <= {version}
            known.append((when, None if wrong else version))
    return frozenset(version for when, version in known if when < at)


def _live(writer: Writer, at: int) -> bool:
    """Whether a request had begun and not ended before a call."""
    return any(p.begun_at < at and not 0 <= p.ended_at < at for p in writer.parts)


def kv_versions(log: Log, request: Request, shards: int) -> set[int | None]:
    """What the KV version of a request may be: what all its shards gave."""
    given = {kv_version(part) for part in request.parts}
    told = given if len(given) == 1 else {None}
    late = len(request.parts) < shards or any(log.held(part) for part in request.parts)
    return told | {None} if late else told


# ---------------------------------------------------------------------------- candidates


def candidates(
    answers: Answers, owner: Request, position: int, version: int
) -> Mapping[int, list[Candidate]]:
    """The candidates for the cells of a position, by layer."""
    found: dict[int, list[Candidate]] = {}
    for other in answers.requests:
        if other is owner or not _same_model(owner, other):
            continue
        if not any(position < p <= owner.prompt_len for p in answers.shared(owner, other)):
            continue
        clear = other.first.trace_id not in answers.log.unclear
        for part in other.parts:
            for number in range(len(part.attempts)):
                value = answers.log.own(part, number, position)
                rows = frozenset(r for r in value if r is not None and r.version == version)
                if rows:
                    one = Candidate(other, number, rows, clear and rows == value)
                    for layer in part.writer.layer_ids:
                        found.setdefault(layer, []).append(one)
    return found


def _same_model(a: Request, b: Request) -> bool:
    return bool(a.first.writer.model) and a.first.writer.model == b.first.writer.model


def the_only_one(found: Mapping[int, list[Candidate]], layer: int) -> tuple[set[Row], bool]:
    """Rows of a layer that may be of the only pass of a position, and whether one surely is."""
    everyone = [one for of in found.values() for one in of]
    names = {(one.request, one.attempt) for one in everyone}
    sure = {(one.request, one.attempt) for one in everyone if one.sure}
    if len(sure) > 1:
        return set(), False
    here = [c for c in found.get(layer, ()) if not sure or (c.request, c.attempt) in sure]
    rows = {row for one in here for row in one.rows}
    return rows, len(names) == 1 and any(one.sure for one in here)


def the_first(answers: Answers, reader: Request, found: list[Candidate]) -> tuple[set[Row], bool]:
    """Rows that may be the first of some candidates, and whether there surely is one."""
    order = _Order(answers, reader)
    sure = [one for one in found if one.sure]
    may = [c for c in found if not any(s is not c and order.ahead(s, c) for s in sure)]
    return {row for one in may for row in one.rows}, bool(sure)


class _Order:
    """In which order a reader is offered candidates."""

    def __init__(self, answers: Answers, reader: Request) -> None:
        self._answers = answers
        self._reader = reader.first.trace_id

    def ahead(self, a: Candidate, b: Candidate) -> bool:
        """Whether one surely comes before another."""
        if a.request is b.request:
            return a.attempt < b.attempt
        one, other = a.request.first.trace_id, b.request.first.trace_id
        if one == other:
            return self._came([a.request], [b.request]) == {True}
        outcomes = set()
        # Traces before the reader's (and its own) go back in time, those after it forwards.
        for of_one, of_other in product(self._behind(one), self._behind(other)):
            if of_one != of_other:
                outcomes.add(of_other)
            elif not of_one and self._reader in (one, other):
                outcomes.add(one == self._reader)
            else:
                outcomes |= {sooner == of_one for sooner in self._traces(one, other)}
        return outcomes == {True}

    def _behind(self, trace_id: str) -> set[bool]:
        """Whether a trace appeared after the reader's, as far as it is known."""
        if trace_id == self._reader:
            return {False}
        return {not sooner for sooner in self._traces(trace_id, self._reader)}

    def _traces(self, one: str, other: str) -> set[bool]:
        return self._came(self._answers.trace(one), self._answers.trace(other))

    def _came(self, ones: Iterable[Request], others: Iterable[Request]) -> set[bool]:
        """Whether the first of some requests arrived before the first of others: {True}, {False},
        or both where nobody can say."""
        mine = [part for request in ones for part in request.parts]
        yours = [part for request in others for part in request.parts]
        if self._surely(mine, yours):
            return {True}
        return {False} if self._surely(yours, mine) else {True, False}

    def _surely(self, first: list[Part], then: list[Part]) -> bool:
        log = self._answers.log
        clear = [p for p in first if p.trace_id not in log.unclear]
        return all(any(log.sooner(p, other) for p in clear) for other in then)
