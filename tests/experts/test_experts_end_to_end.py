"""From a captured rollout to a cache that stored traces have taught: what docs/experts.md shows."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from routetrace.capture_agent import AgentConfig, CaptureAgent
from routetrace.capture_agent.engines.transformers import TransformersCapture
from routetrace.cli.commands import app
from routetrace.client import RouteClient
from routetrace.experts.forecast import ExpertForecast, ForecastFit
from routetrace.experts.transformers import serve_experts
from routetrace.server.testing import run_server
from support.models.routing_truth import padded
from support.models.tiny_models import eager, tiny_model

PROMPTS = [[3, 4, 5, 6, 7], [8, 9, 10, 11, 12, 13, 14, 15], [16, 17]]


@pytest.mark.slow
def test_stored_traces_teach_a_cache_that_changes_no_row_and_no_token(tmp_path):
    model, layout = tiny_model("qwen3_moe")
    input_ids, mask = padded(PROMPTS, "left")
    with run_server() as server, RouteClient(server.target) as client, eager(model):
        config = AgentConfig(target=server.target, engine_id="e", layout=layout)
        with CaptureAgent(config) as agent:
            capture = TransformersCapture(model, agent, layout=layout)

            def generate(*request_ids: str) -> torch.Tensor:
                return capture.generate(
                    input_ids, mask, request_ids=request_ids, max_new_tokens=12, do_sample=False
                )

            plain = generate("a0", "a1", "a2")
            agent.flush()
            fit = ForecastFit(layout.num_experts)
            for trace in client.get_many(["a0", "a1", "a2"], missing="mask"):
                fit.add(trace.topk_ids, valid=trace.valid)
            fit.result().save(tmp_path / "forecast.npz")
            forecast = ExpertForecast.load(tmp_path / "forecast.npz")
            for capacity in (1, 5, 16):
                ids = [f"{name}-{capacity}" for name in ("b0", "b1", "b2")]
                with serve_experts(model, capacity=capacity, forecast=forecast) as served:
                    assert torch.equal(generate(*ids), plain)
                assert served.stats().prefetched
                agent.flush()
                for before, now in zip(("a0", "a1", "a2"), ids, strict=True):
                    expected, seen = client.get(before), client.get(now)
                    np.testing.assert_array_equal(seen.topk_ids, expected.topk_ids)
        done = CliRunner().invoke(
            app, ["experts", "--all", "--capacity", "5", "--json", "--target", server.target]
        )
        assert done.exit_code == 0, done.output
        assert json.loads(done.stdout)["num_experts"] == layout.num_experts
