"""Traces in order and dictionaries in parts are lists and dicts, while others change them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice

import pytest

from routetrace.server.index.traces import ordered
from routetrace.server.index.traces.ordered import Ordered
from routetrace.server.index.traces.sharded import Sharded
from routetrace.server.index.traces.trace import Trace


def trace(serial: int) -> Trace:
    return Trace(("run", str(serial)), serial, 1.0, 0.0, 0.0, 1.0)


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("newest_first", [False, True])
def test_walks_see_all_that_stays_and_nothing_that_is_newer(seed, newest_first, monkeypatch):
    rng = random.Random(seed)
    monkeypatch.setattr(ordered, "BLOCK", rng.randint(1, 5))
    traces, there = Ordered(), {}
    last = 0
    walks: list[tuple[Iterator[Trace], dict[int, Trace], set[int], list[int]]] = []
    for _ in range(300):
        what = rng.random()
        if what < 0.35:
            last += rng.randint(1, 3)
            there[last] = trace(last)
            traces.add(there[last])
        elif what < 0.6 and there:
            gone = rng.choice([*there])
            traces.remove(there.pop(gone))
            for _, _, stay, _ in walks:
                stay.discard(gone)
        elif what < 0.65:
            before = rng.choice([0, rng.randint(1, last + 2)]) if newest_first else 0
            walk = traces.newest_first(before) if newest_first else traces.oldest_first()
            first = next(walk, None)
            among = {n: t for n, t in there.items() if not before or n < before}
            assert (first is None) == (not among)
            seen = [first.serial] if first else []
            walks.append((walk, among, set(among), seen))
        elif walks:
            walk, _, _, seen = rng.choice(walks)
            seen += [t.serial for t in islice(walk, rng.randint(1, 7))]
        assert len(traces) == len(there)
    assert [t.serial for t in traces.oldest_first()] == sorted(there)
    assert [t.serial for t in traces.newest_first()] == sorted(there, reverse=True)
    for walk, among, stay, seen in walks:
        seen += [t.serial for t in walk]
        assert seen == sorted(seen, reverse=newest_first)
        assert len({*seen}) == len(seen)
        assert stay <= {*seen} <= {*among}
    with pytest.raises(ValueError, match="newer"):
        traces.add(trace(max(there)))


@pytest.mark.parametrize("seed", range(3))
def test_a_dictionary_in_parts_is_one(seed):
    rng = random.Random(seed)
    parts: Sharded[tuple[str, int], int] = Sharded()
    whole: dict[tuple[str, int], int] = {}
    for number in range(3000):
        key = "key", rng.randrange(500)
        if rng.random() < 0.6:
            parts[key] = whole[key] = number
        else:
            assert parts.pop(key) == whole.pop(key, None)
        assert (key in parts, parts.get(key)) == (key in whole, whole.get(key))
    assert len(parts) == len(whole)
    assert dict(parts) == whole
