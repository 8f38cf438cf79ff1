"""Routing of an engine, and that of a trainer that disagrees with it now and then."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from routetrace.client import FetchPlan, MicroBatch, Rank, Sample
from routetrace.client.rows import Rows
from routetrace.common.layout import ModelLayout
from support.ranks.rank_rows import rows_of

MODELS = {
    "deepseek": ModelLayout(tuple(range(3, 15)), 15, 64, 6),
    "mixtral": ModelLayout((0, 1, 2, 3), 4, 8, 2),
    "wide": ModelLayout((1, 3, 5), 6, 300, 4),
}


class Routed(NamedTuple):
    """Choices of engine and trainer per sample: [tokens, layers, top_k]."""

    layout: ModelLayout
    engine: list[np.ndarray]
    trainer: list[np.ndarray]


def routed(layout: ModelLayout, lengths: list[int], seed: int, drift: float = 0.025) -> Routed:
    """Routers that look at a token, at what came before it, and at little else.

    Args:
        drift: how far the trainer's scores are from the engine's; 0.025: about one router in ten
            disagrees.
    """
    rng = np.random.default_rng(seed)
    dim, layers, experts = 16, len(layout.layer_ids), layout.num_experts
    words = rng.standard_normal((60, dim))
    weights = rng.standard_normal((layers, dim, experts)) / dim**0.5
    sides: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
    for length in lengths:
        tokens = rng.zipf(1.3, length) % 60
        hidden = words[tokens]
        for i in range(1, length):
            hidden[i] += 0.6 * hidden[i - 1]
        for side, error in zip(sides, (0.0, drift), strict=True):
            scores = np.einsum("td,lde->tle", hidden, weights)
            scores += error * rng.standard_normal(scores.shape)
            ids = scores.argsort(axis=-1)[..., ::-1][..., : layout.top_k]
            side.append(ids.astype(layout.dtype))
    return Routed(layout, *sides)


def shifted(ids: np.ndarray, by: int) -> np.ndarray:
    """Rows shifted by `by` tokens, with rows of another token at the end."""
    return np.roll(ids, by, axis=0)


def chosen(plan: FetchPlan, samples: list[np.ndarray]) -> np.ndarray:
    """Choices of a trainer at the tokens of the rank; a filler in padding."""
    ids = np.zeros(plan.shape, np.int64)
    placed = np.flatnonzero(plan.sample_of >= 0)
    columns = [plan.layout.moe_layer_ids.index(layer) for layer in plan.layer_ids]
    for token in placed:
        ids[:, token] = samples[plan.sample_of[token]][plan.position_of[token], columns]
    return ids


def packed(of: Routed) -> tuple[FetchPlan, Rows]:
    samples = [Sample.of(f"r{i}", len(ids)) for i, ids in enumerate(of.engine)]
    rank = Rank(of.layout.layer_ids)
    plan = FetchPlan.make(of.layout, MicroBatch.packed(samples, align=8), rank)
    return plan, rows_of(plan, of.engine, missing=0.02)
