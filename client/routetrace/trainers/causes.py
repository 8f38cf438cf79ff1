"""Likely cause of a disagreement of aligned rows, from its course over the layers.

A router sees the output of all layers before it. So a fault in the experts of a layer shows from
the next layer on, and one in a router shows in its own layer first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from routetrace.client.agreement import Choices

# Fewest cells of a layer that is judged.
_FEWEST = 32
# Share of differing cells of a first layer that two precisions do not reach.
_FIRST = 0.1
# A layer differs from one on if it is this much worse than all layers before it, in cells, and by
# this factor, and no later layer is better than the last part of it.
_JUMP, _TIMES, _STAYS = 0.3, 3.0, 0.5
# A layer is worse than the next one by this much, beside the factor.
_PEAK = 0.1
_MOST_NAMED = 6
# Newer weights are worse than older ones by this much, beside the factor.
_WORSE = 0.1


def worse_since(by_version: Mapping[int, Choices]) -> int | None:
    """Return the weight version from which on far more cells differ than before; None if none.

    Args:
        by_version: compared choices by the weight version that computed the rows.
    """
    versions = sorted(by_version)
    best: tuple[float, int] | None = None
    for at in range(1, len(versions)):
        before, after = (_sum(by_version, part) for part in (versions[:at], versions[at:]))
        if min(before.cells, after.cells) < _FEWEST:
            continue
        old, new = share_of(before), share_of(after)
        if new >= _WORSE + _TIMES * old and (best is None or new - old > best[0]):
            best = new - old, versions[at]
    return None if best is None else best[1]


def share_of(choices: Choices) -> float:
    """Return the share of cells that differ; 0 of none."""
    return choices.differing / max(1, choices.cells)


def _sum(by_version: Mapping[int, Choices], versions: Sequence[int]) -> Choices:
    return Choices(*map(sum, zip(*(by_version[one] for one in versions), strict=True)))


def likely_cause(by_layer: Mapping[int, Choices]) -> str | None:
    """Return the likely cause of a disagreement in words; None if its course names none.

    For rows of the trainer's own weights, or of nearly the same: rows of much older weights differ
    at all layers, from the first one on. Rows of other tokens or layers are for `diagnose`.

    Args:
        by_layer: compared choices by absolute layer id, as of an `Agreement` or a `Comparison`.
    """
    layers = [layer for layer, of in sorted(by_layer.items()) if of.cells >= _FEWEST]
    if not layers:
        return None
    shares = [share_of(by_layer[layer]) for layer in layers]
    at = _jump(shares)
    if at is not None:
        return (
            f"{_percent(shares[:at])} of cells differ up to layer {layers[at - 1]}, and "
            f"{_percent(shares[at:])} from layer {layers[at]} on: layer {layers[at - 1]} "
            "differs after its router, such as in the weights of its experts"
        )
    peaks = [i for i in range(len(shares) - 1) if _is_peak(shares[i], shares[i + 1])]
    if peaks:
        named = ", ".join(f"{layers[i]} ({shares[i]:.0%})" for i in peaks[:_MOST_NAMED])
        more = f" and {len(peaks) - _MOST_NAMED} more" if len(peaks) > _MOST_NAMED else ""
        return (
            f"some layers differ more than the next one, which sees all that they compute: {named}"
            f"{more}: their own routers differ, in weights, a bias, or precision"
        )
    if shares[0] >= _FIRST:
        common = by_layer[layers[0]]
        return (
            f"{shares[0]:.0%} of cells differ at the first MoE layer, {layers[0]}, with "
            f"{common.matched / max(1, common.chosen):.0%} of experts in common: no experts come "
            "before its router, so that routers differ, in weights (left from before an update, "
            "for example), a bias, or precision"
        )
    return None


def _jump(shares: Sequence[float]) -> int | None:
    """Return the index of the first layer that is far worse than those before, as all after it.

    None where the first layer differs already: its router has a fault, which later layers inherit.
    """
    if shares[0] >= _FIRST:
        return None
    worst = 0.0
    for at, share in enumerate(shares):
        far = share >= worst + _JUMP and share >= _TIMES * worst
        if at and far and min(shares[at:]) >= _STAYS * share:
            return at
        worst = max(worst, share)
    return None


def _is_peak(share: float, following: float) -> bool:
    return share >= _PEAK + _TIMES * following


def _percent(shares: Sequence[float]) -> str:
    return f"{sum(shares) / len(shares):.0%}"
