"""Pictures of `routetrace experts`; needs 'routetrace[figures]'."""

from __future__ import annotations

import importlib.util
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from routetrace.cli.files import atomically
from routetrace.common.errors import InvalidArgument

#: Colour and explanation of each policy.
_POLICIES = {
    "lru": ("#c1502e", "lru: evicts the least recently used"),
    "lfu": ("#d9a441", "lfu: evicts the least often used"),
    "hazard": ("#2a7f62", "hazard: evicts the least likely, by traces"),
    "belady": ("#555555", "belady: knows the future, an upper bound"),
}


class Source(NamedTuple):
    """Origin of the rows of a report, for the captions."""

    rows: str
    """Run or files that the rows are from, such as "run grpo-17"."""
    model: str
    """Name of the model; "" if unknown."""
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


def caption(report: dict[str, Any], source: Source, title: str, tokens: str, layers: int) -> str:
    """Return the title of a figure: its subject, then rows, model, tokens and date."""
    shape = f"{layers} MoE layers, top-{report['top_k']} of {report['num_experts']} experts"
    model = f"{source.model} ({shape})" if source.model else shape
    return f"{title}\n{source.rows}  |  {model}  |  {tokens}  |  {source.day.isoformat()}"


def _figure(width: float, height: float, parts: int = 1, **options: Any) -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    size = {"figsize": (width, height), "layout": "constrained"}
    figure, axes = pyplot.subplots(1, parts, **size, **options)
    return figure, axes


def _entitle(figure: Any, text: str) -> None:
    figure.suptitle(text, x=0.01, ha="left", fontsize=10)


def _save(figure: Any, file: Path) -> Path:
    from matplotlib import pyplot

    with atomically(file) as part:
        # No time, no version: equal reports of a day give equal bytes.
        figure.savefig(part, dpi=110, format="png", metadata={"Software": None})
    pyplot.close(figure)
    return file


def _load(report: dict[str, Any], source: Source) -> Any:
    """Draw layers by experts, by id and by descending load."""
    load = np.array(report["load"], float)
    ratio = load / np.maximum(load.mean(1, keepdims=True), 1e-9)
    layers = report["layer_ids"]
    height = max(2.9, 0.11 * len(layers) + 1.9)
    figure, (left, right) = _figure(11, height, 2, sharey=True)
    # Powers of two on both sides of 1, so that half and double are equally far from neutral.
    reach = int(np.clip(np.ceil(np.log2(max(np.quantile(ratio, 0.995), 1))), 1, 4))

    def show(axes: Any, values: Any, label: str) -> Any:
        axes.set_xlabel(label)
        return axes.imshow(
            np.log2(np.maximum(values, 2.0 ** (-reach - 1))),
            aspect="auto",
            cmap="RdBu_r",
            interpolation="nearest",
            vmin=-reach,
            vmax=reach,
        )

    show(left, ratio, "expert, by id")
    shown = show(right, -np.sort(-ratio, axis=1), "expert, most loaded first in each layer")
    ticks = range(-reach, reach + 1)
    bar = figure.colorbar(shown, ax=[left, right], extend="both", ticks=list(ticks), aspect=30)
    bar.ax.set_yticklabels([f"1/{2**-tick}" if tick < 0 else f"{2**tick}" for tick in ticks])
    bar.set_label("load / mean (1: even)")
    step = max(1, len(layers) // 12)
    left.set_yticks(range(0, len(layers), step), layers[::step])
    left.set_ylabel("layer")
    tokens = f"{report['rows']:,} tokens"
    _entitle(figure, caption(report, source, "Load of each expert", tokens, len(layers)))
    return figure


def _hit_rates(report: dict[str, Any], source: Source) -> Any:
    cache = report["cache"]
    figure, (left, right) = _figure(10, 4.4, 2)
    shares = [100 * capacity / report["num_experts"] for capacity in cache["capacities"]]
    for name in cache["hit_rate"]:
        colour, words = _POLICIES[name]
        style = {"color": colour, "marker": "o", "markersize": 3, "label": words}
        left.plot(shares, [100 * rate for rate in cache["hit_rate"][name]], **style)
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
    rows = report["placement"]
    figure, axes = _figure(10, 3.8)
    for row in rows:
        most = np.array(row["rank_share"]).max(1) * row["ranks"]
        extra = f", {row['replicas']} replicas" if row["replicas"] else ""
        axes.plot(report["layer_ids"], most, marker=".", label=f"{row['placement']}{extra}")
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xlabel("layer")
    axes.set_ylabel("most loaded rank / mean (1: even)")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=4, frameon=False)
    title = f"Load of {rows[0]['ranks']} ranks, by placement of the experts"
    tokens = f"{rows[0]['rows']:,} tokens"
    _entitle(figure, caption(report, source, title, tokens, len(report["layer_ids"])))
    return figure
