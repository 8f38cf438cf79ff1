"""Tensor parallelism: every rank captures the same, one hands it over, and a reader gets it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as collectives

from routetrace.capture_agent import AgentConfig, CaptureAgent
from routetrace.capture_agent.engines.capturer import RoutingCapturer
from routetrace.client import RouteClient
from routetrace.common.layout import ModelLayout
from routetrace.server.testing import run_server
from support.models.small_moe import SmallMoE, tokens, truth
from support.ranks.gloo_ranks import run_ranks

LAYOUT = ModelLayout((1, 2, 4), 5, 300, 4)
PASSES = (9, 1, 3, 1)
SIZE = 2


def engine(rank: int, target: str) -> dict[str, np.ndarray]:
    """A rank of an engine; returns the rows that it captured, by request."""

    def reduce(part: torch.Tensor) -> torch.Tensor:
        return collectives.all_reduce(part, "sum", dist.group.WORLD)

    capturer = RoutingCapturer(LAYOUT, 16, "cpu")
    model = SmallMoE(LAYOUT, capturer.capture, rank, SIZE, reduce)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True)
    # One rank has an agent. All have the capturer: they must run the same graph.
    agent = CaptureAgent(AgentConfig(target, "e0", LAYOUT)) if rank == 0 else None
    seen: dict[str, np.ndarray] = {}
    for name, forward in (("eager", model), ("compiled", compiled)):
        handle = agent.begin(name, prompt_len=PASSES[0]) if agent else 0
        rows: list[np.ndarray] = []
        for seed, n in enumerate(PASSES):
            capturer.begin()
            forward(tokens(n, seed))
            assert capturer.fired(n) == [0, 1, 2]
            rows.append(capturer.snapshot(n).rows())
            if agent:
                agent.step(rows[-1], [(handle, sum(PASSES[:seed]), n)])
        if agent:
            agent.finish(handle, sum(PASSES) + 1, reason="length")
        seen[name] = np.concatenate(rows)
    if agent:
        report = agent.close()
        assert report.acknowledged_rows == 2 * sum(PASSES), report
    return seen


@pytest.mark.slow
def test_tensor_parallel_ranks_capture_alike_and_one_hands_over() -> None:
    expected = np.concatenate([truth(LAYOUT, tokens(n, i)) for i, n in enumerate(PASSES)])
    with run_server() as server:
        for seen in run_ranks(SIZE, engine, server.target):
            for rows in seen.values():
                assert rows.dtype == LAYOUT.dtype
                np.testing.assert_array_equal(rows, expected)
        with RouteClient(server.target) as client:
            for name in ("eager", "compiled"):
                trace = client.get(name)
                assert (trace.num_tokens, trace.coverage) == (sum(PASSES) + 1, 1.0)
                assert trace.layer_ids == LAYOUT.layer_ids
                np.testing.assert_array_equal(trace.topk_ids, expected)
