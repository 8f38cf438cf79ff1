"""Diagnosis of rows that fit other tokens or layers better than their own.

It needs only the choices of the trainer's own routers: a row shares most of its experts with the
choice for its own token, and few with that for another. (Token digests, where the agent had tokens,
prove alignment before training; see `alignment`.)
"""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from routetrace.client.rows import Rows
from routetrace.client.trace import Trace
from routetrace.common.errors import InvalidArgument
from routetrace.trainers.agreement import layer_major, overlap, trainer_choices

Floats = npt.NDArray[np.float64]
Places = npt.NDArray[np.int64]

# Maximum shift in tokens that is searched.
_MAX_SHIFT = 8
# Tokens judged together, and the minimum to judge.
_WINDOW, _FEWEST = 64, 32
# Samples: all tokens at some layers, some tokens at all layers.
_LAYERS, _TOKENS = 8, 256
# Share of common experts from which rows fit.
_FITS = 0.8
# Another place fits better if it gains this part of the unshared experts, and gains this share, by
# this many standard errors.
_MADE_UP, _MARGIN, _ERRORS = 0.5, 0.1, 7.0
# Rows fit nothing below this part of the way from unrelated to equal rows; not judged where
# unrelated rows share more than the second.
_UNRELATED, _ALIKE = 0.1, 0.6


class _Tokens(NamedTuple):
    """Tokens other than padding, by sample and position."""

    place: Places
    """Index on the token axis."""
    sample: Places
    position: Places

    def at(self, sample: int | Places, position: Places) -> Places:
        """Return the index of tokens in this order; -1 if absent."""
        width = int(self.position.max(initial=0)) + 1
        keys = self.sample * width + self.position
        wanted = np.where((position >= 0) & (position < width), sample * width + position, -1)
        found = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
        return np.where(keys[found] == wanted, found, -1)


def check_alignment(rows: Rows | Trace, trainer_ids: Any) -> None:
    """Raise if `diagnose` finds a misalignment.

    Raises:
        InvalidArgument: with the message of `diagnose`.
    """
    message = diagnose(rows, trainer_ids)
    if message is not None:
        raise InvalidArgument(
            message, field="rows", value=repr(rows), expected="rows of these tokens and layers"
        )


def diagnose(rows: Rows | Trace, trainer_ids: Any) -> str | None:
    """Describe tokens or layers that rows fit much better than their own.

    Finds rows that are shifted by up to 8 tokens, or belong to other layers, to another sample, or
    to nothing here, as a whole or in a range of 64 tokens or more. Cheap where rows fit.

    Args:
        rows: rows of a plan, or a trace.
        trainer_ids: as in `compare`, from a pass that did not replay these rows, as wrong rows
            change the choices of later layers: `Replay.trainer_ids` of
            `replay(..., compare="only")`.

    Returns:
        A message; None if rows fit as given, or too few rows are present to judge.

    Raises:
        InvalidArgument: if the shape or dtype of `trainer_ids` differs, or an id is out of range.
    """
    theirs = trainer_choices(rows, trainer_ids)
    ours, valid = layer_major(rows)
    tokens = _tokens(rows)
    has_row = valid[:, tokens.place].any(axis=0)
    if int(has_row.sum()) < _FEWEST:
        return None
    layers = _spread(len(ours), _LAYERS)
    places = tokens.place
    view = _View(ours[layers][:, places], valid[layers][:, places], theirs[layers][:, places])
    some = places[has_row][_spread(int(has_row.sum()), _TOKENS)]
    by_layer = _View(ours[:, some], valid[:, some], theirs[:, some])
    judge = _Judge(rows, tokens, view)
    if judge.fits() and by_layer.all_layers_fit():
        return None
    return judge.shifted() or _renumbered(rows, by_layer) or judge.unrelated()


class _View(NamedTuple):
    """Ids [layers, tokens, top_k] of both sides, and validity of ours."""

    ours: npt.NDArray[Any]
    valid: npt.NDArray[np.bool_]
    theirs: npt.NDArray[Any]

    def shares(self, a: Places, b: Places) -> Floats:
        """Return the share of common experts of our rows `a` and their choices `b`.

        The result [len(a)] is a mean over layers; NaN where we have no row.
        """
        matched = overlap(self.ours[:, a], self.theirs[:, b]) / self.ours.shape[2]
        valid = self.valid[:, a]
        count = valid.sum(axis=0)
        return np.where(count, (matched * valid).sum(axis=0) / np.maximum(count, 1), np.nan)

    def all_layers_fit(self) -> bool:
        matched = overlap(self.ours, self.theirs) / self.ours.shape[2]
        count = self.valid.sum(axis=1)
        share = (matched * self.valid).sum(axis=1) / np.maximum(count, 1)
        return bool((share >= _FITS)[count > 0].all())


class _Judge:
    """Search for a better fit, by windows of tokens."""

    def __init__(self, rows: Rows | Trace, tokens: _Tokens, view: _View) -> None:
        self._name = "" if isinstance(rows, Trace) else " of sample {}"
        self._tokens = tokens
        self._view = view
        self._all = np.arange(len(tokens.place))
        self._given = view.shares(self._all, self._all)
        has_row = ~np.isnan(self._given)
        # Windows of about equal size.
        self._windows = max(1, int(has_row.sum()) // _WINDOW)
        self._window = (
            np.maximum(np.cumsum(has_row) - 1, 0) * self._windows // max(1, int(has_row.sum()))
        )

    def fits(self) -> bool:
        return bool((self._mean(self._given)[0] >= _FITS).all())

    def shifted(self) -> str | None:
        best: tuple[float, int, npt.NDArray[np.bool_], Floats] | None = None
        for shift in range(-_MAX_SHIFT, _MAX_SHIFT + 1):
            if not shift:
                continue
            # Rows shifted by `shift` belong to tokens that many positions earlier.
            where = self._tokens.at(self._tokens.sample, self._tokens.position - shift)
            shares = self._shares(self._all, where)
            found = self._better(shares)
            gain = float(np.nansum((shares - self._given)[found]))
            if found.any() and (best is None or gain > best[0]):
                best = gain, shift, found, shares
        if best is None:
            return None
        _, shift, found, shares = best
        unit = "token" if abs(shift) == 1 else "tokens"
        side = "before" if shift > 0 else "after"
        return (
            f"rows look shifted by {shift:+d} {unit}: {self._where(found)} they share "
            f"{_percent(shares[found])} of their experts with what the trainer chose {abs(shift)} "
            f"{unit} {side}, and {_percent(self._given[found])} with what it chose there"
        )

    def unrelated(self) -> str | None:
        shuffled = np.random.default_rng(0).permutation(len(self._all))
        chance = self._view.shares(self._all, shuffled)
        (given, count), (unrelated, _) = self._mean(self._given), self._mean(chance)
        fit = (given - unrelated) / np.maximum(1 - unrelated, 1 - _ALIKE)
        # Where routers barely agree anywhere, no window is an exception.
        whole = float(np.average(fit, weights=count))
        least = _UNRELATED if whole < _UNRELATED else min(_UNRELATED, whole / 3)
        lost = (count >= _FEWEST) & (fit < least) & (unrelated < _ALIKE)
        found = lost[self._window] & ~np.isnan(self._given)
        if not found.any():
            return None
        return self._of_another_sample(found) or (
            f"rows match nothing: {self._where(found)} they share "
            f"{_percent(self._given[found])} of their experts with what the trainer chose, and "
            f"{_percent(chance[found])} with what it chose for other tokens: rows of another "
            "sample, of another model, or of other layers and tokens at once"
        )

    def _of_another_sample(self, found: npt.NDArray[np.bool_]) -> str | None:
        sample = int(np.bincount(self._tokens.sample[found]).argmax())
        mine = np.flatnonzero(found & (self._tokens.sample == sample))
        mine = mine[_spread(len(mine), _TOKENS)]
        for other in np.unique(self._tokens.sample).tolist():
            where = self._tokens.at(other, self._tokens.position[mine])
            shares = self._shares(mine, where)
            if other != sample and _is_better(self._given[mine], shares):
                return (
                    f"rows of sample {sample} look like those of sample {other}: they share "
                    f"{_percent(shares)} of their experts with what the trainer chose there at the "
                    f"same positions, and {_percent(self._given[mine])} with their own"
                )
        return None

    def _shares(self, a: Places, b: Places) -> Floats:
        """Return `_View.shares`, with NaN where b is -1."""
        return np.where(b < 0, np.nan, self._view.shares(a, b))

    def _mean(self, values: Floats) -> tuple[Floats, Floats]:
        """Return mean and number of values of each window, without NaN."""
        known = ~np.isnan(values)
        window = self._window[known]
        count = np.bincount(window, minlength=self._windows)
        total = np.bincount(window, values[known], self._windows)
        return total / np.maximum(count, 1), count.astype(np.float64)

    def _better(self, shares: Floats) -> npt.NDArray[np.bool_]:
        """Return a mask of tokens in windows where `shares` fit much better."""
        gain = shares - self._given
        mean, count = self._mean(gain)
        square, _ = self._mean(gain**2)
        given, _ = self._mean(np.where(np.isnan(gain), np.nan, self._given))
        windows: npt.NDArray[np.bool_] = _much(given, mean, square, count)
        return np.asarray(windows[self._window] & ~np.isnan(gain))

    def _where(self, found: npt.NDArray[np.bool_]) -> str:
        first = int(found.argmax())
        start = f"position {self._tokens.position[first]}"
        return (
            f"for {int(found.sum()):,} of {int((~np.isnan(self._given)).sum()):,} tokens, from "
            f"{start}{self._name.format(self._tokens.sample[first])} on,"
        )


def _renumbered(rows: Rows | Trace, view: _View) -> str | None:
    """Describe layers whose rows fit other layers better."""
    found: list[tuple[int, int, float, float]] = []
    for layer, (ours, valid) in enumerate(zip(view.ours, view.valid, strict=True)):
        tokens = np.flatnonzero(valid)
        if len(tokens) < _FEWEST:
            continue
        shares = overlap(
            np.broadcast_to(ours[tokens], (len(view.theirs), len(tokens), ours.shape[1])),
            view.theirs[:, tokens],
        ) / len(ours[0])
        best = int(shares.mean(axis=1).argmax())
        if _is_better(shares[layer], shares[best]):
            found.append((layer, best, float(shares[best].mean()), float(shares[layer].mean())))
    if not found:
        return None
    layer, best, there, here = found[0]
    layer_ids, moe_layer_ids = rows.layer_ids, _moe_layer_ids(rows)
    message = (
        f"layers look numbered otherwise: at {len(found)} of {len(layer_ids)} layers rows share "
        f"more experts with another layer's choices; those of layer {layer_ids[layer]} share "
        f"{there:.0%} with what the trainer chose at layer {layer_ids[best]}, and {here:.0%} with "
        "what it chose at their own"
    )
    [(step, _)] = Counter(b - a for a, b, _, _ in found).most_common(1)
    if abs(step) == moe_layer_ids[0]:
        message += (
            f"; MoE layers begin at layer {moe_layer_ids[0]}, and may have been counted from 0"
        )
    return message


def _tokens(rows: Rows | Trace) -> _Tokens:
    if isinstance(rows, Trace):
        index = np.arange(len(rows))
        return _Tokens(index, np.zeros_like(index), index + rows.token_start)
    sample, position = rows.plan.sample_of, rows.plan.position_of
    order = np.lexsort((position, sample))
    order = order[sample[order] >= 0]
    return _Tokens(order, sample[order].astype(np.int64), position[order].astype(np.int64))


def _moe_layer_ids(rows: Rows | Trace) -> tuple[int, ...]:
    return (rows.plan.layout if isinstance(rows, Rows) else rows.layout).moe_layer_ids


def _spread(count: int, most: int) -> Places:
    """Return at most `most` of `count` indices, evenly spaced."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).astype(np.int64))


def _is_better(given: Floats, shares: Floats) -> bool:
    known = ~np.isnan(shares)
    gain = (shares - given)[known]
    if not gain.size:
        return False
    return bool(_much(given[known].mean(), gain.mean(), (gain**2).mean(), gain.size))


def _much(given: Any, gain: Any, square: Any, count: Any) -> Any:
    """Return whether gains are large and significant.

    Args:
        given: mean share at their own place.
        gain: mean gain.
        square: mean square of gains.
        count: number of gains.
    """
    error = np.sqrt(np.maximum(square - gain**2, 0) / np.maximum(count - 1, 1))
    least = np.maximum(_MARGIN, _MADE_UP * (1 - given))
    return (count >= _FEWEST) & (gain > least) & (gain > _ERRORS * error)


def _percent(shares: Floats) -> str:
    return f"{np.nanmean(shares):.0%}"
