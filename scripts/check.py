"""Run the steps of `make check` (the gate) or `make check-full` (everything), one after another.

The gate stops at the first step that fails, names it, and says how to repeat it. The full check
goes on, prints a table, and exits with 1 if a step failed. Each step is a command line that can be
run alone; it installs what it needs.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]


def gate(seed: int) -> list[str]:
    """At most 20 minutes on two cores of a fresh machine; no step judges a time."""
    return [
        "make lint",
        "make test",
        "make test-slow",
        "make demo",
        f"make test-exact CELLS=3000000 SEED={seed}",
        f"make test-faults FAULTS=quick SEED={seed}",
        "make test-vllm VLLM=0.30.0 WAY=connector SCENARIO=engine",
    ]


def full(seed: int) -> list[str]:
    """Everything, at the shares that a release is judged by; about two hours."""
    return [
        "make lint",
        "make test",
        "make test-slow",
        "make test-loaded",
        "make demo",
        f"make test-exact CELLS=3000000 SEED={seed}",
        "make test-mutations EVERY=3",
        "make test-install",
        "make test-transformers",
        "make test-trainers",
        "make test-vllm SHARE=--share",
        f"make test-vllm-scheduler ROWS=20000 SEED={seed}",
        "make test-sglang SHARE=--share",
        f"make test-sglang-scheduler ROWS=10000 SEED={seed}",
        f"make test-faults FAULTS=ci SEED={seed}",
        "make test-neighbours SHARE=ci",
        "make test-alerts",
        "make test-kubernetes",
        "make bench BENCH=--quick",
        "make test-docker DOCKER=--where-possible",
    ]


def main() -> int:
    """Return 1 if a step failed."""
    parser = argparse.ArgumentParser("scripts/check.py", description=__doc__)
    parser.add_argument("check", choices=("gate", "full"))
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 20))
    args = parser.parse_args()
    print(f"seed {args.seed}", flush=True)
    rows: list[tuple[str, str, float]] = []
    for command in (gate if args.check == "gate" else full)(args.seed):
        begun = time.monotonic()
        code = subprocess.run(command.split(), cwd=ROOT, check=False).returncode
        seconds = time.monotonic() - begun
        print(f"== {command}: {seconds:.0f} s", flush=True)
        rows.append((command, "ok" if code == 0 else f"FAILED ({code})", seconds))
        if code and args.check == "gate":
            print(f"step failed with exit code {code}; repeat it with: {command}", flush=True)
            return 1
    print(f"== all steps: {sum(seconds for *_, seconds in rows):.0f} s")
    if args.check == "full":
        width = max(len(command) for command, *_ in rows)
        print(
            *(f"{command:<{width}}  {result:<11} {s:6.0f} s" for command, result, s in rows),
            sep="\n",
        )
    return int(any(result != "ok" for _, result, _ in rows))


if __name__ == "__main__":
    sys.exit(main())
