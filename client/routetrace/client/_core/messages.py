"""Sealed answers: checked, and parsed without copying their payload."""

from __future__ import annotations

from typing import Any, NamedTuple

from google.protobuf.message import DecodeError

from routetrace.common.checksum import stepped_crc32
from routetrace.common.seals import PAYLOAD_FIELD, SEAL_TAG
from routetrace.v1 import routetrace_pb2 as pb

# Of the messages of all read streams: a tag of one byte, then the length.
_PAYLOAD_TAG = PAYLOAD_FIELD << 3 | 2

#: Fields of one message: a known one comes once, and a newer server may have some more.
MAX_FIELDS = 1024

#: Bytes of a message beside its payload: parsed, they may well take 50 times as much.
MAX_HEAD_BYTES = 16 << 20


class Received(NamedTuple):
    """A message of a read stream."""

    head: Any
    """The message without its payload; None if it does not parse, or its seal is broken."""
    payload: memoryview | bytes = b""

    @property
    def is_last(self) -> bool:
        """Whether it says that nothing follows."""
        if isinstance(self.head, pb.GetTracesResponse):
            return self.head.last
        return self.head is not None and self.head.HasField("end")


def unary_parser_of(message_type: type[Any]) -> Any:
    """Return a deserializer of sealed messages without a payload, for gRPC."""

    def parse(data: bytes) -> Any:
        head, _ = _split(data)
        return message_type.FromString(head)

    return parse


def parser_of(message_type: type[Any]) -> Any:
    """Return a deserializer of the messages of a read stream, for gRPC."""

    def parse(data: bytes) -> Received:
        try:
            head, payload = _split(data)
            return Received(message_type.FromString(head), payload)
        except (DecodeError, IndexError):
            return Received(None)

    return parse


def _split(data: bytes) -> tuple[bytes, memoryview]:
    """Check the seal; return the bytes of all fields but the seal and the payload, and the payload.

    Raises:
        DecodeError: if it is no message, or not the one that was sealed.
    """
    view = memoryview(data)
    at = fields = behind = 0  # `behind` the last field that is taken out
    kept: list[memoryview] = []
    payload: memoryview | None = None
    seal: int | None = None
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
        value = view[at : at + length]
        at += length
        if tag == _PAYLOAD_TAG:
            if payload is not None:
                raise DecodeError("two payloads")
            payload = value
        elif tag == SEAL_TAG:
            if seal is not None:
                raise DecodeError("two seals")
            seal = int.from_bytes(value, "little")
        else:
            continue
        kept.append(view[behind:start])
        behind = at
    kept.append(view[behind:])
    if sum(map(len, kept)) > MAX_HEAD_BYTES:
        raise DecodeError(f"more than {MAX_HEAD_BYTES} bytes beside the payload")
    head = b"".join(kept)
    if seal != stepped_crc32(head):
        raise DecodeError("a seal that does not match")
    return head, view[:0] if payload is None else payload


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
