"""ModelLayout.from_config against published models, modules of real ones and naive references."""

from __future__ import annotations

import importlib
import inspect
import json
import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routetrace.common.errors import InvalidArgument, ModelNotSupported
from routetrace.common.layout import ModelLayout

Config = dict[str, Any]
Answer = tuple[int, int, list[int], int]  # num_experts, top_k, layer_ids, num_hidden_layers


def answer(layout: ModelLayout) -> Answer:
    assert layout.layer_ids == layout.moe_layer_ids
    return layout.num_experts, layout.top_k, list(layout.layer_ids), layout.num_hidden_layers


def routed(num_experts: int, top_k: int, layers: range | list[int], count: int) -> Answer:
    return num_experts, top_k, list(layers), count


NEMOTRON_NANO = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"

# Model -> (config class of transformers, values of the published config.json, what follows).
PUBLISHED: dict[str, tuple[str, Config, Answer]] = {
    "Mixtral-8x7B": (
        "MixtralConfig",
        {"num_hidden_layers": 32, "num_local_experts": 8, "num_experts_per_tok": 2},
        routed(8, 2, range(32), 32),
    ),
    "Qwen1.5-MoE-A2.7B": (
        "Qwen2MoeConfig",
        {
            "num_hidden_layers": 24,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "decoder_sparse_step": 1,
        },
        routed(60, 4, range(24), 24),
    ),
    "Qwen3-30B-A3B": (
        "Qwen3MoeConfig",
        {
            "num_hidden_layers": 48,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        },
        routed(128, 8, range(48), 48),
    ),
    "Qwen3-235B-A22B": (
        "Qwen3MoeConfig",
        {"num_hidden_layers": 94, "num_experts": 128, "num_experts_per_tok": 8},
        routed(128, 8, range(94), 94),
    ),
    "Qwen3-Next-80B-A3B": (
        "Qwen3NextConfig",
        {"num_hidden_layers": 48, "num_experts": 512, "num_experts_per_tok": 10},
        routed(512, 10, range(48), 48),
    ),
    "Qwen3.5-35B-A3B": (
        "Qwen3_5MoeConfig",
        {"text_config": {"num_hidden_layers": 40, "num_experts": 256, "num_experts_per_tok": 8}},
        routed(256, 8, range(40), 40),
    ),
    "Qwen3-VL-30B-A3B": (
        "Qwen3VLMoeConfig",
        {"text_config": {"num_hidden_layers": 48, "num_experts": 128, "num_experts_per_tok": 8}},
        routed(128, 8, range(48), 48),
    ),
    "Qwen3-Omni-30B-A3B": (  # its talker is another MoE model, with 20 layers
        "Qwen3OmniMoeConfig",
        {"thinker_config": {"text_config": {"num_hidden_layers": 48, "num_experts": 128}}},
        routed(128, 8, range(48), 48),
    ),
    "GLM-4.5-Air": (
        "Glm4MoeConfig",
        {
            "num_hidden_layers": 46,
            "n_routed_experts": 128,
            "num_experts_per_tok": 8,
            "first_k_dense_replace": 1,
            "num_nextn_predict_layers": 1,
        },
        routed(128, 8, range(1, 46), 46),
    ),
    "GLM-4.5": (
        "Glm4MoeConfig",
        {
            "num_hidden_layers": 92,
            "n_routed_experts": 160,
            "num_experts_per_tok": 8,
            "first_k_dense_replace": 3,
            "num_nextn_predict_layers": 1,
        },
        routed(160, 8, range(3, 92), 92),
    ),
    "GLM-4.7-Flash": (
        "Glm4MoeLiteConfig",
        {"num_hidden_layers": 47, "n_routed_experts": 64, "num_experts_per_tok": 4},
        routed(64, 4, range(1, 47), 47),
    ),
    "GLM-5": (
        "GlmMoeDsaConfig",
        {
            "num_hidden_layers": 78,
            "n_routed_experts": 256,
            "num_experts_per_tok": 8,
            "first_k_dense_replace": 3,
        },
        routed(256, 8, range(3, 78), 78),
    ),
    "DeepSeek-V2-Lite": (
        "DeepseekV2Config",
        {
            "num_hidden_layers": 27,
            "n_routed_experts": 64,
            "num_experts_per_tok": 6,
            "first_k_dense_replace": 1,
            "moe_layer_freq": 1,
        },
        routed(64, 6, range(1, 27), 27),
    ),
    "DeepSeek-V3": (
        "DeepseekV3Config",
        {
            "num_hidden_layers": 61,
            "n_routed_experts": 256,
            "num_experts_per_tok": 8,
            "first_k_dense_replace": 3,
            "moe_layer_freq": 1,
            "num_nextn_predict_layers": 1,
        },
        routed(256, 8, range(3, 61), 61),
    ),
    "DeepSeek-V4-Flash": (
        "DeepseekV4Config",
        {
            "num_hidden_layers": 43,
            "n_routed_experts": 256,
            "num_experts_per_tok": 6,
            "num_hash_layers": 3,
        },
        routed(256, 6, range(43), 43),
    ),
    "Kimi-K2": (
        "DeepseekV3Config",
        {
            "num_hidden_layers": 61,
            "n_routed_experts": 384,
            "num_experts_per_tok": 8,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
        },
        routed(384, 8, range(1, 61), 61),
    ),
    "Moonlight-16B-A3B": (
        "DeepseekV3Config",
        {
            "num_hidden_layers": 27,
            "n_routed_experts": 64,
            "num_experts_per_tok": 6,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
        },
        routed(64, 6, range(1, 27), 27),
    ),
    "gpt-oss-20b": (
        "GptOssConfig",
        {"num_hidden_layers": 24, "num_local_experts": 32, "num_experts_per_tok": 4},
        routed(32, 4, range(24), 24),
    ),
    "gpt-oss-120b": (
        "GptOssConfig",
        {"num_hidden_layers": 36, "num_local_experts": 128, "num_experts_per_tok": 4},
        routed(128, 4, range(36), 36),
    ),
    "MiniMax-M2": (
        "MiniMaxM2Config",
        {"num_hidden_layers": 62, "num_local_experts": 256, "num_experts_per_tok": 8},
        routed(256, 8, range(62), 62),
    ),
    "Llama-4-Scout": (
        "Llama4Config",
        {
            "text_config": {
                "num_hidden_layers": 48,
                "num_local_experts": 16,
                "num_experts_per_tok": 1,
                "interleave_moe_layer_step": 1,
            }
        },
        routed(16, 1, range(48), 48),
    ),
    "Llama-4-Maverick": (
        "Llama4Config",
        {
            "text_config": {
                "num_hidden_layers": 48,
                "num_local_experts": 128,
                "num_experts_per_tok": 1,
                "interleave_moe_layer_step": 2,
            }
        },
        routed(128, 1, range(1, 48, 2), 48),
    ),
    "OLMoE-1B-7B": (
        "OlmoeConfig",
        {"num_hidden_layers": 16, "num_experts": 64, "num_experts_per_tok": 8},
        routed(64, 8, range(16), 16),
    ),
    "Granite-3.x-1b-a400m": (
        "GraniteMoeConfig",
        {"num_hidden_layers": 24, "num_local_experts": 32, "num_experts_per_tok": 8},
        routed(32, 8, range(24), 24),
    ),
    "Granite-3.x-3b-a800m": (
        "GraniteMoeConfig",
        {"num_hidden_layers": 32, "num_local_experts": 40, "num_experts_per_tok": 8},
        routed(40, 8, range(32), 32),
    ),
    "Granite-4.0-H-Small": (
        "GraniteMoeHybridConfig",
        {"num_hidden_layers": 40, "num_local_experts": 72, "num_experts_per_tok": 10},
        routed(72, 10, range(40), 40),
    ),
    "Nemotron-3-Nano-30B-A3B": (
        "NemotronHConfig",
        {
            "num_hidden_layers": 52,
            "hybrid_override_pattern": NEMOTRON_NANO,
            "n_routed_experts": 128,
            "num_experts_per_tok": 6,
        },
        routed(128, 6, [i for i, symbol in enumerate(NEMOTRON_NANO) if symbol == "E"], 52),
    ),
    "ERNIE-4.5-21B-A3B": (
        "Ernie4_5_MoeConfig",
        {
            "num_hidden_layers": 28,
            "moe_num_experts": 64,
            "moe_k": 6,
            "moe_layer_start_index": 1,
            "moe_layer_end_index": 27,
            "moe_layer_interval": 1,
        },
        routed(64, 6, range(1, 28), 28),
    ),
    "ERNIE-4.5-300B-A47B": (
        "Ernie4_5_MoeConfig",
        {
            "num_hidden_layers": 54,
            "moe_num_experts": 64,
            "moe_k": 8,
            "moe_layer_start_index": 3,
            "moe_layer_end_index": 53,
        },
        routed(64, 8, range(3, 54), 54),
    ),
    "Jamba-v0.1": (
        "JambaConfig",
        {
            "num_hidden_layers": 32,
            "num_experts": 16,
            "num_experts_per_tok": 2,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
        },
        routed(16, 2, range(1, 32, 2), 32),
    ),
    "Hunyuan-A13B": (
        "HunYuanMoEV1Config",
        {"num_hidden_layers": 32, "num_experts": 64, "moe_topk": [8] * 32},
        routed(64, 8, range(32), 32),
    ),
    "Phi-3.5-MoE": (
        "PhimoeConfig",
        {"num_hidden_layers": 32, "num_local_experts": 16, "num_experts_per_tok": 2},
        routed(16, 2, range(32), 32),
    ),
    "dots.llm1": (
        "Dots1Config",
        {
            "num_hidden_layers": 62,
            "n_routed_experts": 128,
            "num_experts_per_tok": 6,
            "first_k_dense_replace": 1,
        },
        routed(128, 6, range(1, 62), 62),
    ),
    "DBRX": (
        "DbrxConfig",
        {"n_layers": 40, "ffn_config": {"moe_num_experts": 16, "moe_top_k": 4}},
        routed(16, 4, range(40), 40),
    ),
    "LFM2-8B-A1B": (
        "Lfm2MoeConfig",
        {
            "num_hidden_layers": 24,
            "num_experts": 32,
            "num_experts_per_tok": 4,
            "num_dense_layers": 2,
            "layer_types": ["conv"] * 24,
        },
        routed(32, 4, range(2, 24), 24),
    ),
    "LongCat-Flash": (  # 512 experts and 256 that compute nothing, which the router also chooses
        "LongcatFlashConfig",
        {"num_layers": 28, "n_routed_experts": 512, "zero_expert_num": 256, "moe_topk": 12},
        routed(768, 12, range(28), 28),
    ),
}

# config.json files as published, in the words of their own remote code or of an engine:
# (values, what follows, config class of transformers that reads the same).
RAW: dict[str, tuple[Config, Answer, str]] = {
    "Step-3.5-Flash": (
        {
            "model_type": "step3p5",
            "num_hidden_layers": 45,
            "num_nextn_predict_layers": 3,
            "use_moe": True,
            "moe_num_experts": 288,
            "moe_top_k": 8,
            "moe_layers_enum": ",".join(map(str, range(3, 45))),
        },
        routed(288, 8, range(3, 45), 45),
        "Step3p7TextConfig",
    ),
    "LongCat-Flash, as transformers 5.17 writes it": (  # num_hidden_layers: attention blocks
        {
            "model_type": "longcat_flash",
            "num_layers": 28,
            "num_hidden_layers": 56,
            "n_routed_experts": 512,
            "zero_expert_num": 256,
            "moe_topk": 12,
        },
        routed(768, 12, range(28), 28),
        "",
    ),
    "Hunyuan-A13B": (
        {
            "model_type": "hunyuan_v1_moe",
            "num_hidden_layers": 32,
            "num_experts": [64] * 32,
            "moe_topk": [8] * 32,
            "moe_layer_num_skipped": 0,
        },
        routed(64, 8, range(32), 32),
        "",
    ),
    "ERNIE-4.5-VL-28B-A3B": (  # [text, vision]
        {
            "model_type": "ernie4_5_moe_vl",
            "num_hidden_layers": 28,
            "moe_num_experts": [64, 64],
            "moe_k": 6,
            "moe_layer_start_index": [1, 1],
            "moe_layer_end_index": [29, 28],
            "moe_layer_interval": 1,
        },
        routed(64, 6, range(1, 28), 28),
        "",
    ),
    "MiMo-V2-Flash": (
        {
            "model_type": "mimo_v2_flash",
            "num_hidden_layers": 48,
            "n_routed_experts": 256,
            "num_experts_per_tok": 8,
            "moe_layer_freq": [0] + [1] * 47,
        },
        routed(256, 8, range(1, 48), 48),
        "MiMoV2FlashConfig",
    ),
    "GLM-4.7-Flash": (
        {
            "model_type": "glm4_moe_lite",
            "num_hidden_layers": 47,
            "n_routed_experts": 64,
            "num_experts_per_tok": 4,
            "first_k_dense_replace": 1,
        },
        routed(64, 4, range(1, 47), 47),
        "Glm4MoeLiteConfig",
    ),
    "Kimi-Linear-48B-A3B": (
        {
            "model_type": "kimi_linear",
            "num_hidden_layers": 27,
            "num_experts": 256,
            "num_experts_per_token": 8,
            "first_k_dense_replace": 1,
            "moe_layer_freq": 1,
        },
        routed(256, 8, range(1, 27), 27),
        "KimiLinearConfig",
    ),
    "Kimi-K2.5": (
        {
            "model_type": "kimi_k25",
            "text_config": {
                "model_type": "kimi_k2",
                "num_hidden_layers": 61,
                "n_routed_experts": 384,
                "num_experts_per_tok": 8,
                "first_k_dense_replace": 1,
                "moe_layer_freq": 1,
            },
        },
        routed(384, 8, range(1, 61), 61),
        "",
    ),
    "Nemotron-3-Nano-30B-A3B": (
        {
            "model_type": "nemotron_h",
            "num_hidden_layers": 52,
            "hybrid_override_pattern": NEMOTRON_NANO,
            "n_routed_experts": 128,
            "num_experts_per_tok": 6,
        },
        PUBLISHED["Nemotron-3-Nano-30B-A3B"][2],
        "NemotronHConfig",
    ),
    "gpt-oss-20b": (  # says the top-k twice
        {
            "model_type": "gpt_oss",
            "num_hidden_layers": 24,
            "num_local_experts": 32,
            "num_experts_per_tok": 4,
            "experts_per_token": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 12,
        },
        routed(32, 4, range(24), 24),
        "GptOssConfig",
    ),
    "Inkling": (
        {
            "model_type": "inkling_text",
            "num_hidden_layers": 66,
            "n_routed_experts": 256,
            "num_experts_per_tok": 6,
            "dense_mlp_idx": 2,
        },
        routed(256, 6, range(2, 66), 66),
        "InklingTextConfig",
    ),
    "MiniMax-M3": (
        {
            "model_type": "minimax_m3_vl_text",
            "num_hidden_layers": 60,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "moe_layer_freq": [0] * 3 + [1] * 57,
        },
        routed(128, 4, range(3, 60), 60),
        "MiniMaxM3VLTextConfig",
    ),
    "dots3-note": (
        {
            "num_hidden_layers": 46,
            "n_routed_experts": 256,
            "num_experts_per_tok": 8,
            "first_k_dense_replace": 5,
            "moe_layer_freq": 3,
        },
        routed(256, 8, range(6, 46, 3), 46),
        "Dots3NoteTextConfig",
    ),
    "Snowflake Arctic": (
        {
            "model_type": "arctic",
            "num_hidden_layers": 35,
            "num_local_experts": 128,
            "num_experts_per_tok": 2,
            "moe_layer_frequency": 2,
        },
        routed(128, 2, range(1, 35, 2), 35),
        "",
    ),
    "Motif-3": (
        {
            "num_hidden_layers": 53,
            "num_experts": 384,
            "experts_top_k": 8,
            "n_dense_first_layers": 2,
            "interleave_moe_layer_step": 1,
        },
        routed(384, 8, range(2, 53), 53),
        "",
    ),
    "InternVL3.5-30B-A3B": (
        {
            "model_type": "internvl_chat",
            "llm_config": {
                "model_type": "qwen3_moe",
                "num_hidden_layers": 48,
                "num_experts": 128,
                "num_experts_per_tok": 8,
                "decoder_sparse_step": 1,
                "mlp_only_layers": [],
            },
            "vision_config": {"num_hidden_layers": 24},
        },
        routed(128, 8, range(48), 48),
        "",
    ),
    "DeepSeek-OCR": (
        {
            "model_type": "deepseek_vl_v2",
            "language_config": {
                "model_type": "deepseek_v2",
                "num_hidden_layers": 12,
                "n_routed_experts": 64,
                "num_experts_per_tok": 6,
                "first_k_dense_replace": 1,
            },
        },
        routed(64, 6, range(1, 12), 12),
        "",
    ),
    "padded with MTP layers": (
        {
            "num_hidden_layers": 3,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
            "num_nextn_predict_layers": 1,
        },
        routed(8, 2, [1, 2], 3),
        "",
    ),
}


def hf(name: str) -> Any:
    transformers = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()
    found = getattr(transformers, name, None)
    if found is None:
        pytest.skip(f"this transformers has no {name}")
    return found


@pytest.mark.parametrize("model", PUBLISHED)
def test_published_models(model: str) -> None:
    name, values, expected = PUBLISHED[model]
    config = hf(name)(**values)
    assert answer(ModelLayout.from_config(config)) == expected
    assert answer(ModelLayout.from_config(config.to_dict())) == expected
    assert answer(ModelLayout.from_config(json.loads(json.dumps(config.to_dict())))) == expected
    # As save_pretrained writes it: values equal to a default may be left out.
    assert answer(ModelLayout.from_config(json.loads(config.to_json_string()))) == expected


@pytest.mark.parametrize("model", RAW)
def test_raw_config_json(model: str) -> None:
    values, expected, name = RAW[model]
    assert answer(ModelLayout.from_config(values)) == expected
    if name:
        own = {key: value for key, value in values.items() if key != "model_type"}
        assert answer(ModelLayout.from_config(hf(name)(**own))) == expected


# --- an independent oracle: the modules that transformers builds ------------------------------

# Families that the oracle meets, where the installed transformers has them.
# fmt: off
COVERED = {
    "afmoe", "aria", "axk1", "axk2", "bailing_hybrid", "beam", "cohere2_moe", "dbrx",
    "deepseek_ocr2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "deepseek_v4", "diffusion_gemma",
    "doge", "dots1", "dots3_note", "ernie4_5_moe", "ernie4_5_vl_moe", "exaone_moe", "flex_olmo",
    "flint", "gemma4", "glm4_moe", "glm4_moe_lite", "glm4v_moe", "glm5_next", "glm_moe_dsa",
    "gpt_oss", "granitemoe", "granitemoe_swa", "granitemoehybrid", "granitemoeshared",
    "hunyuan_v1_moe", "hy_v3", "hy_v4", "inkling", "inkling2", "jamba", "jetmoe", "kimi_linear",
    "kolibri1", "laguna", "lfm2_moe", "llama4", "longcat_flash", "mellum", "mimo_v2_flash",
    "minimax", "minimax_m2", "minimax_m3_vl", "mistral4", "mistral_large4", "mixtral", "muse_spark",
    "nemotron_h", "olmoe", "openai_privacy_filter", "phimoe", "qwen2_moe", "qwen3_5_moe",
    "qwen3_moe", "qwen3_next", "qwen3_omni_moe", "qwen3_vl_moe", "qwen4_exp", "solar_open",
    "step3p7", "unlimited_ocr", "zaya",
}
# fmt: on
NOT_COVERED = {
    "granite_docling": "its router chooses an image density, not experts",
    "nllb_moe": "encoder-decoder with two stacks; top-2 is in no key",
    "switch_transformers": "encoder-decoder with two stacks; top-1 is in no key",
    "vitpose_backbone": "a vision backbone that picks the expert by data set, without a router",
}
ROUTER = re.compile(r"(Router|TopKGating|MoEV1Gate|CDMoE)$")
LAYER = re.compile(r"(?:layers|blocks)\.(\d+)\.")
EXPERTS = {"num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"}
TOP_K = {"num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_k"}
LAYERS = 6
# What a family cannot be built without, where its defaults are not enough.
NEEDS: dict[str, Config] = {
    "dbrx": {
        "n_layers": LAYERS,
        "ffn_config": {"moe_num_experts": 8, "moe_top_k": 2},
        "attn_config": {"rope_theta": 10_000.0},
    },
    "deepseek_v4": {
        "mlp_layer_types": ["hash_moe", "moe", "moe", "hash_moe", "moe", "moe"],
    },
    "diffusion_gemma": {"moe_intermediate_size": 64},
    "doge": {"is_moe": True},
    "dots1": {"n_shared_experts": 1},
    "gemma4": {"enable_moe_block": True, "moe_intermediate_size": 64},
    "hunyuan_v1_moe": {"head_dim": 64},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * (LAYERS // 2)},
    "nemotron_h": {"num_hidden_layers": None},
    "qwen4_exp": {"layer_types": ["linear_attention"] * LAYERS},
    "zaya": {"num_experts_per_tok": 1},
}
# Dense and MoE layers mixed, in every way that a family has keys for.
MIXES: list[Config] = [
    {"mlp_layer_types": ["dense", "sparse", "sparse", "dense", "sparse", "dense"]},
    {"first_k_dense_replace": 2},
    {"num_dense_layers": 2},
    {"decoder_sparse_step": 2, "mlp_only_layers": [3]},
    {"expert_layer_period": 3, "expert_layer_offset": 1},
    {"moe_layer_start_index": 1, "moe_layer_end_index": 4, "moe_layer_interval": 2},
    {"moe_layer_start_index": 2, "moe_layer_end_index": -1, "moe_layer_interval": 1},
    {"interleave_moe_layer_step": 2},
    {"moe_layers": [1, 2, 5]},
    {"layers_block_type": ["mamba", "moe", "attention", "moe", "mlp", "moe"]},
]


def model_root() -> Path:
    transformers = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()
    return Path(transformers.__file__).parent / "models"


@pytest.fixture(params=sorted(COVERED))
def family(request: pytest.FixtureRequest) -> str:
    pytest.importorskip("torch")
    name: str = request.param
    if not (model_root() / name).is_dir():
        pytest.skip(f"this transformers has no {name}")
    return name


@cache
def language_model(family: str) -> tuple[Any, Any]:
    """The model class of a family's language model with its config class."""
    transformers = pytest.importorskip("transformers")
    base = transformers.PreTrainedModel
    if not (model_root() / family / f"modeling_{family}.py").exists():
        # A family with a configuration of its own and the model class of another family.
        config = type(transformers.AutoConfig.for_model(family))
        return transformers.MODEL_FOR_CAUSAL_LM_MAPPING[config], config
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    best: tuple[int, Any, Any] | None = None
    name: str
    cls: Any
    for name, cls in inspect.getmembers(module, inspect.isclass):
        if not issubclass(cls, base) or cls.__module__ != module.__name__:
            continue
        config: Any = cls.config_class
        suffixes = ["ForCausalLM", "TextModel", "Model"]
        rank = next((i for i, suffix in enumerate(suffixes) if name.endswith(suffix)), None)
        if rank is None or not isinstance(config, type) or re.search("PreTrained|Talker", name):
            continue
        keys = set(config().to_dict())
        if (keys & EXPERTS or "ffn_config" in keys) and "Vision" not in name:
            best = min(best or (9, None, None), (rank, cls, config), key=lambda entry: entry[0])
    assert best is not None, f"{family}: no language model with experts"
    return best[1], best[2]


def tiny(family: str, keys: set[str]) -> Config:
    """Eight experts, two of them chosen, six layers; widths cost nothing on the meta device."""
    values: Config = dict.fromkeys(keys & EXPERTS, 8) | dict.fromkeys(keys & TOP_K, 2)
    values |= dict.fromkeys(keys & {"num_hidden_layers", "num_layers"}, LAYERS)
    values |= dict.fromkeys(keys & {"n_group", "topk_group", "num_expert_group"}, 1)
    return values | NEEDS.get(family, {})


def test_no_family_is_forgotten() -> None:
    """Families that no list here has, of a newer transformers, face the same oracle."""
    pytest.importorskip("torch")
    router = re.compile(r"^class \w*(Router|TopKGating|MoEV1Gate|CDMoE)\(", re.MULTILINE)
    experts = re.compile(rf"^    ({'|'.join(EXPERTS)}):", re.MULTILINE)
    found = {
        path.parent.name
        for pattern, glob in ((router, "*/modeling_*.py"), (experts, "*/configuration_*.py"))
        for path in model_root().glob(glob)
        if pattern.search(path.read_text(encoding="utf-8"))
    }
    assert found > {"mixtral", "deepseek_v3", "llama4"}
    for family in found - COVERED - NOT_COVERED.keys():
        check_layers_against_router_modules(family)


def test_layers_are_those_with_a_router_module(family: str) -> None:
    check_layers_against_router_modules(family)


def check_layers_against_router_modules(family: str) -> None:
    torch = pytest.importorskip("torch")
    model_class, config_class = language_model(family)
    keys = set(config_class().to_dict())
    base = tiny(family, keys)
    mixes = [mix for mix in MIXES if mix.keys() <= keys and not mix.keys() & base.keys()] or [{}]
    for mix in mixes:
        config = config_class(**base, **mix)
        layout = ModelLayout.from_config(config)
        with torch.device("meta"):
            model = model_class(config)
        modules = dict(model.named_modules())
        routers = {n: m for n, m in modules.items() if ROUTER.search(type(m).__name__)}
        # Before they had classes of their own, some were linear layers (Jamba, Aria: 5.17).
        routers = routers or {n: m for n, m in modules.items() if n.endswith(".router")}
        layers = {int(layer) for name in routers for layer in LAYER.findall(name)[:1]}
        assert set(layout.layer_ids) == layers, mix
        assert layout.num_hidden_layers == LAYERS
        assert {getattr(router, "top_k", layout.top_k) for router in routers.values()} == {
            layout.top_k
        }
        # A router's weight has a row per id to choose from; Inkling's scores shared experts too.
        for router in routers.values():
            weights = dict(router.named_parameters())
            weight = weights.get("weight", weights.get("classifier.weight"))
            if weight is not None and family != "inkling":
                assert weight.shape[0] == layout.num_experts
        if mix:
            assert 0 < len(layers) < LAYERS


def test_whole_config_is_its_language_model(family: str) -> None:
    _, config_class = language_model(family)
    module = importlib.import_module(config_class.__module__)
    text = tiny(family, set(config_class().to_dict()))
    expected = ModelLayout.from_config(config_class(**text))
    whole: Any
    for _, whole in inspect.getmembers(module, inspect.isclass):
        if "text_config" in (getattr(whole, "sub_configs", None) or {}):
            config = whole(text_config={"model_type": config_class.model_type, **text})
            if isinstance(config.text_config, config_class):
                assert ModelLayout.from_config(config) == expected
                assert ModelLayout.from_config(json.loads(config.to_json_string())) == expected


def test_a_default_that_only_the_config_class_knows_is_not_guessed(family: str) -> None:
    _, config_class = language_model(family)
    values = tiny(family, set(config_class().to_dict()))
    values = {key: v for key, v in values.items() if v is not None and not key.endswith("_types")}
    if family == "lfm2_moe":  # cannot be built without
        expected = list(range(2, LAYERS))
    else:
        if family == "nemotron_h":
            values["num_hidden_layers"] = 4
        expected = list(ModelLayout.from_config(config_class(**values)).layer_ids)
    raw = {"model_type": config_class.model_type, **values}
    if expected == list(range(LAYERS)):
        assert list(ModelLayout.from_config(raw).layer_ids) == expected
    else:
        with pytest.raises(ModelNotSupported, match="does not say which layers") as error:
            ModelLayout.from_config(raw)
        assert "first_k_dense_replace" in error.value.field


@pytest.mark.parametrize("name", ["NllbMoeConfig", "SwitchTransformersConfig"])
def test_encoder_decoders_have_no_layout(name: str) -> None:
    with pytest.raises(ModelNotSupported, match="num_experts_per_tok"):
        ModelLayout.from_config(hf(name)())


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("GraniteMoeHybridConfig", {"num_local_experts": 0}),
        ("Gemma4Config", {"text_config": {"enable_moe_block": False}}),
        ("DogeConfig", {"is_moe": False}),
        ("HunYuanMoEV1Config", {"num_experts": 1}),
    ],
)
def test_dense_models_say_so(name: str, values: Config) -> None:
    with pytest.raises(ModelNotSupported, match="not a MoE model") as error:
        ModelLayout.from_config(hf(name)(**values))
    assert error.value.field
    assert error.value.expected == "more than one routed expert"


@pytest.mark.parametrize("name", ["LlamaConfig", "Qwen3VLConfig"])
def test_a_config_without_a_known_name_is_not_called_dense(name: str) -> None:
    with pytest.raises(ModelNotSupported, match=r"no known name .*num_experts .*a dense") as error:
        ModelLayout.from_config(hf(name)())
    assert "not a MoE" not in str(error.value)
    assert error.value.value == "absent"


@pytest.mark.parametrize(
    ("known", "looked_for"), [("num_experts_per_tok", "num_experts"), ("num_experts", "moe_topk")]
)
def test_names_that_are_not_known_are_shown(known: str, looked_for: str) -> None:
    config = {"num_hidden_layers": 2, known: 8, "moe_amount": 64, "use_experts": True}
    with pytest.raises(ModelNotSupported, match="no known name") as error:
        ModelLayout.from_config(config)
    assert looked_for in error.value.field.split(" | ")
    assert error.value.value == "absent, beside moe_amount = 64"
    assert "ModelLayout" in error.value.remedy


BLOCKS = [
    {"block_type": "mamba"},
    {"block_type": "moe", "n_routed_experts": 8, "num_experts_per_tok": 2},
    {"block_type": "attention"},
    {"block_type": "moe", "n_routed_experts": 8, "num_experts_per_tok": 2},
]


def test_a_config_of_blocks() -> None:
    config = {"model_type": "nemotron_h_puzzle", "num_hidden_layers": 4, "block_configs": BLOCKS}
    assert ModelLayout.from_config(config) == ModelLayout((1, 3), 4, 8, 2)


@pytest.mark.parametrize("key", ["n_routed_experts", "num_experts_per_tok"])
@pytest.mark.parametrize("given", [{}, {"n_routed_experts": 8, "num_experts_per_tok": 2}])
@pytest.mark.parametrize("form", ["block_configs", "per_layer_config"])
def test_layers_of_different_widths_have_no_layout(key: str, given: Config, form: str) -> None:
    blocks: Any = [*BLOCKS[:3], {**BLOCKS[3], key: 4}]
    types = [block["block_type"] for block in blocks]
    config = {"num_hidden_layers": 4, "layers_block_type": types, **given}
    if form == "per_layer_config":
        blocks = {str(i): block for i, block in enumerate(blocks)}
    with pytest.raises(ModelNotSupported, match="the same for all layers") as error:
        ModelLayout.from_config({**config, form: blocks})
    assert key in error.value.field.split(" | ")


def test_nemotron_h_without_moe_layers_says_so() -> None:
    config = hf("NemotronHConfig")(layers_block_type=["mamba", "mlp", "attention", "mlp"])
    assert config.n_routed_experts > 0  # the trap: a default of the class
    with pytest.raises(ModelNotSupported, match="no MoE layer among 4"):
        ModelLayout.from_config(config)


# --- properties -------------------------------------------------------------------------------

COUNT = st.integers(1, 40)
Case = tuple[int, Config, list[int]]


@st.composite
def deepseek(draw: Callable[..., Any]) -> Case:
    n, k = draw(COUNT), draw(st.integers(0, 12))
    freq = draw(st.integers(1, 5) | st.lists(st.sampled_from([0, 1]), min_size=n, max_size=n + 2))
    if isinstance(freq, int):
        layers = [i for i in range(n) if i >= k and i % freq == 0]
    else:
        layers = [i for i in range(n) if i >= k and freq[i] == 1]
    return n, {"first_k_dense_replace": k, "moe_layer_freq": freq}, layers


@st.composite
def qwen(draw: Callable[..., Any]) -> Case:
    n, step, dense = draw(COUNT), draw(st.integers(1, 5)), draw(st.lists(st.integers(0, 45)))
    layers = [i for i in range(n) if (i + 1) % step == 0 and i not in dense]
    return n, {"decoder_sparse_step": step, "mlp_only_layers": dense}, layers


@st.composite
def ernie(draw: Callable[..., Any]) -> Case:
    n, start, step = draw(COUNT), draw(st.integers(0, 6)), draw(st.integers(1, 4))
    end = draw(st.just(-1) | st.integers(0, 45))
    stop = n if end == -1 else min(n, end + 1)
    layers = [i for i in range(start, stop) if (i + 1) % step == 0]
    keys = ("moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval")
    return n, dict(zip(keys, (start, end, step), strict=True)), layers


@st.composite
def jamba(draw: Callable[..., Any]) -> Case:
    n, period = draw(COUNT), draw(st.integers(1, 6))
    offset = draw(st.integers(0, period - 1))
    layers = [i for i in range(n) if i % period == offset]
    return n, {"expert_layer_period": period, "expert_layer_offset": offset}, layers


@st.composite
def llama4(draw: Callable[..., Any]) -> Case:
    n, step = draw(COUNT), draw(st.integers(1, 5))
    ids = draw(st.none() | st.lists(st.integers(0, 45)))
    layers = list(range(step - 1, n, step))
    if ids is None:
        return n, {"interleave_moe_layer_step": step, "moe_layers": None}, layers
    text = draw(st.booleans())
    config = {"moe_layers_enum": ", ".join(map(str, ids))} if text else {"moe_layers": ids}
    return n, {**config, "interleave_moe_layer_step": step}, sorted({i for i in ids if i < n})


@st.composite
def typed(draw: Callable[..., Any]) -> Case:
    key, moe, other = draw(
        st.sampled_from(
            [
                ("mlp_layer_types", ["sparse", "moe", "hash_moe"], ["dense"]),
                ("layers_block_type", ["moe"], ["mlp", "mamba", "attention"]),
                ("layer_types", ["moe"], ["mlp", "linear_attention", "full_attention"]),
                ("hybrid_override_pattern", ["E"], ["-", "M", "*"]),
            ]
        )
    )
    types = [*draw(st.lists(st.sampled_from(moe + other), max_size=40)), other[0]]
    layers = [i for i, word in enumerate(types) if word in moe]
    # A stale key of a less explicit kind, and attention types, change nothing.
    config = {key: "".join(types) if key.startswith("hybrid") else types}
    return len(types), {"first_k_dense_replace": 99, **config}, layers


@settings(max_examples=200)
@given(
    st.one_of(deepseek(), qwen(), ernie(), jamba(), llama4(), typed()),
    st.sampled_from(["n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts"]),
    st.sampled_from(["num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_k"]),
    st.sampled_from(["", "text_config", "llm_config", "language_config"]),
)
def test_layers_match_a_naive_reference(case: Case, experts: str, top_k: str, nested: str) -> None:
    count, keys, layers = case
    config: Config = {"num_hidden_layers": count, experts: 16, top_k: 3, **keys}
    config.setdefault("layer_types", ["full_attention"] * count)  # never about MoE
    if nested:
        config = {"num_hidden_layers": 99, "vision_config": {"num_experts": 7}, nested: config}
    if layers:
        assert answer(ModelLayout.from_config(config)) == (16, 3, layers, count)
    else:
        with pytest.raises(ModelNotSupported, match="no MoE layer"):
            ModelLayout.from_config(config)


# --- shapes of input, and errors --------------------------------------------------------------

PLAIN: Config = {"num_hidden_layers": 4, "num_experts": 8, "num_experts_per_tok": 2}


def test_attributes_do_as_well_as_keys() -> None:
    assert answer(ModelLayout.from_config(SimpleNamespace(**PLAIN))) == routed(8, 2, range(4), 4)
    nested = SimpleNamespace(text_config=SimpleNamespace(**PLAIN, mlp_only_layers=(1,)))
    assert answer(ModelLayout.from_config(nested)) == routed(8, 2, [0, 2, 3], 4)


@pytest.mark.parametrize("types", [["full_attention"] * 3, ["dense"] * 4, {"0": "moe"}, [[0]], 7])
def test_layer_types_of_another_meaning_are_ignored(types: object) -> None:
    layout = ModelLayout.from_config({**PLAIN, "layer_types": types})
    assert answer(layout) == routed(8, 2, range(4), 4)


def test_per_layer_overrides_of_other_things_are_fine() -> None:
    overrides = {"1": {"head_dim": 64}, "2": {"num_experts": 8}}
    layout = ModelLayout.from_config({**PLAIN, "per_layer_config": overrides})
    assert answer(layout) == routed(8, 2, range(4), 4)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"num_experts": None}, "num_experts"),
        ({"num_experts": 1}, "num_experts"),
        ({"num_experts": -8}, "num_experts"),
        ({"num_experts": 8.0}, "num_experts"),
        ({"num_experts": True}, "num_experts"),
        ({"num_experts": "8"}, "num_experts"),
        ({"num_experts": [8, 16]}, "num_experts"),
        ({"num_experts": 70_000}, "num_experts"),
        ({"num_local_experts": 16}, "num_local_experts"),
        ({"per_layer_config": {"3": {"num_experts": 4}}}, "num_experts"),
        ({"num_experts_per_tok": None}, "num_experts_per_tok"),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok"),
        ({"num_experts_per_tok": 9}, "top_k"),
        ({"moe_topk": [2, 2, 4, 2]}, "moe_topk"),
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"num_layers": 8}, "num_layers"),
        ({"use_moe": False}, "use_moe"),
        ({"mlp_layer_types": ["dense", "sparse"]}, "mlp_layer_types"),
        ({"mlp_layer_types": ["dense", "sparse", "strange", "dense"]}, "mlp_layer_types"),
        ({"mlp_layer_types": 3}, "mlp_layer_types"),
        ({"mlp_layer_types": []}, "mlp_layer_types"),
        ({"mlp_layer_types": [["sparse"]] * 4}, "mlp_layer_types"),
        ({"layers_block_type": ["moe"] * 5}, "layers_block_type"),
        ({"hybrid_override_pattern": "MEM"}, "hybrid_override_pattern"),
        ({"hybrid_override_pattern": "ME|ME"}, "hybrid_override_pattern"),
        ({"moe_layers": [-1]}, "moe_layers"),
        ({"moe_layers": [4]}, "moe_layers"),
        ({"moe_layers": []}, "moe_layers"),
        ({"moe_layers_enum": "1,x"}, "moe_layers_enum"),
        ({"moe_layer_freq": [1, 1]}, "moe_layer_freq"),
        ({"moe_layer_freq": 0}, "moe_layer_freq"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step"),
        ({"first_k_dense_replace": -1}, "first_k_dense_replace"),
        ({"first_k_dense_replace": 4}, "first_k_dense_replace"),
        ({"mlp_only_layers": [0, 1, 2, 3]}, "mlp_only_layers"),
        ({"mlp_only_layers": "all"}, "mlp_only_layers"),
        ({"expert_layer_period": 2}, "expert_layer_offset"),
        ({"moe_layer_end_index": [2, 3]}, "moe_layer_end_index"),
        ({"text_config": "qwen3_moe"}, "text_config"),
        ({"zero_expert_num": -1}, "zero_expert_num"),
    ],
)
def test_errors_name_field_value_and_expected(change: Config, field: str) -> None:
    with pytest.raises(InvalidArgument) as error:
        ModelLayout.from_config({**PLAIN, **change})
    assert field in re.split(r" [|&] ", error.value.field)
    assert error.value.value
    assert error.value.expected
    assert field in str(error.value)


@pytest.mark.parametrize("config", ["Qwen/Qwen3-30B-A3B", None, 3, SimpleNamespace, [("a", 1)]])
def test_not_a_config(config: object) -> None:
    with pytest.raises(ModelNotSupported, match="expected a config or a mapping"):
        ModelLayout.from_config(config)


def test_the_module_needs_no_transformers() -> None:
    code = "import sys, routetrace.common.model_map; sys.exit('transformers' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})
