"""Packed columns of the contract: numpy dtypes of the records in `bytes` fields.

All are little-endian and unaligned, so that their size is the sum of their fields.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from enum import IntEnum
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt

from routetrace.common.errors import InvalidArgument


class OpKind(IntEnum):
    """Kind of an op in `ChunkHeader.ops`. Fields that are not named are 0."""

    BEGIN = 1
    """`request` begins; begins[arg] describes it. `position` = num_computed_tokens: the tokens
    before it are in the KV cache, in the request's blocks, and their rows come with INHERIT. KV of
    the last `count` of them was loaded from elsewhere: unknown until written. Blocks: the request's
    first blocks; their slots at later positions are unknown until written. `value`: requests that
    this boot of the engine began before it, the same number at all shards."""
    BLOCKS = 2
    """More blocks for `request`, newly allocated: unknown until written."""
    ROWS = 3
    """`count` rows, rows `row`.. of frame `frame`, are positions `position`.. of `request`,
    computed by `weight_version`, the last of them in `step`. The last `value` positions up to their
    end (more than `count` where a step is split) are drafts that may still be rejected: in no
    answer, and their slots unknown, until rows of a later step (or LOST ones), a FINISH or a
    PREEMPT confirm them. A slot-only agent sets `request` to NO_REQUEST and names `count` slots
    from `blocks_at` on."""
    REWIND = 4
    """Rows of `request` at `position` and after were rejected (speculative decoding)."""
    PREEMPT = 5
    """`request` lost its blocks; rows at `position` and after were not kept, and their slots are
    unknown. Drafts before it are confirmed."""
    RESUME = 6
    """`request` starts over as a new attempt; `position`, `count` and blocks as in BEGIN. It has
    `value` tokens then, prompt and answer; 0: not known."""
    FINISH = 7
    """`request` ended with `count` tokens; `arg` is a FinishReason, `value` the Unix time in
    milliseconds, 0 if it is not known, `row` the hand-over that it ended with, from 1 in
    `transfer_ids`, 0 if there is none. Drafts before position count - 1 are confirmed; the slots at
    that position and after are unknown."""
    LOST = 8
    """Rows [position, position + count) of `request` are lost; `arg` is a MissingReason. The
    last `value` positions up to their end may be rejected drafts, as in ROWS. count = 0: none from
    `position` on."""
    DIGEST = 9
    """`count` token digests of `request`, from `row` on in `token_digests`."""
    EXTERNAL = 10
    """KV of the named blocks was loaded from elsewhere: unknown until written."""
    RESET = 11
    """The engine cleared its prefix cache: the slots of its first `count` blocks are unknown until
    written; 0: all slots are."""
    INHERIT = 12
    """`request` takes the rows that the slots of its cached tokens name now: those before position
    - count of its BEGIN or RESUME."""
    FORGET = 13
    """`count` slots, from `blocks_at` on in the column of slots, are unknown until written."""
    COPY = 14
    """KV was copied from the first half of the named blocks to the second half, block by block:
    each slot of a target names what that of its source did before; the last source of a target that
    is named twice counts."""


#: Kinds of op that name no request.
OF_NO_REQUEST = frozenset(map(int, (OpKind.EXTERNAL, OpKind.RESET, OpKind.FORGET, OpKind.COPY)))


class FinishReason(IntEnum):
    """How a request ended."""

    STOP = 1
    LENGTH = 2
    ABORT = 3
    HANDOFF = 4
    """Another engine continues the trace (disaggregated prefill)."""


#: `request` of a ROWS op that belongs to slots alone.
NO_REQUEST = 0xFFFFFFFF

#: Weight version of rows whose version nobody gave. It cannot be given.
UNKNOWN_VERSION = -(1 << 63)

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

#: The same for iteration one by one, in a third of the time.
PACKED_OP = struct.Struct("<2BH7IQqQ")

SPAN = np.dtype(
    [
        ("position", "<u4"),
        ("count", "<u4"),
        ("frame", "<u4"),
        ("row", "<u4"),
        ("attempt", "<u2"),
        ("provenance", "u1"),
        ("choice", "u1"),
        ("weight_version", "<i8"),
    ]
)

#: The same, to make a few of them: a call of numpy takes as long as ten.
PACKED_SPAN = struct.Struct("<4IH2Bq")

DIGEST = np.dtype([("position", "<u4"), ("value", "<u8")])


class Outcome(IntEnum):
    """Result of the search for the request that has the tokens of a sequence."""

    NOT_FOUND = 0
    FOUND = 1
    AMBIGUOUS = 2
    """Several requests have them, or may have them, and nothing tells which one is meant."""


#: Of a sequence: its Outcome; the index of the trace, the number of the request and its tokens, if
#: it is FOUND; how many tokens are proven, and of how many requests equally, unless NOT_FOUND.
LOCATED = np.dtype(
    [
        ("outcome", "<u4"),
        ("trace", "<u4"),
        ("incarnation", "<u4"),
        ("num_tokens", "<u4"),
        ("proven", "<u4"),
        ("num_equal", "<u4"),
    ]
)

#: Interval of token digests; further ones are at the ends of prompts and requests. A constant, so
#: that engines with different block sizes share positions.
DIGEST_EVERY = 64

#: Digests of a sequence that is looked for, at so many positions before its end.
DIGESTS_BEFORE_END = 8

#: Of a request that was aborted, also at so many positions before its end; see `tail_of`.
DIGEST_TAIL = 64

U32 = np.dtype("<u4")
U64 = np.dtype("<u8")


class Provenance(IntEnum):
    """Origin of the rows of a span."""

    FORWARD = 1
    """A forward pass of the request itself."""
    SLOT = 2
    """The forward pass that computed the KV blocks that the request reused."""
    PREFIX = 3
    """A forward pass of another trace over the same tokens: the request's KV was restored from
    elsewhere. Only in answers."""
    HANDOFF = 4
    """A forward pass of the request that handed its KV over. Only in answers."""


def unpack(data: bytes, dtype: np.dtype[Any], field: str) -> npt.NDArray[Any]:
    """Return a read-only array over a `bytes` column.

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


#: Label of a request that names its adapter, such as a LoRA adapter.
ADAPTER_LABEL = "adapter"

#: Label of a request that names the dtype of its KV cache, where that is not the model's.
KV_CACHE_DTYPE_LABEL = "kv_cache_dtype"


def digest_key(labels: Mapping[str, str]) -> str:
    """Return the part of token digests that comes from a request's labels.

    The routing of equal tokens differs by adapter, and by the dtype of the KV cache, in which the
    hidden states before them are rounded.
    """
    values = (labels.get(name, "") for name in (ADAPTER_LABEL, KV_CACHE_DTYPE_LABEL))
    return "\0".join(values).rstrip("\0")


def tail_of(prompt_len: int, num_tokens: int) -> range:
    """Return the last positions of an aborted request, each of which has a token digest.

    Its caller may have got fewer tokens than the engine sampled, and goes on from those.
    """
    first = max(prompt_len + 1, num_tokens - DIGEST_TAIL)
    return range(min(first, num_tokens), num_tokens + 1)


class TokenDigest:
    """Rolling blake2b-64 of token ids (as little-endian uint32), readable at any position.

    A function of the tokens and the key alone: two engines that saw the same prefix under the same
    key agree on its digest.

    Args:
        key: of the request's labels; see `digest_key`.
    """

    def __init__(self, key: str = "") -> None:
        hashed = blake2b(key.encode()).digest() if key else b""
        self._hash = blake2b(digest_size=8, key=hashed)
        self.position = 0

    def update(self, token_ids: npt.ArrayLike) -> int:
        """Append tokens; return the digest of all tokens so far."""
        return self.update_bytes(np.asarray(token_ids, dtype=U32).tobytes())

    def update_bytes(self, data: bytes | memoryview) -> int:
        """Append tokens as little-endian uint32; return the digest of all tokens so far."""
        self._hash.update(data)
        self.position += len(data) // U32.itemsize
        return self.value

    @property
    def value(self) -> int:
        """Digest of the tokens so far."""
        return int.from_bytes(self._hash.digest(), "little")


def token_digests(
    token_ids: npt.NDArray[np.integer[Any]], ends: Iterable[int] = (), key: str = ""
) -> npt.NDArray[Any]:
    """Return the digests of a token sequence: at every DIGEST_EVERY tokens, and at its end.

    Args:
        token_ids: [n] from position 0 on.
        ends: further positions, such as ends of other requests; those beyond n are ignored.
        key: of the request's labels; see `digest_key`.

    Returns:
        [m] of DIGEST, ascending.
    """
    n = len(token_ids)
    positions = sorted({*range(DIGEST_EVERY, n, DIGEST_EVERY), *(e for e in ends if 0 < e < n), n})
    digest = TokenDigest(key)
    data, size = memoryview(np.asarray(token_ids, dtype=U32).tobytes()), U32.itemsize
    return np.array(
        [(p, digest.update_bytes(data[size * digest.position : size * p])) for p in positions if p],
        DIGEST,
    )
