"""Rows that stand in; section 6 of docs/rows.md."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from oracle.truth import (
    ALL_REASONS,
    NOBODY,
    NOWHERE,
    Expected,
    PrefixRows,
    Record,
    RowStore,
    closed,
    same_tokens,
    that_sampled,
)

Records = Mapping[str, list[Record]]
"""Requests of each trace, in order of arrival."""


def add(
    answers: list[Expected],
    trace_id: str,
    records: Records,
    store: RowStore,
    prefix_rows: PrefixRows,
    weight_version: int | None,
) -> None:
    """Adds the rows that stand in where nobody knows who computed the KV.

    Args:
        answers: what is expected of each request of a trace, as sampled.
        trace_id: of this trace.
        records: the requests of all traces.
        store: the rows.
        prefix_rows: what the reader asks for.
        weight_version: that is asked for; None: any.
    """
    passes = _Passes(records, store)
    for answer in answers:
        for position, owners in _holes(answer).items():
            for owner, sure in owners.items():
                found = passes.candidates(owner).get(position, [])
                if prefix_rows == "unique":
                    allowed, must = _alone(found)
                else:
                    allowed, must = passes.first(trace_id, found)
                rows = answer.prefix.setdefault(position, {})
                rows.update({one.number: one.record.trace_id for one in allowed})
                if must and sure:
                    answer.certain.add(position)
                answer.stood_for.setdefault(position, set()).update(
                    _weights(owner, position, store, every=answer.uncertain)
                )
        answer.prefix = {p: rows for p, rows in answer.prefix.items() if rows}
        if weight_version is not None:
            _only(answer, store, weight_version)


def take(
    answers: list[Expected], sampled: list[Expected], store: RowStore, weight_version: int | None
) -> None:
    """Adds the rows that stand in under `as_sampled` to answers of `latest`, where it has none."""
    for answer, one in zip(answers, sampled, strict=True):
        free = {p for p in one.prefix if not answer.unfiltered or answer.unfiltered[p]}
        answer.prefix = {p: {**rows} for p, rows in one.prefix.items() if p in free}
        answer.certain = one.certain & free
        answer.stood_for = one.stood_for
        if weight_version is not None:
            _only(answer, store, weight_version)


def _holes(answer: Expected) -> dict[int, dict[Record, bool]]:
    """By position the owners that it may be a hole of; True: it is one."""
    holes: dict[int, dict[Record, bool]] = {}
    for owner, positions in answer.owners:
        if owner.kv_version is None or (not answer.uncertain and that_sampled(owner)):
            continue
        ambiguous = answer.ambiguous.get(owner, NOWHERE)
        stop = min(owner.prompt_len, owner.attempts[0].external.stop)
        for position in positions[: max(0, stop - positions.start)]:
            reasons = answer.unfiltered[position] if answer.unfiltered else ALL_REASONS
            if "kv_unknown" in reasons and position not in ambiguous:
                sure = not answer.uncertain and reasons == {"kv_unknown"}
                holes.setdefault(position, {})[owner] = sure
    return holes


def _weights(owner: Record, position: int, store: RowStore, *, every: bool) -> set[int]:
    """The true weights of the KV at a position that the owner's first attempt read."""
    first = owner.attempts[0]
    behind = first.behind(position, every=every or not first.sampled)
    return {NOBODY if n == NOBODY else int(store.weights[n]) for n in behind}


@dataclass(frozen=True)
class _Pass:
    """A forward pass that may have been the one at a position."""

    record: Record
    attempt: int
    number: int
    """Of its row."""
    sure: bool
    """Whether the server has it for certain."""


def _alone(found: list[_Pass]) -> tuple[list[_Pass], bool]:
    """The candidates that may be the only one, and whether one surely is."""
    sure = [one for one in found if one.sure]
    if len(sure) > 1:
        return [], False
    return sure or found, len(sure) == len(found) == 1


class _Passes:
    """What forward passes computed, and in which order traces appeared.

    Args:
        records: the requests of all traces.
        store: the rows.
    """

    def __init__(self, records: Records, store: RowStore) -> None:
        self._records = records
        self._store = store
        self._known_at: dict[str, dict[Record, set[int]]] = {}
        self._found: dict[Record, dict[int, list[_Pass]]] = {}

    def candidates(self, owner: Record) -> dict[int, list[_Pass]]:
        """Those for holes of an owner, by position."""
        if owner not in self._found:
            found: dict[int, list[_Pass]] = {}
            for trace_id, others in self._records.items():
                settled = all(r.settled for r in others)
                for other in others:
                    stop = self._covered(owner, other, trace_id)
                    for position, attempt, number in _computed(other) if stop else ():
                        version = int(self._store.versions[number])
                        if position < stop and version == owner.kv_version:
                            sure = settled and attempt >= 0
                            one = _Pass(other, attempt, number, sure)
                            found.setdefault(position, []).append(one)
            self._found[owner] = found
        return self._found[owner]

    def _covered(self, owner: Record, other: Record, trace_id: str) -> int:
        """One past the last position at which rows of the other may stand in for the owner's."""
        if other is owner or not owner.model or owner.model != other.model:
            return 0
        same = min(same_tokens(owner, other), owner.prompt_len)
        if not same:
            return 0
        both = self._digests(owner.trace_id)[owner] & self._digests(trace_id)[other]
        return other.limit(max((q for q in both if q <= same), default=0))

    def _digests(self, trace_id: str) -> dict[Record, set[int]]:
        if trace_id not in self._known_at:
            self._known_at[trace_id] = closed(self._records[trace_id])
        return self._known_at[trace_id]

    def first(self, reader: str, found: list[_Pass]) -> tuple[list[_Pass], bool]:
        """The candidates that may be the first one, and whether there surely is one.

        Args:
            reader: the reader's trace.
            found: all candidates for a hole.
        """
        sure = [one for one in found if one.sure]
        allowed = [one for one in found if not any(self._ahead(s, one, reader) for s in sure)]
        return allowed, bool(sure)

    def _ahead(self, a: _Pass, b: _Pass, reader: str) -> bool:
        """Whether one candidate surely comes before another, for a reader."""
        mine, yours = a.record.trace_id, b.record.trace_id
        if mine == yours:
            order = self._records[mine]
            return (order.index(a.record), a.attempt) < (order.index(b.record), b.attempt)
        if reader in (mine, yours):
            return mine == reader or self._before(yours, reader) is False
        if self._before(yours, reader) is False:  # it came after the reader's
            return self._before(mine, reader) is True or self._before(mine, yours) is True
        both = self._before(mine, reader) and self._before(yours, reader)
        return bool(both) and self._before(yours, mine) is True

    def _before(self, a: str, b: str) -> bool | None:
        """Whether a trace appeared before another one; None: nobody can say."""
        (a_first, a_last), (b_first, b_last) = self._appeared(a), self._appeared(b)
        if a_last is not None and a_last < b_first:
            return True
        return False if b_last is not None and b_last < a_first else None

    def _appeared(self, trace_id: str) -> tuple[int, int | None]:
        """Barriers before a trace can have appeared, and before it surely has."""
        records = self._records[trace_id]
        surely = (r.barriers for r in records if r.begin_settled)
        return records[0].barriers, min(surely, default=None)


def _computed(record: Record) -> Iterator[tuple[int, int, int]]:
    """(position, attempt, row) of what forward passes of a request computed and nobody rejected.

    The attempt is -1 for rows that were given up, where the server may not know it.
    """
    for number, attempt in enumerate(record.attempts):
        rows = attempt.rows.copy()
        rows[: attempt.given] = NOBODY
        if number == len(record.attempts) - 1:
            rows[slice(*record.tentative)] = NOBODY
        for position in (rows != NOBODY).nonzero()[0].tolist():
            yield position, number, int(rows[position])
    for position, row in () if record.settled else record.discarded:
        yield position, -1, row


def _only(answer: Expected, store: RowStore, weight_version: int) -> None:
    """Leaves out rows of other weights; which ones were chosen before is not told."""
    for position, rows in [*answer.prefix.items()]:
        left = {n: trace for n, trace in rows.items() if store.versions[n] == weight_version}
        if len(left) < len(rows):
            other = frozenset({"other_version"})
            if position not in answer.certain:
                other |= answer.unfiltered[position]
            answer.reasons[position][~answer.known[position]] = other
            answer.certain.discard(position)
        if left:
            answer.prefix[position] = left
        else:
            del answer.prefix[position]
