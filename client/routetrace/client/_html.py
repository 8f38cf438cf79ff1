"""A trace as HTML for notebooks: facts, a strip with its holes, missing ranges.

Notebooks that are not trusted strip scripts and style sheets, so that there are only attributes;
colours stand out from light and dark ground alike.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterator, Sequence
from html import escape
from itertools import groupby
from typing import NamedTuple

from routetrace.client.stat import ReadFacts
from routetrace.common.missing import MissingRange, MissingReason

#: Size of the strip in its own units; a hole is never smaller than `_LEAST` of them: 1.5 px of a
#: strip that is 750 px wide.
_WIDTH, _HEIGHT = 1000, 64
_LEAST = 2.0

#: Rectangles of the strip; beyond it, holes are drawn over all layers, in so many columns.
_MAX_RECTANGLES = 120
_COLUMNS = 250

#: Missing ranges and labels that are listed, and characters of a label.
_MAX_ROWS = 12
_MAX_LABELS = 8
_MAX_LABEL = 60

#: Colours of reasons, the worst first. Those without a fault are grey.
_COLOURS = {
    MissingReason.CORRUPT: "currentColor",
    MissingReason.QUEUE_FULL: "#f0743a",
    MissingReason.AGENT_LOST: "#c24f9c",
    MissingReason.AGENT_CLOSED: "#a0622d",
    MissingReason.REJECTED: "#3fa0dc",
    MissingReason.INVALID_IDS: "#b3c430",
    MissingReason.NOT_CAPTURED: "#e8a21f",
    MissingReason.AMBIGUOUS: "#35b8ae",
    MissingReason.KV_UNKNOWN: "#3f86ee",
    MissingReason.NOT_PROVEN: "#8a94a1",
    MissingReason.ABORTED: "#8a94a1",
    MissingReason.OTHER_VERSION: "#8a94a1",
    MissingReason.NOT_YET: "#8a94a1",
    MissingReason.UNKNOWN: "#8a94a1",
}
_ORDER = [*_COLOURS]

_MONO = "font-family:ui-monospace,Menlo,Consolas,monospace;overflow-wrap:anywhere"


class Part(NamedTuple):
    """Rows that were read."""

    layer_ids: Sequence[int]
    """Absolute layer ids, ascending."""
    start: int
    """Position of the first row."""
    stop: int
    """One past the position of the last row."""
    coverage: float
    """Valid cells / cells."""


class _Rectangle(NamedTuple):
    """Missing cells of the strip: positions from the first row on, columns; half open."""

    start: int
    stop: int
    first: int
    last: int
    reason: MissingReason


def html_of(trace: ReadFacts, part: Part) -> str:
    """Return a read as HTML without scripts and references, less than 20 kB.

    Args:
        trace: its facts.
        part: its rows.
    """
    parts = [f'<div style="max-width:960px"><div style="{_MONO};font-weight:600">']
    parts.append(f"{_text(trace.trace_id)}</div><div>{_text(_facts(trace, part))}</div>")
    if trace.labels:
        labels = [f"{key}={value}"[:_MAX_LABEL] for key, value in trace.labels.items()]
        more = len(labels) - _MAX_LABELS
        shown = ", ".join(labels[:_MAX_LABELS]) + (f", and {more} more" if more > 0 else "")
        parts.append(f'<div style="{_MONO};opacity:.75">{_text(shown)}</div>')
    if part.stop > part.start and part.layer_ids:
        parts.append(_strip(trace.missing, part))
    if trace.missing:
        parts.append(_table(trace.missing))
    return "".join([*parts, "</div>"])


def _facts(trace: ReadFacts, part: Part) -> str:
    rows = f"rows [{part.start}, {part.stop})"
    if part.stop - part.start != trace.num_rows:
        rows += f" of {trace.num_rows}"
    of = f"{len(part.layer_ids)} layers, top-{trace.layout.top_k} of {trace.layout.num_experts}"
    ended = f" ({trace.finish_reason})" if trace.finish_reason else ""
    facts = [f"{trace.state}{ended}", f"{rows}, {of}", f"coverage {_percent(part.coverage)}"]
    least, most = trace.min_weight_version, trace.max_weight_version
    if least is not None:
        facts.append(f"weights {least}" + (f" to {most}" if most != least else ""))
    if trace.unknown_weight_versions:
        facts.append("some weights unknown" if least is not None else "weights unknown")
    if trace.engine_ids:
        more = len(trace.engine_ids) - 3
        names = ", ".join(name[:_MAX_LABEL] for name in trace.engine_ids[:3])
        facts.append(f"engines {names}" + (f", and {more} more" if more > 0 else ""))
    if trace.num_incarnations > 1:
        facts.append(f"incarnation {trace.incarnation} of {trace.num_incarnations}")
    return " · ".join(facts)


def _percent(share: float) -> str:
    """Return a share that is 100 % only if it is all, and 0 % only if it is nothing."""
    shown = math.floor(share * 1e5) / 1e3
    return "< 0.001 %" if share > 0 and not shown else f"{shown:g} %"


def _strip(missing: Sequence[MissingRange], part: Part) -> str:
    count, layers = part.stop - part.start, len(part.layer_ids)
    rectangles = [*_rectangles(missing, part)]
    if len(rectangles) > _MAX_RECTANGLES:
        rectangles = [*_in_columns(rectangles, count, layers)]
    reasons = sorted({r.reason for r in rectangles}, key=_ORDER.index)
    said = ", ".join(reason.replace("_", " ") for reason in reasons) or "none"
    drawn = [
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="100%" height="{_HEIGHT}" role="img"'
        ' preserveAspectRatio="none" style="display:block;margin:6px 0">'
        f"<title>Positions along, layers down; missing cells: {_text(said)}</title>"
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" rx="3" fill="#8a94a1" fill-opacity=".3"/>'
    ]
    for one in rectangles:
        x, width = _span(one.start, one.stop, _WIDTH / count, _WIDTH)
        y, height = _span(one.first, one.last, _HEIGHT / layers, _HEIGHT)
        drawn.append(
            f'<rect x="{x:.4g}" y="{y:.4g}" width="{width:.4g}" height="{height:.4g}"'
            f' fill="{_COLOURS[one.reason]}"/>'
        )
    return "".join([*drawn, "</svg>"])


def _span(start: int, stop: int, scale: float, end: int) -> tuple[float, float]:
    """Return where a rectangle begins and its size, within [0, end]."""
    size = min(end, max(_LEAST, (stop - start) * scale))
    return min(start * scale, end - size), size


def _rectangles(missing: Sequence[MissingRange], part: Part) -> Iterator[_Rectangle]:
    """Yield the missing cells, the worst last, so that it is drawn over the others."""
    columns = {layer: column for column, layer in enumerate(part.layer_ids)}
    for one in sorted(missing, key=lambda m: -_ORDER.index(m.reason)):
        at = sorted(columns[layer] for layer in one.layer_ids if layer in columns)
        for _, run in groupby(enumerate(at), lambda pair: pair[1] - pair[0]):
            some = [column for _, column in run]
            yield _Rectangle(
                one.start - part.start, one.stop - part.start, some[0], some[-1] + 1, one.reason
            )


def _in_columns(rectangles: Sequence[_Rectangle], count: int, layers: int) -> Iterator[_Rectangle]:
    """Yield columns over all layers, each with the worst reason of a cell in it."""
    columns = min(count, _COLUMNS)
    worst: list[MissingReason | None] = [None] * columns
    for one in rectangles:  # the worst last
        first = one.start * columns // count
        last = -(-one.stop * columns // count)
        worst[first:last] = [one.reason] * (last - first)
    for reason, run in groupby(range(columns), lambda at: worst[at]):
        some = [*run]
        if reason is not None:
            start, stop = some[0] * count // columns, (some[-1] + 1) * count // columns
            yield _Rectangle(start, stop, 0, layers, reason)


def _table(missing: Sequence[MissingRange]) -> str:
    cell = '<td style="text-align:left;padding:0 16px 0 0">'
    rows = []
    for one in missing[:_MAX_ROWS]:
        layers = f"{one.layer_ids[0]}"
        if len(one.layer_ids) > 1:
            layers = f"{len(one.layer_ids)} from {one.layer_ids[0]} to {one.layer_ids[-1]}"
        cells = (one.stop - one.start) * len(one.layer_ids)
        mark = f'<span style="color:{_COLOURS[one.reason]}">&#9632;</span> '
        values = (
            f"[{one.start}, {one.stop})",
            layers,
            f"{cells:,}",
            mark + one.reason.replace("_", " "),
        )
        rows.append("<tr>" + "".join(f"{cell}{value}</td>" for value in values) + "</tr>")
    names = ("positions", "layers", "cells", "missing because")
    head = "".join(f'<th style="text-align:left;padding:0 16px 0 0">{name}</th>' for name in names)
    more = len(missing) - _MAX_ROWS
    after = f"<div>and {more:,} more ranges: trace.missing has all</div>" if more > 0 else ""
    body = f"<thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody>"
    return f'<table style="color:inherit;font-size:inherit">{body}</table>{after}'


def _text(text: str) -> str:
    """Return text for HTML; characters that cannot be seen, or turn a line around, spelled out."""
    return escape("".join(map(_seen, text)))


def _seen(character: str) -> str:
    hidden = unicodedata.category(character) in ("Cc", "Cf", "Zl", "Zp", "Zs", "Cs")
    if not hidden or character == " ":
        return character
    code = ord(character)
    return f"\\u{code:04x}" if code < 1 << 16 else f"\\u{{{code:x}}}"
