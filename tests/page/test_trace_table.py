"""The table of traces against lists of their summaries: filters, orders, totals, and removals."""

from __future__ import annotations

import math
from datetime import datetime, timedelta, timezone
from itertools import pairwise
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from routetrace.client import MissingReason, TraceState, TraceSummary
from routetrace.page import trace_table
from routetrace.page.trace_table import ORDERS, Filter, TraceTable, share_of

BEGIN = datetime(2026, 1, 1, tzinfo=timezone.utc)
IDS = [f"t{n}" for n in range(12)]
ENGINES = ("e0", "e1")
LABELS = ("a", "b")


_ids = st.sampled_from(IDS)


@st.composite
def summaries(draw: Any, ids: Any = _ids) -> TraceSummary:
    state = draw(st.sampled_from([*TraceState]))
    cells = 0 if state is TraceState.RUNNING else draw(st.integers(0, 1000))
    missing: dict[str, int] = {}
    if state is TraceState.INCOMPLETE and cells:
        for reason in draw(st.sets(st.sampled_from([*MissingReason]), max_size=3)):
            missing[reason] = draw(st.integers(1, max(1, cells // 4)))
    version = draw(st.none() | st.sampled_from([-(2**63), -1, 0, 5, 2**53, 2**63 - 1]))
    return TraceSummary(
        trace_id=draw(ids),
        state=state,
        num_tokens=draw(st.none() | st.integers(1, 50)),
        num_rows=draw(st.integers(0, 50)),
        num_cells=max(cells, sum(missing.values())),
        missing_cells=missing,
        engine_ids=tuple(sorted(draw(st.sets(st.sampled_from(ENGINES))))),
        labels=draw(st.dictionaries(st.sampled_from(LABELS), st.sampled_from("xy"))),
        min_weight_version=version,
        max_weight_version=version,
        finish_reason=None,
        num_incarnations=1,
        created_at=BEGIN + timedelta(seconds=draw(st.integers(0, 9))),
        updated_at=BEGIN + timedelta(seconds=draw(st.integers(0, 9))),
        expires_at=BEGIN,
        stored_bytes=0,
    )


filters = st.builds(
    Filter,
    state=st.none() | st.sampled_from([*TraceState]),
    reason=st.none() | st.sampled_from([*MissingReason]),
    engine=st.sampled_from(("", *ENGINES, "other")),
    versions=st.none() | st.sampled_from([(-1, 0), (0, 5), (-(2**63), 2**63 - 1), (6, 2**53)]),
    below=st.none() | st.sampled_from([0.0, 0.5, 1.0]),
    labels=st.lists(st.tuples(st.sampled_from(LABELS), st.sampled_from("xy")), max_size=2).map(
        tuple
    ),
    text=st.sampled_from(("", "t1", "1", "none")),
    ended=st.booleans(),
)


def chosen(summary: TraceSummary, wanted: Filter) -> bool:
    """As docs/page.md has the filters."""
    low, high = summary.min_weight_version, summary.max_weight_version
    return (
        (wanted.state is None or summary.state is wanted.state)
        and (wanted.reason is None or wanted.reason in summary.missing_cells)
        and (not wanted.engine or wanted.engine in summary.engine_ids)
        and (
            wanted.versions is None
            or (
                low is not None
                and high is not None
                and high >= wanted.versions[0]
                and low <= wanted.versions[1]
            )
        )
        and (
            wanted.below is None
            or (summary.coverage is not None and summary.coverage < wanted.below)
        )
        and all(summary.labels.get(name) == value for name, value in wanted.labels)
        and wanted.text in summary.trace_id
        and not (wanted.ended and summary.state is TraceState.RUNNING)
    )


def key(summary: TraceSummary, order: str) -> Any:
    """The value that an order goes by; None comes last."""
    return {
        "updated": summary.updated_at,
        "created": summary.created_at,
        "tokens": summary.num_tokens or 0,
        "coverage": summary.coverage,
        "version": summary.max_weight_version,
        "missing": sum(summary.missing_cells.values()),
        "id": summary.trace_id,
    }[order]


class Tables(RuleBasedStateMachine):
    """Traces come, change and go in both."""

    def __init__(self) -> None:
        super().__init__()
        self.table = TraceTable()
        self.known: dict[str, TraceSummary] = {}
        self.changed: dict[str, int] = {}

    @rule(summary=summaries())
    def put(self, summary: TraceSummary) -> None:
        self.table.put(summary)
        self.known[summary.trace_id] = summary
        self.changed[summary.trace_id] = self.table.version

    @rule(trace_id=st.sampled_from(IDS))
    def remove(self, trace_id: str) -> None:
        self.table.remove(trace_id)
        self.known.pop(trace_id, None)
        self.changed.pop(trace_id, None)

    @precondition(lambda self: self.known)
    @rule(wanted=filters, order=st.sampled_from(ORDERS), descending=st.booleans())
    def find(self, wanted: Filter, order: str, descending: bool) -> None:
        rows = self.table.find(wanted, order, descending=descending)
        found = [shown["trace_id"] for shown in self.table.shown(rows.tolist())]
        expected = {name for name, one in self.known.items() if chosen(one, wanted)}
        assert sorted(found) == sorted(expected)
        keys = [key(self.known[name], order) for name in found]
        there = [one for one in keys if one is not None]
        assert keys == there + [None] * (len(keys) - len(there)), "those without come last"
        assert there == sorted(there, reverse=descending)
        if order != "id":
            for one, other in pairwise(found):
                if key(self.known[one], order) == key(self.known[other], order):
                    assert self.known[one].updated_at >= self.known[other].updated_at

    @precondition(lambda self: self.known)
    @rule(tokens=st.integers(0, 200), traces=st.integers(1, 5))
    def newest(self, tokens: int, traces: int) -> None:
        wanted = Filter(ended=True)
        found = self.table.newest(wanted, tokens, traces)
        known = [one for one in self.known.values() if chosen(one, wanted)]
        known.sort(key=lambda one: one.updated_at, reverse=True)
        assert len({one.trace_id for one in found}) == len(found) <= traces
        for one in found:
            summary = self.known[one.trace_id]
            low, high = summary.min_weight_version, summary.max_weight_version
            assert one.num_rows == summary.num_rows
            assert one.weights == (() if low is None else (low, high))
            assert one.updated == summary.updated_at.timestamp()
        # The first ones of some order by the last change, up to the one that reaches the tokens.
        assert [one.updated for one in found] == [
            one.updated_at.timestamp() for one in known[: len(found)]
        ]
        rows = [one.num_rows for one in found]
        assert sum(rows[:-1]) < tokens or not found
        assert sum(rows) >= tokens or len(found) == min(traces, len(known))

    @invariant()
    def totals(self) -> None:
        found = self.table.totals()
        states = [one.state for one in self.known.values()]
        assert found["traces"] == {
            "total": len(self.known), **{state.value: states.count(state) for state in TraceState}
        }  # fmt: skip
        cells = sum(one.num_cells for one in self.known.values())
        missing: dict[str, int] = {}
        for one in self.known.values():
            for reason, number in one.missing_cells.items():
                missing[reason] = missing.get(reason, 0) + number
        assert found["cells"] == {"total": cells, "missing": missing}
        lacking = sum(missing.values())
        assert (found["coverage"] == 1) == (not lacking)
        assert math.isclose(found["coverage"], 1 - lacking / cells if cells else 1)
        assert len(self.table) == len(self.known)
        assert sorted(self.table.trace_ids) == sorted(self.known)
        assert self.table.engines() == sorted(
            {e for o in self.known.values() for e in o.engine_ids}
        )

    @invariant()
    def newer(self) -> None:
        for version in {0, self.table.version, *self.changed.values()}:
            expected = sum(at > version for at in self.changed.values())
            assert self.table.newer(version) == expected


TestTables = Tables.TestCase
TestTables.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@given(st.lists(summaries(st.uuids().map(str)), min_size=1, max_size=30), st.data())
@settings(max_examples=40, deadline=None)
def test_a_row_stays_itself_until_the_generation_changes(some: list[TraceSummary], data: Any):
    table = TraceTable()
    for summary in some:
        table.put(summary)
    rows = table.find(Filter(), "id", descending=False).tolist()
    ids = [shown["trace_id"] for shown in table.shown(rows)]
    gone = data.draw(st.sets(st.sampled_from(ids)))
    for trace_id in gone:
        table.remove(trace_id)
    shown = table.shown(rows)
    assert [one["trace_id"] for one in shown] == ids
    assert {one["trace_id"] for one in shown if one["state"] == "gone"} == gone
    assert table.generation == 0


def test_a_table_of_which_most_is_gone_is_packed(monkeypatch):
    monkeypatch.setattr(trace_table, "_MANY_REMOVED", 10)
    table = TraceTable()
    for number in range(40):
        table.put(_plain(f"t{number}"))
    for number in range(30):
        table.remove(f"t{number}")
    assert table.generation == 1
    assert table.trace_ids == [f"t{n}" for n in range(30, 40)]
    table.put(_plain("new"))
    rows = table.find(Filter(), "id", descending=True).tolist()
    assert [r["trace_id"] for r in table.shown(rows)] == [f"t{n}" for n in range(39, 29, -1)] + [
        "new"
    ]


def _plain(trace_id: str) -> TraceSummary:
    return TraceSummary(
        trace_id, TraceState.COMPLETE, 2, 1, 4, {}, (), {}, None, None, None, 1,
        BEGIN, BEGIN, BEGIN, 9,
    )  # fmt: skip


def test_a_share_that_is_not_all_is_never_1():
    assert share_of(10**18 - 1, 10**18) < 1
    assert share_of(10**18, 10**18) == share_of(0, 0) == 1
