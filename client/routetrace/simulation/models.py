"""Models by name: layout, expert popularity, and length of compressed rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from routetrace.common.layout import ModelLayout


@dataclass(frozen=True)
class Model:
    """Routing of a model."""

    name: str
    layout: ModelLayout
    skew: float
    """Standard deviation of the experts' log-popularity, set so that compressed frames of 256
    simulated rows are as long as recorded ones."""
    frame_bytes: float
    """Bytes per token in such a frame of recorded rows; 0 if none were recorded."""


def _model(name: str, skew: float, frame_bytes: float, **config: Any) -> Model:
    return Model(name, ModelLayout.from_config(config), skew, frame_bytes)


#: By name. Configs hold only the fields that the model map needs.
MODELS: Mapping[str, Model] = {
    model.name: model
    for model in (
        _model(
            "qwen3-30b-a3b", 1.77, 290.6,
            model_type="qwen3_moe", num_hidden_layers=48, num_experts=128, num_experts_per_tok=8,
            decoder_sparse_step=1, mlp_only_layers=[],
        ),
        _model(
            "deepseek-v3", 1.3, 421.9,
            model_type="deepseek_v3", num_hidden_layers=61, n_routed_experts=256,
            num_experts_per_tok=8, first_k_dense_replace=3, moe_layer_freq=1,
        ),
        _model(
            "kimi-k2", 1.46, 477.8,
            model_type="deepseek_v3", num_hidden_layers=61, n_routed_experts=384,
            num_experts_per_tok=8, first_k_dense_replace=1, moe_layer_freq=1,
        ),
        _model(
            "gpt-oss-120b", 2.13, 108.0,
            model_type="gpt_oss", num_hidden_layers=36, num_local_experts=128,
            num_experts_per_tok=4,
        ),
    )
}  # fmt: skip


def custom_model(layers: int, experts: int, top_k: int) -> Model:
    """Return a model of any shape; all layers route."""
    layout = ModelLayout(tuple(range(layers)), layers, experts, top_k)
    return Model(f"{layers} layers, top-{top_k} of {experts}", layout, 1.5, 0.0)
