"""Replay is on in every pass of a block, or says that it is not; and leaves nothing behind."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from routetrace.common.errors import InvalidArgument
from routetrace.trainers import _seats
from routetrace.trainers.replay import replay
from support.models.hard_wired import hard_wire
from support.models.tiny_models import VOCABULARY, tiny_model

pytestmark = pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated")

SHARED, LAYOUT = tiny_model("qwen3_moe")
LAYERS = LAYOUT.layer_ids
TOKENS = torch.randint(3, VOCABULARY, (2, 6), generator=torch.Generator().manual_seed(0))
GIVEN = torch.rand((12, 3, 16), generator=torch.Generator().manual_seed(1)).argsort(dim=-1)[..., :4]


@pytest.fixture
def model() -> Iterator[Any]:
    """A model that no test leaves anything on."""
    made = copy.deepcopy(SHARED)
    yield made
    assert not _seats._SEATS
    assert not _seats._runs()
    for module in made.modules():
        assert "forward" not in vars(module)
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


def block(model: Any, **kwargs: Any) -> Any:
    return replay(model, GIVEN, layer_ids=LAYERS, **kwargs)


def rotary(model: Any) -> Any:
    return model.model.rotary_emb(torch.zeros(2, 6, 32), torch.arange(6)[None])


CALLS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a layer": (
        lambda m: m.model.layers[1](torch.zeros(2, 6, 32), position_embeddings=rotary(m)),
        r"\[0, 2\] did not run",
    ),
    "a router": (lambda m: m.model.layers[0].mlp.gate(torch.zeros(12, 32)), r"\[1, 2\] did not"),
    "another model": (lambda m: SHARED(TOKENS), r"\[0, 1, 2\] did not run"),
    "nothing": (lambda m: None, r"\[0, 1, 2\] did not run"),
    "a pass, then a layer": (
        lambda m: (
            m(TOKENS),
            m.model.layers[1](torch.zeros(2, 6, 32), position_embeddings=rotary(m)),
        ),
        r"\[0, 2\] did not run",
    ),
    "a copy": (lambda m: copy.deepcopy(m)(TOKENS), "a copy of a Qwen3Moe"),
    "replay in a copy": (
        lambda m: replay(copy.deepcopy(m), GIVEN, layer_ids=LAYERS).__enter__(),
        "a copy of a Qwen3Moe",
    ),
    "half of the batch": (lambda m: m(TOKENS[:1]), "12 tokens; expected 6 tokens"),
    "text": (lambda m: m.generate(TOKENS, max_new_tokens=3), "12 tokens; expected 2 tokens"),
    "a cache": (
        lambda m: m(TOKENS[:, 4:], past_key_values=m(TOKENS, use_cache=True).past_key_values),
        "12 tokens; expected 4 tokens",
    ),
}


@pytest.mark.parametrize(
    ("call", "is_compiled"),
    [
        *((call, False) for call in CALLS),
        ("a layer", True),
        pytest.param("a pass, then a layer", True, marks=pytest.mark.slow),
    ],
)
def test_what_is_not_a_pass_of_the_rows_is_refused(
    call: str, is_compiled: bool, model: Any
) -> None:
    called, words = CALLS[call]
    compiled = copy.deepcopy(model) if is_compiled else model
    if is_compiled:
        torch.compiler.reset()
        for layer in compiled.model.layers:
            layer.compile(backend="eager")
        with torch.no_grad():
            compiled(TOKENS)
    with pytest.raises(InvalidArgument, match=words), torch.no_grad(), block(compiled):
        called(compiled)
    with torch.no_grad():
        torch.testing.assert_close(compiled(TOKENS).logits, SHARED(TOKENS).logits)


def by_hand(model: Any) -> torch.Tensor:
    hidden, positions = model.model.embed_tokens(TOKENS), rotary(model)
    causal = torch.full((6, 6), -torch.inf).triu(1)[None, None]
    for layer in model.model.layers:
        output = layer(hidden, attention_mask=causal, position_embeddings=positions)
        hidden = output[0] if isinstance(output, tuple) else output
    logits: torch.Tensor = model.lm_head(model.model.norm(hidden))
    return logits


PASSES: dict[str, Callable[[Any], torch.Tensor]] = {
    "the decoder": lambda m: m.lm_head(m.model(TOKENS)[0]),
    "the decoder's function": lambda m: m.lm_head(m.model.forward(TOKENS)[0]),
    "the model's function": lambda m: m.forward(TOKENS).logits,
    "embeddings": lambda m: m(inputs_embeds=m.get_input_embeddings()(TOKENS)).logits,
    "each layer": by_hand,
}


@pytest.mark.parametrize("way", PASSES)
def test_passes_are_replayed_however_they_are_called(way: str, model: Any) -> None:
    truth = copy.deepcopy(SHARED)
    hard_wire(truth, LAYERS, GIVEN.transpose(0, 1))
    with torch.no_grad():
        with block(model):
            found = PASSES[way](model)
        torch.testing.assert_close(found, truth(TOKENS).logits, rtol=1e-4, atol=1e-5)


def test_a_layer_that_is_left_out_is_named_however_the_pass_is_called(model: Any) -> None:
    class Skips(torch.nn.Module):
        def forward(self, hidden: torch.Tensor, **_: Any) -> torch.Tensor:
            return hidden

    layer, model.model.layers[1].mlp = model.model.layers[1].mlp, Skips()
    model.model.layers[1].mlp.gate = layer.gate
    for way in ("the decoder", "the decoder's function", "the model's function", "each layer"):
        with (
            torch.no_grad(),
            pytest.raises(InvalidArgument, match=r"layers \[1\] did not run"),
            block(model),
        ):
            PASSES[way](model)


def test_a_block_that_cannot_begin_leaves_nothing_behind(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model.model.layers[0]._gradient_checkpointing_func = print
    original, left = _seats._Seat.__init__, iter([None] * 4)

    def fails(self: Any, place: Any) -> None:
        if next(left, "end") == "end":
            raise MemoryError
        original(self, place)

    monkeypatch.setattr(_seats._Seat, "__init__", fails)
    before = [dict(vars(module)) for module in model.modules()]
    with pytest.raises(MemoryError):
        block(model).__enter__()
    assert [dict(vars(module)) for module in model.modules()] == before


def test_what_the_user_replaces_within_a_block_stays(model: Any) -> None:
    gate = model.model.layers[1].mlp.gate
    with torch.no_grad(), block(model):
        model(TOKENS)
        gate.forward = "of the user"
    assert vars(gate).pop("forward") == "of the user"


def test_a_function_of_the_user_comes_back_after_the_block(model: Any) -> None:
    gate = model.model.layers[1].mlp.gate
    gate.forward = own = lambda hidden: type(gate).forward(gate, hidden)
    with torch.no_grad(), block(model), block(model):
        model(TOKENS)
    assert vars(gate).pop("forward") is own
