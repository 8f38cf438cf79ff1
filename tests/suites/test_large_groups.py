"""Rows that stand in for a prompt of which a large group of samples computed the KV."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from oracle.harness import InlineWorld
from oracle.world import EngineSpec, Shard
from routetrace.common.layout import ModelLayout

LAYOUT = ModelLayout((0, 1), 2, 64, 2)
WHOLE = (Shard("", LAYOUT.layer_ids),)
PROMPT = [1, 2, 3, 4, 5]


def connect(world: InlineWorld, engine_id: str) -> Any:
    spec = EngineSpec(engine_id, 4, 1200, WHOLE, empties="declared")
    agent = world.connect(spec, WHOLE[0], "boot")
    agent.set_weight_version(0)
    return agent


def sample(agent: Any, number: int, *, loaded: int = 0) -> np.ndarray:
    """A request of the group, the KV of whose first tokens is loaded; returns its rows."""
    rows = np.argsort(np.random.default_rng(number).random((5 - loaded, 2, 64)))[:, :, :2]
    handle = agent.begin(
        f"sample{number}",
        prompt_token_ids=PROMPT,
        block_ids=[2 * number, 2 * number + 1],
        num_computed_tokens=loaded,
        num_external_tokens=loaded,
    )
    agent.step(rows, [(handle, loaded, 5 - loaded)])
    agent.finish(handle, 6, token_ids=[*PROMPT, number])
    return rows


@pytest.mark.parametrize("size", [256, 300])
def test_a_sample_gets_rows_of_one_of_a_large_group(size: int) -> None:
    with InlineWorld(LAYOUT, size) as world:
        one, other = connect(world, "e"), connect(world, "d")
        computed = [sample(one, number) for number in range(size)]
        world.flush("e")
        sample(other, size, loaded=4)
        world.flush("d")
        name = f"sample{size}"
        trace = world.client.get(name, prefix_rows="any")
        assert (trace.topk_ids[:4] == computed[-1][:4]).all()
        assert [source.trace_id for source in trace.prefix_sources] == [f"sample{size - 1}"]
        assert (trace.proven, trace.complete) == (1, True)
        trace = world.client.get(name, prefix_rows="unique", missing="mask")
        assert not trace.prefix_sources
        assert {missing.reason for missing in trace.missing} == {"kv_unknown"}
        for number in range(1, size):
            world.client.delete(f"sample{number}")
        trace = world.client.get(name, prefix_rows="unique")
        assert (trace.topk_ids[:4] == computed[0][:4]).all()
