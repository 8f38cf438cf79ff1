"""What stored traces say of the experts that will be needed: which are hot, which come next.

Fitted on rows [n, L, K] of one recording, used for requests that it has never seen:

* `hot`: the experts of a layer by how often tokens chose them. A cache starts with those.
* `next_layer`: given the experts of a layer, how likely each expert of the next one is. What is
  copied ahead is chosen by it.
* `policy`: how likely an expert is soon, given its use in the last passes. What a cache gives up is
  chosen by it.

A layer is a column of the rows, counted from 0, not a decoder layer's id. NumPy only.
"""

from __future__ import annotations

import os
import zipfile
from heapq import heapreplace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from routetrace.capture_agent.expert_policy import Hazard
from routetrace.v1.errors import InvalidArgument
from routetrace.v1.layout import MAX_EXPERTS, MAX_LAYERS

#: How much of an exponential average of an expert's use remains after one pass: memories of 2, 10
#: and 100 passes. What each of them is worth is fitted; more of them tell no more.
DECAYS = (0.5, 0.9, 0.99)
# Passes ahead in which an expert's uses are what the averages are to tell.
_AHEAD = 8
# Pulls a layer's weights towards those of all layers: as a share of the mean of its own evidence.
_PULL = 0.01
# Pseudo-counts that pull P(next | expert) towards the next one's frequency.
_SMOOTHING = 8.0
# What one expert of a layer says of the next layer counts by half: the top-k are not independent.
_EVIDENCE = 0.5
# Passes of which averages are worked out at once: as a product with a [_BLOCK, _BLOCK] matrix.
_BLOCK = 64
# Rows whose pairs are counted at once: bounds memory.
_PAIR_ROWS = 1 << 14
# Bytes of one matrix of pair counts, over all layers, that are refused.
_MOST_BYTES = 1 << 32


class ExpertForecast:
    """Statistics of one model's routing; immutable.

    Attributes:
        frequencies: float32 [L, E]: share of tokens that chose an expert.
        pass_rates: float32 [L, E]: share of passes that needed an expert; the same where a pass is
            one token.
        weights: float32 [L, D]: what the averages of `DECAYS` are worth.
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
        """Columns of the rows that it was fitted on."""
        return len(self.frequencies)

    @property
    def num_experts(self) -> int:
        """Experts of a layer."""
        return int(self.frequencies.shape[1])

    @staticmethod
    def fit(
        rows: npt.NDArray[np.integer[Any]],
        *,
        num_experts: int,
        starts: npt.NDArray[np.bool_] | None = None,
        batch: int = 1,
    ) -> ExpertForecast:
        """Fits on rows of requests that follow one another.

        Args:
            rows: expert ids [n, L, K].
            num_experts: E.
            starts: bool [n]: True at the first row of a request; only needed for a batch.
            batch: requests that are under way at a time; see `side_by_side`.

        Raises:
            InvalidArgument: if a shape is wrong, an id out of range, or there are no rows.
        """
        fit = ForecastFit(num_experts)
        ordered, passes = side_by_side(rows, starts, batch)
        fit.add(ordered, passes=passes)
        return fit.result()

    def hot(self, layer: int, count: int) -> npt.NDArray[np.int64]:
        """The `count` experts of a layer that tokens chose most, the hottest first."""
        self._check_layer(layer, self.num_layers)
        return np.argsort(-self.frequencies[layer], kind="stable")[: max(count, 0)]

    def next_layer(self, layer: int, experts: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """How much each expert of layer + 1 will be needed by tokens that chose these of `layer`.

        Args:
            layer: 0 .. L - 2.
            experts: ids [K] of a token, or [n, K] of several; negative ones are nobody's.

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
        told = self.lift[layer][tokens].astype(np.float64) * (tokens >= 0)[..., None]
        scores = self._log[layer + 1] + _EVIDENCE * told.sum(1)
        top_k = max(float(self.frequencies[layer + 1].sum()), 1e-9)
        chances = np.exp(scores - scores.max(initial=-np.inf, axis=1, keepdims=True))
        chances *= top_k / chances.sum(1, keepdims=True)
        there = (tokens >= 0).any(1)
        return np.asarray(np.minimum(chances, 1.0)[there].sum(0))

    def policy(self, layer: int) -> Hazard:
        """A policy for a cache of that layer, which has not seen a pass yet."""
        self._check_layer(layer, self.num_layers)
        # Halfway to even: other requests have other favourites, and what starts too sure of its own
        # keeps them too long.
        rates = self.pass_rates[layer].astype(np.float64)
        start = (rates + rates.mean()) / 2
        return Hazard(DECAYS, [float(weight) for weight in self.weights[layer]], start)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a .npz, which `load` reads."""
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
        """Reads what `save` wrote.

        Raises:
            InvalidArgument: if it is no such file, or one of a version with other averages.
            OSError: if it can not be read.
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
    """Takes rows request by request; keeps counts, not rows.

    Args:
        num_experts: E.

    Raises:
        InvalidArgument: if that is no number of experts.
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
        """Counts the rows of a request, or of passes over several.

        Args:
            rows: expert ids [n, L, K], distinct within a cell.
            valid: bool [n, L], all of them if None. Rows with a cell that is not are left out.
            passes: int [n]: which pass computed a row, ascending; a pass for each row if None.

        Raises:
            InvalidArgument: if a shape is not that of rows added before, or an id out of range.
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
        """What the rows say.

        Raises:
            InvalidArgument: if there were none.
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
                expected="as many as pairs can be counted of in 4 GiB",
            )
        self._layers = layers
        self._tokens = 0
        self._counts = np.zeros((layers, experts), np.int64)
        self._uses = np.zeros((layers, experts), np.int64)
        self._pairs = np.zeros((layers - 1, experts, experts), np.uint32)
        self._averages: npt.NDArray[np.float32] | None = None
        self._evidence = np.zeros((layers, len(DECAYS), len(DECAYS)))
        self._told = np.zeros((layers, len(DECAYS)))

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
        """Goes through the passes in blocks: averages before each pass, and uses from it on."""
        total = int(at[-1]) + 1
        if self._averages is None:
            even = rows.shape[2] * len(rows) / (total * self._experts)
            shape = (len(DECAYS), self._layers, self._experts)
            self._averages = np.full(shape, min(even, 1.0), np.float32)
        columns = np.arange(self._layers)[None, :, None]
        for start in range(0, total, _BLOCK):
            # The block, and as many passes behind it as are looked ahead.
            stop = min(start + _BLOCK, total)
            end = min(stop + _AHEAD - 1, total)
            first, last = np.searchsorted(at, [start, end])
            used = np.zeros((end - start, self._layers, self._experts), np.float32)
            used[at[first:last, None, None] - start, columns, rows[first:last]] = 1
            self._block(used, stop - start)
        self._passes += total

    def _block(self, used: npt.NDArray[np.float32], count: int) -> None:
        """Adds the evidence of `count` passes, of which `used` [passes, L, E] goes on behind."""
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
        # Passes near the end, of which not all that is looked ahead is known, tell nothing.
        known = min(len(used) - _AHEAD + 1, count)
        if known <= 0:
            return
        sums = np.concatenate([np.zeros_like(used[:1]), np.cumsum(used, 0, dtype=np.float32)])
        ahead = (sums[_AHEAD : _AHEAD + known] - sums[:known]) / _AHEAD
        for layer in range(self._layers):
            x = before[:, :known, layer].reshape(len(DECAYS), -1).astype(np.float64)
            self._evidence[layer] += x @ x.T
            self._told[layer] += x @ ahead[:, layer].reshape(-1).astype(np.float64)

    def _weights(self) -> npt.NDArray[np.float64]:
        """Least squares: uses ahead by the averages; [L, D]."""
        unit = np.eye(len(DECAYS))
        evidence, told = self._evidence.sum(0), self._told.sum(0)
        scale = np.trace(evidence) / len(DECAYS)
        if not scale > 0:  # fewer passes than are looked ahead: all memories are worth the same
            return np.full((self._layers, len(DECAYS)), 1 / len(DECAYS))
        common = np.linalg.solve(evidence + 1e-4 * scale * unit, told)
        weights = np.empty((self._layers, len(DECAYS)))
        for layer in range(self._layers):
            pull = _PULL * np.trace(self._evidence[layer]) / len(DECAYS)
            weights[layer] = np.linalg.solve(
                self._evidence[layer] + pull * unit, self._told[layer] + pull * common
            )
        return weights

    def _lift(
        self, layer: int, following: npt.NDArray[np.float64]
    ) -> npt.NDArray[np.floating[Any]]:
        """log(P(b | a) / P(b)) [E, E] for the layer behind `layer`; 0 where b was never chosen."""
        share = np.maximum(following, 1e-12)
        given = self._pairs[layer] + _SMOOTHING * following
        ratio = given / (self._counts[layer][:, None] + _SMOOTHING) / share
        return np.log(np.where(following > 0, ratio, 1.0))


def side_by_side(
    rows: npt.NDArray[np.integer[Any]], starts: npt.NDArray[np.bool_] | None, batch: int
) -> tuple[npt.NDArray[np.integer[Any]], npt.NDArray[np.int64]]:
    """Lays requests side by side, as an engine decodes them: where one ends, the next one begins.

    Args:
        rows: [n, L, K] of requests that follow one another.
        starts: bool [n]: the first row of each request; row 0 is one anyway.
        batch: requests that are under way at a time. In the last passes there are fewer.

    Returns:
        The rows by pass, and the pass of each from 0 on, int64 [n].

    Raises:
        InvalidArgument: if the batch is below 1, or `starts` is not [n].
    """
    if batch < 1:
        raise InvalidArgument(field="batch", value=batch, expected="at least 1")
    if starts is not None and (starts.shape != (len(rows),) or starts.dtype.kind != "b"):
        raise InvalidArgument(
            field="starts", value=f"{starts.dtype} {starts.shape}", expected=f"bool [{len(rows)}]"
        )
    begun = [0] if starts is None else [0, *(np.flatnonzero(starts[1:]) + 1).tolist()]
    free_at = [0] * min(batch, len(begun))
    passes = np.empty(len(rows), np.int64)
    for start, stop in pairwise([*begun, len(rows)]):
        first = free_at[0]
        passes[start:stop] = np.arange(first, first + stop - start)
        heapreplace(free_at, first + stop - start)
    order = np.argsort(passes, kind="stable")
    return rows[order], passes[order]


def check_rows(
    rows: npt.NDArray[np.integer[Any]], num_experts: int, layers: int | None = None
) -> None:
    """Checks that rows are ids [n, L, K] of so many experts.

    Args:
        rows: what was given.
        num_experts: E.
        layers: L, where it is known; None or 0 elsewhere.

    Raises:
        InvalidArgument: if not.
    """
    if rows.ndim != 3 or rows.dtype.kind not in "iu" or not rows.shape[1] or not rows.shape[2]:
        raise InvalidArgument(
            field="rows", value=f"{rows.dtype} {rows.shape}", expected="integers [n, L, K]"
        )
    if rows.shape[1] > MAX_LAYERS or (layers and rows.shape[1] != layers):
        raise InvalidArgument(
            field="rows",
            value=f"{rows.shape[1]} layers",
            expected=f"{layers or f'at most {MAX_LAYERS}'} layers",
        )
    if rows.size and not (rows.min() >= 0 and rows.max() < num_experts):
        raise InvalidArgument(
            field="rows",
            value=f"ids {int(rows.min())} to {int(rows.max())}",
            expected=f"ids in [0, {num_experts})",
        )


def _filter(decay: float, count: int) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """What is left of an average after each of `count` passes, and what they add to it."""
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
