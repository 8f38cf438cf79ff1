"""Tables of a report of `routetrace experts`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import Any

#: Title, columns, rows; columns whose name ends in a space align to the right.
Table = tuple[str, Sequence[str], list[Sequence[object]]]


#: Measures of a layer: key in the report, name, format.
_MEASURES = (
    ("balancedness", "balanced", ".3f"),
    ("max_violation", "max violation", ".2f"),
    ("avg_violation", "avg violation", ".2f"),
    ("entropy", "entropy", ".3f"),
    ("dead", "dead experts", ".0f"),
    ("top_share", "top 10%", ".1%"),
    ("overlap", "overlap", ".1%"),
    ("recall_next_layer", "next layer", ".1%"),
    ("recall_hot", "by frequency", ".1%"),
)


def tables_of(report: dict[str, Any], *, full: bool = False) -> Iterator[Table]:
    """Yield the tables of a report.

    Args:
        report: the report.
        full: all layers and capacities; else one screen of 80 columns.
    """
    title = (
        f"{report['rows']:,} rows of {report['requests']:,} requests, "
        f"{len(report['layers'])} layers, top-{report['top_k']} of {report['num_experts']}"
    )
    yield _layers_table(report, title) if full else _measures_table(report, title)
    if "cache" in report:
        yield from _cache_tables(report, full)
    if "placement" in report:
        yield _placement_table(report)


def _measures_table(report: dict[str, Any], title: str) -> Table:
    """Return the mean and the extremes of each measure over the layers."""
    rows: list[Sequence[object]] = []
    for key, name, form in _MEASURES:
        found = [(layer[key], layer["layer"]) for layer in report["layers"] if key in layer]
        if found:
            mean = sum(value for value, _ in found) / len(found)
            low, low_layer = min(found, key=itemgetter(0))  # the first of several
            high, high_layer = max(found, key=itemgetter(0))
            shown = (format(value, form) for value in (mean, low, high))
            middle, lowest, highest = shown
            rows.append((name, middle, lowest, low_layer, highest, high_layer))
    columns = ("over layers", "mean ", "lowest ", "at layer ", "highest ", "at layer ")
    return title, columns, rows


def _layers_table(report: dict[str, Any], title: str) -> Table:
    return (
        title,
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


def _placement_table(report: dict[str, Any]) -> Table:
    return (
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


def _cache_tables(report: dict[str, Any], full: bool) -> Iterator[Table]:
    cache = report["cache"]
    # One capacity stands for all: that nearest to a quarter of the experts.
    quarter = min(cache["capacities"], key=lambda slots: abs(4 * slots - report["num_experts"]))
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
            if full or cold["capacity"] == quarter
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
                if full or (row["capacity"] == quarter and row["ahead"])
            ],
        )
