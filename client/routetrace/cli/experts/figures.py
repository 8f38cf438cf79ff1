"""Pictures of `routetrace experts`; needs 'routetrace[figures]'."""

from __future__ import annotations

import importlib.util
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from routetrace.cli.files import atomically
from routetrace.common.errors import InvalidArgument

#: Explanation and style of each policy; later ones are thinner, so that equal lines all show.
_POLICIES: dict[str, tuple[str, dict[str, Any]]] = {
    "lru": (
        "lru: evicts the least recently used",
        {"color": "#c1502e", "linewidth": 5, "marker": "o", "markersize": 10},
    ),
    "lfu": (
        "lfu: evicts the least often used",
        {"color": "#e8bb62", "linewidth": 3, "marker": "s", "markersize": 6.5},
    ),
    "hazard": (
        "hazard: evicts the least likely, by traces",
        {"color": "#16503c", "linewidth": 1.4, "marker": "^", "markersize": 4},
    ),
    "belady": (
        "belady: knows the future, an upper bound",
        {"color": "#555555", "linewidth": 1.2, "linestyle": "--", "marker": "x", "markersize": 5},
    ),
}
_DEAD = "#8c8c8c"
# Between the parts of a caption, and characters of one in an inch.
_BETWEEN = "  |  "
_CHARACTERS = 12
# Powers of two that the scale of loads reaches, at most.
_FARTHEST = 6
#: Colours of placements, in their order.
_PLACEMENTS = ("#c1502e", "#d9a441", "#2a7f62", "#555555")


class Source(NamedTuple):
    """Origin of the rows of a report, for the captions."""

    rows: str
    """Run or files that the rows are from, such as "run grpo-17"."""
    model: str
    """Name of the model; "" if unknown, which captions say."""
    day: date
    """Day of the report."""


def check_installed() -> None:
    """Fail early if pictures cannot be drawn.

    Raises:
        InvalidArgument: if matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise InvalidArgument("to draw, pip install matplotlib")


def draw(
    report: dict[str, Any], directory: Path, source: Source, name: str = "experts"
) -> list[Path]:
    """Write a PNG for each part of a report.

    Args:
        report: result of `report_of`.
        directory: output directory; created if necessary.
        source: origin of the rows.
        name: prefix of file names.

    Returns:
        The files: load, and hit rates and ranks if the report has them.

    Raises:
        InvalidArgument: if matplotlib is not installed.
    """
    check_installed()
    directory.mkdir(parents=True, exist_ok=True)
    files = [_save(_load(report, source), directory / f"{name}-load.png")]
    if "cache" in report:
        files.append(_save(_hit_rates(report, source), directory / f"{name}-hit-rate.png"))
    if "placement" in report:
        files.append(_save(_ranks(report, source), directory / f"{name}-ranks.png"))
    return files


def caption(
    report: dict[str, Any], source: Source, title: str, tokens: str, shown: int | None = None
) -> str:
    """Return the title of a figure: its subject, then rows, model, tokens and date.

    Args:
        report: the report.
        source: origin of its rows.
        title: subject.
        tokens: number of tokens, in words.
        shown: layers of the figure; None for all of the report.
    """
    layers = len(report["layer_ids"])
    part = f"{shown} of " if shown not in (None, layers) else ""
    plural = "" if layers == 1 else "s"
    shape = f"{part}{layers} MoE layer{plural}, "
    shape += f"top-{report['top_k']} of {report['num_experts']} experts"
    model = f"{source.model or 'model not named'} ({shape})"
    parts = (source.rows, model, tokens, source.day.isoformat())
    return f"{title}\n{_BETWEEN.join(parts)}"


def _figure(width: float, height: float, parts: int = 1, **options: Any) -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    size = {"figsize": (width, height), "layout": "constrained"}
    figure, axes = pyplot.subplots(1, parts, **size, **options)
    return figure, axes


def _entitle(figure: Any, text: str) -> None:
    """Set a caption; it breaks before the part that would leave the figure."""
    width = int(_CHARACTERS * figure.get_figwidth())
    lines: list[str] = []
    for line in text.split("\n"):
        lines.append("")
        for part in line.split(_BETWEEN):
            longer = f"{lines[-1]}{_BETWEEN}{part}" if lines[-1] else part
            if len(longer) > width and lines[-1]:
                lines.append(part)
            else:
                lines[-1] = longer
    figure.suptitle("\n".join(lines), x=0.01, ha="left", fontsize=10)


def _save(figure: Any, file: Path) -> Path:
    from matplotlib import pyplot

    with atomically(file) as part:
        # No time, no version: equal reports of a day give equal bytes.
        figure.savefig(part, dpi=110, format="png", metadata={"Software": None})
    pyplot.close(figure)
    return file


def _load(report: dict[str, Any], source: Source) -> Any:
    """Draw layers by experts, by id and by descending load."""
    from matplotlib import colormaps
    from matplotlib.patches import Patch

    load = np.array(report["load"], float)
    ratio = load / np.maximum(load.mean(1, keepdims=True), 1e-9)
    used = ratio[ratio > 0]
    layers = report["layer_ids"]
    height = max(2.9, 0.11 * len(layers) + 1.9)
    figure, (left, right) = _figure(11, height, 2, sharey=True)
    # Powers of two on both sides of 1, so that half and double are equally far from neutral; as far
    # as all but 1 in 200 of the loads at the farther end.
    ends = np.abs(np.log2(np.quantile(used, (0.005, 0.995)))) if len(used) else np.ones(1)
    reach = int(np.clip(np.ceil(ends.max()), 1, _FARTHEST))
    colours = colormaps["RdBu_r"].with_extremes(bad=_DEAD)

    def show(axes: Any, values: Any, label: str) -> Any:
        axes.set_xlabel(label)
        return axes.imshow(
            np.ma.log2(np.ma.masked_equal(values, 0)),
            aspect="auto",
            cmap=colours,
            interpolation="nearest",
            vmin=-reach,
            vmax=reach,
        )

    show(left, ratio, "expert, by id")
    shown = show(right, -np.sort(-ratio, axis=1), "expert, most loaded first in each layer")
    ticks = range(-reach, reach + 1)
    below, above = (used < 2.0**-reach).any(), (used > 2.0**reach).any()
    extend = {(0, 0): "neither", (1, 0): "min", (0, 1): "max"}.get((below, above), "both")
    bar = figure.colorbar(shown, ax=[left, right], extend=extend, ticks=list(ticks), aspect=30)
    bar.ax.set_yticklabels([f"1/{2**-tick}" if tick < 0 else f"{2**tick}" for tick in ticks])
    bar.set_label("load / mean of its layer (1: even)")
    step = max(1, len(layers) // 12)
    left.set_yticks(range(0, len(layers), step), layers[::step])
    left.set_ylabel("layer")
    dead = int((load == 0).sum())
    if dead:
        words = f"dead: no token chose it ({dead:,} of {load.size:,})"
        patch = Patch(facecolor=_DEAD, label=words)
        figure.legend(handles=[patch], loc="outside lower center", frameon=False)
    _entitle(figure, caption(report, source, "Load of each expert", f"{report['rows']:,} tokens"))
    return figure


def _hit_rates(report: dict[str, Any], source: Source) -> Any:
    cache = report["cache"]
    figure, (left, right) = _figure(10, 4.4, 2)
    shares = [100 * capacity / report["num_experts"] for capacity in cache["capacities"]]
    for name in cache["hit_rate"]:
        words, style = _POLICIES[name]
        left.plot(shares, [100 * rate for rate in cache["hit_rate"][name]], label=words, **style)
        right.plot(shares, cache["moved"][name], **style)
    for axes, label in ((left, "hit rate, %"), (right, "experts copied per pass and layer")):
        axes.set_xlabel("slots of a layer's cache, % of its experts")
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False)
    tokens = f"{cache['passes']:,} passes"
    tokens += f" of {cache['batch']} tokens" if cache["batch"] > 1 else " of one token"
    layers = len(report.get("cached_layers", report["layer_ids"]))
    _entitle(figure, caption(report, source, "Caches of expert weights", tokens, layers))
    return figure


def _ranks(report: dict[str, Any], source: Source) -> Any:
    """Draw the most loaded rank of each layer: by layer, and spread out by placement."""
    rows, layers = report["placement"], report["layer_ids"]
    most = np.array([np.array(row["rank_share"]).max(1) * row["ranks"] for row in rows])
    figure, (left, right) = _figure(
        11, 2.1 + 0.55 * len(rows), 2, sharey=True, width_ratios=(1.5, 1)
    )
    shown = left.imshow(most, aspect="auto", cmap="Reds", interpolation="nearest", vmin=1)
    figure.colorbar(shown, ax=left, label="most loaded / mean", aspect=12)
    names = []
    for row, values in zip(rows, most, strict=True):
        extra = f", {row['replicas']} replicas" if row["replicas"] else ""
        extra += f", {row['ranks']} ranks" if row["ranks"] != rows[0]["ranks"] else ""
        names.append(f"{row['placement']}{extra}\nmean {values.mean():.2f}")
    left.set_yticks(range(len(rows)), names)
    step = max(1, len(layers) // 12)
    left.set_xticks(range(0, len(layers), step), layers[::step])
    left.set_xlabel("layer")
    for at, values in enumerate(most):
        colour = _PLACEMENTS[at % len(_PLACEMENTS)]
        # Apart, so that equal layers show each other; the same in each run.
        beside = at + 0.22 * np.sin(2.4 * np.arange(len(values)))
        right.plot(values, beside, "o", color=colour, alpha=0.5, markersize=5)
        right.plot([values.mean()] * 2, [at - 0.36, at + 0.36], color="black", linewidth=2)
    right.axvline(1, color="black", linewidth=0.8)
    right.tick_params(left=False)
    right.set_xlabel("most loaded rank / mean (1: even)\ndot: one layer; bar: mean of the layers")
    right.grid(axis="x", alpha=0.3)
    title = f"Load of {rows[0]['ranks']} ranks, by placement of the experts"
    _entitle(figure, caption(report, source, title, f"{rows[0]['rows']:,} tokens"))
    return figure
