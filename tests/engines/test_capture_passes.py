"""Forward passes as engines run them: recorded whole or in pieces, padded, cut short, run twice.

CUDA graphs are stood in for by graphs of operators (`recorded`), whose replay runs no Python of the
model. `test_capturer_cuda` has real ones.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch._dynamo

from routetrace.capture_agent.engines import cells as capture_cells
from routetrace.capture_agent.engines.capturer import RoutingCapturer
from routetrace.common.layout import ModelLayout
from support.models.recorded import Graph, counted
from support.models.small_moe import WIDTH, SmallMoE, tokens, truth

SIZES = (4, 8, 16)
MODES = ("FULL", "PIECEWISE", "FULL_AND_PIECEWISE")


def layout_of(num_layers: int) -> ModelLayout:
    return ModelLayout(tuple(range(num_layers)), num_layers, 300, 4)


LAYOUT = layout_of(3)


class Engine:
    """A model whose steps are replayed, as model runner V2 does it.

    Layers route their tokens, and padding to -1; between them, in pieces, something runs that is
    not in a graph. FULL graphs are for steps in which each request has a token; those of the mode
    PIECEWISE, or with more tokens, are in pieces.
    """

    def __init__(self, mode: str, max_num_tokens: int = max(SIZES)) -> None:
        self.capturer = RoutingCapturer(LAYOUT, max_num_tokens, "cpu")
        self.model = SmallMoE(LAYOUT, self.read)
        self.layers = [self.layer(column) for column in range(len(LAYOUT.layer_ids))]
        self.x = torch.zeros(max_num_tokens, WIDTH, dtype=torch.float64)
        self.is_padding = torch.zeros(max_num_tokens, dtype=torch.bool)
        self.python = 0
        self.mode = mode
        self.hidden: dict[int, torch.Tensor] = {}
        self.full: dict[int, Graph] = {}
        self.pieces: dict[int, list[Graph]] = {}
        for size in SIZES:  # with no step between
            self.is_padding.fill_(value=True)
            if mode != "PIECEWISE":
                self.full[size] = Graph(lambda size=size: self.model(self.x[:size]))
            if mode != "FULL":
                self.hidden[size] = torch.zeros(size, WIDTH, dtype=torch.float64)
                self.pieces[size] = [
                    Graph(lambda size=size, column=column: self.piece(size, column))
                    for column in range(len(LAYOUT.layer_ids))
                ]

    def read(self, column: int, ids: torch.Tensor) -> None:
        self.python += 1
        padding = self.is_padding[: len(ids), None]
        self.capturer.capture(column, torch.where(padding, -1, ids))

    def layer(self, column: int) -> SmallMoE:
        """One layer of the model."""
        layer = SmallMoE(layout_of(1), lambda _, ids: self.read(column, ids))
        for name, weights in self.model.named_parameters():
            getattr(layer, name).data = weights.data[column : column + 1]
        return layer

    def piece(self, size: int, column: int) -> None:
        self.hidden[size].copy_(self.layers[column](self.hidden[size]))

    def run(self, x: torch.Tensor, *, decodes: bool) -> None:
        """A forward pass over x, padded to the size of a graph."""
        n = len(x)
        size = min(size for size in SIZES if size >= n)
        self.x.normal_()
        self.x[:n] = x
        self.is_padding[:n], self.is_padding[n:size] = False, True
        python = self.python
        if self.mode == "FULL" or (self.mode == "FULL_AND_PIECEWISE" and decodes):
            self.full[size].replay()
        else:
            self.hidden[size].copy_(self.x[:size])
            for piece in self.pieces[size]:
                piece.replay()
                torch.zeros(1 << 10).fill_(5)  # attention
        assert self.python == python


@pytest.mark.parametrize("mode", MODES)
def test_replayed_passes_are_captured_without_their_padding(mode: str) -> None:
    engine, rng = Engine(mode), np.random.default_rng(0)
    for step in range(30):
        x = tokens(int(rng.integers(1, max(SIZES) + 1)), step)
        engine.capturer.begin(len(x) if step % 3 else None)
        engine.run(x, decodes=bool(step % 2))
        rows = engine.capturer.snapshot(len(x)).rows()
        np.testing.assert_array_equal(rows, truth(LAYOUT, x))
    # Without a replay there is nothing.
    engine.capturer.begin(4)
    assert not engine.capturer.snapshot(4).rows().any()


@pytest.mark.parametrize("mode", MODES)
def test_a_dummy_batch_of_padding_proves_capture(mode: str) -> None:
    engine = Engine(mode)
    for decodes in (True, False):
        engine.capturer.begin()
        engine.run(tokens(0, 0).reshape(0, WIDTH), decodes=decodes)
        assert engine.capturer.faults(1) == {}
        assert engine.capturer.faults(5)[0] == "never written"
    engine.capturer.begin()
    for _ in range(2):
        engine.run(tokens(1, 0), decodes=True)
    assert engine.capturer.faults(1) == dict.fromkeys(range(3), "written twice")


@pytest.mark.parametrize("num_layers", [3, 48])
def test_a_pass_gets_two_kernels_for_all_its_layers(num_layers: int) -> None:
    layout = layout_of(num_layers)
    capturer = RoutingCapturer(layout, 8, "cpu")
    capturer.begin()
    chosen = [ids_of(8, column) for column in range(num_layers)]
    with counted() as operators:
        for column, ids in enumerate(chosen):
            capturer.capture(column, ids)
    assert operators.kernels == ["aten.stack.default", "aten.add.out"]
    np.testing.assert_array_equal(capturer.snapshot(8).rows(), torch.stack(chosen, dim=1))


def test_a_step_has_two_kernels_on_the_stream_of_the_engine() -> None:
    """The fill before the pass, of its rows alone, and the copy after it."""
    capturer = RoutingCapturer(LAYOUT, 4096, "cpu")
    with counted() as operators:
        capturer.begin(8)
        capturer.snapshot(8)
    assert operators.kernels == ["aten.fill_.Scalar", "aten.clamp.Tensor_out"]
    (fill,) = [args for func, args, *_ in operators.calls if str(func) == "aten.fill_.Scalar"]
    assert fill[0].shape == (3, 8, 4)


def test_a_compiled_pass_has_one_write() -> None:
    torch._dynamo.reset()
    capturer = RoutingCapturer(LAYOUT, 16, "cpu")
    graphs: list[torch.fx.GraphModule] = []

    def compiler(graph: torch.fx.GraphModule, inputs: object) -> Callable[..., object]:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(SmallMoE(LAYOUT, capturer.capture), backend=compiler, fullgraph=True)
    for seed in range(2):
        x = tokens(9, seed)
        capturer.begin(9)
        compiled(x)
        np.testing.assert_array_equal(capturer.snapshot(9).rows(), truth(LAYOUT, x))
    (graph,) = graphs
    writes = [node for node in graph.graph.nodes if "routetrace" in str(node.target)]
    assert len(writes) == 1
    assert len(writes[0].args[2]) == len(LAYOUT.layer_ids)
    torch._dynamo.reset()


# ---------------------------------------------------------------------- passes that are not whole


def ids_of(n: int, column: int) -> torch.Tensor:
    return (torch.arange(n)[:, None] * 7 + torch.arange(4) + column) % 300


def valid(rows: np.ndarray) -> list[bool]:
    return (rows[..., :1] != rows[..., 1:]).any(axis=-1).all(axis=0).tolist()


@pytest.mark.parametrize("skipped", [(0,), (1,), (2,), (0, 2), (1, 2), (0, 1, 2)])
def test_a_layer_that_a_pass_skips_is_missing_alone(skipped: tuple[int, ...]) -> None:
    capturer = RoutingCapturer(LAYOUT, 8, "cpu")
    for columns in ((0, 1, 2), set(range(3)) - set(skipped)):  # after a whole pass
        capturer.begin(8)
        for column in sorted(columns):
            capturer.capture(column, ids_of(8, column))
        rows = capturer.snapshot(8).rows()
        assert valid(rows) == [column in columns for column in range(3)]
        for column in columns:
            np.testing.assert_array_equal(rows[:, column], ids_of(8, column))


def test_a_pass_in_two_halves_is_not_believed() -> None:
    """Whose rows the second half holds is not known: nothing of either is served."""
    capturer = RoutingCapturer(LAYOUT, 8, "cpu")
    halves = [[(column, half) for column in range(3)] for half in range(2)]
    one_after_the_other = [*halves[0], *halves[1]]
    layer_by_layer = [pair for both in zip(*halves, strict=True) for pair in both]
    for order in (one_after_the_other, layer_by_layer):
        capturer.begin(8)
        for column, half in order:
            capturer.capture(column, ids_of(8, column)[4 * half : 4 * half + 4])
        assert capturer.faults(4) == dict.fromkeys(range(3), "written twice")
        assert not capturer.snapshot(8).rows().any()


def test_layers_that_differ_in_rows_and_types_are_written_as_they_are() -> None:
    capturer = RoutingCapturer(LAYOUT, 8, "cpu")
    capturer.begin(8)
    given = [ids_of(8, 0).to(torch.int32), ids_of(5, 1), ids_of(8, 2).to(torch.int16)]
    for column, ids in enumerate(given):
        capturer.capture(column, ids)
    rows = capturer.snapshot(8).rows()
    for column, ids in enumerate(given):
        np.testing.assert_array_equal(rows[: len(ids), column], ids)
        assert not rows[len(ids) :, column].any()


@pytest.mark.parametrize("inference", [False, True])
def test_routers_that_share_their_output_lose_one_pass_and_no_more(inference: bool) -> None:
    capturer = RoutingCapturer(LAYOUT, 8, "cpu")
    with torch.inference_mode(inference):
        shared = torch.zeros(8, 4, dtype=torch.int32)
        for step in range(3):
            capturer.begin(8)
            for column in range(3):
                shared.copy_(ids_of(8, column) + step)
                capturer.capture(column, shared)
            rows = capturer.snapshot(8).rows()
            for column in range(3):
                if rows[:, column].any():
                    np.testing.assert_array_equal(rows[:, column], ids_of(8, column) + step)
            assert valid(rows) == ([True] * 3 if step else [False, True, True])


def test_ids_that_are_changed_in_place_lose_one_pass_and_no_more() -> None:
    capturer = RoutingCapturer(LAYOUT, 8, "cpu")
    for step in range(3):
        capturer.begin(8)
        for column in range(3):
            ids = ids_of(8, column)
            capturer.capture(column, ids)
            if column == 1:
                ids.add_(100)
        rows = capturer.snapshot(8).rows()
        assert valid(rows) == [True, step > 0, True]
        np.testing.assert_array_equal(rows[:, 0], ids_of(8, 0))
        if step:
            np.testing.assert_array_equal(rows[:, 1], ids_of(8, 1))


def test_a_compiled_pass_keeps_ids_that_are_changed_in_place() -> None:
    torch._dynamo.reset()
    capturer = RoutingCapturer(LAYOUT, 8, "cpu")

    def forward(ids: torch.Tensor) -> torch.Tensor:
        for column in range(3):
            chosen = ids + column
            capturer.capture(column, chosen)
            chosen.add_(100)
        return chosen

    capturer.begin(8)
    torch.compile(forward, backend="aot_eager", fullgraph=True)(ids_of(8, 0))
    rows = capturer.snapshot(8).rows()
    for column in range(3):
        np.testing.assert_array_equal(rows[:, column], ids_of(8, 0) + column)
    torch._dynamo.reset()


def test_a_pass_that_is_compiled_in_part_is_captured() -> None:
    torch._dynamo.reset()
    capturer = RoutingCapturer(LAYOUT, 8, "cpu")

    def forward(ids: torch.Tensor) -> torch.Tensor:
        capturer.capture(0, ids)
        torch._dynamo.graph_break()
        eager(ids + 1)
        capturer.capture(2, ids + 2)
        return ids + 3

    @torch._dynamo.disable
    def eager(ids: torch.Tensor) -> None:
        ids.add_(0)  # so that torch has counted a change
        capturer.capture(1, ids)

    compiled = torch.compile(forward, backend="aot_eager")
    for step in range(3):
        capturer.begin(8)
        compiled(ids_of(8, step))
        rows = capturer.snapshot(8).rows()
        for column in range(3):
            np.testing.assert_array_equal(rows[:, column], ids_of(8, step) + column)
    torch._dynamo.reset()


def test_rows_beyond_those_of_the_pass_cannot_be_asked_for() -> None:
    capturer = RoutingCapturer(LAYOUT, 8, "cpu")
    capturer.begin(4)
    with pytest.raises(ValueError, match="num_tokens is 5"):
        capturer.snapshot(5)
    with pytest.raises(ValueError, match="num_tokens is 9"):
        capturer.begin(9)


# ---------------------------------------------------------------------- cells


def cell(*ids: int, experts: int = 300) -> dict[int, str]:
    """Faults of a cell that was written with each of these."""
    buffer = torch.full((1, 1, 1), capture_cells.POISON, dtype=torch.int32)
    for one in ids:
        capture_cells.write(buffer, [0], [torch.tensor([[one]])])
    return capture_cells.faults(buffer, experts)


@pytest.mark.parametrize("experts", [2, 300, 40000, 65504])
def test_what_a_cell_says_of_its_writes(experts: int) -> None:
    assert cell(experts=experts) == {0: "never written"}
    for one in (0, experts - 1, -1):
        assert cell(one, experts=experts) == {}
        for other in (0, 1, experts - 1, -1):
            assert cell(one, other, experts=experts) == {0: "written twice"}
            assert cell(one, other, one, experts=experts) == {0: "written twice"}
    for bad in (experts, -2, 70000):
        assert cell(bad, experts=experts)[0].startswith(f"out of range: id {bad} of")
