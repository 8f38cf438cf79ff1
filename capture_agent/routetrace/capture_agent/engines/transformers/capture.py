"""Capture of the routing of `generate()` and `generate_batch()` of transformers.

    capture = TransformersCapture(model, agent)
    sequences = capture.generate(**tokenizer(prompts, padding=True, return_tensors="pt"),
                                 request_ids=["a", "b"], max_new_tokens=100, do_sample=True)

Every sequence is a request of the agent, every forward pass a step of it. The library is not
edited; hooks are on the model only while a captured call runs.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import torch
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)

from routetrace.capture_agent.engines.router_taps import RouterTaps
from routetrace.capture_agent.engines.transformers.batching import PagedRequests, batching_config
from routetrace.capture_agent.engines.transformers.compiled import CompiledCalls
from routetrace.capture_agent.engines.transformers.generate import GenerateCall, cache_among
from routetrace.capture_agent.engines.transformers.inputs import labels_with_adapters, only_tokens
from routetrace.common.errors import InvalidArgument, typed
from routetrace.common.layout import ModelLayout

if TYPE_CHECKING:
    from routetrace.capture_agent import CaptureAgent

# Options under which positions cannot be proven, with their harmless values.
_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "num_beams": ((None, 1), "1: beam search reorders the KV cache"),
    "guidance_scale": ((None, 1), "1: guidance runs passes over other sequences"),
    "assistant_early_exit": ((None,), "None: early exit runs passes over some of the layers"),
    "token_healing": ((None, False), "False: it rewrites the prompt"),
    "custom_generate": ((None,), "None: only the library's own decoding loops can be captured"),
    "inputs_embeds": ((None,), "input_ids"),
    "adapter_names": ((None,), "None: one adapter a call, by set_adapter()"),
}
# Criteria of the library without state, which may be called twice.
_STATELESS = (EosTokenCriteria, StopStringCriteria, MaxLengthCriteria, MaxTimeCriteria)


class TransformersCapture:
    """Capture of every MoE layer of a transformers model while it generates.

    Hooks are on the model only while a method runs. One call at a time; no other use of the model
    during it.

    Args:
        model: the model.
        agent: takes requests and rows. Its layout is the capture's. `model_of` returns the hash of
            the model for its configuration.
        layout: the model's layout, by default from `model.config`. Its `layer_ids` may be a part of
            its `moe_layer_ids`; that part is captured.

    Raises:
        InvalidArgument: if layers cannot be captured, naming them.
    """

    def __init__(
        self, model: Any, agent: CaptureAgent, *, layout: ModelLayout | None = None
    ) -> None:
        self.layout = ModelLayout.from_config(model.config) if layout is None else layout
        if agent.config.layout != self.layout:
            raise InvalidArgument(
                field="agent.config.layout", value=agent.config.layout, expected=f"{self.layout}"
            )
        self._model = model
        self._agent = agent
        self._taps = RouterTaps(model, self.layout)
        self._compiled = CompiledCalls(model, self._taps)
        self._busy = threading.Lock()

    @property
    def failures(self) -> int:
        """Suppressed exceptions of the capture; each cost some requests their rows."""
        return self._taps.failures

    def generate(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        request_ids: Sequence[str] | None = None,
        labels: Sequence[Mapping[str, str]] | None = None,
        weight_version: int | None = None,
        **generate_kwargs: Any,
    ) -> Any:
        """Run `model.generate`, with every sequence of the batch captured as one request.

        Supports greedy search, sampling, several sequences per prompt, chunked prefill, assisted
        and prompt-lookup decoding. Where the library would compile decoding (on a static cache),
        captured decoding is compiled apart from it, once per batch size; a pass that cannot be
        compiled as one graph runs uncompiled, with a warning in the log.

        Args:
            input_ids: prompts [batch, length], padded left, right or not at all.
            attention_mask: 0 where `input_ids` is padding; by default inferred from the pad token
                as by the library.
            request_ids: one for each of the batch * num_return_sequences sequences, the sequences
                of a prompt side by side; random ones if None, whose rows `RouteClient.locate` finds
                by their tokens. The next turn of a session under the same id, its prompt
                beginning with all tokens of the turn before, continues the same trace, on the KV
                cache of that turn (`cache`, or `past_key_values` before transformers 5.24) or
                without it; not so with images or other tensors of inputs, which token ids do not
                identify.
            labels: one mapping for each sequence; active adapters of peft add `adapter`.
            weight_version: number of the weights that generate, as their trainer counts them;
                None: the one told last. Until one is told the version is unknown.
            generate_kwargs: for `model.generate`.

        Returns:
            The result of `model.generate`.

        Raises:
            InvalidArgument: if shapes or counts do not fit, or an option cannot be captured; or at
                the first pass of the model whose positions cannot be known. The call ends there,
                and its requests are aborted.
        """
        kwargs = dict(generate_kwargs)
        for option, (harmless, expected) in _REFUSED.items():
            value = self._option(kwargs, option)
            if value not in harmless:
                raise InvalidArgument(field=option, value=value, expected=expected)
        if self._option(kwargs, "cache_implementation") == "paged":
            raise InvalidArgument(
                field="cache_implementation", value="paged", expected="a call of generate_batch()"
            )
        if kwargs.get("assistant_model") is self._model:
            raise InvalidArgument(
                field="assistant_model", value="the model itself", expected="another model"
            )
        if attention_mask is None:
            attention_mask = self._inferred_mask(kwargs, input_ids)
        if input_ids.dim() != 2 or attention_mask.shape != input_ids.shape:
            raise InvalidArgument(
                field="attention_mask",
                value=f"{tuple(attention_mask.shape)} for input_ids {tuple(input_ids.shape)}",
                expected="the shape of input_ids, [batch, length]",
            )
        copies = self._option(kwargs, "num_return_sequences") or 1
        request_ids = named(request_ids, labels, len(input_ids) * copies)
        own, mirrored = self._criteria(kwargs)
        call = GenerateCall(
            self._agent,
            self._taps,
            input_ids.repeat_interleave(copies, dim=0).cpu().numpy(),
            attention_mask.repeat_interleave(copies, dim=0).cpu().numpy().astype(bool),
            own,
            mirrored,
            tells_tokens=only_tokens(kwargs),
        )
        labels = labels_with_adapters(self._model, labels, len(request_ids))
        kwargs["stopping_criteria"] = StoppingCriteriaList(
            [*(c for c in kwargs.get("stopping_criteria") or () if c not in own), call]
        )
        cache = cache_among(kwargs)
        with self._exclusive(weight_version):
            try:
                call.begin(request_ids, labels, 0 if cache is None else int(cache.get_seq_length()))
                with self._taps.attached(call), self._compiled.attached(call):
                    output = self._model.generate(
                        input_ids=input_ids, attention_mask=attention_mask, **kwargs
                    )
            except BaseException:
                call.finish("abort", None)
                raise
            call.finish("length", output if isinstance(output, torch.Tensor) else output.sequences)
        return output

    def generate_batch(
        self,
        inputs: Sequence[Sequence[int]],
        *,
        request_ids: Sequence[str] | None = None,
        labels: Sequence[Mapping[str, str]] | None = None,
        weight_version: int | None = None,
        generation_config: GenerationConfig | None = None,
        continuous_batching_config: Any = None,
        max_new_tokens: int | None = None,
    ) -> dict[str, Any]:
        """Run `model.generate_batch`, continuous batching over a paged KV cache, captured.

        If the agent reports slots (`block_size` equal to the page size, `num_blocks` no less than
        the cache's), blocks may be shared between requests; otherwise sharing is off. CUDA graphs,
        compilation and asynchronous batching are off, too.

        Args:
            inputs: prompts, token ids.
            request_ids: one for each of the len(inputs) * num_return_sequences sequences, the
                sequences of a prompt side by side; random ones if None.
            labels: one mapping for each sequence; active adapters of peft add `adapter`.
            weight_version: number of the weights that generate, as their trainer counts them;
                None: the one told last. Until one is told the version is unknown.
            generation_config: as for `model.generate_batch`.
            continuous_batching_config: as for `model.generate_batch`.
            max_new_tokens: as for `model.generate_batch`.

        Returns:
            The `GenerationOutput` of `model.generate_batch` by request id.

        Raises:
            InvalidArgument: if counts do not fit, or an option cannot be captured.
        """
        # As the library asks: a model has the attribute while a manager persists.
        if getattr(self._model, "_cached_continuous_batching_manager", None) is not None:
            raise InvalidArgument(
                field="model",
                value="a model with a persistent continuous batching manager",
                expected="none: call model.destroy_cached_continuous_batching_manager()",
            )
        config = copy.deepcopy(generation_config or self._model.generation_config)
        copies, config.num_return_sequences = config.num_return_sequences or 1, 1
        given = [list(prompt) for prompt in inputs for _ in range(copies)]
        request_ids = named(request_ids, labels, len(given))
        prompts = dict(zip(request_ids, given, strict=True))
        labels = labels_with_adapters(self._model, labels, len(request_ids))
        block_size = self._agent.config.block_size
        paging = batching_config(continuous_batching_config, block_size)
        eos_token_ids = self._eos_token_ids({"generation_config": config})
        outputs: dict[str, Any] = {}
        with self._exclusive(weight_version):
            manager = self._model.init_continuous_batching(
                generation_config=config, continuous_batching_config=paging
            )
            manager.warmup()  # creates the batch processor
            requests = None
            manager.start()
            try:
                requests = PagedRequests(
                    self._agent,
                    manager.batch_processor,
                    {} if labels is None else dict(zip(request_ids, labels, strict=True)),
                    eos_token_ids,
                )
                with self._taps.attached(requests):
                    for request_id, prompt in prompts.items():
                        manager.add_request(
                            prompt, request_id=request_id, max_new_tokens=max_new_tokens
                        )
                    while len(outputs) < len(prompts):
                        running = manager.is_running()
                        output = manager.get_result(timeout=1)
                        if output is not None and output.is_finished():
                            outputs[output.request_id] = output
                        elif output is None and not running:
                            break
            finally:
                # Flushes unless requests are left, which an exception drops.
                manager.stop(hard_stop=len(outputs) < len(prompts))
                if requests is not None:
                    self._taps.shield(requests, lambda: requests.close(prompts))
                manager.destroy()
        return outputs

    @contextmanager
    def _exclusive(self, weight_version: int | None) -> Iterator[None]:
        if not self._busy.acquire(blocking=False):
            raise InvalidArgument(
                field="model", value="generating", expected="one captured call at a time"
            )
        try:
            if weight_version is not None:
                self._agent.set_weight_version(weight_version)
            yield
        finally:
            self._busy.release()

    def _option(self, kwargs: Mapping[str, Any], name: str) -> Any:
        """Return the effective value of a generation option."""
        if name in kwargs:
            return kwargs[name]
        for config in (kwargs.get("generation_config"), self._model.generation_config):
            # Some options are arguments of `generate` alone, as custom_generate.
            value = getattr(config, name, None)
            if value is not None:
                return value
        return None

    def _eos_token_ids(self, kwargs: Mapping[str, Any]) -> list[int]:
        ids = self._option(kwargs, "eos_token_id")
        if ids is None:
            return []
        return torch.as_tensor(ids).reshape(-1).tolist()

    def _inferred_mask(self, kwargs: Mapping[str, Any], input_ids: torch.Tensor) -> torch.Tensor:
        pad = self._option(kwargs, "pad_token_id")
        if pad is None or pad in self._eos_token_ids(kwargs):
            return torch.ones_like(input_ids)
        return input_ids.ne(pad).to(input_ids.dtype)

    def _criteria(
        self, kwargs: Mapping[str, Any]
    ) -> tuple[list[StoppingCriteria], list[StoppingCriteria]]:
        """Return the criteria that end single sequences: called in place of and beside the library.

        The library does not show which sequences have ended. Its own criteria can be called again;
        those of the caller may count their calls, so the library does not call them.
        """
        given: list[StoppingCriteria] = list(kwargs.get("stopping_criteria") or ())
        own = [c for c in given if not isinstance(c, _STATELESS)]
        mirrored: list[StoppingCriteria] = [
            c for c in given if isinstance(c, (EosTokenCriteria, StopStringCriteria))
        ]
        kinds = {type(c) for c in mirrored}
        eos = self._eos_token_ids(kwargs)
        if eos and EosTokenCriteria not in kinds:
            mirrored.append(EosTokenCriteria(eos))
        strings = self._option(kwargs, "stop_strings")
        if strings is not None and StopStringCriteria not in kinds and kwargs.get("tokenizer"):
            mirrored.append(StopStringCriteria(kwargs["tokenizer"], strings))
        return own, mirrored


def named(
    request_ids: Sequence[str] | None, labels: Sequence[Mapping[str, str]] | None, expected: int
) -> Sequence[str]:
    """Return the request ids; random ones if None.

    Raises:
        InvalidArgument: if ids or labels do not match the sequences in number, or are not distinct.
    """
    if request_ids is None:
        request_ids = [uuid4().hex for _ in range(expected)]
    if isinstance(request_ids, str) or len(request_ids) != expected:
        raise InvalidArgument(
            field="request_ids",
            value=f"{len(request_ids)} ids",
            expected=f"{expected} ids, one for each sequence",
        )
    if len(set(request_ids)) != expected:
        raise InvalidArgument(field="request_ids", value=request_ids, expected="distinct ids")
    if labels is None:
        return request_ids
    if isinstance(labels, Mapping):
        raise InvalidArgument(
            field="labels",
            value="one mapping",
            expected=f"{expected} mappings, one for each sequence",
            remedy=f"use [labels] * {expected}",
        )
    if len(labels) != expected:
        raise InvalidArgument(
            field="labels", value=f"{len(labels)} mappings", expected=f"{expected} mappings"
        )
    for i, given in enumerate(labels):
        if not isinstance(given, Mapping):
            raise InvalidArgument(
                field=f"labels[{i}]", value=typed(given), expected="a mapping of str to str"
            )
    return request_ids
