"""Replay refuses passes of other tokens than those of the plan: shifted, swapped, one other."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from routetrace.client import FetchPlan, MicroBatch, Rank, Sample
from routetrace.client.rows import Rows
from routetrace.common.errors import InvalidArgument
from routetrace.trainers.replay import collate, replay
from support.models.tiny_models import VOCABULARY, tiny_model
from support.ranks.rank_rows import facts_of, random_choices, rows_of

MODEL, LAYOUT = tiny_model("qwen3_moe")
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.cuda,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
        ],
    ),
]


def sequences(lengths: list[int], seed: int = 0) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    return [random.integers(3, VOCABULARY, length) for length in lengths]


def rows_for(batch: MicroBatch) -> Rows:
    """Rows of random choices."""
    plan = FetchPlan.make(LAYOUT, batch, Rank(LAYOUT.layer_ids, flatten="batch"))
    shape = (max(sample.num_tokens for sample in batch.samples), len(LAYOUT.layer_ids))
    ids = [
        random_choices(shape, LAYOUT.num_experts, LAYOUT.top_k, i)
        for i in range(len(batch.samples))
    ]
    reads = tuple(facts_of(LAYOUT, [(0, shape[0], 7)]) for _ in plan.reads)
    return rows_of(plan, ids, 0.0, reads)


def padded(seqs: list[np.ndarray], seq_len: int, side: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and mask as a tokenizer pads them."""
    ids = np.zeros((len(seqs), seq_len), np.int64)
    mask = np.zeros((len(seqs), seq_len), np.int64)
    for row, tokens in enumerate(seqs):
        at = seq_len - len(tokens) if side == "left" else 0
        ids[row, at : at + len(tokens)] = tokens
        mask[row, at : at + len(tokens)] = 1
    return torch.from_numpy(ids), torch.from_numpy(mask)


def replayed(rows: Rows, call: Any) -> str:
    """Run a pass; return the refusal, or ""."""
    try:
        with replay(MODEL, rows), torch.no_grad():
            call()
    except InvalidArgument as error:
        return f"{error}"
    return ""


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 7), min_size=1, max_size=3),
    room=st.integers(0, 3),
    sides=st.tuples(st.sampled_from(["left", "right"]), st.sampled_from(["left", "right"])),
    proven=st.booleans(),
)
def test_a_pass_is_refused_exactly_where_its_padding_is_on_the_other_side(
    lengths, room, sides, proven
):
    seqs, seq_len = sequences(lengths), max(lengths) + room
    planned, given_side = sides
    samples = [
        Sample.of(f"r{i}", len(tokens), token_ids=tokens if proven else None)
        for i, tokens in enumerate(seqs)
    ]
    rows = rows_for(MicroBatch.padded(samples, seq_len, padding_side=planned))
    ids, mask = padded(seqs, seq_len, given_side)
    refused = replayed(rows, lambda: MODEL(ids, attention_mask=mask))
    assert bool(refused) == (planned != given_side and min(lengths) < seq_len)
    if refused:
        assert ("input_ids is" if proven else "attention_mask is 0") in refused
        assert "padding_side" in refused


@pytest.mark.parametrize("device", DEVICES)
def test_swapped_samples_are_refused(device):
    model = MODEL if device == "cpu" else tiny_model("qwen3_moe", seed=7)[0].to(device)
    seqs = sequences([6, 6])
    samples = [Sample.of(f"r{i}", token_ids=tokens) for i, tokens in enumerate(seqs)]
    rows = rows_for(MicroBatch.padded(samples, 6))
    ids = torch.from_numpy(np.stack(seqs)).to(device)
    with replay(model, rows), torch.no_grad():
        model(ids)
    with (
        pytest.raises(InvalidArgument) as caught,
        replay(model, rows),
        torch.no_grad(),
    ):
        model(ids.flip(0))
    assert f"input_ids is {seqs[1][0]} at token 0" in str(caught.value)
    assert f"expected {seqs[0][0]}, position 0 of samples[0]" in str(caught.value)
    assert "whose tokens stand 6 later" in str(caught.value)


def test_one_other_token_is_named():
    (tokens,) = sequences([9])
    rows = rows_for(MicroBatch.packed([Sample.of("r0", token_ids=tokens)], total_len=12))
    ids = torch.zeros(1, 12, dtype=torch.int64)
    ids[0, :9] = torch.from_numpy(tokens)
    assert not replayed(rows, lambda: MODEL(ids))
    ids[0, 4] += 1
    found = replayed(rows, lambda: MODEL(ids))
    assert f"input_ids is {tokens[4] + 1} at token 4 of the batch; expected {tokens[4]}" in found
    assert "position 4 of samples[0]" in found
    assert "stand" not in found


def test_the_decoder_alone_and_arguments_by_name_are_judged():
    seqs = sequences([3, 5])
    samples = [Sample.of(f"r{i}", len(tokens)) for i, tokens in enumerate(seqs)]
    rows = rows_for(MicroBatch.padded(samples, 5, padding_side="right"))
    ids, mask = padded(seqs, 5, "left")
    for call in (
        lambda: MODEL.get_decoder()(input_ids=ids, attention_mask=mask),
        lambda: MODEL(ids, mask),
        lambda: MODEL(inputs_embeds=MODEL.get_input_embeddings()(ids), attention_mask=mask.bool()),
    ):
        assert "attention_mask is 0 at token 0" in replayed(rows, call)
    # Nothing tells which tokens these are.
    assert not replayed(rows, lambda: MODEL(ids))
    assert not replayed(rows, lambda: MODEL(ids, attention_mask=None))


def test_every_pass_of_a_block_is_judged():
    seqs = sequences([4, 4])
    samples = [Sample.of(f"r{i}", token_ids=tokens) for i, tokens in enumerate(seqs)]
    rows = rows_for(MicroBatch.padded(samples, 4))
    ids = torch.from_numpy(np.stack(seqs))

    def passes() -> None:
        MODEL(ids)
        MODEL(ids.flip(0))

    assert "samples[0]" in replayed(rows, passes)


def test_an_error_of_the_block_is_not_replaced():
    (tokens,) = sequences([4])
    rows = rows_for(MicroBatch.padded([Sample.of("r0", token_ids=tokens)], 4))

    def fails() -> None:
        MODEL(torch.from_numpy(tokens[None]))
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        replayed(rows, fails)


def test_the_side_of_the_padding_has_no_default():
    samples = [Sample.of("r0", 4), Sample.of("r1", 3)]
    with pytest.raises(InvalidArgument, match=r"samples\[1\] has 3 tokens of 4") as caught:
        MicroBatch.padded(samples, 4)
    assert caught.value.field == "padding_side"
    assert MicroBatch.padded(samples[:1], 4).lane_len == 4
    for wrong in ("top", 1, True):
        with pytest.raises(InvalidArgument, match="padding_side is"):
            MicroBatch.padded(samples, 4, padding_side=wrong)
    with pytest.raises(InvalidArgument, match=r"token_lens\[0\] has 3 tokens of 4"):
        collate([rows_for(MicroBatch.padded([Sample.of("r", 4)], 4))], [3], 4)  # type: ignore[list-item]
