"""Small models, rows for them, and passes that say whose rows they took."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from routetrace.client.plan import FetchPlan, MicroBatch, Rank, Sample
from routetrace.client.rows import Rows
from routetrace.common.layout import ModelLayout
from trainer_runs.megatron_model import (
    EXPERTS,
    LAYERS,
    MOE_LAYERS,
    TOP_K,
    Observer,
    make_chunks,
    make_config,
)

FULL = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}


def make_model(**config: Any) -> Any:
    torch.manual_seed(2)
    return make_chunks(make_config(**config), own_tokens=True)[0]


def make_rows(
    seed: int,
    tokens: int = 6,
    *,
    share: float = 0.7,
    layers: tuple[int, ...] = MOE_LAYERS,
    top_k: int = TOP_K,
    experts: int = EXPERTS,
    decoder_layers: int = LAYERS,
) -> Rows:
    """Random rows; rubbish where they are not valid."""
    layout = ModelLayout(MOE_LAYERS, decoder_layers, experts, top_k)
    batch = MicroBatch.packed([Sample.of("a", tokens - 1), Sample.of("b", 1)])
    plan = FetchPlan.make(layout, batch, Rank(layer_ids=layers))
    rng = np.random.default_rng(seed)
    ids = rng.random((len(layers), tokens, experts)).argsort(-1)[..., :top_k].astype(layout.dtype)
    valid = rng.random((len(layers), tokens)) < share
    ids[~valid] = np.iinfo(ids.dtype).max
    return Rows(plan=plan, topk_ids=ids, valid=valid, layer_ids=layers)


def tokens(number: int, count: int = 6) -> torch.Tensor:
    """Token ids that say which micro-batch they are of."""
    return (torch.arange(count) + 1 + number * 100)[None]


def forward(model: Any, number: int, count: int = 6) -> torch.Tensor:
    output: torch.Tensor = model(tokens(number, count), tokens(0, count), None)
    return output


def check(observer: Observer, rows: list[Rows]) -> int:
    """Return the number of router calls; each used the rows of its own micro-batch."""
    for seen in observer.seen:
        mine = rows[int(seen.serials[0]) // 100]
        column = mine.layer_ids.index(seen.layer)
        ids = torch.from_numpy(mine.topk_ids[column].astype(np.int64))
        valid = torch.from_numpy(mine.valid[column])
        expected = torch.zeros_like(seen.live)
        expected.scatter_(1, ids.masked_fill(~valid[:, None], 0), True)
        assert torch.equal(seen.used, torch.where(valid[:, None], expected, seen.live))
    return len(observer.seen)
