"""Limits of names and of blocks, which stand in one place."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from routetrace.codec.records import OP, OpKind
from routetrace.common.errors import InvalidArgument
from routetrace.common.layout import ModelLayout
from routetrace.common.limits import (
    MAX_ID_LENGTH,
    MAX_LABEL_LENGTH,
    MAX_LABELS,
    check_id,
    check_labels,
)
from routetrace.server.index.chunk import (
    MAX_BLOCKS,
    MAX_OPS,
    MAX_REQUESTS,
    blocks_of,
    parse_header,
    parse_in_steps,
)
from routetrace.server.index.slot_map import SlotMap
from routetrace.server.wire.pieces import PIECE_BYTES
from routetrace.v1 import routetrace_pb2 as pb

SLOTS = SlotMap(4, 10)


class Ids(Sequence):
    """Very many ids, of which a request for few tokens may look at few."""

    def __init__(self) -> None:
        self.taken = 0

    def __len__(self) -> int:
        return 1 << 23

    def __getitem__(self, index):
        assert isinstance(index, slice), "no id is looked at by itself"
        ids = [0] * len(range(*index.indices(len(self))))
        self.taken += len(ids)
        return ids


def test_ids_beyond_the_tokens_are_not_looked_at():
    ids = Ids()
    assert blocks_of(SLOTS, ids, 9).tolist() == [0, 0, 0]
    assert ids.taken == 3


@pytest.mark.parametrize(("tokens", "blocks"), [(1, 1), (4, 1), (5, 2), (8, 2), (40, 10)])
def test_a_request_has_the_blocks_of_its_tokens(tokens, blocks):
    assert blocks_of(SLOTS, [*range(10)], tokens).tolist() == [*range(blocks)]


def test_blocks_that_an_engine_does_not_have_are_named():
    with pytest.raises(InvalidArgument, match=r"block_ids\[2\] is 10; expected ids below num_bloc"):
        blocks_of(SLOTS, [0, 9, 10, 11], 16)
    assert blocks_of(SLOTS, [0, 9, 10, 11], 8).tolist() == [0, 9]
    with pytest.raises(InvalidArgument, match="at most 10"):
        blocks_of(SLOTS, [0] * 11, 44)
    with pytest.raises(InvalidArgument, match="none, as the agent reports no slots"):
        blocks_of(SlotMap(0, 0), [0], 1)
    with pytest.raises(InvalidArgument, match=f"at most {MAX_BLOCKS}"):
        blocks_of(SlotMap(1, MAX_BLOCKS + 1), np.zeros(MAX_BLOCKS + 1, np.uint32), MAX_BLOCKS + 1)


def test_a_long_header_is_parsed_in_many_steps():
    """No step takes more than a piece of the message, or some entries."""
    layout = ModelLayout((0,), 1, 8, 1)
    ids = [f"request-{i:05}" for i in range(MAX_REQUESTS)]
    header = pb.ChunkHeader(layout=layout.to_proto(), request_ids=ids)
    header.begins.extend(pb.RequestBegin(trace_id=i) for i in ids)
    ops = np.zeros(MAX_OPS, OP)
    ops["kind"] = OpKind.RESET
    header.ops = ops.tobytes()
    header.block_ids = np.zeros(1 << 20, np.uint32).tobytes()
    data = header.SerializeToString()
    columns = 2 * MAX_REQUESTS + 2 * MAX_OPS
    fields = len(data) - len(header.ops) - len(header.block_ids)
    parsing = parse_in_steps(data, layout, SLOTS)
    assert sum(1 for _ in parsing) > fields // PIECE_BYTES + columns // 256 + (1 << 20) // (1 << 13)
    assert parse_header(data, layout, SLOTS).request_ids == ids


@pytest.mark.parametrize("field", ["request_ids", "begins"])
def test_a_chunk_has_a_bounded_number_of_requests(field):
    layout = ModelLayout((0,), 1, 8, 1)
    header = pb.ChunkHeader(layout=layout.to_proto())
    entries = {"request_ids": ["request"], "begins": [pb.RequestBegin()]}[field]
    getattr(header, field).extend(entries * MAX_REQUESTS)
    assert len(getattr(parse_header(header.SerializeToString(), layout, SLOTS), field)) == 1 << 15
    getattr(header, field).extend(entries)
    with pytest.raises(InvalidArgument, match=rf"^{field} is 32769 in all; expected at most 32768"):
        parse_header(header.SerializeToString(), layout, SLOTS)


def test_ids_have_a_length():
    check_id("run", "x" * MAX_ID_LENGTH)
    check_id("shard", "", required=False)
    for value in ("", "x" * (MAX_ID_LENGTH + 1), 7, None, b"x"):
        with pytest.raises(InvalidArgument, match=r"run is .*; expected (1 to 512 characters|str)"):
            check_id("run", value)


def test_labels_are_few_and_short():
    check_labels("labels", {f"k{i}": "v" for i in range(MAX_LABELS)})
    check_labels("labels", {"k": "v" * (MAX_LABEL_LENGTH - 1)})
    for labels in (
        {f"k{i}": "v" for i in range(MAX_LABELS + 1)},
        {"k": "v" * MAX_LABEL_LENGTH},
        {"": "v"},
        {"k": 1},
    ):
        with pytest.raises(InvalidArgument, match=r"^labels"):
            check_labels("labels", labels)
