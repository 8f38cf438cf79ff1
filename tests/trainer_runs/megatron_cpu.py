"""Lets Megatron-Core run without a GPU: it asks for CUDA in a few places even where it needs none.

Import this before anything else of megatron.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")

torch.cuda.current_device = lambda: CPU  # type: ignore[assignment]
torch.cuda.synchronize = lambda *_: None

from megatron.core.tensor_parallel import random  # noqa: E402
from megatron.core.transformer.moe import moe_utils  # noqa: E402

# Random states of devices are saved before activations are computed again.
random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
random._set_cuda_rng_state = lambda *_, **__: None
random.CudaRNGStatesTracker.fork = lambda *_: contextlib.nullcontext()
# A name that 0.16.1 defines only where Transformer Engine is installed.
moe_utils.te_general_gemm = None


class OnCpu(TorchFunctionMode):
    """Makes tensors on the CPU where device="cuda" is written out, as in the schedules."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == "cuda":
            kwargs["device"] = CPU
        return func(*args, **kwargs)
