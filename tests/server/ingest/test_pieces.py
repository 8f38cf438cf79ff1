"""Pieces of long messages: merged, they are the message that protobuf parses from all bytes."""

from __future__ import annotations

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import example, given
from hypothesis import strategies as st

from routetrace.server.wire.pieces import MAX_FIELDS, PIECE_BYTES, pieces
from routetrace.v1 import routetrace_pb2 as pb

IDS = st.lists(st.integers(0, 2**32 - 1) | st.integers(0, 300), max_size=60)
LARGE = st.integers(0, 2**64 - 1)


def merged(data: bytes, kind, piece_bytes: int = PIECE_BYTES):
    message = kind()
    for piece in pieces(data, kind, piece_bytes):
        message.MergeFromString(piece)
    return message


@given(IDS, IDS, LARGE, st.text(max_size=20), st.integers(1, 40))
# Two packed fields, neither of which is longer than a piece.
@example([0] * 4 + [128] * 3 + [16384] * 3, [0] * 5 + [128] * 2 + [16384] * 4, 0, "", 24)
def test_pieces_of_a_message_are_the_message(ids, layers, number, name, piece_bytes) -> None:
    request = pb.GetBlocksRequest(
        run=name, engine_id="e", block_ids=ids, layer_ids=layers, num_tokens=number >> 32
    )
    data = request.SerializeToString()
    found = [*pieces(data, pb.GetBlocksRequest, piece_bytes)]
    assert merged(data, pb.GetBlocksRequest, piece_bytes) == request
    # Fields that are not cut: a tag with a length and the name, or with a number of five bytes.
    # A cut one has a tag, a length of one byte here, and numbers, the last of five bytes or less.
    assert max(map(len, found)) <= max(piece_bytes + 6, 6, 2 + len(name.encode()))


@given(IDS, LARGE, st.binary(max_size=50), st.integers(1, 20))
def test_a_number_of_ten_bytes_and_a_long_field_stay_whole(ids, step, digests, piece_bytes) -> None:
    request = pb.BindRequestRequest(run="r", block_ids=ids, step=step, token_digests=digests)
    data = request.SerializeToString()
    assert merged(data, pb.BindRequestRequest, piece_bytes) == request


@given(st.lists(st.text(max_size=5), max_size=40), st.integers(1, 20))
def test_many_fields_are_cut_between_them(ids, piece_bytes) -> None:
    request = pb.RenewLeaseRequest(run="r", trace_ids=ids)
    assert merged(request.SerializeToString(), pb.RenewLeaseRequest, piece_bytes) == request


@given(st.binary(max_size=60), st.integers(1, 20))
def test_any_bytes_are_refused_or_parsed_as_by_protobuf(data, piece_bytes) -> None:
    try:
        found = merged(data, pb.GetBlocksRequest, piece_bytes)
    except DecodeError:
        return  # only groups are valid in protobuf and refused here: no client sends them
    assert found == pb.GetBlocksRequest.FromString(data)


class Counted(bytes):
    """Bytes that count how often one of them is read."""

    reads = 0

    def __getitem__(self, at):
        self.reads += 1
        return super().__getitem__(at)


def test_a_number_without_an_end_is_not_read_to_the_end_of_the_message() -> None:
    data = Counted(b"\x18" + b"\x80" * (1 << 20))
    with pytest.raises(DecodeError):
        [*pieces(data, pb.GetBlocksRequest)]
    assert data.reads < 50


@given(IDS, st.data(), st.integers(1, 20))
def test_a_message_that_is_cut_off_is_parsed_as_by_protobuf(ids, data, piece_bytes) -> None:
    whole = pb.GetBlocksRequest(engine_id="e", block_ids=ids, num_tokens=7).SerializeToString()
    cut = whole[: data.draw(st.integers(0, len(whole)))]
    try:
        expected = pb.GetBlocksRequest.FromString(cut)
    except DecodeError:
        with pytest.raises(DecodeError):
            merged(cut, pb.GetBlocksRequest, piece_bytes)
        return
    assert merged(cut, pb.GetBlocksRequest, piece_bytes) == expected


def test_pieces_of_a_long_message_are_short() -> None:
    ids = np.random.default_rng(0).integers(0, 2**32, 500_000).tolist()
    data = pb.GetBlocksRequest(run="r", block_ids=ids).SerializeToString()
    found = [*pieces(data, pb.GetBlocksRequest)]
    assert max(map(len, found)) <= PIECE_BYTES + 8
    assert len(found) <= len(data) // PIECE_BYTES + 3


def test_numbers_that_are_not_packed_are_bounded() -> None:
    # Field 3, a varint: block_ids, one by one.
    assert [*merged(b"\x18\x05" * 5000, pb.GetBlocksRequest).block_ids] == [5] * 5000
    longest = max(map(len, pieces(b"\x18\x05" * 5000, pb.GetBlocksRequest)))
    assert longest == 2 * 2048
    with pytest.raises(DecodeError, match="pack"):
        merged(b"\x18\x05" * (MAX_FIELDS + 1), pb.GetBlocksRequest)


def test_a_number_without_an_end_is_refused() -> None:
    # Field 3, packed, 400 bytes of a number that goes on.
    data = b"\x1a\x90\x03" + b"\x80" * 400
    with pytest.raises(DecodeError):
        merged(data, pb.GetBlocksRequest, 50)
