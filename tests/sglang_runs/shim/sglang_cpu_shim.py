"""Parts of SGLang that its CPU build lacks.

Host memory that is not pinned; the padding of a rank's batch; trees of drafts in the attention that
torch has; drafts without a compiler; overlap scheduling with drafts, which SGLang has for GPUs
alone; and KV in host memory that NIXL moves between engines.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import torch
from sglang_cpu_kernels import Corpus, attend_to_trees


def register() -> None:
    """The entry point, in each process of SGLang."""
    try:
        from sglang.srt.mem_cache.pool_host import common
    except ImportError:  # 0.5.12
        from sglang.srt.mem_cache import memory_pool_host as common
    common.ALLOC_MEMORY_FUNCS["cpu"] = _allocate
    try:
        from sglang.srt.mem_cache.pool_host import mha as pools
    except ImportError:  # 0.5.12, 0.5.15
        from sglang.srt.mem_cache import memory_pool_host as pools
    pools.transfer_kv_direct = _transfer
    pools.torch = _Torch()  # pages on their way from storage
    torch.cpu.Stream.synchronize = lambda self: None  # type: ignore[attr-defined]
    torch.cuda.synchronize = lambda *_: None
    torch.Tensor.record_stream = lambda *_: None  # type: ignore[method-assign]
    # The table of SGLang's own return in 0.5.15 is pinned where it is made.
    from sglang.srt.state_capturer import base

    if not hasattr(base, "ALLOC_MEMORY_FUNCS"):
        base.torch = _Torch()
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    # Length of sequences that pad the batch of a rank, as SGLang's other backends of a CPU have it.
    TorchNativeAttnBackend.get_cpu_graph_seq_len_fill_value = _padding
    _speculate()
    if find_spec("nixl_cu12") is not None:
        _transfer_host_memory()


def _padding(_: Any) -> int:
    from sglang.srt.runtime_context import get_spec

    return get_spec().speculative_num_draft_tokens or 1


def _transfer_host_memory() -> None:
    """Have NIXL know KV as memory of the host: SGLang says that it is memory of a GPU."""
    from nixl_cu12._api import nixl_agent

    def of_host(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            where = ("DRAM" if type(each) is str and each == "VRAM" else each for each in args)
            return method(self, *where, **kwargs)

        return call

    for name in ("register_memory", "get_xfer_descs", "prep_xfer_dlist"):
        setattr(nixl_agent, name, of_host(getattr(nixl_agent, name)))


def _speculate() -> None:
    try:
        from sglang.kernels.ops.speculative import ngram_corpus
    except ImportError:  # 0.5.16
        from sglang.jit_kernel import ngram_corpus
    try:
        from sglang.srt.arg_groups import speculative_hook
        from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
        from sglang.srt.mem_cache.memory_pool import KVWriteLoc
    except ImportError:  # 0.5.12
        return
    ngram_corpus.get_ngram_corpus_cls = lambda: Corpus
    from sglang.srt.speculative.draft_utils import DraftBackendFactory

    # The model that drafts has the attention of the other one.
    DraftBackendFactory.create_draft_extend_backend = lambda _: None
    DraftBackendFactory.create_decode_backend = _attend_to_steps
    speculative_hook._disable_overlap_schedule_for_cpu = lambda _: None
    extend = TorchNativeAttnBackend.forward_extend

    def forward_extend(
        self: Any, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if not forward_batch.forward_mode.is_target_verify():
            return extend(self, q, k, v, layer, forward_batch, *args, **kwargs)
        self.token_to_kv_pool.set_kv_buffer(
            layer, KVWriteLoc(forward_batch.out_cache_loc, None), k, v
        )
        query = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        return attend_to_trees(self, query, layer, forward_batch)

    TorchNativeAttnBackend.forward_extend = forward_extend


def _attend_to_steps(factory: Any) -> Any:
    """Return the attention of drafts: each step sees the tokens before the first one."""
    backends = [factory.draft_model_runner.attn_backend] * factory.speculative_num_steps
    return SimpleNamespace(attn_backends=backends, init_forward_metadata=lambda *_, **__: None)


def _allocate(dims: Any, dtype: Any, *_: Any, **__: Any) -> torch.Tensor:
    return torch.empty(dims, dtype=dtype)


def _transfer(
    src_layers: Any, dst_layers: Any, src_indices: Any, dst_indices: Any, page_size: int
) -> None:
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices.long()] = source[src_indices.long()]


class _Torch:
    """torch without pinned memory."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def zeros(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        return torch.zeros(*args, **kwargs)
