"""Whether a frame is what it was announced as: `read_header` for those who need no more than that.

A server asks this of thousands of frames a second, and nearly all of them are alike.
"""

from __future__ import annotations

import struct
from zlib import crc32

from routetrace.v1.frame_header import (
    CRC_BYTES,
    MAGIC,
    MAX_FRAME_DECODED_BYTES,
    MAX_FRAME_ROWS,
    Codec,
    id_shift,
    layer_bitmap,
    layer_bytes,
)
from routetrace.v1.layout import RoutingLayout

# Of frame_header.py's table, before the bitmap.
_FIXED = struct.Struct("<4sBBHIIHH")


class PlainFrames:
    """Frames of one layout with a layer group for each layer, as they nearly all are."""

    def __init__(self, layout: RoutingLayout) -> None:
        self._layout = layout
        self._bitmap = layer_bitmap(layout.layer_ids)
        self._layers = len(layout.layer_ids)
        # What follows the bitmap: bytes and layers of each group, and the header's CRC.
        self._table = struct.Struct(f"<{self._layers}I{self._layers}HI")
        self._table_at = _FIXED.size + len(self._bitmap)
        self._head = self._table_at + self._table.size
        self._ones = (1,) * self._layers
        self._most_rows = min(MAX_FRAME_ROWS, MAX_FRAME_DECODED_BYTES // layout.row_bytes)

    def has(self, frame: memoryview, rows: int) -> bool:
        """Whether bytes are such a frame, of so many rows.

        False says nothing: `read_header` tells what is wrong, if anything is.
        """
        if len(frame) < self._head or not 1 <= rows <= self._most_rows:
            return False
        codec = frame[4]
        if codec not in (Codec.RAW, Codec.LAYER_ZSTD):
            return False
        layout = self._layout
        top_k, experts = layout.top_k, layout.num_experts
        plane, low = layer_bytes(rows, top_k, experts, Codec(codec))
        fixed = _FIXED.pack(
            MAGIC, codec, id_shift(experts, Codec(codec)), top_k, rows, experts,
            len(self._bitmap), self._layers,
        )  # fmt: skip
        if frame[: self._table_at] != fixed + self._bitmap:
            return False
        numbers = self._table.unpack_from(frame, self._table_at)
        sizes = numbers[: self._layers]
        return (
            crc32(frame[: self._head - CRC_BYTES]) == numbers[-1]
            and numbers[self._layers : -1] == self._ones
            and self._head + sum(sizes) == len(frame)
            and min(sizes) >= (plane if codec == Codec.RAW else low) + CRC_BYTES
            and max(sizes) <= plane + low + CRC_BYTES
        )
