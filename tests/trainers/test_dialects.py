"""Ids that each framework would replay, by its own rules as read in its source.

Every `*_replays` says which experts a router of the framework takes for each token of a sample, or
None where it routes live; they are written from the framework's source, not from ours.
"""

from __future__ import annotations

import base64
import io
import json
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given

from routetrace.client import FetchPlan, MicroBatch, Rank, Sample, Segment
from routetrace.common.errors import Incomplete, InvalidArgument
from routetrace.trainers.dialects import (
    SampleRows,
    areal,
    miles,
    nemo_rl,
    prime_rl,
    sglang,
    skyrl,
    slime,
    verl,
    vllm,
)
from routetrace.v1 import routetrace_pb2 as pb
from support.ranks.dialect_samples import (
    LAYOUTS,
    Known,
    any_sample,
    batch_of,
    known,
    of_trace,
    randoms,
)
from support.ranks.rank_rows import rows_of as fetched
from support.servers.client_server import LAYOUT, rows_of, truth

EVERY_SAMPLE = [
    verl.routed_experts,
    slime.rollout_routed_experts,
    miles.rollout_routed_experts,
    prime_rl.routed_experts,
    skyrl.rollout_expert_indices,
    skyrl.packed,
    lambda rows: areal.routed_experts([rows], 999),
    vllm.routed_experts,
    sglang.routed_experts,
]


# --- verl 0.9.1 ---


def verl_megatron_replays(sample: Known, routed_experts: np.ndarray) -> dict:
    """AgentLoopOutput.as_dict, align_r3_router_replay_data, build_r3_replay_mask and
    set_router_replay_data, whose layer axis covers all `num_layers`."""
    tokens = torch.tensor(routed_experts, dtype=torch.int16)
    full = tokens.new_zeros((sample.num_tokens, *tokens.shape[1:]))
    rows = min(len(tokens), sample.num_tokens)
    full[:rows] = tokens[:rows]
    assert full.shape[1] == sample.layout.num_hidden_layers
    return {
        (token, layer): full[token, layer].tolist() if token < sample.num_tokens - 1 else None
        for token in range(sample.num_tokens)
        for layer in sample.layout.moe_layer_ids
    }


def veomni_replays(sample: Known, full: np.ndarray) -> dict:
    """VeOmniRouterReplay.on_router_forward: the i-th target is that of the i-th router that fires,
    those of MoE layers alone; rows with an id twice are routed live."""
    assert sample.layout.top_k > 1
    assert full.shape[1] == len(sample.layout.moe_layer_ids), "as prepare_model_outputs checks"
    return {
        (token, layer): None if len(set(ids)) < len(ids) else ids
        for token in range(sample.num_tokens)
        for slot, layer in enumerate(sample.layout.moe_layer_ids)
        for ids in [full[token, slot].tolist() if token < len(full) else [0, 0]]
    }


def true_of(sample: Known) -> dict:
    """Ids that a framework with a marker for missing rows replays."""
    cells = {(token, layer): ids for token, layer, _, ids in sample.cells()}
    last = sample.num_tokens - 1
    return cells | {(last, layer): None for layer in sample.layout.moe_layer_ids}


@given(randoms)
def test_verl(rng: random.Random):
    sample = any_sample(rng)
    if sample.layout.num_experts > 2**15:
        with pytest.raises(InvalidArgument, match="num_experts is 33000"):
            verl.routed_experts(sample.rows)
        return
    array = verl.routed_experts(sample.rows)
    assert array.dtype == np.int16
    assert len(array) == sample.num_tokens - 1
    assert verl_megatron_replays(sample, array) == true_of(sample)
    with pytest.raises(InvalidArgument, match="axis"):
        verl.routed_experts(sample.rows, axis="dense")
    dense = sorted(set(range(sample.layout.num_hidden_layers)) - set(sample.layout.moe_layer_ids))
    assert not array[:, dense].any()


@given(randoms)
def test_verl_missing(rng: random.Random):
    sample = any_sample(rng, holes=True, layout=rng.choice(LAYOUTS[:5]))
    mask = verl.replay_mask(sample.rows)
    assert mask.tolist() == [*sample.valid.all(axis=1), False]
    array = verl.routed_experts(sample.rows, missing="zeros", axis="moe")
    assert veomni_replays(sample, array) == true_of(sample)
    if sample.valid.all():
        assert np.array_equal(array, verl.routed_experts(sample.rows, axis="moe"))
    hidden = verl.routed_experts(sample.rows, missing="zeros")
    assert np.array_equal(hidden[:, list(sample.layout.moe_layer_ids)], array)


@given(randoms)
def test_verl_batch(rng: random.Random):
    samples, _ = batch_of(rng, layout=rng.choice(LAYOUTS[:5]))
    prompts = [rng.randint(1, s.num_tokens) for s in samples]
    prompt_length = max(prompts) + rng.randrange(3)
    response = max(s.num_tokens - p for s, p in zip(samples, prompts, strict=True))
    seq_len = prompt_length + response + rng.randrange(3)
    starts = [prompt_length - p for p in prompts]
    batch = verl.batch([s.rows for s in samples], starts, seq_len)
    layout = samples[0].layout
    assert batch.shape == (len(samples), seq_len, layout.num_hidden_layers, layout.top_k)
    assert batch.dtype == np.int16
    # AgentLoopWorker._pad...: the rows begin where the prompt does.
    for one, sample, start in zip(batch, samples, starts, strict=True):
        expected = np.zeros_like(one)
        expected[start : start + sample.num_tokens - 1] = verl.routed_experts(sample.rows)
        assert np.array_equal(one, expected)


def test_verl_refuses():
    top_1 = known(random.Random(1), LAYOUTS[-1])
    with pytest.raises(InvalidArgument, match="top_k is 1"):
        verl.routed_experts(top_1.rows, missing="zeros")
    with pytest.raises(InvalidArgument, match="missing"):
        verl.routed_experts(top_1.rows, missing="mask")
    trace = of_trace(truth(4))
    with pytest.raises(InvalidArgument, match=r"samples\[0\] has 5 tokens; expected at most .* 4"):
        verl.batch([trace], [0], 4)
    with pytest.raises(InvalidArgument, match="seq_len"):
        verl.batch([trace], [0], "9")
    plan = FetchPlan.make(LAYOUT, MicroBatch.packed([Sample.of("g0", 6)]), Rank((1, 2, 4, 7)))
    for wrong in ("g0", None, fetched(plan, [rows_of(LAYOUT, 5)])):
        with pytest.raises(InvalidArgument, match=r"rows is .*per_sample\(\)"):
            verl.routed_experts(wrong)
    for starts, seq_len in [([], 9), ([0, 0], 9), ([5], 9), ([-1], 9)]:
        with pytest.raises(InvalidArgument, match="starts"):
            verl.batch([trace], starts, seq_len)
    with pytest.raises(InvalidArgument, match="starts"):
        verl.batch([], [], 9)
    assert verl.batch([trace], [4], 9).shape == (1, 9, 9, 3)


@given(randoms)
def test_verl_targets(rng: random.Random):
    layout = rng.choice(LAYOUTS)
    tp_size, cp_size = rng.choice([1, 2, 4]), rng.choice([1, 2, 3])
    lengths = [rng.randint(1, 20) for _ in range(rng.randint(1, 4))]
    samples = [Sample.of(f"r{i}", n) for i, n in enumerate(lengths)]
    batch = verl.micro_batch(samples, tp_size, cp_size)
    # preprocess_thd_engine
    align = tp_size * cp_size * (2 if cp_size > 1 else 1)
    assert batch.lane_len == sum(n + (align - n % align) % align for n in lengths)
    kept = sorted(rng.sample(layout.layer_ids, rng.randint(1, len(layout.layer_ids))))
    rank = Rank(kept, cp_size, rng.randrange(cp_size), "zigzag", tp_size, rng.randrange(tp_size))
    ids = [rows_of(layout, n - 1, rng.randrange(2**32)) for n in lengths]
    rows = fetched(FetchPlan.make(layout, batch, rank), ids, missing=0.3)
    given_: dict[int, Any] = {}

    class Router:
        def __init__(self, layer: int) -> None:
            self.layer = layer

        def set_target_indices(self, topk_indices: Any, replay_mask: Any) -> None:
            given_[self.layer] = topk_indices, replay_mask

    routers = [(layer + 1, Router(layer)) for layer in kept]
    rng.shuffle(routers)
    verl.set_targets(iter(routers), rows)
    assert sorted(given_) == kept
    for layer, (targets, mask) in given_.items():
        assert (targets.dtype, mask.dtype) == (torch.int64, torch.bool)
        assert np.array_equal(mask, rows.valid[kept.index(layer)])
        for token in np.flatnonzero(mask):
            one = ids[rows.plan.sample_of[token]][rows.plan.position_of[token]]
            expected = one[layout.moe_layer_ids.index(layer)]
            assert targets[token].tolist() == expected.tolist()
    with pytest.raises(InvalidArgument, match="routers is layer 99"):
        verl.set_targets([(100, Router(99))], rows)


# --- slime, miles ---


def slime_checks(sample: Known, experts: np.ndarray) -> None:
    """Sample.append..., validate_rollout_routed_experts_for_replay, and the assertion of
    prepare_routed_experts_for_routing_replay."""
    layout = sample.layout
    assert experts.dtype == np.int32  # its own padding counts up in this dtype
    assert experts.shape[1:] == (layout.num_hidden_layers, layout.top_k)
    assert experts.shape[0] == sample.num_tokens - 1
    if layout.top_k > 1 and len(experts):
        assert all(np.count_nonzero(experts[:, layer]) for layer in layout.moe_layer_ids)


@given(randoms)
def test_slime_and_miles(rng: random.Random):
    sample = any_sample(rng)
    for convert in (slime.rollout_routed_experts, miles.rollout_routed_experts):
        experts = convert(sample.rows)
        slime_checks(sample, experts)
        assert experts.flags.c_contiguous
        for token, layer, _, ids in sample.cells():
            assert experts[token, layer].tolist() == ids


@given(randoms)
def test_miles_filler(rng: random.Random):
    sample = any_sample(rng, holes=True)
    experts = miles.rollout_routed_experts(sample.rows, missing="filler")
    slime_checks(sample, np.where(experts < 0, 1, experts))
    for token, layer, _, ids in sample.cells():
        # BaseReplayManager: only a row of which all is -1 becomes arange(top_k).
        assert experts[token, layer].tolist() == (ids or [-1] * sample.layout.top_k)


# --- AReaL ---


def areal_replays(sample: Known, experts: torch.Tensor, valid: bool) -> dict:
    """preprocess_routed_experts_batch, and the replay of a micro-batch whose samples are all valid:
    the layer axis is that of the MoE layers; the last token repeats the row before it."""
    layout, last = sample.layout, sample.num_tokens - 1
    assert experts.dtype == torch.int32
    assert experts.shape[1:] == (len(layout.moe_layer_ids), layout.top_k)
    assert not experts[sample.num_tokens :].any()
    if last:
        assert experts[last].equal(experts[last - 1])
    return {
        (token, layer): experts[token, slot].tolist() if valid else None
        for token in range(last)
        for slot, layer in enumerate(layout.moe_layer_ids)
    }


@given(randoms)
def test_areal(rng: random.Random):
    samples = [any_sample(rng, layout=LAYOUTS[0], holes=i == 1) for i in range(3)]
    width = max(sample.num_tokens for sample in samples) + rng.randrange(3)
    given = areal.routed_experts([s.rows for s in samples], width, missing="invalid")
    experts, valid = given["routed_experts"], given["r3_routing_valid"]
    assert experts.shape[:2] == (3, width)
    for sample, ids, whole in zip(samples, experts, valid.tolist(), strict=True):
        cells = {(token, layer): ids for token, layer, _, ids in sample.cells()}
        assert whole == (sample.num_tokens > 1 and None not in cells.values())
        replayed = areal_replays(sample, ids, whole)
        assert replayed == (cells if whole else dict.fromkeys(cells))


def test_areal_refuses():
    sample = any_sample(random.Random(3))
    with pytest.raises(InvalidArgument, match="at least one sample"):
        areal.routed_experts([], 8)
    with pytest.raises(InvalidArgument, match=r"samples\[0\].num_tokens"):
        areal.routed_experts([sample.rows], sample.num_tokens - 1)


# --- NeMo-RL ---


def nemo_replays(sample: Known, experts: np.ndarray) -> dict:
    """_validate_replay_tensor and the fallback of wrapped_get_replay_topk, for all tokens."""
    layout = sample.layout
    limit = {1: 128, 2: 32768, 4: 2**31}[experts.dtype.itemsize]
    narrower = {1: 0, 2: 128, 4: 32768}[experts.dtype.itemsize]
    assert experts.dtype.kind == "i"
    assert narrower < layout.num_experts <= limit
    assert experts.shape == (sample.num_tokens, len(layout.moe_layer_ids), layout.top_k)
    found = {}
    for token, row in enumerate(experts.tolist()):
        for layer, ids in zip(layout.moe_layer_ids, row, strict=True):
            missing = all(i == -1 for i in ids)
            assert missing or (min(ids) >= 0 and max(ids) < layout.num_experts)
            assert missing or len(set(ids)) == len(ids)
            found[token, layer] = None if missing else ids
    return found


@given(randoms)
def test_nemo_rl(rng: random.Random):
    sample = any_sample(rng, holes=bool(rng.randrange(2)))
    experts = nemo_rl.routed_experts(sample.rows)
    last = list(range(sample.layout.top_k))
    expected = {at: ids if ids or at[0] < sample.num_tokens - 1 else last
                for at, ids in true_of(sample).items()}  # fmt: skip
    assert nemo_replays(sample, experts) == expected
    # decode_routed_experts
    magic, dtype, shape, data = nemo_rl.envelope(sample.rows).split(":", 3)
    assert magic == "nrlre1"
    raw = np.frombuffer(base64.b64decode(data, validate=True), dtype)
    assert np.array_equal(raw.reshape([int(n) for n in shape.split("x")]), experts)
    assert raw.dtype == experts.dtype


@given(randoms)
def test_nemo_rl_batch(rng: random.Random):
    samples, _ = batch_of(rng, holes=True)
    seq_len = max(s.num_tokens for s in samples) + rng.randrange(3)
    batch = nemo_rl.batch([s.rows for s in samples], seq_len)
    for one, sample in zip(batch, samples, strict=True):
        assert np.array_equal(one[: sample.num_tokens], nemo_rl.routed_experts(sample.rows))
        assert (one[sample.num_tokens :] == np.arange(sample.layout.top_k)).all()
    with pytest.raises(InvalidArgument, match="seq_len"):
        nemo_rl.batch([s.rows for s in samples], max(s.num_tokens for s in samples) - 1)
    with pytest.raises(InvalidArgument, match="samples"):
        nemo_rl.batch([], seq_len)


@pytest.mark.parametrize(
    ("experts", "name"),
    [(1, "int8"), (128, "int8"), (129, "int16"), (32768, "int16"), (32769, "int32")],
)
def test_nemo_rl_dtype(experts: int, name: str):
    assert nemo_rl.dtype_of(experts).name == name


# --- SkyRL, prime-rl ---


def canonical(array: np.ndarray) -> str:
    """The dtype that compact_routed_expert_indices chooses."""
    assert array.ndim == 3
    assert array.dtype.kind in "iu"
    assert array.min(initial=0) >= 0
    largest = array.max(initial=0)
    return "uint8" if largest < 256 else "int16" if largest < 32768 else "int32"


@given(randoms)
def test_skyrl(rng: random.Random):
    sample = any_sample(rng)
    indices = skyrl.rollout_expert_indices(sample.rows)
    hidden = sample.layout.num_hidden_layers
    assert indices.shape == (sample.num_tokens - 1, hidden, sample.layout.top_k)
    assert indices.dtype.name == canonical(indices)
    assert indices.flags.writeable
    for token, layer, _, ids in sample.cells():
        assert indices[token, layer].tolist() == ids
    payload = json.loads(json.dumps(skyrl.packed(sample.rows)))  # decode_packed_routed_experts
    assert payload["dtype"] in ("uint8", "int16", "int32")
    raw = np.frombuffer(base64.b64decode(payload["data"], validate=True), payload["dtype"])
    assert np.array_equal(raw.reshape(payload["shape"]), indices)
    assert payload["dtype"] == canonical(raw.reshape(payload["shape"]))


@given(randoms)
def test_skyrl_batches(rng: random.Random):
    samples, _ = batch_of(rng)
    each = [skyrl.rollout_expert_indices(s.rows) for s in samples]
    seq_len = max(s.num_tokens for s in samples) + rng.randrange(3)
    indices, mask = skyrl.batch([s.rows for s in samples], seq_len)
    assert indices.dtype.itemsize == max(one.dtype.itemsize for one in each)
    filler = np.arange(samples[0].layout.top_k)
    for one, masked, array, sample in zip(indices, mask, each, samples, strict=True):
        # make_router_padding_mask, of an attention mask that is padded on the left
        start = seq_len - sample.num_tokens
        captured = range(start, start + len(array))
        for column in range(seq_len):
            assert masked[column] == (column not in captured)
            expected = array[column - start] if column in captured else filler
            assert (one[column] == expected).all()
    values, cu_seqlens = skyrl.packed_batch([s.rows for s in samples])
    assert (values.dtype, cu_seqlens.dtype) == (indices.dtype, np.int32)  # as PackedTensor checks
    assert (cu_seqlens[0], cu_seqlens[-1], len(cu_seqlens)) == (0, len(values), len(samples) + 1)
    for number, sample in enumerate(samples):
        segment = values[cu_seqlens[number] : cu_seqlens[number + 1]]
        assert np.array_equal(segment, indices[number, seq_len - sample.num_tokens :])
    for bad in (lambda: skyrl.batch([], 3), lambda: skyrl.packed_batch([])):
        with pytest.raises(InvalidArgument, match="samples"):
            bad()
    with pytest.raises(InvalidArgument, match="seq_len"):
        skyrl.batch([s.rows for s in samples], max(s.num_tokens for s in samples) - 1)


@given(randoms)
def test_prime_rl(rng: random.Random):
    sample = any_sample(rng)
    data, shape, dtype = prime_rl.routed_experts(sample.rows)
    layout = sample.layout
    assert dtype == ("uint8" if layout.num_experts <= 256 else "uint16")
    # prepare_sample, and the trainer's data loader
    assert shape == [sample.num_tokens, layout.num_hidden_layers, layout.top_k]
    assert len(data) == sample.num_tokens * shape[1] * shape[2] * np.dtype(dtype).itemsize
    array = torch.frombuffer(bytearray(data), dtype=getattr(torch, dtype)).reshape(shape)
    array = array.to(torch.int32)
    for token, layer, _, ids in sample.cells():
        assert array[token, layer].tolist() == ids
    assert not array[-1].any()


# --- the inline answers of engines ---


@given(randoms)
def test_vllm(rng: random.Random):
    sample = any_sample(rng)
    start = rng.randint(0, sample.num_tokens - 1)
    text = vllm.routed_experts(sample.rows, prompt_start=start)
    array = np.load(io.BytesIO(base64.b64decode(text)))  # as vLLM's protocol says
    hidden = sample.layout.num_hidden_layers
    assert array.shape == (sample.num_tokens - 1 - start, hidden, sample.layout.top_k)
    back = vllm.read_routed_experts(text, sample.layout, num_rows=sample.num_tokens - 1 - start)
    assert np.array_equal(back, sample.ids[start:])
    assert back.dtype == sample.layout.dtype
    # Other dtypes and layer axes that its versions have.
    columns = range(hidden) if rng.randrange(2) else list(sample.layout.moe_layer_ids)
    file = io.BytesIO()
    np.lib.format.write_array(file, array[:, columns].astype(rng.choice(["i4", "u4"])),
                              version=rng.choice([(1, 0), (2, 0)]))  # fmt: skip
    again = vllm.read_routed_experts(base64.b64encode(file.getvalue()).decode(), sample.layout)
    assert np.array_equal(again, back)


@given(randoms)
def test_sglang(rng: random.Random):
    sample = any_sample(rng)
    start = rng.randint(0, sample.num_tokens - 1)
    text = sglang.routed_experts(sample.rows, start_len=start)
    # extract_routed_experts_from_meta_info, and slime's Sample
    flat = np.frombuffer(base64.b64decode(text.encode("utf-8")), dtype=np.int32)
    layout = sample.layout
    rows = sample.num_tokens - 1 - start
    assert flat.size == rows * layout.num_hidden_layers * layout.top_k
    array = flat.reshape(rows, layout.num_hidden_layers, layout.top_k)
    assert np.array_equal(array[:, layout.moe_layer_ids], sample.ids[start:])
    back = sglang.read_routed_experts(text, layout, num_rows=rows)
    assert np.array_equal(back, sample.ids[start:])
    assert back.dtype == layout.dtype


def npy(array: np.ndarray) -> str:
    file = io.BytesIO()
    np.save(file, array)
    return base64.b64encode(file.getvalue()).decode()


def flat(array: np.ndarray) -> str:
    return base64.b64encode(array.astype("<i4").tobytes()).decode()


GOOD = np.zeros((4, 9, 3), np.int32)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("%", "text"),
        ("", "text"),
        (base64.b64encode(b"no npy").decode(), "text"),
        (npy(GOOD)[:-8], "text"),
        (npy(GOOD) + npy(GOOD), "text"),
        (npy(np.zeros((4, 9, 2), int)), r"\(4, 9, 2\); expected \(4, 9, 3\) or \(4, 5, 3\)"),
        (npy(np.zeros((4, 8, 3), int)), "shape"),
        (npy(np.zeros((4, 27), int)), "shape"),
        (npy(np.zeros((5, 9, 3), int)), r"shape is \(5, 9, 3\); expected \(4, 9, 3\)"),
        (npy(GOOD.astype(float)), "dtype"),
        (npy(GOOD + 40), "ids is between 40 and 40"),
        (npy(GOOD - 1), "ids"),
    ],
)
def test_vllm_refuses(text: str, what: str):
    with pytest.raises(InvalidArgument, match=what):
        vllm.read_routed_experts(text, LAYOUT, num_rows=4)


def test_vllm_refuses_a_header_that_lies():
    file = io.BytesIO()
    header = {"descr": "<i4", "fortran_order": False, "shape": (2**40, 9, 3)}
    np.lib.format.write_array_header_1_0(file, header)
    with pytest.raises(InvalidArgument, match="0 bytes"):
        vllm.read_routed_experts(base64.b64encode(file.getvalue()).decode(), LAYOUT)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("%", "text"),
        (flat(GOOD[:, :8]), "multiple of 9 layers x 3 = 27"),
        (flat(GOOD)[:-4], "text"),
        (flat(GOOD[:3]), r"shape is \(3, 9, 3\)"),
        (flat(GOOD + 40), "ids"),
        (flat(GOOD - 1), "ids"),
    ],
)
def test_sglang_refuses(text: str, what: str):
    with pytest.raises(InvalidArgument, match=what):
        sglang.read_routed_experts(text, LAYOUT, num_rows=4)


def test_starts_beyond_the_rows():
    trace = of_trace(truth(4))
    for convert in (
        lambda n: vllm.routed_experts(trace, prompt_start=n),
        lambda n: sglang.routed_experts(trace, start_len=n),
    ):
        convert(4)
        for start in (5, -1):
            with pytest.raises(InvalidArgument, match="start"):
                convert(start)


# --- what goes in ---


@pytest.mark.parametrize("convert", EVERY_SAMPLE)
def test_missing_rows_are_an_error(convert):
    source = truth(12, holes=[(3, 5)])
    with pytest.raises(
        Incomplete, match="lacks 10 of 60 cells, the first at position 3 of layer 1"
    ):
        convert(of_trace(source))
    samples, rows = batch_of(random.Random(3), holes=True)
    assert rows.coverage < 1
    for sample in samples:
        if not sample.valid.all():
            with pytest.raises(Incomplete, match="cannot mark missing rows"):
                convert(sample.rows)
    for error in _errors(lambda: convert(of_trace(source))):
        assert error.missing[0].start == 3


def _errors(call) -> Iterator[Any]:
    try:
        call()
    except Incomplete as error:
        yield error


def test_tokens_that_no_request_has_are_missing():
    samples = [Sample(6, (Segment("s", 0, 3), Segment("s", 4, 5)))]
    plan = FetchPlan.make(
        LAYOUT, MicroBatch.padded(samples, 8, padding_side="right"), Rank(LAYOUT.layer_ids)
    )
    (split,) = fetched(plan, [rows_of(LAYOUT, 5)]).per_sample()
    assert split.num_tokens == 6
    with pytest.raises(Incomplete, match="sample 0 lacks 5 of 25 cells, the first at position 3"):
        slime.rollout_routed_experts(split)
    assert (nemo_rl.routed_experts(split)[3] == -1).all()


def test_how_many_tokens():
    trace = of_trace(truth(12))
    assert SampleRows.of(trace).num_tokens == 13
    short = SampleRows.of(trace, 5)
    assert len(slime.rollout_routed_experts(short)) == 4
    assert SampleRows.of(short) is short
    assert SampleRows.of(short, 3).num_tokens == 3
    assert np.array_equal(SampleRows.of(short, 3).topk_ids, short.topk_ids[:, :2])
    with pytest.raises(InvalidArgument, match="num_tokens"):
        SampleRows.of(short, 6)
    with pytest.raises(Incomplete, match="lacks 10 of 70 cells, the first at position 12"):
        slime.rollout_routed_experts(SampleRows.of(trace, 15))
    with pytest.raises(InvalidArgument, match="num_tokens"):
        SampleRows.of(trace, 0)
    running = of_trace(truth(12, state=pb.TRACE_STATE_RUNNING))
    with pytest.raises(Incomplete, match="has not ended: rows from 12 on"):
        SampleRows.of(running)
    assert SampleRows.of(running, 13).valid.all()


def test_only_whole_traces():
    trace = of_trace(truth(12))
    with pytest.raises(InvalidArgument, match="token_start is 2"):
        slime.rollout_routed_experts(trace.tokens(2))
    with pytest.raises(InvalidArgument, match="all MoE layers"):
        slime.rollout_routed_experts(trace.layers((2, 4)))
    with pytest.raises(Incomplete, match="position 5 "):
        slime.rollout_routed_experts(trace.tokens(0, 5))


def test_only_whole_plans():
    batch = MicroBatch.packed([Sample.of("r", 8)], align=8)
    ids = [rows_of(LAYOUT, 7)]
    for rank in (Rank(LAYOUT.layer_ids, cp_size=2), Rank(LAYOUT.layer_ids, sp_size=2, sp_rank=1)):
        with pytest.raises(InvalidArgument, match="4 of the 8 tokens"):
            fetched(FetchPlan.make(LAYOUT, batch, rank), ids).per_sample()
    with pytest.raises(InvalidArgument, match="all MoE layers"):
        fetched(FetchPlan.make(LAYOUT, batch, Rank((2, 4))), ids).per_sample()
