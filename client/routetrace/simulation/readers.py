"""Process of a simulated trainer, which compares every row that it reads.

    python -m routetrace.simulation.readers read|follow NUMBER < lines

The first line is the load. A reader gets the truth of a session per line. A follower gets the name
of a session, follows it to its end, then gets its truth. Both reply with a finding for each.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from typing import Any

import numpy as np

from routetrace.client import FetchPlan, MicroBatch, Rank, RouteClient, Sample
from routetrace.common.errors import InvalidArgument, NotFound, RouteTraceError
from routetrace.common.layout import ModelLayout
from routetrace.common.security import Security
from routetrace.simulation.children import Parent
from routetrace.simulation.compare import Answer, Finding, compare
from routetrace.simulation.engine import Stopwatch
from routetrace.simulation.plan import Load
from routetrace.simulation.rows import Rows
from routetrace.simulation.sessions import Truth

#: Pipeline stages and context parallel ranks that share a session.
STAGES, CONTEXTS = 4, 2
_PAUSE_SECONDS = 0.02


class Reader:
    """Reads sessions whole, or the share of one rank."""

    def __init__(self, load: Load, number: int, client: RouteClient) -> None:
        self._load = load
        self._client = client
        self._layout = load.shape_of().layout
        self._rank = rank_of(self._layout, number)

    def read(self, truth: Truth) -> Answer:
        """Wait for the end of a session and read it, as a trainer that has its tokens."""
        read = self._whole if self._load.reads == "whole" else self._share
        deadline = time.monotonic() + self._load.timeout
        while True:
            try:
                return read(truth)
            except InvalidArgument:
                # The trace ends with an earlier turn until the server has received the last one.
                if time.monotonic() > deadline:
                    raise
            time.sleep(_PAUSE_SECONDS)

    def follow(self, name: str) -> Answer:
        """Read a session while it runs, until its (first) request ends."""
        layout = self._layout
        self._wait_for(name)
        ids = np.zeros((self._load.max_tokens, len(layout.layer_ids), layout.top_k), layout.dtype)
        valid = np.zeros(ids.shape[:2], np.bool_)
        stop = 0
        for part in self._client.follow(name, missing="mask", timeout=None):
            # A part that starts before the end replaces earlier rows.
            stop = part.token_stop
            ids[part.token_start : stop] = part.topk_ids
            valid[part.token_start : stop] = part.valid
        return Answer(ids[:stop], valid[:stop], np.arange(stop))

    def _wait_for(self, name: str) -> None:
        """Wait until the server has received a session that has just begun."""
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
            wait_for="end",
            timeout=self._load.timeout,
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
        plan = FetchPlan.make(self._layout, batch, self._rank)
        got = self._client.fetch(plan, missing="mask", wait_for="end", timeout=self._load.timeout)
        local = np.flatnonzero(plan.planned)
        return Answer(
            got.topk_ids[:, local].transpose(1, 0, 2),
            got.valid[:, local].T,
            plan.position_of[local].astype(np.int64),
            self._layout.columns(list(plan.layer_ids)),
            facts=got.reads[0] if got.reads else None,
            fetched=got.stats.bytes_fetched,
        )


def rank_of(layout: ModelLayout, number: int) -> Rank:
    """Return one of the ranks, in turn."""
    stages = min(STAGES, len(layout.layer_ids))
    ours = np.array_split(np.array(layout.layer_ids), stages)[number % stages]
    context = number // stages % CONTEXTS
    return Rank(layer_ids=ours.tolist(), cp_size=CONTEXTS, cp_rank=context)


def truth_of(values: dict[str, Any]) -> Truth:
    """Build a truth from JSON values."""
    for name in ("streams", "segments", "again"):
        values[name] = tuple(tuple(v) for v in values[name])
    return Truth(**values)


def main() -> None:
    """Read sessions until the end of the input."""
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
        parent.send("ready")
        while (line := parent.lines.get()) is not None:
            begun = time.monotonic()
            session = json.loads(line)
            answer, error = None, ""
            try:
                answer = (
                    reader.follow(session["name"])
                    if kind == "follow"
                    else reader.read(truth_of(session))
                )
            except RouteTraceError as failed:
                error = f"{session['name']}: {type(failed).__name__}: {failed}"
            now = time.monotonic()
            if kind == "follow":
                line = parent.lines.get()
                if line is None:
                    break
                session = json.loads(line)
            truth = truth_of(session)
            found = Finding(failed=1, error=error)
            if answer is not None:
                with comparing:
                    found = compare(rows, truth, answer)
            found.seconds, found.ready = now - begun, now - truth.ended
            parent.send("found", finding=asdict(found))
    compared = comparing.seconds
    parent.send("final", cpu={"compare": compared, "read": time.process_time() - compared})


if __name__ == "__main__":
    main()
