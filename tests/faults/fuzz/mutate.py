"""Mutations that know what they change: fields of messages, records of columns, parts of frames.

Checksums are made right again, so that what stands behind them is reached.
"""

from __future__ import annotations

import math
import random
import struct
import zlib
from typing import Any

import numpy as np
import zstandard
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from routetrace.codec.frame import Codec, read_header
from routetrace.codec.frame_header import CRC_BYTES, layer_bytes
from routetrace.codec.records import DIGEST, OP, SPAN, U32, U64
from routetrace.common.errors import RouteTraceError

#: Columns: numbers of many records in a field of bytes.
COLUMNS = {
    "ops": OP,
    "block_ids": U32,
    "slots": U64,
    "frame_lengths": U32,
    "frame_rows": U32,
    "token_digests": DIGEST,
    "spans": SPAN,
}

_ODD_TEXT = (
    "", "\0", "a\0b", "a" * 512, "a" * 513, "\n{}%s", "../..", "\u00b2", "\U0001f600" * 40,
    "\ufeff", "\u202e", "0", "-1", "18446744073709551616", "9" * 5000, "x" * 100_000,
    "e\u0301", "\ue000", "a\ue000b", "\U0010ffff", "x" * 65_536,
)  # fmt: skip
_EDGES = (0, 1, 2, 3, 7, 8, 15, 16, 31, 32, 33, 63, 64)


def odd_number(rng: random.Random, bits: int = 64, signed: bool = False) -> int:
    """A number that something is likely to be off by one at."""
    edge = 1 << min(rng.choice(_EDGES), bits - signed)
    number = rng.choice((0, 1, edge, edge - 1, edge + 1, rng.randrange(300), rng.getrandbits(bits)))
    if signed and rng.random() < 0.4:
        number = -number
    low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)
    return min(max(number, low), high)


def mutate_bytes(rng: random.Random, data: bytes) -> bytes:
    """Flip, cut, repeat, insert."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 8))):
        at = rng.randrange(len(out) + 1)
        match rng.randrange(5):
            case 0 if at < len(out):
                out[at] ^= 1 << rng.randrange(8)
            case 1 if at < len(out):
                out[at] = rng.choice((0, 1, 127, 128, 255, rng.randrange(256)))
            case 2:
                out[at:at] = rng.randbytes(rng.choice((1, 2, 4, 8)))
            case 3:
                del out[at : at + rng.choice((1, 2, 4, 64, len(out)))]
            case _:
                out[at:at] = out[at : at + rng.choice((1, 8, 64))] * rng.choice((1, 2, 9))
    return bytes(out)


def mutate_records(rng: random.Random, data: bytes, dtype: np.dtype[Any]) -> bytes:
    """Change fields of records, or drop, repeat and reorder records."""
    if not data or len(data) % dtype.itemsize or rng.random() < 0.03:
        return mutate_bytes(rng, data)
    records = np.frombuffer(data, dtype).copy()
    for _ in range(rng.choice((1, 1, 2, 5))):
        if not len(records):
            break
        i = rng.randrange(len(records))
        match rng.randrange(8):
            case 0:
                records = np.delete(records, slice(i, i + rng.choice((1, 3))))
            case 1:
                records = np.insert(records, rng.randrange(len(records)), records[i])
            case 2:
                records = np.repeat(records, [rng.choice((1, 40)) if j == i else 1
                                              for j in range(len(records))])  # fmt: skip
            case 3:
                j = rng.randrange(len(records))
                records[[i, j]] = records[[j, i]]
            case _:
                name = rng.choice(dtype.names) if dtype.names else None
                column = records[name] if name else records
                kind = column.dtype
                if rng.random() < 0.3:  # a number that stands elsewhere already
                    value = int(column[rng.randrange(len(column))]) + rng.choice((-1, 0, 1))
                elif rng.random() < 0.5:
                    value = rng.randrange(13)
                else:
                    value = odd_number(rng, kind.itemsize * 8, kind.kind == "i")
                info = np.iinfo(kind)
                column[i] = min(max(value, int(info.min)), int(info.max))
    return records.tobytes()


_BITS = {
    FieldDescriptor.TYPE_UINT32: (32, False),
    FieldDescriptor.TYPE_FIXED32: (32, False),
    FieldDescriptor.TYPE_UINT64: (64, False),
    FieldDescriptor.TYPE_FIXED64: (64, False),
    FieldDescriptor.TYPE_INT64: (64, True),
    FieldDescriptor.TYPE_ENUM: (31, False),
}


#: Values of fields that are not set, by type.
_EMPTY: dict[int, Any] = {
    FieldDescriptor.CPPTYPE_STRING: b"",
    FieldDescriptor.CPPTYPE_DOUBLE: 0.0,
    FieldDescriptor.CPPTYPE_BOOL: False,
}


def mutate_message(rng: random.Random, message: Message) -> None:
    """Change one field, somewhere in the message, to what a writer could have put there."""
    fields = [f for f in message.DESCRIPTOR.fields if f.name != "payload"]
    if not fields:
        return
    # Those that are set hold most of the sense.
    field = rng.choice([f for f, _ in message.ListFields() if f.name != "payload"] or fields)
    if rng.random() < 0.25:
        field = rng.choice(fields)
    value = getattr(message, field.name)
    is_map = field.message_type and field.message_type.GetOptions().map_entry
    if is_map:
        for _ in range(rng.choice((1, 1, 100))):
            key = rng.choice(_ODD_TEXT) + str(rng.randrange(1000))
            value[key] = rng.choice(_ODD_TEXT) if _of_text(field) else odd_number(rng)
    elif not hasattr(value, "append"):
        if field.message_type:
            if rng.random() < 0.1:
                message.ClearField(field.name)
            else:
                mutate_message(rng, value)
        else:
            setattr(message, field.name, _scalar(rng, field, value))
    elif len(value) and rng.random() < 0.2:
        del value[rng.randrange(len(value))]
    elif field.message_type:
        if len(value) and rng.random() < 0.6:
            mutate_message(rng, rng.choice(value))
        else:
            for _ in range(rng.choice((1, 1, 50))):
                value.add()
            if len(value) > 1:
                value[-1].CopyFrom(rng.choice(value))
    elif len(value) and rng.random() < 0.5:
        value[rng.randrange(len(value))] = _scalar(rng, field, value[0])
    else:
        one = _scalar(rng, field, value[0] if len(value) else 0)
        size = len(one) if isinstance(one, str) else 1
        value.extend([one] * min(rng.choice((1, 1, 2, 5000)), 1 + 200_000 // (size + 1)))


def made_message(rng: random.Random, message: Message, depth: int = 0) -> Message:
    """Fill some fields of an empty message with what any writer could put there; return it."""
    for field in message.DESCRIPTOR.fields:
        if rng.random() < 0.4:
            continue
        value, count = getattr(message, field.name), rng.choice((1, 1, 2, 40))
        if field.message_type and field.message_type.GetOptions().map_entry:
            for _ in range(count):
                text = rng.choice(_ODD_TEXT)
                value[text] = rng.choice(_ODD_TEXT) if _of_text(field) else odd_number(rng)
        elif field.message_type and depth < 3:
            for one in [value.add() for _ in range(count)] if hasattr(value, "add") else [value]:
                made_message(rng, one, depth + 1)
        elif not field.message_type:
            empty = _EMPTY.get(field.cpp_type, 0)
            if hasattr(value, "append"):
                value.extend([_scalar(rng, field, empty) for _ in range(count)])
            else:
                setattr(message, field.name, _scalar(rng, field, empty))
    return message


def _of_text(field: FieldDescriptor) -> bool:
    """Whether the values of a map are text."""
    kind: int = field.message_type.fields_by_name["value"].type
    return kind == FieldDescriptor.TYPE_STRING


def _scalar(rng: random.Random, field: FieldDescriptor, value: Any) -> Any:
    if field.type in _BITS:
        bits, signed = _BITS[field.type]
        if rng.random() < 0.4:
            return min(max(value + rng.choice((-1, 1)), 0), (1 << bits - signed) - 1)
        return odd_number(rng, bits, signed)
    if field.type == FieldDescriptor.TYPE_BOOL:
        return not value
    if field.type == FieldDescriptor.TYPE_DOUBLE:
        return rng.choice((0.0, -1.0, 1e300, math.inf, math.nan, value + 1))
    if field.type == FieldDescriptor.TYPE_STRING:
        return rng.choice(_ODD_TEXT)
    if field.name in COLUMNS:
        return mutate_records(rng, value, COLUMNS[field.name])
    return mutate_bytes(rng, value)


# ------------------------------------------------------------------ frames

_HEAD = struct.Struct("<4sBBHIIHH")


def mutate_frame(rng: random.Random, frame: bytes) -> bytes:
    """Change a field of the header, the tables or a group; the checksums are right afterwards."""
    try:
        header = read_header(frame)
    except RouteTraceError:
        return reseal_frame(mutate_bytes(rng, frame))
    kind = rng.randrange(10)
    if kind == 0:
        return mutate_bytes(rng, frame)  # checksums and all
    if kind < 4:
        out = bytearray(frame)
        fields = [*_HEAD.unpack_from(out)]
        at = rng.randrange(1, len(fields))
        bits = (0, 8, 8, 16, 32, 32, 16, 16)[at]
        fields[at] = rng.choice((odd_number(rng, bits), max(0, fields[at] + rng.choice((-1, 1)))))
        fields[at] &= (1 << bits) - 1
        _HEAD.pack_into(out, 0, *fields)
        return reseal_frame(bytes(out))
    offsets = header.group_offsets
    group = rng.randrange(len(header.group_bytes))
    body = frame[offsets[group] : offsets[group + 1]]
    plane, low = header.layer_bytes
    layers = header.group_layers[group]
    if kind < 7:
        body = mutate_bytes(rng, body)
    else:
        body = zstd_oddity(rng, layers * plane)
        if low:
            body += rng.randbytes(layers * low) + bytes(CRC_BYTES)
    return put_group(frame, group, body, rng.random() < 0.9)


def put_group(frame: bytes, group: int, body: bytes, tell_length: bool = True) -> bytes:
    """The frame with another body in a group, sealed."""
    header = read_header(frame)
    offsets = header.group_offsets
    out = bytearray(frame)
    out[offsets[group] : offsets[group + 1]] = body
    table = _HEAD.size + header.layer_ids[-1] // 8 + 1
    if tell_length:
        struct.pack_into("<I", out, table + 4 * group, len(body))
    return reseal_frame(bytes(out))


def frames_of(lengths: bytes, payload: bytes) -> list[bytes]:
    """The frames of a payload, as far as their lengths can be believed."""
    frames, at = [], 0
    for length in np.frombuffer(lengths[: len(lengths) // 4 * 4], U32).tolist():
        frames.append(payload[at : at + length])
        at += length
    return frames


def lengths_of(frames: list[bytes]) -> bytes:
    """The column of their lengths."""
    return np.array([len(frame) for frame in frames], U32).tobytes()


def reseal_frame(frame: bytes) -> bytes:
    """The frame with checksums of its own that match, as far as its tables lie within it.

    What zstd's checksums are over can only be told by decoding: those of most groups hold no more.
    """
    out = bytearray(frame)
    if len(out) < _HEAD.size:
        return frame
    _, codec, _, top_k, rows, experts, bitmap_bytes, groups = _HEAD.unpack_from(out)
    table = _HEAD.size + bitmap_bytes
    end = table + 6 * groups
    if end + CRC_BYTES > len(out):
        return frame
    at = end + CRC_BYTES
    sizes = struct.unpack_from(f"<{groups}I", out, table)
    counts = struct.unpack_from(f"<{groups}H", out, table + 4 * groups)
    plane, low = layer_bytes(rows, top_k, experts, Codec(codec)) if codec in list(Codec) else (0, 0)
    for size, count in zip(sizes, counts, strict=True):
        last = at + size - CRC_BYTES
        as_it_is = size == count * (plane + low) + CRC_BYTES
        if last >= at and last + CRC_BYTES <= len(out) and (as_it_is or low):
            first = at if as_it_is else max(at, last - count * low)
            struct.pack_into("<I", out, last, zlib.crc32(out[first:last]))
        at += size
    struct.pack_into("<I", out, end, zlib.crc32(out[:end]))
    return bytes(out)


def zstd_oddity(rng: random.Random, size: int) -> bytes:
    """A zstd frame that is not what a plane of `size` bytes is stored as."""
    content = bytes(min(size, 1 << 16))
    params: dict[str, Any] = {"write_content_size": True, "write_checksum": True}
    match rng.randrange(8):
        case 0:
            return bomb(rng.choice((size, 1 << 20, 1 << 30, (1 << 62) - 1)))
        case 1:
            params["write_content_size"] = False
        case 2:
            content += bytes(rng.choice((1, size, 4096)))
        case 3:
            samples = [rng.randbytes(64) for _ in range(40)]
            dictionary = zstandard.ZstdCompressionDict(b"".join(samples) * 4)
            return zstandard.ZstdCompressor(dict_data=dictionary, **params).compress(content)
        case 4:
            params["write_checksum"] = False
        case 5:  # a second frame, or one to be skipped, behind or before
            z = zstandard.ZstdCompressor(**params).compress(content)
            skip = struct.pack("<II", 0x184D2A50, 4) + b"skip"
            return rng.choice((z + z, z + skip, skip + z, z + b"\0"))
        case 6:  # a large window, cut short
            params = {
                "compression_params": zstandard.ZstdCompressionParameters(
                    window_log=rng.choice((10, 27, 31)), enable_ldm=0, write_checksum=1
                )
            }
            return mutate_bytes(rng, zstandard.ZstdCompressor(**params).compress(content))
        case _:
            content = rng.randbytes(min(size, 1 << 16))
    return zstandard.ZstdCompressor(**params).compress(content)


def bomb(declared: int, actual: int = 0) -> bytes:
    """A zstd frame that declares `declared` bytes, and holds `actual` zeros (0: as many).

    Made by hand, a block of 128 KiB in 4 bytes at a time, so that 1 GiB takes 32 kB.
    """
    actual = min(actual or declared, 1 << 30)
    out = bytearray(struct.pack("<I", 0xFD2FB528))
    # Single segment, content size of 8 bytes, a checksum.
    out += struct.pack("<BQ", 0xE4, declared)
    step = 128 << 10
    for at in range(0, max(actual, 1), step):
        count = min(step, actual - at)
        last = at + step >= actual
        out += struct.pack("<I", count << 3 | 1 << 1 | last)[:3] + b"\0"
    return bytes(out) + bytes(CRC_BYTES)
