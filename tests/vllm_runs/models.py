"""Tiny MoE checkpoints with random weights, and a tokenizer for them.

Gates are large, so that experts differ from token to token, a wrong row does not look like a right
one, and float32's noise is far below what lies between the last chosen expert and the next one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
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
_GLM4: dict[str, Any] = {
    "moe_intermediate_size": 64,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
_DEEPSEEK: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "moe_intermediate_size": 64,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}

_STD = 0.05
_MTP_LAYERS = "num_nextn_predict_layers"
_MTP_EMBEDDING = 0.5
"""So large that what is said next depends on the last token most of all, and can be predicted."""

#: End of the name of a model that drafts for the one of the rest of its name: the same with noise,
#: so that some of its tokens are accepted.
DRAFT = "+draft"
_NOISE = 0.1

_GATES = ("mlp.gate.weight", "mlp.router.weight", "block_sparse_moe.router.layer.weight")

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
    "qwen3_moe_deep": (  # many layers, so that a few tokens are many cells
        "Qwen3Moe",
        {
            **_QWEN3,
            "hidden_size": 256,
            "head_dim": 64,
            "moe_intermediate_size": 128,
            "num_experts": 32,
            "num_hidden_layers": 24,
        },
        tuple(range(24)),
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
    "glm4_moe": ("Glm4Moe", _GLM4, (1, 2, 3)),
    "glm4_moe_mtp": ("Glm4Moe", {**_GLM4, _MTP_LAYERS: 1}, (1, 2, 3)),
    "qwen2_moe": (
        "Qwen2Moe",
        {
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 64,
            "num_experts": 16,
            "num_experts_per_tok": 4,
        },
        (0, 1, 2, 3),
    ),
    "deepseek_v2": (
        "DeepseekV2",
        {**_DEEPSEEK, "q_lora_rank": None, "topk_method": "greedy"},
        (1, 2, 3),
    ),
    "deepseek_v3": (
        "DeepseekV3",
        {
            **_DEEPSEEK,
            "q_lora_rank": 64,
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
            "norm_topk_prob": True,
        },
        (1, 2, 3),
    ),
    "ernie4_5_moe": (
        "Ernie4_5_Moe",
        {
            "moe_intermediate_size": 64,
            "moe_num_experts": 16,
            "moe_k": 4,
            "moe_num_shared_experts": 1,
            "moe_layer_start_index": 1,
        },
        (1, 2, 3),
    ),
    "granite_moe": (
        "GraniteMoe",
        {"num_local_experts": 16, "num_experts_per_tok": 4, "attention_multiplier": 0.1},
        (0, 1, 2, 3),
    ),
    "dots1": (
        "Dots1",
        {
            "moe_intermediate_size": 64,
            "n_routed_experts": 16,
            "num_experts_per_tok": 4,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
        },
        (1, 2, 3),
    ),
    "flex_olmo": (
        "FlexOlmo",
        {"num_experts": 16, "num_experts_per_tok": 4, "num_key_value_heads": 4},
        (0, 1, 2, 3),
    ),
    "gpt_oss": (  # layers with a sliding window have KV blocks of their own
        "GptOss",
        {"head_dim": 64, "num_local_experts": 16, "num_experts_per_tok": 4, "sliding_window": 64},
        (0, 1, 2, 3),
    ),
}


def write_checkpoint(name: str, directory: Path) -> None:
    """Write the model with its tokenizer, as `from_pretrained` and vLLM read it."""
    prefix, special, _ = MODELS[name.removesuffix(DRAFT)]
    config = getattr(transformers, f"{prefix}Config")(**{**_COMMON, **special})
    torch.manual_seed(0)
    model = getattr(transformers, f"{prefix}ForCausalLM")(config).float()
    biases = [b for n, b in model.named_buffers() if n.endswith("e_score_correction_bias")]
    for bias in biases:
        torch.nn.init.normal_(bias, std=0.05)
    # Where there are biases, scores are sigmoids, which large gates would drive to 1.
    gate = 0.3 if biases else 1.0
    for key, parameter in model.named_parameters():
        # Ernie's router has a bias, which vLLM's for CPU passes over.
        if parameter.ndim >= 2 and not key.endswith("e_score_correction_bias"):
            torch.nn.init.normal_(parameter, std=gate if key.endswith(_GATES) else _STD)
        if key.endswith("embed_tokens.weight") and _MTP_LAYERS in special:
            parameter.data *= _MTP_EMBEDDING / _STD
    if name.endswith(DRAFT):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * parameter.std() * _NOISE)
    model.save_pretrained(directory)
    if _MTP_LAYERS in special:
        _add_mtp_layer(directory / "model.safetensors", config)
    words = [*SPECIAL, *(f"w{i}" for i in range(len(SPECIAL), VOCABULARY))]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        **dict(zip(("bos_token", "eos_token", "pad_token", "unk_token"), SPECIAL, strict=True)),
    ).save_pretrained(directory)


def _add_mtp_layer(file: Path, config: Any) -> None:
    """Add a layer that predicts one more token: the last one again, fed with embeddings alone."""
    tensors = load_file(file)
    last, mtp = (f"model.layers.{config.num_hidden_layers + i}." for i in (-1, 0))
    for name in [name for name in tensors if name.startswith(last)]:
        tensors[mtp + name.removeprefix(last)] = tensors[name].clone()
    size = config.hidden_size
    tensors[mtp + "enorm.weight"] = torch.full((size,), _MTP_EMBEDDING)  # as they were
    tensors[mtp + "hnorm.weight"] = torch.ones(size)
    tensors[mtp + "eh_proj.weight"] = torch.eye(size, 2 * size)
    tensors[mtp + "embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors[mtp + "shared_head.norm.weight"] = tensors["model.norm.weight"].clone()
    tensors[mtp + "shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, file, {"format": "pt"})
