"""Fast check of frames that resemble each other, in place of `read_header`.

A server checks thousands of frames a second, nearly all of one shape.
"""

from __future__ import annotations

import struct
from functools import lru_cache

from routetrace.codec.frame_header import (
    CRC_BYTES,
    MAGIC,
    MAX_FRAME_DECODED_BYTES,
    MAX_FRAME_ROWS,
    Codec,
    id_shift,
    layer_bitmap,
    layer_bytes,
    packed_header,
)
from routetrace.common.checksum import crc32
from routetrace.common.layout import ModelLayout

# Of frame_header.py's table, before the bitmap.
_FIXED = struct.Struct("<4sBBHIIHH")


class PlainFrames:
    """Frames of one layout: PACK, and others with one layer a group, as nearly all frames are."""

    def __init__(self, layout: ModelLayout) -> None:
        self._layout = layout
        self._bitmap = layer_bitmap(layout.layer_ids)
        layers = len(layout.layer_ids)
        # After the bitmap: bytes of each group, layers of each group, and the header's CRC.
        self._sizes = struct.Struct(f"<{layers}I")
        self._sizes_at = _FIXED.size + len(self._bitmap)
        self._layers_at = self._sizes_at + self._sizes.size
        self._layers = struct.pack(f"<{layers}H", *[1] * layers)
        self._head = self._layers_at + len(self._layers) + CRC_BYTES
        self._most_rows = min(MAX_FRAME_ROWS, MAX_FRAME_DECODED_BYTES // layout.row_bytes)
        self._expected = lru_cache(maxsize=256)(self._expect)

    def has(self, frame: memoryview, rows: int) -> bool:
        """Whether bytes are such a frame with so many rows.

        False proves no fault: `read_header` decides then.
        """
        if len(frame) > 4 and frame[4] == Codec.PACK:
            head, size = self._packed(rows)
            return bool(head) and len(frame) == size and frame[: len(head)] == head
        head = bytes(frame[: self._head])
        if len(head) < self._head:
            return False
        begin, least, most = self._expected(head[4], rows)
        if not begin or not head.startswith(begin):
            return False
        sizes = self._sizes.unpack_from(head, self._sizes_at)
        return (
            head[self._layers_at : -CRC_BYTES] == self._layers
            and crc32(head[:-CRC_BYTES]) == int.from_bytes(head[-CRC_BYTES:], "little")
            and self._head + sum(sizes) == len(frame)
            and min(sizes) >= least
            and max(sizes) <= most
        )

    def _packed(self, rows: int) -> tuple[bytes, int]:
        """Return the header of each PACK frame with so many rows, and the bytes of the frame."""
        if not 1 <= rows <= self._most_rows:
            return b"", 0
        layout = self._layout
        return packed_header(layout.layer_ids, rows, layout.num_experts, layout.top_k)

    def _expect(self, codec: int, rows: int) -> tuple[bytes, int, int]:
        """Return the start of a frame, and the limits of a group's bytes; b"" if none is plain."""
        if codec not in (Codec.RAW, Codec.LAYER_ZSTD) or not 1 <= rows <= self._most_rows:
            return b"", 0, 0
        layout, layers = self._layout, len(self._layout.layer_ids)
        top_k, experts = layout.top_k, layout.num_experts
        plane, low = layer_bytes(rows, top_k, experts, Codec(codec))
        fixed = _FIXED.pack(
            MAGIC, codec, id_shift(experts, Codec(codec)), top_k, rows, experts,
            len(self._bitmap), layers,
        )  # fmt: skip
        least = plane if codec == Codec.RAW else low
        return fixed + self._bitmap, least + CRC_BYTES, plane + low + CRC_BYTES
