"""Which traces computed rows of which prefixes, against a set of them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from routetrace.codec.records import DIGEST, Provenance
from routetrace.common.layout import ModelLayout
from routetrace.server.index.traces import tiers
from routetrace.server.index.traces.prefix_index import PrefixIndex
from routetrace.server.index.traces.sources import Source, WriterKey
from routetrace.server.index.traces.spans import Span
from routetrace.server.index.traces.trace import Trace
from routetrace.server.index.traces.trace_index import TraceIndex

LAYOUT = ModelLayout((0,), 1, 8, 2)

#: What happens to traces: who of eight, and what.
steps = st.lists(
    st.tuples(
        st.integers(0, 7),
        st.one_of(
            st.just(("new",)),
            st.just(("gone",)),
            st.just(("clean",)),
            st.tuples(st.just("rows"), st.integers(0, 2), st.integers(0, 5)),
            st.tuples(st.just("digests"), st.lists(st.integers(1, 6), max_size=6)),
        ),
    ),
    max_size=60,
)


def source_of(run: str) -> Source:
    return Source(WriterKey(run, "e", ""), 1, "r", "b/0", LAYOUT)


def digests_of(positions: list[int]) -> np.ndarray:
    """Equal in all traces: they share all their tokens."""
    return np.array([(p, p * 1000) for p in sorted(set(positions))], DIGEST)


@given(steps, st.integers(1, 5), st.integers(1, 20), st.integers(2, 40))
def test_it_finds_what_there_is(happens, batch, digests, most):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiers, "_BATCH", batch)
        patch.setattr(tiers, "_BATCH_DIGESTS", digests)
        patch.setattr(tiers, "_MAX_TIER", most)
        patch.setattr(tiers, "_DEAD_SHARE", 0.0)
        traces = TraceIndex()
        index = traces.prefixes
        for who, (what, *how) in happens:
            key = (f"run{who % 2}", f"t{who}")
            trace = traces.traces.get(key)
            if what == "new" or trace is None:
                trace = traces.begin(key, source_of(key[0]), ttl=1, now=0)
            source = trace.sources[-1]
            if what == "rows":
                version, position = how
                source.attempts[0].append(Span(position, 1, 0, version, Provenance.FORWARD))
                index.computed(trace, version, position)
            elif what == "digests":
                source.add_digests(digests_of(how[0]))
                index.learn(trace, source)
            elif what == "gone":
                traces.remove(key)
            elif what == "clean":
                for _ in index.clean():
                    pass
        again = TraceIndex()
        for trace in traces.oldest_first():
            trace.computed = {}
            again.add(trace)
        positions = [1, 2, 3, 4, 5, 6]
        for run in ("run0", "run1", "run2"):
            for version, last in itertools.product((0, 1, 2), (1, 3, 5)):
                expected = [
                    {
                        t.serial
                        for t in traces.traces.values()
                        if t.key[0] == run
                        and any(p in s.digests["position"].tolist() for s in t.sources)
                        and any(
                            span.position < p
                            and span.position <= last
                            and span.weight_version == version
                            for s in t.sources
                            for span in s.attempts[0]
                        )
                    }
                    for p in positions
                ]
                found = held(index, run, positions, last, version)
                assert all(map(set.issuperset, found, expected))
                assert held(again.prefixes, run, positions, last, version) == expected


def held(
    index: PrefixIndex, run: str, positions: list[int], last: int, version: int
) -> list[set[int]]:
    """The traces that may hold rows of each prefix, at or below a position."""
    digests = [position * 1000 for position in positions]
    found = index.holders(run, digests, np.full(len(digests), last), version)
    pairs = found[["prefix", "serial"]].tolist()
    assert pairs == sorted(set(pairs))
    assert all(index.trace(serial) for _, serial in pairs)
    return [{serial for at, serial in pairs if at == i} for i in range(len(positions))]


def test_what_is_gone_takes_no_room():
    traces = TraceIndex()
    for i in range(1000):
        source = source_of("run")
        trace = traces.begin(("run", f"t{i}"), source, ttl=1, now=0)
        traces.prefixes.computed(trace, 0, 0)
        values = np.array([(64 * p, i << 32 | p) for p in range(1, 33)], DIGEST)
        source.add_digests(values)
        traces.prefixes.learn(trace, source)
    held(traces.prefixes, "run", [0], 0, 0)
    assert len(traces.prefixes) == 32_000
    assert traces.prefixes.nbytes == 28 * 32_000
    for i in range(900):
        traces.remove(("run", f"t{i}"))
    for _ in traces.prefixes.clean():
        pass
    assert len(traces.prefixes) == 3200
    # What was told twice, by two shards say, is held once.
    trace = traces.traces["run", "t999"]
    for _ in range(100):
        traces.prefixes.learn(trace, trace.sources[0])
        held(traces.prefixes, "run", [0], 0, 0)
    assert len(traces.prefixes) < 3400


@given(st.lists(st.lists(st.tuples(st.integers(1, 8), st.integers(0, 99)), max_size=8)))
def test_the_latest_digest_of_a_position_counts(reports):
    source, expected = source_of("run"), {}
    for report in reports:
        source.add_digests(np.array(report, DIGEST))
        expected.update(report)
        if len(report) % 2:  # read now and then
            assert source.digests.tolist() == sorted(expected.items())
    assert source.num_digests >= len(expected)
    assert source.digests.tolist() == sorted(expected.items())


def test_sources_with_many_digests_are_taken_in_before_others():
    traces = TraceIndex()
    source = source_of("run")
    trace = traces.begin(("run", "t"), source, ttl=1, now=0)
    traces.prefixes.computed(trace, 0, 0)
    source.add_digests(np.array([(p, p) for p in range(1, 1 << 12)], DIGEST))
    traces.prefixes.learn(trace, source)
    assert len(traces.prefixes) == 0
    source.add_digests(np.array([(1 << 12, 1 << 12)], DIGEST))
    traces.prefixes.learn(trace, source)
    assert len(traces.prefixes) == 1 << 12


def test_weight_versions_of_one_trace_are_bounded():
    traces, trace = TraceIndex(), Trace(("run", "t"), 1, 1, 0, 0, 1, [source_of("run")])
    traces.add(trace)
    for version in range(1000):
        traces.prefixes.computed(trace, version, 0)
    assert len(trace.computed) == 64
