"""RoutingCapturer against a plain model of it, and against steps that overtake each other."""

from __future__ import annotations

import queue
import shutil
import sysconfig
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo.testing
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from routetrace.capture_agent.engines import capturer as capturer_module
from routetrace.capture_agent.engines import cells as capture_cells
from routetrace.capture_agent.engines.capturer import RoutingCapturer
from routetrace.common.errors import InvalidArgument
from routetrace.common.layout import ModelLayout
from support.devices import DEVICES
from support.models.small_moe import SmallMoE, tokens, truth

COMPILES = shutil.which("g++") and Path(sysconfig.get_path("include"), "Python.h").exists()

on_every_device = pytest.mark.parametrize("device", DEVICES)

PAIR = ModelLayout((0, 1), 2, 8, 2)


def random_ids(
    rng: np.random.Generator, layout: ModelLayout, n: int, num_layers: int
) -> np.ndarray:
    """Distinct ids per cell, [n, num_layers, K]."""
    keys = rng.random((n, num_layers, layout.num_experts))
    return keys.argsort(axis=-1)[..., : layout.top_k]


@st.composite
def layouts(draw: st.DrawFn) -> ModelLayout:
    num_experts = draw(st.sampled_from([2, 8, 128, 255, 256, 257, 300, 40000, 65519]))
    top_k = draw(st.integers(1 if num_experts != 256 else 2, 4).map(lambda k: min(k, num_experts)))
    layers = draw(st.lists(st.integers(0, 9), min_size=1, max_size=4, unique=True).map(sorted))
    return ModelLayout(tuple(layers), 10, num_experts, top_k)


def writes_of(count: int) -> st.SearchStrategy[list[int]]:
    """Lengths of that many writes, [0, 8] rows each."""
    return st.lists(st.integers(0, 8), min_size=count, max_size=count)


@on_every_device
@settings(max_examples=60, suppress_health_check=list(HealthCheck))
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
        written, reached = np.zeros(num_layers, int), np.zeros(num_layers, bool)
        capturer.begin(data.draw(st.sampled_from([None, n, 8])))
        fired = []
        for column in range(num_layers):
            lengths = data.draw(st.sampled_from([1, 1, 1, 0, 2, 3]).flatmap(writes_of))
            for m in lengths:
                wide = np.full((m, layout.top_k + 2), experts)  # with fused shared experts
                wide[:, : layout.top_k] = random_ids(rng, layout, m, 1)[:, 0]
                spoilt = data.draw(st.sampled_from([0, -1, -(2**31), experts, 70000, 2**31 - 1]))
                if m and not 0 <= spoilt < experts:
                    wide[rng.integers(m), rng.integers(layout.top_k)] = spoilt
                dtype = data.draw(st.sampled_from([torch.int32, torch.int64]))
                capturer.capture(column, torch.from_numpy(wide).to(dtype).to(device))
                expected[:m, column] = wide[:n, : layout.top_k]
                written[column] += 1 if m else 0
                reached[column] |= m >= n
            # Called twice, or without a first row that is valid, a layer is not believed.
            first = expected[:1, column]
            in_range = (expected[:, column] >= -1) & (expected[:, column] < experts)
            fired.append(written[column] == 1 and reached[column] and in_range.all())
            if sum(m > 0 for m in lengths) > 1 or ((first < 0) | (first >= experts)).any():
                expected[:, column] = -1
        bad = ((expected < 0) | (expected >= experts)).any(axis=-1)
        expected[bad] = 0 if layout.top_k > 1 else experts
        if n:
            assert capturer.fired(n) == np.flatnonzero(fired).tolist()
        pending.append((capturer.snapshot(n), expected))
        if data.draw(st.booleans(), label="rows are fetched"):
            one, expected = pending[data.draw(st.integers(0, len(pending) - 1))]
            np.testing.assert_array_equal(one.rows(), expected)
    for one, expected in pending:
        rows = one.rows()
        assert rows.dtype == layout.dtype
        np.testing.assert_array_equal(rows, expected)
        assert rows is one.rows()


@pytest.mark.parametrize(("experts", "dtype"), [(256, np.uint8), (257, np.uint16)])
def test_the_last_expert_fits_the_narrow_dtype(experts: int, dtype: Any) -> None:
    capturer = RoutingCapturer(ModelLayout((0,), 1, experts, 2), 4, "cpu")
    ids = np.array([[experts - 1, 0], [1, experts - 1]])
    capturer.begin()
    capturer.capture(0, torch.from_numpy(ids))
    rows = capturer.snapshot(2).rows()
    assert rows.dtype == dtype
    np.testing.assert_array_equal(rows[:, 0], ids)


@on_every_device
@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.int8, torch.int16, torch.uint16, torch.uint32, torch.uint64]
)
def test_ids_come_in_any_integer_dtype(device: str, dtype: torch.dtype) -> None:
    """Kernels of engines differ; ids of 16 bits and unsigned ones are among what they use."""
    capturer = RoutingCapturer(ModelLayout((0,), 1, 128, 2), 4, device)
    capturer.begin()
    capturer.capture(0, torch.tensor([[127, 0, 90], [1, 99, 90]], device=device).to(dtype))
    np.testing.assert_array_equal(capturer.snapshot(2).rows()[:, 0], [[127, 0], [1, 99]])


# ---------------------------------------------------------------------- passes that overtake


@on_every_device
def test_the_next_steps_do_not_touch_rows_that_nobody_fetched_yet(device: str) -> None:
    """Copies are large enough to be in flight while later steps run."""
    layout = ModelLayout(tuple(range(16)), 16, 300, 8)
    n = 4096 if device == "cuda" else 64
    capturer = RoutingCapturer(layout, n, device)
    address = capturer._buffer.data_ptr()
    pending = []
    for step in range(6):
        capturer.begin()
        for column in range(16):
            start = torch.arange(n, device=device)[:, None] + step * 31 + column
            capturer.capture(column, (start + torch.arange(8, device=device)) % 300)
        pending.append(capturer.snapshot(n))
    assert capturer._buffer.data_ptr() == address
    for step, one in enumerate(pending):
        expected = np.arange(n)[:, None, None] + step * 31 + np.arange(16)[:, None] + np.arange(8)
        np.testing.assert_array_equal(one.rows(), expected % 300)


class LateSlot(capturer_module.Slot):
    """A copy that takes until it is waited for, and some time then."""

    waited = 0

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.late = torch.full_like(self.private, 77)

    def receive(self, num_rows: int) -> Any:
        time.sleep(0.001)
        LateSlot.waited += 1
        self.late[:num_rows].copy_(self.private[:num_rows])
        return self.late[:num_rows].numpy()


@pytest.fixture
def late_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capturer_module, "Slot", LateSlot)
    LateSlot.waited = 0


def one_pass(capturer: RoutingCapturer, step: int) -> Any:
    capturer.begin()
    for column in range(2):
        capturer.capture(column, step_ids(step, column))
    return capturer.snapshot(4)


def step_ids(step: int, column: int) -> torch.Tensor:
    return (torch.arange(2) + torch.arange(4)[:, None] + step + column) % 8


def assert_step(rows: np.ndarray, step: int) -> None:
    expected = np.stack([step_ids(step, column).numpy() for column in range(2)], axis=1)
    np.testing.assert_array_equal(rows, expected)


def test_two_copies_are_in_flight_and_the_third_waits_for_the_first(late_copies: None) -> None:
    capturer = RoutingCapturer(PAIR, 4, "cpu")
    first, second = one_pass(capturer, 1), one_pass(capturer, 2)
    assert LateSlot.waited == 0
    third = one_pass(capturer, 3)
    assert LateSlot.waited == 1
    assert_step(first.rows(), 1)
    assert LateSlot.waited == 1
    # In any order, and each only once.
    assert_step(third.rows(), 3)
    assert_step(second.rows(), 2)
    assert_step(second.rows(), 2)
    assert LateSlot.waited == 3
    one_pass(capturer, 4)
    one_pass(capturer, 5)
    assert LateSlot.waited == 3


def test_rows_may_be_asked_for_from_other_threads(late_copies: None) -> None:
    """While the engine's own thread runs the passes, and now and then waits for room."""
    capturer = RoutingCapturer(PAIR, 4, "cpu")
    steps = 300

    def ask(asked: queue.SimpleQueue[Any]) -> int:
        for step in range(steps):
            assert_step(asked.get(timeout=20).rows(), step)
        return steps

    queues = [queue.SimpleQueue[Any]() for _ in range(3)]
    with ThreadPoolExecutor(len(queues)) as threads:
        asking = [threads.submit(ask, asked) for asked in queues]
        for step in range(steps):
            one = one_pass(capturer, step)
            for asked in queues:
                asked.put(one)
        assert [one.result(60) for one in asking] == [steps] * len(queues)
    assert LateSlot.waited == steps
    assert len(capturer._free) == 2


def test_rows_are_handed_over_where_they_arrived_and_once(late_copies: None) -> None:
    capturer = RoutingCapturer(PAIR, 4, "cpu")
    taken: list[np.ndarray] = []

    def take(rows: np.ndarray) -> None:
        assert not capturer._free  # not yet another pass's
        taken.append(rows)
        assert_step(rows, len(taken))

    first, second = one_pass(capturer, 1), one_pass(capturer, 2)
    first.hand_to(take)
    assert not taken[0].flags.owndata
    assert LateSlot.waited == 1
    third = one_pass(capturer, 3)  # in the room of the first: nobody waits
    assert LateSlot.waited == 1
    fourth = one_pass(capturer, 4)  # there is none: the rows of the second are put aside
    assert LateSlot.waited == 2
    second.hand_to(take)
    third.hand_to(take)
    for one in (first, second, third):
        with pytest.raises(InvalidArgument):
            one.rows()
        with pytest.raises(InvalidArgument):
            one.hand_to(take)
    with pytest.raises(ZeroDivisionError):
        fourth.hand_to(lambda _: 1 / 0)
    assert len(capturer._free) == 2
    assert len(taken) == 3


def test_rows_stay_while_they_are_handed_over(late_copies: None) -> None:
    """The engine's own thread runs on, and needs the room that they are in."""
    capturer = RoutingCapturer(PAIR, 4, "cpu")
    steps = 100

    def take(step: int, rows: np.ndarray) -> None:
        for _ in range(3):
            assert_step(rows, step)
            time.sleep(0)

    def ask() -> None:
        for step in range(steps):
            asked.get(timeout=20).hand_to(partial(take, step))

    asked = queue.SimpleQueue[Any]()
    with ThreadPoolExecutor(1) as thread:
        asking = thread.submit(ask)
        for step in range(steps):
            asked.put(one_pass(capturer, step))
        asking.result(60)
    assert len(capturer._free) == 2


def test_a_pass_whose_snapshot_failed_does_not_hold_its_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    capturer = RoutingCapturer(PAIR, 4, "cpu")
    with monkeypatch.context() as broken:
        broken.setattr(capture_cells.Gather, "__call__", lambda *_: 1 / 0)
        for step in range(3):
            with pytest.raises(ZeroDivisionError):
                one_pass(capturer, step)
    pending = [one_pass(capturer, step) for step in range(3)]
    for step, one in enumerate(pending):
        assert_step(one.rows(), step)


@on_every_device
def test_a_pass_starts_with_nothing(device: str) -> None:
    """Neither the rows of a pass that was given up, nor those of a longer one before."""
    capturer = RoutingCapturer(PAIR, 4, device)
    capturer.begin()
    capturer.capture(0, torch.tensor([[1, 2]] * 4, device=device))
    capturer.begin()
    capturer.capture(1, torch.tensor([[3, 4]] * 2, device=device))
    expected = [[[0, 0], [3, 4]], [[0, 0], [3, 4]], [[0, 0], [0, 0]]]
    np.testing.assert_array_equal(capturer.snapshot(3).rows(), expected)
    capturer.begin()
    assert not capturer.snapshot(4).rows().any()


def test_the_mode_in_which_a_capturer_was_made_does_not_bind_it() -> None:
    """Inference mode is one of the thread, and tensors of it cannot be written outside."""
    with torch.inference_mode():
        capturer = RoutingCapturer(PAIR, 4, "cpu")
    assert_step(one_pass(capturer, 0).rows(), 0)
    with torch.inference_mode():
        assert_step(one_pass(capturer, 1).rows(), 1)
    with torch.no_grad():
        assert_step(one_pass(capturer, 2).rows(), 2)


# ---------------------------------------------------------------------- compiled


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "lengths"),
    [
        ("aot_eager", (5, 64, 3, 40, 1, 2, 7)),
        pytest.param(
            "inductor",
            (5, 64, 3, 40),
            marks=pytest.mark.skipif(not COMPILES, reason="needs a C++ compiler and Python.h"),
        ),
    ],
)
def test_a_compiled_model_is_captured_alike(
    backend: str, lengths: tuple[int, ...], fresh_compiler: None
) -> None:
    layout = ModelLayout((0, 3), 4, 300, 4)
    capturer = RoutingCapturer(layout, 64, "cpu")
    address = capturer._buffer.data_ptr()
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
    model = SmallMoE(layout, capturer.capture)
    compiled = torch.compile(model, backend=counter, fullgraph=True, dynamic=True)
    for seed, n in enumerate(lengths):
        x = tokens(n, seed)
        capturer.begin()
        compiled(x)
        assert capturer.fired(n) == [0, 1]
        stop = min(64, n + 1)  # a row more, which this pass did not compute
        rows = capturer.snapshot(stop).rows()
        np.testing.assert_array_equal(rows[:n], truth(layout, x))
        assert not rows[n:].any()
    assert capturer._buffer.data_ptr() == address
    assert counter.frame_count <= 2  # one token is a shape of its own
    capturer.begin()
    with pytest.raises(InvalidArgument, match="65 rows; expected at most 64"):
        compiled(tokens(65, 0))


def test_a_layer_that_a_compiled_model_calls_twice_is_not_believed(fresh_compiler: None) -> None:
    capturer = RoutingCapturer(PAIR, 4, "cpu")

    def forward(ids: torch.Tensor) -> torch.Tensor:
        capturer.capture(0, ids[:1])
        capturer.capture(1, ids)
        capturer.capture(0, ids[1:])
        return ids + 1

    compiled = torch.compile(forward, backend="aot_eager", fullgraph=True)
    capturer.begin()
    compiled(step_ids(0, 0))
    assert capturer.fired(3) == [1]
    rows = capturer.snapshot(4).rows()
    assert not rows[:, 0].any()
    np.testing.assert_array_equal(rows[:, 1], step_ids(0, 0))


# ---------------------------------------------------------------------- what is refused


def test_columns_that_fired_are_those_that_were_written_to_the_end() -> None:
    capturer = RoutingCapturer(ModelLayout((0, 1, 2, 3, 4), 5, 8, 2), 4, "cpu")
    ids = step_ids(0, 0)
    capturer.begin()
    capturer.capture(0, ids)
    capturer.capture(1, ids[:2])
    capturer.capture(3, ids[:3])
    capturer.capture(4, torch.cat([ids[:2], torch.full((1, 2), 8)]))  # ids of another model
    assert capturer.fired(3) == [0, 3]
    assert capturer.fired(2) == [0, 1, 3, 4]
    capturer.begin()
    assert capturer.fired(1) == []


def test_one_expert_of_as_many_as_the_id_type_holds_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="num_experts is 256"):
        RoutingCapturer(ModelLayout((0,), 1, 256, 1), 4, "cpu")
    RoutingCapturer(ModelLayout((0,), 1, 256, 2), 4, "cpu")
    RoutingCapturer(ModelLayout((0,), 1, 255, 1), 4, "cpu")


@pytest.mark.parametrize("top_k", [1, 2])
def test_more_experts_than_a_cell_tells_apart_are_refused(top_k: int) -> None:
    with pytest.raises(InvalidArgument, match="num_experts is 65520; expected at most 65519"):
        RoutingCapturer(ModelLayout((0,), 1, 65520, top_k), 4, "cpu")
    RoutingCapturer(ModelLayout((0,), 1, 65519, top_k), 4, "cpu")


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
    capturer = RoutingCapturer(PAIR, 4, "cpu")
    with pytest.raises(InvalidArgument) as caught:
        capturer.capture(column, ids)
    assert caught.value.field == field


def test_what_the_others_refuse() -> None:
    with pytest.raises(InvalidArgument, match="max_num_tokens"):
        RoutingCapturer(PAIR, 0, "cpu")
    capturer = RoutingCapturer(PAIR, 4, "cpu")
    capturer.begin()
    for n in (-1, 5):
        with pytest.raises(InvalidArgument, match="num_tokens"):
            capturer.snapshot(n)
    for n in (0, 5):
        with pytest.raises(InvalidArgument, match="num_tokens"):
            capturer.fired(n)
    capturer.snapshot(4)
    # What the buffer holds now has been taken; it is not the next pass.
    with pytest.raises(InvalidArgument, match="begin"):
        capturer.snapshot(4)
    with pytest.raises(InvalidArgument, match="begin"):
        capturer.fired(4)
