"""The table as a picture: how far each row is from its goal."""

# Not installed where types are checked.
# pyright: reportMissingImports=false
from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

_MET, _MISSED = "#2a7f62", "#c1502e"


def draw(rows: list[dict[str, Any]], file: Path) -> None:
    """Writes a bar for each row that has a goal: 1 is the goal, less than 1 misses it.

    Args:
        rows: lines of the table, as results.json has them.
        file: a PNG.
    """
    judged = [row for row in rows if row["goal"]][::-1]
    shares = [_share(row) for row in judged]
    figure, axes = pyplot.subplots(figsize=(14, 0.24 * len(judged) + 0.8))
    colours = [_MET if row["met"] else _MISSED for row in judged]
    axes.barh(range(len(judged)), [share - 1 for share in shares], left=1, color=colours)
    for at, (row, share) in enumerate(zip(judged, shares, strict=True)):
        text = f" {row['value']:.3g} ({row['goal']}) "
        axes.text(share, at, text, va="center", ha="left" if share >= 1 else "right", fontsize=7)
    names = [f"{row['name']} | {row['against']}" for row in judged]
    axes.set_yticks(range(len(judged)), names, fontsize=7)
    axes.set_ylim(-0.7, len(judged) - 0.3)
    axes.set_xscale("log")
    axes.set_xlim(min(shares) / 3, max(shares) * 3)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xlabel("times better than the goal (left of 1: missed)")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(file, dpi=130)


def _share(row: dict[str, Any]) -> float:
    """How many times better than its goal a row is; a hundred at most."""
    sign, limit = row["goal"].split()
    share = max(row["value"] / float(limit), 0.01)
    return float(1 / share if sign == "<=" else share)
