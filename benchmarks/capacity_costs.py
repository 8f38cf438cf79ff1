"""Measures the constants of cli/bench/capacity.py: what a token costs each side, by model.

Runs `routetrace bench load` against a server of its own, without readers and with one, and takes
the server's CPU time of the first run for ingest, of the second beyond that for reads.

    python benchmarks/capacity_costs.py [--seconds 10] [MODEL ...]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from measure import cpu_seconds
from routetrace.cli.bench.capacity import MEASURED
from routetrace.server.testing import run_server

#: Engines as they are: 256 requests that decode 50 tokens a second each.
WORDS = ("--mix", "reasoning", "--answer", "lognormal:300:0.6", "--agents", "1")
PACE = ("--batch", "256", "--steps", "50")


def run(model: str, seconds: float, readers: int) -> tuple[dict[str, Any], float]:
    """The report of a load, and the CPU seconds of its server."""
    program = str(Path(sys.executable).with_name("routetrace"))
    with tempfile.TemporaryDirectory() as folder, run_server(data_dir=f"{folder}/data") as server:
        before = cpu_seconds(server.pid)
        words = ("--model", model, "--seconds", str(seconds), "--readers", str(readers))
        done = subprocess.run(
            [program, "bench", "load", "--json", "--target", server.target,
             *words, *WORDS, *PACE],
            check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        return json.loads(done.stdout), cpu_seconds(server.pid) - before


def costs(model: str, seconds: float) -> dict[str, float]:
    """The fields of `Costs`: microseconds a token, and bytes."""
    alone, server = run(model, seconds, 0)
    rows = alone["agents"]["acknowledged_rows"]
    both, busier = run(model, seconds, 1)
    beside = busier - server / rows * both["agents"]["acknowledged_rows"]
    cpu = [one["cpu_us_per_row"] for one in (alone, both)]
    return {
        "sent": alone["bytes_per_row"]["sent"],
        "engine": statistics.mean(one["engine_thread"] for one in cpu),
        "worker": statistics.mean(one["agent_background"] for one in cpu),
        "ingest": server / rows * 1e6,
        "read": beside / both["reads"]["rows"] * 1e6,
        "reader": cpu[1]["reader"],
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("models", nargs="*")
    args = parser.parse_args()
    for model in args.models or MEASURED:
        found = costs(model, args.seconds)
        figures = [f"{value:.0f}" if value >= 100 else f"{value:.1f}" for value in found.values()]
        print(f'"{model}": Costs({", ".join(figures)}),', flush=True)


if __name__ == "__main__":
    main()
