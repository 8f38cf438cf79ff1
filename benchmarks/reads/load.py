"""Requests captured by a real agent into a server, for areas/reads.py."""

from __future__ import annotations

from typing import Any

import numpy as np

from measure import QWEN3
from routetrace.capture_agent import AgentConfig, CaptureAgent
from routetrace.client import FetchPlan, MicroBatch, Rank, Sample

LAYOUT = QWEN3.layout

Array = np.ndarray[Any, np.dtype[Any]]


def draw(count: int) -> Array:
    """[count, L, K]: the k that win a race among experts, whose popularity differs by layer.

    No rows come again, as recorded ones would: zstd would find those.
    """
    layers, experts, k = len(LAYOUT.layer_ids), LAYOUT.num_experts, LAYOUT.top_k
    slowness = np.exp(np.random.default_rng(0).normal(0, 1, (layers, experts))).astype(np.float32)
    rng = np.random.default_rng(1)
    rows = np.empty((count, layers, k), LAYOUT.dtype)
    for first in range(0, count, 1024):
        some = rows[first : first + 1024]
        times = rng.standard_exponential((len(some), layers, experts), np.float32) * slowness
        # Positive floats are in the order of their bits; the low ones name the expert.
        keys = times.view(np.uint32)
        keys &= ~np.uint32(experts - 1)
        keys |= np.arange(experts, dtype=np.uint32)
        keys.partition(k - 1, axis=-1)
        some[:] = np.sort(keys[..., :k], axis=-1) & np.uint32(experts - 1)
    return rows


def fill(
    target: str, ids: Array, name: str, count: int, tokens: int, lanes: int, rows: int = 1
) -> list[str]:
    """Requests that are prefilled, then decode `lanes` at a time, each `rows` tokens a step."""
    prompt = min(1500, tokens // 4)
    # One codec, whatever the length of a frame: rivals decode the frames without headers.
    config = AgentConfig(
        target=target, engine_id=name, layout=LAYOUT, ring_bytes=256 << 20, codec="zstd"
    )
    names = [f"{name}-{number}" for number in range(count)]
    with CaptureAgent(config) as agent:
        for first in range(0, count, lanes):
            some = range(first, min(first + lanes, count))
            handles = [agent.begin(names[number], prompt_len=prompt) for number in some]
            start = [1361 * number % len(ids) for number in some]
            for handle, at in zip(handles, start, strict=True):
                agent.step(ids[(at + np.arange(prompt)) % len(ids)], [(handle, 0, prompt)])
            for position in range(prompt, tokens - 1, rows):
                decoded = np.arange(position, min(position + rows, tokens - 1))
                places = np.add.outer(start, decoded).ravel() % len(ids)
                agent.step(ids[places], [(handle, position, len(decoded)) for handle in handles])
                if position // 16_384 != (position + rows) // 16_384:
                    agent.flush(60)
            for handle in handles:
                agent.finish(handle, tokens)
            agent.flush(60)
        if agent.stats().dropped_rows:
            raise RuntimeError(f"the agent dropped rows: {agent.stats()}")
    return names


def plan_of(names: list[str], rank: Rank, tokens: int) -> FetchPlan:
    """Return the plan of a rank for these requests."""
    samples = [Sample.of(name, tokens) for name in names]
    return FetchPlan.make(LAYOUT, MicroBatch.padded(samples, tokens), rank)
