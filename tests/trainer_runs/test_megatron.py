"""Replay in one process: whose rows a pass takes, what comes of it, what is left behind."""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("megatron.core")
from trainer_runs import megatron_cpu  # isort: skip  # noqa: F401  # first of all of megatron

from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

from routetrace.capture_agent import AgentConfig, CaptureAgent
from routetrace.client import RouteClient
from routetrace.client.plan import MicroBatch, Sample
from routetrace.client.rows import Rows
from routetrace.common.errors import InvalidArgument
from routetrace.common.layout import ModelLayout
from routetrace.server.testing import run_server
from routetrace.trainers.megatron import local_layer_ids, local_rank, replay
from trainer_runs.megatron_model import EXPERTS, LAYERS, MOE_LAYERS, TOP_K, Observer
from trainer_runs.megatron_passes import FULL, check, forward, make_model, make_rows, tokens

DOCS = Path(__file__).parents[2] / "docs" / "trainers.md"


def test_layers_count_from_zero_and_drafts_are_left_out() -> None:
    model = make_model(mtp_num_layers=1)
    assert local_layer_ids(model) == local_layer_ids([model]) == MOE_LAYERS
    rank = local_rank(model)
    assert (rank.layer_ids, rank.cp_size, rank.sp_size) == (MOE_LAYERS, 1, 1)
    with pytest.raises(InvalidArgument, match="two routers of layer 1"):
        local_layer_ids([model, model])


def test_only_the_given_model_replays() -> None:
    orphan, model, drafting = make_model(), make_model(), make_model(mtp_num_layers=1)
    before = list(RouterReplay.global_router_replay_instances)
    routers = [m for m in model.modules() if hasattr(m, "router_replay")]
    orphans = [m for m in orphan.modules() if hasattr(m, "router_replay")]
    drafts = [m for m in drafting.mtp.modules() if hasattr(m, "router_replay")]
    own = [m.router_replay for m in routers]
    others = [m.router_replay for m in [*orphans, *drafts]]
    assert len(routers) == len(orphans) == 3
    assert len(drafts) == 1
    with replay(model, [make_rows(0)]), replay(drafting, [make_rows(0)]):
        assert not {m.router_replay for m in routers} & set(own)
        assert [m.router_replay for m in [*orphans, *drafts]] == others
        forward(model, 0)
        drafting(tokens(0), tokens(0), None, labels=tokens(0)).sum().backward()
    assert [m.router_replay for m in routers] == own
    assert RouterReplay.global_router_replay_instances == before
    for instance in before:
        assert instance.target_topk_idx is None
        assert instance.replay_backward_list == []
        assert instance.router_replay_action is None


@settings(max_examples=25)
@given(st.data())
def test_each_pass_and_its_recomputation_take_the_rows_of_their_micro_batch(data: Any) -> None:
    config = data.draw(
        st.sampled_from(
            [{}, FULL, {"recompute_granularity": "selective", "recompute_modules": ["moe"]}]
        )
    )
    model = make_model(**config)
    observer = Observer([model])
    count = data.draw(st.integers(1, 4))
    rows = [make_rows(n, share=data.draw(st.sampled_from([0, 0.5, 1]))) for n in range(count)]
    waiting: dict[int, torch.Tensor] = {}
    started = recomputed = 0
    with replay(model, rows if data.draw(st.booleans()) else iter(rows)):
        while started < count or waiting:
            todo = sorted(waiting) + ["forward"] * (started < count)
            step = data.draw(st.sampled_from(todo))
            if step != "forward":
                waiting.pop(step).float().pow(2).mean().backward()
                recomputed += bool(config)
                continue
            with torch.set_grad_enabled(data.draw(st.booleans())):
                output = forward(model, started)
            if output.requires_grad:
                waiting[started] = output
            started += 1
    assert check(observer, rows) == len(MOE_LAYERS) * (count + recomputed)


def test_recomputation_keeps_what_the_live_router_chose() -> None:
    model = make_model(**FULL, moe_input_jitter_eps=0.9)
    observer = Observer([model])
    with replay(model, [make_rows(3, share=0.3)]):
        forward(model, 0).float().pow(2).mean().backward()
    half = len(MOE_LAYERS)
    again = {seen.layer: seen.used for seen in observer.seen[half:]}
    assert len(again) == half
    for seen in observer.seen[:half]:
        assert torch.equal(seen.used, again[seen.layer])


@pytest.mark.parametrize("config", [{}, FULL], ids=["kept", "recomputed"])
@pytest.mark.parametrize(
    "scores",
    [
        {},
        {"moe_router_pre_softmax": True, "moe_router_topk_scaling_factor": 2.5},
        {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True},
        {"moe_router_score_function": "sigmoid", "moe_router_num_groups": 4,
         "moe_router_group_topk": 2},
    ],
    ids=["softmax", "pre-softmax", "sigmoid with bias", "groups"],
)  # fmt: skip
def test_gradients_are_those_of_megatrons_own_replay(config: Any, scores: Any) -> None:
    rows = make_rows(5, share=1)
    mine, own = make_model(**config, **scores), make_model(**scores)
    with replay(mine, [rows]):
        forward(mine, 0).float().pow(2).mean().backward()
    for layer, ids in zip(rows.layer_ids, rows.topk_ids, strict=True):
        router = own.decoder.layers[layer].mlp.router
        router.router_replay.set_target_indices(torch.from_numpy(ids.astype(np.int64)))
        router.router_replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    forward(own, 0).float().pow(2).mean().backward()
    for (name, a), (_, b) in zip(mine.named_parameters(), own.named_parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), name
        assert a.grad is None or torch.equal(a.grad, b.grad), name
    assert mine.decoder.layers[1].mlp.router.weight.grad.abs().sum() > 0


def test_disagreement_counts_sets_that_differ_where_rows_are_valid() -> None:
    model = make_model(**FULL)
    observer = Observer([model])
    rows = [make_rows(0), make_rows(1)]
    with replay(model, rows, compare=True) as context:
        assert context.disagreement is None
        forward(model, 0).float().mean().backward()
        with torch.no_grad():
            forward(model, 1)
    differing = compared = 0
    first = observer.seen[: len(MOE_LAYERS)] + observer.seen[-len(MOE_LAYERS) :]
    for seen, mine in zip(first, [rows[0]] * 3 + [rows[1]] * 3, strict=True):
        valid = torch.from_numpy(mine.valid[mine.layer_ids.index(seen.layer)])
        differing += int(((seen.used != seen.live).any(1) & valid).sum())
        compared += int(valid.sum())
    assert context.disagreement == differing / compared > 0


def test_many_experts() -> None:
    model = make_model(num_moe_experts=300)
    observer = Observer([model])
    rows = [make_rows(0, experts=300)]
    with replay(model, rows):
        forward(model, 0)
    assert check(observer, rows) == 3


def test_nothing_is_asked_of_a_model_that_does_not_route() -> None:
    stage = torch.nn.Linear(1, 1)
    assert local_rank(stage).layer_ids == ()
    with replay(stage, iter([None])) as context:  # type: ignore[list-item]
        stage(torch.ones(1))
    assert context.disagreement is None


class _Wrapped(torch.nn.Module):
    """As data parallelism and mixed precision wrap models."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any) -> torch.Tensor:
        output: torch.Tensor = self.module.forward(*args)
        return output.double()


def test_wrapped_models() -> None:
    inner = make_model(**FULL)
    model = _Wrapped(_Wrapped(inner))
    observer = Observer([inner])
    assert local_layer_ids(model) == MOE_LAYERS
    rows = [make_rows(0)]
    with replay([model], rows):
        with pytest.raises(InvalidArgument, match="outside of a forward pass of the given model"):
            forward(inner, 0)
        observer.seen.clear()
        forward(model, 0).mean().backward()
    assert check(observer, rows) == 2 * len(MOE_LAYERS)


@pytest.mark.parametrize("training", [False, True])
def test_rows_are_let_go_once_they_are_used(training: bool) -> None:
    model = make_model(**FULL)
    left = []

    def rows() -> Iterator[Rows]:
        for number in range(3):
            new = make_rows(number)
            left.append(weakref.ref(new))
            yield new
            del new

    with replay(model, rows()), torch.set_grad_enabled(training):
        outputs = [forward(model, number) for number in range(3)]
        gc.collect()
        assert [ref() for ref in left[:2]] == [None, None]
    assert [output.requires_grad for output in outputs] == 3 * [training]


@pytest.mark.parametrize("source", ["docs", "example"])
def test_the_snippet_of_the_docs_and_the_example(source: str, monkeypatch: Any) -> None:
    layout = ModelLayout(MOE_LAYERS, LAYERS, EXPERTS, TOP_K)
    model = make_model(**FULL)
    observer = Observer([model])
    lengths = [5, 9, 2, 7]
    keys = np.random.default_rng(4).random((len(lengths), max(lengths), 3, EXPERTS))
    truth = keys.argsort(-1)[..., :TOP_K]
    texts = [np.arange(n) + 1 + 100 * i for i, n in enumerate(lengths)]
    samples = [Sample.of(f"s{i}", token_ids=text) for i, text in enumerate(texts)]
    padded = [np.pad(text, (0, -len(text) % 4)) for text in texts]
    section = DOCS.read_text("utf-8").split("\n## Megatron-Core\n")[1].split("\n## ")[0]
    snippet = "".join(re.findall(r"^```python\n(.*?)^```", section, re.M | re.S))
    with run_server() as server, RouteClient(server.target) as client:
        config = AgentConfig(target=server.target, engine_id="e0", layout=layout)
        with CaptureAgent(config) as agent:
            for name, text in enumerate(texts):
                request = agent.begin(f"s{name}", prompt_token_ids=text[:1], prompt_len=1)
                agent.step(truth[name, : len(text) - 1], [(request, 0, len(text) - 1)])
                agent.finish(request, len(text), token_ids=text)
        names = {
            "client": client,
            "layout": layout,
            "model": model,
            "micro_batches": [samples[:2], samples[2:]],
            "data": iter([np.concatenate(padded[:2]), np.concatenate(padded[2:])]),
            "forward_step": _packed_step,
            "seq_length": 20,
        }
        if source == "docs":
            exec(compile(snippet, str(DOCS), "exec"), names)
        else:
            monkeypatch.syspath_prepend(str(DOCS.parents[1] / "examples"))
            from stories import replay_in_megatron

            batches = [MicroBatch.packed(some, align=4) for some in names["micro_batches"]]
            replay_in_megatron(client, model, layout, batches, _schedule(names))
    assert len(observer.seen) == 2 * 2 * 3  # forward and again, two batches, three layers
    for seen in observer.seen:
        for serial, used, live in zip(seen.serials.tolist(), seen.used, seen.live, strict=True):
            sample, position = divmod(serial - 1, 100)
            if serial and position < lengths[sample] - 1:
                ids = truth[sample, position, layout.column[seen.layer]]
                assert used.nonzero().flatten().tolist() == sorted(ids.tolist())
            else:
                assert torch.equal(used, live)


def _schedule(names: dict[str, Any]) -> Callable[[], Any]:
    return partial(
        get_forward_backward_func(),
        forward_step_func=names["forward_step"],
        data_iterator=names["data"],
        model=names["model"],
        num_microbatches=2,
        seq_length=names["seq_length"],
        micro_batch_size=1,
        forward_only=False,
    )


def _packed_step(batches: Iterator[np.ndarray], model: Any) -> Any:
    ids = torch.from_numpy(next(batches))[None]
    return model(ids, ids, None), lambda output: (output.float().pow(2).mean(), {})
