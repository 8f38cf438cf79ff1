"""An Ingest stream is read as protobuf reads it, and a plain frame as read_header does."""

from __future__ import annotations

from zlib import crc32

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from routetrace.codec.frame import Codec, encode_frame
from routetrace.codec.frame_check import PlainFrames
from routetrace.codec.frame_header import read_header
from routetrace.common.errors import InvalidArgument, RouteTraceError
from routetrace.common.layout import ModelLayout
from routetrace.server.wire.checksums import STEP, running
from routetrace.server.wire.messages import MAX_OTHER_BYTES, Chunk, read_request
from routetrace.v1 import routetrace_pb2 as pb

u32 = st.integers(0, (1 << 32) - 1)
chunks = st.builds(
    pb.Chunk,
    sequence=st.integers(0, (1 << 64) - 1),
    header_crc32=u32,
    payload_crc32=u32,
    header=st.binary(max_size=300),
    payload=st.binary(max_size=300),
)


def told(data: bytes) -> object:
    """By protobuf."""
    try:
        request = pb.IngestRequest.FromString(data)
    except DecodeError:
        return DecodeError
    request.DiscardUnknownFields()
    kind = request.WhichOneof("message")
    return getattr(request, kind) if kind else None


def read(data: bytes) -> object:
    try:
        request = read_request(data)
    except DecodeError:
        return DecodeError
    if not isinstance(request, Chunk):
        if request is not None:
            request.DiscardUnknownFields()
        return request
    return pb.Chunk(
        sequence=request.sequence,
        header_crc32=request.header_crc32,
        payload_crc32=request.payload_crc32,
        header=request.header,
        payload=bytes(request.payload),
    )


@given(chunks, st.data())
def test_a_chunk_is_read_as_protobuf_reads_it(chunk: pb.Chunk, data: st.DataObject) -> None:
    message = pb.IngestRequest(chunk=chunk).SerializeToString()
    assert read(message) == chunk
    # Whatever else it is: damaged, cut off, or with more behind it.
    at = data.draw(st.integers(0, len(message) - 1))
    for other in (
        message[:at] + bytes([data.draw(st.integers(0, 255))]) + message[at + 1 :],
        message[:at],
        message + data.draw(st.binary(max_size=9)),
        message + message,
    ):
        assert read(other) == told(other)


@pytest.mark.parametrize(
    "request_", [pb.IngestRequest(hello=pb.Hello(run="r")), pb.IngestRequest(),
                 pb.IngestRequest(heartbeat=pb.Heartbeat(offered_rows=3))]
)  # fmt: skip
def test_other_messages_are_read_too(request_: pb.IngestRequest) -> None:
    message = request_.SerializeToString()
    assert read(message) == told(message)


def test_long_messages_are_chunks() -> None:
    names = {f"reason {i}": i for i in range(10_000)}
    beat = pb.IngestRequest(heartbeat=pb.Heartbeat(dropped_rows=names))
    with pytest.raises(InvalidArgument, match=f"expected at most {MAX_OTHER_BYTES}, but for"):
        read_request(beat.SerializeToString())
    # A chunk in another encoding, as its fields come in another order.
    parts = [pb.Chunk(payload=bytes(1 << 17)), pb.Chunk(sequence=5)]
    data = b"".join(pb.IngestRequest(chunk=part).SerializeToString() for part in parts)
    chunk = read_request(data)
    assert isinstance(chunk, Chunk)
    assert (chunk.sequence, len(chunk.payload)) == (5, 1 << 17)


def test_a_payload_is_not_copied() -> None:
    chunk = pb.Chunk(sequence=1, header_crc32=2, payload_crc32=3, header=b"h", payload=b"p" * 99)
    message = pb.IngestRequest(chunk=chunk).SerializeToString()
    request = read_request(message)
    assert isinstance(request, Chunk)
    assert isinstance(request.payload, memoryview)
    assert request.payload.obj is message


def test_running_checksums_tell_every_step() -> None:
    payload = np.random.default_rng(0).bytes(3 * STEP + 5)
    sums = running(payload)
    assert len(sums) == 4
    assert sums == running(memoryview(payload))
    assert running(b"") == []
    for at in (0, STEP - 1, STEP, 3 * STEP + 4):
        other = bytearray(payload)
        other[at] ^= 1
        assert [a == b for a, b in zip(sums, running(bytes(other)), strict=True)] == [
            i < at // STEP for i in range(4)
        ]


LAYOUTS = (
    ModelLayout(tuple(range(1, 5)), 6, 128, 8),
    ModelLayout((0, 3, 9), 12, 384, 2),
    ModelLayout((7,), 8, 2, 1),
)


@given(
    st.sampled_from(LAYOUTS),
    st.integers(1, 300),
    st.sampled_from(list(Codec)),
    st.integers(0, 99),
    st.data(),
)
def test_a_plain_frame_is_one_that_read_header_takes(
    layout: ModelLayout, rows: int, codec: Codec, seed: int, data: st.DataObject
) -> None:
    rng = np.random.default_rng(seed)
    size = (rows, len(layout.layer_ids), layout.num_experts)
    ids = rng.random(size).argsort(axis=2)[..., : layout.top_k].astype(layout.dtype)
    frame = encode_frame(ids, layout, codec=codec)
    header = read_header(frame)
    plain = PlainFrames(layout)
    alone = codec is Codec.PACK or set(header.group_layers) == {1}
    assert plain.has(memoryview(frame), rows) == alone
    assert not plain.has(memoryview(frame), rows + 1)
    assert not plain.has(memoryview(frame + b"\0"), rows)
    assert not plain.has(memoryview(frame)[:-1], rows)
    other = LAYOUTS[(LAYOUTS.index(layout) + 1) % len(LAYOUTS)]
    assert not PlainFrames(other).has(memoryview(frame), rows)
    # Damaged, with a header whose checksum is right or not.
    damaged = bytearray(frame)
    at = data.draw(st.integers(0, header.header_bytes - 1))
    damaged[at] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        end = header.header_bytes - 4
        damaged[end : end + 4] = crc32(damaged[:end]).to_bytes(4, "little")
    if plain.has(memoryview(damaged), rows):
        assert codec is not Codec.PACK or bytes(damaged) == frame, "there is one header only"
        found = read_header(bytes(damaged))
        assert (found.num_rows, found.layer_ids, found.num_experts, found.top_k) == (
            rows,
            layout.layer_ids,
            layout.num_experts,
            layout.top_k,
        )
        assert found.frame_bytes == len(damaged)
    else:
        try:
            found = read_header(bytes(damaged))
        except RouteTraceError:
            return
        assert (found.group_layers, bytes(damaged)) != (header.group_layers, frame) or not alone


@pytest.mark.parametrize(("codec", "moved"), [(Codec.RAW, 1), (Codec.LAYER_ZSTD, 600)])
@pytest.mark.parametrize("layout", LAYOUTS[:2])
def test_groups_of_impossible_sizes_are_not_plain(
    layout: ModelLayout, codec: Codec, moved: int
) -> None:
    """The bytes are as many as are told, and the checksum is right."""
    ids = np.zeros((300, len(layout.layer_ids), layout.top_k), layout.dtype)
    frame = encode_frame(ids, layout, codec=codec, validate=False)
    header = read_header(frame)
    first, second, *others = header.group_bytes
    plain = PlainFrames(layout)
    most = sum(header.layer_bytes) + 4
    for sizes in ((most, second), (most + 1, second), (first + moved, second - moved), (3, second)):
        total = max(0, sum(sizes) + sum(others))
        if min(sizes) < 0:
            continue
        forged = header._replace(group_bytes=(*sizes, *others)).pack() + bytes(total)
        try:
            told = read_header(forged).group_bytes == (*sizes, *others)
        except RouteTraceError:
            told = False
        assert plain.has(memoryview(forged), 300) == told == (sizes == (most, second))
