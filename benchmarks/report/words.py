"""Names and explanations of the lines with a goal, for readers who know none of the code."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple


class Words(NamedTuple):
    """A line's name, and one explanation with what it is measured beside."""

    name: str
    explained: str


#: By area its lines: patterns of `name` and of the beginning of `against`, and words, which may
#: hold the groups of the name.
_WORDS = json.loads(Path(__file__).with_suffix(".json").read_text("utf-8"))
#: Tokens of a request, by the name of a load.
_LOADS = {"short": "512", "long": "2,048"}


def words_of(row: Mapping[str, Any]) -> Words:
    """Return the words of a line.

    Raises:
        KeyError: if no words are here for it.
    """
    for line in _WORDS[row["area"]]:
        found = re.fullmatch(line["name"], row["name"])
        if found and re.match(line["against"], row["against"]):
            groups = [_plain(group) for group in found.groups()]
            return Words(line["title"].format(*groups), line["explained"].format(*groups))
    raise KeyError(
        f"report/words.json: no words for {row['area']}: {row['name']}, {row['against']}"
    )


def measured(row: Mapping[str, Any]) -> str:
    """Return a row's value with its unit."""
    return _with_unit(row, row["value"])


def before(row: Mapping[str, Any]) -> str:
    """Return the value of 0.7.0 with its unit; "" where it was not measured."""
    return "" if row["before"] is None else _with_unit(row, row["before"])


def goal(row: Mapping[str, Any]) -> str:
    """Return a row's goal with its unit."""
    sign, limit = row["goal"].split()
    return f"{'at most' if sign == '<=' else 'at least'} {_with_unit(row, float(limit))}"


def distance(row: Mapping[str, Any]) -> str:
    """Return how far a row is from its goal."""
    share = share_of(row)
    better = share >= 1
    times = share if better else 1 / share
    if times < 1.1:
        by = 100 * (times - 1)
        return f"{by:.1f} % {'better' if better else 'worse'}"
    return f"{times:.1f} times {'better' if better else 'worse'}"


def share_of(row: Mapping[str, Any]) -> float:
    """Return the ratio by which a row beats its goal; a hundred at most."""
    sign, limit = row["goal"].split()
    share = max(row["value"] / float(limit), 0.01)
    return float(1 / share if sign == "<=" else share)


def _with_unit(row: Mapping[str, Any], value: float) -> str:
    unit = row["unit"]
    if unit == "x":
        share = float(row["goal"].split()[1]) <= 0.11
        return f"{100 * value:.3g} %" if share else f"{value:.3g} x"
    return f"{value:.3g} {'M' if unit == 'Mtok/s' else unit}"


def _plain(group: str | None) -> str:
    """Return a group in words; one that is not there is empty."""
    return _LOADS.get(group or "", group or "")
