"""Cost of served experts beside the library's own kernels, with a slot for every expert.

By hand: `python benchmarks/serve_kernels.py [--device cuda] [--quick]`. One layer of experts with
the sizes of Qwen3-30B-A3B (an eighth of them on a CPU). CPU time there, wall-clock time on a
device.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from measure import Table, ratios, rounds
from routetrace.experts.transformers import serve_experts

TOP_K = 8


def layer(config: Qwen3MoeConfig, implementation: str, device: str) -> nn.ModuleDict:
    """Experts with random weights, the same each time."""
    config._experts_implementation = implementation
    torch.manual_seed(0)
    experts = Qwen3MoeExperts(config).to(device, torch.bfloat16)
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=0.02)
    return nn.ModuleDict({"experts": experts})


def timed(call: Callable[[], object], device: str, repeat: int) -> Callable[[], float]:
    """A cell: seconds of one call."""
    clock = time.process_time if device == "cpu" else time.perf_counter

    def cell() -> float:
        start = clock()
        for _ in range(repeat):
            call()
        if device != "cpu":
            torch.cuda.synchronize()
        return (clock() - start) / repeat

    return cell


def measure(table: Table, device: str) -> None:
    scale = 8 if device == "cpu" else 1
    hidden_size, num_experts = 2048, 128 // scale
    count = 3 if table.quick else 15
    for implementation in ("grouped_mm", "batched_mm"):
        config = Qwen3MoeConfig(
            hidden_size=hidden_size,
            moe_intermediate_size=768,
            num_experts=num_experts,
            num_experts_per_tok=TOP_K,
        )
        ours, theirs = (layer(config, implementation, device) for _ in range(2))
        for tokens in (1, 16) if table.quick or implementation == "batched_mm" else (1, 16, 256):
            hidden = torch.randn(tokens, hidden_size, device=device, dtype=torch.bfloat16)
            chosen = torch.rand(tokens, num_experts, device=device).topk(TOP_K)
            call = (hidden, chosen.indices, chosen.values.bfloat16())
            with serve_experts(ours, capacity=num_experts), torch.no_grad():
                if not torch.equal(ours["experts"](*call), theirs["experts"](*call)):
                    raise AssertionError(f"{implementation}: other outputs at {tokens} tokens")
                repeat = 4 if tokens < 64 else 1
                cells = {
                    "served": timed(partial(ours["experts"], *call), device, repeat),
                    "library": timed(partial(theirs["experts"], *call), device, repeat),
                }
                found = rounds(cells, count)
            table.add(
                f"{implementation}, {tokens} tokens: speed, served",
                ratios(found["library"], found["served"]),
                "x",
                "the library's kernel, all experts resident",
                ">= 0.9",
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--quick", action="store_true", help="only that it runs")
    args = parser.parse_args()
    measure(Table(args.quick), args.device)
