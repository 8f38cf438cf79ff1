"""Trace: slices, and what trainers make of it."""

from __future__ import annotations

import pickle
import random
import sys
from datetime import datetime, timezone

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routetrace.client import MissingRange, MissingReason, Trace, TraceState
from routetrace.client._core.assemble import Assembler, Want
from routetrace.client._memory import check_pin
from routetrace.client.trace import ids_to_torch
from routetrace.codec.frame import encode_frame
from routetrace.codec.records import DIGEST, SPAN, U32, TokenDigest, token_digests
from routetrace.common.errors import Corrupt, Incomplete, InvalidArgument, MissingDependency
from routetrace.v1 import routetrace_pb2 as pb
from support.servers.client_server import LAYOUT, WIDE, Truth, truth


def assemble(source: Truth, **want) -> Trace:
    assembler = Assembler(Want("req", None, mask=True, **want))
    for message in source.responses():
        assembler.feed(message)
    return assembler.finish()


def test_what_it_tells():
    trace = assemble(truth(12))
    assert (trace.trace_id, trace.run, trace.state) == ("req", "default", TraceState.COMPLETE)
    assert (trace.num_tokens, trace.num_rows, len(trace), trace.prompt_len) == (13, 12, 12, 4)
    assert trace.layer_ids == (1, 2, 4, 5, 7)
    assert trace.top_k == 3
    assert trace.created_at == datetime(1970, 1, 1, 0, 0, 1, 500_000, timezone.utc)
    assert trace.weight_versions == ((0, 12, 7),)
    assert trace.provenance == ((0, 12, "forward"),)
    assert trace.complete
    assert trace.coverage == 1.0
    assert "'req' complete: rows [0, 12), 5 layers, top-3 of 40, coverage 1>" in repr(trace)


def test_complete_is_what_has_a_known_end():
    assert not assemble(truth(12, state=pb.TRACE_STATE_RUNNING)).complete
    assert not assemble(truth(12, state=pb.TRACE_STATE_RUNNING, num_tokens=13)).complete
    lost = assemble(truth(12, state=pb.TRACE_STATE_INCOMPLETE, num_tokens=0))
    assert (lost.coverage, lost.complete, lost.tokens(2, 5).complete) == (1.0, False, False)
    holed = assemble(truth(12, holes=[(3, 5)]))
    assert (holed.complete, holed.tokens(5).complete) == (False, True)


def test_layers_are_contiguous_and_read_only():
    trace = assemble(truth(12))
    assert trace.topk_ids.shape == (12, 5, 3)
    assert trace.valid.shape == (12, 5)
    assert all(trace.topk_ids[:, j].flags.c_contiguous for j in range(5))
    for array in (trace.topk_ids, trace.valid):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0
    with pytest.raises(AttributeError):
        trace.state = TraceState.RUNNING


def test_an_array_of_a_trace_is_refused():
    for make in (np.asarray, np.array, lambda trace: np.asarray(trace, np.int64)):
        with pytest.raises(InvalidArgument, match="use topk_ids and valid"):
            make(assemble(truth(3)))


def test_pickles():
    source = truth(12, holes=[(3, 5)])
    trace = pickle.loads(pickle.dumps(assemble(source)))
    assert np.array_equal(trace.topk_ids[trace.valid], source.ids[source.valid])
    assert trace.topk_ids[:, 0].flags.c_contiguous
    assert trace.missing[0].start == 3


@given(st.integers(0, 2**63).map(random.Random))
def test_slices_of_slices(rng: random.Random):
    source = truth(rng.randint(1, 30), rng=rng)
    trace = assemble(source)
    ids, valid = source.ids, source.valid
    for _ in range(3):
        if rng.randrange(2):
            a = rng.randint(trace.token_start, trace.token_stop)
            b = rng.randint(a, trace.token_stop)
            ids = ids[a - trace.token_start : b - trace.token_start]
            valid = valid[a - trace.token_start : b - trace.token_start]
            trace = trace.tokens(a, b)
        else:
            kept = sorted(rng.sample(trace.layer_ids, rng.randint(1, len(trace.layer_ids))))
            columns = [trace.layer_ids.index(i) for i in kept]
            ids, valid = ids[:, columns], valid[:, columns]
            trace = trace.layers(kept)
        assert np.array_equal(trace.valid, valid)
        assert np.array_equal(trace.topk_ids[valid], ids[valid])
        told = np.ones_like(valid)
        for m in trace.missing:
            columns = [trace.layer_ids.index(i) for i in m.layer_ids]
            told[m.start - trace.token_start : m.stop - trace.token_start, columns] = False
        assert np.array_equal(told, valid)
        for ranges in (trace.weight_versions, trace.provenance):
            assert all(trace.token_start <= a < b <= trace.token_stop for a, b, _ in ranges)
        assert trace.coverage == (valid.mean() if valid.size else 1.0)
        assert trace.complete == bool(valid.all())


@pytest.mark.parametrize("bounds", [(-1, 3), (3, 2), (0, 13), (13, 13)])
def test_tokens_outside(bounds):
    with pytest.raises(InvalidArgument, match="start"):
        assemble(truth(12)).tokens(*bounds)


@pytest.mark.parametrize("layer_ids", [(2, 1), (), (3,), (1, 1)])
def test_layers_outside(layer_ids):
    with pytest.raises(InvalidArgument, match="layer_ids"):
        assemble(truth(12)).layers(layer_ids)


def test_layers_that_were_not_asked_for():
    with pytest.raises(InvalidArgument, match=r"\[1\]; expected ids among \[2, 4\]"):
        assemble(truth(12)).layers((2, 4)).layers((1, 2))


def test_weight_versions_merge():
    source = truth(12, holes=[(4, 4), (8, 8)])
    source.pieces[0].version = source.pieces[1].version = 3
    trace = assemble(source)
    assert trace.weight_versions == ((0, 8, 3), (8, 12, 7))
    assert trace.tokens(5, 9).weight_versions == ((5, 8, 3), (8, 9, 7))


class TestSplit:
    def test_prompt_and_generated(self):
        prompt, generated = assemble(truth(12)).split()
        assert (prompt.token_start, prompt.token_stop) == (0, 4)
        assert (generated.token_start, generated.token_stop) == (4, 12)  # 9 tokens, 8 rows

    @pytest.mark.parametrize(
        ("prompt_len", "num_output_tokens", "expected"),
        [
            (0, None, ((0, 0), (0, 12))),
            (12, None, ((0, 12), (12, 12))),
            (50, 9, ((0, 12), (12, 12))),
            (10, 1, ((0, 10), (10, 11))),  # the rest was captured, but did not come out
            (10, 0, ((0, 10), (10, 10))),
            (10, 100, ((0, 10), (10, 12))),
        ],
    )
    def test_cuts(self, prompt_len, num_output_tokens, expected):
        parts = assemble(truth(12)).split(prompt_len, num_output_tokens)
        assert tuple((p.token_start, p.token_stop) for p in parts) == expected

    def test_of_a_slice_counts_from_position_0(self):
        prompt, generated = assemble(truth(12)).tokens(6, 10).split(8, 1)
        assert (prompt.token_start, prompt.token_stop) == (6, 8)
        assert (generated.token_start, generated.token_stop) == (8, 9)

    def test_unknown_prompt(self):
        trace = assemble(truth(12, prompt_len=0))
        with pytest.raises(InvalidArgument, match="prompt_len"):
            trace.split()
        assert len(trace.split(0)[0]) == 0

    @pytest.mark.parametrize("arguments", [(-1, None), (3, -2), (3, "2"), (2.5, None)])
    def test_what_is_no_number_of_tokens(self, arguments):
        with pytest.raises(InvalidArgument):
            assemble(truth(12)).split(*arguments)


class TestRoutedExperts:
    def test_dense_layers_are_zero(self):
        source = truth(12)
        rows = assemble(source).routed_experts()
        assert rows.shape == (12, 9, 3)
        assert rows.dtype == np.uint8
        assert np.array_equal(rows[:, source.layout.layer_ids], source.ids)
        assert not rows[:, [0, 3, 6, 8]].any()

    def test_missing_cells_raise_unless_filled(self):
        source = truth(12, stages=[(1, 2), (4, 5, 7)], holes=[(3, 5)])
        source.pieces[1].there = True
        trace = assemble(source)
        with pytest.raises(Incomplete, match=r"\[3, 5\) of 3 layers 4..7"):
            trace.routed_experts()
        rows = trace.routed_experts(fill=255)
        assert (rows[3:5, [4, 5, 7]] == 255).all()
        assert not rows[:, [0, 3, 6, 8]].any()
        rows = rows[:, source.layout.layer_ids]
        assert np.array_equal(rows[source.valid], source.ids[source.valid])

    def test_layers_that_were_not_asked_for(self):
        trace = assemble(truth(12)).layers((2, 5))
        with pytest.raises(InvalidArgument, match="layer_ids"):
            trace.routed_experts()
        assert (trace.routed_experts(fill=7)[:, [1, 4, 7]] == 7).all()

    @pytest.mark.parametrize("fill", [-1, 256])
    def test_fill_that_does_not_fit(self, fill):
        with pytest.raises(InvalidArgument, match="fill"):
            assemble(truth(12)).routed_experts(fill=fill)


class TestTorch:
    @pytest.fixture(autouse=True)
    def _torch(self):
        self.torch = pytest.importorskip("torch")

    def test_narrow_stays_narrow_and_shares_memory(self):
        source = truth(12)
        trace = assemble(source)
        tensor = trace.to_torch()
        assert tensor.dtype is self.torch.uint8
        assert np.array_equal(tensor.numpy(), source.ids)
        assert tensor[:, 2].is_contiguous()
        assert np.shares_memory(tensor.numpy(), trace.topk_ids)

    @pytest.mark.parametrize("dtype", ["int32", "int64", "int16", None])
    def test_wide(self, dtype):
        source = truth(12, layout=WIDE)
        assert source.ids.max() > 255
        tensor = assemble(source).to_torch("cpu", dtype and getattr(self.torch, dtype))
        assert tensor.dtype is getattr(self.torch, dtype or "int32")
        assert np.array_equal(tensor.numpy(), source.ids)

    def test_ids_above_int16(self):
        layout = type(WIDE)((0,), 1, 65536, 1)
        tensor = assemble(truth(200, layout=layout)).to_torch()
        assert int(tensor.min()) >= 0
        assert int(tensor.max()) > 32767

    @pytest.mark.parametrize("dtype", ["int8", "float16", "bool", "uint8", "complex64"])
    def test_dtypes_that_would_change_ids(self, dtype):
        with pytest.raises(InvalidArgument, match="dtype"):
            assemble(truth(3, layout=WIDE)).to_torch(dtype=getattr(self.torch, dtype))

    def test_read_only_memory(self, recwarn):
        trace = assemble(truth(12))
        trace._ids.flags.writeable = False  # as from an object store
        assert np.array_equal(trace.to_torch().numpy(), trace.topk_ids)
        assert not recwarn.list

    @pytest.mark.cuda
    def test_on_a_gpu(self):
        if not self.torch.cuda.is_available():
            pytest.skip("no CUDA device")
        source = truth(12, layout=WIDE)
        tensor = assemble(source).to_torch("cuda")
        assert tensor.is_cuda
        assert np.array_equal(tensor.cpu().numpy(), source.ids)


class TestVerifyTokens:
    tokens = tuple(range(100, 120))

    def trace(self):
        digests = []
        digest = TokenDigest()
        for a, b in ((0, 4), (4, 8), (8, 17)):
            digests.append((b, digest.update(self.tokens[a:b])))
        return assemble(truth(12, token_digests=np.array(digests[::-1], DIGEST).tobytes()))

    @pytest.mark.parametrize(("count", "checked"), [(20, 3), (17, 3), (16, 2), (4, 1), (0, 0)])
    def test_the_same(self, count, checked):
        assert self.trace().verify_tokens(self.tokens[:count]) == checked
        assert self.trace().verify_tokens(np.array(self.tokens[:count], np.int64)) == checked

    @pytest.mark.parametrize(
        ("changed", "first", "agreed"), [(0, 4, 0), (4, 8, 4), (7, 8, 4), (16, 17, 8)]
    )
    def test_others(self, changed, first, agreed):
        tokens = [*self.tokens]
        tokens[changed] += 1
        with pytest.raises(InvalidArgument, match=f"before {first}.*before position {agreed}"):
            self.trace().verify_tokens(tokens)

    @settings(max_examples=50)
    @given(st.integers(1, 300), st.randoms())
    def test_as_agents_send_them(self, count, rng):
        tokens = np.array([rng.randrange(2**32) for _ in range(count)])
        digests = token_digests(tokens, [rng.randint(0, count + 9) for _ in range(3)])
        trace = assemble(truth(12, token_digests=digests.tobytes()))
        assert trace.verify_tokens(tokens) == len(digests)
        changed = rng.randrange(count)
        tokens[changed] ^= 1 << rng.randrange(32)
        with pytest.raises(InvalidArgument, match="token_ids") as caught:
            trace.verify_tokens(tokens)
        first = min(p for p in digests["position"].tolist() if p > changed)
        assert f"before {first}" in caught.value.value

    def test_after_the_last_digest_nothing_is_proven(self):
        assert self.trace().verify_tokens([*self.tokens[:17], 0, 0]) == 3

    @pytest.mark.parametrize("tokens", [[-1, 3], [2**32], [0.5], [[1, 2]], "abc"])
    def test_no_tokens(self, tokens):
        with pytest.raises(InvalidArgument, match="token_ids"):
            self.trace().verify_tokens(tokens)


class TestValidate:
    def test_what_routers_choose(self):
        assemble(truth(12, holes=[(3, 5)])).validate()  # zeros in the hole are not looked at

    @pytest.mark.parametrize("bad", [[1, 1, 2], [1, 2, 1]])
    def test_what_they_do_not(self, bad):
        source = truth(12)
        source.ids[6, 2] = bad
        frame = encode_frame(source.ids, LAYOUT, validate=False)
        assembler = Assembler(Want("req", None))
        assembler.feed(
            pb.GetTraceResponse(
                info=source.info,
                spans=np.array([(0, 12, 0, 0, 0, 1, 0, 7)], SPAN).tobytes(),
                frame_lengths=np.array([len(frame)], U32).tobytes(),
                payload=frame,
                end=pb.ReadEnd(info=source.info, token_stop=12, num_spans=1),
            )
        )
        trace = assembler.finish()
        with pytest.raises(Corrupt, match="position 6, layer 4"):
            trace.validate()
        trace.tokens(7).validate()
        trace.layers((1, 7)).validate()


def test_missing_range_from_the_wire():
    for number, name in enumerate(pb.MissingReason.keys()):
        message = pb.MissingRange(start=3, stop=9, layer_ids=[2, 5], reason=number)
        missing = MissingRange.from_proto(message, (1, 2, 5))
        assert missing == MissingRange(3, 9, (2, 5), missing.reason)
        expected = "UNKNOWN" if number == 0 else missing.reason.upper()
        assert missing.reason.name == expected
        assert name.endswith("UNSPECIFIED" if number == 0 else expected)
    assert MissingRange.from_proto(pb.MissingRange(stop=1), (1, 2)).layer_ids == (1, 2)
    newer = pb.MissingRange.FromString(b"\x08\x01\x10\x02\x20\x63")
    assert MissingRange.from_proto(newer, (1,)).reason is MissingReason.UNKNOWN


def test_torch_that_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingDependency, match="needs torch") as caught:
        check_pin(True)
    assert (caught.value.field, caught.value.package) == ("pin_memory", "torch")
    with pytest.raises(MissingDependency, match="to_torch needs torch"):
        ids_to_torch(np.zeros((1, 1, 1), np.uint8), 8)
