"""Record headers: what the store keeps of every change, beside a chunk's payload.

A chunk's record is its facts (who sent it, when) and then the ChunkHeader as it came in; any other
change is facts alone.
"""

from __future__ import annotations

import hashlib
import json
import struct
from typing import Any, NamedTuple

from routetrace.v1 import routetrace_pb2 as pb
from routetrace.v1.layout import RoutingLayout

_HEAD = struct.Struct("<I")
_to_json = json.JSONEncoder(separators=(",", ":")).encode


class Sums(NamedTuple):
    """Checksums of a chunk."""

    header: int
    payload: int


def encode_control(kind: str, now: float, **facts: Any) -> bytes:
    """A record that changes the state without carrying rows."""
    return _encode({"kind": kind, "time": now, **facts})


def encode_chunk(
    writer: tuple[str, str, str], epoch: int, sequence: int, sums: Sums, now: float, header: bytes
) -> bytes:
    """The record header of a chunk; its payload is the chunk's."""
    facts = {
        "kind": "chunk",
        "time": now,
        "writer": writer,
        "epoch": epoch,
        "sequence": sequence,
        "sums": sums,
    }
    return _encode(facts, header)


def _encode(facts: dict[str, Any], tail: bytes = b"") -> bytes:
    head = _to_json(facts).encode()
    return _HEAD.pack(len(head)) + head + tail


def decode_record(data: bytes) -> tuple[dict[str, Any], bytes]:
    """Facts of a record, and the chunk header behind them."""
    (size,) = _HEAD.unpack_from(data)
    body = _HEAD.size
    return json.loads(data[body : body + size]), bytes(data[body + size :])


def hash_of(facts: Any) -> str:
    """A name for facts: equal ones have the same."""
    return hashlib.blake2b(json.dumps(facts).encode(), digest_size=16).hexdigest()


def layout_to_hex(layout: RoutingLayout) -> str:
    """A layout as it stands in facts."""
    return layout.to_proto().SerializeToString().hex()


def layout_from_hex(data: str) -> RoutingLayout:
    """From facts."""
    return RoutingLayout.from_proto(pb.RoutingLayout.FromString(bytes.fromhex(data)))
