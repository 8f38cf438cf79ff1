"""Compares what readers get with what is true, cell by cell."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt

from oracle.cluster import Cluster
from oracle.truth import NOBODY, Expected, Policy, PrefixRows
from routetrace.client import (
    FetchPlan,
    MicroBatch,
    Rank,
    ReadOptions,
    RouteClient,
    Sample,
    Segment,
    Trace,
    TraceState,
)
from routetrace.client._core import calls as _calls
from routetrace.client._core.batch import together
from routetrace.client._core.steps import Plan
from routetrace.codec.records import UNKNOWN_VERSION
from routetrace.common.errors import NotFound, RouteTraceError

Bools = npt.NDArray[np.bool_]


class Wrong(AssertionError):
    """What was read is not what happened."""


@dataclass
class Tally:
    """What was compared."""

    cells: int = 0
    """Cells of all reads: valid ones, and missing ones with their reasons."""
    missing: int = 0
    """Those that were missing."""
    prefix_rows: int = 0
    """Rows of all reads that stood in for others."""
    weighed_rows: int = 0
    """Those of which the world knows the weights behind the KV that they stood in for."""
    handed_rows: int = 0
    """Rows of all reads that are behind a hand-over."""
    lawful_rows: int = 0
    """Rows of all reads that were looked up in the world's own book-keeping of passes."""
    ambiguous: int = 0
    """Missing cells whose owner is ambiguous."""
    otherwise: int = 0
    """Reads along a chain that is not the callers'."""
    reads: int = 0
    traces: int = 0

    def __iadd__(self, other: Tally) -> Tally:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)
        return self


@dataclass(frozen=True)
class _Read:
    """What was asked."""

    trace_id: str
    policy: Policy
    weight_version: int | None = None
    incarnation: int | None = None
    prefix_rows: PrefixRows = "never"

    def __str__(self) -> str:
        which = "default incarnation" if self.incarnation is None else f"#{self.incarnation}"
        version = "" if self.weight_version is None else f", weights {self.weight_version} only"
        return f"trace {self.trace_id!r}, {which}, {self.policy}{version}, {self.prefix_rows}"

    def get(self, client: RouteClient, **part: Any) -> Trace:
        """The answer, with missing cells masked; only `part` of it, if that is named.

        Raises:
            NotFound: if there is no such trace or incarnation.
        """
        return client.get(
            self.trace_id, incarnation=self.incarnation, options=self._options, **part
        )

    def plan(self, client: RouteClient) -> Plan[Trace]:
        """The same, to be carried out together with others."""
        return _calls.get(
            client._config,
            self.trace_id,
            self._options,
            layer_ids=None,
            token_start=0,
            token_stop=None,
            incarnation=self.incarnation,
            pin_memory=False,
        )

    @property
    def _options(self) -> ReadOptions:
        return ReadOptions(
            missing="mask",
            policy=self.policy,
            weight_version=self.weight_version,
            prefix_rows=self.prefix_rows,
        )


class Comparer:
    """Reads traces of a cluster and compares them.

    Args:
        client: whom to ask.
        cluster: who knows.
        rng: what is left to chance.
        settled: whether everything has ended: agents that are gone count as lost.
    """

    def __init__(
        self, client: RouteClient, cluster: Cluster, rng: random.Random, *, settled: bool
    ) -> None:
        self._client = client
        self._cluster = cluster
        self._rng = rng
        self._settled = settled
        self._asked = 0

    def all(self) -> Tally:
        """Compares all traces.

        Raises:
            Wrong: if one differs.
        """
        return self._each(self._cluster.traces())

    def blocks(self) -> Tally:
        """Compares what slots name with what is true of them.

        Raises:
            Wrong: if one differs.
        """
        tally = Tally()
        for engine in self._cluster.engines:
            held = engine.held()
            for blocks, numbers in self._rng.sample(held, min(len(held), 3)):
                who = engine.spec.engine_id
                found = self._client.get_blocks(who, blocks, len(numbers), missing="mask")
                columns = found.layout.columns(list(found.layer_ids))
                held_by = np.isin(engine.layout.columns(list(found.layer_ids)), engine.columns)
                known = (numbers != NOBODY)[:, None] & held_by
                ids = self._cluster.store.cells(numbers[:, None].repeat(len(columns), 1))
                same = (found.topk_ids == ids).all(axis=2)
                wrong = (found.valid != known) | (known & ~same)
                if wrong.any():
                    at, column = np.argwhere(wrong)[0].tolist()
                    raise Wrong(
                        f"blocks {blocks} of {who}: slot {at}, layer {found.layer_ids[column]} is "
                        f"{'known' if found.valid[at, column] else 'unknown'}, expected row "
                        f"{numbers[at]}"
                    )
                tally += Tally(cells=known.size, missing=int((~known).sum()), reads=1)
        return tally

    def some(self, most: int) -> Tally:
        """Compares some traces, half of them such that run, if there are any; as `all`."""
        running, others = [], []
        for name in self._cluster.traces():
            unsure = any(e.uncertain for e in self._cluster.expected(name, "as_sampled"))
            (running if unsure else others).append(name)
        chosen = self._rng.sample(running, min(len(running), most // 2))
        chosen += self._rng.sample(others, min(len(others), most - len(chosen)))
        return self._each(chosen)

    def _each(self, trace_ids: Sequence[str]) -> Tally:
        tally = Tally()
        for trace_id in trace_ids:
            tally += self.trace(trace_id)
        return tally

    def trace(self, trace_id: str) -> Tally:
        """Compares one trace, as everyone may read it."""
        tally = Tally(traces=1)
        whole = self._cluster.expected(trace_id, "as_sampled")
        found = {int(v) for e in whole for v in np.unique(e.versions[e.known])}
        versions = sorted(found - {UNKNOWN_VERSION})
        asked = self._rng.sample(versions, min(len(versions), 2))
        policies: tuple[Policy, ...] = ("as_sampled", "latest")
        for read in (
            *(_Read(trace_id, policy) for policy in policies),
            *(_Read(trace_id, self._rng.choice(policies), version) for version in asked),
        ):
            tally += self._incarnations(read, whole)
        if not all(e.known.all() for e in whole):
            choices: tuple[PrefixRows, ...] = ("unique", "any")
            for prefix_rows in choices:
                version = self._rng.choice((None, *asked))
                policy = self._rng.choice(policies)
                whole = self._cluster.expected(trace_id, "as_sampled", None, prefix_rows)
                read = _Read(trace_id, policy, version, prefix_rows=prefix_rows)
                tally += self._incarnations(read, whole)
        return tally

    def _incarnations(self, read: _Read, whole: Sequence[Expected]) -> Tally:
        """Compares every incarnation under one policy.

        Args:
            read: of the default incarnation.
            whole: what is expected as sampled, of any weight version.
        """
        tally = Tally()
        expected = self._cluster.expected(
            read.trace_id, read.policy, read.weight_version, read.prefix_rows
        )
        if [e.number for e in expected] != [e.number for e in whole]:
            raise Wrong(f"{read}: the oracle contradicts itself")
        pairs = list(zip(expected, whole, strict=True))
        certain = not any(e.uncertain or not e.number for e in expected)
        count = sum(e.counted for e in expected)
        numbers = range(1, len(expected) + 2)
        if (read.policy, read.weight_version, read.prefix_rows) != (
            "as_sampled", None, "never",
        ):  # fmt: skip
            numbers = sorted(self._rng.sample(numbers, min(len(numbers), 3)))
        reads = [replace(read, incarnation=number) for number in (None, *numbers)]
        for one, trace in zip(reads, self._answers(reads), strict=False):
            number = one.incarnation
            if isinstance(trace, NotFound):
                if certain and number != len(expected) + 1:
                    raise Wrong(f"{one}: not found, of {len(expected)} requests") from None
                break
            if number is not None and number > len(expected):
                raise Wrong(f"{one}: there is one, of {len(expected)} requests")
            if certain:
                wanted = {number} if number else _default(whole)
                if trace.incarnation not in wanted or trace.num_incarnations != count:
                    raise Wrong(
                        f"{one}: incarnation {trace.incarnation} of {trace.num_incarnations}, "
                        f"expected {wanted} of {count}"
                    )
            named = [p for p in pairs if p[0].number == trace.incarnation]
            tally += self._one(one, trace, named or [p for p in pairs if not p[0].number])
            if number is None and len(trace):
                tally += self._part(one, trace)
                tally += self._planned(one, trace)
                if self._settled and (one.weight_version, one.prefix_rows) == (
                    None,
                    "never",
                ):
                    self._described(one, trace, named[0][0] if named else None)
        return tally

    def _answers(self, reads: Sequence[_Read]) -> Iterator[Trace | NotFound]:
        """The answers to reads, or that there is none; every second time of one stream."""
        self._asked += 1
        if self._asked % 2:
            plan = together(self._client._config, [read.plan(self._client) for read in reads])
            with closing(self._client._driver.run(plan)) as answers:
                for answer in answers:
                    if isinstance(answer, RouteTraceError) and not isinstance(answer, NotFound):
                        raise answer
                    yield answer
            return
        for read in reads:
            try:
                answer = read.get(self._client)
            except NotFound as error:  # noqa: PERF203
                yield error
            else:
                yield answer

    def _part(self, read: _Read, trace: Trace) -> Tally:
        """Reads some rows and layers of a trace alone; the whole of it was right."""
        start = self._rng.randrange(len(trace))
        stop = self._rng.randint(start + 1, len(trace))
        layer_ids = trace.layer_ids
        layer_ids = tuple(sorted(self._rng.sample(layer_ids, self._rng.randint(1, len(layer_ids)))))
        part = read.get(self._client, layer_ids=layer_ids, token_start=start, token_stop=stop)
        wanted = trace.tokens(start, stop).layers(layer_ids)
        if not (
            np.array_equal(part.valid, wanted.valid)
            and np.array_equal(part.topk_ids[part.valid], wanted.topk_ids[wanted.valid])
        ):
            raise Wrong(f"{read}: rows [{start}, {stop}) of layers {layer_ids}, read alone, differ")
        return Tally(cells=part.valid.size, missing=int((~part.valid).sum()), reads=1)

    def _planned(self, read: _Read, trace: Trace) -> Tally:
        """Reads what a context-parallel rank has of a trace; the whole of it was right."""
        rng, layer_ids = self._rng, trace.layer_ids
        size = rng.randint(1, 3)
        rank = Rank(
            sorted(rng.sample(layer_ids, rng.randint(1, len(layer_ids)))),
            cp_size=size,
            cp_rank=rng.randrange(size),
        )
        rows = Segment(read.trace_id, 0, len(trace), incarnation=read.incarnation)
        batch = MicroBatch.packed([Sample(len(trace), (rows,))], align=2 * size)
        plan = FetchPlan.make(trace.layout, batch, rank)
        got = self._client.fetch(
            plan,
            missing="mask",
            policy=read.policy,
            weight_version=read.weight_version,
            prefix_rows=read.prefix_rows,
        )
        tokens = plan.position_of[plan.planned]
        columns = [layer_ids.index(i) for i in rank.layer_ids]
        valid = trace.valid[tokens][:, columns].T
        ids = trace.topk_ids[tokens][:, columns].transpose(1, 0, 2)
        if not (
            np.array_equal(got.valid[:, plan.planned], valid)
            and not got.valid[:, ~plan.planned].any()
            and np.array_equal(got.topk_ids[:, plan.planned][valid], ids[valid])
        ):
            raise Wrong(f"{read}: as {rank} has it, differs")
        stands_in = np.isin(plan.position_of, [*_stand_ins(trace)]) & plan.planned
        proven = int((got.valid.all(axis=0) & ~stands_in).sum())
        if got.proven != proven:
            raise Wrong(f"{read}: as {rank} has it, {got.proven} are proven, expected {proven}")
        return Tally(cells=valid.size, missing=int((~valid).sum()), reads=1)

    def _described(self, read: _Read, trace: Trace, expected: Expected | None) -> None:
        """Compares the origins of a trace whose rows were correct."""
        if read.policy == "as_sampled":
            stat = self._client.stat(read.trace_id, incarnation=trace.incarnation)
            if stat.proven != trace.proven:
                raise Wrong(f"{read}: {trace.proven} rows are proven, and {stat.proven} by stat")
        described = self._client.describe(
            read.trace_id, incarnation=trace.incarnation, policy=read.policy
        )
        there = np.zeros(trace.valid.shape, np.bool_)
        versions = np.zeros(trace.valid.shape, np.int64)
        told: list[set[str]] = [set() for _ in range(len(trace))]
        columns = {layer: i for i, layer in enumerate(trace.layer_ids)}
        for one in described.origins:
            here = slice(one.start, one.stop), [columns[layer] for layer in one.layer_ids]
            if there[here].any():
                raise Wrong(f"{read}: {one} is not the only origin of its cells")
            if read.policy == "as_sampled" and one.engine_id not in trace.engine_ids:
                raise Wrong(f"{read}: {one}; engines are {trace.engine_ids}")
            there[here], versions[here] = True, _number(one.weight_version)
            for names in told[one.start : one.stop]:
                names.add(one.source)
        if (there != trace.valid).any():
            position, column = np.argwhere(there != trace.valid)[0].tolist()
            has = "an" if there[position, column] else "no"
            raise Wrong(
                f"{read}: position {position}, layer {trace.layer_ids[column]} has {has} origin"
            )
        sources: list[set[str]] = [set() for _ in range(len(trace))]
        for start, stop, source in trace.provenance:
            for names in sources[start:stop]:
                names.add(source)
        if told != sources:
            raise Wrong(f"{read}: sources {told} differ from the provenance {sources}")
        if expected is not None and not expected.uncertain:
            known = expected.known[: len(trace)] & there
            if (versions != expected.versions[: len(trace)])[known].any():
                raise Wrong(f"{read}: weight versions of the origins differ")

    def _one(self, read: _Read, trace: Trace, admitted: list[tuple[Expected, Expected]]) -> Tally:
        """Compares one answer with those that it may be: it must be one of them as a whole."""
        problems = []
        for expected, whole in admitted:
            problem = self._differs(trace, expected, whole)
            if not problem:
                num_missing = int((~trace.valid).sum())
                named = [(b - a, name) for a, b, name in trace.provenance]
                return Tally(
                    trace.valid.size,
                    num_missing,
                    prefix_rows=sum(n for n, name in named if name == "prefix"),
                    weighed_rows=sum(
                        NOBODY not in expected.stood_for.get(p, {NOBODY}) for p in _stand_ins(trace)
                    ),
                    handed_rows=sum(n for n, name in named if name == "handoff"),
                    lawful_rows=sum(bool(expected.makers(p)) for p in range(len(trace))),
                    ambiguous=sum(
                        (m.stop - m.start) * len(m.layer_ids)
                        for m in trace.missing
                        if m.reason == "ambiguous"
                    ),
                    otherwise=expected.otherwise,
                    reads=1,
                )
            problems.append(problem)
        raise Wrong(f"{read}: " + ("; or ".join(problems) or "nothing of the kind is expected"))

    # ------------------------------------------------------------------ one answer

    def _differs(self, trace: Trace, expected: Expected, whole: Expected) -> str:
        """What is wrong with an answer; "" if nothing is."""
        n, told = len(trace), trace.num_tokens or 0
        if (trace.token_start, n) != (0, trace.num_rows):
            return f"rows [{trace.token_start}, {trace.token_stop}) of {trace.num_rows}"
        if expected.uncertain:
            if n > expected.num_rows or told not in (0, expected.num_tokens):
                return (
                    f"{told} tokens and {n} rows, expected at most "
                    f"{expected.num_tokens} and {expected.num_rows}"
                )
        elif (told, n) != (expected.num_tokens, expected.num_rows):
            return (
                f"{told} tokens and {n} rows, expected {expected.num_tokens} "
                f"and {expected.num_rows}"
            )
        return (
            self._state_differs(trace, whole)
            or self._cells_differ(trace, expected)
            or self._against_the_law(trace, expected)
            or self._of_other_weights(trace, expected)
            or _proven_differs(trace)
            or _provenance_differs(trace, expected)
            or _versions_differ(trace, expected)
            or _origins_differ(trace, expected)
            or _reasons_differ(trace, expected)
        )

    def _state_differs(self, trace: Trace, whole: Expected) -> str:
        complete = bool(whole.num_tokens and (whole.uncertain or whole.there.all()))
        may_be = bool(whole.num_tokens and whole.possible.all())
        allowed = {TraceState.COMPLETE} if complete or may_be else set()
        if whole.uncertain or not complete:
            allowed |= {TraceState.INCOMPLETE}
            allowed |= set() if self._settled else {TraceState.RUNNING}
        if trace.state not in allowed:
            return f"{trace.state.value}, expected {' or '.join(s.value for s in allowed)}"
        return ""

    def _cells_differ(self, trace: Trace, expected: Expected) -> str:
        n = len(trace)
        known, valid = expected.known[:n], trace.valid
        wrong = (trace.topk_ids != expected.ids[:n]).any(axis=2) & valid & known
        wrong |= valid & ~known
        if not expected.uncertain:
            wrong |= expected.there[:n] & ~valid
        for position, column in np.argwhere(wrong).tolist():
            if trace.valid[position, column] and any(
                np.array_equal(ids, trace.topk_ids[position, column])
                for ids, _ in expected.candidates(position, column)
            ):
                continue
            return self._cell(trace, expected, position, column)
        return ""

    def _against_the_law(self, trace: Trace, expected: Expected) -> str:
        """A row must be that of a pass behind the KV which its owner sampled from."""
        stands_in = _stand_ins(trace)
        for position, valid in enumerate(trace.valid):
            makers = expected.makers(position)
            if not makers or position in stands_in or not valid.any():
                continue
            rows = self._cluster.store.rows(np.array(makers))
            same = (rows == trace.topk_ids[position]).all(axis=2)[:, valid]
            # Of requests that run, layers of one row may be of several attempts (rows.md, 5).
            if not (same.any(axis=0).all() if expected.uncertain else same.all(axis=1).any()):
                column = int(valid.argmax())
                return (
                    f"against the law: {self._cell(trace, expected, position, column)}; the passes "
                    f"behind its KV chose {rows[:, column].tolist()}"
                )
        return ""

    def _of_other_weights(self, trace: Trace, expected: Expected) -> str:
        """A row that stands in must be of the weights that did make the KV, by the world's word."""
        for position in _stand_ins(trace):
            weights = expected.stood_for.get(position, {NOBODY})
            if NOBODY in weights or not weights:
                continue
            column = int(trace.valid[position].argmax())
            served = {
                int(self._cluster.store.weights[n])
                for n in expected.prefix[position]
                if np.array_equal(expected.row(n, column)[0], trace.topk_ids[position, column])
            }
            if not (served & weights if expected.uncertain else served <= weights == served):
                return (
                    f"against the law: {self._cell(trace, expected, position, column)} and stands "
                    f"in for KV of weights {sorted(weights)}, but is of {sorted(served)}"
                )
        return ""

    def _cell(self, trace: Trace, expected: Expected, position: int, column: int) -> str:
        """Describes a cell that is wrong."""
        if trace.valid[position, column]:
            ids = trace.topk_ids[position, column]
            served = f"{ids.tolist()}, which {self._origin(trace, position)}"
        else:
            served = f"missing ({_reason(trace, position, column)})"
        wanted = "missing (" + " or ".join(sorted(expected.reasons[position, column])) + ")"
        if expected.known[position, column]:
            wanted = (
                f"{expected.ids[position, column].tolist()} "
                f"of weights {expected.versions[position, column]}"
            )
        return (
            f"position {position} of {len(trace)}, layer {trace.layer_ids[column]} is {served}; "
            f"expected {wanted}"
        )

    def _origin(self, trace: Trace, position: int) -> str:
        """Where the cluster knows a row from: the places that have most of its cells."""
        places: list[tuple[int, str]] = []
        for trace_id in self._cluster.traces():
            for expected in self._cluster.expected(trace_id, "as_sampled"):
                same = (expected.ids == trace.topk_ids[position]).all(axis=2) & expected.known
                same &= trace.valid[position]
                places += [
                    (int(same[p].sum()), f"{trace_id}#{expected.number}[{p}]")
                    for p in np.flatnonzero(same.any(axis=1)).tolist()
                ]
        most = max((count for count, _ in places), default=0)
        if not most:
            return "nobody computed"
        names = [name for count, name in places if count == most]
        return f"({most} of the row's cells) was computed for {', '.join(names[:3])}"


def _default(whole: Sequence[Expected]) -> set[int]:
    """The number of the newest incarnation that is complete and was not aborted, else of the
    newest; those that may be it."""
    counted = [e for e in whole if e.counted]
    ended = [e for e in counted if e.num_tokens and not e.aborted]
    complete = [e.number for e in ended if e.there.all()]
    surely = max(complete or [e.number for e in counted])
    least = max(complete, default=0)
    possibly = (e.number for e in ended if e.possible.all())
    return {surely, *(number for number in possibly if number > least)}


def _number(version: int | None) -> int:
    """A weight version as the store of rows has it."""
    return UNKNOWN_VERSION if version is None else version


def _stand_ins(trace: Trace) -> set[int]:
    """Positions with rows that stand in."""
    return {p for a, b, name in trace.provenance if name == "prefix" for p in range(a, b)}


def _proven_differs(trace: Trace) -> str:
    """Compares the number of rows that are of the pass itself."""
    proven = {p for p in range(len(trace)) if trace.valid[p].all()} - _stand_ins(trace)
    if trace.proven != len(proven):
        return f"{trace.proven} rows are proven, expected {len(proven)}"
    return ""


def _provenance_differs(trace: Trace, expected: Expected) -> str:
    """Compares the provenance of rows; other checks compare rows that stand in."""
    told: list[set[str]] = [set() for _ in range(len(trace))]
    for start, stop, name in trace.provenance:
        for names in told[start:stop]:
            names.add(name)
    for position, source in enumerate(expected.sources[: len(trace)]):
        if source and told[position] != {source}:
            return (
                f"position {position} of {len(trace)} has the provenance "
                f"{' and '.join(sorted(told[position]))}, expected {source}"
            )
    return ""


def _versions_differ(trace: Trace, expected: Expected) -> str:
    """Compares the weight versions that are told of each position."""
    n = len(trace)
    told: dict[int, Bools] = {}
    for start, stop, given in trace.weight_versions:
        told.setdefault(_number(given), np.zeros(n, np.bool_))[start:stop] = True
    for version in {*told, *np.unique(expected.versions[expected.known]).tolist()}:
        here = told.get(version, np.zeros(n, np.bool_))
        match = expected.versions[:n] == version
        # Some valid cell must be of this version; where it is, the version must be told.
        certain = (match & expected.known[:n] & trace.valid).any(axis=1)
        wrong = here != certain
        for p in expected.prefix:
            if p < n and not expected.known[p].any():
                wrong[p] = here[p] and version not in _possible_versions(expected, p)
        if expected.uncertain:
            wrong = np.array(
                [here[p] and version not in _possible_versions(expected, p) for p in range(n)],
                np.bool_,
            )
        if wrong.any():
            position = int(wrong.argmax())
            return (
                f"position {position} of {n} is {'' if here[position] else 'not '}of weights "
                f"{version}; expected {sorted(_possible_versions(expected, position))}"
            )
    return ""


def _origins_differ(trace: Trace, expected: Expected) -> str:
    """Compares where rows that stand in are told to be from."""
    marked: set[int] = set()
    for start, stop, trace_id in trace.prefix_sources:
        for position in range(start, stop):
            marked.add(position)
            numbers = [n for n, of in expected.prefix.get(position, {}).items() if of == trace_id]
            if not any(
                trace.valid[position, column]
                and np.array_equal(expected.row(n, column)[0], trace.topk_ids[position, column])
                for n in numbers
                for column in range(trace.valid.shape[1])
            ):
                return f"position {position} is not of trace {trace_id!r}"
    told = _stand_ins(trace)
    if told != marked:
        return f"positions {sorted(told ^ marked)} are of no trace, or of one that is not told"
    unmarked = [p for p in expected.prefix if p < len(trace) and trace.valid[p].all()]
    if not expected.uncertain and not marked.issuperset(unmarked):
        return f"positions {sorted({*unmarked} - marked)} are of another trace, which is not told"
    return ""


def _possible_versions(expected: Expected, position: int) -> set[int]:
    versions = set(expected.versions[position][expected.known[position]].tolist())
    for column in range(expected.known.shape[1]):
        versions.update(v for _, v in expected.candidates(position, column))
    return versions


def _reasons_differ(trace: Trace, expected: Expected) -> str:
    """Compares the reasons of missing cells."""
    columns = {layer: i for i, layer in enumerate(trace.layer_ids)}
    for m in trace.missing:
        here = slice(m.start, m.stop), [columns[layer] for layer in m.layer_ids]
        # A cell that could have come was looked at before.
        allowed = expected.reasons[here][~expected.known[here]]
        if all(m.reason in reasons for reasons in set(allowed.tolist())):
            continue
        for position, layer in product(range(m.start, m.stop), m.layer_ids):
            reasons = expected.reasons[position, columns[layer]]
            if not expected.known[position, columns[layer]] and m.reason not in reasons:
                return (
                    f"position {position} of {len(trace)}, layer {layer} is missing with "
                    f"{m.reason}; expected {' or '.join(sorted(reasons))}"
                )
    return ""


def _reason(trace: Trace, position: int, column: int) -> str:
    layer = trace.layer_ids[column]
    return next(
        m.reason for m in trace.missing if m.start <= position < m.stop and layer in m.layer_ids
    )
