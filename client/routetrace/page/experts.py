"""Load of experts in traces of a run: by layer and expert, and by stretches of time, as JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from routetrace.client import Corrupt, ExpertLoad, NotFound, RouteTraceError, Trace
from routetrace.page.segments import exact
from routetrace.page.trace_table import Ended

#: Rows above which a trace is left out: it takes too much memory at once.
MAX_ROWS = 200_000
#: Most stretches of time, and experts that are shown over them.
_PARTS = 24
_HOTTEST = 12
#: Share of the even load below which an expert is nearly idle.
_IDLE = 0.2
_DIGITS = 4


class Tally:
    """Counts of traces, newest first, by stretches of about as many tokens.

    Args:
        traces: the traces to count.
    """

    def __init__(self, traces: Sequence[Ended]) -> None:
        short = [one for one in traces if one.num_rows <= MAX_ROWS]
        self._traces = {one.trace_id: one for one in short}
        self.trace_ids = [*self._traces]
        """Traces to read."""
        self.tokens = sum(one.num_rows for one in short)
        """Rows of these."""
        parts = min(_PARTS, len(short))
        before = accumulate((one.num_rows for one in short), initial=0)
        self._part_of = {
            one.trace_id: min(parts - 1, rows * parts // max(1, self.tokens))
            for one, rows in zip(short, before, strict=False)
        }
        self._loads: dict[int, ExpertLoad] = {}
        self._counted: dict[int, list[Ended]] = {}
        self._left_out = Counter({"long": len(traces) - len(short)})

    def rows_of(self, trace_id: str) -> int:
        """Return the rows that a trace had when it was chosen."""
        return self._traces[trace_id].num_rows

    def add(self, trace_id: str, read: Trace | RouteTraceError) -> None:
        """Count a trace that was read; leave it out if it is gone, corrupt, or of another model.

        Raises:
            RouteTraceError: the error in its place, if it is another one.
        """
        if isinstance(read, (NotFound, Corrupt)):
            self._left_out["gone" if isinstance(read, NotFound) else "corrupt"] += 1
            return
        if isinstance(read, RouteTraceError):
            raise read
        load = ExpertLoad.of(read)
        known = next(iter(self._loads.values()), load)
        if load.model != known.model:
            self._left_out["other_model"] += 1
            return
        part = self._part_of[trace_id]
        self._loads[part] = self._loads[part] + load if part in self._loads else load
        self._counted.setdefault(part, []).append(self._traces[trace_id])

    def json(self, began_at: float) -> bytes:
        """Return all counts as JSON, oldest stretch first."""
        order = sorted(self._loads, reverse=True)
        total = sum(self._loads.values())
        facts: dict[str, Any] = {
            "counted_at": began_at,
            "left_out": {why: n for why, n in self._left_out.items() if n},
            **_span([one for part in order for one in self._counted[part]]),
            "parts": [_span(self._counted[part]) for part in order],
        }
        if isinstance(total, ExpertLoad):
            facts |= _measures(total)
            facts["hot"] = _hot(total, [self._loads[part] for part in order])
        return json.dumps(facts, separators=(",", ":")).encode()


def _span(traces: Sequence[Ended]) -> dict[str, Any]:
    """Return number, tokens, times and weights of traces."""
    versions = [version for one in traces for version in one.weights]
    return {
        "traces": len(traces),
        "tokens": sum(one.num_rows for one in traces),
        "from": min((one.updated for one in traces), default=None),
        "to": max((one.updated for one in traces), default=None),
        "weights": [exact(min(versions)), exact(max(versions))] if versions else None,
    }


def _measures(load: ExpertLoad) -> dict[str, Any]:
    relative = load.relative
    counted = load.cells > 0
    below = relative[counted]
    return {
        "num_experts": load.num_experts,
        "top_k": load.top_k,
        "layer_ids": list(load.layer_ids),
        "cells": load.cells.tolist(),
        "load": np.round(relative, _DIGITS).ravel().tolist(),
        "entropy": _where(counted, load.entropy),
        "balancedness": _where(counted, load.balancedness),
        "idle": int(np.count_nonzero(below < _IDLE)),
        "never": int(np.count_nonzero(below == 0)),
    }


def _where(there: Any, values: Any) -> list[float | None]:
    return [
        round(float(value), _DIGITS) if here else None
        for here, value in zip(there, values, strict=True)
    ]


def _hot(total: ExpertLoad, parts: Sequence[ExpertLoad]) -> list[dict[str, Any]]:
    """Return the experts with the largest load / even share, and that in each stretch."""
    relative = total.relative.ravel()
    hottest = np.argsort(-relative, kind="stable")[:_HOTTEST]
    over_time = np.stack([part.relative.ravel()[hottest] for part in parts])
    return [
        {
            "layer": total.layer_ids[at // total.num_experts],
            "expert": at % total.num_experts,
            "load": round(float(relative[at]), _DIGITS),
            "series": np.round(over_time[:, i], _DIGITS).tolist(),
        }
        for i, at in enumerate(hottest.tolist())
    ]
