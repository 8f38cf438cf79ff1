"""Inputs of requests, for digests: which tokens the model was given, and with which adapter.

Reads vLLM's `Request` alone, and imports nothing of vLLM.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt

from routetrace.v1.records import ADAPTER_LABEL


def tokens_of(request: Any, token_ids: Any, named_inputs: bool) -> bytes | None:
    """Return tokens as uint32, for digests; None if ids do not identify the model's input.

    Placeholder tokens are the same for all images: a hash of the image's identifier replaces them.

    Args:
        request: vLLM's `Request`.
        token_ids: its tokens, or the first of them.
        named_inputs: whether identifiers of images, audio and video stand for their contents.
    """
    features = request.mm_features or ()
    if request.prompt_embeds is not None or token_ids is None:
        return None
    if features and not named_inputs:
        return None
    tokens = np.array(token_ids, np.uint32)
    for feature in features:
        place = feature.mm_position
        placeholders = tokens[place.offset : place.offset + place.length]
        placeholders[:] = _mark(feature.identifier, len(placeholders))
    return tokens.tobytes()


def adapter_label(request: Any) -> dict[str, str]:
    """Return the label of the request's LoRA adapter, if it has one.

    Name and path, as `vllm serve --lora-modules` takes them: a name may get another path.
    """
    adapter = request.lora_request
    return {ADAPTER_LABEL: f"{adapter.lora_name}={adapter.lora_path}"} if adapter else {}


def _mark(identifier: str, length: int) -> npt.NDArray[np.uint32]:
    """Return words that replace the placeholders of an image: 512 bits of a hash, repeated."""
    return np.resize(np.frombuffer(blake2b(identifier.encode()).digest(), "<u4"), length)
