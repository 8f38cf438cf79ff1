"""Which traces have which tokens, against a set of them."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from routetrace.codec.records import DIGEST, tail_of, token_digests
from routetrace.common.layout import ModelLayout
from routetrace.server.index.traces import tiers
from routetrace.server.index.traces.sources import Source, WriterKey
from routetrace.server.index.traces.trace_index import TraceIndex

LAYOUT = ModelLayout((0,), 1, 8, 2)


def source_of(run: str, name: str, tokens: list[int], prompt_len: int, aborted: bool) -> Source:
    source = Source(WriterKey(run, "e", ""), 1, name, "b/0", LAYOUT, prompt_len)
    source.ended, source.num_tokens = True, len(tokens)
    ends = [prompt_len, *(tail_of(prompt_len, len(tokens)) if aborted else ())]
    source.add_digests(token_digests(np.array(tokens), ends))
    return source


def indexed(tokens: list[int], prompt_len: int, aborted: bool) -> set[int]:
    """Lengths of the prefixes by which a request is found."""
    count = len(tokens)
    first = (prompt_len // 64 + 1) * 64
    ends = {prompt_len, count} | ({first} if first <= count else set())
    return ends | (set(range(max(prompt_len + 1, count - 64), count)) if aborted else set())


def digest_of(tokens: list[int], end: int) -> int:
    return int(token_digests(np.array(tokens[:end]))["value"][-1])


@given(st.integers(0, 2**63).map(random.Random), st.integers(1, 5), st.integers(2, 200))
def test_it_finds_what_there_is(rng, batch, most):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiers, "_BATCH", batch)
        patch.setattr(tiers, "_MAX_TIER", most)
        patch.setattr(tiers, "_DEAD_SHARE", 0.0)
        traces = TraceIndex()
        truth: dict[tuple[str, str], list[tuple[list[int], int, bool]]] = {}
        for number in range(rng.randint(1, 12)):
            key = f"run{rng.randrange(2)}", f"t{rng.randrange(6)}"
            if key in truth and rng.random() < 0.3:
                traces.remove(key)
                del truth[key]
                continue
            if rng.random() < 0.2:
                for _ in traces.clean():
                    pass
            tokens = [rng.randrange(2) for _ in range(rng.randint(2, 140))]
            tokens[:60] = [0] * min(60, len(tokens))  # many begin alike
            asked = tokens, rng.randint(1, len(tokens) - 1), rng.random() < 0.3
            source = source_of(key[0], f"r{number}", *asked)
            trace = traces.begin(key, source, ttl=1, now=0)
            traces.learn(trace, source)
            truth.setdefault(key, []).append(asked)

        again = TraceIndex()  # as after a restart
        for trace in traces.oldest_first():
            again.add(trace)
        wanted = [
            (tokens, end)
            for told in truth.values()
            for tokens, _, _ in told
            for end in rng.sample(range(1, len(tokens) + 1), min(9, len(tokens)))
        ]
        digests = np.array([digest_of(*each) for each in wanted], np.uint64)
        for run in ("run0", "run1"):
            expected = {
                (i, key[1])
                for i, (tokens, end) in enumerate(wanted)
                for key, told in truth.items()
                for other, prompt_len, aborted in told
                if key[0] == run
                and other[:end] == tokens[:end]
                and end in indexed(other, prompt_len, aborted)
            }
            for index in (traces, again):
                which, serials = index.tokens.holders(run, digests)
                found = zip(which.tolist(), map(index.by_serial.get, serials.tolist()), strict=True)
                assert {(i, trace.key[1]) for i, trace in found if trace} == expected


def test_a_request_takes_48_bytes():
    traces = TraceIndex()
    for number in range(1000):
        tokens = [number, *range(2047)]
        source = source_of("run", f"r{number}", tokens, 500, False)
        traces.learn(traces.begin(("run", f"t{number}"), source, ttl=1, now=0), source)
    traces.tokens.holders("run", np.empty(0, np.uint64))
    assert traces.tokens.nbytes == 48 * 1000


def test_keys_of_digests_are_those_of_the_run_the_newest_first():
    traces = TraceIndex()
    for number in range(100):
        source = source_of("run", f"r{number}", [1, 2, 3], 1, False)
        source.labels = {"adapter": f"a{number}"}
        traces.learn(traces.begin(("run", f"t{number}"), source, ttl=1, now=0), source)
    assert traces.tokens.keys("run", 3) == ["a99", "a98", "a97"]
    assert len(traces.tokens.keys("run", 1000)) == 64
    assert traces.tokens.keys("other", 3) == []
    for number in range(100):
        traces.remove(("run", f"t{number}"))
    assert traces.tokens.keys("run", 3) == []


def test_a_source_without_digests_is_not_there():
    traces = TraceIndex()
    source = Source(WriterKey("run", "e", ""), 1, "r", "b/0", LAYOUT)
    trace = traces.begin(("run", "t"), source, ttl=1, now=0)
    source.add_digests(np.empty(0, DIGEST))
    traces.learn(trace, source)
    assert traces.tokens.keys("run", 3) == []
    assert traces.tokens.holders("run", np.zeros(1, np.uint64))[0].size == 0
