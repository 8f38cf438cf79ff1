"""Frames: what goes in comes out, cut by layers or whole; what is damaged does not come out."""

from __future__ import annotations

import importlib.util
import itertools
import os
import struct
import subprocess
import sys
import threading
import zlib
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from routetrace.codec import frame as frame_module
from routetrace.codec.frame import (
    MAX_FRAME_ROWS,
    ZSTD_ROWS,
    Codec,
    FrameHeader,
    decode_frame,
    decode_frames,
    decode_into,
    encode_frame,
    encode_frames,
    invalid_rows,
    read_header,
    slice_frame,
)
from routetrace.common.errors import Corrupt, InvalidArgument, RouteTraceError
from routetrace.common.layout import ModelLayout
from support.native_loops import loops


@pytest.fixture(params=["off", "on"], autouse=True, scope="module")
def native_choice(request: pytest.FixtureRequest) -> Iterator[None]:
    """All of these tests, with numpy and with the compiled loops."""
    with loops(request.param):
        yield


EXPERTS = [1, 2, 8, 128, 255, 256, 257, 384, 512, 513, 1000, 32769, 65536]


def routing(rng: np.random.Generator, n: int, layout: ModelLayout) -> Any:
    """Valid rows with a skew: [n, L, K], no id twice in a top-k."""
    experts, top_k = layout.num_experts, layout.top_k
    shape = (n, len(layout.layer_ids), 1)
    first = (rng.beta(0.5, 2, shape) * experts).astype(np.int64)
    stride = rng.integers(1, experts // top_k + 1, shape)
    return ((first + stride * np.arange(top_k)) % experts).astype(layout.dtype)


@st.composite
def layouts(draw: st.DrawFn, max_layers: int = 12) -> ModelLayout:
    experts = draw(st.sampled_from(EXPERTS))
    top_k = draw(st.integers(1, min(10, experts)))
    layers = draw(st.sets(st.integers(0, 200), min_size=1, max_size=max_layers))
    return ModelLayout(tuple(sorted(layers)), 201, experts, top_k)


def layout_of(ids: Any, num_experts: int) -> ModelLayout:
    return ModelLayout(
        tuple(range(3, 3 + ids.shape[1])), 3 + ids.shape[1], num_experts, ids.shape[2]
    )


def forge(header: FrameHeader, groups: list[bytes]) -> bytes:
    """A frame with these groups and a true checksum of its header."""
    return header._replace(group_bytes=tuple(map(len, groups))).pack() + b"".join(groups)


def sealed(data: bytes) -> bytes:
    """Bytes as they are, with their CRC-32."""
    return data + zlib.crc32(data).to_bytes(4, "little")


def squeezed(data: bytes) -> bytes:
    """A zstd frame with a checksum."""
    return zstandard.ZstdCompressor(write_checksum=True).compress(data)


def groups_of(frame: bytes) -> list[bytes]:
    return [frame[a:b] for a, b in itertools.pairwise(read_header(frame).group_offsets)]


# Round trips


@settings(max_examples=200)
@given(
    layouts(),
    st.integers(1, 90),
    st.sampled_from(Codec),
    st.sampled_from(["C", "layer-major", "every other row", "F", "reversed ranks"]),
    st.integers(0, 2**32 - 1),
)
def test_round_trip(layout: ModelLayout, n: int, codec: Codec, order: str, seed: int) -> None:
    ids = routing(np.random.default_rng(seed), n, layout)
    if order == "layer-major":
        ids = np.ascontiguousarray(ids.transpose(1, 0, 2)).transpose(1, 0, 2)
    elif order == "every other row":
        ids = np.repeat(ids, 2, axis=0)[::2]
    elif order == "F":
        ids = np.asfortranarray(ids)
    elif order == "reversed ranks":
        ids = ids[:, :, ::-1]
    frame = encode_frame(ids, layout, codec=codec)

    header = read_header(frame)
    assert (header.num_rows, header.layer_ids, header.top_k) == (n, layout.layer_ids, layout.top_k)
    assert (header.num_experts, header.dtype, header.codec) == (
        layout.num_experts,
        layout.dtype,
        codec,
    )
    assert header.frame_bytes == len(frame)
    assert frame.startswith(header.pack())
    assert len(header.pack()) == header.header_bytes
    padding = header.shift * len(layout.layer_ids) + 4 * len(header.group_bytes)
    if codec is Codec.PACK:  # up to whole groups of 8 ids
        padding += 8 * len(layout.layer_ids)
    assert len(frame) <= header.header_bytes + ids.nbytes + padding  # raw at worst

    decoded = decode_frame(memoryview(frame))
    assert decoded.dtype == layout.dtype
    assert decoded.flags.writeable
    np.testing.assert_array_equal(decoded, ids.transpose(1, 0, 2))


@pytest.mark.parametrize(
    ("n", "num_experts", "top_k", "groups"),
    [
        (1, 128, 8, (8,)),
        (63, 128, 8, (4, 4)),
        (84, 384, 6, (4, 4)),
        (300, 8, 2, (1,) * 8),
        (300, 2000, 3, (1,) * 8),
    ],
)
def test_every_layer_subset(n: int, num_experts: int, top_k: int, groups: tuple[int, ...]) -> None:
    layout = ModelLayout((1, 2, 5, 11, 31, 32, 60, 61), 62, num_experts, top_k)
    ids = routing(np.random.default_rng(n), n, layout)
    frame = encode_frame(ids, layout)
    assert read_header(frame).group_layers == groups
    for count in range(1, 9):
        for layer_ids in itertools.combinations(layout.layer_ids, count):
            expected = ids[:, layout.columns(layer_ids)].transpose(1, 0, 2)
            np.testing.assert_array_equal(decode_frame(frame, layer_ids=layer_ids), expected)
            cut = slice_frame(frame, reversed(layer_ids))
            np.testing.assert_array_equal(decode_frame(cut, layer_ids=layer_ids), expected)
            held = read_header(cut).layer_ids
            whole_groups = [
                group
                for group in np.split(np.array(layout.layer_ids), np.cumsum(groups)[:-1])
                if set(group.tolist()) & set(layer_ids)
            ]
            assert held == tuple(np.concatenate(whole_groups).tolist())
            # As its header says where the groups are: in as few pieces as there are gaps.
            sliced, runs = read_header(frame).cut(layer_ids)
            assert cut == sliced.pack() + b"".join(frame[start:stop] for start, stop in runs)
            assert all(stop < start for (_, stop), (start, _) in itertools.pairwise(runs))
            # A cut may be cut again.
            again = slice_frame(cut, layer_ids[-1:])
            np.testing.assert_array_equal(
                decode_frame(again, layer_ids=layer_ids[-1:]), expected[-1:]
            )


def test_groups_by_size() -> None:
    def groups(n: int, top_k: int) -> tuple[int, ...]:
        layout = ModelLayout(tuple(range(11)), 11, 64, top_k)
        return read_header(encode_frame(routing(rng, n, layout), layout)).group_layers

    rng = np.random.default_rng(0)
    assert groups(1, 1) == (11,)
    assert groups(16, 8) == (11,)
    assert groups(32, 8) == (5, 6)
    assert groups(63, 8) == (3, 4, 4)
    assert groups(64, 8) == (1,) * 11


def test_slice_of_everything_is_the_frame() -> None:
    layout = ModelLayout((4, 6), 8, 64, 4)
    frame = encode_frame(routing(np.random.default_rng(0), 200, layout), layout)
    assert slice_frame(frame, (6, 4)) == frame
    assert slice_frame(memoryview(frame), (4, 6)) == frame


@pytest.mark.parametrize("num_experts", [64, 300])
@pytest.mark.parametrize("codec", Codec)
def test_decode_into_views(num_experts: int, codec: Codec) -> None:
    layout = ModelLayout(tuple(range(6)), 6, num_experts, 4)
    ids = routing(np.random.default_rng(0), 40, layout)
    frame = encode_frame(ids, layout, codec=codec)
    wanted = (5, 0, 3, 0)  # any order, even twice
    expected = ids[:, wanted].transpose(1, 0, 2)
    guard = np.iinfo(layout.dtype).max

    trace = np.full((4, 100, 4), guard, layout.dtype)
    decode_into(frame, trace[:, 30:70], wanted)
    np.testing.assert_array_equal(trace[:, 30:70], expected)
    assert (trace[:, :30] == guard).all()
    assert (trace[:, 70:] == guard).all()

    row_major = np.full((40, 4, 4), guard, layout.dtype)
    decode_into(frame, row_major.transpose(1, 0, 2), wanted)
    np.testing.assert_array_equal(row_major.transpose(1, 0, 2), expected)

    strided = np.full((4, 80, 8), guard, layout.dtype)
    decode_into(frame, strided[:, ::2, 1::2], wanted)
    np.testing.assert_array_equal(strided[:, ::2, 1::2], expected)
    assert (strided[:, 1::2] == guard).all()
    assert (strided[:, :, ::2] == guard).all()


@pytest.mark.parametrize("num_experts", [256, 512])
def test_groups_as_they_are_between_zstd_frames(num_experts: int) -> None:
    layout = ModelLayout(tuple(range(6)), 6, num_experts, 8)
    rng = np.random.default_rng(0)
    ids = rng.integers(0, num_experts, (100, 6, 8)).astype(layout.dtype)
    ids[:, [1, 2, 4]] = ids[0, [1, 2, 4]]  # the others do not get any smaller
    frame = encode_frame(ids, layout, validate=False)
    as_they_are = [b"\x28\xb5\x2f\xfd" not in group for group in groups_of(frame)]
    assert as_they_are == [True, False, False, True, False, True]
    for wanted in (layout.layer_ids, (0, 1), (2, 3, 5), (5, 4, 3, 2, 1, 0), (3, 1, 3), (4,), (0,)):
        expected = ids[:, wanted].transpose(1, 0, 2)
        np.testing.assert_array_equal(decode_frame(frame, layer_ids=wanted), expected)


@pytest.mark.parametrize("batch_bytes", [0, 30_000, 1 << 20])
@pytest.mark.parametrize("num_experts", [128, 300])
def test_decode_frames_in_batches(
    monkeypatch: pytest.MonkeyPatch, num_experts: int, batch_bytes: int
) -> None:
    layout = ModelLayout(tuple(range(5)), 5, num_experts, 8)
    rng = np.random.default_rng(0)
    batch = [routing(rng, n, layout) for n in (300, 1, 256, 70)]
    frames = encode_frames(batch, layout)
    monkeypatch.setattr(frame_module, "_BATCH_BYTES", batch_bytes)
    out = np.zeros((2, 256, 8), layout.dtype)
    wanted = [(None, None), ((3,), None), ((4, 0), out), (None, None)]
    decoded = list(
        decode_frames((frame, *want) for frame, want in zip(frames, wanted, strict=True))
    )
    assert decoded[2] is out
    for i, (layer_ids, _) in enumerate(wanted):
        decoded[i] += 1  # each is an array of its own
        expected = batch[i][:, layer_ids or layout.layer_ids].transpose(1, 0, 2)
        np.testing.assert_array_equal(decoded[i], expected + 1)
    assert list(decode_frames([])) == []


def test_a_header_that_was_read_is_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = ModelLayout(tuple(range(5)), 5, 128, 8)
    rng = np.random.default_rng(0)
    batch = [routing(rng, n, layout) for n in (300, 7)]
    parts = [(frame, None, None) for frame in encode_frames(batch, layout, codec=None)]
    headers = [read_header(frame) for frame, _, _ in parts]
    monkeypatch.setattr(frame_module, "read_header", None)
    for ids, decoded in zip(batch, decode_frames(parts, headers), strict=True):
        np.testing.assert_array_equal(decoded, ids.transpose(1, 0, 2))
    with pytest.raises(ValueError, match="zip"):
        list(decode_frames(parts, headers[:1]))


def test_a_batch_is_one_call_of_zstd(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = ModelLayout(tuple(range(5)), 5, 128, 8)
    rng = np.random.default_rng(0)
    batch = [routing(rng, n, layout) for n in (1, 100, 256)]
    calls: list[int] = []

    class Spy:
        def __init__(self, compressor: Any) -> None:
            self.compressor = compressor

        def multi_compress_to_buffer(self, planes: Any) -> Any:
            calls.append(len(planes))
            return self.compressor.multi_compress_to_buffer(planes)

    monkeypatch.setattr(frame_module._Contexts, "compressor", lambda self, level: spy)
    spy = Spy(zstandard.ZstdCompressor(level=3, write_checksum=True))
    frames = encode_frames(batch, layout)
    assert calls == [11]
    monkeypatch.undo()
    assert frames == [encode_frame(ids, layout) for ids in batch]
    assert encode_frames([], layout) == []


def test_cffi_backend() -> None:
    """The other backend of zstandard, where it is built: the same frames, the same refusals."""
    env = {**os.environ, "PYTHON_ZSTANDARD_IMPORT_POLICY": "cffi"}
    code = """if True:
        import sys
        import numpy as np
        import zstandard
        from routetrace.common.errors import Corrupt
        from routetrace.codec.frame import decode_frame, encode_frame
        from routetrace.common.layout import ModelLayout

        assert zstandard.backend == "cffi"
        ids = np.arange(300 * 5 * 8, dtype=np.uint16).reshape(300, 5, 8) % 290
        frame = encode_frame(ids, ModelLayout(tuple(range(5)), 5, 300, 8))
        assert b"\\x28\\xb5\\x2f\\xfd" in frame
        assert np.array_equal(decode_frame(frame), ids.transpose(1, 0, 2))
        damaged = bytearray(frame)
        damaged[-400] ^= 1
        try:
            decode_frame(damaged)
        except Corrupt:
            sys.exit(0)
        sys.exit("damage was not seen")
    """
    if importlib.util.find_spec("zstandard._cffi") is None:
        pytest.skip("zstandard without its cffi backend")
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()


def test_backend_without_multi_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    class Plain:
        """Interface of the cffi backend."""

        def __init__(self, context: Any, name: str) -> None:
            setattr(self, name, getattr(context, name))

    layout = ModelLayout(tuple(range(5)), 5, 300, 8)
    ids = routing(np.random.default_rng(0), 256, layout)
    frame = encode_frame(ids, layout)
    contexts = frame_module._Contexts()
    compressor = zstandard.ZstdCompressor(level=3, write_checksum=True)
    contexts.compressors[3] = Plain(compressor, "compress")
    contexts.decompressor = Plain(zstandard.ZstdDecompressor(), "decompress")
    monkeypatch.setattr(frame_module, "_contexts", contexts)
    assert encode_frame(ids, layout) == frame
    np.testing.assert_array_equal(decode_frame(frame), ids.transpose(1, 0, 2))


# The format


GOLDEN_IDS = np.array(
    [[[0, 3], [2, 1]], [[299, 256], [257, 4]], [[1, 0], [128, 299]]], dtype=np.uint16
)


@pytest.mark.parametrize(
    ("codec", "golden"),
    [
        (
            Codec.RAW,
            "52544632 00 00 0200 03000000 2c010000 0200 0100 0202 1c000000 0200 bb3188f3"
            "0000 0300 2b01 0001 0100 0000 0200 0100 0101 0400 8000 2b01 c0b18052",
        ),
        (  # the planes are too short for zstd, so that no version of it changes them
            Codec.LAYER_ZSTD,
            "52544632 01 01 0200 03000000 2c010000 0200 0100 0202 12000000 0200 38dfd4d3"
            "0001 9580 0000  0100 8002 4095  16 26 fb353389",
        ),
        (
            Codec.PACK,
            "52544632 02 01 0200 03000000 2c010000 0200 0100 0202 16000000 0200 06345b10"
            "0001 9580 0000 0000  0100 8002 4095 0000  16 26 2297f49d",
        ),
    ],
)
def test_golden_bytes(codec: Codec, golden: str) -> None:
    layout = ModelLayout((1, 9), 12, 300, 2)
    assert encode_frame(GOLDEN_IDS, layout, codec=codec).hex() == golden.replace(" ", "")
    decoded = decode_frame(bytes.fromhex(golden))
    np.testing.assert_array_equal(decoded, GOLDEN_IDS.transpose(1, 0, 2))


def test_golden_zstd_groups() -> None:
    golden = bytes.fromhex(
        "52544632 01 00 0400 80000000 08000000 0100 0200 18 19000000 19000000 0100 0100 4e33cfde"
        "28b52ffd6400015d000020000102030100f9ab8e080e7de98e"
        "28b52ffd6400015d000020070605040100f9ab8e08cc37b90a"
    )
    assert read_header(golden).layer_ids == (3, 4)
    row = [[0, 1, 2, 3], [7, 6, 5, 4]]
    np.testing.assert_array_equal(decode_frame(golden), np.tile(row, (128, 1, 1)).swapaxes(0, 1))


@pytest.mark.parametrize(
    "num_experts", [1, 2, 3, 8, 16, 20, 60, 64, 128, 200, 256, 384, 1000, 65536]
)
@pytest.mark.parametrize("shape", [(1, 1, 1), (5, 3, 1), (9, 4, 1), (64, 2, 1), (700, 3, 1)])
def test_packed_ids_are_numbers_of_as_many_bits(num_experts, shape) -> None:
    """The stored bytes of a layer as one large number, taken apart with Python's integers."""
    n, num_layers, top_k = shape
    layout = ModelLayout(tuple(range(num_layers)), num_layers, num_experts, top_k)
    rng = np.random.default_rng(num_experts)
    ids = rng.integers(0, num_experts, shape).astype(layout.dtype)
    frame = encode_frame(ids, layout, codec=Codec.PACK)
    header = read_header(frame)
    bits = max(1, (num_experts - 1).bit_length())
    low, width = max(0, bits - 8), min(8, bits)
    eighth = -(-n * top_k // 8)
    layer = 0
    for at, count in zip(header.group_offsets, header.group_layers, strict=False):
        planes = at + count * eighth * width
        for i in range(count):
            plane = frame[at + i * eighth * width : at + (i + 1) * eighth * width]
            found = int.from_bytes(plane, "little")
            flags = [
                int.from_bytes(frame[planes + (i * low + bit) * eighth :][:eighth], "little")
                for bit in range(low)
            ]
            for place, expert in enumerate(ids[:, layer].reshape(-1).tolist()):
                number = (found >> place * width) % (1 << width) << low
                number += sum((flag >> place & 1) << bit for bit, flag in enumerate(flags))
                assert number == expert
            layer += 1
    assert layer == num_layers
    np.testing.assert_array_equal(decode_frame(frame), ids.swapaxes(0, 1))


def test_small_frames_are_packed_and_large_ones_compressed() -> None:
    layout = ModelLayout((0, 3), 4, 128, 4)
    rng = np.random.default_rng(1)
    rows = [ZSTD_ROWS, 1, ZSTD_ROWS - 1, ZSTD_ROWS + 1]
    ids = [routing(rng, n, layout) for n in rows]
    frames = encode_frames(ids, layout, codec=None)
    codecs = [Codec.LAYER_ZSTD, Codec.PACK, Codec.PACK, Codec.LAYER_ZSTD]
    assert [read_header(frame).codec for frame in frames] == codecs
    for frame, its, n, codec in zip(frames, ids, rows, codecs, strict=True):
        np.testing.assert_array_equal(decode_frame(frame), its.swapaxes(0, 1))
        assert frame == encode_frame(its, layout, codec=codec), n


def test_ids_of_few_experts_are_always_packed() -> None:
    for num_experts, codec in ((8, Codec.PACK), (9, Codec.LAYER_ZSTD)):
        layout = ModelLayout((0,), 1, num_experts, 2)
        ids = routing(np.random.default_rng(1), 512, layout)
        assert read_header(encode_frame(ids, layout, codec=None)).codec is codec


def test_layers_of_packed_frames_are_cut_in_small_groups() -> None:
    """A stage of a pipeline gets its layers, and few others."""
    layout = ModelLayout(tuple(range(48)), 48, 128, 8)
    for n, most in ((256, 2), (128, 4), (64, 8)):
        frame = encode_frame(routing(np.random.default_rng(n), n, layout), layout, codec=Codec.PACK)
        assert max(read_header(frame).group_layers) <= most
        cut = slice_frame(frame, range(12, 24))
        assert len(cut) < len(frame) * (12 + 2 * most) / 48 + 100
        np.testing.assert_array_equal(
            decode_frame(cut, layer_ids=range(12, 24)), decode_frame(frame)[12:24]
        )


# Damage


def small_frames() -> Iterator[tuple[str, bytes]]:
    rng = np.random.default_rng(5)
    for num_experts, n, codec in [
        (16, 2, Codec.LAYER_ZSTD),  # one group, raw
        (16, 140, Codec.LAYER_ZSTD),  # zstd groups of one layer
        (300, 40, Codec.LAYER_ZSTD),  # zstd, and low bits
        (300, 3, Codec.RAW),
        (16, 5, Codec.PACK),
        (100, 40, Codec.PACK),  # ids above the number of experts can be said
        (300, 7, Codec.PACK),  # low bits, and ids that fill up
    ]:
        layout = ModelLayout((0, 3), 4, num_experts, 4)
        ids = routing(rng, n, layout) // 4 * 4
        frame = encode_frame(ids, layout, codec=codec, validate=False)
        yield f"{codec.name}-{num_experts}-{n}", frame


SMALL_FRAMES = dict(small_frames())
small_frame = pytest.mark.parametrize("frame", SMALL_FRAMES.values(), ids=SMALL_FRAMES.keys())


def test_small_frames_are_what_they_are_meant_to_be() -> None:
    zstd = [b"\x28\xb5\x2f\xfd" in frame for frame in SMALL_FRAMES.values()]
    assert zstd == [False, True, True, False, False, False, False]


@small_frame
def test_no_flip_gives_other_ids(frame: bytes) -> None:
    """Corrupt, but for the few bits of a zstd frame that its decoder does not look at."""
    header, ids = read_header(frame), decode_frame(frame)
    unseen = 0
    for at in range(len(frame)):
        for mask in (1, 2, 4, 8, 16, 32, 64, 128, 255):
            damaged = bytearray(frame)
            damaged[at] ^= mask
            try:
                decoded = decode_frame(damaged)
            except Corrupt:
                continue
            unseen += 1
            assert at >= header.header_bytes
            np.testing.assert_array_equal(decoded, ids)
    assert unseen <= (0.02 * 9 * len(frame) if b"\x28\xb5\x2f\xfd" in frame else 0)


@settings(max_examples=300)
@given(
    st.sampled_from([1, 128, 256, 300, 2000]),
    st.sampled_from([70, 256, 1000]),
    st.sampled_from(Codec),
    st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(1, 255)), max_size=4),
    st.booleans(),
)
def test_no_damage_gives_other_ids(
    num_experts: int, n: int, codec: Codec, edits: list[tuple[float, int]], header_too: bool
) -> None:
    """In frames as large as they are sent, of planes that zstd shrinks and planes as they are."""
    frame, ids = large_frame(num_experts, n, codec)
    damaged = bytearray(frame)
    first = 0 if header_too else read_header(frame).header_bytes
    for where, mask in edits:
        damaged[first + int(where * (len(frame) - first))] ^= mask
    wanted = (5, 3)
    for decode, expected in (
        (decode_frame, ids),
        (lambda data: decode_frame(data, layer_ids=wanted), ids[[2, 0]]),
        (lambda data: decode_frame(slice_frame(data, wanted), layer_ids=wanted), ids[[2, 0]]),
    ):
        with suppress(Corrupt):
            np.testing.assert_array_equal(decode(damaged), expected)


@cache
def large_frame(num_experts: int, n: int, codec: Codec) -> tuple[bytes, Any]:
    """A frame, and its ids [L, n, K]."""
    layout = ModelLayout((3, 4, 5), 6, num_experts, min(num_experts, 8))
    rng = np.random.default_rng(n)
    ids = routing(rng, n, layout)
    ids[:, 1] = rng.integers(0, num_experts, ids[:, 1].shape)  # does not get smaller
    return encode_frame(ids, layout, codec=codec, validate=False), ids.transpose(1, 0, 2)


@small_frame
def test_every_truncation_is_seen(frame: bytes) -> None:
    for length in range(len(frame)):
        for read in (read_header, decode_frame, lambda data: slice_frame(data, [3])):
            with pytest.raises(Corrupt):
                read(frame[:length])
    with pytest.raises(Corrupt):
        read_header(frame + b"\0")


@pytest.mark.parametrize("at", [0, 5119, 5120, 10_239, 10_240, -1])
def test_damage_anywhere_in_a_large_group_is_seen(at: int) -> None:
    layout = ModelLayout((0, 1), 2, 256, 8)
    ids = np.random.default_rng(0).integers(0, 256, (1500, 2, 8)).astype(np.uint8)
    frame = bytearray(encode_frame(ids, layout, validate=False))
    np.testing.assert_array_equal(decode_frame(frame), ids.transpose(1, 0, 2))
    start, stop = read_header(frame).group_offsets[1:]
    frame[range(start, stop)[at]] ^= 1  # stored as it is: nothing but its checksum tells
    with pytest.raises(Corrupt, match="crc32 of group 1"):
        decode_frame(frame)


def test_only_groups_that_are_used_are_checked() -> None:
    layout = ModelLayout((0, 1), 2, 64, 8)
    ids = routing(np.random.default_rng(0), 100, layout)
    damaged = bytearray(encode_frame(ids, layout))
    damaged[-1] ^= 1
    np.testing.assert_array_equal(decode_frame(damaged, layer_ids=[0])[0], ids[:, 0])
    with pytest.raises(Corrupt, match="match checksum"):
        decode_frame(damaged, layer_ids=[1])
    with pytest.raises(Corrupt, match="match checksum"):
        decode_frame(slice_frame(damaged, [1]))


def zstd_without_size(data: bytes) -> bytes:
    compressor = zstandard.ZstdCompressor(write_content_size=False, write_checksum=True)
    return compressor.compress(data)


def zstd_that_claims(size: int, data: bytes) -> bytes:
    stream = zstandard.ZstdCompressor(write_checksum=True).compressobj(size=size)
    return stream.compress(data) + stream.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)


class Untouched:
    """A decompressor that must not be asked."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(name)


HONEST = bytes(1000)  # a layer of 100 rows of top-10, if ids could repeat


@pytest.mark.parametrize(
    ("group", "match"),
    [
        (zstd_that_claims(1 << 30, HONEST), "zstd content size is 1073741824; expected 1000"),
        (zstd_that_claims(1001, HONEST), "zstd content size is 1001; expected 1000"),
        (squeezed(HONEST[:-1]), "zstd content size is 999; expected 1000"),
        (zstd_without_size(HONEST), "zstd content size is -1; expected 1000"),
        (b"\x50\x2a\x4d\x18\x04\0\0\0abcd", "zstd content size is 0"),  # a skippable frame
        (b"no zstd at all", "zstd frame"),
        (b"\x28\xb5\x2f\xfd", "zstd frame"),
        (zstandard.compress(HONEST), "zstd flags is 0b01100000; expected a checksum"),
        (squeezed(HONEST)[:4] + b"\x74" + squeezed(HONEST)[5:], "zstd flags is 0b01110100"),
    ],
)
def test_bombs_are_refused_from_what_they_claim(
    monkeypatch: pytest.MonkeyPatch, group: bytes, match: str
) -> None:
    layout = ModelLayout((7,), 8, 16, 10)
    honest = read_header(encode_frame(np.zeros((100, 1, 10), np.uint8), layout, validate=False))
    contexts = frame_module._Contexts()
    contexts.decompressor = Untouched()
    monkeypatch.setattr(frame_module, "_contexts", contexts)
    with pytest.raises(Corrupt, match=match):
        decode_frame(forge(honest, [group]))


@pytest.mark.parametrize(
    "group",
    [
        squeezed(HONEST)[:-3],
        zstd_that_claims(1000, HONEST[:-1]),
        squeezed(HONEST)[:-5] + b"\xff" * 9,
        squeezed(HONEST)[:-4] + squeezed(HONEST[:-1])[-4:],  # the checksum of other ids
        squeezed(bytes([16] * 1000)),  # an id too many
        sealed(bytes([16] * 1000)),
        HONEST + bytes(4),
    ],
)
def test_lies_that_only_decoding_shows(group: bytes) -> None:
    layout = ModelLayout((7,), 8, 16, 10)
    honest = read_header(encode_frame(np.zeros((100, 1, 10), np.uint8), layout, validate=False))
    assert not decode_frame(forge(honest, [squeezed(HONEST)])).any()
    assert not decode_frame(forge(honest, [sealed(HONEST)])).any()
    with pytest.raises(Corrupt):
        decode_frame(forge(honest, [group]))


@pytest.mark.parametrize(
    ("lies", "field"),
    [
        ({"magic": b"RTF1"}, "magic"),
        ({"codec": 3}, "codec"),
        ({"codec": 0}, "group bytes"),  # raw groups have one size only
        ({"codec": 2}, "group bytes"),  # and so have packed ones
        ({"shift": 1}, "shift"),
        ({"top_k": 0}, "top_k"),
        ({"top_k": 65}, "top_k"),
        ({"num_experts": 65536, "top_k": 1025}, "top_k"),
        ({"num_rows": 0}, "num_rows"),
        ({"num_rows": MAX_FRAME_ROWS + 1}, "num_rows"),
        ({"num_experts": 0}, "num_experts"),
        ({"num_experts": 65537}, "num_experts"),
        ({"num_experts": 257}, "shift"),
        ({"num_experts": 257, "shift": 1}, "group bytes"),  # no room for the low bits
        ({"bitmap": b""}, "bitmap bytes"),
        ({"bitmap": b"\x0f" + bytes(511) + b"\1"}, "bitmap bytes"),
        ({"bitmap": b"\x0f\0"}, "last byte of the bitmap"),
        ({"bitmap": b"\x07"}, "group layers"),
        ({"bitmap": b"\x1f"}, "group layers"),
        ({"sizes": (), "layers": ()}, "group layers"),
        ({"layers": (1, 1, 1, 2)}, "group layers"),
        ({"layers": (0, 2, 1, 1)}, "group layers"),
        ({"layers": (0, 2, 1, 1), "sizes": (4, 8, 8, 8)}, "group layers"),
        ({"sizes": (3, 8, 8, 8)}, "group bytes"),
        ({"sizes": (2053, 8, 8, 8)}, "group bytes"),
        ({"layers": (1, 2, 1), "sizes": (8, 4101, 8)}, "group bytes"),
        ({"body": bytes(31)}, "bytes"),
        ({"body": bytes(33)}, "bytes"),
    ],
)
def test_a_true_checksum_does_not_excuse_a_lie(lies: dict[str, Any], field: str) -> None:
    def frame(
        *,
        magic: bytes = b"RTF2",
        codec: int = 1,
        shift: int = 0,
        top_k: int = 8,
        num_rows: int = 256,
        num_experts: int = 64,
        bitmap: bytes = b"\x0f",
        sizes: tuple[int, ...] = (8, 8, 8, 8),
        layers: tuple[int, ...] = (1, 1, 1, 1),
        body: bytes | None = None,
    ) -> bytes:
        count = len(sizes)
        fixed = (magic, codec, shift, top_k, num_rows, num_experts, len(bitmap), count)
        head = struct.pack("<4sBBHIIHH", *fixed) + bitmap
        head += struct.pack(f"<{count}I{count}H", *sizes, *layers)
        head += struct.pack("<I", zlib.crc32(head))
        return head + (bytes(sum(sizes)) if body is None else body)

    assert read_header(frame()).frame_bytes == len(frame())
    with pytest.raises(Corrupt) as caught:
        read_header(frame(**lies))
    assert caught.value.field == f"frame: {field}"
    assert caught.value.expected


def test_decoded_size_is_capped() -> None:
    layers = tuple(range(4096))
    header = FrameHeader(65536, layers, 65536, 1024, Codec.LAYER_ZSTD, (4096,), (9,))
    with pytest.raises(Corrupt, match="decoded bytes"):
        read_header(header.pack() + bytes(9))


def survives(data: bytes) -> None:
    for use in (
        read_header,
        decode_frame,
        lambda frame: slice_frame(frame, [0]),
        lambda frame: decode_frame(frame, layer_ids=[3]),
    ):
        with suppress(RouteTraceError):
            use(data)


@settings(max_examples=300)
@given(st.binary(max_size=200), st.sampled_from([b"", b"RTF2", b"RTF2\1\0\1\0\1\0\0\0\4\0\0\0"]))
def test_arbitrary_bytes(data: bytes, start: bytes) -> None:
    survives(start + data)


@settings(max_examples=300)
@given(
    st.sampled_from(list(SMALL_FRAMES.values())),
    st.lists(st.tuples(st.floats(0, 0.999), st.binary(min_size=1, max_size=4)), max_size=4),
)
def test_damage_with_true_checksums(frame: bytes, edits: list[tuple[float, bytes]]) -> None:
    def edited(data: bytes) -> bytes:
        damaged = bytearray(data)
        for where, patch in edits:
            at = int(where * len(damaged))
            damaged[at : at + len(patch)] = patch
        return bytes(damaged)

    header = read_header(frame)
    survives(forge(header, [edited(group) for group in groups_of(frame)]))
    head = b"RTF2" + edited(header.pack()[4:-4])
    survives(head + struct.pack("<I", zlib.crc32(head)) + frame[header.header_bytes :])


# Arguments


@pytest.mark.parametrize(
    ("ids", "match"),
    [
        (np.zeros((3, 2), np.uint8), "shape"),
        (np.zeros((3, 3, 4), np.uint8), "shape"),
        (np.zeros((3, 2, 3), np.uint8), "shape"),
        (np.zeros((0, 2, 4), np.uint8), "shape"),
        (np.zeros((MAX_FRAME_ROWS + 1, 2, 4), np.uint8), "shape"),
        (np.zeros((3, 2, 4), np.uint16), "of uint16; expected of uint8"),
        (np.zeros((3, 2, 4), np.int8), "of int8; expected of uint8"),
        (np.tile(np.uint8([0, 1, 2, 64]), (3, 2, 1)), "expected below 64"),
        (np.tile(np.uint8([0, 1, 2, 0]), (3, 2, 1)), "no id twice"),
    ],
)
def test_encode_refuses(ids: Any, match: str) -> None:
    layout = ModelLayout((0, 1), 2, 64, 4)
    with pytest.raises(InvalidArgument, match=match) as caught:
        encode_frame(ids, layout)
    assert caught.value.field == "ids"


def test_encode_refuses_levels_and_sizes() -> None:
    layout = ModelLayout((0,), 1, 64, 4)
    for level in (0, 20):
        with pytest.raises(InvalidArgument, match="level"):
            encode_frame(np.uint8([[[0, 1, 2, 3]]]), layout, level=level)
    wide = ModelLayout(tuple(range(2048)), 2048, 256, 4)
    huge = np.broadcast_to(np.uint8([0, 1, 2, 3]), (32769, 2048, 4))
    with pytest.raises(InvalidArgument, match="at most 67108864"):
        encode_frame(huge, wide)


def test_validate_false_trusts_the_caller() -> None:
    layout = ModelLayout((0, 1), 2, 64, 4)
    ids = np.zeros((3, 2, 4), np.uint8)
    assert decode_frame(encode_frame(ids, layout, validate=False)).shape == (2, 3, 4)


@pytest.mark.parametrize("layer_ids", [(), (1,), (0, 1), (-1,), (9,)])
def test_layers_that_are_not_there(layer_ids: tuple[int, ...]) -> None:
    layout = ModelLayout((0, 2), 3, 64, 4)
    frame = encode_frame(routing(np.random.default_rng(0), 5, layout), layout)
    out = np.zeros((len(layer_ids), 5, 4), np.uint8)
    for use in (
        lambda: slice_frame(frame, layer_ids),
        lambda: decode_frame(frame, layer_ids=layer_ids),
        lambda: decode_into(frame, out, layer_ids),
    ):
        with pytest.raises(InvalidArgument, match="layer_ids"):
            use()


def test_out_that_does_not_fit() -> None:
    layout = ModelLayout((0, 2), 3, 64, 4)
    frame = encode_frame(routing(np.random.default_rng(0), 5, layout), layout)
    frozen = np.zeros((1, 5, 4), np.uint8)
    frozen.flags.writeable = False
    for out in (np.zeros((2, 5, 4), np.uint8), np.zeros((1, 5, 4), np.int32), frozen):
        with pytest.raises(InvalidArgument, match="out is") as caught:
            decode_into(frame, out, [2])
        assert caught.value.expected == "a uint8 (1, 5, 4)"


@settings(max_examples=150)
@given(st.integers(1, 20), st.integers(1, 4), st.integers(1, 6), st.integers(0, 99), st.booleans())
def test_invalid_rows_is_what_sets_say(
    top_k: int, num_layers: int, n: int, seed: int, contiguous: bool
) -> None:
    rng = np.random.default_rng(seed)
    num_experts = 40
    ids = rng.permuted(np.tile(np.arange(num_experts + 1), (n, num_layers, 1)), axis=2)
    ids = ids[:, :, :top_k].astype(rng.choice([np.uint8, np.uint16]))
    if rng.random() < 0.5:
        ids[rng.integers(n), rng.integers(num_layers), rng.integers(top_k)] = rng.integers(41)
    if not contiguous:
        ids = ids[::-1, :, ::-1]
    expected = [
        any(len(set(cell)) < top_k or max(cell) >= num_experts for cell in row)
        for row in ids.tolist()
    ]
    assert invalid_rows(ids, num_experts).tolist() == expected


def test_invalid_rows_of_full_dtypes() -> None:
    assert not invalid_rows(np.uint8([[[255, 0]]]), 256).any()
    assert not invalid_rows(np.uint16([[[65535, 0]]]), 65536).any()
    assert invalid_rows(np.zeros((0, 2, 2), np.uint8), 4).shape == (0,)


# Threads


def test_threads_have_contexts_of_their_own() -> None:
    layout = ModelLayout(tuple(range(8)), 8, 384, 8)
    batches = [routing(np.random.default_rng(i), 300, layout) for i in range(4)]
    frames = [encode_frame(ids, layout) for ids in batches]
    start = threading.Barrier(4)
    failures: list[BaseException] = []

    def work(i: int) -> None:
        try:
            start.wait(30)
            for _ in range(30):
                assert encode_frame(batches[i], layout) == frames[i]
                np.testing.assert_array_equal(
                    decode_frame(frames[i]), batches[i].transpose(1, 0, 2)
                )
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures
    assert not any(thread.is_alive() for thread in threads)


# Size


def entropy_bytes(ids: Any) -> float:
    """Order-0 entropy of ids [n, L, K] with a table per layer, in bytes, tables not counted."""
    bits = 0.0
    for layer in range(ids.shape[1]):
        counts = np.bincount(ids[:, layer].ravel())
        shares = counts[counts > 0] / counts.sum()
        bits -= float((shares * np.log2(shares)).sum()) * ids[:, layer].size
    return bits / 8


def like_a_large_model(n: int, layers: int, top_k: int, num_experts: int) -> Any:
    """Experts that differ in popularity by layer and stay for a while.

    With the knobs at these values two neighbours share 0.4 of their experts, and the entropy is
    0.79 of log2 E at 128 experts: as published for Qwen3-30B-A3B.
    """
    rng = np.random.default_rng(1)
    popularity = rng.standard_normal((layers, num_experts))
    state = rng.standard_normal((layers, num_experts))
    rows = []
    for _ in range(n):
        state = 0.9 * state + 0.19**0.5 * rng.standard_normal(state.shape)
        logits = popularity + 0.8 * state + 0.6 * rng.standard_normal(state.shape)
        rows.append(np.argsort(-logits, axis=1)[:, :top_k])
    return np.stack(rows).astype(np.uint8 if num_experts <= 256 else np.uint16)


@pytest.mark.parametrize(("num_experts", "shift"), [(128, 0), (256, 0), (384, 1), (600, 2)])
def test_size_is_the_entropy_of_the_layers(num_experts: int, shift: int) -> None:
    ids = like_a_large_model(1024, 4, 8, num_experts)
    layout = layout_of(ids, num_experts)
    # What is coded is coded at its entropy; the low bits are not coded.
    bound = entropy_bytes(ids >> shift) + ids.size * shift / 8
    assert len(encode_frame(ids, layout)) <= 1.03 * bound
    # Frames of 256 rows pay for a table each 256 rows.
    quarters = encode_frames([ids[at : at + 256] for at in range(0, 1024, 256)], layout)
    assert sum(map(len, quarters)) <= 1.07 * bound


@pytest.mark.parametrize("num_experts", [256, 512, 65536])
@pytest.mark.parametrize("codec", Codec)
@pytest.mark.parametrize("n", [256, 1024])
def test_never_larger_than_raw(num_experts: int, codec: Codec, n: int) -> None:
    rng = np.random.default_rng(0)
    ids = rng.integers(0, num_experts, (n, 12, 4)).astype(
        layout_of(np.zeros((1, 1, 1)), num_experts).dtype
    )
    frame = encode_frame(ids, layout_of(ids, num_experts), codec=codec, validate=False)
    assert len(frame) <= 1.015 * ids.nbytes
    np.testing.assert_array_equal(decode_frame(frame), ids.transpose(1, 0, 2))


# Recorded and calibrated routing, where it lies beside the repository.
DATA = Path(__file__).parents[3] / "shared" / "data"


@pytest.mark.parametrize(
    ("name", "bound"),
    [  # of the entropy per layer over the whole set
        ("syn_qwen3_30b_1k", 1.03),
        ("syn_dsv3_1k", 1.03),
        ("syn_gptoss120b_1k", 1.05),
        ("syn_kimi_k2_1k", 1.10),
        ("real_qwen_text", 0.89),
        ("real_qwen_gen", 0.85),
        ("real_dsv3_text", 0.87),
    ],
)
def test_size_on_recorded_routing(name: str, bound: float) -> None:
    path = DATA / f"{name}.npz"
    if not path.exists():
        pytest.skip("no recorded routing beside the repository")
    with np.load(path) as data:
        ids, num_experts = data["ids"], int(data["E"])
    batches = [ids[at : at + 1024] for at in range(0, len(ids), 1024)]
    frames = encode_frames(batches, layout_of(ids, num_experts))
    assert sum(map(len, frames)) <= bound * entropy_bytes(ids)
    for batch, frame in zip(batches[:3], frames, strict=False):
        np.testing.assert_array_equal(decode_frame(frame), batch.transpose(1, 0, 2))
