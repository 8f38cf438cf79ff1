"""Inputs of a model besides token ids and its own weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import GenerationConfig

from routetrace.codec.records import ADAPTER_LABEL

# Tensors that carry no input of their own.
_OF_TEXT = {"attention_mask", "position_ids", "cache_position"}


def only_tokens(generate_kwargs: Mapping[str, Any]) -> bool:
    """Whether the token ids are the only input: no tensors of images, audio or the like."""
    options = vars(GenerationConfig())
    return not any(
        isinstance(part, torch.Tensor)
        for name, value in generate_kwargs.items()
        if name not in _OF_TEXT and name not in options
        for part in (value if isinstance(value, (list, tuple)) else (value,))
    )


def labels_with_adapters(
    model: torch.nn.Module, labels: Sequence[Mapping[str, str]] | None, count: int
) -> list[dict[str, str]] | None:
    """Return the labels of `count` sequences, each with the active adapters of peft, if any."""
    names: set[str] = set()
    for module in model.modules():
        # Layers of adapters; a model's own `disable_adapters` is a method.
        if getattr(module, "disable_adapters", None) is False:
            names.update(getattr(module, "active_adapters", ()))
    if names:
        added = {ADAPTER_LABEL: "+".join(sorted(names))}
        return [{**given, **added} for given in labels or [{}] * count]
    return None if labels is None else [dict(given) for given in labels]
