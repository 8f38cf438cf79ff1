"""Header of a frame: its rows, layers and groups.

All numbers are little-endian, nothing is padded.

    bytes      type       field
    4          char [4]   magic, "RTF2"; the 2 is the version
    1          u8         codec: 0 RAW, 1 LAYER_ZSTD, 2 PACK
    1          u8         s: low bits of an id outside of its byte (frame.py); 0 for RAW
    2          u16        K, top_k
    4          u32        n, rows
    4          u32        E, experts; an id takes 1 byte if E <= 256, else 2
    2          u16        B, bytes of the bitmap
    2          u16        G, layer groups
    B          u8 [B]     bitmap: bit i of byte j stands for layer 8 j + i; last byte not 0
    4 G        u32 [G]    stored bytes of each group
    2 G        u16 [G]    layers in each group, ascending, so that their sum is L, the bits set
    4          u32        CRC-32 (as in zlib) of all of the above

The stored bytes of the groups follow, back to back, with checksums of their own (frame.py), and end
the frame.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from functools import lru_cache
from itertools import accumulate, pairwise
from operator import gt
from typing import Any, NamedTuple

import numpy as np

from routetrace.common.checksum import crc32
from routetrace.common.errors import Corrupt, InvalidArgument
from routetrace.common.layout import id_dtype
from routetrace.common.limits import MAX_EXPERTS, MAX_LAYERS, MAX_TOP_K

#: Rows of one frame.
MAX_FRAME_ROWS = 65536
#: Bytes of the ids of one frame: n * L * K * itemsize.
MAX_FRAME_DECODED_BYTES = 64 << 20

Buffer = bytes | bytearray | memoryview

#: Stored bytes of a CRC-32.
CRC_BYTES = 4

MAGIC = b"RTF2"
_FIXED = struct.Struct("<4sBBHIIHH")
_CRC = struct.Struct("<I")


class Codec(IntEnum):
    """Encoding of the groups of a frame; see frame.py."""

    RAW = 0
    LAYER_ZSTD = 1
    PACK = 2


class Pick(NamedTuple):
    """Groups that hold given layers."""

    groups: tuple[int, ...]
    """Ascending."""
    layer_ids: tuple[int, ...]
    """Layers of these groups, ascending."""
    group_layers: tuple[int, ...]
    """Layers in each of these groups."""
    runs: list[tuple[int, int]]
    """Stretches of consecutive groups: the first, and one past the last."""
    order: list[int] | None
    """Index of each wanted layer among these; None: all, in order."""


class FrameHeader(NamedTuple):
    """Contents of a frame and their places."""

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
        """Offset of each group in the frame, and of the end of the last one."""
        return tuple(accumulate(self.group_bytes, initial=self.header_bytes))

    @property
    def shift(self) -> int:
        """Low bits of an id that are stored outside of its byte."""
        return id_shift(self.num_experts, self.codec)

    @property
    def width(self) -> int:
        """Bits of an id in its plane."""
        return id_width(self.num_experts, self.codec)

    @property
    def layer_bytes(self) -> tuple[int, int]:
        """Bytes of one layer before compression: its plane, and its low bits."""
        return layer_bytes(self.num_rows, self.top_k, self.num_experts, self.codec)

    def pick(self, layer_ids: tuple[int, ...]) -> Pick:
        """Return the places of the given layers.

        Raises:
            InvalidArgument: if no layer is given, or the frame lacks one.
        """
        return _pick(self.layer_ids, self.group_layers, layer_ids)

    def cut(self, layer_ids: tuple[int, ...]) -> tuple[FrameHeader, list[tuple[int, int]]]:
        """Return the smallest frame with the given layers that can be cut out of this one.

        Returns:
            Its header, and the ranges of bytes (start, stop) of its groups in this frame.

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
        """Return the header in its stored form."""
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
        return head + _CRC.pack(crc32(head))


def read_header(frame: Buffer) -> FrameHeader:
    """Read and check the header of a frame; of the body only the length is checked.

    Args:
        frame: exactly one frame.

    Raises:
        Corrupt: if it is malformed, exceeds a limit, or declares another length.
    """
    view = memoryview(frame).cast("B")
    if len(view) < _FIXED.size:
        raise corrupt("bytes", len(view), f"at least {_FIXED.size}")
    magic, *_, top_k, num_rows, num_experts, bitmap_bytes, groups = _FIXED.unpack_from(view)
    if magic != MAGIC:
        raise corrupt("magic", magic, f"{MAGIC!r}, the supported version")
    table_at = _FIXED.size + bitmap_bytes
    layers_at = table_at + 4 * groups
    crc_at = layers_at + 2 * groups
    if len(view) < crc_at + CRC_BYTES:
        raise corrupt("bytes", len(view), f"at least {crc_at + CRC_BYTES}")
    (stored_crc,) = _CRC.unpack_from(view, crc_at)
    crc = crc32(view[:crc_at])
    if crc != stored_crc:
        raise corrupt("header crc32", crc, str(stored_crc))

    # The checksum proves that these bytes were written, not that they are valid.
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
    """Properties of all frames that differ in the sizes of their groups alone."""

    codec: Codec
    layer_ids: tuple[int, ...]
    group_layers: tuple[int, ...]
    least: tuple[int, ...]
    """Minimum stored bytes of each group."""
    most: tuple[int, ...]
    """Maximum stored bytes of each group."""


@lru_cache(maxsize=128)
def _shape(head: bytes, layers: bytes) -> _Shape:
    """Check a header but for the sizes: its start, up to the bitmap, and its last column."""
    _, codec, shift, top_k, num_rows, num_experts, bitmap_bytes, groups = _FIXED.unpack_from(head)
    _check_range("codec", codec, Codec.RAW, Codec.PACK)
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
        raise corrupt("group layers", group_layers, f"{len(layer_ids)} in all, none empty")
    plane, low = layer_bytes(num_rows, top_k, num_experts, codec)
    most = tuple(count * (plane + low) + CRC_BYTES for count in group_layers)
    least = most
    if codec is Codec.LAYER_ZSTD:
        least = tuple(count * low + CRC_BYTES for count in group_layers)
    return _Shape(codec, layer_ids, group_layers, least, most)


def id_shift(num_experts: int, codec: Codec) -> int:
    """Return the number of low bits of an id that are stored outside of its byte."""
    return 0 if codec is Codec.RAW else max(0, (num_experts - 1).bit_length() - 8)


def id_width(num_experts: int, codec: Codec) -> int:
    """Return the number of bits that an id takes in its plane."""
    if codec is Codec.RAW:
        return 8 * id_dtype(num_experts).itemsize
    if codec is Codec.LAYER_ZSTD:
        return 8
    return min(8, max(1, (num_experts - 1).bit_length()))


def layer_bytes(num_rows: int, top_k: int, num_experts: int, codec: Codec) -> tuple[int, int]:
    """Return the bytes of one layer before compression: its plane, and its low bits."""
    cells, width = num_rows * top_k, id_width(num_experts, codec)
    eighth = -(-cells // 8)
    plane = eighth * width if codec is Codec.PACK else cells * width // 8
    return plane, id_shift(num_experts, codec) * eighth


#: Ids of one group at least: where a zstd table pays, and so that checksums and sizes stay small.
_GROUP_IDS = {Codec.RAW: 512, Codec.LAYER_ZSTD: 512, Codec.PACK: 4096}
_SMALL_GROUP_IDS = 2048


@lru_cache(maxsize=512)
def group_layers(num_layers: int, cells: int, codec: Codec) -> tuple[int, ...]:
    """Return the layers in each group, as even as possible, for `cells` ids per layer.

    LAYER_ZSTD: a layer of 512 ids or more is a group; smaller ones share a table, about 2048 ids to
    a group. Measured from 4 to 256 rows with K >= 4: within 2 % of the best grouping on traces with
    the skew of large models (310 bytes a token at 64 rows, 336 in one group), within 6 % on small
    models (58 and 55), and a pipeline stage can cut its layers out of all but the smallest frames.
    PACK: about 4096 ids, as a group costs ten bytes and a checksum.
    """
    least = _GROUP_IDS[codec]
    per_group = 1 if cells >= least else -(-max(least, _SMALL_GROUP_IDS) // cells)
    groups = -(-num_layers // per_group)
    return tuple(num_layers * (g + 1) // groups - num_layers * g // groups for g in range(groups))


@lru_cache(maxsize=512)
def packed_header(
    layer_ids: tuple[int, ...], num_rows: int, num_experts: int, top_k: int
) -> tuple[bytes, int]:
    """Return the header of every PACK frame of this shape, as `encode_frames` makes them.

    Returns:
        Its stored form, and the bytes of the whole frame.
    """
    counts = group_layers(len(layer_ids), num_rows * top_k, Codec.PACK)
    size = sum(layer_bytes(num_rows, top_k, num_experts, Codec.PACK))
    header = FrameHeader(
        num_rows=num_rows,
        layer_ids=layer_ids,
        num_experts=num_experts,
        top_k=top_k,
        codec=Codec.PACK,
        group_layers=counts,
        group_bytes=tuple(count * size + CRC_BYTES for count in counts),
    )
    return header.pack(), header.frame_bytes


def corrupt(field: str, value: Any, expected: str) -> Corrupt:
    """Return the error for a frame with a wrong `field`."""
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
    """Return the bitmap of a header with these layers."""
    return sum(1 << i for i in layer_ids).to_bytes(layer_ids[-1] // 8 + 1, "little")


@lru_cache(maxsize=128)
def _bitmap_layers(bitmap: bytes) -> tuple[int, ...]:
    bits = np.unpackbits(np.frombuffer(bitmap, np.uint8), bitorder="little")
    return tuple(np.flatnonzero(bits).tolist())
