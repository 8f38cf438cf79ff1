"""The process of a simulated trainer: reads sessions that have ended, and compares every row.

    python -m routetrace.cli.load.readers read|follow NUMBER < lines

The first line is the load. A reader gets a session a line. A follower gets a name, which it follows
to its end, and then what is true of it. Both answer each with a finding.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from typing import Any

import numpy as np

from routetrace.cli.load.children import Parent
from routetrace.cli.load.compare import Answer, Finding, compare
from routetrace.cli.load.engine import Stopwatch
from routetrace.cli.load.plan import Load
from routetrace.cli.load.rows import Rows
from routetrace.cli.load.sessions import Truth
from routetrace.client import MicroBatch, Rank, RouteClient, Sample, make_plan
from routetrace.v1.errors import InvalidArgument, NotFound, RouteTraceError
from routetrace.v1.layout import RoutingLayout
from routetrace.v1.security import Security

#: Whose share a rank reads: of so many pipeline stages and context parallel ranks.
STAGES, CONTEXTS = 4, 2
_PAUSE_SECONDS = 0.02


class Reader:
    """Reads a session, whole or a rank's share of it."""

    def __init__(self, load: Load, number: int, client: RouteClient) -> None:
        self._load = load
        self._client = client
        self._layout = load.shape_of().layout
        self._rank = rank_of(self._layout, number)

    def read(self, truth: Truth) -> Answer:
        """Waits for a session to end, as a trainer does that knows its tokens."""
        read = self._whole if self._load.reads == "whole" else self._share
        deadline = time.monotonic() + self._load.timeout
        while True:
            try:
                return read(truth)
            except InvalidArgument:
                # An earlier turn is the end of the trace until the server has heard of the last.
                if time.monotonic() > deadline:
                    raise
            time.sleep(_PAUSE_SECONDS)

    def follow(self, name: str) -> Answer:
        """The rows of a session as they come, until its (first) request ends."""
        layout = self._layout
        self._wait_for(name)
        ids = np.zeros((self._load.max_tokens, len(layout.layer_ids), layout.top_k), layout.dtype)
        valid = np.zeros(ids.shape[:2], np.bool_)
        stop = 0
        for part in self._client.follow(name, missing="mask", timeout=None):
            # One that starts before the end takes back what was there.
            stop = part.token_stop
            ids[part.token_start : stop] = part.topk_ids
            valid[part.token_start : stop] = part.valid
        return Answer(ids[:stop], valid[:stop], np.arange(stop))

    def _wait_for(self, name: str) -> None:
        """Until the server has heard of a session that has just begun."""
        deadline = time.monotonic() + self._load.timeout
        while True:
            try:
                self._client.stat(name)
                return
            except NotFound:
                if time.monotonic() > deadline:
                    raise
            time.sleep(_PAUSE_SECONDS)

    def _whole(self, truth: Truth) -> Answer:
        trace = self._client.get(
            truth.name,
            token_stop=truth.num_tokens - 1,
            missing="mask",
            wait=self._load.timeout,
        )
        return Answer(
            trace.topk_ids,
            trace.valid,
            np.arange(trace.token_start, trace.token_stop),
            facts=trace,
            fetched=trace.stored_bytes,
            whole=True,
        )

    def _share(self, truth: Truth) -> Answer:
        sample = Sample.of(truth.name, token_ids=truth.tokens(truth.num_tokens))
        batch = MicroBatch.packed([sample], align=2 * CONTEXTS)
        plan = make_plan(self._layout, batch, self._rank)
        got = self._client.fetch(plan, missing="mask", wait=self._load.timeout)
        local = np.flatnonzero(plan.planned)
        return Answer(
            got.topk_ids[:, local].transpose(1, 0, 2),
            got.valid[:, local].T,
            plan.position_of[local].astype(np.int64),
            self._layout.columns(list(plan.layer_ids)),
            facts=got.reads[0] if got.reads else None,
            fetched=got.stats.bytes_fetched,
        )


def rank_of(layout: RoutingLayout, number: int) -> Rank:
    """One of the ranks, in turn."""
    stages = min(STAGES, len(layout.layer_ids))
    ours = np.array_split(np.array(layout.layer_ids), stages)[number % stages]
    context = number // stages % CONTEXTS
    return Rank(layer_ids=ours.tolist(), cp_size=CONTEXTS, cp_rank=context)


def truth_of(values: dict[str, Any]) -> Truth:
    """From JSON."""
    for name in ("streams", "segments", "again"):
        values[name] = tuple(tuple(v) for v in values[name])
    return Truth(**values)


def main() -> None:
    """Reads until the command hangs up."""
    parent = Parent()
    load = Load.from_json(parent.lines.get() or "")
    kind, number = sys.argv[1], int(sys.argv[2])
    model = load.shape_of()
    rows = Rows(model.layout, load.seed, model.skew)
    comparing = Stopwatch()
    with RouteClient(
        load.target, run=load.run, timeout=load.timeout, security=Security(**load.security)
    ) as client:
        reader = Reader(load, number, client)
        parent.say("ready")
        while (line := parent.lines.get()) is not None:
            begun = time.monotonic()
            told = json.loads(line)
            answer, error = None, ""
            try:
                answer = (
                    reader.follow(told["name"]) if kind == "follow" else reader.read(truth_of(told))
                )
            except RouteTraceError as failed:
                error = f"{told['name']}: {type(failed).__name__}: {failed}"
            now = time.monotonic()
            if kind == "follow":
                line = parent.lines.get()
                if line is None:
                    break
                told = json.loads(line)
            truth = truth_of(told)
            found = Finding(failed=1, error=error)
            if answer is not None:
                with comparing:
                    found = compare(rows, truth, answer)
            found.seconds, found.ready = now - begun, now - truth.ended
            parent.say("found", finding=asdict(found))
    compared = comparing.seconds
    parent.say("final", cpu={"compare": compared, "read": time.process_time() - compared})


if __name__ == "__main__":
    main()
