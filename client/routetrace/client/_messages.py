"""Messages of read streams, parsed without copying their payload."""

from __future__ import annotations

from typing import Any, NamedTuple

from google.protobuf.message import DecodeError

# Field 15 of GetTraceResponse and GetBlocksResponse: a tag of one byte, then the length.
_PAYLOAD_TAG = 15 << 3 | 2


class Received(NamedTuple):
    """A message of a read stream."""

    head: Any
    """The message without its payload; None if it does not parse."""
    payload: memoryview | bytes = b""


def parser_of(message_type: type[Any]) -> Any:
    """A deserializer for gRPC."""

    def parse(data: bytes) -> Received:
        try:
            head, payload = _split(data)
            return Received(message_type.FromString(head), payload)
        except (DecodeError, IndexError):
            return Received(None)

    return parse


def _split(data: bytes) -> tuple[bytes, memoryview]:
    """The bytes of all fields but the payload, and the payload."""
    view = memoryview(data)
    head, payload = [], view[:0]
    at = 0
    while at < len(data):
        start = at
        tag, at = _varint(data, at)
        kind = tag & 7
        if kind == 2:
            length, at = _varint(data, at)
        elif kind == 0:
            _, at = _varint(data, at)
            length = 0
        elif kind in (1, 5):
            length = 8 if kind == 1 else 4
        else:
            raise DecodeError(f"wire type {kind}")
        if at + length > len(data):
            raise DecodeError("cut short")
        if tag == _PAYLOAD_TAG:
            payload = view[at : at + length]
        else:
            head.append(view[start : at + length])
        at += length
    return b"".join(head), payload


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
        if shift > 63:
            raise DecodeError("a number of more than 64 bits")
