"""Calls that find the engine requests of sequences of tokens. No I/O."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from routetrace.client import _arguments as check
from routetrace.client._core.config import Config
from routetrace.client._core.reads import called, converted, value_of
from routetrace.client._core.steps import Emit, Part, Plan, Sleep
from routetrace.client.located import Located, Locations
from routetrace.client.options import Equal
from routetrace.codec.records import (
    ADAPTER_LABEL,
    DIGEST_EVERY,
    DIGESTS_BEFORE_END,
    KV_CACHE_DTYPE_LABEL,
    LOCATED,
    U32,
    Outcome,
    digest_key,
    token_digests,
    unpack,
)
from routetrace.common.errors import InvalidArgument, RouteTraceError
from routetrace.v1 import routetrace_pb2 as pb

Labels = Mapping[str, str]

#: Sequences of one call, and about their digests: as many for each of up to 17 keys.
_MOST_SEQUENCES, _MOST_DIGESTS = 240, 1 << 14

#: Seconds between two looks, which double up to the second number; least seconds of one.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0
_LEAST_SECONDS = 1.0


class _Asked(NamedTuple):
    """A sequence that is looked for."""

    place: int
    token_ids: npt.NDArray[np.integer[Any]]
    labels: dict[str, str]
    choice: int
    """From 1; 0: none."""


class _Answer(NamedTuple):
    """What is known of a sequence."""

    outcome: Outcome = Outcome.NOT_FOUND
    proven: int = 0
    located: Located | None = None


def locate(
    config: Config,
    sequences: Any,
    *,
    weight_versions: Iterable[int] | None = None,
    labels: Labels | Sequence[Labels | None] | None = None,
    indexes: Sequence[int | None] | None = None,
    equal: Equal = "refuse",
    timeout: float | None = None,
) -> Plan[Locations]:
    """See RouteClient.locate."""
    listed = check.several("sequences", sequences, "sequence of token ids", "use [token_ids]")
    tokens = [check.tokens(f"sequences[{i}]", each) for i, each in enumerate(listed)]
    named = _labels_of(labels, len(tokens))
    wraps = check.choice("equal", equal, ("refuse", "any")) == "any"
    choices = _choices(indexes, tokens, wraps=wraps)
    versions: list[int] = []
    if weight_versions is not None:
        versions = [*check.several("weight_versions", weight_versions, "int")]
        if not versions:
            raise InvalidArgument(
                field="weight_versions", value="empty", expected="at least one, or None for any"
            )
    for i, version in enumerate(versions):
        check.weight_version(version, f"weight_versions[{i}]")
    asked = [_Asked(i, ids, named[i], choices[i]) for i, ids in enumerate(tokens) if len(ids)]
    common = pb.LocateSequencesRequest(run=config.run, weight_versions=versions, choices_wrap=wraps)
    return _located(asked, tokens, common, config.limit(timeout))


def _located(
    asked: Sequence[_Asked],
    sequences: Sequence[npt.NDArray[np.integer[Any]]],
    common: pb.LocateSequencesRequest,
    limit: float,
) -> Plan[Locations]:
    answers = [_Answer()] * len(sequences)
    for part in _parts(asked):
        for key, some in _by_key(part).items():
            found = yield from _under(common, some, [key or ""], limit)
            others = {*found.keys} - {""} if key is None else set()
            if others:  # requests of the run have digests under several keys
                found = yield from _under(common, some, ["", *others], limit)
            for one, answer in zip(some, found.answers, strict=True):
                answers[one.place] = answer
    ambiguous = [i for i, each in enumerate(answers) if each.outcome is Outcome.AMBIGUOUS]
    unsettled = [
        i
        for i, each in enumerate(answers)
        if each.located is None and each.proven < len(sequences[i])
    ]
    yield Emit(Locations([each.located for each in answers], ambiguous, unsettled))


def until_settled(
    look: Callable[[float], Plan[Locations]], timeout: float, *, waits: bool
) -> Part[Locations]:
    """Locate sequences, again and again while some are unsettled and there is time.

    Args:
        look: returns the plan of one look, which may take so many seconds.
        timeout: seconds for all.
        waits: whether to look more than once.
    """
    until = time.monotonic() + timeout
    pause = _FIRST_PAUSE
    while True:
        left = max(0.0, until - time.monotonic())
        locations = yield from value_of(look(max(left, _LEAST_SECONDS)))
        left = until - time.monotonic()
        if not waits or not locations.unsettled or left <= 0:
            return locations
        yield Sleep(min(pause, left), RouteTraceError(), left)
        pause = min(2 * pause, _LONGEST_PAUSE)


class _Found(NamedTuple):
    """Answer to a call."""

    answers: list[_Answer]
    keys: list[str]
    """Keys of the digests of the run."""
    wanted: dict[int, list[int]]
    """Further positions, by index of a sequence, whose digests may prove more."""


def _under(
    common: pb.LocateSequencesRequest, some: Sequence[_Asked], keys: Sequence[str], limit: float
) -> Part[_Found]:
    """Ask for sequences by their digests under some keys."""
    request = _request(common, some, keys, {})
    response = yield from called("LocateSequences", request, limit)
    found = converted(partial(_found, some), response)
    if found.wanted:
        again = [some[i] for i in found.wanted]
        request = _request(common, again, keys, dict(enumerate(found.wanted.values())))
        response = yield from called("LocateSequences", request, limit)
        more = converted(partial(_found, again), response)
        for i, answer in zip(found.wanted, more.answers, strict=True):
            found.answers[i] = answer
    return found


def _labels_of(labels: Any, count: int) -> list[dict[str, str]]:
    """Return the labels of each sequence."""
    if labels is None or isinstance(labels, Mapping):
        return [check.labels(labels)] * count
    listed = check.items("labels", labels, "a mapping, or a list of one for each sequence")
    _check_count("labels", len(listed), count)
    return [check.labels(each) for each in listed]


def _choices(
    indexes: Any, tokens: Sequence[npt.NDArray[np.integer[Any]]], *, wraps: bool
) -> list[int]:
    """Return for each sequence which of several equal requests is meant, from 1; 0: none."""
    if indexes is None:
        if not wraps:
            return [0] * len(tokens)
        seen: Counter[bytes] = Counter()
        numbers = []
        for ids in tokens:
            name = np.asarray(ids, U32).tobytes()
            seen[name] += 1
            numbers.append(seen[name])
        return numbers
    if wraps:
        raise InvalidArgument(field="indexes", value=indexes, expected='None, or equal="refuse"')
    listed = check.items("indexes", indexes, "a list of int or None, one for each sequence")
    _check_count("indexes", len(listed), len(tokens))
    return [
        0 if index is None else 1 + check.whole(f"indexes[{i}]", index, 0, 2**31)
        for i, index in enumerate(listed)
    ]


def _check_count(field: str, actual: int, expected: int) -> None:
    if actual != expected:
        raise InvalidArgument(
            field=field, value=f"{actual} of them", expected=f"{expected}, one for each sequence"
        )


def _parts(asked: Sequence[_Asked]) -> Iterator[list[_Asked]]:
    """Yield the sequences of each call."""
    part: list[_Asked] = []
    size = 0
    for one in asked:
        digests = len(one.token_ids) // DIGEST_EVERY + DIGESTS_BEFORE_END
        if part and (len(part) == _MOST_SEQUENCES or size + digests > _MOST_DIGESTS):
            yield part
            part, size = [], 0
        part.append(one)
        size += digests
    if part:
        yield part


def _by_key(part: Sequence[_Asked]) -> dict[str | None, list[_Asked]]:
    """Group sequences by the key of their digests; None: it is not known."""
    groups: dict[str | None, list[_Asked]] = {}
    for one in part:
        is_known = ADAPTER_LABEL in one.labels or KV_CACHE_DTYPE_LABEL in one.labels
        groups.setdefault(digest_key(one.labels) if is_known else None, []).append(one)
    return groups


def _request(
    common: pb.LocateSequencesRequest,
    some: Sequence[_Asked],
    keys: Sequence[str],
    wanted: Mapping[int, list[int]],
) -> pb.LocateSequencesRequest:
    digests = []
    for key in keys:
        for i, one in enumerate(some):
            size = len(one.token_ids)
            ends = [*range(max(1, size - DIGESTS_BEFORE_END), size), *wanted.get(i, ())]
            digests.append(token_digests(one.token_ids, ends, key))
    request = pb.LocateSequencesRequest()
    request.CopyFrom(common)
    lengths = [len(one.token_ids) for one in some] * len(keys)
    request.num_keys = len(keys)
    request.num_tokens = np.array(lengths, U32).tobytes()
    request.num_digests = np.array([*map(len, digests)], U32).tobytes()
    request.token_digests = b"".join(each.tobytes() for each in digests)
    if any(one.labels for one in some):
        request.labels.extend(pb.LabelSet(labels=one.labels) for one in some)
    if any(one.choice for one in some):
        request.choices = np.array([one.choice for one in some], U32).tobytes()
    return request


def _found(some: Sequence[_Asked], response: pb.LocateSequencesResponse) -> _Found:
    rows = unpack(response.located, LOCATED, "located").tolist()
    if len(rows) != len(some):
        raise ValueError(f"{len(rows)} of {len(some)} sequences")
    answers = []
    for outcome, trace, incarnation, num_tokens, proven, num_equal in rows:
        located = None
        if outcome == Outcome.FOUND:
            trace_id = response.trace_ids[trace]
            located = Located(trace_id, incarnation, num_tokens, proven, num_equal)
        answers.append(_Answer(Outcome(outcome), proven, located))
    wanted: dict[int, list[int]] = {}
    for i, position in unpack(response.wanted, U32, "wanted").reshape(-1, 2).tolist():
        if not 0 < position < len(some[i].token_ids):
            raise ValueError(f"position {position} of sequence {i}")
        wanted.setdefault(i, []).append(position)
    return _Found(answers, [*response.digest_keys], wanted)
