"""What vLLM does not do on a CPU by itself; none of it touches what is captured."""

from __future__ import annotations

from typing import Any


def schedule_ahead() -> None:
    """Has the scheduler run ahead of the model, which vLLM turns off on CPU."""
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config

    def forced(vllm_config: Any) -> None:
        check(vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = staticmethod(forced)


def repair_drafts() -> None:
    """Has 0.30.0 verify drafts by its kernels for CPU: it puts them where nothing looks."""
    from vllm.utils import cpu_triton_utils
    from vllm.v1.sample import rejection_sampler

    for value in list(vars(rejection_sampler).values()):
        kernel = getattr(value, "kernel", None)
        ours = getattr(cpu_triton_utils, getattr(kernel, "__name__", ""), None)
        if ours is not None:
            value.kernel = ours
