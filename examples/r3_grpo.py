"""A small GRPO loop with Rollout Routing Replay: rollouts in bfloat16, training in float32.

The reward can be checked by eye: the share of spaces and lower-case letters among the generated
bytes. Each step rolls out groups of samples, fetches their routing, and replays the same trace in
the old-logprob pass and in the train pass; then the weights, and the weight version, move on, and
traces of older versions are retired.
"""

from __future__ import annotations

import argparse
import copy
import os
from contextlib import ExitStack
from typing import Any

import torch
from tiny_moe import PROMPTS, build_model, encode

from routetrace.capture_agent import AgentConfig, CaptureAgent
from routetrace.capture_agent.transformers import TransformersCapture
from routetrace.client import FetchPlan, MicroBatch, ModelLayout, Rank, RouteClient, Sample
from routetrace.server.testing import run_server
from routetrace.trainers.replay import replay


def reward(tokens: torch.Tensor) -> torch.Tensor:
    """Share of bytes in [a-z ], for each row of [batch, new tokens]."""
    good = ((tokens >= ord("a")) & (tokens <= ord("z"))) | (tokens == ord(" "))
    return good.float().mean(-1)


def token_logp(model: Any, tokens: torch.Tensor, mask: torch.Tensor, new: int) -> torch.Tensor:
    """Log-probabilities of the last `new` tokens of each row, [batch, new]."""
    logits = model(tokens, attention_mask=mask).logits[:, -new - 1 : -1]
    logp: torch.Tensor = logits.log_softmax(-1).gather(-1, tokens[:, -new:, None])[..., 0]
    return logp


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--samples", type=int, default=16, help="samples per prompt")
    parser.add_argument("--tokens", type=int, default=24, help="new tokens per sample")
    parser.add_argument("--epochs", type=int, default=2, help="updates on each batch")
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--target", default=os.environ.get("ROUTETRACE_TARGET"))
    args = parser.parse_args()

    policy = build_model(num_layers=3)
    engine = copy.deepcopy(policy).to(torch.bfloat16).eval()
    layout = ModelLayout.from_config(policy.config)
    rank = Rank(layout.layer_ids, flatten="batch")
    optimizer = torch.optim.AdamW(policy.parameters(), lr=args.lr)
    prompts = [prompt[:32] for prompt in PROMPTS[:2]]
    new = args.tokens
    rewards = []

    with ExitStack() as stack:
        target = args.target or stack.enter_context(run_server()).target
        client = stack.enter_context(RouteClient(target, run="r3-grpo"))
        config = AgentConfig(target=target, run="r3-grpo", engine_id="rollout-0", layout=layout)
        agent = stack.enter_context(CaptureAgent(config))
        capture = TransformersCapture(engine, agent)
        print("step  reward  routers that disagree  |log ratio| at first pass  clipped")
        for step in range(args.steps):
            agent.set_weight_version(step)
            names = [f"step{step}-{i}" for i in range(len(prompts) * args.samples)]
            input_ids, prompt_mask = encode(prompts)
            with torch.no_grad():
                output = capture.generate(
                    input_ids=input_ids,
                    attention_mask=prompt_mask,
                    request_ids=names,
                    labels=[
                        {"step": str(step), "group": str(i // args.samples)}
                        for i in range(len(names))
                    ],
                    num_return_sequences=args.samples,
                    max_new_tokens=new,
                    do_sample=True,
                    return_dict_in_generate=True,
                    output_logits=True,
                )
            tokens = output.sequences
            mask = prompt_mask.repeat_interleave(args.samples, 0)
            mask = torch.cat([mask, mask.new_ones(len(names), new)], 1)
            score = reward(tokens[:, -new:])
            rewards.append(score.mean().item())
            groups = score.view(len(prompts), args.samples)
            advantage = (groups - groups.mean(1, keepdim=True)) / (
                groups.std(1, keepdim=True) + 1e-4
            )
            advantage = advantage.view(-1, 1)

            samples = [
                Sample.of(name, token_ids=row[there.bool()])
                for name, row, there in zip(names, tokens, mask, strict=True)
            ]
            batch = MicroBatch.padded(samples, tokens.shape[1], padding_side="left")
            # Rows that other weights computed would be missing, which is an error.
            plan = FetchPlan.make(layout, batch, rank)
            rows = client.fetch(plan, wait_for="end", timeout=30, weight_version=step)
            # Old log-probabilities, and the same rows again in every train pass.
            with torch.no_grad(), replay(policy, rows, compare=True) as r:
                old = token_logp(policy, tokens, mask, new)
            rolled = torch.stack(output.logits, 1).float().log_softmax(-1)
            rolled = rolled.gather(-1, tokens[:, -new:, None])[..., 0]
            ratio = clipped = torch.ones(())
            for _ in range(args.epochs):
                # With activation checkpointing the backward pass routes again: keep it inside.
                with replay(policy, rows):
                    ratio = (token_logp(policy, tokens, mask, new) - old).exp()
                    clipped = ratio.clamp(0.8, 1.2)
                    loss = -torch.minimum(ratio * advantage, clipped * advantage).mean()
                    optimizer.zero_grad()
                    torch.autograd.backward(loss)
                torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
                optimizer.step()
            print(
                f"{step:4d}  {rewards[-1]:6.3f}  {r.disagreement:21.1%}"
                f"  {(old - rolled).abs().mean().item():26.4f}"
                f"  {(ratio != clipped).float().mean().item():7.1%}"
            )
            engine.load_state_dict(policy.state_dict())  # rounds to bfloat16
            client.retire_through(step)
    third = max(1, args.steps // 3)
    first, last = sum(rewards[:third]) / third, sum(rewards[-third:]) / third
    print(f"reward: {first:.3f} in the first {third} steps, {last:.3f} in the last {third}")


if __name__ == "__main__":
    main()
