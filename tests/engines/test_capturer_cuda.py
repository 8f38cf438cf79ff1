"""RoutingCapturer where it is meant to run: CUDA graphs, streams, copies that are really late."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import torch._dynamo.utils

from routetrace.capture_agent.engines.capturer import PendingRows, RoutingCapturer
from routetrace.common.layout import ModelLayout
from support.models.small_moe import WIDTH, SmallMoE, tokens, truth

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LAYOUT = ModelLayout((0, 2, 3), 4, 300, 4)
SIZES = (4, 8, 16)
# Cycles for which the device does nothing: some tenths of a second.
LONG = 1 << 29


def recorded(forward: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """A graph of what the forward does, after the calls that libraries need before."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            forward()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        forward()
    return graph


def test_replayed_graphs_of_padded_sizes_are_captured() -> None:
    """Inputs change, sizes change, two copies are in flight, and the buffer stays where it is."""
    capturer = RoutingCapturer(LAYOUT, max(SIZES), "cuda")
    address = capturer._buffer.data_ptr()
    model = SmallMoE(LAYOUT, capturer.capture).cuda()
    static = torch.zeros(max(SIZES), WIDTH, dtype=torch.float64, device="cuda")
    graphs = {size: recorded(lambda size=size: model(static[:size])) for size in SIZES}
    pending: list[tuple[PendingRows, np.ndarray]] = []
    rng = np.random.default_rng(0)
    for step in range(60):
        n = int(rng.integers(1, max(SIZES) + 1))
        size = min(size for size in SIZES if size >= n)
        x = tokens(n, step).cuda()
        static.copy_(tokens(max(SIZES), 1000 + step))  # padding routes, too
        static[:n] = x
        capturer.begin()
        graphs[size].replay()
        if step % 10 == 0:
            assert capturer.fired(n) == [0, 1, 2]
        if size < max(SIZES):
            # Rows that no graph of this size writes were written by larger ones before.
            assert capturer.fired(size + 1) == []
        pending.append((capturer.snapshot(n), truth(LAYOUT, x)))
        if len(pending) == 3:
            one, expected = pending.pop(0)
            np.testing.assert_array_equal(one.rows(), expected)
    for one, expected in pending:
        np.testing.assert_array_equal(one.rows(), expected)
    assert capturer._buffer.data_ptr() == address
    # Without a replay there is nothing.
    capturer.begin()
    assert not capturer.snapshot(max(SIZES)).rows().any()


def test_a_layer_that_a_graph_calls_twice_is_not_believed() -> None:
    capturer = RoutingCapturer(LAYOUT, 8, "cuda")
    ids = torch.arange(8 * 4, device="cuda").reshape(8, 4)

    def forward() -> None:
        capturer.capture(0, ids[:3])
        capturer.capture(1, ids)
        capturer.capture(0, ids[3:])

    graph = recorded(forward)
    for _ in range(3):
        capturer.begin()
        graph.replay()
        assert capturer.fired(8) == [1]
        rows = capturer.snapshot(8).rows()
        assert not rows[:, 0].any()
        np.testing.assert_array_equal(rows[:, 1], ids.cpu())


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def test_graphs_that_the_compiler_records_write_to_the_buffer_itself(fresh_compiler: None) -> None:
    capturer = RoutingCapturer(LAYOUT, 16, "cuda")
    address = capturer._buffer.data_ptr()
    model = SmallMoE(LAYOUT, capturer.capture).cuda()
    compiled = torch.compile(model, mode="reduce-overhead", fullgraph=True)
    for step in range(12):
        x = tokens((5, 16)[step % 2], step).cuda()
        capturer.begin()
        compiled(x)
        np.testing.assert_array_equal(capturer.snapshot(len(x)).rows(), truth(LAYOUT, x))
    assert torch._dynamo.utils.counters["inductor"]["cudagraph_skips"] == 0
    assert capturer._buffer.data_ptr() == address


def one_pass(capturer: RoutingCapturer, n: int, step: int) -> PendingRows:
    capturer.begin()
    for column in range(len(LAYOUT.layer_ids)):
        capturer.capture(column, step_ids(n, step, column))
    return capturer.snapshot(n)


def step_ids(n: int, step: int, column: int) -> torch.Tensor:
    start = torch.arange(n, device="cuda")[:, None] + 31 * step + column
    return (start + torch.arange(LAYOUT.top_k, device="cuda")) % LAYOUT.num_experts


def assert_step(rows: np.ndarray, n: int, step: int) -> None:
    columns = range(len(LAYOUT.layer_ids))
    expected = torch.stack([step_ids(n, step, column) for column in columns], dim=1)
    np.testing.assert_array_equal(rows, expected.cpu())


def test_two_copies_are_in_flight_and_nothing_waits_for_them() -> None:
    n = 4096
    capturer = RoutingCapturer(LAYOUT, n, "cuda")
    for step in range(3):  # memory that the allocator keeps
        one_pass(capturer, n, step).rows()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(LONG)
        first = one_pass(capturer, n, 10)
        second = one_pass(capturer, n, 11)
        late = [not one._slot._arrived.query() for one in (first, second)]
        # The next pass writes, too, while both are in flight.
        capturer.begin()
        capturer.capture(0, step_ids(n, 12, 0))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert late == [True, True]
    third = one_pass(capturer, n, 13)  # waits for the first
    assert first._rows is not None
    assert second._rows is None
    for step, one in ((11, second), (13, third), (10, first)):
        assert_step(one.rows(), n, step)


def test_rows_may_be_asked_for_from_another_thread() -> None:
    n, steps = 512, 200
    capturer = RoutingCapturer(LAYOUT, n, "cuda")
    pending: queue.SimpleQueue[PendingRows] = queue.SimpleQueue()

    def ask() -> int:
        for step in range(steps):
            assert_step(pending.get(timeout=20).rows(), n, step)
        return steps

    with ThreadPoolExecutor(1) as thread:
        asking = thread.submit(ask)
        for step in range(steps):
            pending.put(one_pass(capturer, n, step))
        assert asking.result(60) == steps
