"""Requests by the thousand: shared prefixes, chunked prompts, samples, preemption and aborts."""

from __future__ import annotations

import random
from collections.abc import Iterator

from vllm_runs.engine import Answer, Ask, Engine
from vllm_runs.report import Tally

_REQUESTS = 40
_ROOTS = (33, 64, 96)
#: vLLM's counters of what must have happened, or the load proves little.
MUST_COUNT = ("prefix_cache_hits", "num_preemptions")


def waves(engine: Engine, seed: int) -> Iterator[list[Answer]]:
    """Waves of requests without end, each run until the engine is idle."""
    chance = random.Random(seed)
    roots = [engine.prompts.make(n) for n in _ROOTS]
    number = 0
    while True:
        yield _wave(engine, chance, roots, f"wave-{seed}-{number}")
        number += 1


def _wave(engine: Engine, chance: random.Random, roots: list[list[int]], name: str) -> list[Answer]:
    waiting = [f"{name}-{i}" for i in range(_REQUESTS)]
    running: list[str] = []
    done: list[Answer] = []
    while waiting or engine.busy:
        while waiting and chance.random() < 0.6:
            root = chance.choice(roots)
            prompt = root[: chance.randint(1, len(root))] + engine.prompts.make(
                chance.randint(0, 60)
            )
            sampling = {"n": 2} if chance.random() < 0.1 else {}
            running.append(waiting.pop())
            engine.add(Ask(running[-1], prompt, chance.randint(1, 60), sampling))
        # An engine in another process waits in `step` for a request that is not there.
        finished = engine.step() if engine.busy else []
        done += finished
        ended = {answer.trace_id for answer in finished}
        running = [trace_id for trace_id in running if trace_id not in ended]
        if running and chance.random() < 0.01:
            trace_id = running.pop(chance.randrange(len(running)))
            if trace_id in engine.delivered:
                done.append(engine.abort(trace_id))
    engine.delivered.clear()
    return done


def add(total: Tally, wave: Tally) -> None:
    """Add what came of a wave."""
    for count in ("requests", "native", "reference", "wrong", "ties", "native_wrong"):
        setattr(total, count, getattr(total, count) + getattr(wave, count))
    for reason, rows in wave.missing.items():
        total.missing[reason] = total.missing.get(reason, 0) + rows
    total.faults += wave.faults
