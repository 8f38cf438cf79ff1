"""One run of the oracle: a cluster, a world, and every trace compared."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field, replace

from oracle.cluster import Cluster, random_specs
from oracle.compare import Comparer, Tally, Wrong
from oracle.engine import Chances
from oracle.harness import BaseWorld, InlineWorld, SocketWorld, WorkersWorld
from oracle.sharded import ShardedWorld
from oracle.taken import TakenWorld
from oracle.world import EngineSpec
from routetrace.common.layout import ModelLayout

WORLDS: dict[str, type[BaseWorld]] = {
    "inline": InlineWorld,
    "sharded": ShardedWorld,
    "socket": SocketWorld,
    "taken": TakenWorld,
    "workers": WorkersWorld,
}

#: Few experts, so that an id is 8 bits; many, so that it is 16; layers that are dense; many layers.
LAYOUTS = (
    ModelLayout((0, 1, 2, 3), 4, 16, 2),
    ModelLayout((1, 2, 4, 5), 6, 300, 3),
    ModelLayout(tuple(range(3, 15)), 15, 128, 4),
)

#: Engine requests of one run, about; starting a server is worth more of them.
SIZES = {
    "inline": (10, 30, 60),
    "sharded": (10, 30, 60),
    "socket": (40, 80),
    "taken": (10, 30, 60),
    "workers": (100, 200),
}

#: Probabilities, after a step of the cluster, that everything so far is made certain, so that a
#: crash leaves little in doubt; and that some traces are compared then.
_BARRIER = 0.01
_COMPARE = 0.01


@dataclass
class Outcome:
    """What one run did and found; `+=` adds up several."""

    tally: Tally = field(default_factory=Tally)
    counts: Counter[str] = field(default_factory=Counter)
    runs: int = 0

    def __iadd__(self, other: Outcome) -> Outcome:
        self.tally += other.tally
        self.counts.update(other.counts)
        self.runs += other.runs
        return self


def replay(seed: int, world: str, num_requests: int) -> str:
    """The command that makes the same run again."""
    once = f"'--once --requests {num_requests}'" if num_requests else "--once"
    return f"make test-exact SEED={seed} WORLD={world} ONCE={once}"


def _specs(rng: random.Random, layout: ModelLayout) -> list[EngineSpec]:
    """A mix of engines; some have so few blocks that requests are preempted all the time."""
    specs = random_specs(rng, layout)
    if rng.random() < 0.5:
        return specs
    return [
        replace(spec, num_blocks=rng.randint(100, 250) // spec.block_size + 1, max_running=8)
        for spec in specs
    ]


def _chances(seed: int) -> Chances:
    """In a third of the runs requests go on from what drafts have just filled."""
    return Chances(branch=0.5 if seed % 3 == 0 else 0.0)


def run(seed: int, world_name: str = "inline", num_requests: int = 0) -> Outcome:
    """Makes one run; the seed says all about it but the world.

    Args:
        seed: of everything.
        world_name: one of WORLDS.
        num_requests: about so many engine requests; 0: as many as the seed says.

    Raises:
        Wrong: if anything that was read differs from the truth; names the seed.
    """
    rng = random.Random(f"run {seed}")
    layout = rng.choice(LAYOUTS)
    again = replay(seed, world_name, num_requests)
    num_requests = num_requests or rng.choice(SIZES[world_name])
    outcome = Outcome(runs=1)
    try:
        with WORLDS[world_name](layout, seed) as world:
            cluster = Cluster(layout, seed, world, _specs(rng, layout), _chances(seed))
            cluster.submit_workload(num_requests)
            while cluster.step():
                world.disturb()
                if rng.random() < _BARRIER:
                    cluster.barrier()
                if rng.random() < _COMPARE:
                    cluster.barrier()
                    comparer = Comparer(world.client, cluster, rng, settled=False)
                    outcome.tally += comparer.some(8)
                    outcome.tally += comparer.blocks()
            cluster.barrier()
            world.settle()
            outcome.tally += Comparer(world.client, cluster, rng, settled=True).all()
            outcome.counts.update(cluster.counts)
            outcome.counts.update(world.counts)
    except Exception as error:
        what = str(error) if isinstance(error, AssertionError) else repr(error)
        raise Wrong(f"seed {seed}, {world_name} world: {what}\n{again}") from error
    return outcome
