"""verl's own code, on what `dialects.verl` makes: each row is where it must be.

Needs no GPU: the agent loop's output, the step to jagged batches, Megatron's replay (with its real
routers, over gloo), and VeOmni's, whose engine needs VeOmni and is not run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from trainer_runs import megatron_cpu  # isort: skip  # first of all

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import scatter_to_sequence_parallel_region
from megatron.core.transformer.moe.router import TopKRouter
from tensordict import TensorDict
from verl.models.mcore.util import preprocess_packed_seqs, preprocess_thd_engine
from verl.utils.megatron import router_replay_utils as replay
from verl.utils.megatron.router_replay_patch import (
    RouterReplay,
    RouterReplayAction,
    apply_router_replay_patch,
)
from verl.utils.veomni.router_replay import VeOmniRouterReplay
from verl.workers.utils.padding import left_right_2_no_padding

from routetrace.client import FetchPlan, MicroBatch, Rank, Sample
from routetrace.common.layout import ModelLayout
from routetrace.trainers.dialects import SampleRows, verl
from support.ranks.gloo_ranks import run_ranks
from support.ranks.rank_rows import random_choices, rows_of
from trainer_runs.megatron_model import EXPERTS, LAYERS, MOE_LAYERS, TOP_K, make_config

# Without an accelerator verl takes it for a process that shall not see its GPU.
replay.device_name = "cpu"

_LAYOUT = ModelLayout(MOE_LAYERS, LAYERS, EXPERTS, TOP_K)
_WITH_DENSE = ModelLayout((1, 2, 4), 6, EXPERTS, TOP_K)
_LENGTHS = (37, 1, 20, 2, 64, 33)
_PROMPTS = (9, 1, 19, 1, 5, 20)
_MANY = 1 << 12  # a token's serial number is sample * _MANY + position + 1; 0 is padding

Count = tuple[int, int, int]
"""Rows compared, wrong, of the live router."""


@dataclass(frozen=True)
class Layout:
    """Layout of tokens and layers in verl."""

    tp: int = 1
    """Tensor parallel, with sequence parallelism."""
    cp: int = 1
    pp: int = 1
    jagged: bool = True
    """Else [batch, seq] with an attention mask."""
    by_model: bool = True
    """Routers are those of a model, not those of verl's registry."""
    sliced: bool = False
    """By `set_targets` with the rows of the rank alone, some of them missing."""

    @property
    def ranks(self) -> int:
        return self.tp * self.cp * self.pp

    @property
    def name(self) -> str:
        words = [f"{n.upper()}{getattr(self, n)}" for n in ("tp", "cp", "pp")]
        words += ["jagged" if self.jagged else "padded", "model" if self.by_model else "registry"]
        words = [*words[:3], "sliced"] if self.sliced else words
        return f"verl Megatron {' '.join(words)}"


LAYOUTS = (
    Layout(),
    Layout(jagged=False),
    Layout(tp=2),
    Layout(cp=2),
    Layout(pp=2),
    Layout(pp=2, by_model=False),
    Layout(tp=2, cp=2),
    Layout(tp=2, cp=2, jagged=False),
    Layout(cp=4),
    Layout(tp=2, pp=2, by_model=False),
    Layout(sliced=True),
    Layout(cp=2, sliced=True),
    Layout(tp=2, cp=2, sliced=True),
    Layout(tp=2, pp=2, sliced=True),
)


def run() -> Iterator[tuple[str, int, int, int, int]]:
    """(what, ranks, rows compared, wrong, live rows)."""
    yield "verl agent loop", 1, *_agent_loop()
    yield "verl jagged batch", 1, *_jagged_batch()
    yield "verl VeOmni replay", 1, *_veomni()
    for world, group in groupby(sorted(LAYOUTS, key=lambda x: x.ranks), key=lambda x: x.ranks):
        layouts = list(group)
        ranks = run_ranks(world, _rank, layouts, timeout=150)
        for layout, found in zip(layouts, zip(*ranks, strict=True), strict=True):
            yield layout.name, world, *(sum(count) for count in zip(*found, strict=True))


def _samples(
    layout: ModelLayout, missing: float = 0.0
) -> tuple[list[np.ndarray], list[SampleRows]]:
    """The ids [N - 1, MoE layers, top_k] of each sample, and its rows."""
    batch = MicroBatch.packed([Sample.of(f"r{i}", n) for i, n in enumerate(_LENGTHS)])
    plan = FetchPlan.make(layout, batch, Rank(layout.layer_ids))
    shapes = [(n - 1, len(layout.moe_layer_ids)) for n in _LENGTHS]
    ids = [random_choices(s, EXPERTS, TOP_K, seed) for seed, s in enumerate(shapes)]
    return ids, rows_of(plan, ids, missing).per_sample()


def _compare(got: torch.Tensor, ids: np.ndarray, layout: ModelLayout) -> Count:
    """Rows [N, num_hidden_layers, top_k] of a sample against what they must be."""
    expected = np.zeros((len(ids) + 1, layout.num_hidden_layers, layout.top_k), int)
    expected[:-1, list(layout.moe_layer_ids)] = ids
    assert got.shape == expected.shape
    wrong = (got.numpy() != expected).any(axis=2)
    return wrong.size, int(wrong.sum()), 0


def _total(counts: list[Count]) -> Count:
    rows, wrong, live = (sum(count) for count in zip(*counts, strict=True))
    return rows, wrong, live


def _agent_loop() -> Count:
    # Here alone: every rank would pay for the import.
    from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput

    counts = []
    for ids, rows, prompt in zip(*_samples(_LAYOUT), _PROMPTS, strict=True):
        count = rows.num_tokens - prompt
        output = AgentLoopOutput(
            prompt_ids=[1] * prompt,
            response_ids=[2] * count,
            response_mask=[1] * count,
            metrics=AgentLoopMetrics(),
            routed_experts=verl.routed_experts(rows),
        )
        counts.append(_compare(output.as_dict()["routed_experts"], ids, _LAYOUT))
    return _total(counts)


def _padded(samples: list[SampleRows]) -> TensorDict:
    """A batch as the agent loop makes it: prompts padded on the left, answers on the right."""
    left, right = max(_PROMPTS), max(n - p for n, p in zip(_LENGTHS, _PROMPTS, strict=True))
    starts = [left - prompt for prompt in _PROMPTS]
    mask = torch.zeros(len(samples), left + right, dtype=torch.long)
    serials = torch.zeros_like(mask)
    for i, (start, length) in enumerate(zip(starts, _LENGTHS, strict=True)):
        mask[i, start : start + length] = 1
        serials[i, start : start + length] = i * _MANY + torch.arange(length) + 1
    return TensorDict(
        {
            "input_ids": serials,
            "attention_mask": mask,
            "response_mask": mask[:, left:],
            "position_ids": mask.cumsum(1) - 1,
            "routed_experts": torch.from_numpy(verl.batch(samples, starts, left + right)),
        },
        batch_size=len(samples),
    )


def _jagged_batch() -> Count:
    ids, samples = _samples(_LAYOUT)
    routed = left_right_2_no_padding(_padded(samples))["routed_experts"]
    return _total(
        [_compare(got, one, _LAYOUT) for got, one in zip(routed.unbind(), ids, strict=True)]
    )


def _veomni() -> Count:
    """As VeOmniEngineWithLMHead.prepare_model_inputs hands targets over, some rows missing."""
    ids, samples = _samples(_WITH_DENSE, missing=0.2)
    arrays = [
        torch.from_numpy(verl.routed_experts(s, missing="zeros", axis="moe")) for s in samples
    ]
    full = torch.cat([torch.cat([a, a.new_zeros(1, *a.shape[1:])]) for a in arrays])
    controller = VeOmniRouterReplay()
    controller.begin_replay()
    controller.begin_microbatch(targets=list(full.to(torch.int64).unbind(dim=1)))
    compared = wrong = live = 0
    routers = [torch.nn.Identity() for _ in _WITH_DENSE.moe_layer_ids]
    for layer in (0, 1, 2, 2, 1, 0):  # again, as activation checkpointing does
        native = torch.from_numpy(random_choices((len(full),), EXPERTS, TOP_K, 99 + layer)).long()
        got = controller.on_router_forward(routers[layer], native.float(), native).numpy()
        expected = native.numpy().copy()
        at = 0
        for one, sample in zip(ids, samples, strict=True):
            there = np.flatnonzero(sample.valid[layer])
            expected[at + there] = one[there, layer]
            at += sample.num_tokens
            live += sample.num_tokens - len(there)
        compared += len(got)
        wrong += int((got != expected).any(axis=1).sum())
    # As prepare_model_outputs demands after the forward pass.
    wrong += controller.num_fired != controller.num_targets
    return compared, wrong, live


def _rank(_rank: int, layouts: list[Layout]) -> list[Count]:
    with contextlib.redirect_stdout(None):  # it tells
        apply_router_replay_patch()
    found = []
    with megatron_cpu.OnCpu():
        for layout in layouts:
            parallel_state.initialize_model_parallel(
                layout.tp, layout.pp, context_parallel_size=layout.cp
            )
            found.append(_check(layout))
            parallel_state.destroy_model_parallel()
    return found


def _check(layout: Layout) -> Count:
    torch.manual_seed(0)
    config = make_config(
        tensor_model_parallel_size=layout.tp,
        sequence_parallel=layout.tp > 1,
        context_parallel_size=layout.cp,
        pipeline_model_parallel_size=layout.pp,
        moe_router_topk_scaling_factor=None,
    )
    stage = parallel_state.get_pipeline_model_parallel_rank()
    here = [i for i in MOE_LAYERS if i // (LAYERS // layout.pp) == stage]
    RouterReplay.router_instances.clear()
    model = torch.nn.ModuleList()
    for layer in here:
        groups = ProcessGroupCollection.use_mpu_process_groups()
        router = TopKRouter(config, pg_collection=groups)
        router.set_layer_number(layer + 1)
        model.append(router)
    ids, samples = _samples(_LAYOUT)
    serials = _set_replay_data(layout, config, model, samples)
    plan = _planned(layout, here, serials)
    if layout.sliced:
        rows = rows_of(plan, ids, missing=0.2)
        verl.set_targets(replay.iter_model_routers(model), rows)
        valid = rows.valid
    else:
        valid = np.tile(plan.planned, (len(here), 1))

    hidden = torch.randn(len(serials), 1, config.hidden_size)
    compared = wrong = live = 0
    for action in (RouterReplayAction.REPLAY_FORWARD, RouterReplayAction.REPLAY_BACKWARD):
        for layer, router, there in zip(here, model, valid, strict=True):
            router.router_replay.set_router_replay_action(None)
            _, native = router(hidden)
            router.router_replay.set_router_replay_action(action)
            _, routed = router(hidden)
            target = router.router_replay.target_topk_idx
            mask = router.router_replay.target_replay_mask
            assert mask is None or np.array_equal(mask.numpy(), there)
            for token, serial in enumerate(serials.tolist()):
                sample, position = divmod(serial - 1, _MANY)
                if there[token]:
                    due = ids[sample][position, MOE_LAYERS.index(layer)].tolist()
                    taken = routed[token].nonzero().flatten().tolist()
                    wrong += target[token].tolist() != due or taken != sorted(due)
                elif mask is not None:
                    live += 1
                    wrong += bool((routed[token] != native[token]).any())
                else:
                    continue
                compared += 1
    return compared, wrong, live


def _set_replay_data(
    layout: Layout, config: Any, model: torch.nn.ModuleList, samples: list[SampleRows]
) -> torch.Tensor:
    """As MegatronEngine.forward_step does; the serials of the local tokens."""
    where = {"model": model} if layout.by_model else {}
    batch = _padded(samples)
    if not layout.jagged:
        attention = batch["attention_mask"].bool()
        replay.set_router_replay_data(batch["routed_experts"], attention, config, **where)
        tokens, _ = preprocess_packed_seqs(batch["input_ids"], attention)
        return scatter_to_sequence_parallel_region(tokens[0])
    parts = [torch.from_numpy(verl.routed_experts(sample)) for sample in samples]
    routes = torch.nested.as_nested_tensor(parts, layout=torch.jagged)
    response_mask = batch["response_mask"]
    tokens = left_right_2_no_padding(batch)["input_ids"]
    routes = replay.align_r3_router_replay_data(routes, tokens)
    mask = replay.build_r3_replay_mask(tokens, response_mask)
    for ours, theirs in zip(samples, mask.unbind(), strict=True):
        if ours.num_tokens > 1:
            assert np.array_equal(verl.replay_mask(ours), theirs.numpy())
    if not layout.sliced:
        replay.set_router_replay_data(routes, None, config, replay_mask=mask, **where)
    local, _, _ = preprocess_thd_engine(tokens)
    return scatter_to_sequence_parallel_region(local[0])


def _planned(layout: Layout, here: list[int], serials: torch.Tensor) -> FetchPlan:
    """The plan of a rank, which must have the tokens that verl has, where verl has them."""
    rank = Rank(
        here,
        layout.cp,
        parallel_state.get_context_parallel_rank(),
        sp_size=layout.tp,
        sp_rank=parallel_state.get_tensor_model_parallel_rank(),
    )
    samples = [Sample.of(f"r{i}", n) for i, n in enumerate(_LENGTHS)]
    plan = FetchPlan.make(_LAYOUT, verl.micro_batch(samples, layout.tp, layout.cp), rank)
    planned = np.where(plan.position_of < 0, 0, plan.sample_of * _MANY + plan.position_of + 1)
    assert np.array_equal(planned, serials.numpy()), f"{layout.name}: other tokens than planned"
    return plan
