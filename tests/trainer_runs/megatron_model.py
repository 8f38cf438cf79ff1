"""Small Megatron models in which every router can tell which token each of its rows is.

Two channels of the residual stream are left alone by every layer: one holds the token's serial
number (its token id, by the embedding), one a constant. What a router gets is normalised, which
keeps their ratio. So a row is known by what Megatron itself did to the tokens: context and sequence
parallelism, pipeline stages, flattening, recomputation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trainer_runs import megatron_cpu  # isort: skip  # first of all

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.moe.router import TopKRouter

EXPERTS, TOP_K = 8, 3
LAYERS = 4
MOE_LAYERS = (1, 2, 3)
VOCABULARY = 2048
_HIDDEN = 32

assert megatron_cpu


class _OwnTokens(torch.nn.Module):
    """An attention that looks at nothing: Megatron's own for the CPU knows neither context
    parallelism nor packed sequences, and what a router is given to route does not hang on it."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def forward(self, query: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return query.flatten(-2)


class _Norm(torch.nn.RMSNorm):
    """As torch's, which Megatron refuses together with sequence parallelism."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__(hidden_size, eps)


def make_config(**settings: Any) -> TransformerConfig:
    """The configuration of a small model; dense first layer."""
    return TransformerConfig(
        **{
            "num_layers": LAYERS,
            "moe_layer_freq": [0, 1, 1, 1],
            "hidden_size": _HIDDEN,
            "num_attention_heads": 4,
            "num_query_groups": 4,
            "ffn_hidden_size": 32,
            "moe_ffn_hidden_size": 16,
            "num_moe_experts": EXPERTS,
            "moe_router_topk": TOP_K,
            "moe_router_load_balancing_type": "none",
            "moe_router_dtype": "fp32",
            "moe_enable_routing_replay": True,
            "moe_token_dispatcher_type": "allgather",
            "add_bias_linear": False,
            "gated_linear_unit": True,
            "activation_func": torch.nn.functional.silu,
            "normalization": "RMSNorm",
            "use_cpu_initialization": True,
            "bias_activation_fusion": False,
            "bias_dropout_fusion": False,
            "masked_softmax_fusion": False,
            "gradient_accumulation_fusion": False,
            "attention_backend": AttnBackend.unfused,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            "pipeline_dtype": torch.float32,
            **settings,
        }
    )


def make_chunks(config: TransformerConfig, *, own_tokens: bool = False) -> list[GPTModel]:
    """The model chunks of this rank.

    Args:
        config: as of `make_config`.
        own_tokens: an attention that looks at nothing, for what Megatron's own cannot do.
    """
    virtual = config.virtual_pipeline_model_parallel_size
    chunks = []
    for stage in range(virtual or 1):
        where = {} if virtual is None else {"vp_stage": stage}
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, **where)
        spec.layer_norm = _Norm
        for layer in spec.layer_specs:
            layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = _Norm
            if own_tokens:
                layer.submodules.self_attention.submodules.core_attention = _OwnTokens
        drafts = None
        if config.mtp_num_layers:
            drafts = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False, **where)
        chunk = GPTModel(
            config,
            spec,
            vocab_size=VOCABULARY,
            max_sequence_length=256,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, **where),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, **where),
            position_embedding_type="none" if own_tokens else "rope",
            mtp_block_spec=drafts,
            **where,
        )
        _mark(chunk)
        chunks.append(chunk)
    return chunks


def _mark(chunk: GPTModel) -> None:
    with torch.no_grad():
        for name, weight in chunk.named_parameters():
            if name.endswith(("linear_proj.weight", "linear_fc2.weight")):
                weight[:2] = 0
        if chunk.pre_process:
            table = chunk.embedding.word_embeddings
            serials = torch.arange(table.vocab_start_index, table.vocab_end_index)
            table.weight[:, 0] = serials / VOCABULARY
            table.weight[:, 1] = 1


@dataclass(frozen=True)
class Seen:
    """Result of one call of a router."""

    layer: int
    serials: torch.Tensor
    """[tokens]: who they are; 0 is padding."""
    used: torch.Tensor
    """[tokens, experts] bool: where Megatron sends them."""
    live: torch.Tensor
    """[tokens, experts] bool: where the router would have sent them."""


class Observer:
    """Looks at every router of model chunks."""

    def __init__(self, chunks: list[GPTModel]) -> None:
        self.seen: list[Seen] = []
        for chunk in chunks:
            for module in chunk.decoder.modules():
                if isinstance(module, TopKRouter):
                    module.register_forward_hook(self._look)

    def _look(self, router: TopKRouter, args: tuple[Any, ...], output: Any) -> None:
        with torch.no_grad():
            tokens = args[0].flatten(0, 1)
            serials = (tokens[:, 0] / tokens[:, 1] * VOCABULARY).round().long()
            live = router.gating(args[0]).flatten(0, 1).topk(router.topk).indices
            live = torch.zeros_like(output[1]).scatter(1, live, True)
        self.seen.append(Seen(router.layer_number - 1, serials, output[1], live))
