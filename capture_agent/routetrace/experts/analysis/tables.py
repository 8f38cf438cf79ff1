"""Tables of a report of `routetrace experts`: a summary of one screen, or all layers.

No table is wider than 79 columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import Any

from routetrace.common.errors import counted

#: Title, which may be empty, columns, rows; columns whose name ends in a space align to the right.
Table = tuple[str, Sequence[str], list[Sequence[object]]]


#: Measures of a layer in the summary: key in the report, name, format.
_MEASURES = (
    ("balancedness", "balanced", ".3f"),
    ("max_violation", "max violation", ".2f"),
    ("dead", "dead experts", ".0f"),
    ("top_share", "top 10%", ".1%"),
    ("overlap", "overlap", ".1%"),
    ("recall_next_layer", "next layer", ".1%"),
)
#: Capacities of the summary: those nearest to these shares of the experts.
_SHARES = (1 / 8, 1 / 4, 1 / 2)


def tables_of(report: dict[str, Any], *, full: bool = False) -> Iterator[Table]:
    """Yield the tables of a report.

    Args:
        report: the report.
        full: all measures, layers and capacities; else at most 21 lines.
    """
    title = (
        f"{counted(report['rows'], 'row')} of {counted(report['requests'], 'request')}, "
        f"{counted(len(report['layers']), 'layer')}, "
        f"top-{report['top_k']} of {report['num_experts']} experts"
    )
    if not full:
        yield _measures_table(report, title)
        if "cache" in report:
            yield _cache_summary(report)
        if "placement" in report:
            yield _placement_summary(report)
        return
    yield from _layers_tables(report, title)
    if "cache" in report:
        yield from _cache_tables(report)
    if "placement" in report:
        yield _placement_table(report)


def _measures_table(report: dict[str, Any], title: str) -> Table:
    """Return the mean and the extremes of each measure over the layers."""
    frequency = [layer["recall_hot"] for layer in report["layers"] if "recall_hot" in layer]
    beside = {"overlap": f" (by chance {report['top_k'] / report['num_experts']:.1%})"}
    if frequency:
        mean = sum(frequency) / len(frequency)
        beside["recall_next_layer"] = f" (by frequency {mean:.1%})"
    rows: list[Sequence[object]] = []
    for key, name, form in _MEASURES:
        found = [(layer[key], layer["layer"]) for layer in report["layers"] if key in layer]
        if found:
            mean = sum(value for value, _ in found) / len(found)
            low, low_layer = min(found, key=itemgetter(0))  # the first of several
            high, high_layer = max(found, key=itemgetter(0))
            middle, lowest, highest = (format(value, form) for value in (mean, low, high))
            rows.append(
                (name + beside.get(key, ""), middle, lowest, low_layer, highest, high_layer)
            )
    columns = ("over layers", "mean ", "lowest ", "at layer ", "highest ", "at layer ")
    return title, columns, rows


def _cache_summary(report: dict[str, Any]) -> Table:
    """Return hit rates at some capacities, and the rest at the one nearest to a quarter."""
    cache, experts = report["cache"], report["num_experts"]
    slots = cache["capacities"]
    shown = {_nearest(slots, share * experts) for share in _SHARES}
    quarter = _nearest(slots, experts / 4)
    names = list(cache["hit_rate"])
    of_quarter = _slots(quarter)

    def line(words: str, values: dict[str, str]) -> tuple[str, ...]:
        return (words, *(values.get(name, "-") for name in names))

    def rates(rows: list[dict[str, Any]], **wanted: object) -> dict[str, str]:
        return {row["policy"]: f"{row['hit_rate']:.1%}" for row in _at(rows, quarter, wanted)}

    rows: list[Sequence[object]] = []
    for capacity in sorted(shown):
        at = slots.index(capacity)
        found = {name: f"{cache['hit_rate'][name][at]:.1%}" for name in names}
        rows.append(line(f"{_slots(capacity)} ({capacity / experts:.0%})", found))
    warm = report["warm_start"]
    start = f"{of_quarter}, first {_passes(warm['passes'])}"
    rows.append(line(start, rates(warm["rows"], warm=False)))
    rows.append(line("  the same, warm start", rates(warm["rows"], warm=True)))
    moved = {name: f"{cache['moved'][name][slots.index(quarter)]:.2f}" for name in names}
    copied = [line(f"{of_quarter}, copied a pass", moved)]
    ahead = [row for row in report.get("prefetch", ()) if row["ahead"]]
    if ahead:
        number = ahead[0]["ahead"]
        rows.append(line(f"{of_quarter}, {number} copied ahead", rates(ahead)))
        moved = {row["policy"]: f"{row['moved']:.2f}" for row in _at(ahead, quarter, {})}
        copied.append(line(f"  the same, {number} ahead", moved))
    title = f"hit rate, {_passes(cache['passes'], cache['batch'])}"
    return "", (title, *(f"{name} " for name in names)), rows + copied


def _nearest(slots: Sequence[int], wanted: float) -> int:
    return min(slots, key=lambda count: abs(count - wanted))


def _at(
    rows: list[dict[str, Any]], capacity: int, wanted: dict[str, object]
) -> Iterator[dict[str, Any]]:
    """Yield the rows of a capacity that have these values."""
    for row in rows:
        if row["capacity"] == capacity and all(row[key] == wanted[key] for key in wanted):
            yield row


def _placement_summary(report: dict[str, Any]) -> Table:
    """Return the load of the most loaded rank, by placement."""
    rows = report["placement"]
    ranks = rows[0]["ranks"]
    names = []
    for row in rows:
        name = row["placement"]
        if row["ranks"] != ranks:
            name += f", {counted(row['ranks'], 'rank')}"
        if row["replicas"]:
            name += f", {counted(row['replicas'], 'replica')}"
        names.append(f"{name} ")
    loads = [f"{row['max_over_mean']:.3f}" for row in rows]
    return "", (f"load of {counted(ranks, 'rank')}", *names), [("most loaded / mean", *loads)]


def _layers_tables(report: dict[str, Any], title: str) -> Iterator[Table]:
    """Yield all measures of each layer, in two tables: one would be too wide."""
    yield (
        title,
        ("layer ", "balanced ", "max violation ", "avg violation ", "entropy ", "dead experts ",
         "top 10% "),
        [
            (
                layer["layer"],
                f"{layer['balancedness']:.3f}",
                f"{layer['max_violation']:.2f}",
                f"{layer['avg_violation']:.2f}",
                f"{layer['entropy']:.3f}",
                layer["dead"],
                f"{layer['top_share']:.1%}",
            )
            for layer in report["layers"]
        ],
    )  # fmt: skip
    yield (
        "the next token, the next layer, and pairs of experts",
        ("layer ", "overlap ", "next layer ", "by frequency ", "chosen together"),
        [
            (
                layer["layer"],
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
    )


def _placement_table(report: dict[str, Any]) -> Table:
    return (
        "load per rank",
        ("placement", "ranks ", "replicas ", "max / mean ", "balanced ", "worst ", "at layer "),
        [
            (
                row["placement"],
                row["ranks"],
                row["replicas"],
                f"{row['max_over_mean']:.3f}",
                f"{row['balancedness']:.3f}",
                f"{row['worst_balancedness']:.3f}",
                report["layer_ids"][row["worst_layer"]],
            )
            for row in report["placement"]
        ],
    )


def _cache_tables(report: dict[str, Any]) -> Iterator[Table]:
    cache = report["cache"]
    names = list(cache["hit_rate"])
    yield (
        f"hit rate of a cache for each layer, {_passes(cache['passes'], cache['batch'])}, "
        f"{cache['needed']:.1f} experts in each; "
        f"fitted on {counted(report['fitted_on_rows'], 'other row')}",
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
        f"the first {_passes(warm['passes'])}",
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


def _slots(capacity: int) -> str:
    return counted(capacity, "slot")


def _passes(number: int, batch: int = 1) -> str:
    passes = f"{number:,} pass" if number == 1 else f"{number:,} passes"
    return passes if batch == 1 else f"{passes} of {batch} tokens"
