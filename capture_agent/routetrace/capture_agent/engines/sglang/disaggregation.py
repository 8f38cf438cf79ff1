"""Prefill and decode engines: which calls of SGLang show the KV that moves between them.

A prefill engine hands every request over, once its prompt is computed. A decode engine gets the KV
of the prompt from it, in slots that it has allocated, and does not compute the last token of the
prompt again. The pass that SGLang reports for such a prompt computes nothing. A request that ends
with its first token, or fails before, is in no pass of the decode engine.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any

from routetrace.capture_agent.engines.sglang import seams


class Role(Enum):
    """Part of an engine in the work on a request; values of SGLang's `disaggregation_mode`."""

    WHOLE = "null"
    PREFILL = "prefill"
    DECODE = "decode"

    @classmethod
    def of(cls, server_args: Any) -> Role:
        """Return the role of a server."""
        return cls(getattr(server_args, "disaggregation_mode", None) or cls.WHOLE.value)


def hook_transfers(capture: Callable[[], Any]) -> None:
    """Hook a decode engine's calls for KV that another engine sends.

    Args:
        capture: returns the capture of this process, None without one.

    Raises:
        Refused: if this version of SGLang lacks a name.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def allocated(slots: Any, *_: Any, **__: Any) -> None:
        if (current := capture()) is not None:
            current.loaded(slots)

    hooks: list[tuple[str, Callable[..., Any]]] = [(seams.RECEIVED, allocated)]
    seams.check_found([seams.RECEIVED])
    if seams.found(seams.RECOMPUTED) is not None:
        hooks.append((seams.RECOMPUTED, _uncaptured))
    for name, hook in hooks:
        HookRegistry.register(name, hook, HookType.AFTER)
    HookRegistry.apply_hooks()
    seams.check_applied([name for name, _ in hooks])


def _uncaptured(payload: dict[str, Any], *_: Any, **__: Any) -> dict[str, Any]:
    """Have the prefill engine compute KV again without rows: the trace has those of the samples."""
    options = {"custom_params": {"routetrace": {"capture": False}}}
    return {**payload, "sampling_params": {**payload["sampling_params"], **options}}


def is_synthetic(req: Any) -> bool:
    """Whether no engine computes the prompt of a request: a decode engine's warm-up."""
    return getattr(req, "bootstrap_host", None) == seams.SYNTHETIC_HOST
