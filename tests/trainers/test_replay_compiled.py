"""Replay in compiled models: the given experts, and no new programs from block to block.

The truth is a model that is not compiled, with routers that are hard-wired to the same experts.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from routetrace.common.errors import InvalidArgument
from routetrace.trainers.replay import replay
from support.models.hard_wired import Fickle, hard_wire
from support.models.tiny_models import VOCABULARY, tiny_model

SHARED, LAYOUT = tiny_model("qwen3_moe")
LAYERS = LAYOUT.layer_ids
TOKENS = torch.randint(3, VOCABULARY, (2, 7), generator=torch.Generator().manual_seed(0))
BLOCKS = 20
PARTS: dict[str, Callable[[Any], list[Any]]] = {
    "model": lambda model: [model],
    "layers": lambda model: list(model.model.layers),
    "blocks": lambda model: [layer.mlp for layer in model.model.layers],
    "routers": lambda model: [layer.mlp.gate for layer in model.model.layers],
}

pytestmark = pytest.mark.filterwarnings("ignore:`gradient_checkpointing")


class Programs:
    """A backend of the compiler that counts."""

    def __init__(self) -> None:
        self.compiled = 0
        self.run = 0

    def __call__(self, graph: Any, _inputs: Any) -> Any:
        self.compiled += 1

        def run(*args: Any) -> Any:
            self.run += 1
            return graph.forward(*args)

        return run


@pytest.fixture
def programs() -> Iterator[Programs]:
    torch.compiler.reset()
    yield Programs()
    torch.compiler.reset()


def compiled(part: str, programs: Programs, model: Any = None, **options: Any) -> Any:
    model = copy.deepcopy(SHARED) if model is None else model
    if part == "wrapper":
        return torch.compile(model, backend=programs, **options)
    for module in PARTS[part](model):
        module.compile(backend=programs, **options)
    return model


def drawn(seed: int) -> torch.Tensor:
    """Ids [tokens, layers, top_k]."""
    generator = torch.Generator().manual_seed(seed)
    keys = torch.rand((TOKENS.numel(), len(LAYERS), LAYOUT.num_experts), generator=generator)
    return keys.argsort(dim=-1)[..., : LAYOUT.top_k]


def wired(ids: torch.Tensor) -> Any:
    model = copy.deepcopy(SHARED)
    hard_wire(model, LAYERS, ids.transpose(0, 1))
    return model


def logits_of(model: Any) -> torch.Tensor:
    logits: torch.Tensor = model(input_ids=TOKENS, use_cache=False).logits
    return logits


@pytest.mark.parametrize(
    "part",
    [
        *(pytest.param(p, marks=pytest.mark.slow) for p in ("wrapper", "model")),
        "layers",
        "blocks",
        "routers",
    ],
)
@pytest.mark.parametrize("warm", [True, False], ids=["warm", "cold"])
def test_many_blocks_replay_in_the_same_programs(part: str, warm: bool, programs: Programs) -> None:
    model, counts = compiled(part, programs), []
    with torch.no_grad():
        own = logits_of(SHARED)
        if warm:
            torch.testing.assert_close(logits_of(model), own)
        for seed in range(BLOCKS):
            with replay(model, drawn(seed), layer_ids=LAYERS):
                before = programs.run
                found = logits_of(model)
                ran = programs.run - before
            torch.testing.assert_close(found, logits_of(wired(drawn(seed))))
            torch.testing.assert_close(logits_of(model), own)
            counts.append((programs.compiled, ran))
    # Of the first block, and of the first pass after it; those of a router alone are empty.
    assert counts[0][0] > 0
    assert (counts[-1][1] > 0) == (part != "routers")
    assert set(counts[1:]) == {counts[1]}


@pytest.mark.parametrize(
    "part",
    [
        *(pytest.param(p, marks=pytest.mark.slow) for p in ("wrapper", "model")),
        "layers",
        "blocks",
        "routers",
    ],
)
def test_comparison_counts_in_compiled_models(part: str, programs: Programs) -> None:
    model = compiled(part, programs)
    with torch.no_grad():
        own = logits_of(model)
        for compare in (True, "only"):
            for seed in (1, 2):
                ids = drawn(seed)
                with replay(SHARED, ids, layer_ids=LAYERS, compare=compare) as truth:  # type: ignore[arg-type]
                    logits_of(SHARED)
                with replay(model, ids, layer_ids=LAYERS, compare=compare) as block:  # type: ignore[arg-type]
                    found = logits_of(model)
                expected = own if compare == "only" else logits_of(wired(ids))
                torch.testing.assert_close(found, expected)
                assert block.agreement == truth.agreement
                assert block.agreement.choices.cells == ids[..., 0].numel()
                assert block.trainer_ids is not None
                assert torch.equal(block.trainer_ids, truth.trainer_ids)


@pytest.mark.parametrize(
    "part", [pytest.param("model", marks=pytest.mark.slow), "layers", "blocks", "routers"]
)
@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("of", ["ids", "own"])
def test_gradients_of_compiled_parts_in_checkpoints(
    part: str, use_reentrant: bool, of: str, programs: Programs
) -> None:
    """Compiled and run before; several micro-batches, and their backward passes after them."""
    model = copy.deepcopy(SHARED).train()
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    model.enable_input_require_grads()
    fickle = Fickle(model, LAYERS)
    compiled(part, programs, model)
    logits_of(model)
    losses, truths = [], []
    for seed in range(3):
        layer_ids = None if of == "own" else LAYERS
        with replay(model, "own" if of == "own" else drawn(seed), layer_ids=layer_ids):
            losses.append(logits_of(model).pow(2).mean())
        used = fickle.ids(-1).transpose(0, 1)
        assert of == "own" or torch.equal(used, drawn(seed))
        truths.append(wired(used).train())
        logits_of(truths[-1]).pow(2).mean().backward()
    for loss in reversed(losses):
        loss.backward()
    parameters = zip(model.named_parameters(), *(t.parameters() for t in truths), strict=True)
    for (name, found), *expected in parameters:
        total = sum(one.grad for one in expected)
        assert float(total.abs().sum()) > 0
        torch.testing.assert_close(
            found.grad, total, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("part", ["wrapper", *PARTS])
def test_graphs_that_may_not_break_are_refused(part: str, programs: Programs) -> None:
    model = compiled(part, programs, fullgraph=True)
    with pytest.raises(InvalidArgument, match=r"compile without fullgraph=True") as caught:
        replay(model, drawn(1), layer_ids=LAYERS)
    assert caught.value.field == "model"
    assert ("at model.layers.0" in caught.value.value) == (part not in ("model", "wrapper"))


def test_a_graph_that_may_not_break_is_refused_in_the_pass_where_it_is_not_seen(
    programs: Programs,
) -> None:
    model = copy.deepcopy(SHARED)
    model.set_experts_implementation("batched_mm")
    whole = compiled("wrapper", programs, model, fullgraph=True)
    with torch.no_grad():
        own = logits_of(whole)
        with (
            pytest.raises(Exception, match=r"compile without fullgraph=True"),
            replay(model, drawn(1), layer_ids=LAYERS),
        ):
            logits_of(whole)
        torch.testing.assert_close(logits_of(whole), own)


def test_graphs_without_routers_may_be_whole(programs: Programs) -> None:
    model = copy.deepcopy(SHARED)
    for layer in model.model.layers:
        layer.input_layernorm.compile(backend=programs, fullgraph=True)
    with torch.no_grad(), replay(model, drawn(1), layer_ids=LAYERS):
        torch.testing.assert_close(logits_of(model), logits_of(wired(drawn(1))))
    assert programs.run > 0
