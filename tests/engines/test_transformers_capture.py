"""Events of a generation, against two independent truths.

One is recorded by hooks of this file beside the capture's, and must be met bit for bit. The other
is a forward pass over the finished sequence alone, without padding, cache or batch: it knows
nothing of how the sequence came to be, so that a row at a wrong position cannot agree with it.
"""

from __future__ import annotations

from enum import Enum
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    GenerationConfig,
    StoppingCriteria,
    StoppingCriteriaList,
)

from routetrace.capture_agent import AgentConfig, CaptureAgent
from routetrace.capture_agent.engines.transformers import (
    TransformersCapture,
    generate,
    model_of,
)
from routetrace.client import RouteClient
from routetrace.common.errors import InvalidArgument
from routetrace.common.layout import ModelLayout
from routetrace.common.model_hash import model_hash
from routetrace.server.testing import run_server
from support.models.routing_truth import RecordingAgent, Truth, assert_no_hooks, padded, reforward
from support.models.tiny_models import EOS, FAMILIES, PAD, paging, tiny_model

PROMPTS = [[3, 4, 5, 6, 7], [8, 9, 10, 11, 12, 13, 14, 15], [16, 17]]
IDS = ["long", "longest", "short"]


def captured(
    family: str = "qwen3_moe",
    prompts: list[list[int]] = PROMPTS,
    ids: list[str] = IDS,
    *,
    side: str = "left",
    seed: int = 0,
    **kwargs: Any,
) -> tuple[RecordingAgent, Truth, torch.Tensor]:
    """One captured generation, checked against both truths."""
    model, layout = tiny_model(family)
    agent = RecordingAgent(layout)
    capture = TransformersCapture(model, agent, layout=layout)
    input_ids, mask = padded(prompts, side)
    kwargs.setdefault("max_new_tokens", 10)
    kwargs.setdefault("do_sample", False)
    torch.manual_seed(seed)
    with Truth(model, layout) as truth:
        out = capture.generate(input_ids, mask, request_ids=ids, **kwargs)
    sequences = out if torch.is_tensor(out) else out.sequences
    assert capture.failures == 0
    assert_no_hooks(model)
    copies = len(ids) // len(prompts)
    mask = mask.repeat_interleave(copies, dim=0).numpy().astype(bool)
    for i, request_id in enumerate(ids):
        told = agent.requests[request_id]
        prompt = prompts[i // copies]
        assert told.prompt == prompt == told.tokens[: told.prompt_len]
        generated = told.tokens[len(prompt) :]
        rest = sequences[i, mask.shape[1] :].tolist()
        assert generated == rest[: len(generated)]
        assert set(rest[len(generated) :]) <= {PAD}
        if side == "left":  # the library itself miscounts positions after padding on the right
            np.testing.assert_array_equal(
                agent.trace(request_id), reforward(model, layout, told.tokens), err_msg=request_id
            )
    return agent, truth, sequences


def assert_bit_for_bit(
    agent: RecordingAgent, truth: Truth, ids: list[str], mask: torch.Tensor
) -> None:
    expected = truth.by_position(mask.numpy().astype(bool))
    for request_id, rows in zip(ids, expected, strict=True):
        trace = agent.trace(request_id)
        np.testing.assert_array_equal(trace, [rows[i] for i in range(len(trace))])


# ---------------------------------------------------------------- generate()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_left_padded_batch_of_every_family(family: str) -> None:
    agent, truth, _ = captured(family)
    assert_bit_for_bit(agent, truth, IDS, padded(PROMPTS)[1])


@pytest.mark.parametrize("side", ["right", "left"])
def test_padding_on_either_side(side: str) -> None:
    agent, truth, _ = captured("olmoe", side=side, max_new_tokens=4)
    assert_bit_for_bit(agent, truth, IDS, padded(PROMPTS, side)[1])


def test_sequences_that_end_at_different_times() -> None:
    free, _, _ = captured("mixtral", eos_token_id=None, max_new_tokens=9)
    tokens = [free.requests[i].tokens[free.requests[i].prompt_len :] for i in IDS]
    # The first two end in the middle, and are fed padding while the third goes on.
    ends = [tokens[0][3], tokens[1][2]]
    agent, truth, _ = captured("mixtral", eos_token_id=ends, max_new_tokens=9)
    told = [agent.requests[i] for i in IDS]
    lengths = [len(t.tokens) - t.prompt_len for t in told]
    assert lengths[0] <= 4
    assert lengths[1] <= 3
    assert [t.reason for t in told[:2]] == ["stop", "stop"]
    assert len(set(lengths)) == len(IDS)
    assert_bit_for_bit(agent, truth, IDS, padded(PROMPTS)[1])


def test_several_samples_per_prompt() -> None:
    ids = [f"{name}/{i}" for name in IDS for i in range(3)]
    labels = [{"group": name, "sample": str(i)} for name in IDS for i in range(3)]
    agent, truth, _ = captured(
        ids=ids,
        labels=labels,
        num_return_sequences=3,
        do_sample=True,
        temperature=1.5,
        seed=3,
        weight_version=7,
    )
    assert [agent.requests[i].labels for i in ids] == labels
    assert agent.weight_version == 7
    assert len({tuple(agent.requests[i].tokens) for i in ids}) > len(IDS)
    assert_bit_for_bit(agent, truth, ids, padded(PROMPTS)[1].repeat_interleave(3, dim=0))


def test_a_version_is_what_was_told_last_and_unknown_before() -> None:
    model, layout = tiny_model("qwen3_moe")
    input_ids, mask = padded(PROMPTS[:1])
    given: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False}
    with run_server() as server:
        config = AgentConfig(
            target=server.target,
            engine_id="e",
            layout=layout,
            background="thread",
            model=model_of(model),
        )
        with CaptureAgent(config) as agent:
            capture = TransformersCapture(model, agent, layout=layout)
            capture.generate(input_ids, mask, request_ids=["a"], **given)
            capture.generate(input_ids, mask, request_ids=["b"], weight_version=7, **given)
            capture.generate(input_ids, mask, request_ids=["c"], **given)
            agent.set_weight_version(None)  # new weights without a number
            capture.generate(input_ids, mask, request_ids=["d"], **given)
            assert agent.flush(20)
        with RouteClient(server.target) as client:
            spans = [client.get(i, wait_for="end", timeout=20).weight_versions for i in "abcd"]
    versions = [{span.weight_version for span in each} for each in spans]
    assert versions == [{None}, {7}, {7}, {None}]


def test_the_model_of_an_agent_is_its_configuration_and_quantization() -> None:
    model, _ = tiny_model("qwen3_moe")
    same, _ = tiny_model("qwen3_moe")
    same.config._name_or_path = "/node-1/step-7"
    assert model_of(same) == model_of(model) == model_hash(model.config)
    assert model_of(tiny_model("mixtral")[0]) != model_of(model)
    for config in ({"quant_method": "fp8"}, SimpleNamespace(quant_method=Method.FP8)):
        quantized = SimpleNamespace(config=Quantized(config))
        assert model_of(quantized) == model_hash({"hidden_size": 8}, "fp8")


class Method(Enum):
    """As the library's `QuantizationMethod`."""

    FP8 = "fp8"


class Quantized:
    """A configuration with a quantization, which is not among its facts."""

    def __init__(self, quantization_config: object) -> None:
        self.quantization_config = quantization_config

    def to_dict(self) -> dict[str, int]:
        return {"hidden_size": 8}


@pytest.mark.parametrize(
    "kwargs",
    [
        {"prefill_chunk_size": 3},
        {"cache_implementation": "static"},
        {"return_dict_in_generate": True, "output_scores": True},
        {"generation_config": GenerationConfig(eos_token_id=EOS, pad_token_id=PAD)},
    ],
    ids=["chunked prefill", "static cache", "dict output", "generation config"],
)
def test_ways_to_generate(kwargs: dict[str, Any]) -> None:
    agent, truth, _ = captured(**kwargs)
    assert_bit_for_bit(agent, truth, IDS, padded(PROMPTS)[1])


def test_without_a_cache_the_first_row_of_a_position_stays() -> None:
    _, truth, _ = captured(use_cache=False, max_new_tokens=4)
    assert truth.fed[-1].shape[1] == 8 + 3


REPEATING = [[5, 6, 7, 5, 6, 7, 5, 6, 7, 5, 6]]


@pytest.mark.parametrize("kind", ["prompt lookup", "assistant", "chunked prompt lookup"])
def test_rejected_candidates_leave_no_rows(kind: str) -> None:
    kwargs: dict[str, Any] = {"prompt_lookup_num_tokens": 4}
    if kind == "assistant":
        kwargs = {"assistant_model": tiny_model("qwen3_moe", seed=5)[0]}
    if kind.startswith("chunked"):
        kwargs["prefill_chunk_size"] = 4
    agent, truth, _ = captured(prompts=REPEATING, ids=["a"], max_new_tokens=16, **kwargs)
    fed = sum(f.shape[1] for f in truth.fed)
    assert fed > len(agent.trace("a")), "no candidate was rejected: the test tests nothing"


def test_an_inferred_mask_is_the_library_s() -> None:
    model, layout = tiny_model("mixtral")
    agent = RecordingAgent(layout)
    input_ids, _ = padded(PROMPTS)
    capture = TransformersCapture(model, agent, layout=layout)
    out = capture.generate(input_ids, request_ids=IDS, max_new_tokens=3, do_sample=False)
    expected = model.generate(input_ids=input_ids, max_new_tokens=3, do_sample=False)
    assert torch.equal(out, expected)
    assert [agent.requests[i].prompt for i in IDS] == PROMPTS


def test_a_second_turn_on_the_cache_of_the_first() -> None:
    model, layout = tiny_model("qwen3_moe")
    agent = RecordingAgent(layout)
    agent.gaps = True  # of what the first turn computed
    capture = TransformersCapture(model, agent, layout=layout)
    input_ids, mask = padded(PROMPTS)
    kwargs: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "max_new_tokens": 3}
    first = capture.generate(
        input_ids, mask, request_ids=IDS, return_dict_in_generate=True, **kwargs
    )
    more = torch.tensor([[20, 21], [22, 23], [24, 25]])
    input_ids = torch.cat([first.sequences, more], dim=1)
    mask = torch.cat([mask, torch.ones(3, 3 + 2, dtype=mask.dtype)], dim=1)
    ids = [f"{i}/2" for i in IDS]
    capture.generate(
        input_ids, mask, request_ids=ids, past_key_values=first.past_key_values, **kwargs
    )
    assert capture.failures == 0
    for before, now in zip(IDS, ids, strict=True):
        told, cached = agent.requests[now], agent.requests[before].num_tokens - 1
        rows = reforward(model, layout, told.tokens)
        assert sorted(told.rows) == list(range(cached, len(rows)))
        np.testing.assert_array_equal([told.rows[i] for i in sorted(told.rows)], rows[cached:])


def test_a_session_under_one_id_is_one_trace_that_grows() -> None:
    model, layout = tiny_model("qwen3_moe")
    kwargs: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "max_new_tokens": 3}
    input_ids, mask = padded(PROMPTS)
    cache = None
    with run_server() as server:
        config = AgentConfig(
            target=server.target, engine_id="e", layout=layout, background="thread"
        )
        with CaptureAgent(config) as agent:
            capture = TransformersCapture(model, agent, layout=layout)
            for turn in range(3):
                out = capture.generate(
                    input_ids,
                    mask,
                    request_ids=IDS,
                    past_key_values=cache,
                    return_dict_in_generate=True,
                    **kwargs,
                )
                cache = out.past_key_values
                more = torch.tensor([[20, 21], [22, 23], [24, 25]]) + turn
                input_ids = torch.cat([out.sequences, more], dim=1)
                mask = torch.cat([mask, torch.ones(3, 3 + 2, dtype=mask.dtype)], dim=1)
            assert agent.flush(20)
            stats = agent.stats()
        with RouteClient(server.target) as client:
            traces = [client.get(i, wait_for="end", timeout=20) for i in IDS]
    assert capture.failures == 0
    sequences = out.sequences.numpy()
    for trace, row, real in zip(traces, sequences, mask.numpy().astype(bool), strict=True):
        tokens = row[real[: len(row)]]
        assert (trace.complete, trace.num_incarnations, trace.incarnation) == (True, 1, 3)
        assert trace.verify_tokens(tokens) > 0
        rows = reforward(model, layout, tokens.tolist())
        np.testing.assert_array_equal(trace.topk_ids, rows)
    # What an earlier turn computed was neither computed nor sent again.
    assert stats.acknowledged_rows == sum(len(trace) for trace in traces)


class AfterCalls(StoppingCriteria):
    """Ends the first sequence at the third call: asked twice per step it would end it too early."""

    calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.calls += 1
        ended = torch.zeros(len(input_ids), dtype=torch.bool)
        ended[0] = self.calls >= 3
        return ended


def test_stopping_criteria_of_the_caller() -> None:
    criterion = AfterCalls()
    agent, truth, sequences = captured(
        "olmoe", stopping_criteria=StoppingCriteriaList([criterion]), max_new_tokens=7
    )
    assert criterion.calls == 7
    told = agent.requests[IDS[0]]
    assert (told.reason, len(told.tokens) - told.prompt_len) == ("stop", 3)
    assert sequences[0, -4:].tolist() == [PAD] * 4
    assert_bit_for_bit(agent, truth, IDS, padded(PROMPTS)[1])


def test_without_an_end_token_the_library_goes_on_sampling() -> None:
    criteria = StoppingCriteriaList([AfterCalls()])
    agent, _, _ = captured("olmoe", stopping_criteria=criteria, max_new_tokens=7, eos_token_id=None)
    assert agent.requests[IDS[0]].num_tokens == len(PROMPTS[0]) + 7


def test_stop_strings() -> None:
    class Tokenizer:
        """Token i is the letter number i."""

        def get_vocab(self) -> dict[str, int]:
            return {chr(65 + i): i for i in range(48)}

        def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
            return {"input_ids": [ord(letter) - 65 for letter in text]}

        def _convert_id_to_token(self, token: int) -> str:
            return chr(65 + token)

        def convert_tokens_to_string(self, tokens: list[str]) -> str:
            return "".join(tokens)

    free, _, _ = captured("olmoe", max_new_tokens=8, eos_token_id=[EOS])
    token = free.requests[IDS[1]].tokens[-4]
    agent, truth, _ = captured(
        "olmoe", max_new_tokens=8, stop_strings=[chr(65 + token)], tokenizer=Tokenizer()
    )
    assert agent.requests[IDS[1]].tokens[-1] == token
    assert agent.requests[IDS[1]].reason == "stop"
    assert_bit_for_bit(agent, truth, IDS, padded(PROMPTS)[1])


# ---------------------------------------------------------------- inputs besides tokens and weights


class Adapted(torch.nn.Linear):
    """A layer with adapters, as peft shows it."""

    active_adapters, disable_adapters = ("math",), False


@pytest.mark.slow
@pytest.mark.parametrize("method", ["generate", "generate_batch"])
def test_active_adapters_are_part_of_what_is_told(method: str) -> None:
    model, layout = tiny_model("mixtral")
    projection = model.model.layers[1].self_attn.q_proj
    adapted = Adapted(projection.in_features, projection.out_features, bias=False)
    adapted.weight = projection.weight
    model.model.layers[1].self_attn.q_proj = adapted
    agent = RecordingAgent(layout)
    capture = TransformersCapture(model, agent, layout=layout)

    def run(request_id: str) -> dict[str, str] | None:
        ids, labels = [request_id], [{"group": "g", "adapter": "mine"}]
        if method == "generate":
            capture.generate(
                torch.tensor([[3, 4]]), request_ids=ids, labels=labels, max_new_tokens=2
            )
        else:
            # By default the library takes all memory for the cache and its masks.
            small = paging(num_blocks=8, page_size=4, max_batch_tokens=8)
            capture.generate_batch(
                [[3, 4]],
                request_ids=ids,
                labels=labels,
                continuous_batching_config=small,
                max_new_tokens=2,
            )
        return agent.requests[request_id].labels

    try:
        assert run("a") == {"group": "g", "adapter": "math"}
        adapted.active_adapters = ("math", "code")
        assert run("b") == {"group": "g", "adapter": "code+math"}
        adapted.disable_adapters = True
        assert run("c") == {"group": "g", "adapter": "mine"}
    finally:
        model.model.layers[1].self_attn.q_proj = projection


@pytest.mark.parametrize("pixels", [torch.zeros(1, 3, 2, 2), [torch.zeros(3, 2, 2)]])
def test_tokens_are_not_told_beside_images(pixels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, layout = tiny_model("mixtral")
    agent = RecordingAgent(layout)
    capture = TransformersCapture(model, agent, layout=layout)
    forward = model.forward

    def with_pixels(*args: Any, pixel_values: Any = None, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    # The library passes on the arguments that it finds in the signatures of the two.
    monkeypatch.setattr(model, "forward", with_pixels)
    monkeypatch.setattr(model, "_validate_model_kwargs", lambda _: None)
    kwargs = {"max_new_tokens": 2, "eos_token_id": torch.tensor([EOS])}
    capture.generate(torch.tensor([[3, 4]]), request_ids=["text"], **kwargs)
    capture.generate(torch.tensor([[3, 4]]), request_ids=["image"], pixel_values=pixels, **kwargs)
    assert agent.requests["text"].prompt == [3, 4]
    assert agent.requests["image"].prompt is None
    assert agent.requests["image"].tokens is None
    assert np.array_equal(agent.trace("text"), agent.trace("image"))


# ---------------------------------------------------------------- the cache, by any name


def test_a_cache_of_an_unknown_name_is_found_by_its_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate, "_CACHE_NAMES", ())
    agent, truth, _ = captured()
    assert_bit_for_bit(agent, truth, IDS, padded(PROMPTS)[1])


def test_passes_without_a_cache() -> None:
    captured(use_cache=False)


@pytest.mark.parametrize("cached_turn", [False, True])
def test_a_pass_whose_place_is_unknown_ends_the_call(
    monkeypatch: pytest.MonkeyPatch, cached_turn: bool
) -> None:
    model, layout = tiny_model("qwen3_moe")
    input_ids, mask = padded(PROMPTS)
    kwargs: dict[str, Any] = {"do_sample": False, "max_new_tokens": 4}
    if cached_turn:
        first = model.generate(
            input_ids, attention_mask=mask, return_dict_in_generate=True, **kwargs
        )
        kwargs["past_key_values"] = first.past_key_values
        input_ids = torch.cat([first.sequences, first.sequences[:, -1:]], dim=1)
        mask = torch.ones_like(input_ids)
    agent = RecordingAgent(layout)
    capture = TransformersCapture(model, agent, layout=layout)
    # As a release would look that calls the cache by a third name and gives it another type.
    monkeypatch.setattr(generate, "_CACHE_NAMES", ())
    monkeypatch.setattr(generate, "Cache", type("Other", (), {}))
    width = r"[12] of \d+"
    with pytest.raises(InvalidArgument, match=f"a pass over {width} columns .*transformers 5") as e:
        capture.generate(input_ids, mask, request_ids=IDS, **kwargs)
    assert e.value.field == "model"
    assert_no_hooks(model)
    for request_id in IDS:
        told = agent.requests[request_id]
        assert told.reason == "abort"
        assert not told.rows or len(told.rows) == told.prompt_len


# ---------------------------------------------------------------- what is refused, what goes wrong


@pytest.mark.parametrize(
    ("field", "kwargs"),
    [
        ("num_beams", {"num_beams": 2}),
        ("num_beams", {"generation_config": GenerationConfig(num_beams=2)}),
        ("guidance_scale", {"guidance_scale": 1.5}),
        ("assistant_early_exit", {"assistant_early_exit": 1}),
        ("cache_implementation", {"cache_implementation": "paged"}),
        ("inputs_embeds", {"inputs_embeds": torch.zeros(3, 2, 32)}),
        ("adapter_names", {"adapter_names": ["math", "code", "math"]}),
        ("request_ids", {"request_ids": ["a", "b"]}),
        ("request_ids", {"request_ids": ["a", "b", "b"]}),
        ("request_ids", {"num_return_sequences": 2}),
        ("labels", {"labels": [{}]}),
        ("labels", {"labels": {"group": "g"}}),
        ("labels[1]", {"labels": [{}, "g", {}]}),
        ("attention_mask", {"attention_mask": torch.ones(3, 9)}),
    ],
)
def test_what_cannot_be_captured_is_refused(field: str, kwargs: dict[str, Any]) -> None:
    model, layout = tiny_model("mixtral")
    agent = RecordingAgent(layout)
    capture = TransformersCapture(model, agent, layout=layout)
    input_ids, mask = padded(PROMPTS)
    kwargs = {"attention_mask": mask, "request_ids": IDS, **kwargs}
    with pytest.raises(InvalidArgument) as caught:
        capture.generate(input_ids, **kwargs)
    assert caught.value.field == field
    assert not agent.requests


def test_layers_that_cannot_be_captured_are_named() -> None:
    model, layout = tiny_model("qwen2_moe")  # layer 1 is dense
    wrong = ModelLayout((0, 1, 2), 3, layout.num_experts, layout.top_k)
    with pytest.raises(InvalidArgument, match=r"layer_ids is \[1\]; expected .*\[0, 2\]"):
        TransformersCapture(model, RecordingAgent(wrong), layout=wrong)
    wrong = ModelLayout((0,), 3, layout.num_experts, layout.top_k)
    with pytest.raises(InvalidArgument, match=r"layer_ids is \[2\]"):
        TransformersCapture(model, RecordingAgent(wrong), layout=wrong)
    wrong = ModelLayout((0, 2), 3, 2, 2)
    with pytest.raises(InvalidArgument, match=r"layers.0 is .* of 8 experts; expected 2 experts"):
        TransformersCapture(model, RecordingAgent(wrong), layout=wrong)
    with pytest.raises(InvalidArgument, match="layout"):
        TransformersCapture(model, RecordingAgent(wrong))
    assert_no_hooks(model)


@pytest.mark.parametrize("top_k", [2, 6])
def test_a_layer_with_another_top_k_is_refused(top_k: int) -> None:
    model, layout = tiny_model("qwen3_moe", seed=1)
    gate = model.model.layers[1].mlp.gate
    gate.top_k = top_k
    try:
        with pytest.raises(
            InvalidArgument, match=rf"layers.1 is .*, which chooses {top_k}; expected 4 for each"
        ):
            TransformersCapture(model, RecordingAgent(layout), layout=layout)
    finally:
        gate.top_k = layout.top_k
    assert_no_hooks(model)


def test_part_of_the_layers() -> None:
    model, whole = tiny_model("qwen3_moe")
    layout = whole.select((0, 2))
    agent = RecordingAgent(layout)
    TransformersCapture(model, agent, layout=layout).generate(
        *padded(PROMPTS), request_ids=IDS, max_new_tokens=3, do_sample=False
    )
    for request_id in IDS:
        rows = reforward(model, whole, agent.requests[request_id].tokens)
        np.testing.assert_array_equal(agent.trace(request_id), rows[:, [0, 2]])


def test_routers_under_another_name_are_read_from_the_call_of_the_experts() -> None:
    model, layout = tiny_model("qwen3_moe", seed=1)
    agent = RecordingAgent(layout)
    gate = model.model.layers[1].mlp.gate
    original = type(gate)
    gate.__class__ = type("Chooser", (original,), {})
    try:
        TransformersCapture(model, agent, layout=layout).generate(
            *padded(PROMPTS), request_ids=IDS, max_new_tokens=3, do_sample=False
        )
    finally:
        gate.__class__ = original
    for request_id in IDS:
        rows = reforward(model, layout, agent.requests[request_id].tokens)
        np.testing.assert_array_equal(agent.trace(request_id), rows)


@pytest.mark.parametrize("how", ["in parts", "twice", "more experts", "fewer experts"])
def test_a_layer_that_routes_otherwise_is_invalid_and_not_wrong(how: str) -> None:
    model, layout = tiny_model("qwen3_moe", seed=1)
    agent = RecordingAgent(layout)
    capture = TransformersCapture(model, agent, layout=layout)
    block = model.model.layers[1].mlp
    whole = block.forward
    if how == "in parts":
        block.forward = lambda x: torch.cat([whole(part) for part in x.split(1, dim=0)])
    elif how == "twice":
        block.forward = lambda x: (whole(x), whole(x.flip(0)))[0]
    else:
        block.gate.top_k = 6 if how == "more experts" else 2
    try:
        capture.generate(*padded(PROMPTS), request_ids=IDS, max_new_tokens=3, do_sample=False)
        if "experts" in how:
            layout = layout.select((0,))  # behind the layer the truth would be cut, too
        else:
            del block.forward
        for request_id in IDS:
            rows = agent.trace(request_id)
            expected = reforward(model, layout, agent.requests[request_id].tokens)
            assert not rows[:, 1].any(), "all ids 0 mark an invalid cell"
            columns = list(layout.layer_ids) if "experts" in how else [0, 2]
            np.testing.assert_array_equal(rows[:, columns], expected[:, columns])
    finally:
        vars(block).pop("forward", None)
        block.gate.top_k = 4


@pytest.mark.parametrize("method", ["step", "finish"])
def test_the_engine_does_not_notice_that_capture_fails(
    method: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, layout = tiny_model("qwen3_moe")
    agent = RecordingAgent(layout)
    capture = TransformersCapture(model, agent, layout=layout)
    input_ids, mask = padded(PROMPTS)
    expected = model.generate(
        input_ids=input_ids, attention_mask=mask, max_new_tokens=5, do_sample=False
    )

    def run(ids: list[str]) -> torch.Tensor:
        return capture.generate(input_ids, mask, request_ids=ids, max_new_tokens=5, do_sample=False)

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("agent is broken")

    with monkeypatch.context() as patch:
        patch.setattr(agent, method, fail)
        assert torch.equal(run(IDS), expected)
    assert capture.failures > 0
    assert sum("routing capture failed" in r.message for r in caplog.records) == 1
    if method == "step":
        assert all(agent.requests[i].num_tokens for i in IDS)
        assert not any(agent.requests[i].rows for i in IDS)
    assert torch.equal(run([f"{i}/again" for i in IDS]), expected)
    for request_id in IDS:
        agent.trace(f"{request_id}/again")


def test_after_a_failure_no_rows_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    model, layout = tiny_model("qwen3_moe")
    agent = RecordingAgent(layout)
    capture = TransformersCapture(model, agent, layout=layout)
    calls, step = iter(range(100)), agent.step

    def fail(*args: Any) -> None:
        if next(calls) == 2:
            raise RuntimeError("agent is broken")
        step(*args)

    monkeypatch.setattr(agent, "step", fail)
    capture.generate(
        *padded(PROMPTS), request_ids=IDS, max_new_tokens=6, do_sample=False, eos_token_id=None
    )
    assert capture.failures == 1
    for request_id, prompt in zip(IDS, PROMPTS, strict=True):
        told = agent.requests[request_id]
        assert told.num_tokens == len(prompt) + 6
        assert sorted(told.rows) == list(range(len(prompt) + 1))


def test_rows_of_other_tokens_are_left_out() -> None:
    model, layout = tiny_model("qwen3_moe")
    agent = RecordingAgent(layout)
    capture = TransformersCapture(model, agent, layout=layout)

    def other_token(_module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        tokens = kwargs["input_ids"].clone()
        if tokens.shape[1] > 1:
            tokens[1, 4] += 1
        return args, {**kwargs, "input_ids": tokens}

    agent.gaps = True
    handle = model.register_forward_pre_hook(other_token, with_kwargs=True)
    try:
        capture.generate(*padded(PROMPTS), request_ids=IDS, max_new_tokens=3, do_sample=False)
    finally:
        handle.remove()
    # All rows after the other token come of it, until the end of the pass.
    told = agent.requests[IDS[1]]
    assert sorted(told.rows) == [0, 1, 2, 3, 8, 9]
    for request_id in (IDS[0], IDS[2]):
        rows = reforward(model, layout, agent.requests[request_id].tokens)
        np.testing.assert_array_equal(agent.trace(request_id), rows)


def test_a_pass_that_raises_aborts_its_requests() -> None:
    model, layout = tiny_model("qwen3_moe")
    agent = RecordingAgent(layout)
    capture = TransformersCapture(model, agent, layout=layout)
    passes = iter(range(100))

    def fail(*_: Any) -> None:
        if next(passes) == 2:
            raise RuntimeError("out of memory")

    handle = model.model.layers[2].register_forward_pre_hook(fail)
    try:
        with pytest.raises(RuntimeError, match="out of memory"):
            capture.generate(*padded(PROMPTS), request_ids=IDS, max_new_tokens=5, do_sample=False)
    finally:
        handle.remove()
    assert_no_hooks(model)
    for request_id, prompt in zip(IDS, PROMPTS, strict=True):
        told = agent.requests[request_id]
        assert (told.reason, told.num_tokens) == ("abort", len(prompt) + 2)
        assert sorted(told.rows) == list(range(len(prompt) + 1))


def test_one_call_at_a_time() -> None:
    model, layout = tiny_model("qwen3_moe")
    capture = TransformersCapture(model, RecordingAgent(layout), layout=layout)
    caught: list[Exception] = []

    class Nested(StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            try:
                capture.generate(torch.tensor([[3]]), request_ids=["b"], max_new_tokens=1)
            except InvalidArgument as error:
                caught.append(error)
            return torch.ones(len(input_ids), dtype=torch.bool)

    capture.generate(
        torch.tensor([[3, 4]]), request_ids=["a"], stopping_criteria=[Nested()], max_new_tokens=4
    )
    assert len(caught) == 1
