"""From a rollout in bfloat16 to a training forward in float32 that takes the same experts.

Starts a real server, rolls out groups of samples with a small Qwen3-MoE while the agent captures
the routing, plans the trainer's batch, fetches its rows with RouteClient, and replays them. Prints
what crossed the wire and how far rollout and trainer are apart, without and with replay.
"""

from __future__ import annotations

import argparse
import copy
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path

import torch
from tiny_moe import PROMPTS, build_model, encode

from routetrace.capture_agent import AgentConfig, CaptureAgent
from routetrace.capture_agent.transformers import TransformersCapture
from routetrace.client import MicroBatch, Rank, RouteClient, Sample, make_plan
from routetrace.client.replay import replay
from routetrace.server.testing import run_server
from routetrace.v1.model_map import layout_from_config


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=4, help="groups")
    parser.add_argument("--samples", type=int, default=4, help="samples per group")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens per sample")
    args = parser.parse_args()

    trainer = build_model()
    rollout = copy.deepcopy(trainer).to(torch.bfloat16)
    layout = layout_from_config(trainer.config)
    prompts = list(PROMPTS[: args.prompts])
    names = [f"group{g}-sample{s}" for g in range(len(prompts)) for s in range(args.samples)]
    labels = [{"group": str(i // args.samples)} for i in range(len(names))]

    with tempfile.TemporaryDirectory() as data_dir, run_server(data_dir=Path(data_dir)) as server:
        print(f"routetrace-server on {server.target}, storing in {data_dir}")
        # Nobody follows while the rows are generated: let them wait for full frames.
        config = AgentConfig(
            target=server.target, engine_id="rollout-0", layout=layout, linger_s=60
        )
        with CaptureAgent(config) as agent:
            input_ids, mask = encode(prompts)
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
            for name, tokens, there in zip(names, sequences, mask, strict=True)
        ]
        batch = MicroBatch.padded(samples, sequences.shape[1], padding_side="left")
        plan = make_plan(layout, batch, Rank(layout.layer_ids, flatten="batch"))
        with RouteClient(server.target) as client:
            rows = client.fetch(plan, wait=30)
            sent = agent.stats().sent_bytes
    print(f"{plan!r}")
    print(f"{rows!r}, {sum(map(bool, rows.verified))} requests proven by their tokens")

    # The rollout's own distributions of the generated tokens, and the trainer's of the same tokens.
    rollout_logp = torch.stack(output.logits, 1).float().log_softmax(-1)
    kl = {}
    replaying = replay(trainer, rows, compare=True)
    for name, context in (("without replay", nullcontext()), ("with replay", replaying)):
        with torch.no_grad(), context:
            logits = trainer(sequences, attention_mask=mask).logits
        logp = logits[:, -args.tokens - 1 : -1].log_softmax(-1)
        kl[name] = (rollout_logp.exp() * (rollout_logp - logp)).sum(-1).mean().item()

    count = plan.num_rows
    int32 = 4 * len(layout.layer_ids) * layout.top_k
    table = [
        ("tokens", f"{sum(sample.num_tokens for sample in samples):,}"),
        ("rows (tokens - 1 per trace)", f"{count:,}"),
        ("coverage", f"{rows.coverage:.1%}"),
        ("bytes per row, int32", f"{int32}"),
        ("bytes per row, sent", f"{sent / count:.1f}  ({int32 * count / sent:.1f} x less)"),
        ("routers that disagree, bf16 / fp32", f"{replaying.disagreement:.1%}"),
        ("KL(rollout || trainer) without replay", f"{kl['without replay']:.3e}"),
        ("KL(rollout || trainer) with replay", f"{kl['with replay']:.3e}"),
        ("ratio", f"{kl['without replay'] / kl['with replay']:.1f} x closer"),
    ]
    print()
    for name, value in table:
        print(f"  {name:<40} {value}")
    print()
    if not kl["with replay"] < kl["without replay"]:
        print("replay brought rollout and trainer no closer", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
