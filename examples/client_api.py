"""The client: get, get_many, fetch, follow, and errors.

Starts a server, records two requests with random expert ids, and reads them in every way.
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

import numpy as np

from routetrace.capture_agent import AgentConfig, CaptureAgent
from routetrace.client import (
    AsyncRouteClient,
    FetchPlan,
    Incomplete,
    InvalidArgument,
    MicroBatch,
    ModelLayout,
    NotFound,
    Rank,
    ReadOptions,
    RouteClient,
    RouteTraceError,
    Sample,
)
from routetrace.server.testing import run_server

#: Two MoE layers of three, 8 experts, 2 of them per token.
LAYOUT = ModelLayout(layer_ids=(1, 2), num_hidden_layers=3, num_experts=8, top_k=2)
TOKENS = {"g0-s0": 12, "g0-s1": 9}


def record(target: str) -> None:
    """Record a request per trace id: N tokens, N - 1 rows."""
    rng = np.random.default_rng(0)
    config = AgentConfig(target=target, engine_id="rollout-0", layout=LAYOUT)
    with CaptureAgent(config) as agent:
        for trace_id, num_tokens in TOKENS.items():
            rows = rng.random((num_tokens - 1, 2, LAYOUT.num_experts)).argsort()[..., :2]
            handle = agent.begin(trace_id, prompt_len=4, labels={"group": "g0"})
            agent.step(rows.astype(LAYOUT.dtype), [(handle, 0, num_tokens - 1)])
            agent.finish(handle, num_tokens)


def read(client: RouteClient) -> None:
    """Read whole traces, and the share of a trainer's rank."""
    trace = client.get("g0-s0", wait_for="end", timeout=30)
    print(f"get: {len(trace)} rows at layers {trace.layer_ids}, {trace.state.value}")

    # Options that several calls share. A keyword argument of a call wins over them.
    options = ReadOptions(wait_for="end", timeout=30, missing="mask")
    for trace in client.get_many(TOKENS, options=options):
        print(f"get_many: {trace.trace_id}, coverage {trace.coverage:.0%}")

    samples = [Sample.of(trace_id, num_tokens) for trace_id, num_tokens in TOKENS.items()]
    plan = FetchPlan.make(LAYOUT, MicroBatch.packed(samples), Rank(layer_ids=[2]))
    rows = client.fetch(plan, options=options, missing="raise")
    print(f"fetch: ids {rows.topk_ids.shape}, {rows.valid.sum()} valid cells")

    num_rows = sum(len(part) for part in client.follow("g0-s1", wait_for="rows", timeout=30))
    print(f"follow: {num_rows} rows")


def fail(client: RouteClient) -> None:
    """Show the errors of a few mistakes; all are RouteTraceError."""
    try:
        client.get("g0-s9")
    except NotFound as error:
        print(f"NotFound: {error.field}")
    try:
        client.get("g0-s0", weight_version=7)
    except Incomplete as error:
        for missing in error.missing:
            print(f"Incomplete: positions {missing.start} to {missing.stop}, {missing.reason}")
    try:
        client.get("g0-s0", layer_ids=[2, 1])
    except InvalidArgument as error:
        print(f"InvalidArgument: {error}")
    try:
        RouteClient("http://127.0.0.1:7411")
    except RouteTraceError as error:
        print(f"{type(error).__name__}: {error.field}")


async def read_async(target: str) -> None:
    """Read with the asyncio client, which has the same methods."""
    async with AsyncRouteClient(target) as client:
        traces = await asyncio.gather(*(client.get(trace_id) for trace_id in TOKENS))
        print(f"AsyncRouteClient: {sum(map(len, traces))} rows")


def main() -> None:
    """Run the example."""
    with tempfile.TemporaryDirectory() as data_dir, run_server(data_dir=Path(data_dir)) as server:
        record(server.target)
        with RouteClient(server.target) as client:
            read(client)
            fail(client)
        asyncio.run(read_async(server.target))


if __name__ == "__main__":
    main()
