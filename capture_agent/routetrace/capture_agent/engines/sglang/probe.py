"""Check at start that every MoE layer shows its ids: passes over dummy tokens.

Some kernels route and compute in one call, and SGLang's capturer does not see their ids. Which ones
run depends on model, quantization, backend and device, so layers are tried, not listed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from routetrace.capture_agent.engines.sglang.tap import Tap
from routetrace.common.errors import InvalidArgument

_log = logging.getLogger(__name__)

#: Tokens of the prefill pass.
_TOKENS = 4


def probe(runner: Any, tap: Tap) -> None:
    """Run the model over dummy tokens as it decodes, and as it prefills.

    Where SGLang cannot run a dummy pass, the log says that nothing was checked.

    Args:
        runner: SGLang's `ModelRunner`, its graphs made. Every rank of it does the same.
        tap: of the runner.

    Raises:
        InvalidArgument: with the layers that wrote no ids, and in which kind of pass.
    """
    eager = getattr(runner, "eager_runner", None)
    if not hasattr(eager, "_dummy_run") or not hasattr(eager, "_alloc_dummy_decode_buffers"):
        _log.warning("routetrace: capture is not checked: this version of SGLang has no dummy pass")
        return
    for kind in ("decode", "prefill"):
        tap.poison()
        try:
            with torch.inference_mode(), _lengths(runner.attn_backend):
                _run(runner, kind)
        except Exception:
            _log.warning("routetrace: capture is not checked: no %s pass", kind, exc_info=True)
            tap.poison()
            continue
        layers = tap.unwritten_layers()
        tap.poison()
        if layers:
            raise InvalidArgument(
                field="model",
                value=f"layers {layers} show no ids in a {kind} pass",
                expected="routing that SGLang's capturer sees: another --moe-runner-backend, or "
                "without the fused kernel; docs/sglang.md lists what is refused",
            )


@contextmanager
def _lengths(backend: Any) -> Iterator[None]:
    """Have dummy requests of one token, where a backend without graphs does not say how long."""
    name = "get_cuda_graph_seq_len_fill_value"
    try:
        getattr(backend, name)()
    except NotImplementedError:
        setattr(backend, name, lambda: 1)
        try:
            yield
        finally:
            delattr(backend, name)
    else:
        yield


def _run(runner: Any, kind: str) -> None:
    eager = runner.eager_runner
    if kind == "decode":
        verified = getattr(runner, "decode_num_tokens_per_req", lambda: 1)()  # drafts among them
        buffers = eager._alloc_dummy_decode_buffers(1, num_tokens_per_req=verified)
        eager._dummy_run(1, buffers=buffers)
        return
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    eager._dummy_run(
        1,
        forward_mode_override=ForwardMode.EXTEND,
        buffers=eager._alloc_dummy_decode_buffers(1, num_tokens_per_req=_TOKENS),
        extend_num_tokens_per_req=_TOKENS,
    )
