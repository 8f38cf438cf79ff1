"""Replay refuses passes of other tokens than those of the plan: shifted, swapped, one other."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DataCollatorWithFlattening

from routetrace.client import FetchPlan, MicroBatch, Rank, Sample
from routetrace.client.rows import Rows
from routetrace.common.errors import InvalidArgument
from routetrace.trainers._inputs import Inputs, _Pass
from routetrace.trainers.replay import collate, replay
from support.devices import DEVICES
from support.models.tiny_models import VOCABULARY, tiny_model
from support.ranks.rank_rows import facts_of, random_choices, rows_of

MODEL, LAYOUT = tiny_model("qwen3_moe")


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
    # The token of a sample of one has no row.
    shifted = [length for length in lengths if int(proven) < length < seq_len]
    assert bool(refused) == (planned != given_side and bool(shifted))
    if refused:
        assert ("input_ids is" if proven else "attention_mask is ") in refused
        assert "padding_side" in refused


@pytest.mark.parametrize("device", DEVICES)
def test_swapped_samples_are_refused(device):
    model = MODEL if device == "cpu" else tiny_model("qwen3_moe", seed=7)[0].to(device)
    seqs = sequences([9, 9])
    samples = [Sample.of(f"r{i}", token_ids=tokens) for i, tokens in enumerate(seqs)]
    rows = rows_for(MicroBatch.padded(samples, 9))
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
    assert f"expected {seqs[0][0]}, position 0 of samples[0], which" in str(caught.value)
    assert "which begins 9 later there" in str(caught.value)


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
    assert "begins" not in found


def test_what_a_collator_flattens_is_laid_out_by_its_tensors():
    """The sequences and tensors are those of the collator, which knows nothing of plans."""
    seqs = sequences([5, 2, 1, 7], seed=3)
    collate_flat = DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    made = collate_flat([{"input_ids": tokens.tolist()} for tokens in seqs], return_tensors="pt")
    ids, position_ids = made["input_ids"], made["position_ids"]
    for batch in (
        MicroBatch.from_position_ids(ids, position_ids),
        MicroBatch.from_cu_seqlens(ids, made["cu_seq_lens_q"]),
    ):
        assert [s.token_ids.tolist() for s in batch.samples] == [s.tolist() for s in seqs]
        rows = rows_for(batch)
        assert rows.plan.num_rows == 4 + 1 + 0 + 6
        assert not replayed(rows, lambda: MODEL(ids, position_ids=position_ids))
        found = replayed(rows, lambda: MODEL(ids.roll(1), position_ids=position_ids))
        assert "position 0 of samples[0]" in found


def test_prompts_padded_left_with_completions_padded_right_are_laid_out_by_their_mask():
    prompts, completions = sequences([2, 4, 3], seed=4), sequences([3, 1, 2], seed=5)
    parts = [padded(prompts, 4, "left"), padded(completions, 3, "right")]
    ids, mask = (torch.cat(both, 1) for both in zip(*parts, strict=True))
    rows = rows_for(MicroBatch.from_mask(ids, mask))
    wholes = [np.concatenate(both).tolist() for both in zip(prompts, completions, strict=True)]
    assert [s.token_ids.tolist() for s in rows.plan.samples] == wholes
    assert not replayed(rows, lambda: MODEL(ids, attention_mask=mask))
    found = replayed(rows, lambda: MODEL(ids.roll(-1, 1), attention_mask=mask.roll(-1, 1)))
    assert "position 0 of samples[0]" in found


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


def test_samples_without_token_ids_are_judged_by_the_mask_beside_others():
    seqs = sequences([5, 3])
    samples = [Sample.of("r0", token_ids=seqs[0]), Sample.of("r1", 3)]
    rows = rows_for(MicroBatch.padded(samples, 5, padding_side="right"))
    assert not replayed(rows, lambda: MODEL(*padded(seqs, 5, "right")))
    assert "samples[1]" in replayed(rows, lambda: MODEL(*padded(seqs, 5, "left")))


def test_tokens_without_a_row_may_be_anything():
    """A mask of `ids != pad_token_id` leaves the last token out where that pads as well."""
    seqs = sequences([5, 3])
    ids, mask = padded(seqs, 5, "right")
    ids[0, 4] = ids[1, 2] = mask[0, 4] = mask[1, 2] = 0
    for proven in (True, False):
        samples = [
            Sample.of(f"r{i}", len(tokens), token_ids=tokens if proven else None)
            for i, tokens in enumerate(seqs)
        ]
        rows = rows_for(MicroBatch.padded(samples, 5, padding_side="right"))
        assert not replayed(rows, lambda: MODEL(ids, mask))


def test_a_shift_by_one_place_is_seen_by_the_padding_in_its_stead():
    """All rows of the plan are at attended tokens; padding is attended as well."""
    (tokens,) = sequences([2])
    rows = rows_for(MicroBatch.padded([Sample.of("r0", 2)], 3, padding_side="left"))
    found = replayed(rows, lambda: MODEL(*padded([tokens], 3, "right")))
    assert "attention_mask is not 0 at token 0 of the batch; expected 0" in found
    assert not replayed(rows, lambda: MODEL(*padded([tokens], 3, "left")))
    ids, _ = padded([tokens], 3, "left")
    assert not replayed(rows, lambda: MODEL(ids, attention_mask=torch.ones_like(ids)))


class Multimodal(torch.nn.Module):
    """A model that gives its decoder embeddings, with a mask of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.config, self.decoder = MODEL.config, MODEL.get_decoder()

    def get_decoder(self) -> torch.nn.Module:
        return self.decoder

    def forward(self, input_ids: torch.Tensor) -> None:
        embeddings = self.decoder.embed_tokens(input_ids)
        mask = torch.zeros_like(input_ids)
        mask[:, -1] = 1
        self.decoder(inputs_embeds=embeddings, attention_mask=mask)


def test_a_decoder_within_a_model_is_not_judged_again():
    (tokens,) = sequences([5])
    rows = rows_for(MicroBatch.padded([Sample.of("r0", token_ids=tokens)], 5))
    model, ids = Multimodal(), torch.from_numpy(tokens[None])
    with torch.no_grad(), replay(model, rows):
        model(ids)

    def decoder_alone() -> None:
        model(ids)
        model.decoder(inputs_embeds=torch.zeros(1, 5, 32), attention_mask=0 * ids)

    with pytest.raises(InvalidArgument, match="attention_mask is 0"), replay(model, rows):
        decoder_alone()


class Event:
    """A CUDA event that happens when it is waited for, or after some questions."""

    waits = 0

    def __init__(self, asked: int = 3) -> None:
        self.asked = asked

    def record(self, _stream: object) -> None:
        pass

    def query(self) -> bool:
        self.asked -= 1
        return self.asked < 0

    def synchronize(self) -> None:
        Event.waits += 1


def test_a_device_is_waited_for_at_the_end_of_the_block_alone(monkeypatch):
    (tokens,) = sequences([5])
    rows = rows_for(MicroBatch.padded([Sample.of("r0", token_ids=tokens)], 5))
    inputs = Inputs(rows.plan)
    right = torch.from_numpy(tokens)
    for ids in (right, right + 1):
        is_wrong = ids != right
        inputs._pending.append(_Pass(is_wrong.any(), Event(), ids, is_wrong))
    for _ in range(3):
        inputs.check((right[None],), {})
    assert Event.waits == 0
    with pytest.raises(InvalidArgument, match="input_ids is"):
        inputs.settle()
    assert Event.waits > 0
    inputs.settle()  # raises each mistake once


def test_a_default_device_changes_nothing():
    (tokens,) = sequences([5])
    rows = rows_for(MicroBatch.padded([Sample.of("r0", token_ids=tokens)], 5))
    torch.set_default_device("meta")
    try:
        inputs = Inputs(rows.plan)
    finally:
        torch.set_default_device(None)
    with pytest.raises(InvalidArgument):
        inputs.check((torch.from_numpy(tokens[None] + 1),), {})


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
