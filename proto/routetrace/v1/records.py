"""The packed columns of the contract: numpy dtypes of the records inside `bytes` fields.

All are little-endian and unaligned, so that their size is the sum of their parts.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from enum import IntEnum
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt

from routetrace.v1.errors import InvalidArgument


class OpKind(IntEnum):
    """What an op of `ChunkHeader.ops` says. Fields that are not named are 0."""

    BEGIN = 1
    """`request` begins; begins[arg] holds its facts. `position` = num_computed_tokens: the tokens
    before it are in the KV cache, in the request's blocks. KV of the last `count` of them was
    loaded from elsewhere: unknown until written. Blocks: the request's first blocks. `value`:
    requests that this boot of the engine began before it, the same number at all shards."""
    BLOCKS = 2
    """More blocks for `request`, newly allocated: unknown until written."""
    ROWS = 3
    """`count` rows, rows `row`.. of frame `frame`, are positions `position`.. of `request`,
    computed by `weight_version`, the last of them in `step`. The last `value` positions up to their
    end (more than `count` where a step is split) are drafts that may still be rejected; what
    follows them, or a FINISH, confirms them. A slot-only agent sets `request` to NO_REQUEST and
    names `count` slots from `blocks_at` on."""
    REWIND = 4
    """Rows of `request` at `position` and after were rejected (speculative decoding)."""
    PREEMPT = 5
    """`request` gave up its blocks; rows at `position` and after were not kept."""
    RESUME = 6
    """`request` starts over as a new attempt; `position`, `count` and blocks as in BEGIN."""
    FINISH = 7
    """`request` ended with `count` tokens; `arg` is a FinishReason."""
    LOST = 8
    """Rows [position, position + count) of `request` will not come; `arg` is a MissingReason.
    count = 0: none from `position` on."""
    DIGEST = 9
    """`count` token digests of `request`, from `row` on in `token_digests`."""
    EXTERNAL = 10
    """KV of the named blocks was loaded from elsewhere: unknown until written."""
    RESET = 11
    """The engine forgot its prefix cache: every slot is unknown until written."""


class FinishReason(IntEnum):
    """How a request ended."""

    STOP = 1
    LENGTH = 2
    ABORT = 3
    HANDOFF = 4
    """Not the end of its trace: another engine goes on (disaggregated prefill)."""


#: `request` of a ROWS op that belongs to slots alone.
NO_REQUEST = 0xFFFFFFFF

OP = np.dtype(
    [
        ("kind", "u1"),
        ("flags", "u1"),
        ("arg", "<u2"),
        ("request", "<u4"),
        ("position", "<u4"),
        ("count", "<u4"),
        ("frame", "<u4"),
        ("row", "<u4"),
        ("blocks_at", "<u4"),
        ("num_blocks", "<u4"),
        ("step", "<u8"),
        ("weight_version", "<i8"),
        ("value", "<u8"),
    ]
)

#: The same, for those who go through them one by one: in a third of the time.
PACKED_OP = struct.Struct("<2BH7IQqQ")

SPAN = np.dtype(
    [
        ("position", "<u4"),
        ("count", "<u4"),
        ("frame", "<u4"),
        ("row", "<u4"),
        ("attempt", "<u2"),
        ("provenance", "u1"),
        ("flags", "u1"),
        ("weight_version", "<i8"),
    ]
)

DIGEST = np.dtype([("position", "<u4"), ("value", "<u8")])

#: Positions of token digests: the multiples of it, and the ends of prompts and requests. The same
#: everywhere, so that engines with blocks of other sizes have positions in common.
DIGEST_EVERY = 64

U32 = np.dtype("<u4")
U64 = np.dtype("<u8")


class Provenance(IntEnum):
    """How the rows of a span came to this trace."""

    FORWARD = 1
    """A forward pass of the request itself."""
    CACHED = 2
    """The forward pass that computed the KV blocks which the request reused."""


def unpack(data: bytes, dtype: np.dtype[Any], field: str) -> npt.NDArray[Any]:
    """A read-only array over a `bytes` column.

    Raises:
        InvalidArgument: if the length is not a multiple of the record's.
    """
    if len(data) % dtype.itemsize:
        raise InvalidArgument(
            field=field,
            value=f"{len(data)} bytes",
            expected=f"a multiple of {dtype.itemsize} bytes",
        )
    return np.frombuffer(data, dtype)


class TokenDigest:
    """Rolling blake2b-64 of token ids (as little-endian uint32), readable at any position.

    A function of the tokens alone: two engines that saw the same prefix agree on its digest.
    """

    def __init__(self) -> None:
        self._hash = blake2b(digest_size=8)
        self.position = 0

    def update(self, token_ids: npt.ArrayLike) -> int:
        """Appends tokens; returns the digest of all tokens so far."""
        ids = np.asarray(token_ids, dtype=U32)
        self._hash.update(ids.tobytes())
        self.position += ids.size
        return self.value

    @property
    def value(self) -> int:
        """Digest of the tokens so far."""
        return int.from_bytes(self._hash.digest(), "little")


def token_digests(
    token_ids: npt.NDArray[np.integer[Any]], ends: Iterable[int] = ()
) -> npt.NDArray[Any]:
    """Digests of a token sequence: at every DIGEST_EVERY tokens, and at its end.

    Args:
        token_ids: [n] from position 0 on.
        ends: further positions, where other requests ended; those beyond n are passed over.

    Returns:
        [m] of DIGEST, ascending.
    """
    n = len(token_ids)
    positions = sorted({*range(DIGEST_EVERY, n, DIGEST_EVERY), *(e for e in ends if 0 < e < n), n})
    digest = TokenDigest()
    return np.array(
        [(p, digest.update(token_ids[digest.position : p])) for p in positions if p], DIGEST
    )
