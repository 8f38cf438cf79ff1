from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def _one_rank() -> Iterator[None]:
    """Megatron's process groups, of this process alone."""
    from trainer_runs import megatron_cpu  # isort: skip  # first of all

    import torch.distributed as dist
    from megatron.core import parallel_state

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    with megatron_cpu.OnCpu():
        yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
