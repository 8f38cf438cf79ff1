"""The traces of a run in columns: filters, orders and totals of 100,000 of them in milliseconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from routetrace.client import MissingReason, TraceState, TraceSummary
from routetrace.page.segments import exact

STATES = tuple(TraceState)
REASONS = tuple(MissingReason)
ORDERS = ("updated", "created", "tokens", "coverage", "version", "missing", "id")

_STATE_NUMBERS = {state: number for number, state in enumerate(STATES)}
_REASON_NUMBERS = {reason: number for number, reason in enumerate(REASONS)}
_RUNNING = _STATE_NUMBERS[TraceState.RUNNING]
#: Rows that were removed, from which the table is packed if they are more than the others.
_MANY_REMOVED = 10_000
_FIRST_ROOM = 1024

_Rows = npt.NDArray[np.intp]


@dataclass(frozen=True)
class Filter:
    """Chosen traces; None and empty fields choose all."""

    state: TraceState | None = None
    reason: MissingReason | None = None
    """A reason of some missing cell."""
    engine: str = ""
    versions: tuple[int, int] | None = None
    """Some row has a weight version from the first to the second."""
    below: float | None = None
    """The coverage is less; running traces have none."""
    labels: tuple[tuple[str, str], ...] = ()
    """All of these."""
    text: str = ""
    """Part of the id."""
    ended: bool = False
    """Its state is not running."""


class Ended(NamedTuple):
    """A trace that has ended."""

    trace_id: str
    num_rows: int
    weights: tuple[int, ...]
    """Least and greatest weight version; empty if none is known."""
    updated: float
    """Unix time."""


class TraceTable:
    """Summaries of traces, a row each. Rows keep their numbers until `generation` changes."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._ids: list[str] = []
        self._labels: list[tuple[tuple[str, str], ...]] = []
        self._engines: list[tuple[str, ...]] = []
        self._known_engines: dict[tuple[str, ...], tuple[str, ...]] = {}
        self._columns = _columns(_FIRST_ROOM)
        self._size = 0
        self.version = 0
        """Number of changes."""
        self.generation = 0
        """Number of times that rows got other numbers."""

    def __len__(self) -> int:
        return len(self._numbers)

    @property
    def trace_ids(self) -> list[str]:
        """Ids of all traces."""
        return [*self._numbers]

    def put(self, summary: TraceSummary) -> None:
        """Add a trace, or replace its summary."""
        at = self._numbers.get(summary.trace_id)
        if at is None:
            at = self._numbers[summary.trace_id] = self._append(summary.trace_id)
        self.version += 1
        self._labels[at] = tuple(summary.labels.items())
        engines = summary.engine_ids
        self._engines[at] = self._known_engines.setdefault(engines, engines)
        lowest, highest = summary.min_weight_version, summary.max_weight_version
        missing = np.zeros(len(REASONS), np.int64)
        for reason, cells in summary.missing_cells.items():
            missing[_REASON_NUMBERS[MissingReason(reason)]] = cells
        coverage = summary.coverage
        self._columns[at] = (
            True,
            _STATE_NUMBERS[summary.state],
            self.version,
            summary.num_tokens or 0,
            summary.num_rows,
            summary.num_cells,
            missing,
            np.nan if coverage is None else coverage,
            lowest is not None,
            lowest or 0,
            highest or 0,
            summary.created_at.timestamp(),
            summary.updated_at.timestamp(),
        )

    def remove(self, trace_id: str) -> None:
        """Remove a trace, if it is there."""
        at = self._numbers.pop(trace_id, None)
        if at is not None:
            self.version += 1
            self._columns["there"][at] = False
            self._labels[at] = self._engines[at] = ()
            if self._size - len(self) > max(_MANY_REMOVED, len(self)):
                self._pack()

    # ------------------------------------------------------------------ questions

    def newer(self, version: int) -> int:
        """Return the number of traces that were added or have changed since a version."""
        columns = self._used
        return int(np.count_nonzero(columns["there"] & (columns["version"] > version)))

    def totals(self) -> dict[str, Any]:
        """Return the traces by state, and the cells of those that have ended."""
        columns = self._used[self._used["there"]]
        states = np.bincount(columns["state"], minlength=len(STATES))
        cells, missing = int(columns["cells"].sum()), columns["missing"].sum(axis=0)
        return {
            "traces": {
                "total": len(self),
                **{state.value: int(n) for state, n in zip(STATES, states, strict=True)},
            },
            "coverage": share_of(cells - int(missing.sum()), cells),
            "cells": {
                "total": cells,
                "missing": {
                    reason.value: int(n) for reason, n in zip(REASONS, missing, strict=True) if n
                },
            },
        }

    def engines(self) -> list[str]:
        """Return the engines of all traces, sorted."""
        return sorted({engine for engines in self._engines for engine in engines})

    def find(self, wanted: Filter, order: str, *, descending: bool) -> _Rows:
        """Return the rows of the chosen traces in an order; those that are equal, newest first.

        Args:
            wanted: chosen traces.
            order: one of `ORDERS`. Traces without a coverage or a version come last.
            descending: whether the largest come first.
        """
        columns = self._used
        chosen = columns["there"].copy()
        if wanted.state is not None:
            chosen &= columns["state"] == _STATE_NUMBERS[wanted.state]
        if wanted.ended:
            chosen &= columns["state"] != _RUNNING
        if wanted.reason is not None:
            chosen &= columns["missing"][:, _REASON_NUMBERS[wanted.reason]] > 0
        if wanted.versions is not None:
            first, last = wanted.versions
            chosen &= columns["has_version"]
            chosen &= (columns["highest"] >= first) & (columns["lowest"] <= last)
        if wanted.below is not None:
            chosen &= columns["coverage"] < wanted.below  # False for nan
        rows = np.flatnonzero(chosen)
        if wanted.engine or wanted.labels or wanted.text:
            rows = np.array([row for row in rows.tolist() if self._has(row, wanted)], np.intp)
        return self._ordered(rows, order, descending=descending)

    def newest(self, wanted: Filter, most_tokens: int, most_traces: int) -> list[Ended]:
        """Return the chosen traces that ended last, until they have so many rows or are so many.

        Args:
            wanted: chosen traces, all of which have ended.
            most_tokens: rows of the traces before from which none is added.
            most_traces: number of traces.
        """
        rows = self.find(wanted, "updated", descending=True)[:most_traces]
        counts = self._used["rows"][rows]
        rows = rows[np.cumsum(counts) - counts < most_tokens]
        return [self._ended(row) for row in rows.tolist()]

    def _ended(self, row: int) -> Ended:
        column = self._used[row]
        weights = (int(column["lowest"]), int(column["highest"])) if column["has_version"] else ()
        return Ended(self._ids[row], int(column["rows"]), weights, float(column["updated"]))

    def _has(self, row: int, wanted: Filter) -> bool:
        return (
            (not wanted.engine or wanted.engine in self._engines[row])
            and wanted.text in self._ids[row]
            and all(label in self._labels[row] for label in wanted.labels)
        )

    def _ordered(self, rows: _Rows, order: str, *, descending: bool) -> _Rows:
        columns = self._used[rows]
        if order == "id":
            ids = [self._ids[row] for row in rows.tolist()]
            return rows[sorted(range(len(rows)), key=ids.__getitem__, reverse=descending)]
        key: npt.NDArray[Any]
        match order:
            case "coverage":
                key, last = columns["coverage"], np.isnan(columns["coverage"])
            case "version":
                key, last = columns["highest"], ~columns["has_version"]
            case "missing":
                key, last = columns["missing"].sum(axis=1), np.zeros(len(rows), np.bool_)
            case _:
                key, last = columns[order], np.zeros(len(rows), np.bool_)
        # Numbers by size, as the lowest int64 has no negative.
        _, size = np.unique(key, return_inverse=True)
        size = size.reshape(-1)
        return rows[np.lexsort((-columns["updated"], -size if descending else size, last))]

    def shown(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        """Return rows as JSON; one that was removed has its id alone."""
        return [self._shown(row) for row in rows]

    def _shown(self, row: int) -> dict[str, Any]:
        column = self._used[row]
        if not column["there"]:
            return {"trace_id": self._ids[row], "state": "gone"}
        missing = column["missing"]
        running = column["state"] == _RUNNING
        cells = int(missing.sum())
        return {
            "trace_id": self._ids[row],
            "state": STATES[column["state"]].value,
            "coverage": None
            if running
            else share_of(int(column["cells"]) - cells, int(column["cells"])),
            "missing_cells": cells,
            "reason": REASONS[missing.argmax()].value if cells else None,
            "num_tokens": int(column["tokens"]) or None,
            "num_rows": int(column["rows"]),
            "weights": (
                [exact(int(column["lowest"])), exact(int(column["highest"]))]
                if column["has_version"]
                else None
            ),
            "engines": list(self._engines[row]),
            "labels": dict(self._labels[row]),
            "created": float(column["created"]),
            "updated": float(column["updated"]),
        }

    # ------------------------------------------------------------------ private

    @property
    def _used(self) -> npt.NDArray[Any]:
        return self._columns[: self._size]

    def _append(self, trace_id: str) -> int:
        if self._size == len(self._columns):
            self._columns = np.concatenate([self._columns, _columns(self._size)])
        self._size += 1
        self._ids.append(trace_id)
        self._labels.append(())
        self._engines.append(())
        return self._size - 1

    def _pack(self) -> None:
        """Give the rows that are left the lowest numbers."""
        rows = np.flatnonzero(self._used["there"])
        self._columns = np.concatenate([self._columns[rows], _columns(_FIRST_ROOM)])
        kept = rows.tolist()
        self._ids = [self._ids[row] for row in kept]
        self._labels = [self._labels[row] for row in kept]
        self._engines = [self._engines[row] for row in kept]
        self._known_engines = {engines: engines for engines in self._engines}
        self._numbers = {trace_id: row for row, trace_id in enumerate(self._ids)}
        self._size = len(kept)
        self.generation += 1


def share_of(part: int, whole: int) -> float:
    """Return a share, 1 of nothing; one that is not all is less than 1."""
    return 1.0 if part == whole else min(part / whole, float(np.nextafter(1, 0)))


def _columns(rows: int) -> npt.NDArray[Any]:
    return np.zeros(
        rows,
        [
            ("there", "?"),
            ("state", "u1"),
            ("version", "i8"),
            ("tokens", "i8"),
            ("rows", "i8"),
            ("cells", "i8"),
            ("missing", "i8", len(REASONS)),
            ("coverage", "f8"),
            ("has_version", "?"),
            ("lowest", "i8"),
            ("highest", "i8"),
            ("created", "f8"),
            ("updated", "f8"),
        ],
    )
