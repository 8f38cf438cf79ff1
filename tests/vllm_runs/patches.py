"""Features that vLLM lacks on a CPU; none touches capture."""

from __future__ import annotations

import inspect
from typing import Any


def schedule_ahead() -> None:
    """Make the scheduler run ahead of the model, which vLLM turns off on CPU."""
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config

    def forced(vllm_config: Any) -> None:
        check(vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = staticmethod(forced)


def skip_padding() -> None:
    """Make routers choose -1 for padding, as CUDA kernels do; experts on CPU get 0 for it."""
    import torch
    from vllm.forward_context import get_forward_context
    from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter
    from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter

    route, select = CPURouter._compute_routing, BaseRouter._select_experts

    def compute_routing(self: Any, *args: Any, **kwargs: Any) -> Any:
        weights, ids = route(self, *args, **kwargs)
        padding = get_forward_context().is_padding
        return weights, ids if padding is None else torch.where(padding[: len(ids), None], -1, ids)

    def select_experts(self: Any, *args: Any, **kwargs: Any) -> Any:
        weights, ids = select(self, *args, **kwargs)
        return weights, ids.clamp(min=0)

    CPURouter._compute_routing = compute_routing
    BaseRouter._select_experts = select_experts


def route_apart() -> None:
    """Have the router of each layer choose, as on a GPU; before 0.30 the experts on CPU do it."""
    import importlib

    from torch.nn.functional import silu
    from vllm.model_executor.layers.fused_moe.layer import MoERunner

    name = "vllm.model_executor.layers.fused_moe."
    try:
        kernels: Any = importlib.import_module(name + "cpu_fused_moe")  # 0.24
    except ImportError:
        kernels = importlib.import_module(name + "experts.cpu_moe")
    else:  # its own makes a layer in each pass, which it refuses there
        kernels._CPU_MOE_ACT_FN = {
            kind: lambda x: silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1]
            for kind in kernels._CPU_MOE_ACT_FN
            if kind.name == "SILU"
        }
    choose, make, quant_method = kernels.select_experts, MoERunner.__init__, MoERunner._quant_method
    run = MoERunner._apply_quant_method
    running: list[Any] = []  # the layer of this moment

    def select_experts(**given: Any) -> Any:
        return running[-1]._compute_routing(given, None, None)

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        make(self, *args, **kwargs)
        self.router._compute_routing = lambda given, *_: choose(**given)

    def apply(self: Any, *args: Any, **kwargs: Any) -> Any:
        running.append(self.router)
        try:
            return run(self, *args, **kwargs)
        finally:
            running.pop()

    class Apart:
        """The kernel of a layer, whose experts do not choose."""

        is_monolithic = False

        def __init__(self, one: Any) -> None:
            self._one = one

        def __getattr__(self, name: str) -> Any:
            return getattr(self._one, name)

    kernels.select_experts = select_experts
    MoERunner.__init__, MoERunner._apply_quant_method = __init__, apply
    MoERunner._quant_method = property(lambda self: Apart(quant_method.fget(self)))


def repair_drafts() -> None:
    """Make and verify drafts with vLLM's kernels for CPU, which vLLM itself never calls."""
    from vllm.utils import cpu_triton_utils
    from vllm.v1.sample import rejection_sampler
    from vllm.v1.spec_decode import utils

    for module in (rejection_sampler, utils):
        for value in list(vars(module).values()):
            kernel = getattr(value, "kernel", None)
            ours = getattr(cpu_triton_utils, getattr(kernel, "__name__", ""), None)
            if ours is not None:
                value.kernel = _ByPosition(kernel, ours.func)
    # Theirs writes to a copy.
    rejection_sampler._expand.kernel = _ByPosition(rejection_sampler.expand_kernel, _expand)


class _ByPosition:
    """Calls a function as a kernel is called, whose arguments have other names."""

    def __init__(self, kernel: Any, function: Any) -> None:
        self.arg_names = tuple(inspect.signature(kernel).parameters)
        self._function = function

    def __getitem__(self, _grid: Any) -> Any:
        return lambda **given: self._function(*(given[n] for n in self.arg_names if n in given))


def _expand(
    output: Any, values: Any, cu_num_tokens: Any, replace_from: int, replace_to: int, *_: Any
) -> None:
    counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
    values = values.masked_fill(values == replace_from, replace_to)
    output.copy_(values.repeat_interleave(counts))


def schedule_ahead_with_drafts() -> None:
    """Both."""
    repair_drafts()
    schedule_ahead()
