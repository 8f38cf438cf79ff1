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
    """Tokens that are looked for."""

    number: int
    num_tokens: int
    digests: Digests
    labels: Mapping[str, str]
    versions: frozenset[int]
    choice: int
    """Which of several equal requests is meant, from 1; 0: none."""
    end: int
    """Digest of all tokens."""


def sequences_of(request: pb.LocateSequencesRequest) -> list[TokenSequence]:
    """Check the columns of a call; return its sequences."""
    lengths = unpack(request.num_tokens, U32, "num_tokens")
    counts = unpack(request.num_digests, U32, "num_digests")
    digests = unpack(request.token_digests, DIGEST, "token_digests")
    choices = unpack(request.choices, U32, "choices")
    size = len(lengths)
    at_most("num_tokens", size, MAX_SEQUENCES)
    at_most("weight_versions", len(request.weight_versions), _MAX_WEIGHT_VERSIONS)
    for name, column in (("num_digests", counts), ("choices", choices)):
        if len(column) != size and (name != "choices" or len(column)):
            raise InvalidArgument(
                field=name, value=f"{len(column)} numbers", expected=f"{size}, one a sequence"
            )
    if len(request.labels) not in (0, 1, size):
        raise InvalidArgument(
            field="labels", value=f"{len(request.labels)} sets", expected=f"0, 1 or {size}"
        )
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
    chosen = choices.tolist() or [0] * size
    return [
        TokenSequence(
            i,
            length,
            parts[i],
            sets[i if len(sets) == size else 0] if sets else {},
            versions,
            chosen[i],
            values[i],
        )
        for i, length in enumerate(lengths.tolist())
    ]
