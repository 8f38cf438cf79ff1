"""Tiny MoE models with random weights, one per family, for tests that need real routers.

Weights are large on purpose, so that experts and logits differ between tokens, and a wrong row does
not look like a right one.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from transformers.models.deepseek_v2 import modeling_deepseek_v2

from routetrace.common.layout import ModelLayout

torch.set_num_threads(1)

PAD, EOS = 0, 1
VOCABULARY = 48

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 24,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.25,
    "tie_word_embeddings": False,
    "pad_token_id": PAD,
    "eos_token_id": EOS,
    "bos_token_id": 2,
}
_WIDE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 64,
    "head_dim": 16,
}
_MLA: dict[str, Any] = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "head_dim": 8,
    "num_key_value_heads": 4,
}
_V2_HAS_GROUPS = hasattr(modeling_deepseek_v2, "DeepseekV2TopkRouter")
_GROUPS: dict[str, Any] = {"n_group": 4, "topk_group": 2, "n_shared_experts": 1}

#: name -> (class prefix, config, MoE layers, experts, top-k). The last three are written out by
#: hand: the model map is one of the things that tests compare with them.
FAMILIES: dict[str, tuple[str, dict[str, Any], tuple[int, ...], int, int]] = {
    "qwen3_moe": (
        "Qwen3Moe",
        {"num_experts": 16, "num_experts_per_tok": 4},
        (0, 1, 2),
        16,
        4,
    ),
    "qwen3_moe_300": (
        "Qwen3Moe",
        {"num_experts": 300, "num_experts_per_tok": 4, "num_hidden_layers": 2},
        (0, 1),
        300,
        4,
    ),
    "qwen2_moe": (
        "Qwen2Moe",
        {
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "mlp_only_layers": [1],
            "shared_expert_intermediate_size": 16,
        },
        (0, 2),
        8,
        2,
    ),
    "mixtral": (
        "Mixtral",
        {"num_local_experts": 8, "num_experts_per_tok": 2},
        (0, 1, 2),
        8,
        2,
    ),
    "olmoe": (
        "Olmoe",
        {"num_experts": 8, "num_experts_per_tok": 3, "num_key_value_heads": 4},
        (0, 1, 2),
        8,
        3,
    ),
    "gpt_oss": (
        "GptOss",
        {
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "sliding_window": 4,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
        (0, 1, 2),
        8,
        2,
    ),
    "deepseek_v2": (
        "DeepseekV2",
        {
            **_MLA,
            **_GROUPS,
            "n_routed_experts": 16,
            "num_experts_per_tok": 4,
            "first_k_dense_replace": 1,
            # In 5.3 to 5.10 the library itself raises an AttributeError for groups.
            "topk_method": "group_limited_greedy" if _V2_HAS_GROUPS else "greedy",
            "norm_topk_prob": False,
        },
        (1, 2),
        16,
        4,
    ),
    "deepseek_v3": (
        "DeepseekV3",
        {
            **_MLA,
            **_GROUPS,
            "n_routed_experts": 16,
            "num_experts_per_tok": 4,
            "first_k_dense_replace": 1,
        },
        (1, 2),
        16,
        4,
    ),
    "glm4_moe": (
        "Glm4Moe",
        {
            **_GROUPS,
            "n_group": 1,
            "topk_group": 1,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "first_k_dense_replace": 1,
        },
        (1, 2),
        8,
        2,
    ),
}


def tiny_model(name: str, seed: int = 0, *, wide: bool = False) -> tuple[Any, ModelLayout]:
    """A model of the family in float32 and evaluation mode, and its layout.

    A wide one has experts whose sizes are multiples of 64, as those of real models are. The model
    is shared between tests: leave no hooks, gradients, settings or training mode behind.
    """
    return _tiny_model(name, seed, wide)  # of one form for the cache, however it was called


@functools.cache
def _tiny_model(name: str, seed: int, wide: bool) -> tuple[Any, ModelLayout]:
    prefix, special, layers, experts, top_k = FAMILIES[name]
    config = getattr(transformers, f"{prefix}Config")(
        **{**_COMMON, **(_WIDE if wide else {}), **special}
    )
    torch.manual_seed(seed)
    model = getattr(transformers, f"{prefix}ForCausalLM")(config).eval()
    for key, buffer in model.named_buffers():
        if key.endswith("e_score_correction_bias"):
            buffer.copy_(torch.randn(buffer.shape) * 0.1)
    layout = ModelLayout(layers, config.num_hidden_layers, experts, top_k)
    return model, layout


def page_size_name() -> str:
    """What `ContinuousBatchingConfig` calls the tokens of a page."""
    names = inspect.signature(transformers.ContinuousBatchingConfig).parameters
    return "page_size" if "page_size" in names else "block_size"


def paging(*, page_size: int, **options: Any) -> Any:
    """A `ContinuousBatchingConfig`, in the words of this version of the library."""
    return transformers.ContinuousBatchingConfig(**{page_size_name(): page_size}, **options)


@contextlib.contextmanager
def eager(model: Any) -> Iterator[None]:
    """The library's eager loop, for models whose default is another implementation."""
    before = model.config._experts_implementation
    model.set_experts_implementation("eager")
    try:
        yield
    finally:
        model.set_experts_implementation(before)
