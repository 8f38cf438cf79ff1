"""A small Qwen3-MoE over bytes of text: the examples roll it out and train it.

The weights are random, scaled so that experts matter: then two precisions disagree about one router
in ten, as large models do, and nothing has to be downloaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

# Matrices this small leave more threads waiting for each other.
torch.set_num_threads(1)

PROMPTS = (
    "The router looks at the token and picks four experts out of thirty-two.",
    "A trainer that picks other experts than the engine did is learning from another model.",
    "Rain had fallen all night, and by morning the road was a river.",
    "def fibonacci(n):\n    a, b = 0, 1\n    for _ in range(n):\n",
    "Q: A train leaves at noon and travels ninety miles in two hours. How fast is it?\nA:",
    "Dear Sir, I write to you about the bill that arrived on the third of March.",
)

PAD = 0


def build_model(seed: int = 0, num_layers: int = 6) -> Any:
    """A float32 model with `num_layers` MoE layers of 32 experts, top 4."""
    config = Qwen3MoeConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=64,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,  # pyright: ignore[reportCallIssue]
        num_experts=32,
        num_experts_per_tok=4,
        norm_topk_prob=True,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=PAD,
    )
    torch.manual_seed(seed)
    model = Qwen3MoeForCausalLM(config).float()
    scales = {"gate.weight": 0.1, "experts": 0.3, "embed": 0.5, "lm_head": 0.1}
    for name, parameter in model.named_parameters():
        if parameter.ndim >= 2:
            scale = next((s for key, s in scales.items() if key in name), 0.05)
            torch.nn.init.normal_(parameter, std=scale)
    return model


def encode(texts: Sequence[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """Byte ids [batch, seq] and attention mask, padded on the left."""
    rows = [list(text.encode()) for text in texts]
    width = max(map(len, rows))
    ids = torch.tensor([[PAD] * (width - len(r)) + r for r in rows])
    mask = torch.tensor([[0] * (width - len(r)) + [1] * len(r) for r in rows])
    return ids, mask
