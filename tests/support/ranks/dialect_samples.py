"""Samples as dialects take them, from traces and from fetched plans, and what is true of them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st

from routetrace.client import FetchPlan, MicroBatch, Rank, Sample
from routetrace.client._core.assemble import Assembler, Want
from routetrace.common.layout import ModelLayout
from support.ranks.rank_rows import rows_of as fetched
from support.servers.client_server import LAYOUT, WIDE, Piece, Truth, rows_of, truth

randoms = st.integers(0, 2**63).map(random.Random)

LAYOUTS = [
    LAYOUT,
    WIDE,
    ModelLayout((0, 1), 2, 128, 4),
    ModelLayout((1,), 3, 129, 2),
    ModelLayout((0, 1, 2), 3, 256, 3),
    ModelLayout((2,), 4, 33000, 2),
    ModelLayout((0, 2), 3, 8, 1),
]


@dataclass
class Known:
    """A sample, and what is true of it."""

    layout: ModelLayout
    ids: np.ndarray
    """[N - 1, MoE layers, top_k]."""
    valid: np.ndarray
    """[N - 1, MoE layers]."""
    rows: Any
    """A Trace or SampleRows."""

    @property
    def num_tokens(self) -> int:
        return len(self.ids) + 1

    def cells(self) -> Iterator[tuple[int, int, int, list[int] | None]]:
        """(token, absolute layer, column, ids or None if they are missing)."""
        for token in range(self.num_tokens - 1):
            for column, layer in enumerate(self.layout.moe_layer_ids):
                there = self.valid[token, column]
                yield token, layer, column, self.ids[token, column].tolist() if there else None


def of_trace(source: Truth) -> Any:
    assembler = Assembler(Want("req", None, mask=True))
    for message in source.responses():
        assembler.feed(message)
    return assembler.finish()


def known(rng: random.Random, layout: ModelLayout | None = None, holes: bool = False) -> Known:
    layout = layout or rng.choice(LAYOUTS)
    count = rng.randint(0, 9)
    source = truth(count, layout=layout)
    source.ids = rows_of(layout, count, rng.randrange(2**32))
    if holes:
        source.pieces = [
            Piece((layer,), row, row + 1, rng.random() < 0.7, 7, 1)
            for layer in layout.layer_ids
            for row in range(count)
        ]
    elif not count:
        source.pieces = []
    return Known(layout, source.ids, source.valid, of_trace(source))


def batch_of(rng: random.Random, holes: bool = False, layout: ModelLayout | None = None):
    """Samples of one fetched plan, packed or padded, some of several requests."""
    layout = layout or rng.choice(LAYOUTS)
    lengths = [rng.randint(1, 9) for _ in range(rng.randint(1, 4))]
    samples = []
    for i, n in enumerate(lengths):
        cut = rng.randint(1, n)
        turns = Sample.turns([(f"a{i}", cut), (f"b{i}", n)]) if cut < n else Sample.of(f"r{i}", n)
        samples.append(turns)
    if rng.randrange(2):
        batch = MicroBatch.padded(samples, 10, padding_side=rng.choice(["left", "right"]))
    else:
        samples.insert(rng.randint(0, len(samples)), Sample.padding(3))
        batch = MicroBatch.packed(samples, align=rng.choice([1, 4]), total_len=64)
    rank = Rank(layout.layer_ids, flatten=rng.choice(["batch", "sequence"]))
    plan = FetchPlan.make(layout, batch, rank)
    ids = [rows_of(layout, max(s.num_tokens - 1, 0), rng.randrange(2**32)) for s in batch.samples]
    rows = fetched(plan, ids, missing=0.3 if holes else 0.0)
    found = []
    for number, (sample, one) in enumerate(zip(batch.samples, ids, strict=True)):
        if not sample.num_tokens:
            continue
        valid = np.zeros(one.shape[:2], bool)
        for token in np.flatnonzero((plan.sample_of == number) & plan.planned):
            valid[plan.position_of[token]] = rows.valid[:, token]
        found.append(Known(layout, one, valid, None))
    for sample, split in zip(found, rows.per_sample(), strict=True):
        sample.rows = split
    return found, rows


def any_sample(rng: random.Random, holes: bool = False, layout: ModelLayout | None = None):
    if rng.randrange(2):
        return known(rng, layout, holes)
    return rng.choice(batch_of(rng, holes, layout)[0])
