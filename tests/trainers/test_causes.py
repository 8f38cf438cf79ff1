"""Causes of disagreement, named for faults that are made by hand in a small model.

Four faults that teams met in 2026: router gates left on old weights after an update, a router bias
in a lower precision, expert weights corrupted at an update, and rows of other samples. The choices
of both sides come from the model's own routers, recorded by hooks.
"""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from routetrace.client import RouteClient
from routetrace.client.agreement import Choices
from routetrace.common.layout import ModelLayout
from routetrace.server.testing import ServerProcess, run_server
from routetrace.trainers.causes import likely_cause, worse_since
from routetrace.trainers.comparison import Comparison, compare_ids, compare_traces
from support.agents.feeder import Feeder
from support.ranks.rank_rows import trace_of

pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from tiny_moe import PROMPTS, build_model

LAYERS, TOKENS = 8, 640
LAYOUT = ModelLayout(tuple(range(LAYERS)), LAYERS, 32, 4)
TEXT = " ".join(PROMPTS) * 2
BIAS_SCALE, BIAS_OFFSET = 0.3, 100.0


def updated(model: Any, size: float, seed: int) -> Any:
    """A copy whose weights have moved by a share of their spread."""
    new = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in new.parameters():
            if weight.ndim >= 2:
                step = torch.randn(weight.shape, generator=generator)
                weight.add_(step * weight.std() * size)
    return new


def tokens_of(text: str) -> torch.Tensor:
    return torch.tensor([list(text.encode()[:TOKENS])])


@torch.no_grad()
def choices(model: Any, tokens: torch.Tensor, bias: torch.Tensor | None = None) -> np.ndarray:
    """Experts [tokens, layers, 4] that the model's routers choose, with a bias of their scores."""
    found: list[np.ndarray] = []
    hooks = []
    for layer, block in enumerate(model.model.layers):

        def note(gate: Any, given: Any, _: Any, layer: int = layer) -> None:
            hidden = given[0].reshape(-1, given[0].shape[-1])
            scores = (hidden @ gate.weight.T).float().softmax(-1)
            if bias is not None:
                scores = scores + bias[layer].float()
            found.append(scores.topk(4, -1).indices.numpy().astype(np.uint8))

        hooks.append(block.mlp.gate.register_forward_hook(note))
    model(tokens)
    for hook in hooks:
        hook.remove()
    return np.stack(found, axis=1)


class Models:
    """A model before and after an update, and the choices of a trainer of the new weights."""

    def __init__(self, seed: int) -> None:
        self.old = build_model(seed, LAYERS)
        self.new = updated(self.old, 0.1, seed + 1)
        self.tokens = tokens_of(TEXT)
        self.trainer = choices(self.new, self.tokens)

    def engine(self, change: Callable[[Any], None]) -> np.ndarray:
        """Return the choices of an engine in bfloat16 with changed new weights."""
        model = copy.deepcopy(self.new)
        with torch.no_grad():
            change(model)
        return choices(model.bfloat16(), self.tokens)

    def old_gates(self, model: Any) -> None:
        for now, before in zip(model.model.layers, self.old.model.layers, strict=True):
            now.mlp.gate.load_state_dict(before.mlp.gate.state_dict())

    @staticmethod
    def corrupt_experts(model: Any, layers: range = range(LAYERS)) -> None:
        """Each expert gets the weights of another one, as a wrong layout of an update does."""
        for layer in layers:
            for weight in model.model.layers[layer].mlp.experts.parameters():
                weight.copy_(weight.roll(1, 0))


@pytest.fixture(
    scope="module", params=[0, *(pytest.param(n, marks=pytest.mark.long) for n in (1, 2))]
)
def models(request: pytest.FixtureRequest) -> Models:
    return Models(request.param)


def compared(ours: np.ndarray, theirs: np.ndarray) -> Comparison:
    return compare_ids(trace_of(LAYOUT, ours), theirs)


def words_of(found: Comparison) -> str:
    """Return the verdict in words; "" if there is none."""
    return found.diagnosis or found.cause or ""


def test_two_precisions_are_no_fault(models: Models):
    found = compared(models.engine(lambda _: None), models.trainer)
    assert 0 < found.differing / found.cells < 0.3
    assert words_of(found) == ""
    # Nor are rows that are one small update behind.
    ahead = choices(updated(models.new, 0.005, 9), models.tokens)
    assert words_of(compared(models.engine(lambda _: None), ahead)) == ""


def test_gates_left_on_old_weights(models: Models):
    found = compared(models.engine(models.old_gates), models.trainer)
    assert "first MoE layer, 0" in words_of(found)
    assert "routers differ, in weights (left from before an update" in words_of(found)


def test_a_router_bias_in_another_precision(models: Models):
    spread = torch.randn(LAYERS, 32, generator=torch.Generator().manual_seed(3)) * BIAS_SCALE
    bias = spread + BIAS_OFFSET
    ours = choices(models.new, models.tokens, bias.bfloat16())
    theirs = choices(models.new, models.tokens, bias)
    found = compared(ours, theirs)
    assert found.differing_tokens / found.tokens > 0.9  # nearly every pick
    assert "routers differ" in words_of(found)
    assert "a bias, or precision" in words_of(found)


@pytest.mark.parametrize("first", [0, 2, 5])
def test_corrupted_experts(models: Models, first: int):
    ours = models.engine(lambda model: models.corrupt_experts(model, range(first, LAYERS)))
    found = compared(ours, models.trainer)
    assert f"from layer {first + 1} on" in words_of(found)
    assert f"layer {first} differs after its router" in words_of(found)
    assert "the weights of its experts" in words_of(found)
    assert found.diagnosis is None  # rows are of these tokens: the first layer says so


def test_rows_of_other_samples(models: Models):
    other = choices(models.new, tokens_of(" ".join(PROMPTS[::-1]) * 2))
    found = compared(other, models.trainer)
    assert "rows match nothing" in (found.diagnosis or "")
    assert "rows of another sample" in words_of(found)
    assert found.cause is None


# ------------------------------------------------------------------ through a server


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with run_server(agent_timeout_seconds=3600) as server:
        yield server


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("old_gates", r"since then \d+% of cells differ at the first MoE layer, 0"),
        ("corrupt_experts", r"since then .* from layer 1 on"),
    ],
)
def test_a_fault_since_an_update_is_named_with_it(
    models: Models, server: ServerProcess, fault: str, words: str
):
    """An update in the middle of a trace brings the fault; a trainer reports its own choices."""
    well = models.engine(lambda _: None)
    ill = models.engine(getattr(models, fault))
    middle = TOKENS // 2
    run = f"{fault} {id(models)}"
    feeder = Feeder(server.target, LAYOUT, run=run)
    handle = feeder.begin("t", prompt_len=9)
    for version, rows, start, stop in ((417, well, 0, middle), (418, ill, middle, TOKENS)):
        feeder.set_weight_version(version)
        feeder.step(rows[start:stop], [[handle, start, stop - start]])
    feeder.finish(handle, TOKENS + 1)
    feeder.close()
    with RouteClient(server.target, run=run) as client, client.reports() as reports:
        client.report_routing("t", models.trainer, step=1563, weight_version=418)
        found = compare_traces(client.get("t"), reports.get("t"))
    assert re.match(r"\d+% of cells differ since weight version 418, and \d+% before; ",
                    words_of(found))  # fmt: skip
    assert re.search(words, words_of(found))
    newer = [one for one in found.worst if one.weight_version == 418]
    assert len(newer) > len(found.worst) / 2


# ------------------------------------------------------------------ rules


def test_rows_whose_first_layer_fits_are_of_these_tokens():
    """However many later layers have nothing in common: no other tokens give the same choices."""
    layout = ModelLayout(tuple(range(24)), 24, 64, 4)
    rng = np.random.default_rng(5)
    ours, theirs = (
        rng.random((300, 24, 64)).argsort(axis=2)[..., :4].astype(np.uint8) for _ in range(2)
    )
    theirs[:, 0] = ours[:, 0]
    found = compare_ids(trace_of(layout, ours), theirs)
    assert found.diagnosis is None
    assert "from layer 1 on" in (found.cause or "")
    theirs[100:200, 0] = ours[200:300, 0]  # in a part, the first layer is another token's, too
    assert "rows match nothing: for" in (
        compare_ids(trace_of(layout, ours), theirs).diagnosis or ""
    )


def of(differing: int, cells: int = 1000) -> Choices:
    return Choices(cells, differing, 4 * cells - 2 * differing, 4 * cells)


def test_a_course_without_a_pattern_has_no_cause():
    assert likely_cause({}) is None
    assert likely_cause({layer: of(0) for layer in range(4)}) is None
    growing = {3 * layer: of(20 + 25 * layer) for layer in range(12)}
    assert likely_cause(growing) is None
    assert likely_cause({0: of(900, 31), 1: of(10)}) is None  # too few cells


def test_layers_are_named_by_their_ids():
    jump = {3: of(10), 5: of(30), 8: of(700), 9: of(900)}
    assert likely_cause(jump) == (
        "2% of cells differ up to layer 5, and 80% from layer 8 on: layer 5 differs after its "
        "router, such as in the weights of its experts"
    )
    peaks = {3: of(500), 5: of(20), 8: of(400), 9: of(0)}
    assert "next one, which sees all that they compute: 3 (50%), 8 (40%): their own" in (
        likely_cause(peaks) or ""
    )
    # What gets better again is no fault of what a layer computes.
    assert "after its router" not in (likely_cause({0: of(0), 1: of(500), 2: of(100)}) or "")
    many = {layer: of(600 * (layer % 2 == 0)) for layer in range(20)}
    assert "(60%) and 4 more: their own routers" in (likely_cause(many) or "")


@given(st.dictionaries(st.integers(0, 60), st.tuples(st.integers(0, 99), st.integers(0, 99))))
def test_any_counts_are_taken(counts: dict[int, tuple[int, int]]):
    by_layer = {i: of(min(a, b), max(a, b)) for i, (a, b) in counts.items()}
    assert likely_cause(by_layer) is None or by_layer
    since = worse_since(by_layer)
    assert since is None or since in by_layer


def test_the_update_that_made_it_worse():
    assert worse_since({}) is None
    assert worse_since({7: of(900)}) is None
    assert worse_since({7: of(10), 8: of(20), 9: of(30)}) is None
    assert worse_since({7: of(10), 8: of(300), 9: of(280)}) == 8
    assert worse_since({7: of(10), 8: of(150), 9: of(900)}) == 9  # the larger step
    assert worse_since({7: of(900), 8: of(10), 9: of(150)}) is None  # it got better
    assert worse_since({7: of(1, 20), 8: of(300)}) is None  # too few cells


def test_the_documented_words_are_the_real_ones(models: Models):
    page = (Path(__file__).parents[2] / "docs" / "trainers.md").read_text("utf-8")
    table = page.partition("| fault | words |\n")[2].partition("\n\n")[0]
    documented = re.findall(r"^\| .* \| `(.*)` \|$", table, re.M)
    assert len(documented) == 3
    spread = torch.randn(LAYERS, 32, generator=torch.Generator().manual_seed(3)) * BIAS_SCALE
    bias = spread + BIAS_OFFSET
    real = [
        compared(models.engine(lambda model: models.corrupt_experts(model, range(2, LAYERS))),
                 models.trainer),
        compared(models.engine(models.old_gates), models.trainer),
        compared(choices(models.new, models.tokens, bias.bfloat16()),
                 choices(models.new, models.tokens, bias)),
    ]  # fmt: skip
    for said, found in zip(documented, real, strict=True):
        same = (re.sub(r"\d+%", "N%", text) for text in (said, words_of(found)))
        first, second = (re.sub(r"(\d+ \(N%\)(, )?)+", "LAYERS", text) for text in same)
        assert first == second
