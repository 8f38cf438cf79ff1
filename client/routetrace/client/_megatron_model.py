"""The routers of a Megatron-Core model, and what keeps them from being replayed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from routetrace.v1.errors import InvalidArgument

Model = nn.Module | Sequence[nn.Module]
# What CUDA graphs may hold: anything else may hold a router, and a graph asks nobody.
_ROUTERLESS_GRAPHS = {"attn", "mamba", "mlp"}


def model_chunks(model: Model) -> list[nn.Module]:
    """The modules that a schedule calls."""
    return [model] if isinstance(model, nn.Module) else list(model)


def routers_of(model: Model) -> list[dict[int, Any]]:
    """The routers of each model chunk, by absolute layer id, ascending."""
    chunks: list[dict[int, Any]] = []
    for module in model_chunks(model):
        found: dict[int, Any] = {}
        for layer, router in _walk(module):
            if any(layer in chunk for chunk in [*chunks, found]):
                raise InvalidArgument(
                    field="model", value=f"two routers of layer {layer}", expected="one"
                )
            found[layer] = router
        chunks.append(dict(sorted(found.items())))
    return chunks


def _walk(module: nn.Module) -> Iterator[tuple[int, Any]]:
    try:
        from megatron.core.transformer.moe.moe_layer import BaseMoELayer
        from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer
    except ImportError as error:
        raise InvalidArgument(
            field="megatron", value=str(error), expected="megatron-core 0.16.1 or newer"
        ) from error
    if isinstance(module, MultiTokenPredictionLayer):
        return  # drafts, whose layers count anew
    if isinstance(module, BaseMoELayer):
        moe: Any = module
        yield moe.router.layer_number - 1, moe.router
    else:
        for child in module.children():
            yield from _walk(child)


def check_router(layer: int, router: Any) -> None:
    """Refuses what chooses experts without asking the router's RouterReplay, or past its answer."""
    config = router.config
    graphs = getattr(config, "cuda_graph_impl", "none")
    parts = getattr(config, "cuda_graph_modules", None) or getattr(config, "cuda_graph_scope", ())
    held = {getattr(part, "name", str(part)) for part in parts or ("the whole layer",)}
    kinds = {router.routing_type} if isinstance(router.routing_type, str) else router.routing_type
    balancing = {"sinkhorn", "quantile_balancing"} & set(kinds)
    refused = {
        "moe_enable_routing_replay": getattr(router, "router_replay", None) is None and "off",
        "moe_router_fusion": config.moe_router_fusion and "the fused kernel chooses by itself",
        "moe_router_load_balancing_type": balancing and "they choose by themselves",
        "moe_router_force_load_balancing": config.moe_router_force_load_balancing
        and "scores are random",
        "moe_router_force_biased": getattr(config, "moe_router_force_biased", None) is not None
        and "scores are made up",
        "moe_expert_capacity_factor": config.moe_expert_capacity_factor is not None
        and "experts that are full lose tokens after the choice",
        "overlap_moe_expert_parallel_comm": getattr(
            config, "overlap_moe_expert_parallel_comm", False
        )
        and "forward and backward passes of two micro-batches are mixed",
        "cuda_graph_impl": graphs != "none"
        and not held <= _ROUTERLESS_GRAPHS
        and f"graphs hold {sorted(held)}, and a graph does not ask",
    }
    for name, reason in refused.items():
        if reason:
            raise InvalidArgument(
                field=name,
                value=f"{getattr(config, name, None)} (layer {layer})",
                expected=f"a router that takes the replay path: {reason}",
            )
