"""Inputs of requests, for digests: which tokens the model was given, and with which adapter.

Reads vLLM's `Request` and `VllmConfig` alone, and imports nothing of vLLM.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt

from routetrace.capture_agent.engines.request_options import kv_cache_labels
from routetrace.codec.records import ADAPTER_LABEL


@dataclass(frozen=True)
class Inputs:
    """Inputs of the requests of one engine."""

    named: bool = True
    """Whether identifiers of images, audio and video stand for their contents."""
    kv_cache_dtype: str = "auto"
    """Of the KV cache."""
    dtype: str = ""
    """Of the model."""

    @classmethod
    def of(cls, vllm_config: Any) -> Inputs:
        """Return the inputs of an engine.

        Identifiers are hashes of the contents or names that the caller gave; numbers that count
        from 0 in each process, where both caches that need them are off.
        """
        model, cache = vllm_config.model_config, vllm_config.cache_config
        multimodal = model.multimodal_config
        named = (
            multimodal is None
            or multimodal.mm_processor_cache_gb > 0
            or bool(cache.enable_prefix_caching)
        )
        return cls(named, str(cache.cache_dtype), str(model.dtype))

    def tokens_of(self, request: Any, token_ids: Any) -> bytes | None:
        """Return tokens as uint32, for digests; None if ids do not identify the model's input.

        Placeholder tokens are the same for all images: a hash of the image's identifier replaces
        them.

        Args:
            request: vLLM's `Request`.
            token_ids: its tokens, or the first of them.
        """
        features = request.mm_features or ()
        if request.prompt_embeds is not None or token_ids is None:
            return None
        if features and not self.named:
            return None
        # A third of the time that numpy takes for a list, on the engine's thread.
        tokens = np.frombuffer(array("I", token_ids), np.uint32)
        for feature in features:
            place = feature.mm_position
            placeholders = tokens[place.offset : place.offset + place.length]
            placeholders[:] = _mark(feature.identifier, len(placeholders))
        return tokens.tobytes()

    def labels_of(self, request: Any) -> dict[str, str]:
        """Return the labels that are part of digests: the dtype of the KV cache, and the adapter.

        The LoRA adapter goes by name and path, as `vllm serve --lora-modules` takes them: a name
        may get another path.
        """
        labels = kv_cache_labels(self.kv_cache_dtype, self.dtype)
        if adapter := request.lora_request:
            labels[ADAPTER_LABEL] = f"{adapter.lora_name}={adapter.lora_path}"
        return labels


def _mark(identifier: str, length: int) -> npt.NDArray[np.uint32]:
    """Return words that replace the placeholders of an image: 512 bits of a hash, repeated."""
    return np.resize(np.frombuffer(blake2b(identifier.encode()).digest(), "<u4"), length)
