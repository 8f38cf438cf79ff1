"""Checksums of the server's messages.

A message that describes traces ends in a seal: field 14, a CRC-32 over all bytes of the message but
the seal and the payload, whose frames contain their own checksums.
"""

from __future__ import annotations

from typing import Any

from routetrace.common.checksum import stepped_crc32

#: Tag of the field `crc32`: number 14, fixed32.
SEAL_TAG = 14 << 3 | 5

#: Number of the field `payload`, which no seal covers.
PAYLOAD_FIELD = 15


def seal(head: bytes) -> bytes:
    """Return the seal of a message; `head` are its bytes without the payload."""
    return bytes((SEAL_TAG,)) + stepped_crc32(head).to_bytes(4, "little")


def sealed(answer: Any) -> bytes:
    """Serialize a message without a payload, with its seal if its type has one."""
    head: bytes = answer.SerializeToString()
    return head + seal(head) if "crc32" in answer.DESCRIPTOR.fields_by_name else head
