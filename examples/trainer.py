"""A trainer rank: finds the traces of a node's samples, and replays them in its own forward pass.

Reports how far its own routers agree, which the web page and the dashboard show.
Takes the samples from the file that examples/node.py wrote and their routing from the server. Reads
ROUTETRACE_TARGET and ROUTETRACE_RUN.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from contextlib import ExitStack
from pathlib import Path

import torch
from tiny_moe import build_model

from routetrace.client import (
    FetchPlan,
    MicroBatch,
    ModelLayout,
    Rank,
    ReadOptions,
    RouteClient,
    Sample,
)
from routetrace.trainers.agreement import AgreementLog
from routetrace.trainers.replay import replay


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rollouts", type=Path, help="file of the samples, as the node wrote it")
    parser.add_argument("--target", default=os.environ.get("ROUTETRACE_TARGET", "127.0.0.1:7411"))
    parser.add_argument("--run", default=os.environ.get("ROUTETRACE_RUN", "default"))
    parser.add_argument("--wait", type=float, default=30, help="seconds to wait for each trace")
    args = parser.parse_args()

    lines = args.rollouts.read_text("utf-8").splitlines()
    samples = {sample["trace_id"]: sample["tokens"] for sample in map(json.loads, lines)}
    model = build_model().eval()
    layout = ModelLayout.from_config(model.config)
    rank = Rank(layout.layer_ids, flatten="batch")
    # The routing must be that of these very tokens.
    batches = [
        MicroBatch.packed([Sample.of(name, token_ids=tokens)]) for name, tokens in samples.items()
    ]
    with ExitStack() as stack:
        client = stack.enter_context(RouteClient(args.target, run=args.run))
        found = {stat.trace_id for stat in client.find(labels={"source": "node"})}
        print(f"{len(samples)} samples, of which the server knows {len(found & samples.keys())}")
        print("sample   rows  coverage  routers that disagreed")
        coverage: list[float] = []
        log = AgreementLog(_print, client=client)
        plans = [FetchPlan.make(layout, batch, rank) for batch in batches]
        options = ReadOptions(wait_for="end", timeout=args.wait, missing="mask")
        fetched = stack.enter_context(client.prefetch(plans, options=options))
        for (name, tokens), rows in zip(samples.items(), fetched, strict=True):
            with torch.no_grad(), replay(model, rows, compare=True) as replayed:
                # A policy gradient needs log-probabilities under the experts of the rollout.
                model(torch.tensor([tokens]))
            coverage.append(rows.coverage)
            log.add(replayed.agreement)
            differing = replayed.disagreement or 0.0
            print(f"{name:<8} {rows.stats.rows:4}  {coverage[-1]:8.1%}  {differing:22.1%}")
        print(f"coverage {sum(coverage) / len(coverage):.1%}")
        log.end_step(0)
    return 0 if min(coverage) == 1 else 1


def _print(metrics: dict[str, float], _: int) -> None:
    print(f"routers that disagreed {metrics['routing/disagreement']:.1%}")


if __name__ == "__main__":
    sys.exit(main())
