"""Running checksums of payloads: computed once at intake, valid for every later part.

Each is the CRC-32 of the payload from its start to the end of one more step. The last one is the
CRC-32 of the whole payload, which the agent sends too; two consecutive ones verify the bytes
between them.
"""

from __future__ import annotations

from routetrace.common.checksum import crc32

#: Bytes of a step.
STEP = 1 << 14

Payload = bytes | memoryview


def running(payload: Payload) -> list[int]:
    """Return the CRC-32 up to the end of each step; none for an empty payload."""
    view = memoryview(payload)
    sums = []
    value = 0
    for at in range(0, len(view), STEP):
        value = crc32(view[at : at + STEP], value)
        sums.append(value)
    return sums
