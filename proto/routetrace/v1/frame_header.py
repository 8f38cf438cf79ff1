"""The header of a frame: what the frame holds, and in which groups.

All numbers are little-endian, nothing is padded.

    bytes      type       what
    4          char [4]   magic, "RTF2"; the 2 is the version
    1          u8         codec: 0 RAW, 1 LAYER_ZSTD
    1          u8         s: low bits of an id outside of its byte (frame.py); 0 for RAW
    2          u16        K, top_k
    4          u32        n, rows
    4          u32        E, experts; an id takes 1 byte if E <= 256, else 2
    2          u16        B, bytes of the bitmap
    2          u16        G, layer groups
    B          u8 [B]     bitmap: bit i of byte j says that layer 8 j + i is there; last byte not 0
    4 G        u32 [G]    stored bytes of each group
    2 G        u16 [G]    layers in each group, ascending, so that their sum is L, the bits set
    4          u32        CRC-32 (as in zlib) of all of the above

The stored bytes of the groups follow, back to back, with checksums of their own (frame.py), and end
the frame.
"""

from __future__ import annotations

import struct
import zlib
from enum import IntEnum
from functools import lru_cache
from itertools import accumulate, pairwise
from operator import gt
from typing import Any, NamedTuple

import numpy as np

from routetrace.v1.errors import Corrupt, InvalidArgument
from routetrace.v1.layout import MAX_EXPERTS, MAX_LAYERS, MAX_TOP_K, id_dtype

#: Rows of one frame.
MAX_FRAME_ROWS = 65536
#: Bytes of the ids of one frame: n * L * K * itemsize.
MAX_FRAME_DECODED_BYTES = 64 << 20

Buffer = bytes | bytearray | memoryview

#: Of a CRC-32 as it is stored.
CRC_BYTES = 4

MAGIC = b"RTF2"
_FIXED = struct.Struct("<4sBBHIIHH")
_CRC = struct.Struct("<I")


class Codec(IntEnum):
    """How the groups of a frame are stored; see frame.py."""

    RAW = 0
    LAYER_ZSTD = 1


class Pick(NamedTuple):
    """The groups that hold some layers."""

    groups: tuple[int, ...]
    """Ascending."""
    layer_ids: tuple[int, ...]
    """Layers of these groups, ascending."""
    group_layers: tuple[int, ...]
    """Layers in each of these groups."""
    runs: list[tuple[int, int]]
    """Neighbours among them: the first, and the one behind the last."""
    order: list[int] | None
    """Which of these layers are the wanted ones; None: all, as they are."""


class FrameHeader(NamedTuple):
    """What a frame holds, and where."""

    num_rows: int
    layer_ids: tuple[int, ...]
    """Absolute layer ids, ascending."""
    num_experts: int
    top_k: int
    codec: Codec
    group_layers: tuple[int, ...]
    """Layers in each group."""
    group_bytes: tuple[int, ...]
    """Stored bytes of each group."""

    @property
    def dtype(self) -> np.dtype[np.unsignedinteger[Any]]:
        """Dtype of an id: uint8 up to 256 experts, uint16 above."""
        return id_dtype(self.num_experts)

    @property
    def header_bytes(self) -> int:
        """Bytes before the first group."""
        bitmap_bytes = self.layer_ids[-1] // 8 + 1
        return _FIXED.size + bitmap_bytes + 6 * len(self.group_bytes) + CRC_BYTES

    @property
    def frame_bytes(self) -> int:
        """Bytes of the frame."""
        return self.header_bytes + sum(self.group_bytes)

    @property
    def group_offsets(self) -> tuple[int, ...]:
        """Where each group begins in the frame, and where the last one ends."""
        return tuple(accumulate(self.group_bytes, initial=self.header_bytes))

    @property
    def shift(self) -> int:
        """Low bits of an id that are stored outside of its byte."""
        return id_shift(self.num_experts, self.codec)

    @property
    def layer_bytes(self) -> tuple[int, int]:
        """Bytes of one layer before compression: its plane, and its low bits."""
        return layer_bytes(self.num_rows, self.top_k, self.num_experts, self.codec)

    def pick(self, layer_ids: tuple[int, ...]) -> Pick:
        """Where the given layers are.

        Raises:
            InvalidArgument: if there are none, or the frame lacks one of them.
        """
        return _pick(self.layer_ids, self.group_layers, layer_ids)

    def cut(self, layer_ids: tuple[int, ...]) -> tuple[FrameHeader, list[tuple[int, int]]]:
        """The smallest frame with the given layers that can be cut out of one with this header.

        Returns:
            Its header, and the bytes of this frame (from, to) that its groups are.

        Raises:
            InvalidArgument: as `pick`.
        """
        pick, at = self.pick(layer_ids), self.group_offsets
        sizes = tuple([self.group_bytes[group] for group in pick.groups])
        header = self._replace(
            layer_ids=pick.layer_ids, group_layers=pick.group_layers, group_bytes=sizes
        )
        return header, [(at[first], at[behind]) for first, behind in pick.runs]

    def pack(self) -> bytes:
        """The header as it is stored."""
        bitmap = layer_bitmap(self.layer_ids)
        groups = len(self.group_bytes)
        fixed = _FIXED.pack(
            MAGIC,
            self.codec,
            self.shift,
            self.top_k,
            self.num_rows,
            self.num_experts,
            len(bitmap),
            groups,
        )
        table = struct.pack(f"<{groups}I{groups}H", *self.group_bytes, *self.group_layers)
        head = fixed + bitmap + table
        return head + _CRC.pack(zlib.crc32(head))


def read_header(frame: Buffer) -> FrameHeader:
    """Reads and checks the header of a frame; of the body only the length is checked.

    Args:
        frame: exactly one frame.

    Raises:
        Corrupt: if it is malformed, beyond the limits, or of a frame of another length.
    """
    view = memoryview(frame).cast("B")
    if len(view) < _FIXED.size:
        raise corrupt("bytes", len(view), f"at least {_FIXED.size}")
    magic, *_, top_k, num_rows, num_experts, bitmap_bytes, groups = _FIXED.unpack_from(view)
    if magic != MAGIC:
        raise corrupt("magic", magic, f"{MAGIC!r}, the only version that is read")
    table_at = _FIXED.size + bitmap_bytes
    layers_at = table_at + 4 * groups
    crc_at = layers_at + 2 * groups
    if len(view) < crc_at + CRC_BYTES:
        raise corrupt("bytes", len(view), f"at least {crc_at + CRC_BYTES}")
    (stored_crc,) = _CRC.unpack_from(view, crc_at)
    crc = zlib.crc32(view[:crc_at])
    if crc != stored_crc:
        raise corrupt("header crc32", crc, str(stored_crc))

    # The checksum proves that somebody meant this, not that it makes sense.
    shape = _shape(bytes(view[:table_at]), bytes(view[layers_at:crc_at]))
    sizes = struct.unpack_from(f"<{groups}I", view, table_at)
    if any(map(gt, shape.least, sizes)) or any(map(gt, sizes, shape.most)):
        raise corrupt("group bytes", sizes, f"{shape.least} to {shape.most}")
    frame_bytes = crc_at + CRC_BYTES + sum(sizes)
    _check_range("bytes", len(view), frame_bytes, frame_bytes)
    return FrameHeader(
        num_rows,
        shape.layer_ids,
        num_experts,
        top_k,
        shape.codec,
        shape.group_layers,
        sizes,
    )


class _Shape(NamedTuple):
    """What frames have in common that differ in the sizes of their groups alone."""

    codec: Codec
    layer_ids: tuple[int, ...]
    group_layers: tuple[int, ...]
    least: tuple[int, ...]
    """Stored bytes of each group, at least,"""
    most: tuple[int, ...]
    """and at most."""


@lru_cache(maxsize=128)
def _shape(head: bytes, layers: bytes) -> _Shape:
    """Checks all of a header but the sizes: its start, up to the bitmap, and its last column."""
    _, codec, shift, top_k, num_rows, num_experts, bitmap_bytes, groups = _FIXED.unpack_from(head)
    _check_range("codec", codec, Codec.RAW, Codec.LAYER_ZSTD)
    codec = Codec(codec)
    _check_range("num_rows", num_rows, 1, MAX_FRAME_ROWS)
    _check_range("num_experts", num_experts, 1, MAX_EXPERTS)
    _check_range("top_k", top_k, 1, min(MAX_TOP_K, num_experts))
    _check_range("bitmap bytes", bitmap_bytes, 1, MAX_LAYERS // 8)
    _check_range("last byte of the bitmap", head[-1], 1, 255)
    expected_shift = id_shift(num_experts, codec)
    _check_range("shift", shift, expected_shift, expected_shift)
    layer_ids = _bitmap_layers(head[_FIXED.size :])
    decoded = num_rows * len(layer_ids) * top_k * id_dtype(num_experts).itemsize
    _check_range("decoded bytes", decoded, 1, MAX_FRAME_DECODED_BYTES)
    group_layers = struct.unpack(f"<{groups}H", layers)
    if sum(group_layers) != len(layer_ids) or 0 in group_layers:
        raise corrupt("group layers", group_layers, f"{len(layer_ids)} in all, none without")
    plane, low = layer_bytes(num_rows, top_k, num_experts, codec)
    most = tuple(count * (plane + low) + CRC_BYTES for count in group_layers)
    least = most if codec is Codec.RAW else tuple(count * low + CRC_BYTES for count in group_layers)
    return _Shape(codec, layer_ids, group_layers, least, most)


def id_shift(num_experts: int, codec: Codec) -> int:
    """Low bits of an id that do not fit into its byte."""
    return 0 if codec is Codec.RAW else max(0, (num_experts - 1).bit_length() - 8)


def layer_bytes(num_rows: int, top_k: int, num_experts: int, codec: Codec) -> tuple[int, int]:
    """Bytes of one layer before compression: its plane, and its low bits."""
    cells = num_rows * top_k
    if codec is Codec.RAW:
        return cells * id_dtype(num_experts).itemsize, 0
    return cells, id_shift(num_experts, codec) * -(-cells // 8)


def corrupt(field: str, value: Any, expected: str) -> Corrupt:
    """The error for a frame whose `field` is wrong."""
    return Corrupt(field=f"frame: {field}", value=value, expected=expected)


def _check_range(field: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise corrupt(field, value, f"{low} to {high}" if low < high else str(low))


@lru_cache(maxsize=128)
def _pick(
    layer_ids: tuple[int, ...], group_layers: tuple[int, ...], wanted: tuple[int, ...]
) -> Pick:
    group_of = {
        layer: group
        for group, (a, b) in enumerate(pairwise(accumulate(group_layers, initial=0)))
        for layer in layer_ids[a:b]
    }
    if not wanted or not group_of.keys() >= set(wanted):
        raise InvalidArgument(
            field="layer_ids", value=wanted, expected=f"one or more of {list(layer_ids)}"
        )
    groups = {group_of[layer] for layer in wanted}
    held = tuple(layer for layer in layer_ids if group_of[layer] in groups)
    column = {layer: i for i, layer in enumerate(held)}
    order = None if held == wanted else [column[layer] for layer in wanted]
    keep = tuple(sorted(groups))
    firsts = [group for group in keep if group - 1 not in groups]
    behind = [group + 1 for group in keep if group + 1 not in groups]
    runs = list(zip(firsts, behind, strict=True))
    return Pick(keep, held, tuple(group_layers[g] for g in keep), runs, order)


@lru_cache(maxsize=128)
def layer_bitmap(layer_ids: tuple[int, ...]) -> bytes:
    """The bitmap of a header with these layers."""
    return sum(1 << i for i in layer_ids).to_bytes(layer_ids[-1] // 8 + 1, "little")


@lru_cache(maxsize=128)
def _bitmap_layers(bitmap: bytes) -> tuple[int, ...]:
    bits = np.unpackbits(np.frombuffer(bitmap, np.uint8), bitorder="little")
    return tuple(np.flatnonzero(bits).tolist())
