"""Capture under the library's compiled decoding on a static cache, against a forward pass alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.backends.debugging import aot_eager
from transformers import CompileConfig

from routetrace.capture_agent.engines.transformers import TransformersCapture
from routetrace.common.layout import ModelLayout
from support.models.routing_truth import RecordingAgent, assert_no_hooks, padded, reforward
from support.models.tiny_models import tiny_model

PROMPTS = [[3, 4, 5, 6, 7], [8, 9, 10, 11, 12, 13], [16, 17]]


class Backend:
    """Counts the graphs that it compiles, and the passes that run them."""

    def __init__(self) -> None:
        self.graphs = self.passes = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        self.graphs += 1
        compiled: Callable[..., Any] = aot_eager(graph, inputs)

        def run(*args: Any) -> Any:
            self.passes += 1
            return compiled(*args)

        return run

    def __deepcopy__(self, _memo: object) -> Backend:
        return self  # the library copies configs

    def options(self, new_tokens: int = 6) -> dict[str, Any]:
        config = CompileConfig(backend=self, mode=None)  # type: ignore[arg-type]
        config._compile_all_devices = True  # the library compiles by itself on devices only
        return {
            "cache_implementation": "static",
            "compile_config": config,
            "max_new_tokens": new_tokens,
            "do_sample": False,
            "eos_token_id": None,
        }


class Captured:
    """Captured calls of one model, each checked against a pass over the finished sequences."""

    def __init__(self, family: str) -> None:
        torch.compiler.reset()
        self.model, self.layout = tiny_model(family)
        self.agent = RecordingAgent(self.layout)
        self.capture = TransformersCapture(self.model, self.agent, layout=self.layout)  # type: ignore[arg-type]
        self.calls = 0

    def generate(
        self, backend: Backend, prompts: list[list[int]], new_tokens: int = 6, **kwargs: Any
    ) -> None:
        self.calls += 1
        ids = [f"{self.calls}/{i}" for i in range(len(prompts))]
        input_ids, mask = padded(prompts)
        options = {**backend.options(new_tokens), **kwargs}
        sequences = self.capture.generate(input_ids, mask, request_ids=ids, **options)
        assert_no_hooks(self.model)
        assert "get_compiled_call" not in vars(self.model)
        expected = self.model.generate(
            input_ids=input_ids, attention_mask=mask, **{**options, "disable_compile": True}
        )
        assert torch.equal(sequences, expected)
        for request_id, prompt, sequence in zip(ids, prompts, sequences, strict=True):
            tokens = sequence[len(sequence) - new_tokens - len(prompt) :].tolist()
            assert self.agent.requests[request_id].tokens == tokens
            np.testing.assert_array_equal(
                self.agent.trace(request_id), reforward(self.model, self.layout, tokens)
            )
        assert self.capture.failures == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    ["qwen3_moe", *(pytest.param(f, marks=pytest.mark.long) for f in ("gpt_oss", "deepseek_v2"))],
)
def test_compiled_decoding_is_captured(family: str) -> None:
    captured, backend = Captured(family), Backend()
    captured.generate(backend, PROMPTS)
    assert backend.passes == 5  # all passes but the prefill


@pytest.mark.long
def test_a_program_is_kept_per_batch_size() -> None:
    captured, backend = Captured("qwen3_moe"), Backend()
    captured.generate(backend, PROMPTS)
    captured.generate(backend, [list(reversed(prompt)) for prompt in PROMPTS])
    assert (backend.graphs, backend.passes) == (1, 10)
    captured.generate(backend, PROMPTS[:2])
    captured.generate(backend, PROMPTS)
    assert (backend.graphs, backend.passes) == (2, 20)


@pytest.mark.long
def test_chunks_of_a_prompt_are_captured() -> None:
    captured, backend = Captured("qwen3_moe"), Backend()
    captured.generate(backend, PROMPTS, prefill_chunk_size=3)
    assert (backend.graphs, backend.passes) == (2, 7)  # two chunks, five passes of a token


@pytest.mark.long
def test_other_lengths_of_the_cache_share_a_dynamic_graph() -> None:
    captured, backend = Captured("qwen3_moe"), Backend()
    for new_tokens in (6, 8, 10, 12):
        captured.generate(backend, PROMPTS, new_tokens)
    assert backend.passes == 5 + 7 + 9 + 11
    assert backend.graphs <= 2  # the last one is dynamic in the length


@pytest.mark.long
def test_calls_that_are_not_captured_share_no_program() -> None:
    captured, backend, own = Captured("qwen3_moe"), Backend(), Backend()
    input_ids, mask = padded(PROMPTS)

    def library() -> None:
        captured.model.generate(input_ids=input_ids, attention_mask=mask, **own.options())

    library()
    captured.generate(backend, PROMPTS)
    library()
    captured.generate(backend, PROMPTS)
    assert (own.graphs, own.passes) == (1, 10)
    assert (backend.graphs, backend.passes) == (1, 10)


@pytest.mark.long
def test_another_capture_of_the_model_shares_no_program() -> None:
    captured, backend = Captured("qwen3_moe"), Backend()
    captured.generate(backend, PROMPTS)
    captured.capture = TransformersCapture(captured.model, captured.agent, layout=captured.layout)  # type: ignore[arg-type]
    captured.generate(backend, PROMPTS)
    assert (backend.graphs, backend.passes) == (2, 10)


def test_a_pass_that_is_not_one_graph_runs_uncompiled(caplog: pytest.LogCaptureFixture) -> None:
    captured, backend = Captured("qwen3_moe"), Backend()

    def breaks(*_: object) -> None:
        torch._dynamo.graph_break()

    handle = captured.model.model.layers[1].register_forward_hook(breaks)
    try:
        input_ids, mask = padded(PROMPTS)
        sequences = captured.capture.generate(
            input_ids, mask, request_ids=["a", "b", "c"], **backend.options()
        )
    finally:
        handle.remove()
    assert backend.passes == 0
    assert [record.message for record in caplog.records if "routetrace" in record.name] == [
        "captured decoding runs uncompiled"
    ]
    for i, request_id in enumerate(["a", "b", "c"]):
        tokens = captured.agent.requests[request_id].tokens
        assert tokens == sequences[i, -len(tokens) :].tolist()
        np.testing.assert_array_equal(
            captured.agent.trace(request_id), reforward(captured.model, captured.layout, tokens)
        )


@pytest.mark.long
def test_more_shapes_than_are_compiled_run_uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    from routetrace.capture_agent.engines.transformers import compiled

    monkeypatch.setattr(compiled, "_MOST_SHAPES", 1)
    captured, backend = Captured("qwen3_moe"), Backend()
    captured.generate(backend, PROMPTS)
    captured.generate(backend, PROMPTS[:2])
    assert (backend.graphs, backend.passes) == (1, 5)


@pytest.mark.long
def test_a_router_that_runs_twice_in_compiled_code_gives_invalid_cells() -> None:
    captured, backend = Captured("qwen3_moe"), Backend()
    captured.generate(backend, PROMPTS)
    layout: ModelLayout = captured.layout
    gate = captured.model.model.layers[layout.layer_ids[1]].mlp.gate
    forward = gate.forward

    def twice(hidden: torch.Tensor) -> Any:
        if len(hidden) == len(PROMPTS):  # of decoding only
            gate_again(hidden)
        return forward(hidden)

    def gate_again(hidden: torch.Tensor) -> None:
        gate.forward = forward
        gate(hidden)
        gate.forward = twice

    gate.forward = twice
    other = Backend()
    try:
        input_ids, mask = padded(PROMPTS)
        captured.capture.generate(input_ids, mask, request_ids=["a", "b", "c"], **other.options())
    finally:
        del gate.forward
    told = captured.agent.requests["a"]
    for position in range(len(PROMPTS[0]), len(told.tokens) - 1):
        row = told.rows[position]
        assert row is not None
        assert len(set(row[1].tolist())) == 1  # the mark of an invalid cell
        assert len(set(row[0].tolist())) == layout.top_k
    assert other.passes == 5
