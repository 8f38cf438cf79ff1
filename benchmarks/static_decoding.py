"""Cost of a decode step of transformers on a static cache: compiled, not compiled, captured.

By hand: `python benchmarks/static_decoding.py [--device cuda] [--tokens 64] [--rounds 7]`. The
model is a small Qwen3-MoE with random weights. Ways take turns within a round; the first round, in
which programs are compiled, is printed apart. CPU time on the CPU, else wall-clock time.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers
from transformers import CompileConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM

from routetrace.capture_agent import AgentConfig, CaptureAgent
from routetrace.capture_agent.engines.transformers import TransformersCapture
from routetrace.common.layout import ModelLayout
from routetrace.server.testing import run_server

PROMPT = 16


def small_model(layers: int, width: int, device: str) -> Any:
    """Return a model with random weights that never samples an end token."""
    make_config: Any = Qwen3MoeConfig  # its own signature is cut short
    config = make_config(
        vocab_size=4096,
        hidden_size=width,
        moe_intermediate_size=width,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=width // 8,
        num_experts=32,
        num_experts_per_tok=4,
        eos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    model: Any = Qwen3MoeForCausalLM(config)
    return model.to(device, dtype).eval()


def measure(
    ways: dict[str, Callable[[], object]], rounds: int, tokens: int, device: str
) -> dict[str, list[float]]:
    """Return milliseconds per token of each way and round."""
    clock = time.process_time if device == "cpu" else time.perf_counter
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds + 1):
        for name, way in ways.items():
            start = clock()
            way()
            if device != "cpu":
                torch.cuda.synchronize()
            taken[name].append((clock() - start) / tokens * 1e3)
    return taken


def main() -> None:
    """Print a line for each way."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    model = small_model(args.layers, args.width, args.device)
    layout = ModelLayout.from_config(model.config)
    compiled: Any = CompileConfig()
    compiled._compile_all_devices = True  # the library compiles by itself on devices only
    print(f"transformers {transformers.__version__}, torch {torch.__version__}, {args.device}")
    with (
        run_server() as server,
        CaptureAgent(AgentConfig(target=server.target, engine_id="bench", layout=layout)) as agent,
    ):
        capture = TransformersCapture(model, agent)
        for batch in args.batch:
            prompt = torch.randint(1, 4096, (batch, PROMPT), device=args.device)
            mask = torch.ones_like(prompt)
            kwargs = {"max_new_tokens": args.tokens, "do_sample": False}
            static = {**kwargs, "cache_implementation": "static"}
            count = itertools.count()

            def library(
                options: dict[str, Any],
                prompt: torch.Tensor = prompt,
                mask: torch.Tensor = mask,
            ) -> Callable[[], object]:
                return lambda: model.generate(input_ids=prompt, attention_mask=mask, **options)

            def captured(
                options: dict[str, Any],
                prompt: torch.Tensor = prompt,
                count: Iterator[int] = count,
            ) -> Callable[[], object]:
                return lambda: capture.generate(
                    prompt,
                    request_ids=[f"{len(prompt)}-{next(count)}" for _ in prompt],
                    **options,
                )

            ways = {
                "dynamic cache": library(kwargs),
                "dynamic cache, captured": captured(kwargs),
                "static cache": library({**static, "disable_compile": True}),
                "static cache, compiled": library({**static, "compile_config": compiled}),
                "static cache, captured": captured({**static, "disable_compile": True}),
                "static, compiled, captured": captured({**static, "compile_config": compiled}),
            }
            taken = measure(ways, args.rounds, args.tokens, args.device)
            base = taken["static cache"][1:]
            for name, all_rounds in taken.items():
                each = all_rounds[1:]
                ratio = statistics.median(a / b for a, b in zip(each, base, strict=True))
                print(
                    f"batch {batch:3d}  {name:26s} {statistics.median(each):8.2f} ms/token "
                    f"({min(each):.2f}-{max(each):.2f})  {ratio:5.2f}x of static uncompiled, "
                    f"first call {all_rounds[0] * args.tokens / 1e3:.1f} s"
                )
            assert capture.failures == 0


if __name__ == "__main__":
    main()
