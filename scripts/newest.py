"""Run the main targets with the newest versions of all packages: `make check-newest`.

Environments of their own are made without the versions of constraints/. At the end a table has each
package that is newer than its pin, then each target with its result.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
#: Environment, the constraints that hold in it otherwise, variable of the Makefile, targets.
ENVIRONMENTS = (
    (".venv-newest", "dev", "VENV", ("test", "demo")),
    (".venv-newest-trainers", "trainers", "TRAINERS_VENV", ("test-trainers",)),
    (".venv-newest-vllm", "vllm", "VLLM_VENV", ("test-vllm SHARE=--share",)),
)


def pinned(name: str) -> dict[str, set[str]]:
    """Return the versions of constraints/NAME.txt by package; Python versions may differ."""
    found: dict[str, set[str]] = {}
    for line in (ROOT / f"constraints/{name}.txt").read_text("utf-8").splitlines():
        if match := re.match(r"([\w.-]+)==([^\s;]+)", line):
            found.setdefault(_canonical(match[1]), set()).add(match[2])
    return found


def installed(environment: Path) -> dict[str, str]:
    """Return the versions of the packages of an environment."""
    listing = subprocess.run(
        [environment / "bin/python", "-m", "pip", "list", "--format=freeze"],
        stdout=subprocess.PIPE, text=True, check=True,
    ).stdout  # fmt: skip
    versions = (line.partition("==") for line in listing.splitlines())
    return {_canonical(name): version for name, _, version in versions}


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def main() -> int:
    """Return 1 if a target failed."""
    results: list[tuple[str, str, float]] = []
    rows: list[tuple[str, str, str, str]] = []
    for folder, name, variable, targets in ENVIRONMENTS:
        shutil.rmtree(ROOT / folder, ignore_errors=True)
        outcomes = []
        for target in targets:
            begun = time.monotonic()
            command = ["make", "PINS=", f"{variable}={folder}", *target.split()]
            code = subprocess.run(command, cwd=ROOT, check=False).returncode
            outcomes.append("ok" if code == 0 else f"{target.split()[0]} FAILED")
            results.append((" ".join(command), outcomes[-1], time.monotonic() - begun))
        pins = pinned(name)
        for package, version in installed(ROOT / folder).items():
            if package in pins and version not in pins[package]:
                outcome = next((one for one in outcomes if one != "ok"), "ok")
                rows.append((package, "/".join(sorted(pins[package])), version, outcome))
    print(f"\n{'package':<32} {'pinned':<24} {'newest':<16} result")
    for package, pin, version, outcome in sorted(set(rows)):
        print(f"{package:<32} {pin:<24} {version:<16} {outcome}")
    if not rows:
        print("no package is newer than its pin")
    print()
    for command_line, outcome, seconds in results:
        print(f"{command_line:<72} {outcome:<20} {seconds:5.0f} s")
    return int(any(outcome != "ok" for _, outcome, _ in results))


if __name__ == "__main__":
    sys.exit(main())
