"""Plans place rows as trainers place tokens: compared with arrays that are cut step by step."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routetrace.client import MicroBatch, Rank, Sample, Segment, make_plan
from routetrace.v1.errors import InvalidArgument
from routetrace.v1.layout import RoutingLayout

LAYOUT = RoutingLayout((1, 2, 4, 5, 7), 9, 40, 3)
PADDING = -1

randoms = st.integers(0, 2**63).map(random.Random)

# ------------------------------------------------------------------ the reference
#
# Every token is a number: sample * MANY + position. What trainers do to arrays of token ids is done
# to arrays of these, one array operation at a time.

MANY = 1 << 20


def serials(batch: MicroBatch, number: int, length: int) -> np.ndarray:
    sample = batch.samples[number]
    padding = np.full(length - sample.num_tokens, PADDING)
    return np.concatenate([number * MANY + np.arange(sample.num_tokens), padding])


def zigzag(row: np.ndarray, size: int, rank: int) -> np.ndarray:
    """Megatron's get_batch_on_this_cp_rank: chunks of a sequence, the rank's and its mirror's."""
    if size == 1:
        return row
    chunks = row.reshape(2 * size, -1)
    return np.concatenate([chunks[rank], chunks[2 * size - 1 - rank]])


def local_serials(kind, batch, lengths, seq_len, side, rank) -> np.ndarray:
    """The serial of every local token of a rank, in its order; PADDING where there is none."""
    if kind == "packed":
        rows = [serials(batch, i, n) for i, n in enumerate(lengths)]
        rows.append(np.full(seq_len - sum(lengths), PADDING))
        if rank.cp_layout == "ulysses":
            rows = [np.concatenate(rows)]
        if rank.cp_layout == "zigzag":
            rows = [zigzag(row, rank.cp_size, rank.cp_rank) for row in rows]
        else:
            rows = [np.split(row, rank.cp_size)[rank.cp_rank] for row in rows]
        tokens = np.concatenate(rows)[:, None]  # [seq, batch of one]
    else:
        rows = [serials(batch, i, seq_len) for i in range(len(batch.samples))]
        if side == "left":
            rows = [np.roll(r, int((r == PADDING).sum())) for r in rows]
        if rank.cp_layout == "zigzag":
            rows = [zigzag(row, rank.cp_size, rank.cp_rank) for row in rows]
        else:
            rows = [np.split(row, rank.cp_size)[rank.cp_rank] for row in rows]
        tokens = np.stack(rows, axis=1)  # [seq, batch]
    tokens = np.split(tokens, rank.sp_size)[rank.sp_rank]
    return (tokens if rank.flatten == "sequence" else tokens.T).reshape(-1)


def requests_of(rng: random.Random, number: int, num_tokens: int) -> Sample:
    """A sample with rows of some requests, some positions without any."""
    kind = rng.choice(["of", "turns", "segments"])
    if kind == "of" and num_tokens:
        return Sample.of(f"r{number}", num_tokens)
    if kind == "turns" and num_tokens > 2:
        ends = sorted({*rng.sample(range(1, num_tokens), rng.randint(1, 2)), num_tokens})
        return Sample.turns([(f"r{number}-{i}", end) for i, end in enumerate(ends)])
    segments, at = [], 0
    while at < num_tokens:
        stop = rng.randint(at + 1, num_tokens)
        if rng.random() < 0.8:
            start = rng.randrange(50)
            request = f"r{number}-{rng.randrange(2)}"
            segments.append(Segment(request, start, start + stop - at, at=at))
        at = stop
    return Sample(num_tokens, tuple(segments))


def drawn(rng: random.Random):
    """A batch, a rank, and what the reference needs."""
    kind = rng.choice(["packed", "padded"])
    cp_size, sp_size = rng.choice([1, 1, 2, 3, 4]), rng.choice([1, 1, 2, 4])
    rank = Rank(
        sorted(rng.sample(LAYOUT.layer_ids, rng.randint(1, 5))),
        cp_size,
        rng.randrange(cp_size),
        rng.choice(["zigzag", "contiguous", "ulysses"]),
        sp_size,
        rng.randrange(sp_size),
        rng.choice(["sequence", "batch"]),
    )
    unit = 2 * cp_size * sp_size
    samples = [requests_of(rng, i, rng.randint(0, 40)) for i in range(rng.randint(1, 5))]
    side = rng.choice(["left", "right"])
    if kind == "padded":
        seq_len = -(-max(s.num_tokens for s in samples) // unit) * unit + unit * rng.randrange(2)
        return kind, MicroBatch.padded(samples, seq_len, padding_side=side), [], seq_len, side, rank
    lengths = [-(-s.num_tokens // unit) * unit + unit * rng.randrange(2) for s in samples]
    if rng.random() < 0.5:  # said by each sample, or by `align`
        samples = [replace(s, padded_len=n) for s, n in zip(samples, lengths, strict=True)]
    else:
        lengths = [-(-s.num_tokens // unit) * unit for s in samples]
    total = sum(lengths) + unit * rng.randrange(2)
    batch = MicroBatch.packed(samples, align=unit, total_len=total if rng.random() < 0.7 else None)
    return kind, batch, lengths, batch.lane_len, side, rank


# ------------------------------------------------------------------ placing


@settings(max_examples=600, deadline=None)
@given(randoms)
def test_every_token_is_where_the_trainer_has_it(rng):
    kind, batch, lengths, seq_len, side, rank = drawn(rng)
    plan = make_plan(LAYOUT, batch, rank)
    expected = local_serials(kind, batch, lengths, seq_len, side, rank)

    assert plan.shape == (len(rank.layer_ids), len(expected), LAYOUT.top_k)
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
                rows[places[0]] = (read.segment.request_id, position)
    assert rows == [row_of(batch, serial) for serial in expected.tolist()]
    assert plan.planned.tolist() == [row is not None for row in rows]
    assert plan.num_rows == sum(row is not None for row in rows)


def row_of(batch: MicroBatch, serial: int) -> tuple[str, int] | None:
    if serial == PADDING:
        return None
    sample, position = divmod(serial, MANY)
    for segment in batch.samples[sample].segments:
        at = segment.at if segment.at is not None else segment.start
        if at <= position < at + segment.stop - segment.start:
            return segment.request_id, segment.start + position - at
    return None


@settings(max_examples=100, deadline=None)
@given(randoms)
def test_the_ranks_share_all_tokens_and_none_twice(rng):
    kind, batch, lengths, seq_len, side, rank = drawn(rng)
    seen = []
    for cp_rank in range(rank.cp_size):
        for sp_rank in range(rank.sp_size):
            plan = make_plan(LAYOUT, batch, replace(rank, cp_rank=cp_rank, sp_rank=sp_rank))
            there = plan.sample_of >= 0
            seen += list(zip(plan.sample_of[there], plan.position_of[there], strict=True))
    wanted = [(i, p) for i, s in enumerate(batch.samples) for p in range(s.num_tokens)]
    assert sorted(seen) == wanted


def test_a_large_batch_is_planned_at_once():
    samples = [Sample.of(f"r{i}", 100 + i % 57) for i in range(4096)]
    batch = MicroBatch.packed(samples, align=16)
    plan = make_plan(LAYOUT, batch, Rank((1,), cp_size=2, cp_rank=1, sp_size=4, sp_rank=3))
    assert plan.num_tokens * 8 == batch.lane_len


# ------------------------------------------------------------------ samples


def test_a_request_of_n_tokens_gives_n_minus_1_rows():
    assert Sample.of("a", 7).segments == (Segment("a", 0, 6),)
    assert Sample.of("a", token_ids=[5, 6, 7]).num_tokens == 3
    assert Sample.of("a", 1).segments == ()
    assert Sample.padding(8).padded_len == 8


def test_a_later_turn_gives_the_row_of_the_last_token_of_the_turn_before():
    sample = Sample.turns([("a", 10), ("b", 25), ("c", 26)])
    assert sample.segments == (Segment("a", 0, 9), Segment("b", 9, 24), Segment("c", 24, 25))
    assert sample.num_tokens == 26


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: Sample.of("a"), "num_tokens"),
        (lambda: Sample.of("", 3), "request_id"),
        (lambda: Sample.of("a", 3, token_ids=[1, 2]), "token_ids"),
        (lambda: Sample.of("a", 3, token_ids=[1, 2, -3]), "token_ids"),
        (lambda: Sample.of("a", 3, padded_len=2), "padded_len"),
        (lambda: Sample.turns([("a", 5), ("b", 5)]), "requests[1].num_tokens"),
        (lambda: Sample(5, (Segment("a", 0, 6),)), "segments[0]"),
        (lambda: Sample(5, (Segment("a", 0, 3), Segment("b", 2, 5))), "segments[1]"),
        (lambda: Segment("a", 3, 3), "stop"),
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
        (MicroBatch.padded([Sample.of("a", 9)], 10), Rank((1,), cp_size=4), "cp_size"),
    ],
)
def test_what_cannot_be_split_is_refused(batch, rank, field):
    with pytest.raises(InvalidArgument) as error:
        make_plan(LAYOUT, batch, rank)
    assert error.value.field == field
