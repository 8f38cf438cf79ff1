"""Tiny models with random weights, whose routers have no ties."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

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
