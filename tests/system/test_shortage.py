"""Reads by blocks after memory of the agent was short, through the whole pipeline and a server."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest

from oracle.harness import InlineWorld
from routetrace.capture_agent import AgentConfig, CaptureAgent
from routetrace.capture_agent.pipeline.pressure import Pressure
from routetrace.common.layout import ModelLayout

LAYOUT = ModelLayout((0, 1), 2, 16, 2)
BLOCK = 4
ENGINE = "engine"


@pytest.fixture(name="world")
def _world() -> Iterator[InlineWorld]:
    world = InlineWorld(LAYOUT, 1)
    yield world
    world.close()


def rows(seed: int, n: int) -> npt.NDArray[np.uint8]:
    rng = np.random.default_rng(seed)
    chosen = [[rng.permutation(16)[:2] for _ in range(2)] for _ in range(n)]
    return np.array(chosen, np.uint8)


def start(world: InlineWorld) -> CaptureAgent:
    agent = world.start(
        AgentConfig(
            world.target, ENGINE, LAYOUT, run="oracle", block_size=BLOCK, num_blocks=8,
            background="thread", linger_seconds=0, flush_interval_seconds=0.001, ring_bytes=4 << 20,
        )
    )  # fmt: skip
    world.agents[ENGINE, ""] = agent
    agent._link.worker._bound = lambda: None  # memory is short when `press` says so
    return agent


def press(agent: CaptureAgent, level: Pressure) -> None:
    agent._link.wait(0)  # what was reported so far comes before
    agent._link.worker._intake.pressure = level


def valid(world: InlineWorld, block: int) -> list[bool]:
    read = world.client.get_blocks(ENGINE, [block], BLOCK, missing="mask")
    return read.valid.all(axis=1).tolist()


@pytest.mark.parametrize("back", [True, False])
def test_slots_written_in_a_shortage_have_no_former_rows(world: InlineWorld, back: bool) -> None:
    agent = start(world)
    agent.step_slots(rows(1, BLOCK), range(BLOCK))
    assert agent.flush(10)
    assert valid(world, 0) == [True] * BLOCK
    press(agent, Pressure.FULL)
    agent.step_slots(rows(2, BLOCK), range(BLOCK))
    if back:
        press(agent, Pressure.NORMAL)
    assert agent.flush(10)
    assert valid(world, 0) == [False] * BLOCK
    world.client.bind(ENGINE, "bound", [0], BLOCK + 1)
    bound = world.client.get("bound", missing="mask")
    assert not bound.valid.any()


def test_a_bind_at_a_step_after_a_shortage_has_no_former_rows(world: InlineWorld) -> None:
    agent = start(world)
    first, other = agent.begin("first", block_ids=[1]), agent.begin("other", block_ids=[2])
    agent.step(rows(1, BLOCK + 1), [(first, 0, BLOCK), (other, 0, 1)])
    agent.finish(first, BLOCK + 1)
    assert agent.flush(10)
    press(agent, Pressure.FULL)
    agent.mark_external([1])  # block 1 holds other KV now
    press(agent, Pressure.NORMAL)
    step = agent.step(rows(2, 1), [(other, 1, 1)])
    agent._link.wait(0)
    agent._link.worker._intake.flush()  # rows alone, without what flush() reports
    agent._link.worker._ship_all()
    agent._link.wait(0)
    world.client.bind(ENGINE, "loaded", [1], BLOCK + 1, step=step)
    assert not world.client.get("loaded", missing="mask").valid.any()
