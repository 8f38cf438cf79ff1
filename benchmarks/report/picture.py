"""The goals of the table as a picture: how far each line is from its goal."""

# Not installed where types are checked.
# pyright: reportMissingImports=false
from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from textwrap import fill
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

from report import words

_MET, _MISSED, _GREY = "#2a7f62", "#c1502e", "#666666"
# The scale ends here on both sides; longer bars would leave the others without length.
_REACH = 16
# Inches: a line, the heading of an area, and the picture with its margins.
_LINE, _AREA, _FOOT = 0.315, 0.27, 0.55
_WIDTH, _LEFT, _RIGHT = 12.5, 5.5, 4.2
# Columns behind the bars: inches from the end of the axes, heading.
_COLUMNS = ((0.12, "measured"), (1.1, "0.7.0"), (2.0, "goal"), (3.1, "from the goal"))
# Characters in the width of a picture, at the size of its explanation.
_CHARACTERS = 200
_HOW = (
    "A line is a goal that the project set itself. Green and to the right: better than the goal, "
    "by as many times as the scale says; red and to the left: the goal is missed. An arrow: "
    "farther than the scale. x, %: a multiple or a share of the rival that the grey words name, in "
    "the same run. Small is good for time, CPU and bytes (at most), large for tokens (at least)."
)


def draw(results: Mapping[str, Any], areas: Mapping[str, str], file: Path) -> None:
    """Write the picture.

    Args:
        results: content of results.json.
        areas: titles, by area.
        file: a PNG.
    """
    judged = [row for row in results["rows"] if row["goal"]]
    by_area = {area: [row for row in judged if row["area"] == area] for area in areas}
    by_area = {area: rows for area, rows in by_area.items() if rows}
    met = sum(row["met"] for row in judged)
    title = f"routetrace {results['version']} against its goals: {met} of {len(judged)} met"
    figure, axes = _figure(title, _origin(results), _AREA * len(by_area) + _LINE * len(judged))
    for offset, heading in _COLUMNS:
        _text(axes, _across(axes) + offset, -0.14, heading, weight="bold")
    at = 0.0
    for area, rows in by_area.items():
        _text(axes, -_LEFT + 0.1, at + _AREA / 2, areas[area], fontsize=9.5, weight="bold")
        at += _AREA
        for row in rows:
            _line(axes, at + _LINE / 2, row)
            at += _LINE
    # No version of matplotlib: the same results give the same bytes.
    figure.savefig(file, dpi=100, metadata={"Software": None})
    pyplot.close(figure)


def _figure(title: str, origin: str, inside: float) -> tuple[Any, Any]:
    """Return a figure with its head, and axes of a height in inches."""
    how = fill(_HOW, _CHARACTERS)
    head = 1.05 + 0.165 * (how.count("\n") + 1)
    height = head + inside + _FOOT
    figure = pyplot.figure(figsize=(_WIDTH, height))
    across = 1 - (_LEFT + _RIGHT) / _WIDTH
    place = (_LEFT / _WIDTH, _FOOT / height, across, inside / height)
    axes = figure.add_axes(place)
    axes.set_ylim(inside, 0)  # in inches, from the top
    axes.set_xscale("log", base=2)
    axes.set_xlim(1 / _REACH / 1.25, _REACH * 1.25)
    axes.axvspan(1, _REACH * 1.25, color=_MET, alpha=0.06, linewidth=0)
    axes.axvspan(1 / _REACH / 1.25, 1, color=_MISSED, alpha=0.06, linewidth=0)
    axes.axvline(1, color="black", linewidth=1)
    ticks = [1 / 16, 1 / 4, 1, 4, 16]
    names = ["16 times\nworse", "4 times\nworse", "goal", "4 times\nbetter", "16 times\nbetter"]
    axes.set_xticks(ticks, names, fontsize=8)
    axes.minorticks_off()
    axes.tick_params(axis="x", length=3)
    axes.grid(axis="x", alpha=0.25)
    axes.set_axisbelow(True)
    axes.set_yticks([])
    for side in axes.spines.values():
        side.set_visible(False)
    left = 0.1 / _WIDTH
    figure.text(left, 1 - 0.32 / height, title, fontsize=14, weight="bold")
    figure.text(left, 1 - 0.53 / height, origin, fontsize=8.5, color=_GREY)
    figure.text(left, 1 - 0.64 / height, how, fontsize=8.5, va="top", linespacing=1.25)
    return figure, axes


def _line(axes: Any, at: float, row: Mapping[str, Any]) -> None:
    """Draw a line of the table: its words, a bar, values, goal and distance."""
    share = words.share_of(row)
    length = min(max(share, 1 / _REACH), _REACH)
    colour = _MET if row["met"] else _MISSED
    axes.plot([1, length], [at, at], color=colour, linewidth=4, solid_capstyle="butt")
    mark = "o" if length == share else ">" if share > 1 else "<"
    axes.plot(length, at, marker=mark, color=colour, markersize=7, clip_on=False)
    said = words.words_of(row)
    _text(axes, -_LEFT + 0.1, at - 0.08, said.name, fontsize=9)
    _text(axes, -_LEFT + 0.1, at + 0.08, said.explained, fontsize=7.5, color=_GREY)
    cells = (words.measured(row), words.before(row), words.goal(row), words.distance(row))
    colours = (colour, _GREY, "black", colour)
    for (offset, _), cell, shade in zip(_COLUMNS, cells, colours, strict=True):
        _text(axes, _across(axes) + offset, at, cell, color=shade)


def _text(axes: Any, x: float, y: float, said: str, **style: Any) -> None:
    """Write words at inches from the left of the axes and from their top."""
    style = {"fontsize": 8.5, "va": "center", **style}
    axes.text(x / _across(axes), y, said, transform=axes.get_yaxis_transform(), **style)


def _across(axes: Any) -> float:
    """Return the width of axes in inches."""
    return float(axes.get_position().width) * _WIDTH


def _origin(results: Mapping[str, Any]) -> str:
    """Return date and machine of the run."""
    machine = results["machine"]
    packages = (f"{name} {machine[name]}" for name in ("python", "grpcio", "numpy", "zstandard"))
    return (
        f"Measured {results['date']} on a machine with {machine['cpus']} cores and "
        f"{machine['memory_gib']} GiB; {', '.join(packages)}. benchmarks/README.md explains more."
    )
