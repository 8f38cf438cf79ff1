"""Gradients of replay where checkpoints run routers again: after the block, and in any order.

The truth is a model without checkpoints whose routers are hard-wired to the same experts.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.utils.checkpoint import checkpoint

from routetrace.common.errors import InvalidArgument
from routetrace.trainers.replay import replay
from support.models.hard_wired import Fickle, hard_wire
from support.models.tiny_models import FAMILIES, VOCABULARY, tiny_model

BATCH, SEQ = 2, 9
SHARED, LAYOUT = tiny_model("qwen3_moe")
LAYERS = LAYOUT.layer_ids
KINDS = ["reentrant", "not reentrant", "wrapped", "wrapped reentrant", "both"]

pytestmark = [
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad"),
    pytest.mark.filterwarnings("ignore:`gradient_checkpointing"),
]


@pytest.fixture(autouse=True)
def _nothing_stays() -> Iterator[None]:
    yield
    for module in SHARED.modules():
        assert not {"forward", "_gradient_checkpointing_func"} & set(vars(module))


def checkpointed(kind: str) -> Any:
    """A copy of the model whose layers run again in the backward pass."""
    model = copy.deepcopy(SHARED).train()
    if kind in ("reentrant", "not reentrant", "both"):
        model.gradient_checkpointing_enable({"use_reentrant": kind == "reentrant"})
    if kind in ("wrapped", "wrapped reentrant", "both"):
        impl = CheckpointImpl.REENTRANT if kind == "wrapped reentrant" else None
        layers = set(model.model.layers)
        apply_activation_checkpointing(
            model,
            lambda module: checkpoint_wrapper(module, impl or CheckpointImpl.NO_REENTRANT),
            check_fn=lambda module: module in layers,
        )
    model.enable_input_require_grads()
    return model


def drawn(seed: int, tokens: int = BATCH * SEQ) -> torch.Tensor:
    """Ids [tokens, layers, top_k]."""
    generator = torch.Generator().manual_seed(seed)
    keys = torch.rand((tokens, len(LAYERS), LAYOUT.num_experts), generator=generator)
    return keys.argsort(dim=-1)[..., : LAYOUT.top_k]


def tokens(seed: int, shape: tuple[int, int] = (BATCH, SEQ)) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, shape, generator=generator)


def loss_of(model: Any, input_ids: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(input_ids=input_ids, use_cache=False).logits.pow(2).mean()
    return loss


def wired(ids: torch.Tensor, valid: torch.Tensor | None = None) -> Any:
    """A model without checkpoints whose routers choose ids [layers, tokens, top_k]."""
    model = copy.deepcopy(SHARED).train()
    hard_wire(model, LAYERS, ids, valid)
    return model


def gradients(*models: Any) -> dict[str, torch.Tensor]:
    """The sums of the gradients of models."""
    sums: dict[str, torch.Tensor] = {}
    for model in models:
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None, name
            plain = name.replace("_checkpoint_wrapped_module.", "")
            sums[plain] = sums.get(plain, 0) + parameter.grad
    return sums


def check(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        assert float(grad.abs().sum()) > 0, name
        torch.testing.assert_close(
            found[name], grad, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("compare", [False, True])
def test_blocks_in_a_row_then_their_backward_passes_in_any_order(kind: str, compare: bool) -> None:
    model, losses, truths = checkpointed(kind), [], []
    for seed in range(3):
        ids = drawn(seed).to(torch.uint8)
        truths.append(wired(ids.long().transpose(0, 1)))
        loss_of(truths[-1], tokens(seed)).backward()
        with replay(model, ids, layer_ids=LAYERS, compare=compare):
            losses.append(loss_of(model, tokens(seed)))
    live = loss_of(model, tokens(0))
    for loss in (losses[1], losses[2], losses[0]):
        loss.backward()
    check(gradients(model), gradients(*truths))
    assert torch.equal(live, loss_of(SHARED, tokens(0)))


@pytest.mark.parametrize("kind", KINDS)
def test_one_forward_pass_ahead_of_the_backward_pass(kind: str) -> None:
    """The backward pass of a micro-batch runs in the block of the next one."""
    model, truths, ahead = checkpointed(kind), [], None
    for seed in range(3):
        truths.append(wired(drawn(seed).transpose(0, 1)))
        loss_of(truths[-1], tokens(seed)).backward()
        with replay(model, drawn(seed), layer_ids=LAYERS) as block:
            loss = loss_of(model, tokens(seed))
            if ahead is not None:
                ahead.backward()
            ahead = loss
        assert block.num_tokens == BATCH * SEQ
    assert ahead is not None
    ahead.backward()
    check(gradients(model), gradients(*truths))


@pytest.mark.parametrize("kind", KINDS)
def test_memory_of_rows_may_be_overwritten_after_the_block(kind: str) -> None:
    ids = drawn(5)
    truth = wired(ids.transpose(0, 1).clone())
    loss_of(truth, tokens(5)).backward()
    model = checkpointed(kind)
    with replay(model, ids.to(torch.uint8).numpy(), layer_ids=LAYERS) as block:
        loss = loss_of(model, tokens(5))
    for part in block._given.source:  # type: ignore[union-attr]
        part.zero_()
    loss.backward()
    check(gradients(model), gradients(truth))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("where", ["inside", "outside", "thread", "twice"])
def test_live_cells_keep_the_choice_of_their_forward_pass(kind: str, where: str) -> None:
    model, ids = checkpointed(kind), drawn(1)
    fickle = Fickle(inner(model), LAYERS)
    valid = torch.rand(ids.shape[:2], generator=torch.Generator().manual_seed(3)) < 0.6
    times = 2 if where == "twice" else 1
    with replay(model, ids, layer_ids=LAYERS, valid=valid):
        loss = loss_of(model, tokens(1))
        if where == "inside":
            loss.backward()
    if where == "outside":
        loss.backward()
    elif where == "thread":  # as autograd has for a CUDA device
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
    elif where == "twice":
        loss.backward(retain_graph=True)
        loss.backward()
    used = fickle.ids(0)
    assert torch.equal(used.transpose(0, 1)[valid], ids[valid])
    truth = wired(used)
    for _ in range(times):
        loss_of(truth, tokens(1)).backward()
    check(gradients(model), gradients(truth))


def inner(model: Any) -> Any:
    """The model as it is without wrappers, for names of modules."""

    class Bare:
        def __init__(self) -> None:
            self.layers = [getattr(x, "_checkpoint_wrapped_module", x) for x in model.model.layers]
            self.model = self

    return Bare()


# ---------------------------------------------------------------- the model's own choice


@pytest.mark.parametrize("kind", ["none", *KINDS])
@pytest.mark.parametrize("where", ["inside", "outside"])
def test_recomputation_takes_the_own_choice_of_its_forward_pass(kind: str, where: str) -> None:
    """With any number of passes and tokens in the block."""
    model, losses, truths = checkpointed(kind), [], []
    fickle = Fickle(inner(model), LAYERS)
    shapes = [(2, 9), (1, 4), (3, 5)]
    with replay(model, "own") as block:
        for seed, shape in enumerate(shapes):
            losses.append(loss_of(model, tokens(seed, shape)))
            used = torch.stack([runs[-1] for runs in fickle.used.values()])
            truths.append(wired(used))
            loss_of(truths[-1], tokens(seed, shape)).backward()
        if where == "inside":
            sum(losses).backward()  # type: ignore[union-attr]
    if where == "outside":
        for loss in reversed(losses):
            loss.backward()
    check(gradients(model), gradients(*truths))
    assert block.num_tokens == 0
    assert block.trainer_ids is None
    assert block.disagreement is None


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_the_own_choice_changes_nothing_else(family: str, use_reentrant: bool) -> None:
    shared, layout = tiny_model(family)
    plain, model = copy.deepcopy(shared).train(), copy.deepcopy(shared).train()
    loss = loss_of(plain, tokens(1))
    loss.backward()
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    model.enable_input_require_grads()
    with replay(model, "own", layout=layout):
        found = loss_of(model, tokens(1))
        with torch.no_grad():
            model(input_ids=tokens(2, (1, 3)))
    found.backward()
    assert torch.equal(found, loss)
    for (name, a), b in zip(plain.named_parameters(), model.parameters(), strict=True):
        if a.grad is not None:
            torch.testing.assert_close(b.grad, a.grad, msg=lambda m, n=name: f"{n}: {m}")


def test_text_is_generated_within_a_block_of_the_own_choice() -> None:
    def generated() -> torch.Tensor:
        ids: torch.Tensor = SHARED.generate(tokens(1), max_new_tokens=4, do_sample=False)
        return ids

    expected = generated()
    with replay(SHARED, "own"):
        assert torch.equal(generated(), expected)


def test_the_own_choice_takes_no_rows() -> None:
    for field, kwargs in (
        ("compare", {"compare": True}),
        ("layer_ids", {"layer_ids": LAYERS}),
        ("valid", {"valid": torch.ones(3, dtype=torch.bool)}),
    ):
        with pytest.raises(InvalidArgument) as caught:
            replay(SHARED, "own", **kwargs)  # type: ignore[arg-type]
        assert caught.value.field == field
    with pytest.raises(InvalidArgument, match="topk_ids is other; expected 'own'"):
        replay(SHARED, "other")  # type: ignore[arg-type]


# ---------------------------------------------------------------- checkpoints of others


class Foreign(torch.autograd.Function):
    """A checkpoint of a library, that is no one's but its own."""

    @staticmethod
    def forward(ctx: Any, function: Any, hidden: torch.Tensor) -> torch.Tensor:
        ctx.function = function
        ctx.save_for_backward(hidden)
        with torch.no_grad():
            output: torch.Tensor = function(hidden)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (hidden,) = ctx.saved_tensors
        hidden = hidden.detach().requires_grad_()
        with torch.enable_grad():
            ctx.function(hidden).backward(*grads)
        return None, hidden.grad


OWN: dict[str, Callable[..., Any]] = {
    "reentrant": lambda f, *a: checkpoint(f, *a, use_reentrant=True),
    "not reentrant": lambda f, *a: checkpoint(f, *a, use_reentrant=False),
    "foreign": Foreign.apply,
}


@pytest.mark.parametrize("own", OWN)
@pytest.mark.parametrize("kind", ["none", "reentrant", "not reentrant"])
@pytest.mark.parametrize("part", ["mlp", "layer", "decoder"])
@pytest.mark.parametrize("ids", [drawn(1), "own"], ids=["ids", "own"])
def test_checkpoints_that_are_called_otherwise_are_refused(
    own: str, kind: str, part: str, ids: Any
) -> None:
    model = checkpointed(kind)
    layer = model.model.layers[1]
    module = {"mlp": layer.mlp, "layer": layer, "decoder": model.model.layers}[part]
    if part == "decoder":
        embeddings = model.get_input_embeddings()(tokens(1)).detach().requires_grad_()

        def call() -> Any:
            return OWN[own](
                lambda hidden: model.model(inputs_embeds=hidden, use_cache=False)[0], embeddings
            )
    else:
        forward = module.forward

        def checkpoint_it(hidden: torch.Tensor, **kwargs: Any) -> Any:
            return OWN[own](lambda x: forward(x, **kwargs), hidden)

        module.forward = checkpoint_it

        def call() -> Any:
            return model(input_ids=tokens(1), use_cache=False).logits

    layer_ids = None if isinstance(ids, str) else LAYERS
    with (
        pytest.raises(InvalidArgument, match="called otherwise"),
        replay(model, ids, layer_ids=layer_ids),
    ):
        call().sum().backward()


@pytest.mark.parametrize("kind", KINDS)
def test_a_comparison_alone_within_a_block_is_as_the_model_itself(kind: str) -> None:
    model = checkpointed(kind)
    with (
        replay(model, drawn(1), layer_ids=LAYERS),
        replay(model, drawn(1), layer_ids=LAYERS, compare="only"),
    ):
        loss = loss_of(model, tokens(1))
    loss.backward()
    truth = copy.deepcopy(SHARED).train()
    loss_of(truth, tokens(1)).backward()
    check(gradients(model), gradients(truth))


@pytest.mark.parametrize("own", OWN)
def test_a_comparison_alone_does_not_mind_checkpoints(own: str) -> None:
    model = checkpointed("none")
    mlp = model.model.layers[1].mlp
    forward = mlp.forward
    mlp.forward = lambda hidden: OWN[own](forward, hidden)
    with replay(model, drawn(1), layer_ids=LAYERS, compare="only") as block:
        loss_of(model, tokens(1)).backward()
    assert block.trainer_ids is not None
    truth = copy.deepcopy(SHARED).train()
    loss_of(truth, tokens(1)).backward()
    check(gradients(model), gradients(truth))


def test_checkpoints_that_are_turned_on_within_a_block_are_refused() -> None:
    model = checkpointed("none")
    with replay(model, drawn(1), layer_ids=LAYERS):
        model.gradient_checkpointing_enable({"use_reentrant": False})
        with pytest.raises(InvalidArgument, match="before the block"):
            loss_of(model, tokens(1))
    loss_of(model, tokens(1)).backward()  # the stand-ins are gone
