"""Layouts that are read off tensors: compared with sequences that were laid out by hand.

All token ids of a batch differ, those of padding too, so that an id says which token a place has.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from routetrace.client import (
    FetchPlan,
    InvalidArgument,
    Located,
    Locations,
    MicroBatch,
    MissingRange,
    MissingReason,
    ModelLayout,
    Rank,
    Sample,
    Segment,
)
from support.devices import DEVICES
from support.ranks.planned import on_rank

LAYOUT = ModelLayout((1, 2, 4), 6, 40, 3)
WHOLE = Rank((1,), flatten="batch")
randoms = st.integers(0, 2**63).map(random.Random)

#: Each sequence has ids of its own from a multiple of it on; padding has those below.
EACH = 1000


def sequences(lengths: list[int]) -> list[np.ndarray]:
    return [EACH * (number + 1) + np.arange(length) for number, length in enumerate(lengths)]


def in_rows(seqs: list[np.ndarray], starts: list[int], seq_len: int) -> np.ndarray:
    """Sequences in the rows of an array, each from a column on."""
    ids = np.arange(len(seqs) * seq_len).reshape(len(seqs), seq_len) % EACH
    for row, tokens, start in zip(ids, seqs, starts, strict=True):
        row[start : start + len(tokens)] = tokens
    return ids


def in_a_stream(seqs: list[np.ndarray], padding: int) -> np.ndarray:
    return np.concatenate([*seqs, np.arange(padding)])


@dataclass
class Laid:
    """A micro-batch, the ids of its tensors, and the sequences in them."""

    batch: MicroBatch
    ids: np.ndarray
    """[lanes, tokens]."""
    seqs: list[np.ndarray]
    parts: list[int]
    """Tokens of what context parallelism splits by itself in a lane."""


def laid_out(rng: random.Random, rank: Rank) -> Laid:
    """Sequences in any layout, which the rank can split."""
    unit = 2 * rank.cp_size * rank.sp_size
    kind = rng.choice(["mask", "starts", "left", "right", "positions", "three axes", "cu_seqlens"])
    count = rng.randint(1, 4)
    if kind in ("mask", "starts", "left", "right"):
        seq_len = unit * rng.randint(1, 12 // unit + 2)
        seqs = sequences([rng.randint(0, seq_len) for _ in range(count)])
        starts = [rng.randint(0, seq_len - len(s)) for s in seqs]
        if kind in ("left", "right"):
            starts = [seq_len - len(s) if kind == "left" else 0 for s in seqs]
        ids = in_rows(seqs, starts, seq_len)
        samples = [Sample.of(token_ids=s) for s in seqs]
        if kind == "mask":
            kind_of = rng.choice([np.int64, np.uint8, np.bool_])
            batch = MicroBatch.from_mask(ids, (ids >= EACH).astype(kind_of))
        elif kind == "starts":
            batch = MicroBatch.padded(samples, seq_len, starts=starts)
        else:
            batch = MicroBatch.padded(samples, seq_len, padding_side=kind)
        return Laid(batch, ids, seqs, [seq_len])
    if rank.cp_layout == "ulysses":  # only the whole is split
        seqs = sequences([rng.randint(2, 20) for _ in range(count)])
        total = sum(map(len, seqs))
        padding = -total % unit + unit * rng.randrange(2)
        parts = [total + padding]
    else:
        parts = [unit * rng.randint(1, 3) for _ in range(count)]
        seqs = sequences(parts)
        padding = unit * rng.randrange(3)
        parts = [*parts, padding]
    stream = in_a_stream(seqs, padding)
    total = len(stream) - padding
    if kind == "cu_seqlens":
        ends = np.cumsum([0, *map(len, seqs)]).astype(np.int32)
        return Laid(MicroBatch.from_cu_seqlens(stream[None], ends), stream[None], seqs, parts)
    counts_on = rng.random() < 0.5
    behind = np.arange(padding) if counts_on else np.zeros(padding, int)
    positions = np.concatenate([*(np.arange(len(s)) for s in seqs), behind])
    if kind == "three axes":
        positions = np.stack([np.minimum(positions, 3), positions, positions // 2])[:, None]
    batch = MicroBatch.from_position_ids(stream, positions, num_tokens=total if counts_on else None)
    return Laid(batch, stream[None], seqs, parts)


@settings(max_examples=400)
@given(randoms)
def test_every_place_has_its_token(rng):
    cp_size, sp_size = rng.choice([1, 1, 2, 3]), rng.choice([1, 1, 2])
    rank = Rank(
        (1, 4),
        cp_size,
        rng.randrange(cp_size),
        rng.choice(["zigzag", "contiguous", "ulysses"]),
        sp_size,
        rng.randrange(sp_size),
        rng.choice(["sequence", "batch"]),
    )
    laid = laid_out(rng, rank)
    plan = FetchPlan.make(LAYOUT, laid.batch, rank)

    # What a trainer does to its token ids, array by array.
    lanes = []
    for row in laid.ids:
        parts = np.split(row, np.cumsum(laid.parts)[:-1])
        kept = np.concatenate([on_rank(part, rank) for part in parts])
        lanes.append(np.split(kept, sp_size)[rank.sp_rank])
    local = np.stack(lanes, axis=1 if rank.flatten == "sequence" else 0).reshape(-1)

    assert [s.token_ids.tolist() for s in laid.batch.samples] == [s.tolist() for s in laid.seqs]
    assert all(s.find and not s.segments for s in laid.batch.samples)
    there = local >= EACH
    assert plan.sample_of.tolist() == np.where(there, local // EACH - 1, -1).tolist()
    assert plan.position_of.tolist() == np.where(there, local % EACH, -1).tolist()
    last = {int(s[-1]) for s in laid.seqs if len(s)}
    planned = [bool(token >= EACH and token not in last) for token in local.tolist()]
    assert plan.planned.tolist() == planned
    assert plan.num_rows == sum(planned)
    needed = {int(token) // EACH - 1 for token in local[plan.planned].tolist()}
    assert {number for number, _ in plan.unproven} == needed
    assert plan.reads == ()

    # Located samples are read as those whose segments were known from the start.
    places = [place_of(rng, number, len(s)) for number, s in enumerate(laid.seqs)]
    located = plan.with_locations(Locations([places[number] for number in plan.to_find]))
    known = [
        Sample(len(s), segments_of(place, len(s)))
        for s, place in zip(laid.seqs, places, strict=True)
    ]
    batch = MicroBatch(tuple(known), laid.batch.lanes, laid.batch.lane_len)
    assert located.reads == FetchPlan.make(LAYOUT, batch, rank).reads
    assert located.planned.tolist() == planned


def place_of(rng: random.Random, number: int, count: int) -> Located | None:
    """The request of a sequence: none, its own, one that it is cut out of, or that it continues."""
    if rng.random() < 0.2:
        return None
    tokens = rng.randint(1, 2 * count + 1)
    return Located(f"t{number}", rng.randint(1, 3), tokens, rng.randint(0, min(tokens, count)))


def segments_of(place: Located | None, count: int) -> tuple[Segment, ...]:
    """Rows of tokens that are proven, but the last one of the request, and of the sequence."""
    if place is None or not (rows := min(place.proven, place.num_tokens - 1, count - 1)) > 0:
        return ()
    return (Segment(place.trace_id, 0, rows, None, place.incarnation, place.num_tokens),)


# ------------------------------------------------------------------ tensors


@pytest.mark.parametrize("device", DEVICES)
def test_tensors_and_lists_are_taken(device):
    ids = in_rows(sequences([3, 0, 4]), [1, 0, 0], 4)
    tensor, mask = torch.from_numpy(ids).to(device), torch.from_numpy(ids >= EACH).to(device)
    position_ids = torch.tensor([[0, 1, 2, 0, 1]], device=device)
    cu_seqlens = torch.tensor([0, 3, 5], dtype=torch.int32, device=device)
    for given_ids, given_mask in (
        (tensor, mask),
        (tensor.int(), mask.long()),
        (ids.tolist(), (ids >= EACH).tolist()),
    ):
        batch = MicroBatch.from_mask(given_ids, given_mask)
        found = [s.token_ids.tolist() for s in batch.samples]
        assert found == [s.tolist() for s in sequences([3, 0, 4])]
    stream = in_a_stream(sequences([3, 2]), 0)
    for packed in (
        MicroBatch.from_position_ids(torch.from_numpy(stream)[None].to(device), position_ids),
        MicroBatch.from_position_ids(stream.tolist(), [0, 1, 2, 0, 1]),
        MicroBatch.from_cu_seqlens(torch.from_numpy(stream).to(device), cu_seqlens),
        MicroBatch.from_cu_seqlens([stream.tolist()], [0, 3, 5]),
    ):
        found = [s.token_ids.tolist() for s in packed.samples]
        assert found == [s.tolist() for s in sequences([3, 2])]
        assert (len(packed.lanes), packed.lane_len) == (1, 5)


def test_a_row_of_zeros_is_a_sample_without_tokens():
    batch = MicroBatch.from_mask(np.ones((3, 4), int), [[0, 1, 1, 0], [0] * 4, [1] * 4])
    assert [s.num_tokens for s in batch.samples] == [2, 0, 4]
    plan = FetchPlan.make(LAYOUT, batch, WHOLE)
    assert plan.sample_of.tolist() == [-1, 0, 0, -1, -1, -1, -1, -1, 2, 2, 2, 2]
    assert plan.to_find == (0, 2)


@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (0, 0)])
def test_an_empty_array_has_no_tokens(shape):
    batch = MicroBatch.from_mask(np.zeros(shape, int), np.zeros(shape, int))
    assert [s.num_tokens for s in batch.samples] == [0] * shape[0]
    assert FetchPlan.make(LAYOUT, batch, WHOLE).num_tokens == 0


def test_an_empty_stream_has_no_samples():
    no_ids = np.zeros((1, 0), int)
    for batch in (
        MicroBatch.from_position_ids(no_ids, no_ids),
        MicroBatch.from_cu_seqlens(no_ids, [0]),
    ):
        assert (batch.samples, batch.lane_len) == ((), 0)


# ------------------------------------------------------------------ packed


def test_zeros_at_the_end_are_padding():
    batch = MicroBatch.from_position_ids(np.arange(9), [0, 0, 1, 2, 0, 1, 0, 0, 0])
    assert [s.num_tokens for s in batch.samples] == [1, 3, 2]
    # One unit of padding, which context parallelism can split.
    assert [unit[:3] for unit in batch.lanes[0]] == [(0, 1, 0), (1, 3, 1), (4, 2, 2), (6, 3, -1)]
    batch = MicroBatch.from_position_ids(np.arange(3), [0, 0, 0])
    assert (batch.samples, batch.lane_len) == ((), 3)
    # With the number of tokens, sequences of one token at the end are samples.
    batch = MicroBatch.from_position_ids(np.arange(5), [0, 1, 0, 0, 1], num_tokens=3)
    assert [s.num_tokens for s in batch.samples] == [2, 1]
    assert batch.lane_len == 5


def test_an_image_at_the_start_of_a_sequence_begins_no_other():
    # Axes of time, height and width: an image of 2 x 2, two words; a word, an image of 1 x 2.
    position_ids = np.array([
        [0, 0, 0, 0, 2, 3, 0, 1, 1],
        [0, 0, 1, 1, 2, 3, 0, 1, 1],
        [0, 1, 0, 1, 2, 3, 0, 1, 2],
    ])  # fmt: skip
    batch = MicroBatch.from_position_ids(np.arange(9), position_ids[:, None])
    assert [s.token_ids.tolist() for s in batch.samples] == [[0, 1, 2, 3, 4, 5], [6, 7, 8]]
    # With positions of the text in front, as verl has them for Qwen3-VL.
    text = np.array([[0, 1, 2, 3, 4, 5, 0, 1, 2]])
    batch = MicroBatch.from_position_ids(
        np.arange(9), np.concatenate([text, position_ids])[:, None]
    )
    assert [s.num_tokens for s in batch.samples] == [6, 3]


def test_sequences_without_tokens_keep_their_numbers():
    batch = MicroBatch.from_cu_seqlens(np.arange(6), [0, 2, 2, 5, 5])
    assert [s.token_ids.tolist() for s in batch.samples] == [[0, 1], [], [2, 3, 4], []]
    plan = FetchPlan.make(LAYOUT, batch, WHOLE)
    assert plan.sample_of.tolist() == [0, 0, 2, 2, 2, -1]


# ------------------------------------------------------------------ samples that are found


def test_a_sample_without_a_trace_id_has_its_tokens():
    sample = Sample.of(token_ids=[7, 8, 9], padded_len=4)
    assert (sample.num_tokens, sample.segments, sample.find) == (3, (), True)
    assert sample.padded_len == 4
    assert sample.token_ids.tolist() == [7, 8, 9]
    assert not Sample.of("a", token_ids=[7, 8, 9]).find


def found_by_tokens() -> FetchPlan:
    samples = [Sample.of("a", 4), Sample.of(token_ids=[1, 2, 3]), Sample.of(token_ids=[4, 5, 6, 7])]
    return FetchPlan.make(LAYOUT, MicroBatch.packed(samples), WHOLE)


def test_rows_that_no_request_is_proven_to_have_stay_planned():
    plan = found_by_tokens()
    planned = [True, True, True, False, True, True, False, True, True, True, False]
    assert plan.planned.tolist() == planned
    assert plan.to_find == (1, 2)
    assert [ids.tolist() for ids in plan.sequences] == [[1, 2, 3], [4, 5, 6, 7]]
    assert [read.sample for read in plan.reads] == [0]
    assert plan.unproven == (missing(1, 0, 2), missing(2, 0, 3))
    cut = plan.with_locations(Locations([None, Located("c", 2, 9, 2)], ambiguous=[0]))
    places = [(r.sample, r.segment.trace_id, *r.pieces[0][:3]) for r in cut.reads]
    assert places == [(0, "a", 0, 3, 0), (2, "c", 0, 2, 7)]
    assert (cut.reads[1].segment.incarnation, cut.reads[1].segment.num_tokens) == (2, 9)
    assert cut.unproven == (missing(1, 0, 2, MissingReason.AMBIGUOUS), missing(2, 2, 3))
    both = cut.with_locations(Locations([Located("b", 1, 3, 3), Located("d", 1, 2, 2)]))
    places = [(r.sample, r.segment.trace_id, *r.pieces[0][:3]) for r in both.reads]
    assert places == [(0, "a", 0, 3, 0), (1, "b", 0, 2, 4), (2, "d", 0, 1, 7)]
    assert both.unproven == (missing(2, 1, 3),)
    for one in (cut, both):
        assert one.planned.tolist() == planned
        assert one.num_rows == 8


def missing(sample, start, stop, reason=MissingReason.NOT_PROVEN):
    return sample, MissingRange(start, stop, WHOLE.layer_ids, reason)


def test_a_rank_looks_for_the_samples_that_it_has_rows_of():
    seqs = sequences([4, 3, 5, 4])
    stream, ends = in_a_stream(seqs, 0), np.cumsum([0, *map(len, seqs)])
    batch = MicroBatch.from_cu_seqlens(stream, ends)
    plans = [
        FetchPlan.make(LAYOUT, batch, Rank((1,), cp_size=4, cp_rank=rank, cp_layout="ulysses"))
        for rank in range(4)
    ]
    needed = [[number for number, _ in plan.unproven] for plan in plans]
    assert needed == [[0], [1, 2], [2], [3]]
    assert all(plan.to_find == (0, 1, 2, 3) for plan in plans)
    nothing = FetchPlan.make(LAYOUT, batch, Rank(()))
    assert (nothing.unproven, nothing.num_rows) == ((), 0)
    everything = Locations([Located("a", 1, 9, 9)] * 4)
    assert nothing.with_locations(everything).reads == ()


# ------------------------------------------------------------------ refusals

ROW = np.arange(4)
ONES = np.ones((2, 3), int)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Sample.of, "token_ids is None; expected the token ids, as there is no trace_id"),
        (lambda: Sample.of(num_tokens=3), "token_ids is None"),
        (lambda: Sample.of(None, 4, token_ids=[1]), "token_ids is of int64 and shape (1,)"),
        (lambda: Sample.of(token_ids=[1], nonce=4), "nonce is 4; expected None, as there is no"),
        (lambda: Sample.of(token_ids=[1], incarnation=1), "incarnation is 1; expected None"),
        (lambda: Sample(3, find=True), "token_ids is None"),
        (
            lambda: Sample(3, (Segment("a", 0, 2),), token_ids=[1, 2, 3], find=True),
            "find is True, with 1 segments; expected True without segments",
        ),
        (
            lambda: MicroBatch.padded([], 8, padding_side="left", starts=[]),
            "padding_side is 'left'; expected None beside starts",
        ),
        (
            lambda: MicroBatch.padded([Sample.of("a", 3)], 8, starts=[1, 2]),
            "starts is of int64 and shape (2,); expected 1 integers",
        ),
        (
            lambda: MicroBatch.padded([Sample.of("a", 3), Sample.of("b", 5)], 8, starts=[5, 4]),
            "starts[1] is 4; expected at most 3: seq_len 8 - 5 tokens",
        ),
        (
            lambda: MicroBatch.padded([Sample.of("a", 9)], 8, starts=[0]),
            "samples[0].num_tokens is 9; expected at most seq_len = 8",
        ),
        (
            lambda: MicroBatch.from_mask(ROW, ROW),
            "input_ids is of int64 and shape (4,); expected [batch, seq] integers in [0, 2**32); "
            "use from_position_ids or from_cu_seqlens",
        ),
        (lambda: MicroBatch.from_mask([[1], [2, 3]], ONES), "input_ids is ragged"),
        (
            lambda: MicroBatch.from_mask(-ONES, ONES),
            "input_ids is in [-1, -1]; expected [batch, seq] integers",
        ),
        (
            lambda: MicroBatch.from_mask(ONES, ONES.T),
            "attention_mask is of int64 and shape (3, 2); expected [2, 3] of 0 and 1, or bool",
        ),
        (lambda: MicroBatch.from_mask(ONES, ONES * 1.0), "attention_mask is of float64 and shape"),
        (
            lambda: MicroBatch.from_mask(ONES, [[1, 1, 2], [1, 1, 1]]),
            "attention_mask is in [1, 2]; expected [2, 3] of 0 and 1, or bool, as input_ids; "
            "use from_position_ids",
        ),
        (
            lambda: MicroBatch.from_mask(ONES, [[1, 1, 1], [1, 0, 1]]),
            "attention_mask[1] is ones in 2 stretches; expected one stretch of ones",
        ),
        (
            lambda: MicroBatch.from_position_ids(ONES, ONES),
            "input_ids is of int64 and shape (2, 3); expected [total] or [1, total] integers in "
            "[0, 2**32); use from_mask",
        ),
        (
            lambda: MicroBatch.from_position_ids(ROW, ROW[:3]),
            "position_ids is of int64 and shape (3,); expected [4], [1, 4] or [n, 1, 4] integers",
        ),
        (
            lambda: MicroBatch.from_position_ids(ROW, np.zeros((3, 4), int)),
            "position_ids is of int64 and shape (3, 4)",
        ),
        (
            lambda: MicroBatch.from_position_ids(ROW, [2, 3, 0, 1]),
            "position_ids[0] is 2; expected 0; give whole sequences",
        ),
        (
            lambda: MicroBatch.from_position_ids(ROW, [0, 1, 6, 7]),
            "position_ids[2] is 6; expected 2, or 0 where a sequence begins",
        ),
        (
            lambda: MicroBatch.from_position_ids(ROW, [0, 1, 0, 2]),
            "position_ids[3] is 2; expected 1, or 0",
        ),
        (
            lambda: MicroBatch.from_position_ids(ROW, [[[0, 1, 2, 3]], [[1, 2, 3, 4]]]),
            "position_ids[0] is [0, 1]; expected 0",
        ),
        (lambda: MicroBatch.from_position_ids(ROW, ROW, num_tokens=5), "num_tokens is 5"),
        (lambda: MicroBatch.from_cu_seqlens(ROW, []), "cu_seqlens is empty; expected 0, then"),
        (lambda: MicroBatch.from_cu_seqlens(ROW, [1, 4]), "cu_seqlens is from 1 to 4"),
        (
            lambda: MicroBatch.from_cu_seqlens(ROW, [0, 5]),
            "cu_seqlens is from 0 to 5; expected 0, then the end of each sequence, up to the 4",
        ),
        (
            lambda: MicroBatch.from_cu_seqlens(ROW, np.array([0, 3, 1, 4], np.uint32)),
            "cu_seqlens is from 0 to 4, with a descent",
        ),
        (
            lambda: found_by_tokens().with_locations(Locations([None])),
            "locations is 1 of them; expected 2, one for each of plan.sequences",
        ),
        (lambda: found_by_tokens().with_locations([None, None]), "locations is a list"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(make, message):
    with pytest.raises(InvalidArgument) as error:
        make()
    assert message in str(error.value)
