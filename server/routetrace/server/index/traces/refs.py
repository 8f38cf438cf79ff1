"""References to stored rows: (chunk, frame, row) in one 64-bit integer.

Consecutive rows of a frame have consecutive references: a run of rows is (reference, count).
"""

from __future__ import annotations

ROW_BITS = 16
FRAME_BITS = 12
MAX_ROWS = 1 << ROW_BITS
MAX_FRAMES = 1 << FRAME_BITS
CHUNK_SHIFT = ROW_BITS + FRAME_BITS
MAX_CHUNK = 1 << (63 - CHUNK_SHIFT)

UNKNOWN = 0
"""In place of a reference: the row is unknown. Records count from 1."""


def pack(chunk: int, frame: int, row: int) -> int:
    """Return the reference of a row."""
    return chunk << CHUNK_SHIFT | frame << ROW_BITS | row


def chunk_of(ref: int) -> int:
    """Return the number of the chunk of a reference."""
    return ref >> CHUNK_SHIFT


def frame_of(ref: int) -> int:
    """Return the frame within the chunk."""
    return ref >> ROW_BITS & MAX_FRAMES - 1


def row_of(ref: int) -> int:
    """Return the row within the frame."""
    return ref & MAX_ROWS - 1
