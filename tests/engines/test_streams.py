"""The order of copies and kernels: as late as it allows, on a fake device and on a real one.

The fake device (fake_streams.py) runs everywhere. Where CUDA is there, the same tests run on it,
with copies to the host held back.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo
from torch.overrides import TorchFunctionMode

from routetrace.capture_agent.engines.capturer import PendingRows, RoutingCapturer
from routetrace.client import FetchPlan, MicroBatch, Rank, Rows, Sample, Trace
from routetrace.client._core.assemble import Assembler, Want
from routetrace.client._memory import zeros
from routetrace.common.layout import ModelLayout
from routetrace.trainers._force import Given
from support.devices import on_cuda
from support.models.fake_streams import FakeCuda, FakeEvent, FakeStream
from support.servers.client_server import LAYOUT as NARROW
from support.servers.client_server import WIDE, Truth, truth

LAYOUT = ModelLayout((0, 2, 3), 4, 300, 4)
TOKENS = 16
# Cycles for which the device does nothing: some tenths of a second.
LONG = 1 << 29


class HeldBack(TorchFunctionMode):
    """A real device, with the face of the fake one: copies to or from pinned memory come late."""

    def __init__(self) -> None:
        super().__init__()
        self.waits = 0
        self._begun: list[torch.cuda.Event] = []

    def running(self) -> AbstractContextManager[Any]:
        return self

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        late = func in (torch.Tensor.copy_, torch.Tensor.to) and (kwargs or {}).get("non_blocking")
        if late:
            torch.cuda._sleep(LONG)
        out = func(*args, **(kwargs or {}))
        if late:
            self._begun.append(torch.cuda.current_stream().record_event())
        return out

    def on_their_way(self) -> list[torch.cuda.Event]:
        return [event for event in self._begun if not event.query()]

    def synchronize(self) -> None:
        torch.cuda.synchronize()


@pytest.fixture(params=["fake", on_cuda("real")])
def device(request: pytest.FixtureRequest) -> Any:
    return FakeCuda() if request.param == "fake" else HeldBack()


@pytest.fixture
def cuda(device: Any) -> Iterator[Any]:
    """The device, with all of the test on it."""
    with device.running():
        yield device
        device.synchronize()


def step_ids(step: int, column: int) -> torch.Tensor:
    start = torch.arange(TOKENS)[:, None] + 31 * step + column
    return (start + torch.arange(LAYOUT.top_k)) % LAYOUT.num_experts


def one_pass(capturer: RoutingCapturer, step: int) -> PendingRows:
    capturer.begin()
    for column in range(len(LAYOUT.layer_ids)):
        ids = torch.empty((TOKENS, LAYOUT.top_k), dtype=torch.int64, device="cuda")
        capturer.capture(column, ids.copy_(step_ids(step, column)))
    return capturer.snapshot(TOKENS)


def assert_step(rows: np.ndarray, step: int) -> None:
    columns = range(len(LAYOUT.layer_ids))
    expected = torch.stack([step_ids(step, column) for column in columns], dim=1)
    np.testing.assert_array_equal(rows, expected)


@pytest.fixture
def capturer(cuda: Any) -> RoutingCapturer:
    capturer = RoutingCapturer(LAYOUT, TOKENS, "cuda")
    for step in range(3):  # memory that the allocator keeps
        one_pass(capturer, step).rows()
    return capturer


@pytest.mark.parametrize("late", [0, 1, 2])
def test_rows_are_their_own_pass_s_however_late_they_arrive(
    cuda: Any, capturer: RoutingCapturer, late: int
) -> None:
    pending = []
    for step in range(10, 16):
        pending.append((one_pass(capturer, step), step))
        if len(pending) > late:
            rows, of = pending.pop(0)
            assert_step(rows.rows(), of)
    for rows, of in reversed(pending):
        rows.hand_to(lambda there, of=of: assert_step(there, of))


def test_rows_that_a_later_pass_had_to_fetch(cuda: Any, capturer: RoutingCapturer) -> None:
    pending = [one_pass(capturer, step) for step in range(10, 16)]
    for step in (13, 10, 15, 11, 14, 12):
        assert_step(pending[step - 10].rows(), step)


def test_neither_the_host_nor_the_next_pass_waits_for_a_copy(
    cuda: Any, capturer: RoutingCapturer
) -> None:
    pending = []
    ids = [torch.empty((TOKENS, LAYOUT.top_k), dtype=torch.int64, device="cuda") for _ in "123"]
    cuda.synchronize()
    before = cuda.waits
    for _ in range(2):
        capturer.begin()
        for column, chosen in enumerate(ids):
            capturer.capture(column, chosen)
        pending.append(capturer.snapshot(TOKENS))
    capturer.begin()  # the next pass writes while both copies are on their way
    assert cuda.waits == before
    assert len(cuda.on_their_way()) >= 2
    # When the stream of the passes is through, the copies need not be.
    torch.cuda.current_stream().synchronize()
    assert len(cuda.on_their_way()) >= 2
    for rows in pending:
        rows.rows()
    assert not cuda.on_their_way()


def test_kernels_run_on_the_stream_of_the_passes_alone() -> None:
    """One on another stream makes all kernels of a replayed graph begin later: docs/adr/026."""
    cuda = FakeCuda()
    with cuda.running():
        capturer = RoutingCapturer(LAYOUT, TOKENS, "cuda")
        pending = [one_pass(capturer, step) for step in range(5)]
        for step, rows in enumerate(pending):
            assert_step(rows.rows(), step)
    assert cuda.kernel_streams == {cuda.main}


def test_compiled_graphs_take_the_buffer_for_static(device: Any) -> None:
    """Or CUDA graphs that torch.compile records would write to a copy of it."""
    with device.running():
        capturer = RoutingCapturer(LAYOUT, TOKENS, "cuda")
        ids = step_ids(0, 0).to("cuda")
    static: dict[str, bool] = {}

    def see(graph: torch.fx.GraphModule, _inputs: Any) -> Any:
        for node in graph.graph.find_nodes(op="placeholder"):
            kept = node.meta.get("tensor_dict", {})
            static[node.name] = "_dynamo_static_input_type" in kept
        return graph.forward

    def forward(ids: torch.Tensor) -> None:
        for column in range(len(LAYOUT.layer_ids)):
            capturer.capture(column, ids)

    torch._dynamo.reset()
    torch.compile(forward, backend=see, fullgraph=True)(ids)
    torch._dynamo.reset()
    assert len(static) >= 2
    assert sorted(static.values()) == [False] + [True] * (len(static) - 1)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16])
def test_replayed_rows_may_be_overwritten_when_they_have_settled(
    cuda: Any, dtype: torch.dtype
) -> None:
    ids = torch.arange(24).reshape(2, 3, 4).to(dtype)
    valid = torch.ones((2, 3), dtype=torch.bool)
    given = Given(ids.pin_memory(), valid.pin_memory())
    on_device = given.on(torch.device("cuda"))
    given.settle()
    for source in given.source:
        source.zero_()
    cuda.synchronize()
    for found, expected in zip(on_device, (ids, valid), strict=True):
        assert torch.equal(found.to("cpu"), expected)


def pinned_trace(source: Truth) -> Trace:
    assembler = Assembler(Want("req", None, mask=True, pin_memory=True))
    for message in source.responses():
        assembler.feed(message)
    trace = assembler.finish()
    assert isinstance(trace, Trace)
    return trace


PARTS: dict[str, Callable[[Trace], Trace]] = {
    "all": lambda trace: trace,
    "tokens": lambda trace: trace.tokens(3, 9),
    "later layers": lambda trace: trace.layers(trace.layer_ids[1:]),
    "picked layers": lambda trace: trace.layers(trace.layer_ids[::2]),
}


@pytest.mark.parametrize("layout", [NARROW, WIDE], ids=["uint8", "uint16"])
@pytest.mark.parametrize("part", PARTS)
def test_a_trace_may_go_as_soon_as_its_tensor_is_there(
    cuda: Any, part: str, layout: ModelLayout
) -> None:
    """Its pinned memory is not another trace's before the copy is over, from wherever it was."""
    sources = [truth(12, layout=layout, rng=random.Random(seed)) for seed in range(4)]
    expected = [PARTS[part](pinned_trace(source)).topk_ids.copy() for source in sources]
    cuda.synchronize()
    before = cuda.waits
    with torch.cuda.stream(torch.cuda.Stream()):
        # Used at once, on the stream that is current; each trace is gone before the next comes.
        found = [PARTS[part](pinned_trace(s)).to_torch("cuda").add_(0) for s in sources]
        if part != "picked layers":  # they are a copy, in numpy's memory
            assert cuda.waits == before
    cuda.synchronize()
    for tensor, ids in zip(found, expected, strict=True):
        np.testing.assert_array_equal(tensor.to("cpu").numpy(), ids)


def test_the_rows_of_a_rank_may_go_as_soon_as_their_tensors_are_there(cuda: Any) -> None:
    batch = MicroBatch.padded([Sample.of("r", 9)], 9)
    plan = FetchPlan.make(NARROW, batch, Rank(NARROW.layer_ids, flatten="batch"))
    rng = np.random.default_rng(0)

    def pinned_rows() -> Rows:
        ids = zeros(plan.shape, NARROW.dtype, pin=True)
        valid = zeros(plan.shape[:2], np.bool_, pin=True)
        ids[:] = rng.integers(0, NARROW.num_experts, plan.shape)
        valid[:] = rng.random(plan.shape[:2]) < 0.5
        return Rows(plan=plan, topk_ids=ids, valid=valid, layer_ids=plan.layer_ids)

    before = cuda.waits
    expected, found = [], []
    for stage in ([2, 4], [5, 7], [1, 2, 4, 5, 7]):
        rows = pinned_rows().layers(stage)
        expected.append((rows.topk_ids.copy(), rows.valid.copy()))
        found.append(rows.to_torch("cuda"))
        del rows
    pinned_rows()
    assert cuda.waits == before
    cuda.synchronize()
    for tensors, arrays in zip(found, expected, strict=True):
        for tensor, array in zip(tensors, arrays, strict=True):
            np.testing.assert_array_equal(tensor.to("cpu").numpy(), array)


# The fake device sees what is out of order: the same tests, with one thing broken.


def _first_stream(patch: pytest.MonkeyPatch, cuda: FakeCuda) -> None:
    patch.setattr(torch.cuda, "Stream", lambda *_: cuda.main)


def _no_wait(patch: pytest.MonkeyPatch, _cuda: FakeCuda) -> None:
    patch.setattr(FakeEvent, "synchronize", lambda _self: None)


def _no_order(patch: pytest.MonkeyPatch, _cuda: FakeCuda) -> None:
    patch.setattr(FakeStream, "wait_event", lambda _self, _event: None)


def _early_events(patch: pytest.MonkeyPatch, cuda: FakeCuda) -> None:
    def record(self: FakeEvent, stream: FakeStream | None = None) -> None:
        stream = stream or cuda.current
        self.clock = {**stream.clock, stream: stream.clock[stream] - 1}

    patch.setattr(FakeEvent, "record", record)


def _pageable(patch: pytest.MonkeyPatch, _cuda: FakeCuda) -> None:
    patch.setattr(FakeCuda, "pinned", lambda _self, like: torch.empty_like(like))


def _late_rows(cuda: FakeCuda) -> None:
    capturer = RoutingCapturer(LAYOUT, TOKENS, "cuda")
    test_rows_are_their_own_pass_s_however_late_they_arrive(cuda, capturer, 1)


def _waits(cuda: FakeCuda) -> None:
    capturer = RoutingCapturer(LAYOUT, TOKENS, "cuda")
    test_neither_the_host_nor_the_next_pass_waits_for_a_copy(cuda, capturer)


def _settled(cuda: FakeCuda) -> None:
    test_replayed_rows_may_be_overwritten_when_they_have_settled(cuda, torch.uint8)


@pytest.mark.parametrize(
    ("broken", "check"),
    [
        (_first_stream, _waits),
        (_no_wait, _late_rows),
        (_no_wait, _settled),
        (_no_order, _late_rows),
        (_early_events, _late_rows),
        (_early_events, _settled),
        (_pageable, _waits),
    ],
)
def test_what_is_out_of_order_is_seen(broken: Any, check: Any) -> None:
    cuda = FakeCuda()
    with cuda.running():
        check(cuda)
    with cuda.running(), pytest.MonkeyPatch.context() as patch:
        broken(patch, cuda)
        with pytest.raises(AssertionError):
            check(cuda)


def test_a_buffer_that_is_not_static_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._dynamo, "mark_static_address", lambda _tensor: None)
    with pytest.raises(AssertionError):
        test_compiled_graphs_take_the_buffer_for_static(FakeCuda())
