"""expert_load: the counts of what get returns, over calls of either client."""

from __future__ import annotations

import random

import numpy as np
import pytest

from routetrace.client import ExpertLoad, Incomplete, InvalidArgument, NotFound
from support.servers.client_server import LAYOUT, WIDE, truth

LAYERS = list(LAYOUT.layer_ids)


@pytest.fixture
def traces(server):
    made = [truth(9 + i, rng=random.Random(i), trace_id=f"r{i}") for i in range(5)]
    server.serve(*made)
    return [one.info.trace_id for one in made]


@pytest.mark.parametrize("concurrency", [1, 2, 50])
def test_counts_of_all_rows(client, traces, concurrency):
    seen = []
    found = client.expert_load(
        traces, concurrency=concurrency, missing="mask", progress=lambda p: seen.append(p.done)
    )
    assert found == sum(ExpertLoad.of(client.get(one, missing="mask")) for one in traces)
    assert found.load.sum() > 0
    assert seen == [1, 2, 3, 4, 5]


def test_counts_of_ranges_and_layers(client, traces):
    ids = [traces[0], traces[0], traces[3], traces[2]]
    ranges = [(0, 3), [5, None], None, (1, 2)]
    found = client.expert_load(ids, ranges, layer_ids=LAYERS[1:], missing="mask")
    wanted = [(0, 3), (5, None), (0, None), (1, 2)]
    parts = [
        client.get(one, token_start=a, token_stop=b, layer_ids=LAYERS[1:], missing="mask")
        for one, (a, b) in zip(ids, wanted, strict=True)
    ]
    assert found == sum(map(ExpertLoad.of, parts))
    assert found.layer_ids == tuple(LAYERS[1:])
    assert found.traces == 4
    assert found.tokens == sum(map(len, parts))


def test_the_first_trace_that_fails_ends_it(client, server, traces):
    with pytest.raises(NotFound) as error:
        client.expert_load([traces[0], "unknown", "unknown, too"], missing="mask")
    assert error.value.trace_id == "unknown"
    holed = next(one for one in traces if not client.get(one, missing="mask").valid.all())
    with pytest.raises(Incomplete, match=holed):
        client.expert_load([holed])


def test_traces_of_two_models(client, server):
    server.serve(truth(4, trace_id="a"), truth(4, trace_id="b", layout=WIDE))
    with pytest.raises(InvalidArgument, match=r"trace_ids.*'b'.*top-\d+ of \d+.*one model"):
        client.expert_load(["a", "b"], missing="mask")


@pytest.mark.parametrize(
    ("ids", "ranges", "field"),
    [
        ([], None, "trace_ids"),
        ("r0", None, "trace_ids"),
        (["r0", ""], None, r"trace_ids\[1\]"),
        (["r0"], [], "ranges"),
        (["r0"], "ab", "ranges"),
        (["r0"], [(0, 1), (1, 2)], "ranges"),
        (["r0"], [5], r"ranges\[0\]"),
        (["r0", "r1"], [None, (3, 3)], r"ranges\[1\]\[1\]"),
        (["r0"], [(-1, 2)], r"ranges\[0\]\[0\]"),
        (["r0"], [(0, 1.5)], r"ranges\[0\]\[1\]"),
    ],
)
def test_wrong_arguments_are_named(client, server, ids, ranges, field):
    with pytest.raises(InvalidArgument, match=rf"^{field} "):
        client.expert_load(ids, ranges)
    with pytest.raises(InvalidArgument, match="concurrency"):
        client.expert_load(["r0"], concurrency=0)
    with pytest.raises(InvalidArgument, match="layer_ids"):
        client.expert_load(["r0"], layer_ids=[3, 1])
    assert not server.counts


def test_takes_arrays_as_ids_and_rows_are_dropped(client, traces):
    found = client.expert_load(iter(traces), iter([None] * 5), missing="mask")
    assert found.traces == 5
    assert found.cells.dtype == np.int64
