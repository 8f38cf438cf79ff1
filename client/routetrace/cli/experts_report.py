"""What `routetrace experts` finds out, as one report of JSON's own types, and as tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from routetrace.capture_agent.expert_forecast import ExpertForecast, ForecastFit, side_by_side
from routetrace.client.expert_simulation import (
    CacheCount,
    Placement,
    balanced,
    contiguous,
    hit_curves,
    next_layer_recall,
    passes_of,
    prefetching,
    round_robin,
    steps_of,
    warm_start,
)
from routetrace.client.expert_stats import ExpertStats, balancedness
from routetrace.v1.errors import InvalidArgument

#: Shares of a layer's experts that caches hold where nobody says how many.
SHARES = (1 / 16, 1 / 8, 1 / 4, 3 / 8, 1 / 2, 3 / 4)
# Passes from empty caches that show what a warm start is worth.
_FIRST = 64
# Rows that are learnt from at once: a batch wants many requests, memory few rows.
_LEARN_ROWS = 1 << 16
# Pairs of experts that are told of a layer.
_PAIRS = 3
# A pair that fewer tokens chose is not told, however unlikely by chance.
_FEWEST = 16

Rows = npt.NDArray[np.integer[Any]]
Valid = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Asked:
    """What is to be found out.

    Attributes:
        capacities: slots of a layer's cache; empty: some shares of the experts.
        policies: names.
        ahead: experts of the next layer that are asked for while one computes; 0: none.
        ranks: ranks that share the experts; 0: no placement.
        replicas: slots beyond one for each expert.
        placement: one to be judged, [L, ranks, slots]; None: none.
    """

    capacities: tuple[int, ...] = ()
    policies: tuple[str, ...] = ("lru", "lfu", "hazard", "belady")
    ahead: int = 0
    ranks: int = 0
    replicas: int = 0
    placement: npt.NDArray[np.integer[Any]] | None = None


class Together(NamedTuple):
    """Rows of requests that follow one another, and where each begins."""

    rows: Rows
    starts: npt.NDArray[np.bool_]


class _Requests:
    """Copies of the rows of requests."""

    def __init__(self) -> None:
        self.num_rows = 0
        self._rows: list[Rows] = []

    def add(self, rows: Rows) -> None:
        """Another request."""
        if len(rows):
            self._rows.append(np.array(rows))
            self.num_rows += len(rows)

    def together(self) -> Together:
        """All of them; there has to be one."""
        starts = np.zeros(self.num_rows, bool)
        starts[np.cumsum([0, *map(len, self._rows[:-1])])] = True
        return Together(np.concatenate(self._rows), starts)


@dataclass
class Study:
    """Counts requests as they come, and learns; of rows it keeps those that are simulated.

    Attributes:
        layer_ids: absolute ids of the columns.
        num_experts: E.
        passes: most of them that are simulated; rows are kept for these.
        batch: requests side by side in a pass, in what is learnt from and in what is simulated.
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
        # Of all rows that were not learnt from.
        self.load = np.zeros((len(self.layer_ids), self.num_experts), np.int64)

    def count(self, rows: Rows, valid: Valid | None) -> None:
        """Counts a request for the tables of load and balance."""
        self.stats.add(rows, valid)
        self.requests += 1

    def learn(self, rows: Rows, valid: Valid | None) -> None:
        """Fits the forecast on rows, which are not to be kept, too."""
        whole = _whole(rows, valid)
        self.learnt += len(whole)
        self._to_learn.add(whole)
        if self._to_learn.num_rows >= _LEARN_ROWS:
            self._learn()

    def keep(self, rows: Rows, valid: Valid | None) -> None:
        """Counts a request's load, and keeps rows for the simulation while there is room."""
        whole = _whole(rows, valid)
        self.load += load_of(whole, self.num_experts)
        # No more of one than can be simulated, so that there are others to stand beside it.
        room = self.passes * self.batch - self._kept.num_rows
        self._kept.add(whole[: min(self.passes, room)])

    @property
    def kept(self) -> Together | None:
        """What was kept; None if nothing was."""
        return self._kept.together() if self._kept.num_rows else None

    def forecast(self) -> ExpertForecast | None:
        """What was learnt; None if nothing was."""
        self._learn()
        return self._fit.result() if self.learnt else None

    def _learn(self) -> None:
        """Learns from the requests that wait for others to be beside them."""
        if self._to_learn.num_rows:
            rows, starts = self._to_learn.together()
            ordered, passes = side_by_side(rows, starts, self.batch)
            self._fit.add(ordered, passes=passes)
            self._to_learn = _Requests()


def report_of(study: Study, asked: Asked) -> dict[str, Any]:
    """The report, in JSON's own types.

    Raises:
        InvalidArgument: if what is asked does not fit the model.
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
            report["placement"] = _placements(stats.load, stats.load, asked)
        return report
    report["fitted_on_rows"], report["measured_on_rows"] = study.learnt, len(kept.rows)
    recall = next_layer_recall(kept.rows[:512], forecast, stats.top_k)
    for layer, likely, hot in zip(report["layers"][1:], *recall, strict=True):
        layer |= {"recall_next_layer": round(float(likely), 4), "recall_hot": round(float(hot), 4)}
    report |= _caches(study, kept, forecast, asked)
    if asked.ranks or asked.placement is not None:
        fitted = forecast.frequencies.astype(np.float64)
        report["placement"] = _placements(fitted, study.load, asked)
    return report


def _whole(rows: Rows, valid: Valid | None) -> Rows:
    """The rows of which every cell is there."""
    return rows if valid is None else rows[valid.all(1)]


def load_of(rows: Rows, num_experts: int) -> npt.NDArray[np.int64]:
    """How often each expert was chosen, [L, E]."""
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
    """The pairs of a layer that are chosen together far more often than by chance."""
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
    fitted: npt.NDArray[Any], measured: npt.NDArray[Any], asked: Asked
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


# ---------------------------------------------------------------------------- tables

Table = tuple[str, Sequence[str], list[Sequence[object]]]


def tables_of(report: dict[str, Any]) -> Iterator[Table]:
    """What people see: title, columns, rows; columns that end in a space align to the right."""
    yield (
        f"{report['rows']:,} rows of {report['requests']:,} requests, "
        f"{len(report['layers'])} layers, top-{report['top_k']} of {report['num_experts']}",
        (
            "layer ", "balanced ", "max viol. ", "avg viol. ", "entropy ", "dead ", "top 10% ",
            "overlap ", "next layer ", "by frequency ", "chosen together",
        ),
        [
            (
                layer["layer"],
                f"{layer['balancedness']:.3f}",
                f"{layer['max_violation']:.2f}",
                f"{layer['avg_violation']:.2f}",
                f"{layer['entropy']:.3f}",
                layer["dead"],
                f"{layer['top_share']:.1%}",
                f"{layer['overlap']:.1%}",
                f"{layer['recall_next_layer']:.1%}" if "recall_next_layer" in layer else "-",
                f"{layer['recall_hot']:.1%}" if "recall_hot" in layer else "-",
                ", ".join(
                    f"{p['experts'][0]}+{p['experts'][1]} {p['lift']:.1f}x"
                    for p in layer["together"]
                ),
            )
            for layer in report["layers"]
        ],
    )  # fmt: skip
    if "cache" in report:
        yield from _cache_tables(report)
    if "placement" in report:
        yield (
            "load per rank",
            ("placement", "ranks ", "replicas ", "max / mean ", "balanced ", "worst layer "),
            [
                (
                    row["placement"],
                    row["ranks"],
                    row["replicas"],
                    f"{row['max_over_mean']:.3f}",
                    f"{row['balancedness']:.3f}",
                    f"{row['worst_balancedness']:.3f} ({report['layer_ids'][row['worst_layer']]})",
                )
                for row in report["placement"]
            ],
        )


def _cache_tables(report: dict[str, Any]) -> Iterator[Table]:
    cache = report["cache"]
    names = list(cache["hit_rate"])
    yield (
        f"hit rate of a cache for each layer, {cache['passes']:,} passes of {cache['batch']} "
        f"tokens, {cache['needed']:.1f} experts; fitted on {report['fitted_on_rows']:,} other rows",
        ("slots ", "of experts ", *(f"{name} " for name in names), "copied under lru "),
        [
            (
                capacity,
                f"{capacity / report['num_experts']:.1%}",
                *(f"{cache['hit_rate'][name][at]:.1%}" for name in names),
                f"{cache['moved']['lru'][at]:.2f}" if "lru" in names else "-",
            )
            for at, capacity in enumerate(cache["capacities"])
        ],
    )
    warm = report["warm_start"]
    yield (
        f"the first {warm['passes']} passes",
        ("slots ", "policy", "from empty ", "warm ", "copied ", "copied, warm "),
        [
            (
                cold["capacity"],
                cold["policy"],
                f"{cold['hit_rate']:.1%}",
                f"{filled['hit_rate']:.1%}",
                f"{cold['moved']:.2f}",
                f"{filled['moved']:.2f}",
            )
            for cold, filled in zip(warm["rows"][::2], warm["rows"][1::2], strict=True)
        ],
    )
    if "prefetch" in report:
        yield (
            "the next layer's likeliest experts copied ahead",
            ("slots ", "policy", "ahead ", "hit rate ", "copied ", "of those ahead used "),
            [
                (
                    row["capacity"],
                    row["policy"],
                    row["ahead"],
                    f"{row['hit_rate']:.1%}",
                    f"{row['moved']:.2f}",
                    "-" if row["ahead_used"] is None else f"{row['ahead_used']:.1%}",
                )
                for row in report["prefetch"]
            ],
        )
