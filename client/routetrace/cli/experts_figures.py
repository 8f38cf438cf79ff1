"""The report of `routetrace experts` as pictures; pip install 'routetrace[figures]'."""

# Not installed where types are checked.
# pyright: reportMissingImports=false
from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np

from routetrace.cli.files import atomically
from routetrace.v1.errors import InvalidArgument

#: By policy: the colour of its curve.
_COLOURS = {"lru": "#c1502e", "lfu": "#d9a441", "hazard": "#2a7f62", "belady": "#555555"}


def check_installed() -> None:
    """Says before anything is read that nothing can be drawn.

    Raises:
        InvalidArgument: if matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise InvalidArgument("to draw, pip install 'routetrace[figures]' (matplotlib)")


def draw(report: dict[str, Any], directory: Path, name: str = "experts") -> list[Path]:
    """Writes a PNG for each part of a report.

    Args:
        report: of `report_of`.
        directory: where to; made if it is not there.
        name: how the names of the files begin.

    Returns:
        The files: load, and, where the report has them, hit rates and ranks.

    Raises:
        InvalidArgument: if matplotlib is not installed.
    """
    check_installed()
    directory.mkdir(parents=True, exist_ok=True)
    files = [_save(_load(report), directory / f"{name}-load.png")]
    if "cache" in report:
        files.append(_save(_hit_rates(report), directory / f"{name}-hit-rate.png"))
    if "placement" in report:
        files.append(_save(_ranks(report), directory / f"{name}-ranks.png"))
    return files


def _figure(width: float, height: float, parts: int = 1, **options: Any) -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, parts, figsize=(width, height), **options)
    return figure, axes


def _save(figure: Any, file: Path) -> Path:
    from matplotlib import pyplot

    figure.tight_layout()
    with atomically(file) as part:
        # No date, no version: the same report gives the same bytes.
        figure.savefig(part, dpi=110, format="png", metadata={"Software": None})
    pyplot.close(figure)
    return file


def _load(report: dict[str, Any]) -> Any:
    """Layers by experts; within a layer the most loaded first, so that skew is seen at a glance."""
    load = np.array(report["load"], float)
    violation = load / np.maximum(load.sum(1, keepdims=True), 1) * report["num_experts"]
    ordered = -np.sort(-violation, axis=1)
    layers = report["layer_ids"]
    height = max(2.4, 0.11 * len(layers) + 1.4)
    figure, (left, right) = _figure(11, height, 2, sharey=True, width_ratios=[1, 1])
    for axes, values, label in (
        (left, violation, "expert"),
        (right, ordered, "expert, most loaded first"),
    ):
        style = {"aspect": "auto", "cmap": "viridis", "interpolation": "nearest"}
        shown = axes.imshow(values, vmin=0, vmax=max(2.0, np.quantile(values, 0.995)), **style)
        axes.set_xlabel(label)
        figure.colorbar(shown, ax=axes, label="share x E (1: even)")
    step = max(1, len(layers) // 12)
    left.set_yticks(range(0, len(layers), step), layers[::step])
    left.set_ylabel("layer")
    return figure


def _hit_rates(report: dict[str, Any]) -> Any:
    cache = report["cache"]
    figure, (left, right) = _figure(10, 3.6, 2)
    shares = [100 * capacity / report["num_experts"] for capacity in cache["capacities"]]
    for name in cache["hit_rate"]:
        style = {"color": _COLOURS.get(name), "marker": "o", "markersize": 3, "label": name}
        left.plot(shares, [100 * rate for rate in cache["hit_rate"][name]], **style)
        right.plot(shares, cache["moved"][name], **style)
    for axes, label in ((left, "hit rate, %"), (right, "experts copied per pass and layer")):
        axes.set_xlabel("slots, % of the layer's experts")
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
    return figure


def _ranks(report: dict[str, Any]) -> Any:
    rows = report["placement"]
    figure, axes = _figure(10, 3.2)
    for row in rows:
        share = np.array(row["rank_share"])
        most = share.max(1) * row["ranks"]
        axes.plot(report["layer_ids"], most, marker=".", label=f"{row['placement']}")
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xlabel("layer")
    axes.set_ylabel("most loaded rank / mean")
    axes.legend(frameon=False)
    axes.grid(alpha=0.3)
    return figure
