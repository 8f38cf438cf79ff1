"""Comparison of two reads of the same tokens: rollout and trainer, incarnations, engines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from routetrace.client import _arguments as check
from routetrace.client._memory import to_numpy
from routetrace.client._ranges import column_index
from routetrace.client.agreement import Agreement, Choices
from routetrace.client.stat import version_number
from routetrace.client.trace import Trace
from routetrace.codec.records import digest_key
from routetrace.common.errors import InvalidArgument
from routetrace.common.values import Values
from routetrace.trainers.agreement import compare, layer_major, overlap
from routetrace.trainers.causes import likely_cause, share_of, worse_since
from routetrace.trainers.diagnosis import diagnose

#: Maximum tokens that are named as the worst.
MAX_WORST = 100


@dataclass(frozen=True)
class WorstToken(Values):
    """A token whose choices differ at some layers."""

    position: int
    differing: int
    """Layers where the sets of experts differ."""
    layers: int
    """Compared layers."""
    overlap: float
    """Experts in common, as a share of those chosen."""
    weight_version: int | None
    """Version that computed the row of the first side; None if unknown."""


@dataclass(frozen=True)
class Comparison(Values):
    """Agreement of two sides in the cells (token, layer) that both have."""

    start: int
    """First position that both have."""
    stop: int
    """One past the last one."""
    layer_ids: tuple[int, ...]
    """Layers that both have."""
    cells: int
    """Compared cells."""
    differing: int
    """Cells where the two sets of experts differ."""
    tokens: int
    """Tokens with a compared cell."""
    differing_tokens: int
    """Tokens where the sets differ at some layer."""
    overlap: float | None
    """Experts in common, as a share of those chosen; None if no cell was compared."""
    missing: int
    """Cells of common positions and layers that one side does not have."""
    other_tokens_from: int | None
    """Position from which on digests disprove that the tokens are the same, so that nothing is
    compared; None if none does."""
    by_layer: Mapping[int, Choices] = field(default_factory=dict)
    """By absolute layer id."""
    by_version: Mapping[int, Choices] = field(default_factory=dict)
    """By the weight version that computed the row of the first side."""
    worst: tuple[WorstToken, ...] = ()
    """Tokens that differ most, worst first."""
    diagnosis: str | None = None
    """Other tokens or layers that rows fit better, in words; None if rows fit as they are, or too
    few are there to judge."""
    cause: str | None = None
    """Likely cause in words where rows fit, from the course over the layers; None if it names none.
    """

    @property
    def disagreement(self) -> float | None:
        """Share of cells where the sets differ; None if none was compared."""
        return self.differing / self.cells if self.cells else None


def compare_traces(a: Trace, b: Trace, *, worst: int = 10) -> Comparison:
    """Compare two reads in the cells that both have, as sets of experts per cell.

    Where token digests of both are known, positions from which on they differ are left out: rows
    of other tokens say nothing.

    Args:
        a: one side, such as the rollout.
        b: the other side, such as another incarnation, or the same tokens on another engine.
        worst: maximum number of the worst tokens.

    Raises:
        InvalidArgument: if the models differ in experts or top-k, or nothing is in common.
    """
    check.instance("a", a, Trace)
    check.instance("b", b, Trace)
    for name in ("num_experts", "top_k"):
        ours, theirs = getattr(a.layout, name), getattr(b.layout, name)
        if ours != theirs:
            raise InvalidArgument(field=f"b.{name}", value=theirs, expected=f"{ours}, as of a")
    differs = _tokens_differ_from(a, b)
    stop = b.token_stop if differs is None else min(b.token_stop, max(differs, b.token_start))
    part = b.tokens(b.token_start, stop)
    ids, valid = layer_major(part)
    compared = _compared(a, ids, valid, part.layer_ids, part.token_start, worst)
    return replace(compared, other_tokens_from=differs)


def compare_ids(
    a: Trace,
    topk_ids: Any,
    *,
    valid: Any = None,
    layer_ids: Any = None,
    token_start: int = 0,
    worst: int = 10,
) -> Comparison:
    """Compare a trace with the choices of a trainer, as sets of experts per cell.

    Args:
        a: the trace.
        topk_ids: integers [tokens, layers, top_k]; an array, or a tensor on any device.
        valid: bool [tokens, layers], the cells of `topk_ids` that count; all if None.
        layer_ids: absolute layer ids of `topk_ids`, ascending; those of the trace if None.
        token_start: position of its first token.
        worst: as in `compare_traces`.

    Raises:
        InvalidArgument: if a shape or dtype is wrong, an id is out of range, or nothing is in
            common.
    """
    check.instance("a", a, Trace)
    ids = to_numpy(topk_ids)
    layers = a.layer_ids if layer_ids is None else tuple(check.wholes("layer_ids", layer_ids))
    expected = f"integers [tokens, {len(layers)}, {a.top_k}]"
    if ids.ndim != 3 or ids.shape[1:] != (len(layers), a.top_k) or ids.dtype.kind not in "iu":
        shown = f"{ids.dtype} {list(ids.shape)}"
        raise InvalidArgument(field="topk_ids", value=shown, expected=expected)
    if list(layers) != sorted(set(layers)):
        raise InvalidArgument(field="layer_ids", value=list(layers), expected="ascending layers")
    counts = np.ones(ids.shape[:2], np.bool_) if valid is None else to_numpy(valid)
    if counts.shape != ids.shape[:2] or counts.dtype != np.bool_:
        shown = f"{counts.dtype} {list(counts.shape)}"
        raise InvalidArgument(field="valid", value=shown, expected=f"bool {list(ids.shape[:2])}")
    start = check.whole("token_start", token_start)
    return _compared(a, ids.transpose(1, 0, 2), counts.T, layers, start, worst)


def _compared(
    a: Trace,
    ids: npt.NDArray[Any],
    valid: npt.NDArray[np.bool_],
    layer_ids: tuple[int, ...],
    token_start: int,
    worst: int,
) -> Comparison:
    """Compare a trace with ids [layers, tokens, top_k] from a position on."""
    worst = check.whole("worst", worst, 0, MAX_WORST)
    start, stop = max(a.token_start, token_start), min(a.token_stop, token_start + ids.shape[1])
    layers = tuple(layer for layer in a.layer_ids if layer in layer_ids)
    if start >= stop or not layers:
        raise InvalidArgument(
            f"the two sides have nothing in common: positions [{a.token_start}, {a.token_stop}) "
            f"and [{token_start}, {token_start + ids.shape[1]}), layers "
            f"{list(a.layer_ids)} and {list(layer_ids)}",
            field="b",
            value=f"positions from {token_start}",
            expected="common positions and layers",
        )
    columns = column_index([layer_ids.index(layer) for layer in layers])
    where = columns, slice(start - token_start, stop - token_start)
    theirs, known = ids[where], valid[where]
    part = a.tokens(start, stop).layers(layers)
    ours, own = layer_major(part)
    both = own & known
    shown = replace(part, _valid=both)
    agreement = compare(shown, theirs.transpose(1, 0, 2))
    cells, differing, matched, chosen = agreement.choices
    found = overlap(ours, theirs)
    diagnosis = diagnose(shown, theirs.transpose(1, 0, 2))
    return Comparison(
        start=start,
        stop=stop,
        layer_ids=layers,
        cells=cells,
        differing=differing,
        tokens=agreement.tokens,
        differing_tokens=agreement.differing_tokens,
        overlap=matched / chosen if chosen else None,
        missing=int(both.size - both.sum()),
        other_tokens_from=None,
        by_layer=agreement.by_layer,
        by_version=agreement.by_version,
        worst=_worst(shown, found, both, worst),
        diagnosis=diagnosis,
        cause=None if diagnosis else _cause(shown, theirs.transpose(1, 0, 2), agreement),
    )


def _cause(part: Trace, theirs: npt.NDArray[Any], agreement: Agreement) -> str | None:
    """Return the likely cause; if newer weights are far worse, that of their rows alone."""
    since = worse_since(agreement.by_version)
    if since is None:
        return likely_cause(agreement.by_layer)
    later = np.zeros(len(part), np.bool_)
    for start, stop, version in part.weight_versions:
        newer = version_number(version) >= since
        later[start - part.token_start : stop - part.token_start] = newer
    found = compare(replace(part, _valid=part._valid & later), theirs)
    worse = found.choices
    before = Choices(*(a - b for a, b in zip(agreement.choices, worse, strict=True)))
    words = (
        f"{share_of(worse):.0%} of cells differ since weight version {since}, and "
        f"{share_of(before):.0%} before"
    )
    cause = likely_cause(found.by_layer)
    return f"{words}; since then {cause}" if cause else words


def _worst(
    part: Trace, found: npt.NDArray[Any], both: npt.NDArray[np.bool_], count: int
) -> tuple[WorstToken, ...]:
    """Return the tokens with the least in common, the earlier of equal ones first."""
    layers = both.sum(axis=0)
    common = (found * both).sum(axis=0)
    differing = ((found < part.top_k) & both).sum(axis=0)
    share = common / np.maximum(layers * part.top_k, 1)
    order = np.lexsort((np.arange(len(share)), share))
    order = order[differing[order] > 0][:count]
    versions: dict[int, int | None] = {}
    for position in order.tolist():
        for start, stop, version in part.weight_versions:
            if start <= position + part.token_start < stop:
                versions[position] = version
    return tuple(
        WorstToken(
            position=at + part.token_start,
            differing=int(differing[at]),
            layers=int(layers[at]),
            overlap=float(share[at]),
            weight_version=versions.get(at),
        )
        for at in order.tolist()
    )


def _tokens_differ_from(a: Trace, b: Trace) -> int | None:
    """Return the position behind which digests disprove equal tokens; None if none does."""
    if digest_key(a.labels) != digest_key(b.labels):
        return None  # digests of other keys say nothing of each other
    ours, theirs = (dict(side.token_digests.tolist()) for side in (a, b))
    agreed = 0
    for position in sorted(ours.keys() & theirs.keys()):
        if ours[position] != theirs[position]:
            return agreed  # some token between the two positions is another one
        agreed = position
    return None
