"""A tiny Llama 4, whose modules have other names than those of the other families."""

from __future__ import annotations

import functools
from typing import Any

import torch
from transformers import Llama4ForCausalLM, Llama4TextConfig

from routetrace.common.layout import ModelLayout
from support.models.tiny_models import EOS, PAD, VOCABULARY


@functools.cache
def tiny_llama4(top_k: int) -> tuple[Any, ModelLayout]:
    """A model of four layers with 8 experts, and its layout. Leave no hooks behind."""
    config = Llama4TextConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=24,
        intermediate_size_mlp=24,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=8,
        num_local_experts=8,
        num_experts_per_tok=top_k,
        initializer_range=0.25,
        max_position_embeddings=128,
        pad_token_id=PAD,
        eos_token_id=EOS,
        bos_token_id=2,
    )
    torch.manual_seed(0)
    return Llama4ForCausalLM(config).eval(), ModelLayout((0, 1, 2, 3), 4, 8, top_k)
