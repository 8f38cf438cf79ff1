"""Trace facts as JSON and as tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from textwrap import wrap
from typing import Any

from routetrace.cli.output import age, moment, size
from routetrace.client import Trace, TraceStat, TraceState
from routetrace.common.errors import counted

#: Columns of `table_row`; those that end in a space are right-aligned.
COLUMNS = ("trace", "age ", "state", "end", "tokens ", "coverage ", "inc. ", "weights ", "labels")
#: Columns of these that break within words where the terminal is too narrow.
FOLD = ("trace", "labels")


def facts_json(facts: TraceStat | Trace) -> dict[str, Any]:
    """Return the facts of a trace in JSON types, with the range read if it was read."""
    value = facts.to_dict()
    del value["token_digests"]  # many, and of use beside the tokens alone
    return {**value, "coverage": facts.coverage}


def is_whole(facts: TraceStat | Trace) -> bool:
    """Return whether the trace has ended with every cell present."""
    return facts.state is TraceState.COMPLETE and facts.num_tokens is not None


def end_unknown(facts: TraceStat) -> bool:
    """Return whether nothing more comes and no end was reported, so that rows may be lost."""
    return facts.state is TraceState.INCOMPLETE and facts.num_tokens is None


def facts_table(
    found: TraceStat, newest_version: int | None = None
) -> Iterator[tuple[str, object]]:
    """Yield names and values for `routetrace stat`.

    Args:
        found: facts of the trace.
        newest_version: newest weight version of the run's agents, if known.
    """
    end = f", {found.finish_reason}" if found.finish_reason else ""
    tokens = f"{found.num_tokens:,}" if found.num_tokens else "unknown"
    yield "trace", found.trace_id
    yield "run", found.run
    yield "state", f"{found.state.value}{end}"
    yield "tokens", f"{tokens} ({found.prompt_len:,} of the prompt)" if found.prompt_len else tokens
    yield "rows", f"{found.num_rows:,}"
    coverage = _share(found.coverage)
    if end_unknown(found):
        lost = f"; {coverage} of the known rows" if found.missing_cells else ""
        coverage = f"{found.num_rows:,}+ rows, end unknown{lost}"
    yield "coverage", coverage
    if found.missing_cells:
        yield "missing", _cells(found.missing_cells)
    layout = found.layout
    yield (
        "model",
        f"top-{layout.top_k} of {layout.num_experts} at {len(layout.layer_ids)} layers "
        f"({layers_text(layout.layer_ids)}) of {layout.num_hidden_layers}",
    )
    high = found.max_weight_version
    behind = newest_version - high if newest_version is not None and high is not None else 0
    lag = f" ({behind:,} behind {newest_version}, the newest of the agents)" if behind > 0 else ""
    yield "weights", f"{_weights(found)}{lag}"
    yield "engines", ", ".join(found.engine_ids)
    if found.prefix_trace_ids:
        yield "prefix from", ", ".join(found.prefix_trace_ids)
    yield "attempts", found.num_attempts
    yield "incarnation", _incarnation(found)
    yield "labels", _labels(found)
    yield "stored", size(found.stored_bytes)
    yield "created", moment(found.created_at)
    yield "updated", moment(found.updated_at)
    yield "expires", moment(found.expires_at)


def table_row(found: TraceStat, now: datetime) -> tuple[object, ...]:
    """Return a row of `routetrace list`."""
    return (
        found.trace_id,
        age(now - found.created_at),
        found.state.value,
        found.finish_reason or ("unknown" if end_unknown(found) else ""),
        found.num_tokens or f"{found.num_rows}+",
        "unknown" if end_unknown(found) else _share(found.coverage),
        found.num_incarnations,
        _weights(found),
        _labels(found),
    )


def totals(found: Sequence[TraceStat]) -> list[str]:
    """Return traces by state, coverage and missing cells by reason, as lines.

    Coverage is of the known rows: traces without a reported end may have had more.
    """
    states = Counter(stat.state.value for stat in found)
    cells = sum(stat.num_rows * len(stat.layout.layer_ids) for stat in found)
    missing: Counter[str] = Counter()
    for stat in found:
        missing.update(stat.missing_cells)
    text = f"{counted(len(found), 'trace')}: "
    text += ", ".join(f"{n:,} {s}" for s, n in states.items())
    share = _share(1 - sum(missing.values()) / cells if cells else 1.0)
    if unknown := sum(map(end_unknown, found)):
        share = f"{share} of the known rows" if cells else "unknown"
        share += f", {counted(unknown, 'trace')} with an unknown end"
    rest = [f"missing cells: {_cells(missing)}"] if missing else []
    return [line for part in (f"{text}; coverage {share}", *rest) for line in wrap(part, 80)]


def _share(share: float) -> str:
    """Format a coverage; 100 % only where nothing is missing."""
    return "100 %" if share == 1 else f"{min(share, 0.9999):.2%}"


def _incarnation(found: TraceStat) -> str:
    others = f"one of {found.num_incarnations}" if found.num_incarnations > 1 else "the only one"
    return f"{found.incarnation} ({others})"


def _cells(cells: Mapping[str, int]) -> str:
    return ", ".join(f"{n:,} {reason}" for reason, n in sorted(cells.items()))


def _weights(found: TraceStat) -> str:
    low, high = found.min_weight_version, found.max_weight_version
    known = "" if low is None else f"{low}" if low == high else f"{low}..{high}"
    return f"{known}, unknown".removeprefix(", ") if found.unknown_weight_versions else known


def _labels(found: TraceStat) -> str:
    return " ".join(f"{key}={value}" for key, value in sorted(found.labels.items()))


def layers_text(ids: tuple[int, ...]) -> str:
    """Format layer ids for `--layers`."""
    runs: list[list[int]] = []
    for layer in ids:
        if runs and runs[-1][1] == layer - 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    return ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs)
