"""An inference node: rolls out groups of samples, and streams their routing to a server.

Writes the samples of a rollout for its trainer, a line of JSON each, without any routing:
that travels by way of the server, under the request id. Reads ROUTETRACE_TARGET and ROUTETRACE_RUN.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

import torch
from tiny_moe import PROMPTS, build_model, encode

from routetrace.capture_agent import AgentConfig, CaptureAgent, ModelLayout
from routetrace.capture_agent.transformers import TransformersCapture


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rollouts", type=Path, help="file of the samples, to be written")
    parser.add_argument("--target", default=os.environ.get("ROUTETRACE_TARGET", "127.0.0.1:7411"))
    parser.add_argument("--run", default=os.environ.get("ROUTETRACE_RUN", "default"))
    parser.add_argument("--groups", type=int, default=4, help="prompts")
    parser.add_argument("--samples", type=int, default=4, help="samples per prompt")
    parser.add_argument("--batch", type=int, default=2, help="prompts that are rolled out together")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens per sample")
    args = parser.parse_args()

    model = build_model().to(torch.bfloat16).eval()
    prompts = [PROMPTS[g % len(PROMPTS)] for g in range(args.groups)]
    config = AgentConfig(
        target=args.target,
        run=args.run,
        engine_id="node-0",
        layout=ModelLayout.from_config(model.config),
    )
    agent = CaptureAgent(config)
    try:
        capture = TransformersCapture(model, agent)
        with args.rollouts.open("w", encoding="utf-8") as out:
            for first in range(0, args.groups, args.batch):
                batch = range(first, min(first + args.batch, args.groups))
                names = [f"g{g}-s{s}" for g in batch for s in range(args.samples)]
                input_ids, mask = encode([prompts[g] for g in batch])
                sequences = capture.generate(
                    input_ids,
                    mask,
                    request_ids=names,
                    labels=[{"source": "node", "group": name.partition("-")[0]} for name in names],
                    num_return_sequences=args.samples,
                    max_new_tokens=args.tokens,
                    do_sample=True,
                )
                padding = (mask == 0).sum(1).repeat_interleave(args.samples).tolist()
                for name, row, pad in zip(names, sequences.tolist(), padding, strict=True):
                    print(json.dumps({"trace_id": name, "tokens": row[pad:]}), file=out)
                print(f"rolled out {names[0]} to {names[-1]}", flush=True)
    finally:
        report = agent.close()
    stats = agent.stats()
    print(f"rows offered {stats.offered_rows}, acknowledged {report.acknowledged_rows}")
    print(f"rows dropped {report.dropped_rows}, unsent {report.unsent_rows}")
    print(f"bytes sent {stats.sent_bytes} in {stats.chunks} chunks")
    return 0 if report.acknowledged_rows == stats.offered_rows else 1


if __name__ == "__main__":
    sys.exit(main())
