"""The policy `latest` over requests of one trace: rows of the last request alone."""

from __future__ import annotations

import numpy as np

from routetrace.capture_agent import CaptureAgent
from routetrace.client import RouteClient
from routetrace.common.layout import ModelLayout
from routetrace.server.testing import run_server

LAYOUT = ModelLayout((0, 1), 2, 16, 2)


def rows(count: int, seed: int) -> np.ndarray:
    order = np.random.default_rng(seed).random((count, 2, 16)).argsort(axis=2)
    return order[:, :, :2].astype(np.uint8)


def gaps(trace) -> list[tuple[int, int, str]]:
    return [(m.start, m.stop, m.reason.value) for m in trace.missing]


def test_rows_of_requests_before_are_missing_in_latest():
    with (
        run_server() as server,
        RouteClient(server.target) as client,
        CaptureAgent(target=server.target, engine_id="e", layout=LAYOUT) as agent,
    ):
        agent.set_weight_version(1)
        first, second = rows(3, 1), rows(3, 2)
        handle = agent.begin("r1", trace_id="t", prompt_token_ids=[1, 2])
        agent.step(first, [[handle, 0, 3]])
        agent.finish(handle, 4, token_ids=[1, 2, 3, 4])
        handle = agent.begin("r2", trace_id="t", prompt_token_ids=[1, 2, 3, 4, 5])
        agent.skip([[handle, 0, 2]])
        agent.step(second, [[handle, 2, 3]])
        agent.finish(handle, 6, token_ids=[1, 2, 3, 4, 5, 6])
        assert agent.flush()
        trace = client.get("t", wait_for="end")
        np.testing.assert_array_equal(trace.topk_ids, np.concatenate([first, second[1:]]))
        latest = client.get("t", policy="latest", missing="mask")
        assert gaps(latest) == [(0, 2, "not_captured")]
        np.testing.assert_array_equal(latest.topk_ids[2:], second)


def test_a_pass_that_was_lost_is_no_kv_from_elsewhere():
    """Another trace has rows of the same tokens, which stand in for unknown KV alone."""
    with (
        run_server() as server,
        RouteClient(server.target) as client,
        CaptureAgent(target=server.target, engine_id="e", layout=LAYOUT) as agent,
    ):
        agent.set_weight_version(1)
        prompt = [1, 2, 3, 4, 5]
        handle = agent.begin("other", prompt_token_ids=prompt)
        agent.step(rows(5, 1), [[handle, 0, 5]])
        agent.finish(handle, 6, token_ids=[*prompt, 6])
        handle = agent.begin(
            "t", prompt_token_ids=prompt, num_computed_tokens=4, num_external_tokens=4
        )
        agent.skip([[handle, 0, 5]])
        agent.step(rows(1, 2), [[handle, 5, 1]])
        agent.finish(handle, 7, token_ids=[*prompt, 7, 8])
        assert agent.flush()
        trace = client.get("t", wait_for="end", missing="mask")
        assert gaps(trace) == [(0, 5, "not_captured")]
