"""Prefill and decode engines with different weights: real agents, a real server, a client."""

from __future__ import annotations

import numpy as np
import pytest

from routetrace.capture_agent import AgentConfig, CaptureAgent
from routetrace.client import RouteClient
from routetrace.common.layout import ModelLayout
from routetrace.server.testing import run_server
from support.handover import handed_over, version_spans

LAYOUT = ModelLayout((1, 2, 4), 6, 300, 3)
BLOCK = 16


@pytest.fixture(scope="module")
def server():
    with run_server() as process:
        yield process


def agent_of(server, run: str, engine_id: str, version: int) -> CaptureAgent:
    agent = CaptureAgent(
        AgentConfig(target=server.target, run=run, engine_id=engine_id, layout=LAYOUT,
                    block_size=BLOCK, num_blocks=40, background="thread",
                    flush_interval_seconds=0.01)
    )  # fmt: skip
    agent.set_weight_version(version)
    return agent


def rows_of(n: int, seed: int) -> np.ndarray:
    keys = np.random.default_rng(seed).random((n, 3, 300))
    return np.argsort(keys, axis=-1)[..., :3].astype(np.uint16)


def test_the_rule():
    assert version_spans(handed_over(100, 124, 96), 0, 1) == ((0, 96, 0), (96, 123, 1))
    assert version_spans(handed_over(100, 124, 100), 0, 1) == ((0, 100, 0), (100, 123, 1))
    assert version_spans(handed_over(100, 124, 96), 1, 1) == ((0, 123, 1),)


@pytest.mark.parametrize("decode_first", [False, True])
@pytest.mark.parametrize("same_token", [False, True])
@pytest.mark.parametrize(
    ("prompt_len", "num_tokens", "decode_from"),
    [
        (100, 124, 96),  # as vLLM: KV comes in whole blocks, the rest is computed again
        (100, 124, 99),
        (100, 124, 100),  # was given the token
        (127, 150, 112),  # a digest at 128 says whether the first token is the same
        (16, 18, 15),
    ],
)
def test_rows_are_of_the_passes_behind_the_kv_of_the_decode_engine(
    server, prompt_len, num_tokens, decode_from, same_token, decode_first
):
    run = f"{prompt_len} {decode_from} {same_token} {decode_first}"
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, 1000, prompt_len).tolist()
    sampled = 5
    answer = [sampled if same_token else 6, *rng.integers(0, 1000, num_tokens).tolist()]
    tokens = [*prompt, *answer][:num_tokens]
    prefill, decode = agent_of(server, run, "prefill", 0), agent_of(server, run, "decode", 1)
    first, second = rows_of(prompt_len, 1), rows_of(num_tokens - 1 - decode_from, 2)

    def fill() -> None:
        handle = prefill.begin("p", trace_id="t", prompt_len=prompt_len, block_ids=range(20),
                               prompt_token_ids=prompt)  # fmt: skip
        prefill.step(first, [(handle, 0, prompt_len)])
        prefill.finish(handle, prompt_len + 1, reason="handoff", token_ids=[*prompt, sampled],
                       transfer_id="kv")  # fmt: skip
        assert prefill.flush(30)

    def go_on() -> None:
        handle = decode.begin("d", trace_id="t", prompt_len=prompt_len, block_ids=range(20),
                              num_computed_tokens=decode_from, num_external_tokens=decode_from,
                              prompt_token_ids=prompt, transfer_id="kv")  # fmt: skip
        decode.step(second, [(handle, decode_from, len(second))])
        decode.finish(handle, num_tokens, token_ids=tokens)
        assert decode.flush(30)

    for tell in (go_on, fill) if decode_first else (fill, go_on):
        tell()
    sides = handed_over(prompt_len, num_tokens, decode_from)
    rows = [
        first[p] if side == "prefill" else second[p - decode_from] for p, side in enumerate(sides)
    ]
    with RouteClient(server.target, run=run) as client:
        trace = client.get("t", wait_for="end", timeout=20)
        np.testing.assert_array_equal(trace.topk_ids, np.stack(rows))
        assert trace.weight_versions == version_spans(sides, 0, 1)
        assert trace.state.value == "complete"
        latest = client.get("t", policy="latest")
        np.testing.assert_array_equal(latest.topk_ids[decode_from:], second)
    prefill.close()
    decode.close()
