"""RoutingCapturer against a plain model of it, and against steps that overtake each other."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from routetrace.capture_agent.capturer import RoutingCapturer
from routetrace.v1.errors import InvalidArgument
from routetrace.v1.layout import RoutingLayout

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.cuda,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
        ],
    ),
]
on_every_device = pytest.mark.parametrize("device", DEVICES)


def random_ids(
    rng: np.random.Generator, layout: RoutingLayout, n: int, num_layers: int
) -> np.ndarray:
    """Distinct ids per cell, [n, num_layers, K]."""
    keys = rng.random((n, num_layers, layout.num_experts))
    return keys.argsort(axis=-1)[..., : layout.top_k]


@st.composite
def layouts(draw: st.DrawFn) -> RoutingLayout:
    num_experts = draw(st.sampled_from([2, 8, 128, 256, 257, 300, 40000]))
    top_k = draw(st.integers(1 if num_experts != 256 else 2, 4).map(lambda k: min(k, num_experts)))
    layers = draw(st.lists(st.integers(0, 9), min_size=1, max_size=4, unique=True).map(sorted))
    return RoutingLayout(tuple(layers), 10, num_experts, top_k)


@on_every_device
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_rows_are_what_was_captured_and_nothing_else(device: str, data: st.DataObject) -> None:
    layout = data.draw(layouts())
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    num_layers, experts = len(layout.layer_ids), layout.num_experts
    capturer = RoutingCapturer(layout, 8, device)
    pending = []
    for _ in range(data.draw(st.integers(1, 5))):
        n = data.draw(st.integers(0, 8))
        expected = np.full((n, num_layers, layout.top_k), -1)
        ids = random_ids(rng, layout, 8, num_layers)
        for column in range(num_layers):
            m = data.draw(st.integers(0, 8), label="rows of the layer")
            wide = np.concatenate([ids[:m, column], np.full((m, 2), experts)], axis=1)
            if m and data.draw(st.booleans()):
                spoilt = data.draw(st.sampled_from([-1, -(2**31), experts, 70000, 2**31 - 1]))
                if not 0 <= spoilt < experts:
                    wide[rng.integers(m), rng.integers(layout.top_k)] = spoilt
            dtype = data.draw(st.sampled_from([torch.int32, torch.int64]))
            capturer.capture(column, torch.from_numpy(wide).to(dtype).to(device))
            expected[: min(m, n), column] = wide[: min(m, n), : layout.top_k]
        bad = ((expected < 0) | (expected >= experts)).any(axis=-1)
        expected[bad] = 0 if layout.top_k > 1 else experts
        pending.append((capturer.snapshot(n), expected))
        if data.draw(st.booleans(), label="rows are fetched"):
            one, expected = pending[data.draw(st.integers(0, len(pending) - 1))]
            np.testing.assert_array_equal(one.rows(), expected)
    for one, expected in pending:
        rows = one.rows()
        assert rows.dtype == layout.dtype
        np.testing.assert_array_equal(rows, expected)
        assert rows is one.rows()


@on_every_device
def test_the_next_steps_do_not_touch_rows_that_nobody_fetched_yet(device: str) -> None:
    """Copies are large enough to be in flight while later steps run."""
    layout = RoutingLayout(tuple(range(16)), 16, 300, 8)
    n = 4096 if device == "cuda" else 64
    capturer = RoutingCapturer(layout, n, device)
    address = capturer._buffer.data_ptr()
    pending = []
    for step in range(6):
        for column in range(16):
            start = torch.arange(n, device=device)[:, None] + step * 31 + column
            capturer.capture(column, (start + torch.arange(8, device=device)) % 300)
        pending.append(capturer.snapshot(n))
    assert capturer._buffer.data_ptr() == address
    for step, one in enumerate(pending):
        expected = np.arange(n)[:, None, None] + step * 31 + np.arange(16)[:, None] + np.arange(8)
        np.testing.assert_array_equal(one.rows(), expected % 300)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_writes_of_a_replayed_graph_are_captured() -> None:
    layout = RoutingLayout((0, 1), 2, 64, 4)
    capturer = RoutingCapturer(layout, 16, "cuda")
    static = torch.zeros((8, 4), dtype=torch.int64, device="cuda")

    def forward() -> None:
        capturer.capture(0, static)
        capturer.capture(1, (static + 1) % 64)

    forward()
    capturer.clear()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        forward()
    for step in range(4):
        ids = (torch.arange(4) + torch.arange(8)[:, None] + step) % 64
        static.copy_(ids)
        graph.replay()
        rows = capturer.snapshot(5).rows()  # the graph has padding
        np.testing.assert_array_equal(rows[:, 0], ids[:5])
        np.testing.assert_array_equal(rows[:, 1], (ids[:5] + 1) % 64)
    # Without a replay there is nothing, not the padding of the step before.
    assert not capturer.snapshot(8).rows().any()


@on_every_device
def test_a_given_up_pass_leaves_nothing(device: str) -> None:
    capturer = RoutingCapturer(RoutingLayout((0, 1), 2, 8, 2), 4, device)
    capturer.capture(0, torch.tensor([[1, 2]] * 4, device=device))
    capturer.clear()
    capturer.capture(1, torch.tensor([[3, 4]] * 2, device=device))
    np.testing.assert_array_equal(
        capturer.snapshot(3).rows(), [[[0, 0], [3, 4]], [[0, 0], [3, 4]], [[0, 0], [0, 0]]]
    )


@pytest.mark.parametrize("experts", [256, 65536])
def test_one_expert_of_as_many_as_the_id_type_holds_is_refused(experts: int) -> None:
    with pytest.raises(InvalidArgument, match="num_experts"):
        RoutingCapturer(RoutingLayout((0,), 1, experts, 1), 4, "cpu")
    RoutingCapturer(RoutingLayout((0,), 1, experts, 2), 4, "cpu")
    RoutingCapturer(RoutingLayout((0,), 1, experts - 1, 1), 4, "cpu")


@pytest.mark.parametrize(
    ("field", "column", "ids"),
    [
        ("column", 2, torch.zeros(1, 2, dtype=torch.int64)),
        ("column", -1, torch.zeros(1, 2, dtype=torch.int64)),
        ("topk_ids", 0, torch.zeros(5, 2, dtype=torch.int64)),
        ("topk_ids", 0, torch.zeros(1, 1, dtype=torch.int64)),
        ("topk_ids", 0, torch.zeros(2, dtype=torch.int64)),
        ("topk_ids", 0, torch.zeros(1, 1, 2, dtype=torch.int64)),
        ("topk_ids", 0, torch.zeros(1, 2)),
        ("topk_ids", 0, torch.zeros(1, 2, dtype=torch.bool)),
    ],
)
def test_what_capture_refuses(field: str, column: int, ids: Any) -> None:
    capturer = RoutingCapturer(RoutingLayout((0, 1), 2, 8, 2), 4, "cpu")
    with pytest.raises(InvalidArgument) as caught:
        capturer.capture(column, ids)
    assert caught.value.field == field


def test_what_snapshot_refuses() -> None:
    with pytest.raises(InvalidArgument, match="max_num_tokens"):
        RoutingCapturer(RoutingLayout((0, 1), 2, 8, 2), 0, "cpu")
    capturer = RoutingCapturer(RoutingLayout((0, 1), 2, 8, 2), 4, "cpu")
    for n in (-1, 5):
        with pytest.raises(InvalidArgument, match="num_tokens"):
            capturer.snapshot(n)
