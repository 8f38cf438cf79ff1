"""Facts about traces, as JSON and as tables."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from routetrace.cli.output import moment, size
from routetrace.client import RoutingTrace, TraceFacts, TraceStat, TraceState

#: Columns of `table_row`; those that end in a space are aligned to the right.
COLUMNS = "trace", "state", "tokens ", "rows ", "weights", "stored ", "updated", "labels"


def facts_json(facts: TraceFacts) -> dict[str, Any]:
    """What is known of a trace, in JSON's own types; of one that was read, also what was read."""
    layout = facts.layout
    value: dict[str, Any] = {
        name: getattr(facts, name)
        for name in (
            "request_id",
            "run",
            "num_tokens",
            "num_rows",
            "prompt_len",
            "labels",
            "incarnation",
            "num_incarnations",
            "finish_reason",
            "num_attempts",
            "min_weight_version",
            "max_weight_version",
            "created",
            "updated",
            "expires",
            "stored_bytes",
        )
    }
    value |= {
        "state": facts.state.value,
        "engine_ids": list(facts.engine_ids),
        "layout": {
            "layer_ids": list(layout.layer_ids),
            "num_hidden_layers": layout.num_hidden_layers,
            "num_experts": layout.num_experts,
            "top_k": layout.top_k,
        },
    }
    if isinstance(facts, TraceStat):
        value["coverage"] = coverage(facts)
    if isinstance(facts, RoutingTrace):
        value |= {
            "token_start": facts.token_start,
            "token_stop": facts.token_stop,
            "layer_ids": list(facts.layer_ids),
            "coverage": facts.coverage,
            "provenance": [list(run) for run in facts.provenance],
        }
    missing = getattr(facts, "missing", None)
    if missing is not None:
        value["missing"] = [
            {"start": m.start, "stop": m.stop, "layer_ids": list(m.layer_ids), "reason": m.reason}
            for m in missing
        ]
    return value


def coverage(stat: TraceStat) -> float | None:
    """Share of the cells known so far that are there; None from calls that do not tell."""
    if stat.missing is None:
        return None
    cells = stat.num_rows * len(stat.layout.layer_ids)
    lost = sum(
        (min(m.stop, stat.num_rows) - m.start) * len(m.layer_ids)
        for m in stat.missing
        if m.start < stat.num_rows
    )
    return 1 - lost / cells if cells else 1.0


def is_whole(facts: TraceFacts) -> bool:
    """Whether the trace has ended, with every cell there."""
    return facts.state is TraceState.COMPLETE and facts.num_tokens > 0


def facts_table(found: TraceStat) -> Iterator[tuple[str, object]]:
    """What `routetrace stat` prints: names and values."""
    share = coverage(found)
    end = f", {found.finish_reason}" if found.finish_reason else ""
    tokens = f"{found.num_tokens:,}" if found.num_tokens else "not known"
    yield "trace", found.request_id
    yield "run", found.run
    yield "state", f"{found.state.value}{end}"
    yield "tokens", f"{tokens} ({found.prompt_len:,} of the prompt)" if found.prompt_len else tokens
    yield "rows", f"{found.num_rows:,}"
    if share is not None:
        yield "coverage", "100 %" if is_whole(found) and share == 1 else f"{share:.2%}"
    layout = found.layout
    yield (
        "model",
        f"top-{layout.top_k} of {layout.num_experts} at {len(layout.layer_ids)} layers "
        f"({layers_text(layout.layer_ids)}) of {layout.num_hidden_layers}",
    )
    yield "weights", _weights(found)
    yield "engines", ", ".join(found.engine_ids)
    yield "attempts", found.num_attempts
    yield "incarnation", f"{found.incarnation} ({found.num_incarnations} in all)"
    yield "labels", _labels(found)
    yield "stored", size(found.stored_bytes)
    yield "created", moment(found.created)
    yield "updated", moment(found.updated)
    yield "expires", moment(found.expires)


def table_row(found: TraceStat) -> tuple[object, ...]:
    """A row of `routetrace list`."""
    return (
        found.request_id,
        found.state.value,
        found.num_tokens or "?",
        found.num_rows,
        _weights(found),
        size(found.stored_bytes),
        moment(found.updated),
        _labels(found),
    )


def _weights(found: TraceStat) -> str:
    low, high = found.min_weight_version, found.max_weight_version
    return f"{low}" if low == high else f"{low}..{high}"


def _labels(found: TraceStat) -> str:
    return " ".join(f"{key}={value}" for key, value in sorted(found.labels.items()))


def layers_text(ids: tuple[int, ...]) -> str:
    """Layer ids as `--layers` takes them."""
    runs: list[list[int]] = []
    for layer in ids:
        if runs and runs[-1][1] == layer - 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    return ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs)
