"""Tiny MoE checkpoints with random weights, and a tokenizer for them.

Gates are large, so that experts differ from token to token, a wrong row does not look like a right
one, and float32's noise is far below what lies between the last chosen expert and the next one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

VOCABULARY = 512
SPECIAL = ("<s>", "</s>", "<pad>", "<unk>")

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
_QWEN3: dict[str, Any] = {
    "moe_intermediate_size": 64,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
}

_GATES = ("mlp.gate.weight", "mlp.router.weight")

#: name -> (class prefix, config, MoE layers); the layers are written out by hand, as what finds
#: them in a config is one of the things under test.
MODELS: dict[str, tuple[str, dict[str, Any], tuple[int, ...]]] = {
    "qwen3_moe": ("Qwen3Moe", _QWEN3, (0, 1, 2, 3)),
    "qwen3_moe_dense_layers": ("Qwen3Moe", {**_QWEN3, "mlp_only_layers": [0, 2]}, (1, 3)),
    "qwen3_moe_300": (
        "Qwen3Moe",
        {**_QWEN3, "num_experts": 300, "num_hidden_layers": 2, "moe_intermediate_size": 32},
        (0, 1),
    ),
    "mixtral": (
        "Mixtral",
        {"num_local_experts": 8, "num_experts_per_tok": 2},
        (0, 1, 2, 3),
    ),
    "olmoe": (
        "Olmoe",
        {"num_experts": 16, "num_experts_per_tok": 4, "num_key_value_heads": 4},
        (0, 1, 2, 3),
    ),
    "glm4_moe": (
        "Glm4Moe",
        {
            "moe_intermediate_size": 64,
            "n_routed_experts": 16,
            "num_experts_per_tok": 4,
            "n_group": 1,
            "topk_group": 1,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
        },
        (1, 2, 3),
    ),
    "gpt_oss": (  # layers with a sliding window have KV blocks of their own
        "GptOss",
        {"head_dim": 64, "num_local_experts": 16, "num_experts_per_tok": 4, "sliding_window": 64},
        (0, 1, 2, 3),
    ),
}


def write_checkpoint(name: str, directory: Path) -> None:
    """Writes the model with its tokenizer, as `from_pretrained` and vLLM read it."""
    prefix, special, _ = MODELS[name]
    config = getattr(transformers, f"{prefix}Config")(**{**_COMMON, **special})
    torch.manual_seed(0)
    model = getattr(transformers, f"{prefix}ForCausalLM")(config).float()
    biases = [b for n, b in model.named_buffers() if n.endswith("e_score_correction_bias")]
    for bias in biases:
        torch.nn.init.normal_(bias, std=0.05)
    # Where there are biases, scores are sigmoids, which large gates would drive to 1.
    gate = 0.3 if biases else 1.0
    for key, parameter in model.named_parameters():
        if parameter.ndim >= 2:
            torch.nn.init.normal_(parameter, std=gate if key.endswith(_GATES) else 0.05)
    model.save_pretrained(directory)
    words = [*SPECIAL, *(f"w{i}" for i in range(len(SPECIAL), VOCABULARY))]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        **dict(zip(("bos_token", "eos_token", "pad_token", "unk_token"), SPECIAL, strict=True)),
    ).save_pretrained(directory)
