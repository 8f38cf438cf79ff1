"""The goals of the table as a picture: how far each line is from its goal."""

# Not installed where types are checked.
# pyright: reportMissingImports=false
from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

_MET, _MISSED, _GREY = "#2a7f62", "#c1502e", "#666666"
# Bars end here on both sides; longer ones would leave the others without length.
_REACH = 16
# Inches: a line, a heading of an area, the head and the foot of the picture.
_LINE, _HEADING, _HEAD, _FOOT = 0.36, 0.5, 1.75, 0.55
_WIDTH, _LEFT, _RIGHT = 11.5, 4.45, 1.95
_HOW = """\
Each line is a goal that the project set itself. A green bar is that many times better than the
goal, a red bar misses it. Grey: the rival or limit beside which a line is measured; the value is
a ratio, ours / theirs (x), or has its unit. Time, CPU, bytes and memory should be small (goal:
at most), throughput large (at least). benchmarks/README.md explains each line."""


def draw(results: Mapping[str, Any], areas: Mapping[str, str], file: Path) -> None:
    """Write a bar for each line that has a goal, by area.

    Args:
        results: content of results.json.
        areas: titles, by area.
        file: a PNG.
    """
    judged = [row for row in results["rows"] if row["goal"]]
    shown = [area for area in areas if any(row["area"] == area for row in judged)]
    height = _HEAD + _FOOT + _LINE * len(judged) + _HEADING * len(shown)
    figure = pyplot.figure(figsize=(_WIDTH, height))
    inside = 1 - (_HEAD + _FOOT) / height
    across = 1 - (_LEFT + _RIGHT) / _WIDTH
    axes = figure.add_axes((_LEFT / _WIDTH, _FOOT / height, across, inside))
    axes.set_ylim(inside * height, 0)  # in inches, from the top
    axes.set_xscale("log", base=2)
    axes.set_xlim(1 / _REACH / 1.15, _REACH * 1.15)
    at = 0.0
    for area in shown:
        _text(axes, -_LEFT + 0.1, at + 0.34, areas[area], weight="bold", fontsize=10)
        at += _HEADING
        for row in (row for row in judged if row["area"] == area):
            _line(axes, at + _LINE / 2, row)
            at += _LINE
    _frame(axes)
    left = 0.1 / _WIDTH
    met = sum(row["met"] for row in judged)
    title = f"routetrace against its goals: {met} of {len(judged)} met"
    figure.text(left, 1 - 0.3 / height, title, fontsize=14, weight="bold")
    figure.text(left, 1 - 0.52 / height, _origin(results), fontsize=8.5, color=_GREY)
    figure.text(left, 1 - 0.62 / height, _HOW, fontsize=8.5, va="top")
    figure.savefig(file, dpi=100)
    pyplot.close(figure)


def _line(axes: Any, at: float, row: Mapping[str, Any]) -> None:
    """Draw a line of the table: its name, what it is compared with, a bar, value and goal."""
    share = _share(row)
    length = min(max(share, 1 / _REACH), _REACH)
    colour = _MET if row["met"] else _MISSED
    axes.barh(at, length - 1, left=1, height=0.2, color=colour)
    if length != share:
        mark = ">" if share > 1 else "<"
        axes.plot(length, at, marker=mark, color=colour, markersize=9, clip_on=False)
    _text(axes, -_LEFT + 0.1, at - 0.07, row["name"], fontsize=8.5)
    _text(axes, -_LEFT + 0.1, at + 0.09, row["against"], fontsize=7.5, color=_GREY)
    width = _WIDTH - _LEFT - _RIGHT
    sign, limit = row["goal"].split()
    bound = f"{'at most' if sign == '<=' else 'at least'} {limit}"
    _text(axes, width + 0.1, at, f"{row['value']:.3g} {row['unit']}", fontsize=8.5, color=colour)
    _text(axes, width + 1.08, at, bound, fontsize=8.5)


def _frame(axes: Any) -> None:
    """Draw the scale above and below, and the headings of the columns."""
    axes.axvline(1, color="black", linewidth=1)
    ticks = [1 / 16, 1 / 8, 1 / 4, 1 / 2, 1, 2, 4, 8, 16]
    names = ["1/16", "1/8", "1/4", "1/2", "goal", "2", "4", "8", "16"]
    axes.set_xticks(ticks, names, fontsize=8.5)
    axes.minorticks_off()
    axes.tick_params(axis="x", top=True, labeltop=True, length=3)
    axes.grid(axis="x", alpha=0.25)
    axes.set_axisbelow(True)
    axes.set_yticks([])
    for side in axes.spines.values():
        side.set_visible(False)
    axes.set_xlabel("times better than the goal", fontsize=8.5)
    width = _WIDTH - _LEFT - _RIGHT
    for offset, words in ((0.1, "measured"), (1.08, "goal")):
        _text(axes, width + offset, -0.12, words, fontsize=8.5, weight="bold")


def _text(axes: Any, x: float, y: float, words: str, **style: Any) -> None:
    """Write words at inches from the left of the axes and from their top."""
    across = x / (_WIDTH - _LEFT - _RIGHT)
    axes.text(across, y, words, transform=axes.get_yaxis_transform(), va="center", **style)


def _origin(results: Mapping[str, Any]) -> str:
    """Return version, date and machine of the run."""
    machine = results["machine"]
    packages = (f"{name} {machine[name]}" for name in ("python", "grpcio", "numpy", "zstandard"))
    return (
        f"routetrace {results['version']}, {results['date']}, {machine['cpus']} cores, "
        f"{machine['memory_gib']} GiB, {', '.join(packages)}"
    )


def _share(row: Mapping[str, Any]) -> float:
    """Return the ratio by which a row beats its goal; a hundred at most."""
    sign, limit = row["goal"].split()
    share = max(row["value"] / float(limit), 0.01)
    return float(1 / share if sign == "<=" else share)
