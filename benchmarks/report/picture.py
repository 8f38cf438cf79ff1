"""The goals of the table as pictures: how far each line is from its goal.

One picture has all areas, a dot for each line; one for each area has its lines, with words.
"""

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
# Inches: a line, an area of the overview, and the picture with its margins.
_LINE, _AREA, _FOOT = 0.37, 0.62, 0.6
_WIDTH, _LEFT, _RIGHT, _MARGIN = 12.5, 5.5, 4.2, 0.5
# Columns behind the bars: inches from the end of the axes, heading.
_COLUMNS = ((0.12, "measured"), (1.1, "goal"), (2.4, "from the goal"), (3.6, "version"))
# Characters in the width of a picture, at the size of its explanation.
_CHARACTERS = 200
_HOW = (
    "A {} is a goal that the project set itself. Green and to the right: better than the goal, by "
    "as many times as the scale says; red and to the left: the goal is missed. An arrow: farther "
    "than the scale. "
)
_OVERVIEW = (
    "How high a dot lies in its area means nothing. Each area has a picture with names and values."
)
_RATIO = (
    "x, %: ours as a multiple or share of what the grey words name, in the same run. Small is good "
    "for time, CPU, bytes, memory (at most), large for throughput (at least)."
)


def draw(results: Mapping[str, Any], areas: Mapping[str, str], file: Path) -> list[Path]:
    """Write the picture of all areas, and in a folder of its name one for each area.

    Args:
        results: content of results.json.
        areas: titles, by area.
        file: a PNG.

    Returns:
        The files.
    """
    judged = [row for row in results["rows"] if row["goal"]]
    by_area = {area: [row for row in judged if row["area"] == area] for area in areas}
    by_area = {area: rows for area, rows in by_area.items() if rows}
    origin = _origin(results)
    met = sum(row["met"] for row in judged)
    title = f"routetrace against its goals: {met} of {len(judged)} met"
    how = _HOW.format("dot") + _OVERVIEW
    figure, axes = _figure(title, origin, how, _AREA * len(by_area), _MARGIN)
    for at, (area, rows) in enumerate(by_area.items()):
        y = (at + 0.5) * _AREA
        _text(axes, -_LEFT + 0.1, y - 0.09, areas[area], fontsize=10, weight="bold")
        versions = " and ".join(sorted({row["version"] for row in rows}))
        count = f"{sum(row['met'] for row in rows)} of {len(rows)} met"
        _text(axes, -_LEFT + 0.1, y + 0.11, f"{count}; routetrace {versions}", color=_GREY)
        for number, row in enumerate(sorted(rows, key=words.share_of)):
            _bar(axes, y + 0.17 * (number % 3 - 1), row, stem=False)
    files = [_save(figure, file)]
    folder = file.with_suffix("")
    folder.mkdir(exist_ok=True)
    for area, rows in by_area.items():
        count = f"{sum(row['met'] for row in rows)} of {len(rows)} goals met"
        how = f"{words.area_of(area)}\n{_HOW.format('line')}{_RATIO}"
        title = f"{areas[area]}: {count}"
        figure, axes = _figure(title, origin, how, _LINE * len(rows), _RIGHT)
        for at, row in enumerate(rows):
            _line(axes, (at + 0.5) * _LINE, row)
        for offset, heading in _COLUMNS:
            _text(axes, _across(axes) + offset, -0.14, heading, weight="bold")
        files.append(_save(figure, folder / f"{area}.png"))
    return files


def _figure(title: str, origin: str, how: str, inside: float, right: float) -> tuple[Any, Any]:
    """Return a figure with its head, and axes of a height and a margin in inches."""
    how = "\n".join(fill(part, _CHARACTERS) for part in how.split("\n"))
    head = 1.12 + 0.165 * (how.count("\n") + 1)
    height = head + inside + _FOOT
    figure = pyplot.figure(figsize=(_WIDTH, height))
    across = 1 - (_LEFT + right) / _WIDTH
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
    """Draw a line of the table: its words, a bar, value, goal, distance and version."""
    _bar(axes, at, row, stem=True)
    said = words.words_of(row)
    _text(axes, -_LEFT + 0.1, at - 0.08, said.name, fontsize=9)
    _text(axes, -_LEFT + 0.1, at + 0.09, said.explained, fontsize=7.5, color=_GREY)
    colour = _MET if row["met"] else _MISSED
    cells = (words.measured(row), words.goal(row), words.distance(row), row["version"])
    colours = (colour, "black", colour, _GREY)
    for (offset, _), cell, shade in zip(_COLUMNS, cells, colours, strict=True):
        _text(axes, _across(axes) + offset, at, cell, color=shade)


def _bar(axes: Any, at: float, row: Mapping[str, Any], *, stem: bool) -> None:
    """Draw a dot, which shows at the goal too, and the way to it from there."""
    share = words.share_of(row)
    length = min(max(share, 1 / _REACH), _REACH)
    colour = _MET if row["met"] else _MISSED
    if stem:
        axes.plot([1, length], [at, at], color=colour, linewidth=4, solid_capstyle="butt")
    mark = "o" if length == share else ">" if share > 1 else "<"
    axes.plot(length, at, marker=mark, color=colour, markersize=7, clip_on=False)


def _text(axes: Any, x: float, y: float, said: str, **style: Any) -> None:
    """Write words at inches from the left of the axes and from their top."""
    style = {"fontsize": 8.5, "va": "center", **style}
    axes.text(x / _across(axes), y, said, transform=axes.get_yaxis_transform(), **style)


def _across(axes: Any) -> float:
    """Return the width of axes in inches."""
    return float(axes.get_position().width) * _WIDTH


def _save(figure: Any, file: Path) -> Path:
    # No version of matplotlib: the same results give the same bytes.
    figure.savefig(file, dpi=100, metadata={"Software": None})
    pyplot.close(figure)
    return file


def _origin(results: Mapping[str, Any]) -> str:
    """Return date and machine of the run."""
    machine = results["machine"]
    packages = (f"{name} {machine[name]}" for name in ("python", "grpcio", "numpy", "zstandard"))
    return (
        f"Measured {results['date']} on a machine with {machine['cpus']} cores and "
        f"{machine['memory_gib']} GiB; {', '.join(packages)}. benchmarks/README.md explains more."
    )
