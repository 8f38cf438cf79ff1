"""Capture on vLLM's own router classes, with the padding that its CUDA kernels mark.

`python -m vllm_runs.routers`, with a version of vLLM for CPU on the path. Routers, dummy batches of
model runner V2, masks of sequence parallelism and the binding of vLLM's own return are vLLM's; what
exists on CUDA alone is stood in for: the top-k kernel, which gives -1 to padding, and the kernel
that maps ids to the replicas of a balanced expert.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from vllm import _custom_ops, forward_context
from vllm.config import DeviceConfig, KVTransferConfig, VllmConfig
from vllm.distributed import parallel_state
from vllm.model_executor.layers.fused_moe import routed_experts_capturer as vllms_own
from vllm.model_executor.layers.fused_moe.layer import MoERunner
from vllm.model_executor.layers.fused_moe.router import base_router
from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter
from vllm.model_executor.layers.fused_moe.router.fused_topk_router import FusedTopKRouter
from vllm.models.common.ops import sequence_parallel
from vllm.v1.worker.gpu.input_batch import InputBatch, InputBuffers

from routetrace.capture_agent.engines.vllm import plugin
from routetrace.capture_agent.engines.vllm.routers import Routers

try:
    from vllm.models.deepseek_v4.nvidia.model import DeepseekV4MegaMoEExperts as MegaMoEExperts
except ImportError:  # vLLM 0.33: moved
    from vllm.model_executor.layers.fused_moe.deep_gemm_mega_moe import (
        DeepGemmMegaMoEExperts as MegaMoEExperts,
    )

EXPERTS, TOP_K, MOST = 16, 4, 32
LAYERS = (1, 2, 3)
CPU = torch.device("cpu")


def top_k_of_cuda(
    weights: torch.Tensor,
    ids: torch.Tensor,
    token_expert_indices: torch.Tensor,
    logits: torch.Tensor,
    renormalize: bool,
    *,
    is_padding: torch.Tensor | None,
) -> None:
    """The kernel of CUDA, as far as it is written down: rows of padding get weight 0 and id -1."""
    best = logits.softmax(-1).topk(ids.shape[1])
    weights.copy_(best.values)
    ids.copy_(best.indices)
    if is_padding is not None:
        weights[is_padding], ids[is_padding] = 0, -1


def to_replicas(topk_ids: torch.Tensor, **_: Any) -> torch.Tensor:
    """Map logical ids to physical ones; -1 stays."""
    return torch.where(topk_ids < 0, -1, EXPERTS - 1 - topk_ids)


class Runner(MoERunner):
    """A MoE layer that routes and computes nothing."""

    layer_id = 0
    is_monolithic = False
    _quant_method = SimpleNamespace(is_monolithic=False)

    def __init__(self, layer_id: int, router: Any) -> None:
        torch.nn.Module.__init__(self)
        self.layer_id = layer_id
        self.layer_name = f"model.layers.{layer_id}.mlp.experts"
        self.router = router
        self.seen = torch.empty(0)

    def forward(self, logits: torch.Tensor) -> None:
        _, self.seen = self.router.select_experts(logits, logits, torch.int32)


class Model(torch.nn.Module):
    """Its layers, each with logits of its own."""

    def __init__(self, layers: list[torch.nn.Module]) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(layers)

    def forward(self, logits: torch.Tensor, positions: torch.Tensor | None = None) -> None:
        for i, layer in enumerate(self.layers):
            layer(logits.roll(i, dims=-1))


def fused(_: int) -> FusedTopKRouter:
    return FusedTopKRouter(TOP_K, EXPERTS)


def model_of(router: Callable[[int], Any] = fused) -> Model:
    return Model([Runner(layer, router(layer)) for layer in LAYERS])


def config_of(**parallel: Any) -> Any:
    hf_config = {
        "num_hidden_layers": 4,
        "first_k_dense_replace": 1,
        "n_routed_experts": EXPERTS,
        "num_experts_per_tok": TOP_K,
    }
    ranks = {
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "data_parallel_size": 1,
        "data_parallel_rank": 0,
        "use_sequence_parallel_moe": False,
    }
    return SimpleNamespace(
        model_config=SimpleNamespace(hf_config=hf_config),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=MOST),
        parallel_config=SimpleNamespace(**{**ranks, **parallel}),
    )


def logits_of(n: int) -> torch.Tensor:
    return torch.randn(n, EXPERTS, generator=torch.Generator().manual_seed(n))


def truth(logits: torch.Tensor) -> np.ndarray:
    """Return the routers' choices, without vLLM."""
    columns = [logits.roll(i, dims=-1).topk(TOP_K).indices for i in range(len(LAYERS))]
    return torch.stack(columns, dim=1).numpy()


@contextmanager
def forward_pass(is_padding: torch.Tensor | None, dp_metadata: Any = None) -> Iterator[None]:
    context = SimpleNamespace(is_padding=is_padding, dp_metadata=dp_metadata)
    with forward_context.override_forward_context(context):
        yield


def dummy_batch(n: int) -> torch.Tensor:
    """The padding mask of model runner V2's dummy batch of n requests."""
    buffers = InputBuffers(MOST, MOST, CPU)
    mask: torch.Tensor = InputBatch.make_dummy(n, n, buffers).is_padding
    assert mask.all()
    return mask


def dummy_batches_are_proof() -> None:
    """All of model runner V2's dummy batch is padding, for which routers choose -1."""
    model = model_of()
    capturer = Routers(model, config_of(), CPU).capturer
    for n in (1, 4):
        capturer.begin()
        with forward_pass(dummy_batch(n)):
            model(logits_of(n))
        assert all((layer.seen == -1).all() for layer in model.layers)
        assert capturer.faults(1) == {}, capturer.faults(1)
    capturer.begin()
    assert set(capturer.faults(1).values()) == {"never written"}


def padding_of_graphs_is_left_out() -> None:
    """Rows behind those of the step are -1."""
    model = model_of()
    capturer = Routers(model, config_of(), CPU).capturer
    for n, padded in ((5, 8), (8, 8), (1, 16)):
        logits = logits_of(padded)
        capturer.begin(n)
        with forward_pass(torch.arange(padded) >= n):
            model(logits)
        assert n == padded or (model.layers[0].seen[n:] == -1).all()
        np.testing.assert_array_equal(capturer.snapshot(n).rows(), truth(logits[:n]))


class Rank:
    """One of two tensor-parallel ranks, which share the tokens of a pass.

    Args:
        rank: 0 or 1.
        logits: of all tokens, with room for padding.
        n: tokens.
    """

    def __init__(self, rank: int, logits: torch.Tensor, n: int) -> None:
        with (
            mock.patch.object(
                sequence_parallel, "get_tensor_model_parallel_world_size", return_value=2
            ),
            mock.patch.object(
                sequence_parallel, "get_tensor_model_parallel_rank", return_value=rank
            ),
        ):
            self._is_padding = sequence_parallel.sp_padding_mask(None, logits[:n])
        self._logits = logits.chunk(2)[rank]
        self._positions = torch.arange(n)
        self.model = model_of()

    def route(self, dp_metadata: Any = None) -> None:
        with forward_pass(self._is_padding, dp_metadata):
            self.model(self._logits, positions=self._positions)


class Group:
    """The first of two ranks, as the second one has routed already.

    Args:
        other: the second.
    """

    def __init__(self, other: Rank) -> None:
        self._ids = iter([layer.seen for layer in other.model.layers])

    def all_gather(self, ids: torch.Tensor, dim: int) -> torch.Tensor:
        return torch.cat([ids, next(self._ids)], dim)


def padding_of_sequence_parallelism_is_left_out() -> None:
    """Two ranks route a shard each, the second with padding behind its tokens."""
    for n, dp_size in itertools.product((7, 8, 1), (2, 1)):
        logits = logits_of(n + n % 2)
        first, second = (Rank(rank, logits, n) for rank in range(2))
        second.route()
        assert n == len(logits) or (second.model.layers[0].seen[-1] == -1).all()
        config = config_of(
            data_parallel_size=dp_size, tensor_parallel_size=2, use_sequence_parallel_moe=True
        )
        sizes = SimpleNamespace(num_tokens_across_dp_cpu=torch.tensor([n, 20]), local_sizes=None)
        with mock.patch.object(parallel_state, "get_tp_group", return_value=Group(second)):
            capturer = Routers(first.model, config, CPU).capturer
            capturer.begin(n)
            first.route(sizes if dp_size > 1 else None)
        np.testing.assert_array_equal(capturer.snapshot(n).rows(), truth(logits[:n]))


def gathered_shards_are_cut_at_the_last_token() -> None:
    """Without data parallelism too, a rank may route the shards of all, padding included."""
    for n in (7, 8, 1):
        logits, model = logits_of(n + n % 2), model_of()
        capturer = Routers(model, config_of(tensor_parallel_size=2), CPU).capturer
        capturer.begin()
        with forward_pass(torch.arange(len(logits)) >= n):
            model(logits, positions=torch.arange(n))
        assert set(capturer.faults(n + 1).values()) == {"never written"}
        np.testing.assert_array_equal(capturer.snapshot(n).rows(), truth(logits[:n]))


def dummy_batches_of_data_parallel_ranks_are_proof() -> None:
    """A rank without requests routes padding, alone or beside the tokens of others."""
    for rows in (1, 5):  # its own, or those of all ranks
        model = model_of()
        capturer = Routers(model, config_of(data_parallel_size=2), CPU).capturer
        metadata = SimpleNamespace(num_tokens_across_dp_cpu=torch.tensor([1, 4]), local_sizes=None)
        capturer.begin()
        with forward_pass(torch.arange(rows) < 1, metadata):
            model(logits_of(rows))
        assert capturer.faults(1) == {}, capturer.faults(1)
        assert capturer.snapshot(1).rows().sum() == 0


def ids_are_logical_where_experts_are_balanced() -> None:
    model = model_of()
    for layer in model.layers:
        layer.router.eplb_state = SimpleNamespace(
            expert_load_view=1,
            logical_to_physical_map=1,
            logical_replica_count=1,
            should_record_tensor=1,
            num_unpadded_tokens_tensors=[1],
        )
    capturer = Routers(model, config_of(), CPU).capturer
    logits = logits_of(6)
    with mock.patch.object(base_router, "eplb_map_to_physical_and_record", to_replicas):
        for mask in (dummy_batch(6), torch.zeros(6, dtype=torch.bool)):
            capturer.begin(6)
            with forward_pass(mask):
                model(logits)
            assert capturer.faults(6) == {}, capturer.faults(6)
    np.testing.assert_array_equal(capturer.snapshot(6).rows(), truth(logits))
    physical = torch.stack([layer.seen for layer in model.layers], dim=1).numpy()
    np.testing.assert_array_equal(EXPERTS - 1 - physical, truth(logits))


def capture_sources_are_bound_beside_vllms_own() -> None:
    """Experts of DeepSeek-V4 with MegaMoE, and a router, to which vLLM binds its own return."""
    experts = [MegaMoEExperts.__new__(MegaMoEExperts) for _ in LAYERS]
    for layer, one in zip(LAYERS, experts, strict=True):
        torch.nn.Module.__init__(one)
        one.prefix, one.capture_fn = f"model.layers.{layer}.mlp.experts", None
        one.top_k = TOP_K
        assert isinstance(one, vllms_own.RoutedExpertsCaptureSource)
    model = Model(experts)
    routers, told = Routers(model, config_of(), CPU), []
    vllms_own.bind_routed_experts_capturer(
        model, SimpleNamespace(capture=lambda layer, ids: told.append((layer, ids)))
    )
    routers.keep()
    chosen = [logits_of(3).roll(i, dims=-1).topk(TOP_K).indices for i in range(len(LAYERS))]
    routers.capturer.begin(3)
    for one, ids in zip(experts, chosen, strict=True):
        one.capture_fn(ids)
    np.testing.assert_array_equal(routers.capturer.snapshot(3).rows(), truth(logits_of(3)))
    assert [layer for layer, _ in told] == list(LAYERS)
    assert all(ids is other for (_, ids), other in zip(told, chosen, strict=True))


def routers_of_the_cpu_are_captured() -> None:
    model = model_of(lambda _: CPURouter(TOP_K, EXPERTS))
    capturer = Routers(model, config_of(), CPU).capturer
    capturer.begin(9)
    with forward_pass(None):
        model(logits_of(9))
    rows = capturer.snapshot(9).rows()
    np.testing.assert_array_equal(np.sort(rows, -1), np.sort(truth(logits_of(9)), -1))


def refusals_of_the_connector_name_the_plugin() -> None:
    """Under the CUDA allocator's expandable segments vLLM takes no connector."""
    plugin.register()
    cpu = DeviceConfig("cpu")  # a version for CUDA finds no device
    expandable = "expandable_segments:True"
    settings = {"kv_connector": "RouteTraceConnector", "kv_role": "kv_producer"}
    settings["kv_connector_module_path"] = "routetrace.capture_agent.vllm"
    for name, refused in (("PYTORCH_CUDA_ALLOC_CONF", True), ("PYTORCH_ALLOC_CONF", False)):
        with mock.patch.dict(os.environ, {name: expandable}):
            VllmConfig(additional_config={"routetrace": {}}, device_config=cpu)
            try:
                VllmConfig(kv_transfer_config=KVTransferConfig(**settings), device_config=cpu)
                said = ""
            except ValueError as error:
                said = str(error)
        assert (expandable in said and "ROUTETRACE_VLLM=1" in said) is refused, said


CHECKS = (
    dummy_batches_are_proof,
    padding_of_graphs_is_left_out,
    padding_of_sequence_parallelism_is_left_out,
    gathered_shards_are_cut_at_the_last_token,
    dummy_batches_of_data_parallel_ranks_are_proof,
    ids_are_logical_where_experts_are_balanced,
    capture_sources_are_bound_beside_vllms_own,
    routers_of_the_cpu_are_captured,
    refusals_of_the_connector_name_the_plugin,
)


def main() -> None:
    """Run all checks; the first that fails raises."""
    _custom_ops.topk_softmax = top_k_of_cuda
    for check in CHECKS:
        check()
        print(check.__name__, "ok", flush=True)


if __name__ == "__main__":
    main()
