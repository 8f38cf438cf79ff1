"""Rows that stand in, as the oracle has them: by the rules, and by what did make the KV."""

from __future__ import annotations

from typing import Any, get_args

import numpy as np
import pytest

from oracle.cluster import Stores
from oracle.engine import Chances
from oracle.kv_version import KvVersion
from oracle.stand_ins import add
from oracle.truth import NOBODY, Expected, Record, expected
from routetrace.codec.records import UNKNOWN_VERSION
from suites.test_oracle_engine import STORE, play, request, run

CHANCES = Chances(
    update=0.03, update_aborts=0.7, update_resets=0.6, reset=0.01, not_captured=0.003, abort=0.005
)


def known(*calls: str, cached: int = 0, external: int = 0, declared: bool = False) -> int | None:
    """The KV version after some calls: a number is that of new weights."""
    kv = KvVersion(declared)
    for call in calls:
        name, _, live = call.partition(" ")
        if name.isdigit() or name == "none":
            kv.version = int(name) if name.isdigit() else None
        elif name == "reset":
            kv.reset_prefix_cache(live=bool(live))
        elif name == "emptied":
            kv.reset_external_kv(live=bool(live))
        elif name == "load":
            kv.loaded()
        else:
            kv.ran(captured=name == "step")
    return kv.of(cached, external)


def test_the_kv_version_of_a_request_that_reuses_nothing_is_the_present_one():
    assert known() is None
    assert known("1", "skip", "step") == 1
    assert known("1", "none") is None


@pytest.mark.parametrize(
    ("calls", "version"),
    [
        ("1", None),
        ("1|reset", 1),
        ("reset|1", 1),
        ("1|reset|step|step", 1),
        ("1|step|reset|2|step", 2),
        ("1|reset|step|2", None),
        ("1|reset|step|2|step|1", None),
        ("1|reset|step|none|1", 1),
        ("1|reset|none|step|1", None),
        ("1|reset|skip", None),
        ("1|reset|skip|reset", 1),
        ("1|reset live", None),
        ("1|reset|reset live", None),
        ("1|reset live|reset", 1),
        ("1|emptied", None),
        ("1|reset|load", None),
        ("1|reset|emptied|load", 1),
        ("1|reset|load|emptied", None),
    ],
)
def test_the_kv_version_of_cached_tokens(calls: str, version: int | None):
    assert known(*calls.split("|"), cached=4) == version


@pytest.mark.parametrize(
    ("calls", "version"),
    [
        ("1|reset", None),
        ("1|emptied", None),
        ("1|emptied|reset", None),
        ("1|reset|emptied", 1),
        ("1|reset|step|emptied|load|step", 1),
        ("1|reset|emptied|skip", None),
        ("1|reset|emptied|step|2|step", None),
        ("1|reset|emptied|step|2|reset|emptied", 2),
        ("1|reset live|emptied", None),
        ("1|reset|emptied live", None),
        ("1|reset|step|2|emptied", None),
        ("1|reset|step|emptied|2", None),
        ("1|reset|none|step|emptied|1", None),
        ("1|reset|load|emptied", None),
    ],
)
def test_the_kv_version_of_external_tokens(calls: str, version: int | None):
    assert known(*calls.split("|"), external=4) == version
    declared = known(*calls.split("|"), external=4, declared=True)
    assert declared == (2 if "2" in calls else 1)


@pytest.mark.parametrize("stores", get_args(Stores))
def test_a_kv_version_that_the_rules_know_is_that_of_the_weights(stores: Stores):
    compared = 0
    for seed in range(4):
        cluster, _ = play(seed, 50, chances=CHANCES, stores=stores)
        known = (r for of in cluster.records.values() for r in of if r.kv_version is not None)
        for record in known:
            first = record.attempts[0]
            for position in np.flatnonzero(first.unknown[: record.prompt_len]).tolist():
                behind = first.behind(position, every=True) - {NOBODY}
                assert {int(cluster.store.weights[n]) for n in behind} <= {record.kv_version}
                compared += bool(behind)
    assert compared or stores == "apart"


# ---------------------------------------------------------------------------- by hand


def loaded(trace_id: str = "t", kv_version: int | None = 0, **facts: Any) -> Record:
    """A request of six tokens that loads the KV of the first four."""
    rows = dict.fromkeys(range(4)) | run(90, 4, 5)
    record = request([1, 2, 3, 4, 5, 6], 5, rows, external=4, kv_version=kv_version, **facts)
    record.trace_id = trace_id
    return record


def computed(trace_id: str, first: int, *more: int, barriers: int = 0, **facts: Any) -> Record:
    """A request that computes the same prompt, once in each attempt."""
    tokens = [1, 2, 3, 4, 5, 7]
    record = request(tokens, 5, *(run(n, 0, 5) for n in (first, *more)), **facts)
    record.trace_id, record.barriers = trace_id, barriers
    return record


def served(*requests: Record, prefix_rows: Any, version: int | None = None) -> Expected:
    """What stands in for the first of some requests."""
    traces: dict[str, list[Record]] = {}
    for one in requests:
        traces.setdefault(one.trace_id, []).append(one)
    reader = requests[0].trace_id
    answers = expected(traces[reader], STORE, "as_sampled", version)
    add(answers, reader, traces, STORE, prefix_rows, version)
    return answers[traces[reader].index(requests[0])]


def rows(*requests: Record, **options: Any) -> list[int | None]:
    """The row that must stand in at each of the first four positions."""
    e = served(*requests, **options)
    assert e.certain == {*e.prefix}
    found = [[*e.prefix.get(p, {None: ""})] for p in range(4)]
    assert all(len(one) == 1 for one in found)
    return [one for (one,) in found]


BOTH = ("unique", "any")
NONE = [None] * 4


@pytest.mark.parametrize("prefix_rows", BOTH)
def test_a_row_of_the_kv_version_stands_in(prefix_rows: str):
    assert rows(loaded(), computed("a", 10), prefix_rows=prefix_rows) == [10, 11, 12, 13]
    assert rows(loaded(), computed("t", 10), prefix_rows=prefix_rows) == [10, 11, 12, 13]
    assert rows(loaded(), prefix_rows=prefix_rows) == NONE
    for other in (loaded(kv_version=None), loaded(kv_version=1), loaded(model=""), loaded(told=0)):
        assert rows(other, computed("a", 10), prefix_rows=prefix_rows) == NONE
    for other in (computed("a", 10, model="other"), computed("a", 110), loaded("a")):
        assert rows(loaded(), other, prefix_rows=prefix_rows) == NONE
    none = loaded(kv_version=UNKNOWN_VERSION), computed("a", 10, model="")
    assert rows(*none, prefix_rows=prefix_rows) == NONE


@pytest.mark.parametrize("prefix_rows", BOTH)
def test_the_attempt_that_sampled_is_the_first(prefix_rows: str):
    again = loaded()
    again.attempts.append(request([1, 2, 3, 4, 5, 6], 5, run(95, 4, 5), external=4).attempts[0])
    again.attempts[1].unknown[:4] = True
    again.attempts[0].stop = 5
    assert rows(again, computed("a", 10), prefix_rows=prefix_rows) == [10, 11, 12, 13]
    again.attempts[0].stop = 4
    assert rows(again, computed("a", 10), prefix_rows=prefix_rows) == NONE


def test_a_row_stands_in_below_a_digest_of_both():
    short = request([1, 2, 3, 8], 3, run(10, 0, 3))
    short.trace_id = "a"
    for prefix_rows in BOTH:
        assert rows(loaded(), short, prefix_rows=prefix_rows) == NONE
    reader = loaded()
    reader.told_at.add(3)
    for prefix_rows in BOTH:
        assert rows(reader, short, prefix_rows=prefix_rows) == [10, 11, 12, None]


def test_of_two_passes_none_is_unique():
    one, two = computed("a", 10), computed("b", 20)
    assert rows(loaded(), one, two, prefix_rows="unique") == NONE
    assert rows(loaded(), computed("a", 10, 20), prefix_rows="unique") == NONE
    assert rows(loaded(), computed("a", 10, 20), prefix_rows="any") == [10, 11, 12, 13]
    assert rows(loaded(), one, computed("b", 110), prefix_rows="unique") == [10, 11, 12, 13]
    two.settled = False
    e = served(loaded(), one, two, prefix_rows="unique")
    assert (e.prefix, e.certain) == ({p: {10 + p: "a"} for p in range(4)}, set())


def test_the_order_of_several_candidates():
    def reader() -> Record:
        record = loaded()
        record.barriers = 5
        return record

    own, earliest, earlier, later, latest = (
        computed(trace_id, first, barriers=barriers)
        for trace_id, first, barriers in (
            ("t", 10, 5), ("a", 20, 1), ("b", 30, 3), ("c", 40, 7), ("d", 50, 9),
        )
    )  # fmt: skip
    everyone = [latest, earliest, later, earlier]
    assert rows(reader(), *everyone, own, prefix_rows="any") == [10, 11, 12, 13]
    assert rows(reader(), *everyone, prefix_rows="any") == [30, 31, 32, 33]
    assert rows(reader(), latest, earliest, later, prefix_rows="any") == [20, 21, 22, 23]
    assert rows(reader(), latest, later, prefix_rows="any") == [40, 41, 42, 43]
    same_time = computed("e", 60, barriers=3)
    e = served(reader(), *everyone, same_time, prefix_rows="any")
    assert {*e.prefix[0]} == {30, 60}
    assert e.certain == {*range(4)}


def test_a_version_that_is_asked_for_is_that_of_the_row_that_stands_in():
    e = served(loaded(), computed("a", 10), prefix_rows="any", version=1)
    assert not e.prefix
    assert e.reasons[0, 0] == {"other_version"}
    assert rows(loaded(), computed("a", 10), prefix_rows="any", version=0) == [10, 11, 12, 13]
