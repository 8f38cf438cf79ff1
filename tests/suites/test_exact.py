"""The oracle's share of `make test`; `make test-exact` compares at least ten million cells."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from oracle.cluster import Cluster
from oracle.compare import Comparer
from oracle.harness import InlineWorld
from oracle.runs import LAYOUTS, run
from oracle.world import EngineSpec, Shard

LAYOUT = LAYOUTS[1]
HALVES = (LAYOUT.layer_ids[:2], LAYOUT.layer_ids[2:])
SHARDS = {
    "whole": (Shard("", LAYOUT.layer_ids),),
    "pipeline": (Shard("pp0", HALVES[0]), Shard("pp1", HALVES[1])),
    "context": (Shard("cp0", LAYOUT.layer_ids, 0, 2), Shard("cp1", LAYOUT.layer_ids, 1, 2)),
}


@pytest.mark.parametrize("seed", range(100, 103))
def test_every_cell_is_what_happened(seed):
    assert run(seed, "inline", 15).tally.cells > 1000


@pytest.mark.long
@pytest.mark.parametrize("seed", range(110, 112))
def test_every_cell_is_what_happened_in_several_workers(seed):
    outcome = run(seed, "sharded", 15)
    assert outcome.tally.cells > 1000
    assert outcome.counts["sent on"] > 0


@pytest.mark.long
def test_every_cell_is_what_happened_over_sockets():
    assert run(200, "socket", 10).tally.cells > 1000


@pytest.mark.long
def test_every_cell_is_what_happened_behind_a_worker_that_is_killed():
    outcome = run(201, "workers", 20)
    assert outcome.tally.cells > 1000
    assert outcome.counts["server restarts"] == 1


ENGINES = st.builds(
    EngineSpec,
    engine_id=st.just(""),
    block_size=st.sampled_from([4, 2, 16]),
    num_blocks=st.integers(24, 64),
    shards=st.sampled_from(list(SHARDS.values())),
    chunk_tokens=st.sampled_from([64, 16, 5]),
    max_running=st.integers(1, 6),
    draft_tokens=st.integers(0, 3),
    asynchronous=st.booleans(),
    tells_tokens=st.booleans(),
    tells_versions=st.booleans(),
    role=st.sampled_from(["both", "prefill", "decode"]),
    offload=st.booleans(),
    host_blocks=st.sampled_from([0, 0, 7]),
)


class Exact(RuleBasedStateMachine):
    """Events between two steps of a cluster, in any order."""

    @initialize(
        engines=st.lists(ENGINES, min_size=1, max_size=2),
        seed=st.integers(0, 10_000),
        num_requests=st.integers(1, 20),
    )
    def start(self, engines: list[EngineSpec], seed: int, num_requests: int) -> None:
        specs = [replace(spec, engine_id=f"e{i}") for i, spec in enumerate(engines)]
        self.world = InlineWorld(LAYOUT, seed)
        self.cluster = Cluster(LAYOUT, seed, self.world, specs)
        self.submit(num_requests)

    @precondition(lambda self: not self.busy)
    @rule(num_requests=st.integers(1, 10))
    def submit(self, num_requests: int) -> None:
        self.cluster.submit_workload(num_requests)
        self.busy = True

    @precondition(lambda self: self.busy)
    @rule(steps=st.integers(1, 20))
    def step(self, steps: int) -> None:
        while steps and self.busy:
            self.busy = self.cluster.step()
            steps -= 1

    @rule(snapshot=st.booleans())
    def restart_the_server(self, snapshot: bool) -> None:
        self.world.restart(snapshot=snapshot)

    @precondition(lambda self: self.busy)
    @rule()
    def compare(self) -> None:
        self.cluster.barrier()
        self._compare(settled=False)

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        with self.world:
            while self.busy:
                self.busy = self.cluster.step()
            self.cluster.barrier()
            self.world.settle()
            self._compare(settled=True)

    def _compare(self, *, settled: bool) -> None:
        rng = random.Random(0)
        comparer = Comparer(self.world.client, self.cluster, rng, settled=settled)
        comparer.all()
        comparer.blocks()


Exact.TestCase.settings = settings(
    max_examples=8,
    stateful_step_count=15,
    suppress_health_check=list(HealthCheck),
)
# To shrink a failure takes minutes.
test_whatever_the_engine_does = pytest.mark.long(pytest.mark.timeout(600)(Exact.TestCase))
