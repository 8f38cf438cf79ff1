"""Connect the routers of a model in vLLM to a capturer.

The ids are read while they are logical, before experts are remapped for load balancing. Draft
models are never captured, since only the target model is searched.

Three kinds of modules expose ids: routers (BaseRouter), whose method is wrapped; kernels that route
and compute in one call; and modules with `layer_id` and `capture_fn` (vLLM's
RoutedExpertsCaptureSource: experts of DeepSeek-V4 and Kimi-K3 with MegaMoE). The latter two have
one callback, which vLLM's own return of routed experts sets when the KV cache is allocated: ours
then calls both.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from routetrace.capture_agent.engines.capturer import RoutingCapturer
from routetrace.capture_agent.engines.parallel import local_rows
from routetrace.common.errors import InvalidArgument
from routetrace.common.layout import ModelLayout

_log = logging.getLogger(__name__)

Ids = torch.Tensor
Read = Callable[[Ids], Ids]
Callback = Callable[[Ids], None]


@dataclass(frozen=True)
class _Place:
    """Place for one callback.

    Args:
        get: returns the present callback, or None.
        put: replaces it.
    """

    get: Callable[[], Callback | None]
    put: Callable[[Callback], None]


class Routers:
    """Routers of a model, connected to a capturer.

    Created after the weights are loaded, before anything is compiled or recorded into a graph.

    Args:
        model: the target model, or this rank's stage of it.
        vllm_config: vLLM's configuration.
        device: of the model.

    Raises:
        InvalidArgument: if a MoE layer was not found, or cannot be captured; nothing was changed.
    """

    def __init__(self, model: torch.nn.Module, vllm_config: Any, device: torch.device) -> None:
        whole = ModelLayout.from_config(vllm_config.model_config.hf_config)
        layers = _moe_layers(model, whole)
        layout = _stage(whole, sorted(layers), vllm_config.parallel_config)
        found = {i: _find(f"layer {i}", layers[i], layout.top_k) for i in layout.layer_ids}
        self.capturer = capturer = RoutingCapturer(
            layout, vllm_config.scheduler_config.max_num_batched_tokens, device
        )
        read = _reader(vllm_config.parallel_config, model)
        self._callbacks: list[tuple[_Place, Callback]] = []
        for layer, column in layout.column.items():
            callback = _callback(capturer, column, read)
            place = found[layer]
            if isinstance(place, _Place):
                self._callbacks.append((place, callback))
            else:
                _wrap(place, callback)
        self.keep()
        # A recorded pass may follow one that ended early, without begin() between them.
        model.register_forward_pre_hook(lambda *_: capturer.forget())

    def keep(self) -> None:
        """Set the callbacks again, also of new kernels, and call those that replaced them."""
        for place, ours in self._callbacks:
            _set(place, ours)


def _set(place: _Place, ours: Callback) -> None:
    try:
        present = place.get()
        if not hasattr(present, "routetrace"):
            place.put(_both(ours, present))
    except Exception:
        _log.exception("routetrace: rows of a layer are missing: its kernel does not show its ids")


def _callback(capturer: RoutingCapturer, column: int, read: Read) -> Callback:
    return lambda topk_ids: capturer.capture(column, read(topk_ids))


def _both(ours: Callback, theirs: Callback | None) -> Callback:
    def both(topk_ids: Ids) -> None:
        ours(topk_ids)
        if theirs is not None:
            theirs(topk_ids)

    both.routetrace = True  # type: ignore[attr-defined]
    return both


def _moe_layers(model: torch.nn.Module, layout: ModelLayout) -> dict[int, Any]:
    try:
        from vllm.model_executor.layers.fused_moe.layer import MoERunner
        from vllm.model_executor.models.utils import extract_layer_index
    except ImportError as error:
        raise InvalidArgument(
            field="vllm", value="no MoERunner", expected="a version whose MoE layers have one"
        ) from error
    layers: dict[int, Any] = {}
    modules: list[tuple[str, Any]] = [
        (n, m) for n, m in model.named_modules() if isinstance(m, MoERunner) or _is_source(m)
    ]
    for name, module in modules:
        # Runners of vLLM 0.23 have no `layer_id`; all have the name of their layer.
        runs = isinstance(module, MoERunner)
        layer: int = extract_layer_index(module.layer_name) if runs else module.layer_id
        if layer >= layout.num_hidden_layers or "mtp" in name:
            continue  # drafts
        if layer in layers:
            raise InvalidArgument(field="model", value=name, expected="one MoE per decoder layer")
        layers[layer] = module
    return layers


def _is_source(module: Any) -> bool:
    return hasattr(module, "layer_id") and hasattr(module, "capture_fn")


def _stage(whole: ModelLayout, found: list[int], parallel: Any) -> ModelLayout:
    """Return the layout of this pipeline stage, all of whose layers must have been found."""
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


def _find(name: str, module: Any, top_k: int) -> Any:
    """Return the source of the ids of one layer: a `_Place` for a callback, or a BaseRouter.

    Raises:
        InvalidArgument: if the ids cannot be read.
    """
    from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter

    source = _is_source(module)
    if not source and module._quant_method.is_monolithic:
        return _kernel_place(name, module)
    router = module if source else module.router
    if not source and (
        not isinstance(router, BaseRouter)
        or not callable(getattr(router, "_compute_routing", None))
    ):
        raise InvalidArgument(
            field=name, value=f"router {type(router).__name__}", expected="a BaseRouter of vLLM"
        )
    if getattr(router, "top_k", top_k) < top_k:
        raise InvalidArgument(
            field=name, value=f"top_k {router.top_k}", expected=f"{top_k} or more"
        )
    if source:
        return _Place(
            lambda: module.capture_fn, lambda callback: setattr(module, "capture_fn", callback)
        )
    return router


def _kernel_place(name: str, module: Any) -> _Place:
    kernel = _kernel_of(module)
    supports = getattr(kernel, "supports_routing_replay_capture", None)
    if supports is None or not supports():
        raise InvalidArgument(
            field=name,
            value=f"kernel {type(kernel).__name__}",
            expected="one that exposes its ids: this one routes and computes in one call",
        )
    if hasattr(kernel, "set_capture_fn"):  # vLLM 0.30: the kernel has the callback
        return _Place(
            lambda: _kernel_of(module).routing_replay_capture_fn,
            lambda callback: _kernel_of(module).set_capture_fn(callback),
        )
    experts = module.routed_experts  # vLLM 0.32: its layer has it, as kernels may be rebuilt

    def put(callback: Callback) -> None:
        from vllm.model_executor.layers.fused_moe.routed_experts_capturer import RoutedExpertsSink

        experts.routing_sink = RoutedExpertsSink(_kernel_of(module).moe_config, callback)

    return _Place(lambda: getattr(experts.routing_sink, "capture_fn", None), put)


def _kernel_of(module: Any) -> Any:
    """Return the kernel of this moment, which a reload of weights may replace; None without one."""
    kernel: Any = module._quant_method
    for part in ("moe_kernel", "impl", "fused_experts"):
        kernel = getattr(kernel, part, None)
    return kernel


def _wrap(router: Any, callback: Callback) -> None:
    inner = router._compute_routing

    def compute_routing(*args: Any, **kwargs: Any) -> Any:
        weights, topk_ids = inner(*args, **kwargs)
        callback(topk_ids)
        return weights, topk_ids

    router._compute_routing = compute_routing


def _reader(parallel: Any, model: torch.nn.Module) -> Read:
    """Return a function that cuts this rank's rows out of those that a router sees."""
    tp_size = parallel.tensor_parallel_size
    if parallel.data_parallel_size > 1:
        return _logged(_among_ranks(parallel))
    if tp_size > 1:
        return _logged(_among_shards(tp_size, model))
    return lambda topk_ids: topk_ids


def _among_ranks(parallel: Any) -> Read:
    """Read layouts of data parallelism, whose sizes vLLM keeps with the pass."""
    from vllm.forward_context import get_forward_context

    rank, tp_size = parallel.data_parallel_rank, parallel.tensor_parallel_size
    sharded = parallel.use_sequence_parallel_moe

    def read(topk_ids: Ids) -> Ids:
        metadata = get_forward_context().dp_metadata
        if metadata is None:
            return topk_ids
        return local_rows(
            topk_ids,
            metadata.num_tokens_across_dp_cpu.tolist(),
            rank,
            tp_size=tp_size,
            shard_sizes=metadata.local_sizes,
            all_gather=_gather if sharded else None,
        )

    return read


def _among_shards(tp_size: int, model: torch.nn.Module) -> Read:
    """Read shards and padding of sequence parallelism, where vLLM keeps no sizes with the pass.

    Models shard their tokens by conditions of their own (MegaMoE: expert and tensor parallelism),
    so the rows are compared with the positions that the model was given.
    """
    num_tokens: int | None = None

    def note(_module: Any, _args: Any, inputs: dict[str, Any]) -> None:
        nonlocal num_tokens
        positions = inputs.get("positions")
        num_tokens = None if positions is None else positions.shape[-1]

    def read(topk_ids: Ids) -> Ids:
        # A compiler would keep the sizes of the traced pass. It sees routers on the CPU alone,
        # where no model shards its tokens.
        if torch.compiler.is_compiling() or num_tokens is None:
            return topk_ids
        shard = -(-num_tokens // tp_size)
        return local_rows(
            topk_ids,
            [num_tokens],
            0,
            tp_size=tp_size,
            shard_sizes=[shard] * tp_size,
            # One row is the token or, in ranks that send nothing, padding: not worth a collective
            # in each layer of each engine.
            all_gather=_gather if num_tokens > 1 else None,
        )

    model.register_forward_pre_hook(note, with_kwargs=True)
    return read


def _gather(topk_ids: Ids) -> Ids:
    from vllm.distributed.parallel_state import get_tp_group

    gathered: Ids = get_tp_group().all_gather(topk_ids.contiguous(), dim=0)
    return gathered


def _logged(read: Read) -> Read:
    """Give no rows of a layout that is not known; log the first one."""
    failed = False

    def read_or_miss(topk_ids: Ids) -> Ids:
        nonlocal failed
        try:
            return read(topk_ids)
        except InvalidArgument as error:
            if not failed:
                _log.error("routetrace: rows of this layout are missing: %s", error)
            failed = True
            return topk_ids[:0]

    return read_or_miss
