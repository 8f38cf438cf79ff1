"""GRPO in 40 lines: rollouts in bfloat16, training in float32, and the rollout's routing in both.

Two lines are about routing, those with `capture` and `auto`: no id goes from the rollout to the
trainer. Prints the reward, and the share of cells whose rows were found.
"""

from __future__ import annotations

import copy

import torch
from tiny_moe import PROMPTS, build_model, encode

from routetrace.capture_agent import CaptureAgent
from routetrace.capture_agent.transformers import TransformersCapture
from routetrace.client import ModelLayout, RouteClient
from routetrace.server.testing import run_server
from routetrace.trainers.replay import auto

GROUP, NEW, STEPS = 16, 24, 6
policy = build_model(num_layers=3)
engine = copy.deepcopy(policy).to(torch.bfloat16).eval()
optimizer = torch.optim.AdamW(policy.parameters(), lr=5e-4)


def logp(tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Log-probabilities [batch, NEW] of the answers."""
    logits = policy(tokens, attention_mask=mask).logits[:, -NEW - 1 : -1]
    chosen: torch.Tensor = logits.log_softmax(-1).gather(-1, tokens[:, -NEW:, None])[..., 0]
    return chosen


with (
    run_server() as server,
    RouteClient(server.target) as client,
    CaptureAgent(
        target=server.target, engine_id="rollout", layout=ModelLayout.from_config(policy.config)
    ) as agent,
):
    capture = TransformersCapture(engine, agent)
    replayed = auto(policy, client, missing="raise", equal="any")
    for step in range(STEPS):
        prompts, mask = encode([prompt[:32] for prompt in PROMPTS[:2]])
        tokens = capture.generate(
            input_ids=prompts,
            attention_mask=mask,
            num_return_sequences=GROUP,
            max_new_tokens=NEW,
            do_sample=True,
        )
        mask = torch.cat([mask.repeat_interleave(GROUP, 0), mask.new_ones(2 * GROUP, NEW)], 1)
        good = (tokens[:, -NEW:] >= ord("a")) & (tokens[:, -NEW:] <= ord("z"))
        reward = good.float().mean(-1).view(2, GROUP)
        advantage = ((reward - reward.mean(1, True)) / (reward.std(1, keepdim=True) + 1e-4)).view(
            -1, 1
        )
        with torch.no_grad():
            old = logp(tokens, mask)
        for _ in range(2):
            ratio = (logp(tokens, mask) - old).exp()
            loss = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
        engine.load_state_dict(policy.state_dict())
        print(f"step {step}: reward {reward.mean():.3f}, {replayed.totals}")
