"""Replay under FSDP2 with activation checkpointing, and under context parallelism, on two ranks."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from routetrace.client.plan import FetchPlan, MicroBatch, Rank, Sample
from routetrace.client.rows import Rows
from routetrace.trainers.replay import replay
from support.models.hard_wired import hard_wire
from support.models.tiny_models import VOCABULARY, tiny_model
from support.ranks.gloo_ranks import run_ranks
from support.ranks.rank_rows import random_choices, rows_of

WORLD = 2
SEQ = 8
#: Tokens of the samples of each data-parallel rank.
LENGTHS = [[8, 5, 1], [3, 7, 6]]
#: Checkpoints, and where the backward pass is, if not in the block.
KINDS = (
    "none",
    "transformers",
    "wrapped",
    "transformers, outside",
    "reentrant, outside",
    "wrapped, outside",
)


def loss_of(model: Any, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    logits = model(tokens, attention_mask=mask, use_cache=False).logits
    logp = logits[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
    loss: torch.Tensor = -(logp * mask[:, 1:]).sum() / 10
    return loss


def micro_batch(rank: int) -> tuple[torch.Tensor, torch.Tensor, Rows]:
    """Tokens, attention mask and rows of a data-parallel rank, padded on the left."""
    layout = tiny_model("qwen3_moe")[1]
    lengths = LENGTHS[rank]
    generator = torch.Generator().manual_seed(rank)
    tokens = torch.randint(3, VOCABULARY, (len(lengths), SEQ), generator=generator)
    mask = torch.tensor([[0] * (SEQ - n) + [1] * n for n in lengths])
    batch = MicroBatch.padded(
        [Sample.of(f"r{rank}-{i}", n) for i, n in enumerate(lengths)], SEQ, padding_side="left"
    )
    plan = FetchPlan.make(layout, batch, Rank(layout.layer_ids, flatten="batch"))
    ids = random_choices((len(lengths), SEQ, len(layout.layer_ids)), 16, 4, seed=rank)
    return tokens, mask, rows_of(plan, list(ids), missing=0.1)


def sharded(rank: int, checkpointing: str) -> dict[str, Any]:
    """Gradients of both: mean over the ranks of the hard-wired models, and of FSDP2 with replay."""
    origin = tiny_model("qwen3_moe")[0]
    expected: dict[str, torch.Tensor] = {}
    for number in range(WORLD):
        model = copy.deepcopy(origin)
        tokens, mask, rows = micro_batch(number)
        ids, valid = rows.topk_ids.astype(np.int64), torch.from_numpy(rows.valid)
        hard_wire(model, rows.layer_ids, torch.from_numpy(ids), valid)
        loss_of(model, tokens, mask).backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            expected[name] = expected.get(name, 0) + parameter.grad / WORLD

    model = copy.deepcopy(origin).train()
    checkpointing, _, where = checkpointing.partition(", ")
    if checkpointing in ("transformers", "reentrant"):
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing == "reentrant"})
        model.enable_input_require_grads()
    elif checkpointing == "wrapped":
        layers = set(model.model.layers)
        apply_activation_checkpointing(model, check_fn=lambda module: module in layers)
    # By default it takes the accelerator that is there; everything here is on the CPU.
    mesh = init_device_mesh("cpu", (WORLD,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    tokens, mask, rows = micro_batch(rank)
    passes = []
    handle = model.model.layers[0].mlp.gate.register_forward_hook(
        lambda *_: passes.append(1), always_call=True
    )
    with replay(model, rows, compare=True) as replayed:
        loss = loss_of(model, tokens, mask)
        if where != "outside":
            loss.backward()
    if where == "outside":
        loss.backward()
    handle.remove()
    found = {
        name.replace("_checkpoint_wrapped_module.", ""): parameter.grad.full_tensor()
        for name, parameter in model.named_parameters()
    }
    return {
        "passes": len(passes),
        "expected": expected,
        "found": found,
        "cells": replayed.agreement.choices.cells,
        "present": int(rows.valid.sum()),
    }


# ---------------------------------------------------------------- context parallelism


def attention(rank: int, allowed: torch.Tensor) -> Any:
    """Ulysses: each rank computes its heads for all tokens; `allowed` is [batch, 1, seq, seq]."""

    def gathered(x: torch.Tensor, dim: int) -> torch.Tensor:
        parts = [torch.empty_like(x) for _ in range(WORLD)]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, dim)

    def forward(module: Any, query: Any, key: Any, value: Any, _mask: Any, **_: Any) -> Any:
        query, key, value = (gathered(x, 2).chunk(WORLD, dim=1)[rank] for x in (query, key, value))
        key, value = (x.repeat_interleave(module.num_key_value_groups, 1) for x in (key, value))
        heads = scaled_dot_product_attention(query, key, value, allowed)
        local = gathered(heads, 1).chunk(WORLD, dim=2)[rank]
        return local.transpose(1, 2).contiguous(), None

    return forward


def split(rank: int, packed: bool) -> dict[str, Any]:
    """Logits of a rank's tokens: of a model that sees only them, and of one that sees all."""
    shared, layout = tiny_model("qwen3_moe")
    lengths = [9, 12, 4, 7]
    samples = [Sample.of(f"r{i}", n) for i, n in enumerate(lengths)]
    if packed:
        batch = MicroBatch.packed(samples, total_len=36)
        owner = np.repeat([0, 1, 2, 3, 4], [*lengths, 4])[None]
        position = np.concatenate([np.arange(n) for n in (*lengths, 4)])[None]
    else:
        batch = MicroBatch.padded(samples, 12, padding_side="right")
        owner = np.where(np.arange(12) < np.array(lengths)[:, None], 0, 1)
        position = np.broadcast_to(np.arange(12), (4, 12))
    width = owner.shape[1]
    causal = np.tril(np.ones((width, width), bool))
    allowed = torch.from_numpy((owner[:, :, None] == owner[:, None]) & causal)[:, None]
    tokens = torch.randint(3, VOCABULARY, owner.shape, generator=torch.Generator().manual_seed(5))
    positions = torch.from_numpy(np.ascontiguousarray(position))
    ids = list(random_choices((4, 12, len(layout.layer_ids)), 16, 4, seed=9))

    def rows(**parallel: Any) -> Rows:
        rank_ = Rank(layout.layer_ids, flatten="batch", **parallel)
        return rows_of(FetchPlan.make(layout, batch, rank_), ids, missing=0.1)

    part = slice(rank * width // WORLD, (rank + 1) * width // WORLD)
    AttentionInterface.register("ulysses", attention(rank, allowed))
    with torch.no_grad():
        model = copy.deepcopy(shared)
        with replay(model, rows()):
            whole = model(tokens, attention_mask=allowed, position_ids=positions).logits[:, part]
        model.set_attn_implementation("ulysses")
        with replay(model, rows(cp_size=WORLD, cp_rank=rank, cp_layout="ulysses")):
            local = model(tokens[:, part], position_ids=positions[:, part]).logits
    return {"whole": whole, "local": local}


# ---------------------------------------------------------------- tests


def of_fsdp(rank: int) -> dict[str, dict[str, Any]]:
    return {kind: sharded(rank, kind) for kind in KINDS}


def of_context_parallelism(rank: int) -> dict[str, dict[str, Any]]:
    return {"packed": split(rank, True), "padded": split(rank, False)}


@pytest.mark.long
def test_gradients_under_fsdp2_are_those_of_hard_wired_routers() -> None:
    for rank in run_ranks(WORLD, of_fsdp):
        for kind, result in rank.items():
            assert result["passes"] == (1 if kind == "none" else 2), kind
            # Recomputation does not count twice.
            assert result["cells"] == result["present"] > 0, kind
            assert result["found"].keys() == result["expected"].keys()
            for name, grad in result["expected"].items():
                assert float(grad.abs().sum()) > 0, name
                torch.testing.assert_close(
                    result["found"][name],
                    grad,
                    rtol=1e-4,
                    atol=1e-6,
                    msg=lambda m, n=f"{kind}, {name}": f"{n}: {m}",
                )


@pytest.mark.long
def test_a_model_that_sees_a_part_of_the_tokens_replays_their_rows() -> None:
    for rank in run_ranks(WORLD, of_context_parallelism):
        for kind, result in rank.items():
            torch.testing.assert_close(
                result["local"],
                result["whole"],
                rtol=1e-4,
                atol=1e-5,
                msg=lambda m, n=kind: f"{n}: {m}",
            )
