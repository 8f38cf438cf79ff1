"""Megatron-Core's routers, replayed by tokens: no rank knows the id of a request.

A server holds the requests; the rows of each pass are compared with those that its engine reported.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from trainer_runs import megatron_cpu  # isort: skip  # first of all

import numpy as np
import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func

from routetrace.capture_agent import AgentConfig, CaptureAgent
from routetrace.client import Incomplete, MicroBatch, RouteClient, Sample, Unavailable
from routetrace.common.layout import ModelLayout
from routetrace.server.testing import run_server
from routetrace.trainers.megatron import plans, replay
from support.ranks.gloo_ranks import run_ranks
from trainer_runs.megatron_checks import (
    MICRO_BATCHES,
    Batch,
    Layout,
    Truth,
    forward_step,
    initialize,
    model_of,
)
from trainer_runs.megatron_model import EXPERTS, LAYERS, MOE_LAYERS, TOP_K, Observer

LAYOUTS = (
    Layout(tp=2, pp=2, recompute="moe"),
    Layout(tp=2, pp=2, packed=True),
    Layout(cp=4, packed=True, recompute="full"),
    Layout(tp=2, cp=2),
)
_LAYOUT = ModelLayout(MOE_LAYERS, LAYERS, EXPERTS, TOP_K)


def run() -> Iterator[tuple[str, int, int, int, int]]:
    """(layout, ranks, rows compared, wrong, live rows) of each layout."""
    with run_server() as server:
        found = run_ranks(4, _rank, server.target, timeout=200)
    for layout, ranks in zip(LAYOUTS, zip(*found, strict=True), strict=True):
        rows, wrong, live = (sum(each[i] for each in ranks) for i in range(3))
        yield f"{layout.name} by tokens", 4, rows, wrong, live


def _rank(_rank: int, target: str) -> list[Any]:
    results = []
    with megatron_cpu.OnCpu():
        for number, layout in enumerate(LAYOUTS):
            initialize(layout)
            results.append(_check(layout, target, f"{number}"))
            parallel_state.destroy_model_parallel()
    return results


def _check(layout: Layout, target: str, name: str) -> tuple[int, int, int]:
    torch.manual_seed(1)
    replica = parallel_state.get_data_parallel_rank()
    run = f"{name}-{replica}"
    chunks = model_of(layout)
    observer = Observer(chunks)
    truth = Truth(np.random.default_rng([7, replica]))
    truth.valid[:] = truth.valid[:, :1]  # a token is captured at all layers, or at none
    batches = [Batch(layout, truth, number) for number in range(MICRO_BATCHES)]
    texts = [text for batch in batches for text in batch.texts]
    unknown = max(batches[-1].texts, key=len)
    truth.valid[unknown] = False
    _report(target, run, truth, [text for text in texts if text is not unknown])
    tokens = [_by_tokens(batch.described, batch.texts) for batch in batches]
    with RouteClient(target, run=run) as client:
        with pytest.raises(Incomplete, match=rf"tokens\[{MICRO_BATCHES - 1}\].samples"):
            plans(chunks, client, tokens, missing="raise", wait_seconds=0.1)
        with replay(chunks, client=client, tokens=tokens, wait_seconds=0.1) as replayed:
            get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=[iter(batches) for _ in chunks],
                model=chunks,
                num_microbatches=MICRO_BATCHES,
                seq_length=batches[0].tokens.shape[1],
                micro_batch_size=batches[0].tokens.shape[0],
                forward_only=False,
            )
        assert replayed.stats.samples_found, replayed.stats
    _check_equal_samples(chunks, target, f"{run}-equal")
    with (
        RouteClient("127.0.0.1:1", timeout=0.2) as nowhere,
        pytest.raises(Unavailable),  # on all ranks, and none hangs
    ):
        plans(chunks, nowhere, tokens)
    return truth.compare(observer)


def _groups() -> list[Any]:
    return [
        parallel_state.get_tensor_model_parallel_group(),
        parallel_state.get_context_parallel_group(),
        parallel_state.get_pipeline_model_parallel_group(),
    ]


def _by_tokens(batch: MicroBatch, texts: list[np.ndarray]) -> MicroBatch:
    """The same micro-batch without ids of requests."""
    samples = [
        replace(Sample.of(token_ids=text), padded_len=sample.padded_len)
        for sample, text in zip(batch.samples, texts, strict=True)
    ]
    return replace(batch, samples=tuple(samples))


def _report(target: str, run: str, truth: Truth, texts: list[np.ndarray]) -> None:
    """Report the requests of this replica, once, as an engine does: prompts of one token."""
    if any(group.rank() for group in _groups()):
        dist.barrier()
        return
    config = AgentConfig(
        target=target, run=run, engine_id="engine", layout=_LAYOUT, background="thread"
    )
    with CaptureAgent(config) as agent:
        for number, text in enumerate(texts):
            handle = agent.begin(f"r{number}", prompt_token_ids=text[:1])
            for position, token in enumerate(text[:-1].tolist()):
                span = [(handle, position, 1)]
                if truth.valid[token, 0]:
                    agent.step(truth.ids[token][None, list(MOE_LAYERS)], span)
                else:
                    agent.skip(span)
            agent.finish(handle, len(text), token_ids=text)
        assert agent.flush(60)
    dist.barrier()


def _check_equal_samples(chunks: Any, target: str, run: str) -> None:
    """All ranks of a replica mean the same requests."""
    text = np.arange(1, 9)
    truth = Truth(np.random.default_rng(1))
    truth.valid[:] = True
    _report(target, run, truth, [text] * 3)
    batch = MicroBatch.packed([Sample.of(token_ids=text)] * 2, align=8)
    with RouteClient(target, run=run) as client:
        found = plans(chunks, client, [batch, batch], equal="any")
    names = [each and each.trace_id for plan in found for each in plan.locations or ()]
    assert sorted(names[:3]) == ["r0", "r1", "r2"], names
    for group in _groups():
        every: list[Any] = [None] * group.size()
        dist.all_gather_object(every, names, group=group)
        assert all(each == names for each in every), every
