"""A trainer of the run: reads traces, and reports agreement over steps with one bad update."""

from __future__ import annotations

import random

import numpy as np

from routetrace.client import Agreement, RouteClient, TraceState
from routetrace.client.agreement import Choices

from .rollouts import LAYERS, LAYOUT, LONG, LONG_UPDATES, SEED, TOP_K, UPDATE, WEIGHTS

#: The last steps; three were not reported.
STEPS = [step for step in range(1_458, 1_558) if step not in (1_487, 1_488, 1_489)]
#: The first step after an update that left out the routers of some layers.
WORSE = UPDATE * (WEIGHTS - 1)
WORSE_LAYERS = range(12, 20)
#: Layer of the long trace whose experts an update corrupted.
CORRUPT = 9
_TOKENS = 24_000
_WORDS = "routers of layers 12 to 19 choose as with weights 383: the update left them out"
#: Share of the rows by the age of their weights.
_AGES = (0.4, 0.3, 0.2, 0.1)


def read(client: RouteClient, most: int = 60) -> list[str]:
    """Read complete traces as a trainer does; return their ids by step."""
    complete = [stat.trace_id for stat in client.find() if stat.state is TraceState.COMPLETE]
    names = sorted(complete, key=lambda name: (_step_of(name), name))
    for _trace in client.get_many(names[:most], timeout=60):
        pass
    return names


def report(client: RouteClient, names: list[str]) -> None:
    """Report every step; later ones, which are worse, name traces among `names`."""
    rng = random.Random(SEED)
    for step in STEPS:
        known = [name for name in names if _step_of(name) <= step]
        client.report_agreement(
            step,
            _agreement(rng, step),
            weight_version=step // UPDATE,
            diagnosis=_WORDS if step == STEPS[-1] else "",
            trace_ids=known[-3:] if step >= WORSE else (),
        )


def report_long(client: RouteClient) -> None:
    """Report choices for the long trace: from an update on, experts of a layer are others."""
    trace = client.get(LONG, missing="mask")
    ids, valid = trace.topk_ids.copy(), trace.valid
    rng = np.random.default_rng(SEED)
    position = np.arange(len(ids))[:, None]
    layer = np.arange(LAYERS)[None, :]
    differs = rng.random(valid.shape) < 0.004 + 0.03 * layer / LAYERS
    differs |= (position >= LONG_UPDATES[1]) & (layer > CORRUPT) & (rng.random(valid.shape) < 0.9)
    other = np.roll(ids, 1, axis=0)  # what another token chose
    differs &= np.roll(valid, 1, axis=0)
    ids[differs] = other[differs]
    client.report_routing(
        LONG, ids, valid=np.repeat(valid.all(axis=1)[:, None], LAYERS, axis=1), step=STEPS[-1],
        weight_version=STEPS[-1] // UPDATE,
    )  # fmt: skip


def _step_of(name: str) -> int:
    return int(name.split("-")[1])


def _agreement(rng: random.Random, step: int) -> Agreement:
    worse = step >= WORSE
    by_layer = {}
    for layer in LAYOUT.layer_ids:
        share = 0.006 + 0.005 * rng.random() + 0.012 * layer / LAYERS
        if worse and layer in WORSE_LAYERS:
            share = 0.16 + 0.12 * rng.random()
        by_layer[layer] = _choices(_TOKENS, share)
    # Older rows differ more; all of them together as much as all layers.
    growth = [share * (1 + 0.5 * age) for age, share in enumerate(_AGES)]
    differing = sum(one.differing for one in by_layer.values()) / sum(growth)
    by_version = {
        step // UPDATE - age: _choices(
            int(share * LAYERS * _TOKENS),
            (1 + 0.5 * age) * differing / (LAYERS * _TOKENS) * rng.uniform(0.97, 1.03),
        )
        for age, share in enumerate(_AGES)
    }
    # As of layers that differ independently of each other.
    any_differs = rng.uniform(0.88, 0.92) if worse else rng.uniform(0.33, 0.37)
    return Agreement(
        by_layer=by_layer,
        by_version=by_version,
        tokens=_TOKENS,
        differing_tokens=int(_TOKENS * any_differs),
    )


def _choices(cells: int, share: float) -> Choices:
    differing = int(cells * share)
    return Choices(cells, differing, TOP_K * cells - int(1.2 * differing), TOP_K * cells)
