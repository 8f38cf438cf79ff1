"""Messages of read streams, parsed without copying their payload."""

from __future__ import annotations

from typing import Any, NamedTuple

from google.protobuf.message import DecodeError

# Field 15 of GetTraceResponse and GetBlocksResponse: a tag of one byte, then the length.
_PAYLOAD_TAG = 15 << 3 | 2

#: Fields of one message: a known one comes once, and a newer server may have some more.
MAX_FIELDS = 1024

#: Bytes of a message beside its payload: parsed, they may well take 50 times as much.
MAX_HEAD_BYTES = 16 << 20


class Received(NamedTuple):
    """A message of a read stream."""

    head: Any
    """The message without its payload; None if it does not parse."""
    payload: memoryview | bytes = b""

    @property
    def is_last(self) -> bool:
        """Whether it says that nothing follows."""
        return self.head is not None and self.head.HasField("end")


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
    at = fields = 0
    begin = end = 0  # of the payload's field
    payload = view[:0]
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
        fields += 1
        if fields > MAX_FIELDS:
            raise DecodeError(f"more than {MAX_FIELDS} fields")
        if tag == _PAYLOAD_TAG:
            if end:
                raise DecodeError("two payloads")
            begin, end = start, at + length
            payload = view[at:end]
        at += length
    if len(data) - (end - begin) > MAX_HEAD_BYTES:
        raise DecodeError(f"more than {MAX_HEAD_BYTES} bytes beside the payload")
    return b"".join((view[:begin], view[end:])), payload


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
