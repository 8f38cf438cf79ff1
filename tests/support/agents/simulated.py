"""A simulated engine that sends its chunks to a server."""

from __future__ import annotations

from routetrace.common.layout import ModelLayout
from routetrace.simulation.small_engine import SmallEngine
from support.agents.feeder import Feeder

LAYOUT = ModelLayout((1, 2, 4), 6, 40, 3)


def drive(target: str, seed: int, run: str, *, flush_share: float = 0.2, **engine) -> SmallEngine:
    """Run a simulated engine to its end, sending chunks of several steps."""
    blocks = engine.get("num_blocks", 24)
    feeder = Feeder(target, LAYOUT, run=run, block_size=4, num_blocks=blocks)
    sim = SmallEngine(feeder, LAYOUT, seed, **engine)
    prompts = [[sim.rng.randrange(4) for _ in range(sim.rng.randint(1, 14))] for _ in range(4)]
    for i in range(25):
        sim.submit(f"r{i}", prompts[i % 4][: sim.rng.randint(1, 14)], sim.rng.randint(1, 12))
    while sim.step():
        if sim.rng.random() < flush_share:
            feeder.flush()
    feeder.close()
    return sim
