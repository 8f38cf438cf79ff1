"""Cost of capture, replay and served experts on a GPU, beside their baselines.

Prints the table and, where all of it ran on a device, writes gpu_results.json with its name. Fails
without a CUDA device; `--dry` runs everything on the CPU with small shapes, which shows that it
runs: its figures mean nothing, and nothing is written.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import json
import platform
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from capture_cuda import Layers, Steps
from gpu_vllm import decode
from measure import HERE, Table, ratios, rounds, seconds
from reads.load import draw, fill
from routetrace.capture_agent.engines.capturer import RoutingCapturer
from routetrace.client import RouteClient
from routetrace.common.layout import ModelLayout
from routetrace.experts.transformers import serve_experts
from routetrace.server.testing import run_server

RESULTS = HERE / "gpu_results.json"


def capture(table: Table, dry: bool, count: int, _more: Any) -> None:
    """A CUDA graph of 48 MoE layers with capture, beside the same without."""
    device = "cpu" if dry else "cuda"
    layers, width, steps = (3, 32, 3) if dry else (48, 2048, 200)
    layout = ModelLayout(tuple(range(layers)), layers, 128, 8)
    capturer = RoutingCapturer(layout, 256 if dry else 8192, device)
    for tokens in (1, 64, 256):
        model = Layers(layout, width, tokens, device)
        without, with_it = Steps(model, None), Steps(model, capturer)
        if wrong := with_it.wrong_rows(max(1, steps // 10)):
            raise RuntimeError(f"{wrong} rows of {tokens} tokens a step are wrong")
        found = rounds(
            {
                "with": lambda s=with_it: s.time(steps),  # type: ignore[misc]
                "without": lambda s=without: s.time(steps),  # type: ignore[misc]
            },
            count,
        )
        name = f"graph of MoE layers, {tokens} tokens a step"
        table.add(name, found["without"], "us", "")
        some = ratios(found["with"], found["without"])
        table.add(f"{name}: with capture", some, "x", "no capture", "<= 1.02")


def to_torch(table: Table, dry: bool, count: int, _more: Any) -> None:
    """A trace in page-locked memory, as a tensor on the device."""
    device, tokens = ("cpu", 512) if dry else ("cuda", 65_536)
    with run_server() as server, RouteClient(server.target) as client:
        (name,) = fill(server.target, draw(256), "to-torch", 1, tokens, 1, rows=256)
        trace = client.get(name, wait_for="end", timeout=60, pin_memory=not dry)
    plain = torch.empty(trace.topk_ids.size, dtype=torch.uint8, pin_memory=not dry)

    def ours() -> None:
        trace.to_torch(device)
        _synchronize(dry)

    def theirs() -> None:
        plain.to(device, non_blocking=True)
        _synchronize(dry)

    found = rounds({"ours": seconds(ours, 20), "theirs": seconds(theirs, 20)}, count)
    rate = [plain.nbytes / time / 1e9 for time in found["ours"]]
    table.add("to_torch of a trace", rate, "GB/s", f"{plain.nbytes / 1e6:.1f} MB, pinned")
    same = ratios(found["theirs"], found["ours"])
    table.add("to_torch of a trace: throughput", same, "x", "a pinned copy", ">= 0.9")


def experts(table: Table, dry: bool, count: int, _more: Any) -> None:
    """Served experts that all fit, against the library's default kernels."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    device = "cpu" if dry else "cuda"
    shape: dict[str, Any] = {
        "vocab_size": 32_000, "hidden_size": 2048, "intermediate_size": 6144,
        "moe_intermediate_size": 768, "num_hidden_layers": 16, "num_attention_heads": 32,
        "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
    }  # fmt: skip
    if dry:
        shape |= {
            "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "head_dim": 8,
            "moe_intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 2, "num_experts": 8, "num_experts_per_tok": 2,
        }  # fmt: skip
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            plain = Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape, pad_token_id=0)).eval()
    finally:
        torch.set_default_dtype(before)
    model = copy.deepcopy(plain)
    prompt = torch.arange(4, 60, device=device)[None]
    tokens = 4 if dry else 64

    def generate(model: Any) -> Callable[[], float]:
        def run() -> None:
            model.generate(
                prompt, attention_mask=torch.ones_like(prompt), do_sample=False,
                min_new_tokens=tokens, max_new_tokens=tokens, disable_compile=True,
            )  # fmt: skip
            _synchronize(dry)

        return seconds(run)

    with serve_experts(model, capacity=shape["num_experts"], device=device):
        found = rounds({"served": generate(model), "plain": generate(plain)}, count)
    table.add("generate, all resident", [tokens / t for t in found["plain"]], "tok/s", "")
    same = ratios(found["plain"], found["served"])
    name = "generate with served experts, all resident: throughput"
    table.add(name, same, "x", "transformers' default kernels", ">= 0.9")


PARTS: dict[str, Callable[[Table, bool, int, Any], None]] = {
    "decode": decode,
    "capture": capture,
    "to_torch": to_torch,
    "experts": experts,
}


def _synchronize(dry: bool) -> None:
    if not dry:
        torch.cuda.synchronize()


def main(arguments: list[str] | None = None) -> int:
    """Measures; 1 if a part did not come to its end, 2 without a device. Goals may be missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", action="append", choices=PARTS, help="all of them by default")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--engine", type=json.loads, default={}, help="more arguments of vLLM's engine, as JSON"
    )
    parser.add_argument("--dry", action="store_true", help="on the CPU, to see that it runs")
    parser.add_argument("--json", type=Path, default=RESULTS, help="file for the results")
    args = parser.parse_args(arguments)
    parts = args.part or list(PARTS)
    if not args.dry and not torch.cuda.is_available():
        print(
            "bench-gpu: needs a CUDA device, and torch sees none; nothing was measured."
            " --dry shows on the CPU that it runs",
            file=sys.stderr,
        )
        return 2
    if "decode" in parts and importlib.util.find_spec("vllm") is None:
        print("bench-gpu: the part decode needs vLLM, which is not installed", file=sys.stderr)
        return 2
    where = (
        "dry run on the CPU, whose figures mean nothing"
        if args.dry
        else torch.cuda.get_device_name()
    )
    print(f"{where}; {args.rounds} rounds")
    table = Table(quick=args.dry)
    broken = [part for part in parts if not ended(part, table, args)]
    if not args.dry:
        judged = [row.met for row in table.rows if row.met is not None]
        print(f"\n{sum(judged)} of {len(judged)} goals met")
    for part in broken:
        print(f"{part} did not come to its end", file=sys.stderr)
    if not args.dry and not broken and set(parts) == set(PARTS):
        results = {"device": where, "machine": machine(), "rows": [asdict(r) for r in table.rows]}
        args.json.write_text(json.dumps(results, indent=1) + "\n")
    return 1 if broken else 0


def ended(part: str, table: Table, args: argparse.Namespace) -> bool:
    """Whether a part came to its end; the others go on."""
    try:
        PARTS[part](table, args.dry, args.rounds, args.engine)
    except Exception:
        traceback.print_exc()
        return False
    return True


def machine() -> dict[str, str]:
    """Software and machine of the run, beside the device."""
    packages = {name: version(name) for name in ("torch", "transformers", "vllm")}
    return {"python": platform.python_version(), "cuda": str(torch.version.cuda), **packages}


if __name__ == "__main__":
    sys.exit(main())
