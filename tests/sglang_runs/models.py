"""Tiny models with random weights, whose routers have no ties."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from vllm_runs.reference import change_weights

VOCABULARY = 512


def write_model(folder: Path, seed: int) -> Path:
    """Write a Qwen3-MoE to a folder; return it.

    All layers are MoE: SGLang's dense layers need a kernel that a CPU lacks. The scheduler run has
    dense ones.
    """
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=64,
        num_hidden_layers=4,
        mlp_only_layers=[],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=16,
        num_experts_per_tok=4,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
    )
    torch.manual_seed(seed)
    model = Qwen3MoeForCausalLM(config).float()
    for name, parameter in model.named_parameters():
        if name.endswith("mlp.gate.weight"):
            parameter.data.normal_(0, 1.0)
        elif parameter.ndim >= 2:
            parameter.data.normal_(0, 0.05)
    model.save_pretrained(folder)
    return folder


def write_changed(model: Path) -> Path:
    """Write a model with changed weights to a folder in that of the model; return it."""
    target = Qwen3MoeForCausalLM.from_pretrained(model)
    change_weights(target)
    target.save_pretrained(folder := model / "changed")
    return folder


def write_drafter(model: Path, seed: int) -> Path:
    """Write a layer that drafts for a model (MTP) to a folder in that of the model; return it.

    It drafts the last token again, which tiny models often sample, and is a MoE layer itself. Its
    router and experts are random.
    """
    target = Qwen3MoeForCausalLM.from_pretrained(model)
    config, generator = target.config, torch.Generator().manual_seed(seed)
    width, experts = config.hidden_size, config.moe_intermediate_size
    embedding = target.model.embed_tokens.weight.detach()
    embedding = embedding / embedding.square().mean(dim=1, keepdim=True).sqrt()
    repeat = torch.linalg.pinv(target.lm_head.weight.detach()) @ torch.linalg.pinv(embedding.T)
    sizes = {
        "self_attn.q_proj": (config.num_attention_heads * config.head_dim, width),
        "self_attn.k_proj": (config.num_key_value_heads * config.head_dim, width),
        "self_attn.v_proj": (config.num_key_value_heads * config.head_dim, width),
        "self_attn.o_proj": (width, config.num_attention_heads * config.head_dim),
        "mlp.gate": (config.num_experts, width),
    }
    for i in range(config.num_experts):
        sizes[f"mlp.experts.{i}.gate_proj"] = sizes[f"mlp.experts.{i}.up_proj"] = experts, width
        sizes[f"mlp.experts.{i}.down_proj"] = width, experts
    weights = {
        f"mtp.layers.0.{name}.weight": 1e-3 * torch.randn(size, generator=generator)
        for name, size in sizes.items()
    }
    weights["mtp.layers.0.mlp.gate.weight"] *= 1e3
    ones = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    ones += ("layers.0.input_layernorm", "layers.0.post_attention_layernorm")
    weights |= {f"mtp.{name}.weight": torch.ones(width) for name in ones}
    for name in ("q_norm", "k_norm"):
        weights[f"mtp.layers.0.self_attn.{name}.weight"] = torch.ones(config.head_dim)
    weights["mtp.fc.weight"] = torch.cat([repeat, torch.zeros(width, width)], dim=1).contiguous()
    config.save_pretrained(folder := model / "drafter")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
