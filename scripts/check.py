"""Run the steps of `make check` (the gate) or `make check-full` (everything).

The gate stops at the first step that fails, names it, and says how to repeat it; where steps run in
several lanes, the other lanes go on to their end. The full check goes on, prints a table, and exits
with 1 if a step failed. Each step is a command line that can be run alone; it installs what it
needs.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PRINTING = threading.Lock()
#: Of which each full check takes one, by its seed, beside the newest two.
OLDER_VLLM = ("0.23.0", "0.24.0", "0.25.1", "0.26.0", "0.28.0", "0.29.0", "0.31.0")


class Result(NamedTuple):
    """Outcome of a step."""

    command: str
    code: int
    seconds: float

    def __str__(self) -> str:
        outcome = "ok" if self.code == 0 else f"FAILED ({self.code})"
        return f"{self.command:<88}  {outcome:<12} {self.seconds:5.0f} s"


def seed_of_tree() -> int:
    """Return the seed of the committed files: checks of the same files run the same cases.

    It is random outside a git checkout.
    """
    # A clone in a container may belong to another user.
    command = ["git", "-c", "safe.directory=*", "rev-parse", "HEAD^{tree}"]
    try:
        tree = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return random.randrange(1 << 20)
    return int(tree[:5], 16)


def gate(seed: int) -> list[list[list[str]]]:
    """At most 20 minutes on two cores of a fresh machine; no step judges a time.

    Returns:
        Stages, one after another, of lanes that run side by side. Steps that keep all cores busy
        are a lane of their own; the first stage installs the environments of later ones.
    """
    return [
        [
            ["make browser"],
            ["make chromium BROWSING=--where-possible", "make vllm-env VLLM=0.30.0"],
        ],
        [["make lint"], ["make compiled"]],
        [["make test SLOW=too"]],
        [
            [f"make test-exact CELLS=400000 EACH=2 SEED={seed}"],
            [f"make test-faults FAULTS=quick SEED={seed}"],
            [
                "make demo",
                "make test-vllm VLLM=0.30.0 WAY=connector SCENARIO=engine",
                "make test-page PAGE=quick BROWSING=--where-possible",
            ],
        ],
    ]


def full(seed: int) -> list[str]:
    """Everything, at the shares that a release is judged by; an hour and a half.

    Steps of one environment are one step: any two may run side by side, but for the first two.
    """
    return [
        "make lint demo-scale",
        "make test-loaded",
        "make test-two-commands test-install COMMANDS=--command=demo",
        f"make test-vllm test-vllm-scheduler SHARE=--share ROWS=20000 SEED={seed} "
        f"VLLM_SCHEDULERS={OLDER_VLLM[seed % len(OLDER_VLLM)]},0.30.0,0.32.0",
        "make test-vllm-older SHARE=--share",
        f"make test-faults FAULTS=ci SEED={seed}",
        "make test-sglang test-sglang-older test-sglang-scheduler SHARE=--share ROWS=10000 "
        f"SEED={seed}",
        f"make test-exact CELLS=3000000 SEED={seed}",
        f"make test-exact WORLD=sharded CELLS=10000000 SEED={seed + 1}",
        "make test-trainers",
        "make test-frameworks check-frameworks",
        "make test-mutations EVERY=3",
        "make test-transformers",
        "make test-docker DOCKER=--where-possible",
        "make test-alerts test-kubernetes test-page",
        "make test-neighbours SHARE=ci",
        "make bench BENCH=--quick",
    ]


def run(command: str) -> Result:
    """Run a step; its output goes where this command's goes."""
    begun = time.monotonic()
    code = subprocess.run(command.split(), cwd=ROOT, check=False).returncode
    return report(Result(command, code, time.monotonic() - begun))


def run_beside(command: str) -> Result:
    """Run a step; print its output when it has ended."""
    begun = time.monotonic()
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        code = subprocess.run(
            command.split(),
            cwd=ROOT,
            stdout=output,
            stderr=subprocess.STDOUT,
            check=False,
        ).returncode
        output.seek(0)
        return report(Result(command, code, time.monotonic() - begun), output.read())


def run_lane(commands: list[str]) -> bool:
    """Run steps until one fails; return whether none did."""
    return all(run_beside(command).code == 0 for command in commands)


def run_stage(lanes: list[list[str]]) -> bool:
    """Run lanes side by side, one alone with its output as it comes; return whether none failed."""
    if len(lanes) == 1:
        return all(run(command).code == 0 for command in lanes[0])
    with ThreadPoolExecutor(len(lanes)) as pool:
        return all([*pool.map(run_lane, lanes)])


def report(result: Result, output: str = "") -> Result:
    """Print the output of a step, its time, and how to repeat it; those of two never mix."""
    if output and not output.endswith("\n"):
        output += "\n"
    output += f"== {result.command}: {result.seconds:.0f} s\n"
    if result.code:
        output += f"step failed with exit code {result.code}; repeat it with: {result.command}\n"
    with PRINTING:
        sys.stdout.write(output)
        sys.stdout.flush()
    return result


def main() -> int:
    """Return 1 if a step failed."""
    parser = argparse.ArgumentParser("scripts/check.py", description=__doc__)
    parser.add_argument("check", choices=("gate", "full"))
    parser.add_argument(
        "--seed", type=int, help="seed of random runs (default: of the HEAD commit)"
    )
    parser.add_argument("--jobs", type=int, default=1, help="steps of the full check at a time")
    args = parser.parse_args()
    seed = seed_of_tree() if args.seed is None else args.seed
    print(f"seed {seed}", flush=True)
    begun = time.monotonic()
    results: list[Result] = []
    if args.check == "gate":
        if not all(map(run_stage, gate(seed))):
            return 1
    else:
        commands = full(seed)
        first = 2 if args.jobs > 1 else len(commands)
        results += map(run, commands[:first])
        with ThreadPoolExecutor(args.jobs) as pool:
            results += pool.map(run_beside, commands[first:])
    print(f"== all steps: {time.monotonic() - begun:.0f} s")
    if args.check == "full":
        print(*results, sep="\n")
    return int(any(result.code for result in results))


if __name__ == "__main__":
    sys.exit(main())
