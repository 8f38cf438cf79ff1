"""Experts of real models that come from the host: outputs are the eager model's, bit for bit.

The truth is the model itself before it was touched, with the library's eager experts.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import importlib
import types
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import nn
from transformers.integrations.moe import use_experts_implementation

from routetrace.capture_agent.engines.transformers import TransformersCapture
from routetrace.common.errors import InvalidArgument
from routetrace.experts.cached import CachedWeightProvider
from routetrace.experts.forecast import ExpertForecast
from routetrace.experts.transformers import ServedExperts, serve_experts
from support.models.routing_truth import RecordingAgent, padded
from support.models.tiny_models import FAMILIES, eager, paging
from support.models.tiny_models import tiny_model as shared_model

PROMPTS = [[3, 4, 5, 6, 7, 33], [8, 9, 10, 11, 12, 13, 14, 15], [16, 17]]
IDS = ["long", "longest", "short"]
NEW_TOKENS = 4


def tiny_model(
    family: str, seed: int = 0, experts: str = "eager", *, wide: bool = False
) -> tuple[Any, Any]:
    """A model of its own, with an experts implementation of the library."""
    model, layout = shared_model(family, seed, wide=wide)
    model = copy.deepcopy(model)
    model.set_experts_implementation(experts)
    return model, layout


def outputs(model: Any, sample: bool = False) -> list[torch.Tensor]:
    """Logits of a padded batch; tokens and logits of a generation, prefill and decode."""
    input_ids, mask = padded(PROMPTS)
    torch.manual_seed(0)
    with torch.no_grad():
        logits = model(input_ids=input_ids, attention_mask=mask).logits
    generated = model.generate(
        input_ids,
        attention_mask=mask,
        max_new_tokens=NEW_TOKENS,
        do_sample=sample,
        num_return_sequences=2 if sample else 1,
        eos_token_id=None,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return [logits, generated.sequences, *generated.logits]


def expected(model: Any, sample: bool = False) -> list[torch.Tensor]:
    with eager(model):
        return outputs(model, sample)


def assert_same(got: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    assert [t.dtype for t in got] == [t.dtype for t in want]
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        assert torch.equal(a, b), f"output {i}: off by {(a.float() - b.float()).abs().max()}"


def experts(model: Any) -> dict[str, nn.Module]:
    return {n: m for n, m in model.named_modules() if n.endswith(".experts")}


def assert_untouched(model: Any) -> None:
    for name, module in model.named_modules():
        assert not {"forward", "_apply"} & set(vars(module)), name


def capacities(num_experts: int) -> list[int]:
    if num_experts <= 16:
        return list(range(1, num_experts + 1))
    return [1, 2, 7, 20, num_experts - 1, num_experts]


@pytest.mark.parametrize(
    "dtype",
    [
        pytest.param(torch.float32, marks=pytest.mark.long, id="float32"),
        pytest.param(torch.bfloat16, id="bfloat16"),
    ],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_at_every_capacity(family: str, dtype: torch.dtype) -> None:
    model, layout = tiny_model(family)
    model = copy.deepcopy(model).to(dtype)
    for module in experts(model).values():
        for name, parameter in module.named_parameters():
            if "bias" in name:  # a new model's are zero
                nn.init.normal_(parameter, std=0.3)
    want = expected(model)
    most = 0
    for capacity in capacities(layout.num_experts):
        with serve_experts(model, capacity=capacity) as served:
            assert served.modules == list(experts(model))
            assert len(served.modules) == len(layout.layer_ids)
            assert_same(outputs(model), want)
        stats = served.stats()
        assert stats.batches == len(layout.layer_ids) * (1 + NEW_TOKENS)
        assert (stats.overflows > 0) == (stats.waves > stats.batches)
        if capacity == 1:  # every expert of every pass has its own wave
            most = stats.waves
            assert stats.overflows == stats.batches
            assert most == stats.hits + stats.misses
        assert stats.hits + stats.misses == most
        if capacity == layout.num_experts:
            assert stats.overflows == 0
    assert_untouched(model)


def test_sampling_with_several_sequences_per_prompt() -> None:
    model, _ = tiny_model("qwen3_moe")
    want = expected(model, sample=True)
    for capacity in (1, 5, 16):
        with serve_experts(model, capacity=capacity):
            assert_same(outputs(model, sample=True), want)


# ---------------------------------------------------------------- batched and grouped kernels


KERNELS = pytest.mark.parametrize("kernels", ["grouped_mm", "batched_mm"])


@KERNELS
@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_kernels_of_every_family_at_every_capacity(
    family: str, dtype: torch.dtype, kernels: str
) -> None:
    """The truth is the same kernel with all experts in the model."""
    model, layout = tiny_model(family, experts=kernels, wide=True)
    model = model.to(dtype)
    for module in experts(model).values():
        for name, parameter in module.named_parameters():
            if "bias" in name:
                nn.init.normal_(parameter, std=0.3)
    want = outputs(model)
    for capacity in capacities(layout.num_experts):
        with serve_experts(model, capacity=capacity) as served:
            assert_same(outputs(model), want)
            served_bytes = served.device_bytes
        stats = served.stats()
        assert stats.batches == len(layout.layer_ids) * (1 + NEW_TOKENS)
        assert (stats.overflows > 0) == (stats.waves > stats.batches)
        assert stats.overflows or capacity >= layout.top_k
        if capacity == layout.num_experts:
            assert stats.bytes_moved == served_bytes
    assert_untouched(model)


def test_the_model_s_own_implementation_is_served() -> None:
    shared = shared_model("qwen3_moe", wide=True)[0]
    assert shared.config._experts_implementation == "grouped_mm"  # the library's default
    model = copy.deepcopy(shared)
    with serve_experts(model, capacity=3):
        assert_same(outputs(model), outputs(shared))
        for implementation in ("batched_mm", "eager", "grouped_mm"):
            model.set_experts_implementation(implementation)
            plain, _ = tiny_model("qwen3_moe", experts=implementation, wide=True)
            assert_same(outputs(model), outputs(plain))


@KERNELS
def test_where_all_experts_fit_nobody_asks_for_ids(
    kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asking would wait for the device, in every layer."""
    model, layout = tiny_model("gpt_oss", experts=kernels)
    want = outputs(model)
    monkeypatch.delattr(CachedWeightProvider, "prepare")
    with serve_experts(model, capacity=layout.num_experts) as served:
        assert_same(outputs(model), want)
        once = served.stats().bytes_moved
        assert once == served.device_bytes
        parameters = [p for m in experts(model).values() for p in m.parameters()]
        for parameter in parameters:  # behind torch's back
            parameter.data.view(torch.uint8).fill_(0xFF)
        assert_same(outputs(model), want)
        assert served.stats().bytes_moved == once
        served.invalidate()
        assert outputs(model)[0].isnan().any()


@KERNELS
@pytest.mark.parametrize("capacity", [2, 7, 8])
def test_kernels_and_weights_that_change(kernels: str, capacity: int) -> None:
    model, _ = tiny_model("mixtral", experts=kernels, wide=True)
    other, _ = tiny_model("mixtral", seed=1, experts=kernels, wide=True)
    want = outputs(other)
    with serve_experts(model, capacity=capacity):
        outputs(model)
        model.load_state_dict(other.state_dict())
        assert_same(outputs(model), want)


@KERNELS
def test_kernels_leave_nobody_s_ids_out(kernels: str) -> None:
    config = Sizes(_experts_implementation=kernels, width=64)
    layer = Layer(experts_class("mixtral.MixtralExperts"), config)
    hidden, ids, weights = inputs(6, config, torch.float32)
    gone = torch.zeros_like(ids, dtype=torch.bool)
    gone[::2, 0] = gone[3] = True
    with torch.no_grad():
        want = layer(hidden, ids, weights.masked_fill(gone, 0))
        for value in (config.num_experts, -1):
            for capacity in (2, 7):
                with serve_experts(layer, capacity=capacity):
                    got = layer(hidden, ids.masked_fill(gone, value), weights)
                    nothing = layer(hidden, torch.full_like(ids, value), weights)
                torch.testing.assert_close(got, want)  # of products of other numbers of rows
                assert not nothing.any()


def test_other_implementations_are_refused() -> None:
    model, layout = tiny_model("mixtral")
    with serve_experts(model, capacity=2):
        for config in {id(m.config): m.config for m in experts(model).values()}.values():
            config._experts_implementation = "deepgemm"
        with pytest.raises(InvalidArgument, match="deepgemm; expected one of"), torch.no_grad():
            model(input_ids=torch.tensor([[3, 4]]))
    with pytest.raises(InvalidArgument, match="experts_implementation is deepgemm"):
        serve_experts(model, capacity=2)
    assert_untouched(model)


# ---------------------------------------------------------------- kinds of experts modules


class Sizes(SimpleNamespace):
    """A config that has whatever an experts module asks for."""

    _experts_implementation = "eager"
    num_experts = 8
    width = 32

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name.endswith("_act"):
            return "silu"
        return self.num_experts if "expert" in name else self.width


class Layer(nn.Module):
    """An experts module with random weights, as a part of something."""

    def __init__(self, kind: type[nn.Module], config: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.experts = kind(config)
        for parameter in self.experts.parameters():
            nn.init.normal_(parameter, std=0.3)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.experts(*args, **kwargs)


def experts_class(name: str) -> Any:
    family, kind = name.split(".")
    try:
        module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    except ModuleNotFoundError:
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    found = getattr(module, kind)
    if not hasattr(found.forward, "__wrapped__"):
        pytest.skip(f"{kind} does not follow the interface yet")
    return found


def inputs(tokens: int, config: Any, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(tokens)
    hidden = torch.randn(tokens, config.width, generator=generator).to(dtype)
    chosen = torch.rand(tokens, config.num_experts, generator=generator).topk(3)
    return hidden, chosen.indices, chosen.values.to(dtype)


KINDS = {
    "no gate": "nemotron_h.NemotronHExperts",
    "transposed": "aria.AriaExperts",
    "transposed, interleaved, biases": "gpt_oss.GptOssExperts",
    "transposed, biases, sums in float32": "openai_privacy_filter.OpenAIPrivacyFilterExperts",
    "a norm behind each expert": "muse_spark.MuseSparkExperts",
    "a gate of its own": "deepseek_v4.DeepseekV4Experts",
    "sums in float32": "inkling2.Inkling2Experts",
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_every_kind_of_experts(kind: str, dtype: torch.dtype) -> None:
    config = Sizes()
    layer = Layer(experts_class(kind), config).to(dtype)
    calls = [inputs(tokens, config, dtype) for tokens in (12, 1, 2, 0)]
    with torch.no_grad():
        want = [layer(*call) for call in calls]
        assert want[0].abs().max() > 0.1
        for capacity in range(1, config.num_experts + 1):
            with serve_experts(layer, capacity=capacity) as served:
                assert_same([layer(*call) for call in calls], want)
            assert (served.stats().overflows > 0) == (capacity < config.num_experts)


@KERNELS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_kernels_of_every_kind_of_experts(kind: str, dtype: torch.dtype, kernels: str) -> None:
    config = Sizes(_experts_implementation=kernels, width=64)
    layer = Layer(experts_class(kind), config).to(dtype)
    calls = [inputs(tokens, config, dtype) for tokens in (12, 1, 2, 0)]
    with torch.no_grad():
        want = [layer(*call) for call in calls]
        for capacity in range(1, config.num_experts + 1):
            with serve_experts(layer, capacity=capacity):
                assert_same([layer(*call) for call in calls], want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_rows_that_are_no_multiple_of_a_cache_line(dtype: torch.dtype) -> None:
    """The address of a matrix decides the order in which some CPU kernels add."""
    config = Sizes(width=129)
    config.moe_intermediate_size = config.intermediate_size = 65
    layer = Layer(experts_class("mixtral.MixtralExperts"), config).to(dtype)
    calls = [inputs(tokens, config, dtype) for tokens in (1, 2, 5, 33)]
    with torch.no_grad():
        want = [layer(*call) for call in calls]
        for capacity in (1, 2, 3, 5, 7, 8):
            with serve_experts(layer, capacity=capacity):
                assert_same([layer(*call) for call in calls], want)


class Masked(nn.Module):
    """The library's eager loop of versions after 5.17: an id behind the last expert is nobody's."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.num_experts = config.num_experts
        shape = (config.num_experts, config.width, config.width)
        self.down_proj = nn.Parameter(torch.empty(shape))

    def forward(self, hidden: Any, top_k_index: Any, top_k_weights: Any) -> Any:
        out = torch.zeros_like(hidden)
        mask = nn.functional.one_hot(top_k_index, self.num_experts + 1).permute(2, 1, 0)
        for expert in mask.sum((1, 2)).nonzero()[:, 0]:
            if expert == self.num_experts:
                continue
            k, token = torch.where(mask[expert])
            now = nn.functional.linear(hidden[token], self.down_proj[expert])
            out.index_add_(0, token, now * top_k_weights[token, k, None])
        return out


def test_ids_behind_the_last_expert_are_nobody_s() -> None:
    config = Sizes()
    layer = Layer(use_experts_implementation(Masked), config)
    hidden, ids, weights = inputs(6, config, torch.float32)
    ids[::2, 0] = config.num_experts
    ids[3] = config.num_experts
    with torch.no_grad():
        want = layer(hidden, ids, weights)
        with serve_experts(layer, capacity=2):
            assert torch.equal(layer(hidden, top_k_index=ids, top_k_weights=weights), want)
            with pytest.raises(RuntimeError):  # as without us
                layer(hidden, ids + 1, weights)
            assert torch.equal(layer(hidden, ids, weights), want)


# ---------------------------------------------------------------- where weights are


def test_what_computes_are_the_slots() -> None:
    model, layout = tiny_model("gpt_oss")
    model = copy.deepcopy(model)
    want = expected(model)
    with serve_experts(model, capacity=layout.num_experts) as served:
        outputs(model)
        parameters = [p for m in experts(model).values() for p in m.parameters()]
        for parameter in parameters:  # behind torch's back
            parameter.data.view(torch.uint8).fill_(0xFF)
        assert_same(outputs(model), want)
        served.invalidate()
        assert outputs(model)[0].isnan().any()


def test_the_device_holds_as_many_experts_as_asked_for() -> None:
    model, layout = tiny_model("qwen3_moe")
    total = sum(p.nbytes for m in experts(model).values() for p in m.parameters())
    one = total // layout.num_experts  # of every layer
    for capacity in (1, 5, 16):
        with serve_experts(model, capacity=capacity) as served:
            assert served.device_bytes == capacity * one
        assert served.device_bytes == 0
        for limit in (capacity * one, (capacity + 1) * one - 1):
            with serve_experts(model, capacity_bytes=limit) as served:
                assert served.device_bytes == capacity * one
                held = [
                    buffer.untyped_storage().nbytes()
                    for layer in served._layers
                    for buffer in layer.provider._weights.values()
                ]
                assert sum(held) == served.device_bytes
    with serve_experts(model, capacity_bytes=1 << 40) as served:
        assert served.device_bytes == total


def test_the_rest_of_the_model_moves_alone() -> None:
    config = Sizes()
    layer = Layer(experts_class("muse_spark.MuseSparkExperts"), config)
    before = {k: v.clone() for k, v in layer.state_dict().items()}
    with serve_experts(layer, capacity=2):
        served = layer.state_dict()
        # What `to` makes of a tensor is another one here, as on the way to another device.
        layer._apply(lambda tensor: tensor.clone())
        now = layer.state_dict()
        moved = [k for k in now if now[k].data_ptr() != served[k].data_ptr()]
        assert moved == ["experts.post_expert_norm.weight"]
        with pytest.raises(InvalidArgument, match=r"experts\.gate_up_proj .*bfloat16.*float32"):
            layer.bfloat16()
        layer.to("cpu")
    held = layer.state_dict()
    layer._apply(lambda tensor: tensor.clone())  # as ever
    for key, value in layer.state_dict().items():
        assert torch.equal(value, before[key])
        assert value.data_ptr() != held[key].data_ptr()


def test_close_puts_the_model_back() -> None:
    model, _ = tiny_model("gpt_oss")
    model = copy.deepcopy(model)
    before = model.state_dict(keep_vars=True)
    values = {k: v.detach().clone() for k, v in before.items()}
    places = {k: v.data_ptr() for k, v in before.items()}
    usual = outputs(model)

    def assert_as_before() -> None:
        now = model.state_dict(keep_vars=True)
        assert list(now) == list(before)
        for key, value in now.items():
            assert value is before[key]
            assert torch.equal(value, values[key])
            assert value.requires_grad == before[key].requires_grad
        assert sum(1 for _ in model.parameters()) == len(before)

    served = serve_experts(model, capacity=2)
    outputs(model)
    assert_as_before()  # also while it is served
    stats = served.stats()
    for _ in range(2):
        served.close()
        assert_untouched(model)
        assert_as_before()
        assert {k: v.data_ptr() for k, v in before.items()} == places
    assert served.stats() == stats
    served.invalidate()
    assert_same(outputs(model), usual)
    with pytest.raises(ZeroDivisionError), serve_experts(model, capacity=1):
        raise ZeroDivisionError
    assert_untouched(model)
    assert_same(outputs(model), usual)
    with serve_experts(model, capacity=1):  # and again
        assert_same(outputs(model), expected(model))


def test_close_frees_what_the_device_holds() -> None:
    model, layout = tiny_model("qwen3_moe")
    forecast = fitted(model, layout)
    gc.collect()
    gc.disable()
    try:
        served = serve_experts(model, capacity=3, forecast=forecast)
        held = [
            weakref.ref(buffer)
            for layer in served._layers
            for buffer in layer.provider._weights.values()
        ]
        outputs(model)
        first = next(iter(experts(model).values()))
        act, first.act_fn = first.act_fn, Failing(first.act_fn, 1)
        with contextlib.suppress(ZeroDivisionError):
            outputs(model)  # leaves a batch behind that is not over
        first.act_fn = act
        assert None not in [buffer() for buffer in held]
        served.close()
        assert {buffer() for buffer in held} == {None}
    finally:
        gc.enable()


def test_weights_that_change_are_noticed() -> None:
    model, layout = tiny_model("mixtral")
    model, other = copy.deepcopy(model), copy.deepcopy(tiny_model("mixtral", seed=1)[0])
    want = expected(other)
    with serve_experts(model, capacity=layout.num_experts) as served:
        outputs(model)
        model.load_state_dict(other.state_dict())
        assert_same(outputs(model), want)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.mul_(0.5)
            for parameter in model.parameters():
                parameter.mul_(0.5)
        want = expected(other)
        assert_same(outputs(model), want)
        for parameter, new in zip(model.parameters(), other.parameters(), strict=True):
            new.data.mul_(-1.5)
            parameter.data.copy_(new.data)
        served.invalidate()  # nobody can see that
        assert_same(outputs(model), expected(other))
        name, module = next(iter(experts(model).items()))
        module.down_proj = nn.Parameter(module.down_proj.detach().clone())
        with pytest.raises(InvalidArgument, match=f"{name}.down_proj"):
            outputs(model)


class Failing(nn.Module):
    """An activation that fails after some calls."""

    def __init__(self, act: nn.Module, calls: int) -> None:
        super().__init__()
        self.act, self.calls = act, calls

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls -= 1
        if self.calls < 0:
            raise ZeroDivisionError
        return self.act(x)


@pytest.mark.parametrize("capacity", [1, 2, 5])
def test_a_pass_that_fails_leaves_nothing_wrong_behind(capacity: int) -> None:
    model, _ = tiny_model("mixtral")
    want = expected(model)
    first = next(iter(experts(model).values()))
    act = first.act_fn
    for calls in range(5):
        with serve_experts(model, capacity=capacity):
            first.act_fn = Failing(act, calls)
            try:
                with pytest.raises(ZeroDivisionError):
                    outputs(model)
            finally:
                first.act_fn = act
            assert_same(outputs(model), want)


def test_inference_mode_inside_and_outside() -> None:
    model, _ = tiny_model("mixtral")
    input_ids, _ = padded(PROMPTS[1:2])
    with eager(model), torch.no_grad():
        want = model(input_ids=input_ids).logits
    with torch.inference_mode():
        served = serve_experts(model, capacity=2)
        assert torch.equal(model(input_ids=input_ids).logits, want)
    with served, torch.no_grad():
        assert torch.equal(model(input_ids=input_ids).logits, want)


def test_compiled_code_calls_it() -> None:
    graphs = []

    def backend(graph: Any, _inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    config = Sizes()
    layer = Layer(experts_class("mixtral.MixtralExperts"), config)
    calls = [inputs(tokens, config, torch.float32) for tokens in (12, 5, 12)]
    with torch.no_grad():
        want = [layer(*call) for call in calls]
        with serve_experts(layer, capacity=2) as served:
            compiled = torch.compile(layer, backend=backend)
            assert_same([compiled(*call) for call in calls], want)
            assert served.stats().batches == len(calls)
    torch.compiler.reset()
    assert not graphs, "what caches remember was compiled"


# ---------------------------------------------------------------- capture


def capture(model: Any, layout: Any, served: ServedExperts | None) -> RecordingAgent:
    agent = RecordingAgent(layout)
    input_ids, mask = padded(PROMPTS)
    captured = TransformersCapture(model, agent, layout=layout)
    batches = 0 if served is None else served.stats().batches
    captured.generate(
        input_ids, mask, request_ids=IDS, max_new_tokens=10, do_sample=False, eos_token_id=None
    )
    assert captured.failures == 0
    assert served is None or served.stats().batches - batches == 10 * len(layout.layer_ids)
    return agent


@pytest.mark.parametrize("family", FAMILIES)
def test_capture_sees_logical_ids(family: str) -> None:
    model, layout = tiny_model(family)
    with eager(model):
        want = capture(model, layout, None)
    seen = np.concatenate([want.trace(i) for i in IDS])
    assert seen.max() >= 3, "ids that could be slots: the test tests nothing"
    for capacity in (1, 3):
        with serve_experts(model, capacity=capacity) as served:
            agent = capture(model, layout, served)
        for request_id in IDS:
            assert agent.requests[request_id].tokens == want.requests[request_id].tokens
            np.testing.assert_array_equal(agent.trace(request_id), want.trace(request_id))


def test_continuous_batching_is_captured_alike() -> None:
    model, layout = tiny_model("qwen3_moe")
    model = copy.deepcopy(model)
    prompts = [p for p in PROMPTS if len(p) > 2]

    def traces() -> list[np.ndarray]:
        agent = RecordingAgent(layout)
        captured = TransformersCapture(model, agent, layout=layout)
        config = transformers.GenerationConfig(do_sample=False, pad_token_id=0)
        captured.generate_batch(
            prompts,
            request_ids=IDS[:2],
            generation_config=config,
            continuous_batching_config=paging(
                num_blocks=24, page_size=4, max_batch_tokens=8, seed=0
            ),
            max_new_tokens=4,
        )
        assert captured.failures == 0
        return [agent.trace(i) for i in IDS[:2]]

    gc.collect()
    gc.freeze()  # the library collects garbage after every batch: spare it what stays anyway
    try:
        with eager(model):
            want = traces()
        with serve_experts(model, capacity=3) as served:
            got = traces()
            assert served.stats().batches > 4
    finally:
        gc.unfreeze()
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)


# ---------------------------------------------------------------- forecasts


def fitted(model: Any, layout: Any, rows: np.ndarray | None = None) -> ExpertForecast:
    if rows is None:
        agent = capture(model, layout, None)
        rows = np.concatenate([agent.trace(i) for i in IDS])
    return ExpertForecast.fit(rows, num_experts=layout.num_experts)


@pytest.mark.long
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_a_forecast_changes_no_output(family: str) -> None:
    model, layout = tiny_model(family)
    want = expected(model)
    rng = np.random.default_rng(0)
    shape = (50, len(layout.layer_ids), layout.num_experts)
    wrong = rng.random(shape).argsort(-1)[..., : layout.top_k]
    for rows in (None, wrong):
        forecast = fitted(model, layout, rows)
        for capacity in range(1, layout.num_experts + 1):
            with serve_experts(model, capacity=capacity, forecast=forecast) as served:
                warm = served.stats()
                assert warm.prefetched == capacity * len(layout.layer_ids)
                assert_same(outputs(model), want)
            stats = served.stats()
            if capacity == len(PROMPTS) * layout.top_k:
                assert stats.prefetched > warm.prefetched, "no decoding pass looked ahead"
                assert stats.prefetched_used > 0
            if capacity == layout.num_experts:  # everything was there before the first pass
                assert stats.misses == 0
    assert_untouched(model)


@KERNELS
def test_a_forecast_changes_no_output_of_kernels(kernels: str) -> None:
    model, layout = tiny_model("qwen3_moe", experts=kernels, wide=True)
    forecast, want = fitted(model, layout), outputs(model)
    for capacity in (2, 12, 16):
        with serve_experts(model, capacity=capacity, forecast=forecast) as served:
            warm = served.stats()
            assert_same(outputs(model), want)
        assert (served.stats().prefetched > warm.prefetched) == (capacity == 12)


def test_a_pass_fetches_what_the_next_layer_is_likely_to_need() -> None:
    """In this model's traces expert e is followed by e + 1, and that by e + 3."""
    config = Sizes()
    kind = experts_class("mixtral.MixtralExperts")
    model = nn.ModuleList([Layer(kind, config) for _ in range(3)])
    first = np.random.default_rng(0).random((400, 8)).argsort(-1)[:, :2]
    rows = np.stack([first, (first + 1) % 8, (first + 3) % 8], axis=1)
    forecast = ExpertForecast.fit(rows, num_experts=8)
    hidden = torch.randn(1, config.width)
    weights = torch.ones(1, 2)
    with serve_experts(model, capacity=2, forecast=forecast) as served, torch.no_grad():
        for e in range(0, 8, 2):
            for shift, layer in zip((0, 1, 3), model, strict=True):
                layer(hidden, (torch.tensor([[e, e + 1]]) + shift) % 8, weights)
    by_layer = list(served.layer_stats().values())
    assert by_layer[0].hits < 8
    for stats in by_layer[1:]:
        assert (stats.hits, stats.misses) == (8, 0)


@pytest.mark.long
def test_a_forecast_of_random_routing_costs_little() -> None:
    """400 tokens, on which a forecast that was fitted on others like them is of no use."""
    config = Sizes(num_experts=32)
    kind = experts_class("mixtral.MixtralExperts")
    model = nn.ModuleList([Layer(kind, config) for _ in range(2)])
    rng = np.random.default_rng(0)
    rows = rng.random((800, 2, 32)).argsort(-1)[..., :4]
    forecast = ExpertForecast.fit(rows[:400], num_experts=32)
    hidden, weights = torch.randn(1, config.width), torch.ones(1, 4)

    def copies(forecast: ExpertForecast | None) -> int:
        with serve_experts(model, capacity=12, forecast=forecast) as served, torch.no_grad():
            for row in rows[400:]:
                for ids, layer in zip(row, model, strict=True):
                    layer(hidden, torch.from_numpy(ids)[None], weights)
        stats = served.stats()
        return stats.misses + stats.prefetched

    assert copies(forecast) <= copies(None) + 2 * (5 * 12 + 2 * 4)


@pytest.mark.parametrize(("layers", "num_experts"), [(2, 16), (4, 16), (3, 17)])
def test_a_forecast_of_another_model_is_refused(layers: int, num_experts: int) -> None:
    model, layout = tiny_model("qwen3_moe")
    rows = np.zeros((4, layers, 1), np.int64)
    with pytest.raises(InvalidArgument, match="forecast"):
        serve_experts(model, capacity=1, forecast=ExpertForecast.fit(rows, num_experts=num_experts))
    assert_untouched(model)


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("kwargs", "field"),
    [
        ({"capacity": 0}, "capacity"),
        ({"capacity": -1}, "capacity"),
        ({"capacity_bytes": 0}, "capacity_bytes"),
        ({"capacity_bytes": 3 * 6144 - 1}, "capacity_bytes"),
        ({"capacity": 2, "capacity_bytes": 1 << 20}, "capacity"),
        ({}, "capacity"),
        ({"capacity": 2, "policy": "belady"}, "policy"),
    ],
)
def test_a_capacity_that_is_none(kwargs: Any, field: str) -> None:
    model, _ = tiny_model("qwen3_moe")  # whose experts take 6144 bytes
    with pytest.raises(InvalidArgument) as caught:
        serve_experts(model, **kwargs)
    assert caught.value.field == field
    assert_untouched(model)


def broken(how: str) -> tuple[nn.Module, str]:
    """A model with one experts module that cannot be served, and its name in the error."""
    model: Any = copy.deepcopy(tiny_model("mixtral")[0])
    name, module = list(experts(model).items())[1]
    weight: Any = module.down_proj
    if how == "a module list":  # as transformers 4 has it
        parent = model.get_submodule(name.rpartition(".")[0])
        parent.experts = nn.ModuleList(nn.Linear(2, 2) for _ in range(8))
        return model, name
    if how == "forward replaced":
        module.forward = types.MethodType(type(module).forward, module)
        return model, name
    if how == "expert parallel":
        module._is_expert_parallel = True
        return model, name
    if how == "no weights":
        module._parameters.clear()
        return model, name
    if how == "another number":
        module.num_experts = 4
        return model, f"{name}.gate_up_proj"
    if how == "gradient":
        weight.grad = torch.zeros_like(weight)
    elif how == "mixed devices":
        module.down_proj = nn.Parameter(weight.to("meta"))
    elif how == "meta":
        module.to("meta")
        return model, f"{name}.gate_up_proj"
    elif how == "strides":
        weight.data = weight.data.transpose(1, 2).contiguous().transpose(1, 2)
    elif how == "a subclass":

        class Packed(nn.Parameter):
            pass

        module._parameters["down_proj"] = Packed(weight.data)
    return model, f"{name}.down_proj"


@pytest.mark.parametrize(
    ("how", "value"),
    [
        ("a module list", "ModuleList"),
        ("forward replaced", "forward was replaced"),
        ("expert parallel", "some of the experts"),
        ("no weights", "no parameters"),
        ("another number", r"shape \(8, "),
        ("gradient", "with a gradient"),
        ("mixed devices", "on meta, others elsewhere"),
        ("meta", "on the device meta"),
        ("strides", "strides"),
        ("a subclass", "a Packed"),
    ],
)
def test_a_module_that_cannot_be_served_is_named(how: str, value: str) -> None:
    model, name = broken(how)
    parts = {n: dict(vars(m)) for n, m in model.named_modules()}
    with pytest.raises(InvalidArgument, match=f" is .*{value}.*; expected") as caught:
        serve_experts(model, capacity=2)
    assert caught.value.field == name
    for n, module in model.named_modules():
        assert vars(module).keys() == parts[n].keys()


def test_families_without_the_interface_are_refused() -> None:
    from transformers.models.llama4.modeling_llama4 import Llama4TextExperts

    model = nn.ModuleDict({"feed_forward": Layer(Llama4TextExperts, Sizes())})
    with pytest.raises(InvalidArgument, match=r"feed_forward\.experts .*Llama4TextExperts"):
        serve_experts(model, capacity=2)
    with pytest.raises(InvalidArgument, match="model is Linear"):
        serve_experts(nn.Linear(2, 2), capacity=2)


def test_shared_experts_stay_where_they_are() -> None:
    class SharedExperts(nn.Linear):
        """Named as in families whose shared experts are a class of their own."""

    layer = Layer(experts_class("mixtral.MixtralExperts"), Sizes())
    layer.shared_experts = SharedExperts(2, 2)
    with serve_experts(layer, capacity=2) as served:
        assert served.modules == ["experts"]


def test_a_model_is_served_once() -> None:
    model, _ = tiny_model("mixtral")
    with serve_experts(model, capacity=2):
        with pytest.raises(InvalidArgument, match="forward was replaced"):
            serve_experts(model, capacity=2)
        with eager(model):
            want = outputs(model)
    assert_same(want, expected(model))


def test_a_failure_half_way_puts_the_first_layers_back(monkeypatch: pytest.MonkeyPatch) -> None:
    from routetrace.experts.transformers import serving

    made = []

    class Provider(serving.CachedWeightProvider):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            made.append(self)
            if len(made) == 3:
                raise MemoryError
            super().__init__(*args, **kwargs)

    monkeypatch.setattr(serving, "CachedWeightProvider", Provider)
    model, _ = tiny_model("mixtral")
    with pytest.raises(MemoryError):
        serve_experts(model, capacity=2)
    assert_untouched(model)


def test_gradients_are_refused() -> None:
    model, _ = tiny_model("mixtral")
    input_ids, _ = padded(PROMPTS[1:2])
    with serve_experts(model, capacity=2) as served:
        with pytest.raises(InvalidArgument, match="no_grad") as caught:
            model(input_ids=input_ids)
        assert caught.value.field == served.modules[0]
        with torch.no_grad():
            model(input_ids=input_ids)


def test_a_loop_in_another_order_is_refused() -> None:
    """A version of the library whose loop descends would find wrong rows in no case."""

    def descending(self: Any, hidden: Any, top_k_index: Any, top_k_weights: Any) -> Any:
        return sum(self.down_proj[e].sum() for e in reversed(top_k_index.unique().tolist()))

    class Strange(nn.Module):
        def __init__(self, config: Any) -> None:
            super().__init__()
            self.num_experts = config.num_experts
            self.down_proj = nn.Parameter(torch.empty(8, 4, 4))

        forward = descending

    layer = Layer(use_experts_implementation(Strange), Sizes())
    call = inputs(6, Sizes(), torch.float32)
    with torch.no_grad():
        want = layer(*call)
        with serve_experts(layer, capacity=8):
            assert torch.equal(layer(*call), want)
        with (
            serve_experts(layer, capacity=2),
            pytest.raises(InvalidArgument, match=r"experts .*out of turn"),
        ):
            layer(*call)


# ---------------------------------------------------------------- CUDA


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("where", ["on the host first", "on the device first"])
@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize("family", FAMILIES)
def test_on_a_device(family: str, implementation: str, where: str) -> None:
    model, layout = tiny_model(family, experts=implementation, wide=True)
    if implementation != "eager":
        model.bfloat16()  # what the device's grouped kernel is for
    total = sum(p.nbytes for m in experts(model).values() for p in m.parameters())
    input_ids, mask = (t.cuda() for t in padded(PROMPTS))

    def run() -> torch.Tensor:
        with torch.no_grad():
            return model(input_ids=input_ids, attention_mask=mask).logits.cpu()

    host = model.state_dict()
    model.cuda()
    want = run()
    full = torch.cuda.memory_allocated()
    for capacity in capacities(layout.num_experts):
        if where == "on the host first":
            model.cpu()
        with serve_experts(model, capacity=capacity, device="cuda") as served:
            model.cuda()
            held = torch.cuda.memory_allocated()
            assert held <= full - total + served.device_bytes + (1 << 16)
            assert {p.device.type for m in experts(model).values() for p in m.parameters()} == {
                "cpu"
            }
            for _ in range(3):
                assert torch.equal(run(), want)
        model.cuda()
        assert torch.equal(run(), want)
    assert all(torch.equal(v.cpu(), host[k].cpu()) for k, v in model.state_dict().items())
