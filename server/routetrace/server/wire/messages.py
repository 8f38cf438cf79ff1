"""Messages of the Ingest stream, parsed without copying payloads.

protobuf copies a `bytes` field twice, which at 1 GB/s is a third of the cost of intake. Chunks in
the form that agents write are parsed here; any other valid encoding is left to protobuf.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TypeAlias

from routetrace.common.errors import InvalidArgument
from routetrace.server.wire.checksums import Payload
from routetrace.v1 import routetrace_pb2 as pb

_FIXED32 = struct.Struct("<I")

# Field numbers and wire types: IngestRequest.chunk, and the fields of Chunk in their order.
_CHUNK, _SEQUENCE, _HEADER_CRC, _PAYLOAD_CRC, _HEADER, _PAYLOAD = 0x12, 0x08, 0x15, 0x1D, 0x22, 0x7A


@dataclass(frozen=True, slots=True)
class Chunk:
    """A pb.Chunk."""

    sequence: int
    header_crc32: int
    payload_crc32: int
    header: bytes
    payload: Payload

    @property
    def nbytes(self) -> int:
        """Bytes of header and payload."""
        return len(self.header) + len(self.payload)


#: Maximum length of other messages: agents send less than a hundredth of it.
MAX_OTHER_BYTES = 64 << 10

#: Message of an agent; None: an unknown one.
Request: TypeAlias = pb.Hello | pb.Heartbeat | Chunk | None


def read_request(data: bytes) -> Request:
    """Parse a serialized IngestRequest.

    Raises:
        DecodeError: if the bytes are no IngestRequest.
        InvalidArgument: if it is longer than MAX_OTHER_BYTES and not a chunk.
    """
    try:
        return _read_chunk(data)
    except (IndexError, ValueError, struct.error):
        pass  # not a chunk, or in another encoding
    if len(data) > MAX_OTHER_BYTES and not _is_chunk(data):
        raise InvalidArgument(
            field="IngestRequest",
            value=f"{len(data)} bytes",
            expected=f"at most {MAX_OTHER_BYTES}, but for a chunk",
        )
    request = pb.IngestRequest.FromString(data)
    kind = request.WhichOneof("message")
    if kind == "hello":
        return request.hello
    if kind == "heartbeat":
        return request.heartbeat
    if kind == "chunk":
        chunk = request.chunk
        return Chunk(
            chunk.sequence, chunk.header_crc32, chunk.payload_crc32, chunk.header, chunk.payload
        )
    return None


def _is_chunk(data: bytes) -> bool:
    """Whether all fields are of a chunk; a message with several counts as the last one."""
    at = 0
    try:
        while at < len(data):
            tag, at = varint(data, at)
            size, at = varint(data, at)
            if tag != _CHUNK:
                return False
            at += size
    except (IndexError, ValueError):
        return False
    return True


def _read_chunk(data: bytes) -> Chunk:
    """Parse a chunk with each field once, in ascending order, and nothing else."""
    at = _expect(data, 0, _CHUNK)
    size, at = varint(data, at)
    if at + size != len(data):
        raise ValueError("something behind the chunk")
    sequence, at = varint(data, _expect(data, at, _SEQUENCE))
    at = _expect(data, at, _HEADER_CRC)
    (header_crc32,) = _FIXED32.unpack_from(data, at)
    at = _expect(data, at + 4, _PAYLOAD_CRC)
    (payload_crc32,) = _FIXED32.unpack_from(data, at)
    size, begin = varint(data, _expect(data, at + 4, _HEADER))
    at = _expect(data, begin + size, _PAYLOAD)
    header = data[begin : begin + size]
    size, at = varint(data, at)
    if at + size != len(data):
        raise ValueError("not all of the payload, or something behind it")
    return Chunk(sequence, header_crc32, payload_crc32, header, memoryview(data)[at:])


def _expect(data: bytes, at: int, tag: int) -> int:
    if data[at] != tag:
        raise ValueError("another field")
    return at + 1


def varint(data: bytes, at: int) -> tuple[int, int]:
    """Return the varint at an offset, and the offset after it."""
    value = shift = 0
    while (byte := data[at]) & 0x80:
        value |= (byte & 0x7F) << shift
        shift += 7
        at += 1
        if shift > 56:
            raise ValueError("a number of more than nine bytes")
    return value | byte << shift, at + 1


def varint_of(value: int) -> bytes:
    """Return the varint of a number."""
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
