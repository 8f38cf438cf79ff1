"""Forecast of the experts that will be needed, from stored traces.

Fitted on rows [n, L, K] of one recording, used for other requests:

* `hot`: the experts of a layer by how often tokens chose them. A cache starts with those.
* `next_layer`: likelihood of each expert of the next layer, given the experts of a layer. Chooses
  the experts to copy ahead.
* `policy`: likelihood that an expert is used soon, given its use in the last passes. Chooses the
  experts to evict.

A layer is a column of the rows, counted from 0, not a decoder layer's id. NumPy only.
"""

from __future__ import annotations

import os
import zipfile
from typing import Any

import numpy as np
import numpy.typing as npt

from routetrace.common.errors import InvalidArgument
from routetrace.common.limits import MAX_EXPERTS
from routetrace.experts.policy import Hazard
from routetrace.experts.rows import check_rows, side_by_side

#: Factors per pass of the exponential averages of an expert's use: memories of 2, 10 and 100
#: passes. Their weights are fitted; more averages add no information.
DECAYS = (0.5, 0.9, 0.99)
# Passes ahead whose uses of an expert the averages predict.
_AHEAD = 8
# Pull of a layer's weights towards those of all layers, as a share of the mean of its evidence.
_PULL = 0.01
# Pseudo-counts that pull P(next | expert) towards the next one's frequency.
_SMOOTHING = 8.0
# Evidence of one expert for the next layer counts by half: the top-k are not independent.
_EVIDENCE = 0.5
# Passes whose averages are computed together, as a product with a [_BLOCK, _BLOCK] matrix.
_BLOCK = 64
# Rows whose pairs are counted together: bounds memory.
_PAIR_ROWS = 1 << 14
# Maximum bytes of the pair counts of all layers.
_MOST_BYTES = 1 << 32


class ExpertForecast:
    """Statistics of one model's routing; immutable.

    Attributes:
        frequencies: float32 [L, E]: share of tokens that chose an expert.
        pass_rates: float32 [L, E]: share of passes that needed an expert; the same where a pass is
            one token.
        weights: float32 [L, D]: weights of the averages of `DECAYS`.
        lift: float16 [L - 1, E, E]: log(P(expert b of layer l + 1 | expert a of layer l) / P(b)).
    """

    def __init__(
        self,
        frequencies: npt.NDArray[np.float32],
        pass_rates: npt.NDArray[np.float32],
        weights: npt.NDArray[np.float32],
        lift: npt.NDArray[np.float16],
    ) -> None:
        if frequencies.ndim != 2 or not frequencies.size:
            raise InvalidArgument(
                field="frequencies", value=frequencies.shape, expected="shape [layers, experts]"
            )
        layers, experts = frequencies.shape
        for name, array, shape in (
            ("pass_rates", pass_rates, (layers, experts)),
            ("weights", weights, (layers, len(DECAYS))),
            ("lift", lift, (layers - 1, experts, experts)),
        ):
            if array.shape != shape:
                raise InvalidArgument(field=name, value=array.shape, expected=f"shape {shape}")
        for name, array in (
            ("frequencies", frequencies),
            ("pass_rates", pass_rates),
            ("weights", weights),
            ("lift", lift),
        ):
            if array.dtype.kind != "f" or not np.isfinite(array).all():
                raise InvalidArgument(field=name, value=array.dtype, expected="finite numbers")
        self.frequencies = _frozen(frequencies)
        self.pass_rates = _frozen(pass_rates)
        self.weights = _frozen(weights)
        self.lift = _frozen(lift)
        with np.errstate(divide="ignore"):
            self._log = np.log(self.frequencies)

    @property
    def num_layers(self) -> int:
        """Number of columns of the fitted rows."""
        return len(self.frequencies)

    @property
    def num_experts(self) -> int:
        """Number of experts of a layer."""
        return int(self.frequencies.shape[1])

    @staticmethod
    def fit(
        rows: npt.NDArray[np.integer[Any]],
        *,
        num_experts: int,
        starts: npt.NDArray[np.bool_] | None = None,
        batch: int = 1,
    ) -> ExpertForecast:
        """Fit on the rows of consecutive requests.

        Args:
            rows: expert ids [n, L, K].
            num_experts: E.
            starts: bool [n]: True at the first row of a request; only needed for a batch.
            batch: concurrent requests; see `side_by_side`.

        Raises:
            InvalidArgument: if a shape is wrong, an id out of range, or there are no rows.
        """
        fit = ForecastFit(num_experts)
        ordered, passes = side_by_side(rows, starts, batch)
        fit.add(ordered, passes=passes)
        return fit.result()

    def hot(self, layer: int, count: int) -> npt.NDArray[np.int64]:
        """Return the `count` experts of a layer that tokens chose most, the hottest first."""
        self._check_layer(layer, self.num_layers)
        return np.argsort(-self.frequencies[layer], kind="stable")[: max(count, 0)]

    def next_layer(self, layer: int, experts: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """Return the expected uses of the experts of layer + 1, given experts of `layer`.

        Args:
            layer: 0 .. L - 2.
            experts: ids [K] of a token, or [n, K] of several; negative ones name none.

        Returns:
            [E]: expected uses, summed over the tokens.

        Raises:
            InvalidArgument: if there is no next layer, or an id is out of range.
        """
        self._check_layer(layer, self.num_layers - 1)
        ids = np.asarray(experts)
        tokens = ids.reshape(1, -1) if ids.ndim == 1 else ids
        if tokens.ndim != 2 or tokens.dtype.kind not in "iu":
            raise InvalidArgument(
                field="experts", value=f"{ids.dtype} {ids.shape}", expected="int [K] or [n, K]"
            )
        if tokens.size and tokens.max() >= self.num_experts:
            raise InvalidArgument(
                field="experts", value=int(tokens.max()), expected=f"ids below {self.num_experts}"
            )
        evidence = self.lift[layer][tokens].astype(np.float64) * (tokens >= 0)[..., None]
        scores = self._log[layer + 1] + _EVIDENCE * evidence.sum(1)
        top_k = max(float(self.frequencies[layer + 1].sum()), 1e-9)
        chances = np.exp(scores - scores.max(initial=-np.inf, axis=1, keepdims=True))
        chances *= top_k / chances.sum(1, keepdims=True)
        there = (tokens >= 0).any(1)
        return np.asarray(np.minimum(chances, 1.0)[there].sum(0))

    def policy(self, layer: int) -> Hazard:
        """Return a new policy for a cache of that layer."""
        self._check_layer(layer, self.num_layers)
        # Halfway to even: other requests have other favourites, and a start from one recording's
        # alone keeps those too long.
        rates = self.pass_rates[layer].astype(np.float64)
        start = (rates + rates.mean()) / 2
        return Hazard(DECAYS, [float(weight) for weight in self.weights[layer]], start)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a .npz, which `load` reads."""
        with open(path, "wb") as file:  # as a file: np.savez adds .npz to other names
            np.savez_compressed(
                file,
                frequencies=self.frequencies,
                pass_rates=self.pass_rates,
                weights=self.weights,
                lift=self.lift,
                decays=np.array(DECAYS),
            )

    @staticmethod
    def load(path: str | os.PathLike[str]) -> ExpertForecast:
        """Read a file of `save`.

        Raises:
            InvalidArgument: if the file has another format, or a version with other averages.
            OSError: if the file cannot be read.
        """
        names = ("frequencies", "pass_rates", "weights", "lift")
        try:
            with np.load(path, allow_pickle=False) as file:
                arrays = [np.asarray(file[name]) for name in names]
                decays = tuple(file["decays"].tolist())
        except (ValueError, KeyError, EOFError, TypeError, zipfile.BadZipFile) as error:
            raise InvalidArgument(
                field="path", value=os.fspath(path), expected=f"a saved forecast: {error}"
            ) from error
        if decays != DECAYS:
            raise InvalidArgument(field="decays", value=decays, expected=str(DECAYS))
        return ExpertForecast(*arrays)

    def _check_layer(self, layer: int, stop: int) -> None:
        if not 0 <= layer < stop:
            raise InvalidArgument(field="layer", value=layer, expected=f"a layer in [0, {stop})")


class ForecastFit:
    """Fit of a forecast, request by request; keeps counts, not rows.

    Args:
        num_experts: E.

    Raises:
        InvalidArgument: if `num_experts` is out of range.
    """

    def __init__(self, num_experts: int) -> None:
        if not 1 <= num_experts <= MAX_EXPERTS:
            raise InvalidArgument(
                field="num_experts", value=num_experts, expected=f"1 to {MAX_EXPERTS}"
            )
        self._experts = num_experts
        self._layers = 0
        self._passes = 0

    def add(
        self,
        rows: npt.NDArray[np.integer[Any]],
        *,
        valid: npt.NDArray[np.bool_] | None = None,
        passes: npt.NDArray[np.integer[Any]] | None = None,
    ) -> None:
        """Count the rows of a request, or of passes over several.

        Args:
            rows: expert ids [n, L, K], distinct within a cell.
            valid: bool [n, L], all if None. Rows with an invalid cell are skipped.
            passes: int [n]: the pass of each row, ascending; one pass a row if None.

        Raises:
            InvalidArgument: if a shape differs from earlier rows, or an id is out of range.
        """
        check_rows(rows, self._experts, self._layers)
        if not self._layers:
            self._allocate(rows.shape[1])
        if valid is not None:
            whole = valid.all(1)
            rows = rows[whole]
            passes = passes if passes is None else passes[whole]
        if not len(rows):
            return
        self._count(rows)
        at = np.arange(len(rows)) if passes is None else _numbered(passes, len(rows))
        self._watch(rows, at)

    def result(self) -> ExpertForecast:
        """Return the forecast.

        Raises:
            InvalidArgument: if no rows were added.
        """
        if not self._passes:
            raise InvalidArgument(field="rows", value=0, expected="at least one whole row")
        frequencies = self._counts / self._tokens
        lift = np.empty(self._pairs.shape, np.float16)
        for layer in range(self._layers - 1):
            lift[layer] = self._lift(layer, frequencies[layer + 1])
        return ExpertForecast(
            frequencies.astype(np.float32),
            (self._uses / self._passes).astype(np.float32),
            self._weights().astype(np.float32),
            lift,
        )

    def _allocate(self, layers: int) -> None:
        experts = self._experts
        if 4 * layers * experts * experts > _MOST_BYTES:
            raise InvalidArgument(
                field="rows",
                value=f"{layers} layers of {experts} experts",
                expected="counts of pairs within 4 GiB",
            )
        self._layers = layers
        self._tokens = 0
        self._counts = np.zeros((layers, experts), np.int64)
        self._uses = np.zeros((layers, experts), np.int64)
        self._pairs = np.zeros((layers - 1, experts, experts), np.uint32)
        self._averages: npt.NDArray[np.float32] | None = None
        self._evidence = np.zeros((layers, len(DECAYS), len(DECAYS)))
        self._targets = np.zeros((layers, len(DECAYS)))

    def _count(self, rows: npt.NDArray[np.integer[Any]]) -> None:
        experts = self._experts
        self._tokens += len(rows)
        for start in range(0, len(rows), _PAIR_ROWS):
            part = rows[start : start + _PAIR_ROWS].astype(np.int64)
            for layer in range(self._layers):
                here = part[:, layer]
                self._counts[layer] += np.bincount(here.ravel(), minlength=experts)
                if layer:
                    pairs = part[:, layer - 1, :, None] * experts + here[:, None, :]
                    counted = np.bincount(pairs.ravel(), minlength=experts * experts)
                    self._pairs[layer - 1] += counted.reshape(experts, experts).astype(np.uint32)

    def _watch(self, rows: npt.NDArray[np.integer[Any]], at: npt.NDArray[np.int64]) -> None:
        """Process the passes in blocks: averages before each pass, and uses from it on."""
        total = int(at[-1]) + 1
        if self._averages is None:
            even = rows.shape[2] * len(rows) / (total * self._experts)
            shape = (len(DECAYS), self._layers, self._experts)
            self._averages = np.full(shape, min(even, 1.0), np.float32)
        columns = np.arange(self._layers)[None, :, None]
        for start in range(0, total, _BLOCK):
            # The block, and the passes after it that its last pass looks ahead to.
            stop = min(start + _BLOCK, total)
            end = min(stop + _AHEAD - 1, total)
            first, last = np.searchsorted(at, [start, end])
            used = np.zeros((end - start, self._layers, self._experts), np.float32)
            used[at[first:last, None, None] - start, columns, rows[first:last]] = 1
            self._block(used, stop - start)
        self._passes += total

    def _block(self, used: npt.NDArray[np.float32], count: int) -> None:
        """Add the evidence of the first `count` passes of `used` [passes, L, E]."""
        assert self._averages is not None
        self._uses += used[:count].sum(0).astype(np.int64)
        before = np.empty((len(DECAYS), count, self._layers, self._experts), np.float32)
        flat = used[:count].reshape(count, -1)
        for i, decay in enumerate(DECAYS):
            fading, taken = _filter(decay, count)
            start = self._averages[i].reshape(1, -1)
            seen = fading[:, None] * start + taken @ flat
            before[i, 0] = self._averages[i]
            before[i, 1:] = seen[:-1].reshape(count - 1, self._layers, self._experts)
            self._averages[i] = seen[-1].reshape(self._layers, self._experts)
        # Passes near the end whose uses ahead are not all known give no evidence.
        known = min(len(used) - _AHEAD + 1, count)
        if known <= 0:
            return
        sums = np.concatenate([np.zeros_like(used[:1]), np.cumsum(used, 0, dtype=np.float32)])
        ahead = (sums[_AHEAD : _AHEAD + known] - sums[:known]) / _AHEAD
        for layer in range(self._layers):
            x = before[:, :known, layer].reshape(len(DECAYS), -1).astype(np.float64)
            self._evidence[layer] += x @ x.T
            self._targets[layer] += x @ ahead[:, layer].reshape(-1).astype(np.float64)

    def _weights(self) -> npt.NDArray[np.float64]:
        """Return the weights [L, D] by least squares: uses ahead from the averages."""
        unit = np.eye(len(DECAYS))
        evidence, targets = self._evidence.sum(0), self._targets.sum(0)
        scale = np.trace(evidence) / len(DECAYS)
        if not scale > 0:  # fewer passes than _AHEAD: equal weights
            return np.full((self._layers, len(DECAYS)), 1 / len(DECAYS))
        common = np.linalg.solve(evidence + 1e-4 * scale * unit, targets)
        weights = np.empty((self._layers, len(DECAYS)))
        for layer in range(self._layers):
            pull = _PULL * np.trace(self._evidence[layer]) / len(DECAYS)
            weights[layer] = np.linalg.solve(
                self._evidence[layer] + pull * unit, self._targets[layer] + pull * common
            )
        return weights

    def _lift(
        self, layer: int, following: npt.NDArray[np.float64]
    ) -> npt.NDArray[np.floating[Any]]:
        """Return log(P(b | a) / P(b)) [E, E], b of the next layer; 0 where b was never chosen."""
        share = np.maximum(following, 1e-12)
        given = self._pairs[layer] + _SMOOTHING * following
        ratio = given / (self._counts[layer][:, None] + _SMOOTHING) / share
        return np.log(np.where(following > 0, ratio, 1.0))


def _filter(decay: float, count: int) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Return the factors of an average after each of `count` passes, and of their uses."""
    at = np.arange(count)
    fading = decay ** (at + 1.0)
    taken = np.tril((1 - decay) * decay ** np.maximum(at[:, None] - at, 0.0))
    return fading.astype(np.float32), taken.astype(np.float32)


def _numbered(passes: npt.NDArray[np.integer[Any]], count: int) -> npt.NDArray[np.int64]:
    at = np.asarray(passes).astype(np.int64)
    if at.shape != (count,) or (np.diff(at) < 0).any() or (count and at[0] < 0):
        raise InvalidArgument(
            field="passes", value=at.shape, expected=f"{count} pass numbers, ascending from 0"
        )
    return at


def _frozen(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    array = np.array(array)
    array.flags.writeable = False
    return array
