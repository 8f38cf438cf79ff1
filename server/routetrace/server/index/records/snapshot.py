"""Pieces of a snapshot: messages that can be written, sent and read one by one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain

from routetrace.server.index.records import previous
from routetrace.server.index.records.format import HEAD, is_current
from routetrace.stored import format5_pb2 as stored

#: Bytes of a piece, about.
_PIECE_BYTES = 1 << 20


def to_bytes(piece: stored.Piece) -> bytes:
    """Return a part of a piece: concatenated messages are the message of all their fields."""
    return piece.SerializeToString(deterministic=True)


def pieces(parts: Iterable[bytes]) -> Iterator[bytes]:
    """Join parts to pieces of about 1 MiB, each with its format."""
    piece = bytearray(HEAD)
    for part in parts:
        piece += part
        if len(piece) >= _PIECE_BYTES:
            yield bytes(piece)
            piece[len(HEAD) :] = b""
    if len(piece) > len(HEAD):
        yield bytes(piece)


def read_pieces(data: Iterable[bytes]) -> Iterator[stored.Piece]:
    """Yield the pieces of a snapshot of this format or the previous one.

    Raises:
        UnsupportedFormat: if it has another format.
        DecodeError: if it is damaged.
    """
    rest = iter(data)
    for first in rest:
        if not is_current(first, "the snapshot"):
            yield from previous.read_snapshot(chain([first], rest))
            return
        yield stored.Piece.FromString(first[len(HEAD) :])
