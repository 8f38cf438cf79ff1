"""Compares what was read with the truth: every row, and what is said of them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from routetrace.cli.load.rows import Rows
from routetrace.cli.load.sessions import Truth
from routetrace.client.alignment import compare_tokens
from routetrace.client.stat import ReadFacts, TraceFacts, TraceState


@dataclass(eq=False)
class Answer:
    """What a read gave, however it was read."""

    ids: npt.NDArray[np.unsignedinteger]
    """[n, layers, K]."""
    valid: npt.NDArray[np.bool_]
    """[n, layers]."""
    positions: npt.NDArray[np.int64]
    """[n]."""
    columns: slice | list[int] = field(default_factory=lambda: slice(None))
    """Which layers those are."""
    facts: ReadFacts | None = None
    fetched: int = 0
    """Compressed bytes that were sent for it."""
    whole: bool = False
    """Whether it is all of the session, so that what is said of the trace must hold for it."""


@dataclass
class Finding:
    """What came of a read. Travels as JSON."""

    rows: int = 0
    """Rows that are there in all of the layers asked for, and right."""
    cells: int = 0
    """Cells (row, layer) that are there."""
    fetched: int = 0
    wrong: int = 0
    """Rows and facts that are not true."""
    later: int = 0
    """Rows that a later pass computed, or found: right only where those of the first were dropped.
    """
    missing: dict[str, int] = field(default_factory=dict)
    """Cells that are not there, by reason."""
    error: str = ""
    """The first thing that is wrong, or why the read failed."""
    failed: int = 0
    seconds: float = 0.0
    """Of the read."""
    ready: float = 0.0
    """From the end of the session until its rows were here."""

    def is_wrong(self, count: int, what: str) -> None:
        """So many rows, or facts, are not true."""
        if count:
            self.wrong += count
            self.error = self.error or what


def compare(rows: Rows, truth: Truth, answer: Answer) -> Finding:
    """Looks at everything that a read gave."""
    found = Finding(fetched=answer.fetched)
    if len(answer.positions):
        _rows(found, rows, truth, answer)
    if answer.facts is not None:
        _facts(found, truth, answer.facts)
        if answer.whole:
            _trace(found, truth, answer.facts)
    return found


def _rows(found: Finding, rows: Rows, truth: Truth, answer: Answer) -> None:
    positions, valid = answer.positions, answer.valid
    authors = truth.authors(int(positions.max()) + 1)[positions]
    wrong = _differs(rows, authors, answer, slice(None))
    there = valid.all(axis=1)
    found.rows = int((~wrong & there).sum())
    found.cells = int(valid.sum())
    for start, stop, author, _ in truth.again:
        at = np.flatnonzero(wrong & (positions >= start) & (positions < stop))
        if len(at):
            wrong[at] = _differs(rows, np.full(len(at), author), answer, at)
            found.later += len(at) - int(wrong[at].sum())
    bad = np.flatnonzero(wrong)
    if len(bad):
        where = f"{len(bad)} of {len(valid)} rows, the first at position {positions[bad[0]]}"
        found.is_wrong(len(bad), f"{truth.name}: {where}")


def _differs(
    rows: Rows, authors: npt.NDArray[np.int64], answer: Answer, at: slice | npt.NDArray[np.intp]
) -> npt.NDArray[np.bool_]:
    """Which rows, of those that are `at`, are not what these authors computed."""
    made = rows.of(authors, answer.positions[at], answer.columns)
    cells = (made != answer.ids[at]).any(axis=2) & answer.valid[at]
    return np.asarray(cells.any(axis=1))


def _facts(found: Finding, truth: Truth, facts: ReadFacts) -> None:
    """What is said of the rows that were read."""
    counts: Counter[str] = Counter()
    for one in facts.missing:
        counts[one.reason] += (one.stop - one.start) * len(one.layer_ids)
    found.missing = dict(counts)
    versions = truth.versions(max((v[1] for v in facts.weight_versions), default=0))
    for start, stop, version in facts.weight_versions:
        other = versions[start:stop] != version
        for first, last, _, later in truth.again:
            if later == version:
                other[max(0, first - start) : max(0, last - start)] = False
        found.is_wrong(
            int(other.sum()), f"{truth.name}: weight version {version} of [{start}, {stop})"
        )


def _trace(found: Finding, truth: Truth, facts: TraceFacts) -> None:
    """What is said of the trace."""
    name = truth.name
    if facts.state is TraceState.INCOMPLETE and not found.missing:
        found.is_wrong(1, f"{name}: incomplete, though all of its rows are there")
    # Rows may be there before the end is known.
    if facts.state is TraceState.COMPLETE and facts.num_tokens > truth.num_tokens:
        found.is_wrong(1, f"{name}: {facts.num_tokens} tokens, not {truth.num_tokens}")
    told = compare_tokens(truth.tokens(truth.num_tokens), facts.token_digests)
    if told.differs is not None:
        found.is_wrong(1, f"{name}: other tokens before position {told.differs}")
