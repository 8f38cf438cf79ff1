"""Report of `routetrace experts`, in JSON types."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from routetrace.common.balance import balancedness
from routetrace.common.errors import InvalidArgument
from routetrace.experts.analysis.placement import Placement, balanced, contiguous, round_robin
from routetrace.experts.analysis.simulation import (
    CacheCount,
    hit_curves,
    next_layer_recall,
    passes_of,
    prefetching,
    steps_of,
    warm_start,
)
from routetrace.experts.analysis.stats import ExpertStats
from routetrace.experts.forecast import ExpertForecast, ForecastFit
from routetrace.experts.rows import side_by_side

#: Default capacities of caches, as shares of a layer's experts.
SHARES = (1 / 16, 1 / 8, 1 / 4, 3 / 8, 1 / 2, 3 / 4)
# Passes after the start over which a warm start is compared.
_FIRST = 64
# Rows fitted together: a batch needs many requests, memory few rows.
_LEARN_ROWS = 1 << 16
# Pairs of experts that are reported per layer.
_PAIRS = 3
# Minimum tokens of a reported pair, however unlikely by chance.
_FEWEST = 16

Rows = npt.NDArray[np.integer[Any]]
Valid = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Asked:
    """Content of a report.

    Attributes:
        capacities: slots of a layer's cache; empty: `SHARES` of the experts.
        policies: names.
        ahead: experts of the next layer that are requested while one computes; 0: none.
        ranks: ranks that share the experts; 0: no placement.
        replicas: slots beyond one for each expert.
        placement: a placement to judge, [L, ranks, slots].
    """

    capacities: tuple[int, ...] = ()
    policies: tuple[str, ...] = ("lru", "lfu", "hazard", "belady")
    ahead: int = 0
    ranks: int = 0
    replicas: int = 0
    placement: npt.NDArray[np.integer[Any]] | None = None


class Together(NamedTuple):
    """Rows of consecutive requests, and the first row of each."""

    rows: Rows
    starts: npt.NDArray[np.bool_]


class _Requests:
    """Copies of the rows of requests."""

    def __init__(self) -> None:
        self.num_rows = 0
        self._rows: list[Rows] = []

    def add(self, rows: Rows) -> None:
        """Add a request."""
        if len(rows):
            self._rows.append(np.array(rows))
            self.num_rows += len(rows)

    def together(self) -> Together:
        """Return all requests, of which there must be one."""
        starts = np.zeros(self.num_rows, bool)
        starts[np.cumsum([0, *map(len, self._rows[:-1])])] = True
        return Together(np.concatenate(self._rows), starts)


@dataclass
class Study:
    """Statistics and fit over requests; keeps only the rows to simulate.

    Attributes:
        layer_ids: absolute ids of the columns.
        num_experts: E.
        passes: maximum passes to simulate; rows are kept for these.
        batch: concurrent requests in a pass, in the fit and in the simulation.
    """

    layer_ids: tuple[int, ...]
    num_experts: int
    passes: int
    batch: int = 1
    requests: int = 0
    learnt: int = 0
    _kept: _Requests = field(default_factory=_Requests)
    _to_learn: _Requests = field(default_factory=_Requests)

    def __post_init__(self) -> None:
        self.stats = ExpertStats(len(self.layer_ids), self.num_experts)
        self._fit = ForecastFit(self.num_experts)
        # Of all rows outside the fit.
        self.load = np.zeros((len(self.layer_ids), self.num_experts), np.int64)

    def count(self, rows: Rows, valid: Valid | None) -> None:
        """Count a request for the tables of load and balance."""
        self.stats.add(rows, valid)
        self.requests += 1

    def learn(self, rows: Rows, valid: Valid | None) -> None:
        """Fit the forecast on rows; do not keep the same rows."""
        whole = _whole(rows, valid)
        self.learnt += len(whole)
        self._to_learn.add(whole)
        if self._to_learn.num_rows >= _LEARN_ROWS:
            self._learn()

    def keep(self, rows: Rows, valid: Valid | None) -> None:
        """Count a request's load, and keep rows for the simulation up to its limit."""
        whole = _whole(rows, valid)
        self.load += load_of(whole, self.num_experts)
        # At most `passes` rows of one request: those of others fill the batch.
        room = self.passes * self.batch - self._kept.num_rows
        self._kept.add(whole[: min(self.passes, room)])

    @property
    def kept(self) -> Together | None:
        """The rows that were kept, if any."""
        return self._kept.together() if self._kept.num_rows else None

    def forecast(self) -> ExpertForecast | None:
        """Return the fitted forecast, if any rows were fitted."""
        self._learn()
        return self._fit.result() if self.learnt else None

    def _learn(self) -> None:
        """Fit the requests collected so far."""
        if self._to_learn.num_rows:
            rows, starts = self._to_learn.together()
            ordered, passes = side_by_side(rows, starts, self.batch)
            self._fit.add(ordered, passes=passes)
            self._to_learn = _Requests()


def report_of(study: Study, asked: Asked) -> dict[str, Any]:
    """Return the report, in JSON types.

    Raises:
        InvalidArgument: if `asked` does not fit the model.
    """
    stats = study.stats
    report: dict[str, Any] = {
        "version": 1,
        "requests": study.requests,
        "rows": int(stats.tokens.max()),
        "num_experts": study.num_experts,
        "top_k": stats.top_k,
        "layer_ids": list(study.layer_ids),
        "layers": list(_layers(study)),
        "load": stats.load.tolist(),
    }
    forecast, kept = study.forecast(), study.kept
    if forecast is None or kept is None:
        if asked.ranks or asked.placement is not None:
            report["placement"] = _placements(stats.load, stats.load, stats.top_k, asked)
        return report
    report["fitted_on_rows"], report["measured_on_rows"] = study.learnt, len(kept.rows)
    recall = next_layer_recall(kept.rows[:512], forecast, stats.top_k)
    for layer, likely, hot in zip(report["layers"][1:], *recall, strict=True):
        layer |= {"recall_next_layer": round(float(likely), 4), "recall_hot": round(float(hot), 4)}
    report |= _caches(study, kept, forecast, asked)
    if asked.ranks or asked.placement is not None:
        fitted = forecast.frequencies.astype(np.float64)
        report["placement"] = _placements(fitted, study.load, stats.top_k, asked)
    return report


def _whole(rows: Rows, valid: Valid | None) -> Rows:
    """Return the rows without invalid cells."""
    return rows if valid is None else rows[valid.all(1)]


def load_of(rows: Rows, num_experts: int) -> npt.NDArray[np.int64]:
    """Return how often each expert was chosen, [L, E]."""
    columns = (rows[:, layer].ravel() for layer in range(rows.shape[1]))
    return np.stack([np.bincount(column, minlength=num_experts) for column in columns])


def _layers(study: Study) -> Iterator[dict[str, Any]]:
    stats = study.stats
    columns = {
        "balancedness": stats.balancedness,
        "max_violation": stats.max_violation,
        "avg_violation": stats.avg_violation,
        "min_violation": stats.min_violation,
        "entropy": stats.entropy,
        "top_share": stats.top_share(max(1, stats.num_experts // 10)),
        "overlap": stats.overlap,
    }
    lift = stats.coactivation
    for at, layer in enumerate(study.layer_ids):
        yield {
            "layer": layer,
            "tokens": int(stats.tokens[at]),
            **{name: round(float(values[at]), 4) for name, values in columns.items()},
            "dead": int(stats.dead[at]),
            "together": _pairs(lift[at], stats.together[at]),
        }


def _pairs(lift: npt.NDArray[np.float64], together: npt.NDArray[np.int64]) -> list[dict[str, Any]]:
    """Return the pairs of a layer chosen together far more often than by chance."""
    upper = np.triu(np.where(together >= _FEWEST, lift, 0), 1)
    best = np.argsort(-upper, axis=None, kind="stable")[:_PAIRS]
    pairs = zip(*np.unravel_index(best, upper.shape), strict=True)
    return [
        {
            "experts": [int(a), int(b)],
            "lift": round(float(upper[a, b]), 2),
            "tokens": int(together[a, b]),
        }
        for a, b in pairs
        if upper[a, b] > 1
    ]


def _caches(study: Study, kept: Together, forecast: ExpertForecast, asked: Asked) -> dict[str, Any]:
    experts = study.num_experts
    steps = steps_of(kept.rows, experts, starts=kept.starts, batch=study.batch)[: study.passes]
    layers = passes_of(steps)
    given = asked.capacities or tuple(round(share * experts) for share in SHARES)
    capacities = sorted({max(1, capacity) for capacity in given})
    if asked.capacities and min(asked.capacities) < 1:
        raise InvalidArgument(
            field="--capacity", value=min(asked.capacities), expected="at least one slot"
        )
    curves = hit_curves(layers, experts, capacities, asked.policies, forecast)
    cells = len(layers) * len(steps)
    found: dict[str, Any] = {
        "cache": {
            "batch": study.batch,
            "passes": len(steps),
            "needed": round(sum(map(len, chain(*layers))) / cells, 3),
            "capacities": capacities,
            "hit_rate": {
                name: [round(count.hit_rate, 4) for count in counts]
                for name, counts in curves.items()
            },
            "moved": {
                name: [round(count.moved / cells, 3) for count in counts]
                for name, counts in curves.items()
            },
        }
    }
    policies = [name for name in asked.policies if name != "belady"]
    first = min(_FIRST, len(steps))
    found["warm_start"] = {
        "passes": first,
        "rows": [
            {
                "capacity": capacity,
                "policy": policy,
                "warm": warm,
                **_count(
                    warm_start(layers, experts, capacity, policy, forecast, first=first, warm=warm),
                    len(layers) * first,
                ),
            }
            for capacity in capacities
            for policy in policies
            for warm in (False, True)
        ],
    }
    if asked.ahead:
        found["prefetch"] = [
            {
                "capacity": capacity,
                "policy": policy,
                "ahead": ahead,
                **_count(
                    prefetching(steps, experts, capacity, policy, forecast, ahead=ahead), cells
                ),
            }
            for capacity in capacities
            for policy in policies
            for ahead in (0, asked.ahead)
        ]
    return found


def _count(count: CacheCount, cells: int) -> dict[str, Any]:
    return {
        "hit_rate": round(count.hit_rate, 4),
        "moved": round(count.moved / cells, 3),
        "ahead_used": round(count.ahead_used / count.ahead, 4) if count.ahead else None,
    }


def _placements(
    fitted: npt.NDArray[Any], measured: npt.NDArray[Any], top_k: int, asked: Asked
) -> list[dict[str, Any]]:
    layers, experts = measured.shape
    found: dict[str, Placement] = {}
    if asked.ranks:
        if experts % asked.ranks == 0:
            found["contiguous"] = contiguous(layers, experts, asked.ranks)
            found["round-robin"] = round_robin(layers, experts, asked.ranks)
        found["balanced"] = balanced(fitted, asked.ranks, asked.replicas)
    if asked.placement is not None:
        found["given"] = Placement(asked.placement, experts)
    rows = []
    for name, placement in found.items():
        load = placement.rank_load(measured)
        even = balancedness(load)
        share = load / np.maximum(load.sum(1, keepdims=True), 1)
        rows.append(
            {
                "placement": name,
                "rows": int(measured.sum(1).max()) // top_k,
                "ranks": int(placement.slots.shape[1]),
                "replicas": int(placement.slots[0].size) - experts,
                "balancedness": round(float(even.mean()), 4),
                "worst_layer": int(even.argmin()),
                "worst_balancedness": round(float(even.min()), 4),
                "max_over_mean": round(float((1 / even).mean()), 4),
                "rank_share": np.round(share, 5).tolist(),
            }
        )
    return rows
