"""Sequences of tokens that a call looks for, checked."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from routetrace.codec.records import DIGEST, U32, unpack
from routetrace.common.errors import InvalidArgument
from routetrace.common.limits import check_labels
from routetrace.server.read.checks import at_most
from routetrace.v1 import routetrace_pb2 as pb

#: Maximum sequences of a call.
MAX_SEQUENCES = 4096

_MAX_WEIGHT_VERSIONS = 1024

Digests = npt.NDArray[Any]
"""[n] of DIGEST, ascending."""


class TokenSequence(NamedTuple):
    """Tokens that are looked for, under one key."""

    number: int
    """Index of the sequence; the same under all keys."""
    num_tokens: int
    digests: Digests
    labels: Mapping[str, str]
    versions: frozenset[int]
    choice: int
    """Which of several equal requests is meant, from 1; 0: none."""
    end: int
    """Digest of all tokens."""


def sequences_of(request: pb.LocateSequencesRequest) -> list[TokenSequence]:
    """Check the columns of a call; return its sequences: all under one key, then under the next."""
    lengths = unpack(request.num_tokens, U32, "num_tokens")
    counts = unpack(request.num_digests, U32, "num_digests")
    digests = unpack(request.token_digests, DIGEST, "token_digests")
    choices = unpack(request.choices, U32, "choices")
    num_keys, size = request.num_keys or 1, len(lengths)
    at_most("num_tokens", size, MAX_SEQUENCES)
    count = size // num_keys
    if count * num_keys != size or (lengths != np.tile(lengths[:count], num_keys)).any():
        raise InvalidArgument(
            field="num_tokens",
            value=f"{size} numbers under {num_keys} keys",
            expected="those of all sequences, the same under each key",
        )
    at_most("weight_versions", len(request.weight_versions), _MAX_WEIGHT_VERSIONS)
    for name, given, expected in (
        ("num_digests", len(counts), {size}),
        ("choices", len(choices), {0, count}),
        ("labels", len(request.labels), {0, 1, count}),
    ):
        if given not in expected:
            listed = " or ".join(map(str, sorted(expected)))
            raise InvalidArgument(field=name, value=f"{given} of them", expected=listed)
    ends = np.cumsum(counts, dtype=np.int64)
    if (counts == 0).any() or (ends[-1] if size else 0) != len(digests):
        raise InvalidArgument(
            field="num_digests",
            value=f"{int(counts.sum(dtype=np.int64))} digests of {size} sequences",
            expected=f"{len(digests)}, at least one for each",
        )
    position = digests["position"].astype(np.int64)
    rises = np.diff(position, prepend=0) > 0
    rises[ends[:-1]] = position[ends[:-1]] > 0
    if size and not (rises.all() and (position[ends - 1] == lengths).all()):
        raise InvalidArgument(
            field="token_digests",
            value="positions that do not ascend to the end of their sequence",
            expected="ascending ones above 0, the last one at num_tokens",
        )
    sets = []
    for each in request.labels:
        check_labels("labels", each.labels)
        sets.append(dict(each.labels))
    versions = frozenset(request.weight_versions)
    parts = [digests[a:b] for a, b in pairwise([0, *ends.tolist()])]
    values = digests["value"][ends - 1].tolist()
    chosen = choices.tolist() or [0] * count
    return [
        TokenSequence(
            i % count,
            length,
            parts[i],
            sets[i % count if len(sets) == count else 0] if sets else {},
            versions,
            chosen[i % count],
            values[i],
        )
        for i, length in enumerate(lengths.tolist())
    ]
