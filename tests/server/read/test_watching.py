"""What a watcher is told is what each trace is, after every order of events and at every moment."""

from __future__ import annotations

import random
from contextlib import ExitStack, suppress
from typing import Any

import pytest

from oracle.cluster import Cluster, random_specs
from oracle.engine import Chances
from oracle.harness import RUN, InlineWorld
from oracle.runs import LAYOUTS
from oracle.sharded import ShardedWorld
from routetrace.client import TraceState, TraceSummary
from routetrace.common.errors import NotFound, Unavailable
from routetrace.server.common.slices import IN_TURNS
from routetrace.server.core import Core
from routetrace.server.read import watching
from routetrace.server.read.watching import Watch
from routetrace.server.settings.config import ServerConfig
from routetrace.server.store.memory import MemoryStore
from support.seeds import seeds

WORLDS: dict[str, type[InlineWorld]] = {"one worker": InlineWorld, "several": ShardedWorld}


def _core(world: InlineWorld) -> Core:
    """The first worker, which restarts like the others."""
    return world.servers[0].core if isinstance(world, ShardedWorld) else world.server.core


class Watcher:
    """A caller that watches the run of a world, and keeps what it was told."""

    def __init__(self, world: InlineWorld) -> None:
        self._world = world
        self._core: Core | None = None
        self._stack = ExitStack()
        self._messages: Any = None
        self.told: dict[str, TraceSummary] = {}
        self.anew = 0

    def hear(self) -> None:
        """Take messages until one says that nothing has changed."""
        if self._core is not _core(self._world):
            self._begin()
        while True:
            try:
                message = self._world.server.run(anext(self._messages))
            except Unavailable:  # another worker has started again
                self._begin()
                continue
            assert len(message.traces) + len(message.gone_trace_ids) <= 500
            for trace_id in message.gone_trace_ids:
                self.told.pop(trace_id, None)
            for summary in map(TraceSummary.from_proto, message.traces):
                self.told[summary.trace_id] = summary
            if message.whole and not message.traces and not message.gone_trace_ids:
                return

    def _begin(self) -> None:
        self.close()
        self.told.clear()
        self.anew += 1
        core = self._core = _core(self._world)
        catalog = core._traces._catalog(RUN)
        watched = self._stack.enter_context(catalog.watched(RUN, IN_TURNS))
        self._messages = Watch(watched, lambda: None).messages()

    def close(self) -> None:
        if self._messages is not None:
            self._world.server.run(self._messages.aclose())
        self._stack.close()


def compare(world: InlineWorld, told: dict[str, TraceSummary]) -> int:
    """Compare what was told with what `stat` says of each trace; return the number of traces."""
    listed = [stat.trace_id for stat in world.client.find()]
    assert sorted(told) == sorted(listed)
    by_state: dict[TraceState, set[str]] = {state: set() for state in TraceState}
    for trace_id, summary in told.items():
        stat = world.client.stat(trace_id)
        by_state[stat.state].add(trace_id)
        assert summary.state is stat.state, trace_id
        assert summary.labels == stat.labels, trace_id
        assert summary.created_at == stat.created_at
        assert summary.updated_at == stat.updated_at
        assert summary.expires_at == stat.expires_at
        if stat.state is TraceState.RUNNING:
            assert summary.num_incarnations == stat.num_incarnations
            assert not summary.num_cells
            assert not summary.missing_cells
            assert summary.coverage is None
            continue
        for fact in (
            "num_tokens", "num_rows", "engine_ids", "missing_cells", "min_weight_version",
            "max_weight_version", "finish_reason", "num_incarnations", "stored_bytes", "coverage",
        ):  # fmt: skip
            assert getattr(summary, fact) == getattr(stat, fact), (trace_id, fact)
        assert summary.num_cells == stat.num_rows * len(stat.layout.layer_ids)
    for state, trace_ids in by_state.items():
        assert {stat.trace_id for stat in world.client.find(states=[state])} == trace_ids
    return len(told)


def delete_one(world: InlineWorld, rng: random.Random, told: dict[str, TraceSummary]) -> None:
    trace_id = rng.choice(sorted(told))
    with suppress(NotFound):
        world.client.delete(trace_id)


@pytest.mark.parametrize("kind", WORLDS)
@pytest.mark.parametrize("seed", seeds(2, 6))
def test_a_watcher_is_told_what_stat_says(
    kind: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching, "ROUND_SECONDS", 0.0)
    rng = random.Random(f"watch {seed}")
    layout = rng.choice(LAYOUTS)
    compared = 0
    with WORLDS[kind](layout, seed) as world:
        watcher = Watcher(world)
        chances = Chances(branch=0.5 if seed % 3 == 0 else 0.0)
        cluster = Cluster(layout, seed, world, random_specs(rng, layout), chances)
        cluster.submit_workload(25)
        while cluster.step():
            world.disturb()
            if rng.random() < 0.02:
                watcher.hear()
                compared += compare(world, watcher.told)
            if rng.random() < 0.005 and watcher.told:
                delete_one(world, rng, watcher.told)
        cluster.barrier()
        watcher.hear()
        compared += compare(world, watcher.told)
        world.settle()  # agents that were lost have been silent for long
        watcher.hear()
        compared += compare(world, watcher.told)
        watcher.close()
    assert compared > 20


async def test_nothing_new_is_said_every_tenth_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "ROUND_SECONDS", 0.0)
    core = Core(MemoryStore(), ServerConfig())
    await core.start()
    rounds: list[None] = []
    with core._traces._catalog(RUN).watched(RUN, IN_TURNS) as watched:
        messages = Watch(watched, lambda: rounds.append(None)).messages()
        assert (await anext(messages)).whole
        for number in range(1, 4):
            message = await anext(messages)
            assert message.whole
            assert not message.traces
            assert len(rounds) == 10 * number
        await messages.aclose()
    assert not core.journal.changes.listeners
    await core.stop()
