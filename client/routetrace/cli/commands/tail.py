"""`routetrace tail`: rows of a trace as they arrive."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Annotated, cast

import typer

from routetrace.cli.arguments import (
    AsJson,
    Incarnation,
    Layers,
    OneId,
    PolicyChoice,
    PolicyOption,
    PrefixChoice,
    PrefixOption,
    Tokens,
    layers_of,
    tokens_of,
)
from routetrace.cli.connection import Connection
from routetrace.cli.facts import facts_json
from routetrace.cli.output import write_json
from routetrace.client import Trace
from routetrace.client.options import PrefixRows
from routetrace.common.errors import counted


def tail(
    connection: Connection,
    trace_id: OneId,
    rows: Annotated[bool, typer.Option("--rows", help="Print each row as a line of JSON.")] = False,
    layers: Layers = None,
    tokens: Tokens = None,
    policy: PolicyOption = PolicyChoice.as_sampled,
    prefix_rows: PrefixOption = PrefixChoice.never,
    incarnation: Incarnation = None,
    as_json: AsJson = False,
) -> None:
    """Follow a trace to its end and print its parts; exit with 1 if rows are missing.

    --timeout bounds the time to the server's first answer; the trace may take as long as it does.
    """
    start, stop = tokens_of(tokens)
    with connection.client() as client:
        # Rows that are there already come at the rate of the read, not of the engine.
        backlog = client.stat(trace_id, incarnation=incarnation).num_rows
        parts = client.follow(
            trace_id,
            layer_ids=layers_of(layers),
            token_start=start,
            token_stop=stop,
            missing="mask",
            policy=policy.value,
            prefix_rows=cast("PrefixRows", prefix_rows.value),
            incarnation=incarnation,
        )
        whole = _print_parts(parts, backlog, rows, as_json)
    if not whole:
        raise typer.Exit(1)


def _print_parts(parts: Iterable[Trace], backlog: int, rows: bool, as_json: bool) -> bool:
    """Print the parts of a trace as they arrive.

    Args:
        parts: parts from `RouteClient.follow`, with missing cells masked.
        backlog: positions that were there before, whose parts have no rate.
        rows: print every row in place of their number.
        as_json: print every part as a line of JSON.

    Returns:
        Whether the trace ended without missing rows.
    """
    before, reached = time.monotonic(), 0
    whole, last = True, None
    for last in parts:
        whole = whole and bool(last.valid.all())
        now = time.monotonic()
        rate = len(last) / max(now - before, 1e-9) if len(last) and reached >= backlog else None
        before, reached = now, max(reached, last.token_stop)
        if rows:
            _print_rows(last)
        elif as_json:
            write_json({**facts_json(last), "rows_per_second": rate})
        elif len(last):
            print(
                f"[{last.token_start}, {last.token_stop})  {counted(len(last), 'row')}, "
                f"{last.coverage:.1%} valid" + ("" if rate is None else f", {rate:,.0f} rows/s"),
                flush=True,
            )
    if last is None:
        return False
    if not (rows or as_json):
        end = f", {last.finish_reason}" if last.finish_reason else ""
        tokens = counted(last.num_tokens, "token") if last.num_tokens else "? tokens"
        print(f"{last.state.value}{end}: {tokens}, {counted(last.num_rows, 'row')}")
        for missing in last.missing:
            print(f"missing {missing}")
    return whole and last.complete


def _print_rows(part: Trace) -> None:
    ids, valid = part.topk_ids, part.valid
    for i, position in enumerate(range(part.token_start, part.token_stop)):
        layers = {
            layer: cell if there else None
            for layer, cell, there in zip(
                part.layer_ids, ids[i].tolist(), valid[i].tolist(), strict=True
            )
        }
        write_json({"position": position, "topk_ids": layers})
