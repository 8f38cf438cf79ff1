"""Replay in families whose experts are chosen, called or found otherwise than in most.

The truth is the same model with the ids wired in.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers

from routetrace.common.errors import InvalidArgument
from routetrace.common.layout import ModelLayout
from routetrace.trainers.replay import replay
from support.models.llama4 import tiny_llama4
from support.models.tiny_models import VOCABULARY, tiny_model

TOKENS = torch.randint(3, VOCABULARY, (2, 7), generator=torch.Generator().manual_seed(0))
COMMON: dict[str, Any] = {"vocab_size": VOCABULARY, "pad_token_id": 0}


def drawn(layout: ModelLayout, seed: int = 1) -> torch.Tensor:
    """Ids [tokens, L, K]."""
    generator = torch.Generator().manual_seed(seed)
    keys = torch.rand(
        (TOKENS.numel(), len(layout.layer_ids), layout.num_experts), generator=generator
    )
    return keys.argsort(dim=-1)[..., : layout.top_k]


def trained(model: Any) -> dict[str, torch.Tensor]:
    model.zero_grad()
    logits = model(input_ids=TOKENS, use_cache=False).logits
    logits.pow(2).mean().backward()
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return {**found, "logits": logits.detach()}


def check_replay(model: Any, layout: ModelLayout, wired: Any) -> None:
    """Compare logits and gradients of replay with those of a model with the ids wired in."""
    ids = drawn(layout)
    truth = copy.deepcopy(model)
    own = trained(model)["logits"]
    for column, layer in enumerate(layout.layer_ids):
        wired(truth.get_submodule(f"{prefix(model)}.{layer}"), ids[:, column])
    expected = trained(truth)
    with replay(model, ids, layer_ids=layout.layer_ids, compare=True) as replayed:
        found = trained(model)
    assert float((expected["logits"] - own).abs().max()) > 1e-3
    assert replayed.disagreement is not None
    assert replayed.disagreement > 0.3
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
        )
    assert torch.equal(trained(model)["logits"], own)


def prefix(model: Any) -> str:
    return "transformer.blocks" if hasattr(model, "transformer") else "model.layers"


@pytest.mark.parametrize("top_k", [1, 2])
def test_llama4(top_k: int) -> None:
    def wired(layer: Any, ids: torch.Tensor) -> None:
        router = layer.feed_forward.router

        def forward(hidden: torch.Tensor) -> Any:
            logits = torch.nn.functional.linear(hidden, router.weight)
            at_ids = logits.gather(1, ids).sigmoid()
            return torch.zeros_like(logits).scatter(1, ids, at_ids), logits

        router.forward = forward

    check_replay(*tiny_llama4(top_k), wired)


def test_the_agreement_of_llama4() -> None:
    model, layout = tiny_llama4(1)
    own = []
    handles = [
        layer.feed_forward.router.register_forward_pre_hook(
            lambda router, args: own.append(
                torch.nn.functional.linear(args[0], router.weight).argmax(dim=1)
            )
        )
        for layer in model.model.layers
    ]
    with (
        torch.no_grad(),
        replay(model, drawn(layout), layer_ids=layout.layer_ids, compare="only") as replayed,
    ):
        model(input_ids=TOKENS)
    for handle in handles:
        handle.remove()
    assert replayed.trainer_ids is not None
    assert torch.equal(replayed.trainer_ids[..., 0].long(), torch.stack(own))
    differing = (torch.stack(own) != drawn(layout)[..., 0].T).float().mean()
    assert replayed.disagreement == pytest.approx(float(differing))


def test_dbrx_whose_block_chooses() -> None:
    config = transformers.DbrxConfig(
        d_model=32,
        n_heads=4,
        n_layers=2,
        max_seq_len=64,
        attn_config={"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 10_000.0},
        ffn_config={
            "ffn_hidden_size": 32,
            "moe_num_experts": 8,
            "moe_top_k": 2,
            "moe_normalize_expert_weights": 1.0,
            "hidden_size": 32,
        },
        initializer_range=0.25,
        **COMMON,
    )
    torch.manual_seed(0)
    model = transformers.DbrxForCausalLM(config).eval()

    def wired(layer: Any, ids: torch.Tensor) -> None:
        def route(logits: torch.Tensor) -> Any:
            at_ids = logits.softmax(dim=1).gather(1, ids)
            return at_ids / at_ids.abs().sum(dim=-1, keepdim=True), ids

        layer.ffn.route_tokens_to_experts = route

    check_replay(model, ModelLayout((0, 1), 2, 8, 2), wired)


@pytest.mark.parametrize("compare", [False, True, "only"])
def test_a_layer_with_another_top_k_is_refused(compare: Any) -> None:
    shared, layout = tiny_model("qwen3_moe")
    model = copy.deepcopy(shared)
    model.model.layers[1].mlp.gate.top_k = 6
    with (
        torch.no_grad(),
        replay(model, drawn(layout), layer_ids=layout.layer_ids, compare=compare),
        pytest.raises(InvalidArgument, match=r"layers\.1 is .*6 of 16.*; expected .* 4 of 16 "),
    ):
        model(input_ids=TOKENS)


def test_a_layer_whose_router_does_not_run_is_refused() -> None:
    shared, layout = tiny_model("qwen3_moe")
    model = copy.deepcopy(shared)
    model.model.layers[1].mlp.forward = lambda hidden: hidden
    with (
        torch.no_grad(),
        replay(model, drawn(layout), layer_ids=layout.layer_ids),
        pytest.raises(InvalidArgument, match=r"routers of layers \[1\] did not run"),
    ):
        model(input_ids=TOKENS)


@pytest.mark.parametrize(
    "part",
    [*(pytest.param(part, marks=pytest.mark.slow) for part in ("model", "layers")), "routers"],
)
def test_compiled_models_replay(part: str) -> None:
    """Compiled and run before the block; programs of one block do not serve another."""
    shared, layout = tiny_model("qwen3_moe")
    model = copy.deepcopy(shared)
    torch.compiler.reset()
    if part == "model":
        model.compile(backend="eager")
    for layer in model.model.layers:
        parts = {"layers": layer, "routers": layer.mlp.gate}
        if part in parts:
            parts[part].compile(backend="eager")
    own = trained(shared)["logits"]
    torch.testing.assert_close(trained(model)["logits"], own)
    for seed in (1, 2):
        ids = drawn(layout, seed)
        with replay(shared, ids, layer_ids=layout.layer_ids, compare=True) as truth:
            expected = trained(shared)
        with replay(model, ids, layer_ids=layout.layer_ids, compare=True) as replayed:
            found = trained(model)
        assert replayed.agreement == truth.agreement
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(trained(model)["logits"], own)
    shared.zero_grad()


def test_the_inner_of_two_replays_counts() -> None:
    model, layout = tiny_model("qwen3_moe")
    inner, outer = drawn(layout, 2), drawn(layout, 3)
    with torch.no_grad():
        own = model(input_ids=TOKENS).logits
        with replay(model, inner, layer_ids=layout.layer_ids):
            of_inner = model(input_ids=TOKENS).logits
        with replay(model, outer, layer_ids=layout.layer_ids):
            of_outer = model(input_ids=TOKENS).logits
            with replay(model, inner, layer_ids=layout.layer_ids):
                assert torch.equal(model(input_ids=TOKENS).logits, of_inner)
            assert torch.equal(model(input_ids=TOKENS).logits, of_outer)
        assert torch.equal(model(input_ids=TOKENS).logits, own)
