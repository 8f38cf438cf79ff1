"""A trainer rank: finds the traces of a node's samples, and replays them in its own forward pass.

Takes the samples from the file that examples/node.py wrote and their routing from the server. Reads
ROUTETRACE_TARGET and ROUTETRACE_RUN.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

import torch
from tiny_moe import build_model

from routetrace.client import RouteClient
from routetrace.client.replay import collate, replay


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rollouts", type=Path, help="file of the samples, as the node wrote it")
    parser.add_argument("--target", default=os.environ.get("ROUTETRACE_TARGET", "127.0.0.1:7411"))
    parser.add_argument("--run", default=os.environ.get("ROUTETRACE_RUN", "default"))
    parser.add_argument("--wait", type=float, default=30, help="seconds to wait for each trace")
    args = parser.parse_args()

    lines = args.rollouts.read_text("utf-8").splitlines()
    samples = {sample["request_id"]: sample["tokens"] for sample in map(json.loads, lines)}
    model = build_model().eval()
    with RouteClient(args.target, run=args.run) as client:
        found = {stat.request_id for stat in client.find(labels={"source": "node"})}
        print(f"{len(samples)} samples, of which the server knows {len(found & samples.keys())}")
        print("sample   rows  coverage  routers that disagreed")
        coverage: list[float] = []
        disagreement: list[float] = []
        for name, tokens in samples.items():
            trace = client.get(name, wait=args.wait, missing="mask")
            # The routing is that of these very tokens, or this raises.
            trace.verify_tokens(tokens)
            input_ids = torch.tensor([tokens])
            ids, valid = collate([trace], [len(tokens)], len(tokens))
            replaying = replay(model, ids, layer_ids=trace.layer_ids, valid=valid, compare=True)
            with torch.no_grad(), replaying as replayed:
                # What a policy gradient needs: log-probabilities under the experts of the rollout.
                model(input_ids)
            coverage.append(trace.coverage)
            disagreement.append(replayed.disagreement or 0.0)
            print(f"{name:<8} {len(trace):4}  {coverage[-1]:8.1%}  {disagreement[-1]:22.1%}")
    print(f"coverage {sum(coverage) / len(coverage):.1%}")
    print(f"routers that disagreed {sum(disagreement) / len(disagreement):.1%}")
    return 0 if min(coverage) == 1 else 1


if __name__ == "__main__":
    sys.exit(main())
