"""Which engines run, and what each must have switched on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm_runs.engine import Way

MODEL = "qwen3_moe_deep"


@dataclass(frozen=True)
class Run:
    """One engine."""

    name: str
    way: Way
    graphs: bool
    """Whether torch.compile and CUDA graphs are on."""
    native: bool
    """Whether vLLM returns its own rows, which ours are compared with."""
    share: float
    """Its share of the cells that were asked for."""

    def engine(self, device: str) -> dict[str, Any]:
        """Engine arguments beside those that all runs of vllm_runs have."""
        if device == "cpu":
            return {"num_gpu_blocks_override": 14}
        more: dict[str, Any] = {
            "dtype": "bfloat16",
            "block_size": 16,
            "max_num_seqs": 16,
            "num_gpu_blocks_override": 64,
            "gpu_memory_utilization": 0.2,
            "async_scheduling": True,
            "enforce_eager": not self.graphs,
        }
        if self.graphs:
            more["compilation_config"] = {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64]}
        return more

    def environment(self, device: str) -> dict[str, str]:
        """Environment variables of its process."""
        env = {
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "VLLM_HOST_IP": "127.0.0.1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(self.graphs and device != "cpu")),
        }
        if device == "cpu":
            env["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
            env["VLLM_USE_V2_MODEL_RUNNER"] = "0"
        return env


RUNS = (
    Run("eager", "plugin", graphs=False, native=True, share=0.1),
    Run("graphs", "plugin", graphs=True, native=True, share=1.0),
    # vLLM's own return cannot be on beside a connector.
    Run("connector", "connector", graphs=True, native=False, share=0.1),
)


def not_as_asked(run: Run, config: Any, asked: Mapping[str, Any]) -> list[str]:
    """Return the features that an engine on CUDA left off, from its vllm_config.

    Args:
        run: of the engine.
        config: of the engine.
        asked: its arguments beside those of the run.
    """
    faults = []
    if not config.scheduler_config.async_scheduling:
        faults.append("scheduling is not asynchronous")
    if not config.cache_config.enable_prefix_caching:
        faults.append("prefix caching is off")
    compilation = config.compilation_config
    modes = {"cudagraph_mode": compilation.cudagraph_mode, "mode": compilation.mode}
    for name, mode in modes.items():
        on = getattr(mode, "name", str(mode)) != "NONE"
        if on != run.graphs:
            faults.append(f"{name} is {mode}")
    wanted = asked.get("compilation_config", {}).get("cudagraph_mode")
    if wanted not in (None, compilation.cudagraph_mode.name):
        faults.append(f"cudagraph_mode is {compilation.cudagraph_mode.name}, expected {wanted}")
    return faults


def faults_of(run: Run, cells: int, wanted: int, counted: Mapping[str, float]) -> list[str]:
    """Return the goals that a run without faults did not reach."""
    faults = [f"{name} is 0: it never happened" for name, n in counted.items() if not n]
    if cells < wanted:
        faults.append(f"{cells:,} cells compared, expected at least {wanted:,}")
    return faults
