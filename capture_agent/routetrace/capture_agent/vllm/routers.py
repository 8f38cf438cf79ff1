"""Finds the routers of a model in vLLM and lets them write to a capturer.

The ids are read where they are still logical, before experts are remapped for load balancing, and
without taking the one place that vLLM has for a callback of its own. Draft models are never met,
since only the target model is searched.
"""

# vLLM is not installed where types are checked.
# pyright: reportMissingImports=false
from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from routetrace.capture_agent.capturer import RoutingCapturer
from routetrace.capture_agent.parallel import local_rows
from routetrace.v1.errors import InvalidArgument
from routetrace.v1.layout import RoutingLayout
from routetrace.v1.model_map import layout_from_config

_log = logging.getLogger(__name__)

Read = Callable[[torch.Tensor], torch.Tensor]


def bind_routers(model: torch.nn.Module, vllm_config: Any, device: torch.device) -> RoutingCapturer:
    """Makes every MoE layer of a model write what it chooses.

    To be called when the weights are loaded, before anything is compiled or put into a graph.

    Args:
        model: the target model, or this rank's stage of it.
        vllm_config: vLLM's configuration.
        device: where the model runs.

    Raises:
        InvalidArgument: if a MoE layer was not found, or can not be captured; nothing was changed.
    """
    whole = layout_from_config(vllm_config.model_config.hf_config)
    layers = _moe_layers(model, whole)
    layout = _stage(whole, sorted(layers), vllm_config.parallel_config)
    places = {layer: _place(layer, layers[layer], layout) for layer in layout.layer_ids}
    capturer = RoutingCapturer(layout, vllm_config.scheduler_config.max_num_batched_tokens, device)
    read = _reader(vllm_config.parallel_config)
    for layer, column in layout.column.items():
        places[layer](capturer, column, read)
    return capturer


def _moe_layers(model: torch.nn.Module, layout: RoutingLayout) -> dict[int, Any]:
    try:
        from vllm.model_executor.layers.fused_moe.layer import MoERunner
    except ImportError as error:
        raise InvalidArgument(
            field="vllm", value="no MoERunner", expected="a version whose MoE layers have one"
        ) from error
    layers: dict[int, Any] = {}
    runners: list[tuple[str, Any]] = [
        (n, m) for n, m in model.named_modules() if isinstance(m, MoERunner)
    ]
    for name, runner in runners:
        layer: int = runner.layer_id
        if layer >= layout.num_hidden_layers or "mtp" in name:
            continue  # drafts
        if layer in layers:
            raise InvalidArgument(field="model", value=name, expected="one MoE per decoder layer")
        layers[layer] = runner
    return layers


def _stage(whole: RoutingLayout, found: list[int], parallel: Any) -> RoutingLayout:
    """The layout of the layers of this pipeline stage, all of which must have been found."""
    expected = list(whole.moe_layer_ids)
    size = parallel.pipeline_parallel_size
    if size > 1:
        from vllm.distributed.parallel_state import get_pp_group
        from vllm.distributed.utils import get_pp_indices

        rank = get_pp_group().rank_in_group
        start, stop = get_pp_indices(whole.num_hidden_layers, rank, size)
        expected = [layer for layer in expected if start <= layer < stop]
    if found != expected or not found:
        raise InvalidArgument(
            field="model",
            value=f"MoE layers {found}",
            expected=f"layers {expected or 'that route'}",
        )
    return whole.select(tuple(found))


def _place(layer: int, module: Any, layout: RoutingLayout) -> Callable[..., None]:
    """How the ids of one layer are read.

    Raises:
        InvalidArgument: if they can not be.
    """
    from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter

    router = module.router
    name = f"layer {layer}"
    if module.is_monolithic:
        kernel: Any = module._quant_method
        for part in ("moe_kernel", "impl", "fused_experts"):
            kernel = getattr(kernel, part, None)
        supports = getattr(kernel, "supports_routing_replay_capture", None)
        if supports is None or not supports():
            raise InvalidArgument(
                field=name,
                value=f"kernel {type(kernel).__name__}",
                expected="one that tells what it routes: this one routes and computes in one go",
            )
        return lambda capturer, column, read: kernel.set_capture_fn(
            lambda topk_ids: capturer.capture(column, read(topk_ids))
        )
    if not isinstance(router, BaseRouter) or not callable(
        getattr(router, "_compute_routing", None)
    ):
        raise InvalidArgument(
            field=name, value=f"router {type(router).__name__}", expected="a BaseRouter of vLLM"
        )
    if router.top_k < layout.top_k:
        raise InvalidArgument(
            field=name, value=f"top_k {router.top_k}", expected=f"{layout.top_k} or more"
        )
    return lambda capturer, column, read: _wrap(router, capturer, column, read)


def _wrap(router: Any, capturer: RoutingCapturer, column: int, read: Read) -> None:
    inner = router._compute_routing

    def compute_routing(*args: Any, **kwargs: Any) -> Any:
        weights, topk_ids = inner(*args, **kwargs)
        capturer.capture(column, read(topk_ids))
        return weights, topk_ids

    router._compute_routing = compute_routing


def _reader(parallel: Any) -> Read:
    """What makes this rank's rows of those that a router sees."""
    if parallel.data_parallel_size == 1:
        return lambda topk_ids: topk_ids
    from vllm.distributed.parallel_state import get_tp_group
    from vllm.forward_context import get_forward_context

    rank, tp_size = parallel.data_parallel_rank, parallel.tensor_parallel_size
    sharded = getattr(parallel, "use_sequence_parallel_moe", tp_size > 1)
    failed = False

    def gather(topk_ids: torch.Tensor) -> torch.Tensor:
        gathered: torch.Tensor = get_tp_group().all_gather(topk_ids, dim=0)
        return gathered

    def read(topk_ids: torch.Tensor) -> torch.Tensor:
        nonlocal failed
        metadata = get_forward_context().dp_metadata
        if metadata is None:
            return topk_ids
        try:
            own: torch.Tensor = local_rows(
                topk_ids,
                metadata.num_tokens_across_dp_cpu.tolist(),
                rank,
                tp_size=tp_size,
                shard_sizes=getattr(metadata, "local_sizes", None),
                all_gather=gather if sharded else None,
            )
        except InvalidArgument as error:
            if not failed:
                _log.error("routetrace: rows of this layout are missing: %s", error)
            failed = True
            return topk_ids[:0]
        return own

    return read
