"""A decode step of vLLM with CUDA graphs: without capture, with it, and with vLLM's own return.

One engine for each on the same device; they take turns, round by round. As under `vllm serve`, the
scheduler and the worker have a process that does nothing else. So have the agents and the server.
"""

# vLLM is not installed where types are checked.
# pyright: reportMissingImports=false
from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from measure import Table, ratios, rounds
from routetrace.server.testing import run_server
from vllm_cost import ENVIRONMENT, NAMES, Engine, attached, checkpoint

PROMPT, VOCABULARY = 96, 4096
#: Step times count once all requests of a round decode.
_WARM_STEPS = 5
#: Of Qwen3-30B-A3B, with narrow experts: four of them fit on one device.
_WIDE = {
    "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 128,
    "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
    "num_experts": 128, "num_experts_per_tok": 8,
}  # fmt: skip


def decode(table: Table, dry: bool, count: int, more: dict[str, Any]) -> None:
    """Rows of the table for each batch size.

    Args:
        table: where they go.
        dry: on the CPU, eagerly, with a small model.
        count: rounds.
        more: arguments of vLLM's engine.
    """
    sizes, tokens = ((2,), 8) if dry else ((8, 64, 256), 64)
    engines: dict[str, Engine] = {}
    with tempfile.TemporaryDirectory() as directory, run_server() as server:
        model = checkpoint(Path(directory), {} if dry else _WIDE)
        what = [str(model), server.target, str(tokens), str(max(sizes)), str(int(dry))]
        try:
            for way in NAMES:
                command = [sys.executable, __file__, way, *what, json.dumps(more)]
                engines[way] = Engine(command, _environment(dry, Path(directory, way)))
            for way, engine in engines.items():  # they compile at the same time, for minutes
                engine.round(str(min(sizes)))
                print(f"engine is ready: {NAMES[way]}", file=sys.stderr, flush=True)
            for size in sizes:
                cells = {
                    way: lambda e=engine, b=size: e.round(str(b))["step_ms"]
                    for way, engine in engines.items()
                }
                judge(table, size, rounds(cells, count))
        finally:
            for engine in engines.values():
                engine.close()


def judge(table: Table, size: int, found: dict[str, list[float]]) -> None:
    """Add the rows of one batch size, from the step times of each way."""
    step = f"decode step, B = {size}"
    table.add(f"{step}: no capture", found["none"], "ms", "")
    table.add(f"{step}: vLLM's own", ratios(found["native"], found["none"]), "x", "no capture")
    for way in ("plugin", "connector"):
        table.add(
            f"{step}: {way}", ratios(found[way], found["none"]), "x", "no capture", "<= 1.004"
        )
        own = ratios(found[way], found["native"])
        table.add(f"{step}: {way}", own, "x", "vLLM's own return", "<= 1")


def _environment(dry: bool, caches: Path) -> dict[str, str]:
    if dry:
        return {**ENVIRONMENT, "VLLM_USE_V2_MODEL_RUNNER": "0"}
    return {
        **ENVIRONMENT,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_CACHE_ROOT": str(caches),
    }


def serve(way: str, model: str, target: str, tokens: int, most: int, dry: bool, more: Any) -> None:
    """Run one engine: a round for each line on stdin, which says how many requests."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever vLLM prints goes elsewhere
    from vllm import EngineArgs, LLMEngine, SamplingParams

    on_cpu = {"dtype": "float32", "enforce_eager": True, "kv_cache_memory_bytes": 64 << 20}
    sizes = [2**i for i in range(9) if 2**i <= most]
    on_gpu = {
        "dtype": "bfloat16", "kv_cache_memory_bytes": 9 << 29, "gpu_memory_utilization": 0.2,
        "async_scheduling": True, "compilation_config": {"cudagraph_capture_sizes": sizes},
    }  # fmt: skip
    arguments = {
        "model": model, "load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 1024,
        "max_num_seqs": most, "max_num_batched_tokens": 4096, "enable_prefix_caching": True,
        **(on_cpu if dry else on_gpu), **attached(way, target), **more,
    }  # fmt: skip
    engine = LLMEngine.from_engine_args(EngineArgs(**arguments))
    rng = np.random.default_rng(0)
    for number, line in enumerate(sys.stdin):
        for i in range(int(line)):
            params = SamplingParams(
                temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False
            )
            prompt = {"prompt_token_ids": rng.integers(4, VOCABULARY, PROMPT).tolist()}
            engine.add_request(f"round-{number}-{i}", prompt, params)
        steps = []
        while engine.has_unfinished_requests():
            start = time.perf_counter()
            engine.step()
            steps.append(time.perf_counter() - start)
        # The prompts of a large batch take some steps, and the last one hands out the rows.
        prefill = _WARM_STEPS + int(line) * PROMPT // 4096
        figures = {"step_ms": statistics.median(steps[prefill:-1]) * 1e3}
        print(json.dumps(figures), file=answers, flush=True)


if __name__ == "__main__":
    _way, _model, _target, _tokens, _most, _dry, _more = sys.argv[1:]
    serve(_way, _model, _target, int(_tokens), int(_most), _dry == "1", json.loads(_more))
