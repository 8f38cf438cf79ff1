"""Plans place rows as trainers place tokens: compared with arrays that are cut step by step."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routetrace.client import FetchPlan, MicroBatch, Rank, Sample, Segment
from routetrace.common.errors import InvalidArgument
from routetrace.common.layout import ModelLayout
from support.ranks.planned import MANY, PADDING, drawn

LAYOUT = ModelLayout((1, 2, 4, 5, 7), 9, 40, 3)
randoms = st.integers(0, 2**63).map(random.Random)

# ------------------------------------------------------------------ placing


@settings(max_examples=600)
@given(randoms)
def test_every_token_is_where_the_trainer_has_it(rng):
    case = drawn(rng, LAYOUT.layer_ids)
    plan = FetchPlan.make(LAYOUT, case.batch, case.rank)
    expected = case.serials()

    assert plan.shape == (len(case.rank.layer_ids), len(expected), LAYOUT.top_k)
    there = plan.sample_of >= 0
    got = np.where(there, plan.sample_of.astype(np.int64) * MANY + plan.position_of, PADDING)
    assert got.tolist() == expected.tolist()

    # And so is every row: of which request, and which position of it.
    rows = [None] * len(expected)
    for read in plan.reads:
        assert [p.start for p in read.pieces] == sorted(p.start for p in read.pieces)
        for piece in read.pieces:
            for position in range(piece.start, piece.stop):
                places = range(len(expected))[piece.where(position, position + 1)]
                assert len(places) == 1
                assert rows[places[0]] is None
                rows[places[0]] = (read.segment.trace_id, position)
    assert rows == [case.row_of(serial) for serial in expected.tolist()]
    assert plan.planned.tolist() == [row is not None for row in rows]
    assert plan.num_rows == sum(row is not None for row in rows)


@settings(max_examples=100)
@given(randoms)
def test_the_ranks_share_all_tokens_and_none_twice(rng):
    case = drawn(rng, LAYOUT.layer_ids)
    rank, seen = case.rank, []
    for cp_rank in range(rank.cp_size):
        for sp_rank in range(rank.sp_size):
            plan = FetchPlan.make(
                LAYOUT, case.batch, replace(rank, cp_rank=cp_rank, sp_rank=sp_rank)
            )
            there = plan.sample_of >= 0
            seen += list(zip(plan.sample_of[there], plan.position_of[there], strict=True))
    samples = enumerate(case.batch.samples)
    assert sorted(seen) == [(i, p) for i, s in samples for p in range(s.num_tokens)]


def test_a_large_batch_is_planned_at_once():
    samples = [Sample.of(f"r{i}", 100 + i % 57) for i in range(4096)]
    batch = MicroBatch.packed(samples, align=16)
    plan = FetchPlan.make(LAYOUT, batch, Rank((1,), cp_size=2, cp_rank=1, sp_size=4, sp_rank=3))
    assert plan.num_tokens * 8 == batch.lane_len


# ------------------------------------------------------------------ samples


def test_a_request_of_n_tokens_gives_n_minus_1_rows():
    assert Sample.of("a", 7).segments == (Segment("a", 0, 6, num_tokens=7),)
    assert Sample.of("a", token_ids=[5, 6, 7]).num_tokens == 3
    assert Sample.of("a", 1).segments == ()
    assert Sample.padding(8).padded_len == 8


def test_a_later_turn_gives_the_row_of_the_last_token_of_the_turn_before():
    sample = Sample.turns([("a", 10), ("b", 25), ("c", 26)])
    assert [(s.trace_id, s.start, s.stop, s.num_tokens) for s in sample.segments] == [
        ("a", 0, 9, 10),
        ("b", 9, 24, 25),
        ("c", 24, 25, 26),
    ]
    assert sample.num_tokens == 26


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: Sample.of("a"), "num_tokens"),
        (lambda: Sample.of("", 3), "trace_id"),
        (lambda: Sample.of("a", 3, token_ids=[1, 2]), "token_ids"),
        (lambda: Sample.of("a", 3, token_ids=[1, 2, -3]), "token_ids"),
        (lambda: Sample.of("a", 3, padded_len=2), "padded_len"),
        (lambda: Sample.turns([("a", 5), ("b", 5)]), "traces[1].num_tokens"),
        (lambda: Sample.turns(None), "traces"),
        (lambda: Sample.turns("a"), "traces"),
        (lambda: Sample.turns([("a",)]), "traces[0]"),
        (lambda: Sample.turns([("a", 5), "bc"]), "traces[1]"),
        (lambda: Sample.turns([(3, 1)]), "trace_id"),
        (lambda: Sample(5, (Segment("a", 0, 6),)), "segments[0]"),
        (lambda: Sample(5, (Segment("a", 0, 3), Segment("b", 2, 5))), "segments[1]"),
        (lambda: Segment("a", 3, 3), "stop"),
        (lambda: Segment("a", 3, 5, num_tokens=5), "num_tokens"),
        (lambda: MicroBatch.packed([], align=0), "align"),
        (lambda: MicroBatch.packed([Sample.of("a", 9)], total_len=8), "total_len"),
        (lambda: MicroBatch.padded([Sample.of("a", 9)], 8), "samples[0].num_tokens"),
        (lambda: MicroBatch.padded([], 8, padding_side="top"), "padding_side"),
        (lambda: Rank((1,), cp_size=2, cp_rank=2), "cp_rank"),
        (lambda: Rank((1,), sp_size=0), "sp_size"),
        (lambda: Rank((1,), cp_layout="striped"), "cp_layout"),
        (lambda: Rank((1,), flatten="none"), "flatten"),
    ],
)
def test_what_is_wrong_is_named(make, field):
    with pytest.raises(InvalidArgument) as error:
        make()
    assert error.value.field == field


@pytest.mark.parametrize(
    ("batch", "rank", "field"),
    [
        (MicroBatch.packed([Sample.of("a", 10)]), Rank((3,)), "layer_ids"),
        (MicroBatch.packed([Sample.of("a", 10)]), Rank((2, 1)), "layer_ids"),
        (MicroBatch.packed([Sample.of("a", 10)]), Rank((1,), cp_size=2), "cp_size"),
        (MicroBatch.packed([Sample.of("a", 9)]), Rank((1,), sp_size=2), "sp_size"),
        (
            MicroBatch.padded([Sample.of("a", 9)], 10, padding_side="left"),
            Rank((1,), cp_size=4),
            "cp_size",
        ),
    ],
)
def test_what_cannot_be_split_is_refused(batch, rank, field):
    with pytest.raises(InvalidArgument) as error:
        FetchPlan.make(LAYOUT, batch, rank)
    assert error.value.field == field
