"""Comparison of reads with the truth: rows, versions, missing cells, facts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from routetrace.client.alignment import compare_tokens
from routetrace.client.stat import ReadFacts, TraceFacts, TraceState
from routetrace.simulation.rows import Rows
from routetrace.simulation.sessions import Truth


@dataclass(eq=False)
class Answer:
    """Result of a read of any kind."""

    ids: npt.NDArray[np.unsignedinteger]
    """[n, layers, K]."""
    valid: npt.NDArray[np.bool_]
    """[n, layers]."""
    positions: npt.NDArray[np.int64]
    """[n]."""
    columns: slice | list[int] = field(default_factory=lambda: slice(None))
    """Layers as columns of the layout."""
    facts: ReadFacts | None = None
    fetched: int = 0
    """Compressed bytes transferred."""
    whole: bool = False
    """Whether it covers the whole session, so that trace facts can be checked."""


@dataclass
class Finding:
    """Result of a comparison; serializable as JSON."""

    rows: int = 0
    """Rows that are present in all requested layers and right."""
    cells: int = 0
    """Cells (row, layer) that are present."""
    fetched: int = 0
    wrong: int = 0
    """Wrong rows and facts."""
    later: int = 0
    """Rows of a later pass: right only where those of the first pass were dropped."""
    missing: dict[str, int] = field(default_factory=dict)
    """Missing cells by reason."""
    error: str = ""
    """First wrong row or fact, or the reason of a failed read."""
    failed: int = 0
    seconds: float = 0.0
    """Duration of the read."""
    ready: float = 0.0
    """Time from the end of the session until its rows were read."""

    def add_wrong(self, count: int, error: str) -> None:
        """Count wrong rows or facts; keep the first error."""
        if count:
            self.wrong += count
            self.error = self.error or error


def compare(rows: Rows, truth: Truth, answer: Answer) -> Finding:
    """Compare everything that a read returned with the truth."""
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
        found.add_wrong(len(bad), f"{truth.name}: {where}")


def _differs(
    rows: Rows, authors: npt.NDArray[np.int64], answer: Answer, at: slice | npt.NDArray[np.intp]
) -> npt.NDArray[np.bool_]:
    """Return a mask of the rows `at` that differ from the rows of these authors."""
    made = rows.of(authors, answer.positions[at], answer.columns)
    cells = (made != answer.ids[at]).any(axis=2) & answer.valid[at]
    return np.asarray(cells.any(axis=1))


def _facts(found: Finding, truth: Truth, facts: ReadFacts) -> None:
    """Check the facts about the rows read."""
    counts: Counter[str] = Counter()
    for one in facts.missing:
        counts[one.reason] += (one.stop - one.start) * len(one.layer_ids)
    found.missing = dict(counts)
    versions = truth.versions(max((v[1] for v in facts.weight_versions), default=0))
    for start, stop, version in facts.weight_versions:
        if version is None:
            found.add_wrong(stop - start, f"{truth.name}: no weight version of [{start}, {stop})")
            continue
        other = versions[start:stop] != version
        for first, last, _, later in truth.again:
            if later == version:
                other[max(0, first - start) : max(0, last - start)] = False
        found.add_wrong(
            int(other.sum()), f"{truth.name}: weight version {version} of [{start}, {stop})"
        )


def _trace(found: Finding, truth: Truth, facts: TraceFacts) -> None:
    """Check the facts about the trace."""
    name = truth.name
    if facts.state is TraceState.INCOMPLETE and not found.missing:
        found.add_wrong(1, f"{name}: state incomplete, expected complete: no cell is missing")
    # All rows can be present before the end is known.
    told = facts.num_tokens or 0
    if facts.state is TraceState.COMPLETE and told > truth.num_tokens:
        found.add_wrong(1, f"{name}: {told} tokens, expected {truth.num_tokens}")
    compared = compare_tokens(truth.tokens(truth.num_tokens), facts)
    if compared.differs is not None:
        found.add_wrong(1, f"{name}: other tokens before position {compared.differs}")
