"""Long messages in pieces, so that parsing one holds the event loop only briefly at a time.

Concatenated serialized messages parse as one message, which joins their repeated fields. So a
message is cut between its fields, and a packed field also between its numbers.
"""

from __future__ import annotations

from collections.abc import Iterator

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

from routetrace.server.wire.messages import varint, varint_of

#: Maximum length of a piece, except for a longer field that is not packed, and its maximum fields.
#: A piece of a packed field is longer by at most its tag, its length and the end of a number.
PIECE_BYTES = 32 << 10
_PIECE_FIELDS = 2048

#: Maximum fields of a message.
MAX_FIELDS = 1 << 17

#: Maximum length of a number in a packed field.
_VARINT_BYTES = 10

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5

_VARINT_TYPES = frozenset(
    getattr(FieldDescriptor, f"TYPE_{name}")
    for name in ("INT32", "INT64", "UINT32", "UINT64", "SINT32", "SINT64", "BOOL", "ENUM")
)


def pieces(data: bytes, kind: type[Message], piece_bytes: int = PIECE_BYTES) -> Iterator[bytes]:
    """Yield pieces of a serialized message; merged in order, they are the message.

    Args:
        data: the message.
        kind: its class.
        piece_bytes: maximum length of a piece, except for a longer field that is not packed.

    Raises:
        DecodeError: if the bytes hold no fields, or more than MAX_FIELDS, such as repeated numbers
            that are not packed.
    """
    packed = {field.number for field in kind.DESCRIPTOR.fields if field.type in _VARINT_TYPES}
    start = at = fields = first = 0
    while at < len(data):
        if fields == MAX_FIELDS:
            raise DecodeError(f"more than {MAX_FIELDS} fields: pack repeated numbers")
        begin, tag, content, at = _field(data, at)
        if begin > start and (at - start > piece_bytes or fields - first == _PIECE_FIELDS):
            yield data[start:begin]
            start, first = begin, fields
        fields += 1
        if at - begin > piece_bytes and tag & 7 == _BYTES and tag >> 3 in packed:
            yield from _numbers(data, tag, content, at, piece_bytes)
            start, first = at, fields
    yield data[start:]


def _field(data: bytes, begin: int) -> tuple[int, int, int, int]:
    """Return the begin, the tag, the begin of the content and the end of a field."""
    try:
        tag, at = varint(data, begin)
        kind = tag & 7
        if kind == _BYTES:
            size, content = varint(data, at)
            end = content + size
        elif kind == _VARINT:
            content = end = at
            while data[end] & 0x80:
                end += 1
                if end - at == _VARINT_BYTES:
                    raise ValueError("a number of more than ten bytes")
            end += 1
        else:
            content, end = at, at + {_FIXED64: 8, _FIXED32: 4}[kind]
    except (IndexError, KeyError, ValueError):
        raise DecodeError("bytes that hold no fields") from None
    if end > len(data):
        raise DecodeError("a field that is cut off")
    return begin, tag, content, end


def _numbers(data: bytes, tag: int, begin: int, end: int, piece_bytes: int) -> Iterator[bytes]:
    """Yield a packed field as several fields, cut between its varints."""
    while begin < end:
        cut = min(begin + piece_bytes, end)
        while cut < end and data[cut - 1] & 0x80:
            cut += 1
            if cut - begin > piece_bytes + _VARINT_BYTES:
                raise DecodeError("a number of more than ten bytes")
        yield b"".join((varint_of(tag), varint_of(cut - begin), data[begin:cut]))
        begin = cut
