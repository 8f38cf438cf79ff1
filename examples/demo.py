"""From a rollout in bfloat16 to a training forward in float32 that takes the same experts.

Starts a real server in a process of its own, rolls out groups of samples with a small Qwen3-MoE
while the agent captures the routing, plans the trainer's batch, fetches its rows with RouteClient,
and replays them. Prints the bytes that crossed the wire, and the distance of rollout and trainer
without replay, with right rows, and with rows that are at a wrong place.

The model is small, of 6 layers with 32 experts and top-4 each; its weights are random, and scaled
so that the precisions disagree about as many routers as those of large models do. Prompts are short
texts, and tokens are their bytes. All other parts are those of a training job.
"""

from __future__ import annotations

import argparse
import copy
import sys
import tempfile
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tiny_moe import PROMPTS, build_model, encode

from routetrace.capture_agent import AgentConfig, CaptureAgent
from routetrace.capture_agent.transformers import TransformersCapture
from routetrace.client import FetchPlan, MicroBatch, ModelLayout, Rank, RouteClient, Sample
from routetrace.server.testing import run_server
from routetrace.trainers.replay import Replay, replay


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=4, help="groups")
    parser.add_argument("--samples", type=int, default=4, help="samples per group")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens per sample")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()

    print(
        "A Qwen3-MoE of 6 layers, 32 experts and top-4 with random weights, scaled so that bf16\n"
        f"and fp32 disagree as in large models; {args.prompts} short prompts, {args.samples} "
        f"samples of {args.tokens} tokens each, on {args.device}."
    )
    trainer = build_model().to(args.device)
    rollout = copy.deepcopy(trainer).to(torch.bfloat16)
    layout = ModelLayout.from_config(trainer.config)
    prompts = list(PROMPTS[: args.prompts])
    names = [f"group{g}-sample{s}" for g in range(len(prompts)) for s in range(args.samples)]
    labels = [{"group": str(i // args.samples)} for i in range(len(names))]

    with tempfile.TemporaryDirectory() as data_dir, run_server(data_dir=Path(data_dir)) as server:
        print(f"routetrace-server: process {server.pid}, {server.target}, storing in {data_dir}")
        # No reader follows the generation: rows may wait for full frames.
        config = AgentConfig(
            target=server.target, engine_id="rollout-0", layout=layout, linger_seconds=60
        )
        with CaptureAgent(config) as agent:
            input_ids, mask = (tensor.to(args.device) for tensor in encode(prompts))
            capture = TransformersCapture(rollout, agent)
            output = capture.generate(
                input_ids=input_ids,
                attention_mask=mask,
                request_ids=names,
                labels=labels,
                num_return_sequences=args.samples,
                max_new_tokens=args.tokens,
                do_sample=True,
                return_dict_in_generate=True,
                output_logits=True,
            )
        sequences = output.sequences
        mask = mask.repeat_interleave(args.samples, 0)
        mask = torch.cat([mask, mask.new_ones(len(names), args.tokens)], 1)
        # The batch as the trainer pads it, and the tokens that the rows must be of.
        samples = [
            Sample.of(name, token_ids=tokens[there.bool()])
            for name, tokens, there in zip(names, sequences.cpu(), mask.cpu(), strict=True)
        ]
        batch = MicroBatch.padded(samples, sequences.shape[1], padding_side="left")
        plan = FetchPlan.make(layout, batch, Rank(layout.layer_ids, flatten="batch"))
        with RouteClient(server.target) as client:
            rows = client.fetch(plan, wait_for="end", timeout=30)
            sent = agent.stats().sent_bytes
    print(f"{plan!r}")
    print(f"{rows!r}, {sum(map(bool, rows.verified))} requests proven by their tokens")

    # The rollout's own distributions of the generated tokens; each arm gives the trainer's.
    rollout_logp = torch.stack(output.logits, 1).float().log_softmax(-1)

    def divergence(model: Any, context: AbstractContextManager[Any]) -> float:
        """KL(rollout || model) of a token, over the generated tokens."""
        with torch.no_grad(), context:
            logits = model(sequences, attention_mask=mask).logits.float()
        logp = logits[:, -args.tokens - 1 : -1].log_softmax(-1)
        return float((rollout_logp.exp() * (rollout_logp - logp)).sum(-1).mean())

    replaying = replay(trainer, rows, compare=True)
    # The rows as [sample, position, layer, top-k], to put some at the wrong place.
    shape = (*sequences.shape, len(layout.layer_ids))
    ids = rows.topk_ids.swapaxes(0, 1).reshape(*shape, layout.top_k)
    valid = rows.valid.swapaxes(0, 1).reshape(shape)

    def misplaced(axis: int) -> Replay:
        """Replay each row one sample (axis 0) or one token (axis 1) late."""
        moved, there = np.roll(ids, 1, axis), np.roll(valid, 1, axis)
        return replay(trainer, moved, layer_ids=layout.layer_ids, valid=there)

    arms = {
        "no replay": divergence(trainer, nullcontext()),
        "the same bf16 model, one full forward": divergence(rollout, nullcontext()),
        "replay: right rows": divergence(trainer, replaying),
        "replay: rows of another sample": divergence(trainer, misplaced(0)),
        "replay: rows one token late": divergence(trainer, misplaced(1)),
    }

    count = plan.num_rows
    cells = len(layout.layer_ids) * layout.top_k
    table = [
        ("tokens", f"{sum(sample.num_tokens for sample in samples):,}"),
        ("rows (tokens - 1 per trace)", f"{count:,}"),
        ("coverage", f"{rows.coverage:.1%}"),
        ("bytes per row, int32", f"{4 * cells}"),
        ("bytes per row, uint8", f"{cells}"),
        (
            "bytes per row, sent",
            f"{sent / count:.1f}  ({4 * cells * count / sent:.1f} x less than int32, "
            f"{cells * count / sent:.1f} x less than uint8)",
        ),
        ("routers that disagree, bf16 / fp32", f"{replaying.disagreement:.1%}"),
    ]
    print()
    for name, value in table:
        print(f"  {name:<40} {value}")
    none = arms["no replay"]
    print(f"\n  {'trainer':<40} KL(rollout || trainer)")
    for name, kl in arms.items():
        ratio = none / kl if kl < none else kl / none
        far = "closer" if kl < none else "farther"
        print(f"  {name:<40} {kl:.3e}" + (f"  {ratio:.1f} x {far}" if kl != none else ""))
    print()
    _, _, right, *wrong = arms.values()
    if not right < none < min(wrong):
        print("expected right rows to bring the trainer closer, wrong ones not", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
