"""Serialized messages of read streams; payloads are joined in once, without another copy."""

from __future__ import annotations

import struct
from typing import Any

from routetrace.codec.frame_header import Buffer
from routetrace.codec.records import PACKED_SPAN
from routetrace.common.errors import RouteTraceError
from routetrace.common.seals import sealed
from routetrace.server.index.traces import refs
from routetrace.server.rows.frames import MESSAGE_BYTES, Fetched
from routetrace.server.rows.sending import Piece
from routetrace.server.wire.messages import varint_of
from routetrace.v1 import routetrace_pb2 as pb

# Field 15 of the messages of all read streams.
_PAYLOAD_TAG = b"\x7a"

# Maximum parts of a message; clients take at most 1,024 fields.
_MAX_PARTS = 256


def message(piece: Piece) -> bytes:
    """Return a serialized GetTraceResponse or GetBlocksResponse."""
    head = pb.GetTraceResponse()
    _fill(head, piece)
    payload = piece.rows.payload if piece.rows else []
    return _joined(head, payload)


class Parts:
    """GetTracesResponse to be."""

    def __init__(self) -> None:
        self.head = pb.GetTracesResponse()
        """The message without its payload."""
        self._size = 0
        self._payload: list[Buffer] = []

    @property
    def full(self) -> bool:
        """Whether it is to be sent: a payload has at most twice MESSAGE_BYTES."""
        return self._size >= MESSAGE_BYTES or len(self.head.parts) >= _MAX_PARTS

    def add(self, read: int, piece: Piece) -> None:
        """Add a piece of the answer to a read."""
        part = self.head.parts.add(read=read)
        _fill(part.message, piece)
        if piece.rows:
            part.payload_bytes = sum(piece.rows.frame_lengths)
            self._size += part.payload_bytes
            self._payload += piece.rows.payload

    def add_error(self, read: int, error: RouteTraceError) -> None:
        """Add the failure of a read."""
        self.head.parts.add(read=read, error=error.to_detail())

    def sealed(self) -> bytes:
        """Return the serialized message."""
        return _joined(self.head, self._payload)


def _fill(head: pb.GetTraceResponse, piece: Piece) -> None:
    """Set all fields of a message but its payload."""
    if piece.info is not None:
        head.info.CopyFrom(piece.info)
    if piece.rows is not None:
        choices: dict[tuple[int, ...], int] = {(): 0}
        head.spans = _spans(piece.rows, piece.first_frame, choices)
        head.layer_choices.extend([pb.LayerChoice(layer_ids=ids) for ids in choices if ids])
        lengths = piece.rows.frame_lengths
        head.frame_lengths = struct.pack(f"<{len(lengths)}I", *lengths)
    if piece.end is not None:
        head.end.CopyFrom(piece.end)


def _joined(head: Any, payload: list[Buffer]) -> bytes:
    """Return a sealed message; the payload field is the rest of it."""
    size = sum(map(len, payload))
    return (
        b"".join((sealed(head), _PAYLOAD_TAG, varint_of(size), *payload)) if size else sealed(head)
    )


def _spans(fetched: Fetched, first_frame: int, choices: dict[tuple[int, ...], int]) -> bytes:
    """Return packed spans; add the layers that they name to `choices`, by their order."""
    spans = []
    for row, frame in zip(fetched.rows, fetched.frames, strict=True):
        position, stop, ref, version, _, attempt, provenance, layers = row
        spans.append(
            PACKED_SPAN.pack(
                position,
                stop - position,
                first_frame + frame,
                ref & refs.MAX_ROWS - 1,
                attempt,
                provenance,
                choices.setdefault(layers, len(choices)),
                version,
            )
        )
    return b"".join(spans)
