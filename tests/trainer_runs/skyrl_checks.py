"""SkyRL's own code, on what `dialects.skyrl` makes: each row is where it must be.

The release on PyPI, 0.3.0, is older than what the dialect was read from: it takes nested lists
where later versions take arrays, and pads with zeros.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
from skyrl.train.dataset.preprocess import convert_prompts_responses_to_batch_tensors

from routetrace.client import FetchPlan, MicroBatch, Rank, Sample
from routetrace.common.layout import ModelLayout
from routetrace.trainers.dialects import skyrl
from support.ranks.rank_rows import random_choices, rows_of

_LENGTHS = (37, 1, 20, 2, 64, 33)
_PROMPTS = (9, 1, 19, 1, 5, 20)
_LAYOUTS = {
    "uint8": ModelLayout((1, 2, 3), 4, 128, 3),
    "int16": ModelLayout((0, 1), 2, 512, 4),
}


def run() -> Iterator[tuple[str, int, int, int]]:
    """(what, ranks, rows compared, wrong)."""
    for name, layout in _LAYOUTS.items():
        yield f"SkyRL training batch {name}", 1, *_check(layout, name)


def _check(layout: ModelLayout, dtype: str) -> tuple[int, int]:
    batch = MicroBatch.padded(
        [Sample.of(f"r{i}", n) for i, n in enumerate(_LENGTHS)], 64, padding_side="right"
    )
    shapes = [(n - 1, len(layout.moe_layer_ids)) for n in _LENGTHS]
    ids = [
        random_choices(shape, layout.num_experts, layout.top_k, seed)
        for seed, shape in enumerate(shapes)
    ]
    samples = rows_of(FetchPlan.make(layout, batch, Rank(layout.layer_ids)), ids).per_sample()
    indices = [skyrl.rollout_expert_indices(sample) for sample in samples]
    answers = [n - p for n, p in zip(_LENGTHS, _PROMPTS, strict=True)]
    *_, theirs = convert_prompts_responses_to_batch_tensors(
        SimpleNamespace(pad_token_id=0),
        prompts=[[1] * n for n in _PROMPTS],
        responses=[[2] * n for n in answers],
        rewards=[[0.0] * n for n in answers],
        loss_masks=[[1] * n for n in answers],
        rollout_expert_indices=[array.tolist() for array in indices],
    )
    assert str(theirs.dtype) == f"torch.{dtype}"
    ours, padding = skyrl.batch(samples, theirs.shape[1])
    columns = np.arange(theirs.shape[1])
    rows = wrong = 0
    for number, one in enumerate(ids):
        start = len(columns) - _LENGTHS[number]
        there = (columns >= start) & (columns < start + len(one))
        for found in (theirs.numpy(), ours):
            got = found[number, there][:, list(layout.moe_layer_ids)]
            rows += one.shape[0] * one.shape[1]
            wrong += int((got != one).any(axis=2).sum())
        wrong += int((padding[number] == there).sum())
    return rows, wrong
