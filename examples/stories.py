"""The main uses of the API, one function each, and as short as they get.

Runs all of them on one machine: a small Transformers model and an engine of your own record, a
client reads, and the model replays. `make test-trainers` runs the one for Megatron; for vLLM and
SGLang, whose engines need no code, see docs/vllm.md and docs/sglang.md.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tiny_moe import PROMPTS, build_model, encode

from routetrace.capture_agent import CaptureAgent
from routetrace.capture_agent.transformers import TransformersCapture
from routetrace.client import (
    FetchPlan,
    MicroBatch,
    ModelLayout,
    Progress,
    Rank,
    ReadOptions,
    RouteClient,
    Sample,
)
from routetrace.server.testing import run_server
from routetrace.trainers import megatron
from routetrace.trainers.dialects import nemo_rl, slime, verl
from routetrace.trainers.replay import replay


def roll_out(target: str, model: Any, names: Sequence[str]) -> torch.Tensor:
    """Generate with Transformers; return prompts and outputs, [batch, tokens]."""
    ids, mask = encode(PROMPTS[: len(names)])
    layout = ModelLayout.from_config(model.config)
    with CaptureAgent(target=target, engine_id="r0", layout=layout) as agent:
        capture = TransformersCapture(model, agent)
        tokens: torch.Tensor = capture.generate(ids, mask, request_ids=names, max_new_tokens=8)
    return tokens


def run_an_engine(target: str, layout: ModelLayout, prompt: Sequence[int], num_tokens: int) -> None:
    """Record a request of an engine of your own: a row for each token but the last."""
    shape = (num_tokens - 1, len(layout.layer_ids), layout.num_experts)
    rows = np.random.default_rng(0).random(shape).argsort()[..., : layout.top_k]
    tokens = [*prompt, *range(num_tokens - len(prompt))]
    with CaptureAgent(target=target, engine_id="r1", layout=layout) as agent:
        handle = agent.begin("own", prompt_token_ids=prompt, labels={"step": "41"})
        agent.step(rows.astype(layout.dtype), [[handle, 0, len(rows)]])
        agent.finish(handle, num_tokens, reason="length", token_ids=tokens)


def get_one(client: RouteClient, name: str) -> tuple[int, ...]:
    """Return the shape of a trace, and read a part of it."""
    trace = client.get(name, wait_for="end", timeout=60)
    part = client.get(name, wait_for="rows", token_stop=5)
    assert part.equals(trace.tokens(0, 5))
    prompt, output = trace.split()
    assert len(prompt) + len(output) == len(trace)
    return trace.topk_ids.shape


def get_many(client: RouteClient, names: Sequence[str]) -> Progress:
    """Read many traces in order, with progress."""
    reports: list[Progress] = []
    for trace in client.get_many(names, wait_for="end", progress=reports.append):
        assert trace.complete
    return reports[-1]


def replay_samples(client: RouteClient, model: Any, samples: Sequence[Sample]) -> float:
    """Replay samples in a Transformers model, one micro-batch each; return the mean logit."""
    layout = ModelLayout.from_config(model.config)
    rank = Rank(layout.layer_ids, flatten="batch")
    plans = [FetchPlan.make(layout, MicroBatch.packed([sample]), rank) for sample in samples]
    logits = []
    with client.prefetch(plans, wait_for="end") as fetched, torch.no_grad():
        for sample, rows in zip(samples, fetched, strict=True):
            with replay(model, rows):
                logits.append(model(torch.as_tensor(sample.token_ids)[None]).logits.mean())
    return float(torch.stack(logits).mean())


def replay_in_megatron(
    client: RouteClient,
    model: Any,
    layout: ModelLayout,
    micro_batches: Sequence[MicroBatch],
    schedule: Callable[[], object],
) -> None:
    """Run a schedule of Megatron with the routing of its micro-batches."""
    rank = megatron.local_rank(model)
    plans = [FetchPlan.make(layout, batch, rank) for batch in micro_batches]
    with client.prefetch(plans, wait_for="end") as rows, megatron.replay(model, rows):
        schedule()


def follow(client: RouteClient, name: str) -> int:
    """Read the rows as they arrive while a request runs; return their number."""
    num_rows = 0
    for part in client.follow(name):  # one that starts earlier replaces rows
        num_rows = part.token_start + len(part.topk_ids)
    return num_rows


def prefetch(target: str, plans: Sequence[FetchPlan]) -> float:
    """Fetch plans in the background, under options of the client; return the valid share."""
    options = ReadOptions(wait_for="end", missing="mask", timeout=60)
    with RouteClient(target, options=options) as client, client.prefetch(plans) as fetched:
        return min(rows.coverage for rows in fetched)


def convert(client: RouteClient, name: str) -> list[tuple[int, ...]]:
    """Return the shapes of a trace in the layouts of three frameworks."""
    trace = client.get(name)
    arrays = (
        verl.routed_experts(trace),
        slime.rollout_routed_experts(trace),
        nemo_rl.routed_experts(trace),
    )
    return [array.shape for array in arrays]


def operate(client: RouteClient) -> tuple[int, int, int]:
    """Look for traces that lack rows; retire and delete. Return the number of each."""
    found = list(client.find(labels={"step": "41"}, states=["incomplete"], limit=20))
    for stat in found:
        print(stat.trace_id, stat.missing)
    deleted = client.delete("own", "unknown", missing_ok=True)
    return len(found), deleted, client.retire_through(41).traces


def main() -> None:
    """Run the example."""
    model = build_model(num_layers=2).eval()
    layout = ModelLayout.from_config(model.config)
    names = ["g0", "g1"]
    with tempfile.TemporaryDirectory() as data_dir, run_server(data_dir=Path(data_dir)) as server:
        tokens = roll_out(server.target, model, names)
        run_an_engine(server.target, layout, [5, 6, 7], 10)
        lengths = [len(text.encode()) for text in PROMPTS[: len(names)]]
        width = max(lengths)
        samples = [
            Sample.of(name, token_ids=row[width - length :].tolist())
            for name, row, length in zip(names, tokens, lengths, strict=True)
        ]
        rank = Rank(layout.layer_ids)
        plans = [FetchPlan.make(layout, MicroBatch.packed([sample]), rank) for sample in samples]
        with RouteClient(server.target) as client:
            print("get_one", get_one(client, "own"))
            done = get_many(client, [*names, "own"])
            print(f"get_many {done.done} of {done.total}, {done.bytes} bytes")
            print(f"replay_samples {replay_samples(client, model, samples):.4f}")
            print("follow", follow(client, "g0"))
            print(f"prefetch {prefetch(server.target, plans):.0%}")
            print("convert", *convert(client, "own"))
            print("operate", *operate(client))


if __name__ == "__main__":
    main()
