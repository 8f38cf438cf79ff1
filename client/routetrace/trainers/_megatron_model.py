"""Routers of a Megatron-Core model, and settings that prevent replay."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any

from torch import nn

from routetrace.common.errors import InvalidArgument, MissingDependency

Model = nn.Module | Sequence[nn.Module]
# Modules allowed in CUDA graphs: others may hold a router, and a graph skips replay.
_ROUTERLESS_GRAPHS = {"attn", "mamba", "mlp"}


def model_chunks(model: Model) -> list[nn.Module]:
    """Return the modules that a schedule calls."""
    return [model] if isinstance(model, nn.Module) else list(model)


def routers_of(model: Model) -> list[dict[int, Any]]:
    """Return the routers of each model chunk by absolute layer id, ascending."""
    try:
        layers = import_module("megatron.core.transformer.moe.moe_layer")
        drafts = import_module("megatron.core.transformer.multi_token_prediction")
    except ImportError as error:
        raise MissingDependency(
            f"megatron-core 0.16.1 or newer is required ({error}); pip install megatron-core",
            package="megatron-core",
            install="pip install megatron-core",
        ) from error

    def walk(module: nn.Module) -> Iterator[tuple[int, Any]]:
        if isinstance(module, drafts.MultiTokenPredictionLayer):
            return  # its layers are numbered from 1
        if isinstance(module, layers.BaseMoELayer):
            router: Any = module.router
            yield router.layer_number - 1, router
        else:
            for child in module.children():
                yield from walk(child)

    chunks: list[dict[int, Any]] = []
    for module in model_chunks(model):
        found: dict[int, Any] = {}
        for layer, router in walk(module):
            if any(layer in chunk for chunk in [*chunks, found]):
                raise InvalidArgument(
                    field="model", value=f"two routers of layer {layer}", expected="one"
                )
            found[layer] = router
        chunks.append(dict(sorted(found.items())))
    return chunks


def check_router(layer: int, router: Any) -> None:
    """Refuse settings that bypass the router's RouterReplay, or change its result.

    Raises:
        InvalidArgument: names the setting and the reason.
    """
    config = router.config

    def value(name: str) -> Any:
        return getattr(config, name, None)  # not every version has every setting

    kinds = router.routing_type
    kinds = {kinds} if isinstance(kinds, str) else set(kinds)
    graphs = value("cuda_graph_modules") or value("cuda_graph_scope") or ["whole layers"]
    held = {getattr(part, "name", str(part)) for part in graphs}
    for name, refused, reason in (
        (
            "moe_enable_routing_replay",
            getattr(router, "router_replay", None) is None,
            "replay must be on",
        ),
        (
            "moe_router_fusion",
            value("moe_router_fusion"),
            "the fused kernel bypasses replay",
        ),
        (
            "moe_router_load_balancing_type",
            kinds & {"sinkhorn", "quantile_balancing"},
            "this type bypasses replay",
        ),
        (
            "moe_router_force_load_balancing",
            value("moe_router_force_load_balancing"),
            "scores are random",
        ),
        (
            "moe_router_force_biased",
            value("moe_router_force_biased") is not None,
            "scores are artificial",
        ),
        (
            "moe_expert_capacity_factor",
            value("moe_expert_capacity_factor") is not None,
            "full experts drop tokens after the choice",
        ),
        (
            "overlap_moe_expert_parallel_comm",
            value("overlap_moe_expert_parallel_comm"),
            "the model is not called as a module, and two micro-batches are mixed",
        ),
        (
            "cuda_graph_impl",
            value("cuda_graph_impl") not in (None, "none") and held - _ROUTERLESS_GRAPHS,
            f"graphs of {sorted(held)} hold the router and bypass replay",
        ),
    ):
        if refused:
            raise InvalidArgument(
                field=name,
                value=f"{value(name)} (layer {layer})",
                expected=f"a router that takes the replay path: {reason}",
            )
