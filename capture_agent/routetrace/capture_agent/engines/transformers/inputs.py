"""Inputs of a model besides token ids and its own weights, and which model it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import GenerationConfig

from routetrace.codec.records import ADAPTER_LABEL
from routetrace.common.model_hash import model_hash

# Tensors that carry no input of their own.
_OF_TEXT = {"attention_mask", "position_ids", "cache_position"}


def model_of(model: Any) -> str:
    """Return the hash of a model of Transformers, for `AgentConfig.model`.

    It is `model_hash` of the configuration, and of the method by which Transformers quantized the
    weights, such as "fp8".

    Args:
        model: the model.
    """
    # A configuration has it where weights are quantized.
    quantization = getattr(model.config, "quantization_config", None)
    if isinstance(quantization, Mapping):
        method = quantization.get("quant_method")
    else:
        method = getattr(quantization, "quant_method", None)
    # A loaded configuration has a string here, one that a user made a member of an enumeration.
    name = None if method is None else str(getattr(method, "value", method))
    return model_hash(model.config, name)


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
    module: Any
    for module in model.modules():
        # Layers of adapters; a model's own `disable_adapters` is a method.
        if getattr(module, "disable_adapters", None) is False:
            names.update(module.active_adapters)
    if names:
        added = {ADAPTER_LABEL: "+".join(sorted(names))}
        return [{**given, **added} for given in labels or [{}] * count]
    return None if labels is None else [dict(given) for given in labels]
