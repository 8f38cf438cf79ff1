"""Replay in training passes: the ids used, the weights made of them, and the gradients."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace as changed
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.overrides import _get_current_function_mode_stack

from routetrace.capture_agent.engines.transformers import TransformersCapture
from routetrace.client import FetchPlan, MicroBatch, Rank, Sample
from routetrace.client.rows import Rows
from routetrace.common.errors import InvalidArgument
from routetrace.common.layout import ModelLayout
from routetrace.trainers.agreement import Agreement, compare
from routetrace.trainers.diagnosis import diagnose
from routetrace.trainers.replay import collate, replay
from support.models.routing_truth import (
    RecordingAgent,
    Truth,
    chosen_again,
    padded,
    routers,
)
from support.models.tiny_models import FAMILIES, VOCABULARY, tiny_model
from support.ranks.rank_rows import facts_of, random_choices, rows_of

BATCH, SEQ = 3, 8


@pytest.fixture(autouse=True)
def _nothing_stays() -> Iterator[None]:
    """No hook, mode, gradient or training mode survives a test."""
    yield
    assert not _get_current_function_mode_stack()
    for family in FAMILIES:
        for seed in (0, 1):
            model, _ = tiny_model(family, seed)
            model.zero_grad()
            model.eval()
            for module in model.modules():
                assert not module._forward_hooks
                assert not module._forward_pre_hooks


def tokens(seed: int = 0) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (BATCH, SEQ), generator=torch.Generator().manual_seed(seed))


def routed(model: Any, layout: ModelLayout, input_ids: torch.Tensor) -> np.ndarray:
    """The model's own ids [tokens, L, K]."""
    with Truth(model, layout) as truth, torch.no_grad():
        model(input_ids=input_ids)
    return truth.rows(0)


def forced_ids(layout: ModelLayout, seed: int = 0) -> np.ndarray:
    keys = np.random.default_rng(seed).random(
        (BATCH * SEQ, len(layout.layer_ids), layout.num_experts)
    )
    return keys.argsort(axis=-1)[..., : layout.top_k]


def gradients(model: Any) -> dict[str, torch.Tensor]:
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


# ---------------------------------------------------------------- ids, weights, gradients


@pytest.mark.parametrize("family", FAMILIES)
def test_replaying_its_own_choice_changes_nothing(family: str) -> None:
    model, layout = tiny_model(family)
    own = routed(model, layout, tokens())
    with torch.no_grad():
        expected = model(input_ids=tokens()).logits
        with replay(model, own, layer_ids=layout.layer_ids, compare=True) as r:
            logits = model(input_ids=tokens()).logits
    assert float((logits - expected).abs().max()) == 0
    assert r.disagreement == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_given_ids_are_used_and_routers_learn(family: str) -> None:
    model, layout = tiny_model(family)
    # Of the same model with other weights: group-limited routers could choose them, too.
    given_ids = routed(*tiny_model(family, seed=1), tokens())
    with (
        Truth(model, layout) as truth,
        replay(model, given_ids, layer_ids=layout.layer_ids, compare=True) as r,
    ):
        model(input_ids=tokens()).logits.pow(2).mean().backward()
    np.testing.assert_array_equal(truth.rows(0), given_ids)
    assert r.disagreement is not None
    assert 0.5 < r.disagreement <= 1
    for router in routers(model, layout):
        grad = router.weight.grad
        assert grad is not None
        assert float(grad.abs().sum()) > 0
    for router, hidden, weights, chosen in zip(
        routers(model, layout), truth.hidden, truth.weights, truth.passes[0], strict=True
    ):
        at_ids = weights_at(family, model.config, router, hidden, torch.from_numpy(chosen))
        torch.testing.assert_close(weights, at_ids.detach())


def weights_at(
    family: str, config: Any, router: Any, hidden: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    """The weights of these experts by the formula of the family, written out."""
    bias = router.bias if family == "gpt_oss" else None
    scores = torch.nn.functional.linear(hidden.flatten(0, -2), router.weight, bias)
    if family == "gpt_oss":
        return scores.gather(1, ids).softmax(dim=-1)
    if family in ("deepseek_v3", "glm4_moe"):
        at_ids = scores.sigmoid().gather(1, ids)
        return at_ids / at_ids.sum(dim=-1, keepdim=True) * config.routed_scaling_factor
    at_ids = scores.softmax(dim=-1).gather(1, ids)
    if family == "deepseek_v2":
        return at_ids * config.routed_scaling_factor
    if getattr(config, "norm_topk_prob", True):  # Mixtral has no such option, and divides
        return at_ids / at_ids.sum(dim=-1, keepdim=True)
    return at_ids


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_a_model_that_has_no_choice(family: str) -> None:
    model, layout = tiny_model(family)
    ids = routed(*tiny_model(family, seed=1), tokens())

    def train() -> dict[str, torch.Tensor]:
        model(input_ids=tokens()).logits.pow(2).mean().backward()
        return gradients(model)

    with replay(model, ids, layer_ids=layout.layer_ids):
        found = train()

    def wire(router: Any, experts: Any, block: Any, column: int) -> list[Any]:
        """Give the experts the ids, and weights that the test computes from the block's input."""
        inputs: list[torch.Tensor] = []
        wanted = torch.from_numpy(ids[:, column])

        def of_experts(_module: Any, args: Any) -> Any:
            weights = weights_at(family, model.config, router, inputs.pop(), wanted)
            return args[0], wanted, weights

        return [
            block.register_forward_pre_hook(lambda _module, args: inputs.append(args[0])),
            experts.register_forward_pre_hook(of_experts),
        ]

    handles = []
    for column, router in enumerate(routers(model, layout)):
        block = model.model.layers[layout.layer_ids[column]].mlp
        handles += wire(router, block.experts, block, column)
    expected = train()
    for handle in handles:
        handle.remove()
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        torch.testing.assert_close(
            found[name], grad, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing")
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_gradients_are_the_same_under_checkpointing(family: str, use_reentrant: bool) -> None:
    shared, layout = tiny_model(family)
    model = copy.deepcopy(shared)  # the library leaves a hook behind
    ids = forced_ids(layout)

    def train() -> dict[str, torch.Tensor]:
        with replay(model, ids, layer_ids=layout.layer_ids):
            with torch.no_grad():  # the old log-probabilities
                model(input_ids=tokens())
            model(input_ids=tokens(), use_cache=False).logits.pow(2).mean().backward()
        return gradients(model)

    model.train()
    expected = train()
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    model.enable_input_require_grads()
    with Truth(model, layout) as truth:
        found = train()
    # Recomputed in the backward pass, last layer first, with the same ids.
    layers = [cells for one in truth.passes for cells in one]
    assert len(layers) == 3 * len(layout.layer_ids)
    for i, cells in enumerate(layers):
        column = i if i < 2 * len(layout.layer_ids) else -1 - i
        np.testing.assert_array_equal(cells, ids[:, column % len(layout.layer_ids)])
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        torch.testing.assert_close(
            found[name], grad, rtol=1e-5, atol=1e-7, msg=lambda m, n=name: f"{n}: {m}"
        )


# ---------------------------------------------------------------- the mask


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "deepseek_v2", "olmoe"])
@pytest.mark.parametrize("by_layer", [True, False])
def test_the_model_s_own_router_decides_where_the_mask_is_false(
    family: str, by_layer: bool
) -> None:
    model, layout = tiny_model(family)
    rng = np.random.default_rng(4)
    ids = forced_ids(layout)
    shape = ids.shape[:2] if by_layer else ids.shape[:1]
    valid = rng.random(shape) < 0.6
    ids[~valid] = -7  # padding of whatever kind
    mask = np.broadcast_to(valid if by_layer else valid[:, None], ids.shape[:2])
    batch = ids.reshape(BATCH, SEQ, *ids.shape[1:])
    batch_valid = torch.from_numpy(valid.reshape(BATCH, SEQ, *valid.shape[1:]))
    with (
        torch.no_grad(),
        Truth(model, layout) as truth,
        replay(model, batch, layer_ids=layout.layer_ids, valid=batch_valid, compare=True) as r,
    ):
        model(input_ids=tokens())
    live = chosen_again(model, layout, truth.hidden)
    used = truth.rows(0)
    np.testing.assert_array_equal(used[mask], ids[mask])
    np.testing.assert_array_equal(used[~mask], live[~mask])
    differing = (np.sort(live, axis=-1) != np.sort(used, axis=-1)).any(axis=-1)
    assert r.disagreement == pytest.approx(differing[mask].mean())


def test_layers_may_come_in_any_order() -> None:
    model, layout = tiny_model("qwen2_moe")
    ids = forced_ids(layout)
    reverse = torch.from_numpy(ids[:, ::-1].copy())
    with (
        torch.no_grad(),
        Truth(model, layout) as truth,
        replay(model, reverse, layer_ids=[2, 0]) as r,
    ):
        model(input_ids=tokens())
    np.testing.assert_array_equal(truth.rows(0), ids)
    assert r.disagreement is None


# ---------------------------------------------------------------- rows of a plan


def planned(
    layout: ModelLayout, *, packed: bool = False, flatten: Any = "batch", missing: float = 0.2
) -> Rows:
    """Rows of random choices for `tokens()`, or for as many in one packed lane."""
    lengths = [8, 5, 3]
    samples = [Sample.of(f"r{i}", n) for i, n in enumerate(lengths)]
    if packed:
        batch = MicroBatch.packed(samples, total_len=BATCH * SEQ)
    else:
        batch = MicroBatch.padded(samples, SEQ, padding_side="left")
    plan = FetchPlan.make(layout, batch, Rank(layout.layer_ids, flatten=flatten))
    shape = (SEQ, len(layout.layer_ids))
    ids = [random_choices(shape, layout.num_experts, layout.top_k, i) for i in range(BATCH)]
    reads = tuple(facts_of(layout, [(0, 3, 7), (3, SEQ, 8)]) for _ in plan.reads)
    return rows_of(plan, ids, missing, reads)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("packed", [True, False])
def test_rows_of_a_plan_are_used_where_they_are_valid(family: str, packed: bool) -> None:
    model, layout = tiny_model(family)
    rows = planned(layout, packed=packed)
    assert 0 < rows.valid.mean() < 0.6
    before = rows.topk_ids.copy()
    input_ids = tokens().reshape(1, -1) if packed else tokens()
    with (
        torch.no_grad(),
        Truth(model, layout) as truth,
        replay(model, rows, compare=True) as r,
    ):
        assert r.num_tokens == BATCH * SEQ
        assert r.trainer_ids is None
        assert r.agreement == Agreement()
        for ids in (input_ids.flip(-1), input_ids):  # the latest pass counts
            model(input_ids=ids)
    live = chosen_again(model, layout, truth.hidden).transpose(1, 0, 2)
    used = truth.rows(1).transpose(1, 0, 2)
    valid = rows.valid
    # Group-limited routers are made to choose what they could not.
    np.testing.assert_array_equal(used[valid], rows.topk_ids[valid])
    np.testing.assert_array_equal(used[~valid], live[~valid])
    np.testing.assert_array_equal(rows.topk_ids, before)
    assert r.trainer_ids is not None
    np.testing.assert_array_equal(r.trainer_ids, live)
    assert r.agreement == compare(rows, live)
    assert r.agreement.fallback_tokens > 0
    assert set(r.agreement.by_version) == {7, 8}
    assert r.disagreement == r.agreement.disagreement


def test_rows_of_a_plan_are_not_copied() -> None:
    for family in ("qwen3_moe", "qwen3_moe_300"):
        model, layout = tiny_model(family)
        rows = planned(layout)
        with replay(model, rows) as r:
            for column, forcer in enumerate(r._forcers):
                assert np.shares_memory(forcer.ids.numpy(), rows.topk_ids[column])
                assert np.shares_memory(forcer.valid.numpy(), rows.valid[column])
            with torch.no_grad():
                model(input_ids=tokens())
        rows.topk_ids.flags.writeable = rows.valid.flags.writeable = False
        with replay(model, rows), torch.no_grad():  # such memory has to be copied
            model(input_ids=tokens())


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_pinned_rows_may_be_overwritten_after_the_block() -> None:
    shared, layout = tiny_model("qwen3_moe")
    model = copy.deepcopy(shared).cuda()
    rows = planned(layout)
    pinned = torch.from_numpy(rows.topk_ids.copy()).pin_memory()
    chosen: list[torch.Tensor] = []
    for router in routers(model, layout):
        router.register_forward_hook(lambda _m, _a, out: chosen.append(out[2]))
    with (
        torch.no_grad(),
        replay(model, changed(rows, topk_ids=pinned.numpy()), compare=True) as r,
    ):
        torch.cuda._sleep(10**9)  # the device is behind
        model(input_ids=tokens().cuda())
    pinned.zero_()
    used = torch.stack(chosen).cpu().numpy()
    np.testing.assert_array_equal(used[rows.valid], rows.topk_ids[rows.valid])
    assert r.agreement == compare(rows, r.trainer_ids)


class WideRouter(torch.nn.Module):
    """Chooses 2 of 40,000 experts: ids that int16 cannot hold."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(40_000, 4))

    def forward(self, x: torch.Tensor) -> Any:
        return torch.topk(x @ self.weight.T, 2, dim=-1)


def test_ids_above_32767() -> None:
    layout = ModelLayout((0,), 1, 40_000, 2)
    router = WideRouter()
    decoder = torch.nn.Module()
    decoder.layers = torch.nn.ModuleList([router])
    decoder.layers[0] = torch.nn.ModuleDict({"gate": router})
    model = SimpleNamespace(get_decoder=lambda: decoder)
    plan = FetchPlan.make(
        layout, MicroBatch.packed([Sample.of("r", 9)]), Rank([0], flatten="batch")
    )
    own = random_choices((9, 1), 40_000, 2, 0)
    own[0, 0], own[1, 0] = [39_999, 32_768], [32_767, 0]
    rows = rows_of(plan, [own])
    x = torch.randn(9, 4)
    with torch.no_grad():
        live = router(x).indices
        for given_ids, valid in ((rows, None), (own, rows.valid[0])):
            layer_ids = None if given_ids is rows else [0]
            with replay(
                model, given_ids, layer_ids=layer_ids, valid=valid, compare=True, layout=layout
            ) as r:
                used = router(x).indices
            np.testing.assert_array_equal(used[:8], own[:8, 0])
            assert torch.equal(used[8], live[8])  # the last token has no row
            assert r.trainer_ids is not None
            assert torch.equal(r.trainer_ids[0].long(), live)
            assert r.disagreement == 1


def test_what_replay_refuses_of_rows() -> None:
    model, layout = tiny_model("qwen2_moe")
    rows = planned(layout)
    refused("layer_ids", rows, layer_ids=layout.layer_ids)
    refused("valid", rows, layer_ids=None, valid=rows.valid)
    refused("layer_ids", rows.layers([2]), layer_ids=None)
    refused("layer_ids", layer_ids=None)
    error = refused("plan", planned(layout, flatten="sequence"), layer_ids=None)
    assert 'Rank(flatten="batch")' in error.expected
    replay(model, planned(layout, flatten="sequence", packed=True))  # one lane: the same
    other = ModelLayout(layout.layer_ids, layout.num_hidden_layers, 9, layout.top_k)
    refused("plan.layout", planned(other), layer_ids=None)
    column, token = np.argwhere(rows.valid)[5]
    for bad in ([8, 1], [3, 3]):
        spoilt = rows.topk_ids.copy()
        spoilt[column, token] = bad
        error = refused("topk_ids", changed(rows, topk_ids=spoilt), layer_ids=None)
        assert error.value == f"{bad} for token {token} at layer {layout.layer_ids[column]}"


def test_wrong_rows_show_in_the_comparison() -> None:
    model, layout = tiny_model("qwen3_moe")
    input_ids = torch.randint(3, VOCABULARY, (1, 100), generator=torch.Generator().manual_seed(3))
    own = routed(model, layout, input_ids)
    plan = FetchPlan.make(
        layout, MicroBatch.packed([Sample.of("r", 100)]), Rank(layout.layer_ids, flatten="batch")
    )
    for ids, words in ((own, None), (np.roll(own, 1, axis=0), "rows look shifted by +1 token: ")):
        rows = rows_of(plan, [ids.astype(np.uint8)])
        with torch.no_grad(), replay(model, rows, compare="only") as r:
            model(input_ids=input_ids)
        said = diagnose(rows, r.trainer_ids)
        assert said == words if words is None else (said or "").startswith(words)


@pytest.mark.parametrize("family", FAMILIES)
def test_only_to_compare_changes_nothing(family: str) -> None:
    model, layout = tiny_model(family)
    own = routed(model, layout, tokens())
    rows = planned(layout)
    with torch.no_grad():
        expected = model(input_ids=tokens()).logits
        with replay(model, rows, compare="only") as r:
            assert torch.equal(model(input_ids=tokens()).logits, expected)
            with pytest.raises(InvalidArgument, match=r"24 tokens; expected 10 tokens"):
                model(input_ids=tokens()[:2, :5])
    np.testing.assert_array_equal(r.trainer_ids, own.transpose(1, 0, 2))
    assert r.agreement == compare(rows, own.transpose(1, 0, 2))


def test_ids_and_rows_of_a_plan_are_replayed_the_same() -> None:
    model, layout = tiny_model("qwen3_moe")
    rows = planned(layout)
    ids = rows.topk_ids.transpose(1, 0, 2).copy()
    logits = []
    with torch.no_grad():
        with replay(model, rows, compare=True) as of_rows:
            logits.append(model(input_ids=tokens()).logits)
        valid = rows.valid.T.copy()
        with replay(model, ids, layer_ids=rows.layer_ids, valid=valid, compare=True) as of_ids:
            logits.append(model(input_ids=tokens()).logits)
    assert torch.equal(*logits)
    assert of_ids.agreement.by_layer == of_rows.agreement.by_layer
    # What was planned is not known of arrays.
    assert of_ids.agreement.planned_cells == of_ids.agreement.placed_tokens == 0


# ---------------------------------------------------------------- what is refused


def refused(field: str, ids: Any = None, **kwargs: Any) -> InvalidArgument:
    model, layout = tiny_model("qwen2_moe")
    ids = forced_ids(layout) if ids is None else ids
    with pytest.raises(InvalidArgument) as caught:
        replay(kwargs.pop("model", model), ids, **{"layer_ids": layout.layer_ids, **kwargs})
    assert caught.value.field == field
    return caught.value


def test_what_replay_refuses() -> None:
    layout = tiny_model("qwen2_moe")[1]
    ids = forced_ids(layout)
    assert "[0, 2]" in refused("layer_ids", layer_ids=[0, 1]).expected
    refused("layer_ids", ids[:, :1], layer_ids=[0])
    refused("layer_ids", layer_ids=[0, 0])
    refused("topk_ids", ids[..., :1])
    refused("topk_ids", ids[:, :1])
    refused("topk_ids", ids.astype(np.float32))
    refused("topk_ids", ids[0])
    refused("compare", compare="never")
    refused("valid", valid=np.ones(5, dtype=bool))
    refused("valid", valid=np.ones(ids.shape[:2]))
    for bad, value in ((8, "8]"), (-1, "[-1"), (None, "")):
        spoilt = ids.copy()
        spoilt[3, 1, 0] = spoilt[3, 1, 1] if bad is None else bad
        error = refused("topk_ids", spoilt)
        assert "token 3 at layer 2" in error.value
        assert value in error.value.replace("[8,", "8]")
        valid = np.ones(ids.shape[:2], dtype=bool)
        valid[3, 1] = False
        replay(*tiny_model("qwen2_moe")[:1], spoilt, layer_ids=(0, 2), valid=valid)


def test_a_model_without_routers_is_refused() -> None:
    model, layout = tiny_model("qwen2_moe")
    wrong = ModelLayout((0, 1, 2), 3, 8, 2)
    error = refused("model", forced_ids(wrong), layer_ids=(0, 1, 2), layout=wrong)
    assert "none found on layers [1]" in error.expected


def test_another_number_of_tokens_is_refused_in_the_pass() -> None:
    model, layout = tiny_model("mixtral")
    with replay(model, forced_ids(layout), layer_ids=layout.layer_ids):
        with pytest.raises(InvalidArgument, match=r"24 tokens; expected 10 tokens"):
            model(input_ids=tokens()[:2, :5])
        model(input_ids=tokens())  # the right ones still go


def test_a_router_that_does_not_choose_by_one_topk_is_refused() -> None:
    model, layout = tiny_model("mixtral")
    own = routed(model, layout, tokens())
    router = routers(model, layout)[1]
    original = router.forward

    def twice(x: torch.Tensor) -> Any:
        original(x)
        return original(x)

    def otherwise(x: torch.Tensor) -> Any:
        logits = torch.nn.functional.linear(x, router.weight)
        ids = logits.argsort(dim=-1, descending=True)[:, : layout.top_k]
        return logits, logits.gather(1, ids), ids

    try:
        for calls, forward in ((2, twice), (0, otherwise)):
            router.forward = forward
            with (
                replay(model, forced_ids(layout), layer_ids=layout.layer_ids),
                pytest.raises(InvalidArgument, match=f"layers.1 is .* {calls} calls"),
            ):
                model(input_ids=tokens())
        # A router that looks its experts up does no harm where it finds the given ones.
        with replay(model, own, layer_ids=layout.layer_ids):
            model(input_ids=tokens())
    finally:
        del router.forward


def test_a_router_that_raises_leaves_no_mode_behind() -> None:
    model, layout = tiny_model("mixtral")
    router = routers(model, layout)[1]

    def forward(_: torch.Tensor) -> Any:
        raise RuntimeError("broken router")

    router.forward = forward
    try:
        with replay(model, forced_ids(layout), layer_ids=layout.layer_ids):
            with pytest.raises(RuntimeError, match="broken router"):
                model(input_ids=tokens())
            assert not _get_current_function_mode_stack()
    finally:
        del router.forward


# ---------------------------------------------------------------- traces


@settings(max_examples=60)
@given(data=st.data())
def test_collate_puts_every_row_where_its_token_is(data: st.DataObject) -> None:
    num_layers, top_k = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    side = data.draw(st.sampled_from(["left", "right"]))
    lens = data.draw(st.lists(st.integers(0, 7), min_size=1, max_size=4))
    seq_len = max(lens) + data.draw(st.integers(0, 3))
    dtype = data.draw(st.sampled_from([np.uint8, np.uint16]))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    traces = []
    for length in lens:
        start = data.draw(st.integers(0, 3))
        count = data.draw(st.integers(0, length + 2))
        ids = rng.integers(0, 200, (num_layers, count, top_k), dtype=dtype).transpose(1, 0, 2)
        valid = rng.random((num_layers, count)).T < 0.8
        layers = tuple(range(num_layers))
        traces.append(
            SimpleNamespace(topk_ids=ids, valid=valid, layer_ids=layers, token_start=start)
        )
    narrow = data.draw(st.sampled_from([torch.int64, torch.uint8]))
    ids, valid = collate(traces, lens, seq_len, padding_side=side, dtype=narrow)
    assert ids.shape == (len(lens), seq_len, num_layers, top_k)
    assert ids.dtype == narrow
    for i, (trace, length) in enumerate(zip(traces, lens, strict=True)):
        for column in range(seq_len):
            position = column - (seq_len - length if side == "left" else 0)
            row = position - trace.token_start
            if 0 <= position < length and 0 <= row < len(trace.topk_ids):
                np.testing.assert_array_equal(ids[i, column], trace.topk_ids[row])
                np.testing.assert_array_equal(valid[i, column], trace.valid[row])
            else:
                assert not valid[i, column].any()


def test_what_collate_refuses() -> None:
    def trace(layers: tuple[int, ...], top_k: int = 2) -> Any:
        shape = (4, len(layers), top_k)
        return SimpleNamespace(
            topk_ids=np.zeros(shape, np.uint8),
            valid=np.ones(shape[:2], bool),
            layer_ids=layers,
            token_start=0,
        )

    a = trace((0, 1))
    for field, traces, lens, kwargs in (
        ("token_lens", [a, a], [5], {}),
        ("token_lens", [], [], {}),
        ("token_lens[1]", [a, a], [6, 7], {}),
        ("traces[1]", [a, trace((0, 2))], [6, 6], {}),
        ("traces[1]", [a, trace((0, 1), 3)], [6, 6], {}),
        ("padding_side", [a, a], [6, 5], {}),
        ("padding_side", [a], [5], {"padding_side": "middle"}),
    ):
        with pytest.raises(InvalidArgument) as caught:
            collate(traces, lens, 6, **kwargs)  # type: ignore[arg-type]
        assert caught.value.field == field


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_rollout_is_replayed_in_training(side: str) -> None:
    """Captured from a padded batch, replayed in a differently padded one of a drifted model."""
    model, layout = tiny_model("qwen3_moe")
    trainer, _ = tiny_model("qwen3_moe", seed=1)
    agent = RecordingAgent(layout)
    ids = ["a", "b", "c"]
    TransformersCapture(model, agent, layout=layout).generate(
        *padded([[3, 4, 5, 6], [7], [8, 9]]), request_ids=ids, max_new_tokens=6, do_sample=True
    )
    told = [agent.requests[i] for i in ids]
    traces = [
        SimpleNamespace(
            topk_ids=agent.trace(i),
            valid=np.ones(agent.trace(i).shape[:2], dtype=bool),
            layer_ids=layout.layer_ids,
            token_start=0,
        )
        for i in ids
    ]
    input_ids, mask = padded([t.tokens for t in told], side)
    lens = [len(t.tokens) for t in told]
    topk_ids, valid = collate(traces, lens, input_ids.shape[1], padding_side=side)  # type: ignore[arg-type]
    with (
        Truth(trainer, layout) as truth,
        replay(trainer, topk_ids, layer_ids=layout.layer_ids, valid=valid, compare=True) as r,
    ):
        trainer(input_ids=input_ids, attention_mask=mask).logits.mean().backward()
    used = truth.rows(0).reshape(topk_ids.shape)
    for i, request_id in enumerate(ids):
        columns = np.flatnonzero(mask[i].numpy())[:-1]
        np.testing.assert_array_equal(used[i, columns], agent.trace(request_id))
    assert r.disagreement is not None
    assert r.disagreement > 0.5
