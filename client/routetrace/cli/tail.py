"""Output of `routetrace tail`."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable

from routetrace.cli.output import write_json
from routetrace.client import Trace


def print_parts(parts: Iterable[Trace], rows: bool) -> bool:
    """Print the parts of a trace as they arrive.

    Args:
        parts: parts from `RouteClient.follow`, with missing cells masked.
        rows: print every row in place of their number.

    Returns:
        Whether the trace ended without missing rows.
    """
    before = time.monotonic()
    whole, last = True, None
    for last in parts:
        whole = whole and bool(last.valid.all())
        if rows:
            _print_rows(last)
        elif len(last):
            now = time.monotonic()
            rate, before = len(last) / max(now - before, 1e-9), now
            print(
                f"[{last.token_start}, {last.token_stop})  {len(last)} rows, "
                f"{last.coverage:.1%} valid, {rate:,.0f} rows/s"
            )
        # For readers of a pipe.
        sys.stdout.flush()
    if last is None:
        return False
    if not rows:
        end = f", {last.finish_reason}" if last.finish_reason else ""
        print(f"{last.state.value}{end}: {last.num_tokens or '?'} tokens, {last.num_rows} rows")
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
