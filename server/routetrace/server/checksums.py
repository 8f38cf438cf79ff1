"""Checksums of payloads: computed once on the way in, and good for every part that is read later.

They run: each is the CRC-32 of the payload from its beginning to the end of one more step. The last
one is the CRC-32 of all of it, which the agent sent along; and two that follow each other tell
whether what lies between them is what came in.
"""

from __future__ import annotations

from zlib import crc32

#: Bytes of a step.
STEP = 1 << 14

Payload = bytes | memoryview


def running(payload: Payload) -> list[int]:
    """The CRC-32 up to the end of each step of a payload; none for an empty one."""
    view = memoryview(payload)
    sums = []
    value = 0
    for at in range(0, len(view), STEP):
        value = crc32(view[at : at + STEP], value)
        sums.append(value)
    return sums
