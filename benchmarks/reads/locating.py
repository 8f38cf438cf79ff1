"""Rows by tokens: the server's CPU for the search, and a fetch beside the same by ids."""

from __future__ import annotations

from typing import Any

import numpy as np

from measure import Table, cpu_seconds, ratios, rounds, seconds
from reads.load import LAYOUT, Array
from routetrace.capture_agent import AgentConfig, CaptureAgent
from routetrace.client import FetchPlan, MicroBatch, Rank, RouteClient, Sample
from routetrace.server.testing import ServerProcess

_RUN = "locating"
_TOKENS, _PROMPT = 2_000, 500
#: Sequences of a call, and other requests of the run.
_SEQUENCES, _OTHERS = 512, 4_096


def locating(table: Table, server: ServerProcess, ids: Array) -> None:
    """512 sequences of 2k tokens: whole ones, cut ones, and unknown ones."""
    rng = np.random.default_rng(7)
    sequences = [rng.integers(0, 100_000, _TOKENS) for _ in range(_SEQUENCES)]
    others = 256 if table.quick else _OTHERS
    config = AgentConfig(
        target=server.target, run=_RUN, engine_id="e", layout=LAYOUT, ring_bytes=256 << 20
    )
    with CaptureAgent(config) as agent:
        for number in range(others):
            tokens = rng.integers(0, 100_000, 256)
            handle = agent.begin(f"other-{number}", prompt_token_ids=tokens[:100])
            agent.finish(handle, len(tokens), token_ids=tokens)
        for number, tokens in enumerate(sequences):
            handle = agent.begin(f"r{number}", prompt_token_ids=tokens[:_PROMPT])
            if number < 32:
                agent.step(ids[: _TOKENS - 1], [(handle, 0, _TOKENS - 1)])
            agent.finish(handle, _TOKENS, token_ids=tokens)
        agent.flush(120)
        if agent.stats().dropped_rows:
            raise RuntimeError(f"the agent dropped rows: {agent.stats()}")
    with RouteClient(server.target, run=_RUN) as client:
        asked: dict[str, list[Any]] = {
            "whole": sequences,
            "cut": [tokens[:-3] for tokens in sequences],
            "unknown": [tokens[::-1] for tokens in sequences],
        }
        for kind, some in asked.items():
            found = client.locate(some)
            before, calls = cpu_seconds(server.pid), 4 if table.quick else 40
            for _ in range(calls):
                found = client.locate(some)
            spent = 1e3 * (cpu_seconds(server.pid) - before) / calls
            assert len(found.not_found) == (len(some) if kind == "unknown" else 0)
            goal = "<= 5" if kind == "whole" else ""
            what = f"locate of 512 sequences of 2k tokens, {kind}: server CPU"
            table.add(what, spent, "ms", "this machine", goal)
        rank = Rank(LAYOUT.layer_ids)
        few = sequences[:32]
        named = [Sample.of(f"r{i}", token_ids=tokens) for i, tokens in enumerate(few)]
        plans = {
            "ids": FetchPlan.make(LAYOUT, MicroBatch.packed(named), rank),
            "tokens": FetchPlan.make(
                LAYOUT, MicroBatch.packed(Sample.of(token_ids=tokens) for tokens in few), rank
            ),
        }
        out = np.zeros(plans["ids"].shape, np.uint8)
        took = rounds(
            {
                name: seconds(lambda plan=plan: client.fetch(plan, out=out))  # type: ignore[misc]
                for name, plan in plans.items()
            },
            2 if table.quick else 12,
        )
        what = "fetch of 32 samples of 2k tokens by their tokens: time"
        table.add(what, ratios(took["tokens"], took["ids"]), "x", "the same fetch by ids")
