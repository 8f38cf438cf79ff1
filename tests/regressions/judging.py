"""Run the test of each fault of a suite in a copy of the sources with that fault alone."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from oracle.mutations import ROOT, SOURCES, Mutation

_TIMEOUT_S = 300


class Fault(NamedTuple):
    """Fault, and the test that detects it."""

    mutation: Mutation
    test: str


def fault(name: str, path: str, old: str, new: str, test: str) -> Fault:
    """Return the fault of one replacement."""
    return Fault(Mutation(name, path, old, new), test)


def judge(fault: Fault) -> str:
    """Return the last line that pytest prints for the fault's test in a broken copy."""
    with TemporaryDirectory(prefix="mutation-") as directory:
        for source in SOURCES:
            shutil.copytree(
                ROOT / source, Path(directory, source), ignore=shutil.ignore_patterns("__pycache__")
            )
        path = Path(directory, fault.mutation.path)
        text = path.read_text()
        if text.count(fault.mutation.old) != 1:
            return "does not apply"
        path.write_text(text.replace(fault.mutation.old, fault.mutation.new))
        command = f"-m pytest -n0 -x -q --timeout 60 -p no:cacheprovider tests/{fault.test}"
        env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(f"{directory}/{source}" for source in SOURCES),
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
        }
        try:
            done = subprocess.run(
                [sys.executable, *command.split()],
                cwd=ROOT,
                env=env,
                capture_output=True,
                text=True,
                check=False,
                timeout=_TIMEOUT_S,
            )
        except subprocess.TimeoutExpired:
            return f"still running after {_TIMEOUT_S} s"
    lines = [line for line in done.stdout.splitlines() if line.strip()]
    return lines[-1] if lines else (done.stderr.splitlines() or ["no output"])[-1]


def run(faults: Sequence[Fault], prog: str, description: str | None) -> int:
    """Judge the faults that the command line chooses; print a table; return 1 if one was not seen.

    Args:
        faults: faults of the suite.
        prog: name of the suite's module.
        description: docstring of the suite's module.
    """
    parser = argparse.ArgumentParser(prog=prog, description=description)
    parser.add_argument("--none", action="store_true", help="do not break the copy")
    parser.add_argument("--only", default="", help="faults whose names hold this")
    args = parser.parse_args()
    chosen = [fault for fault in faults if args.only in fault.mutation.name]
    if args.none:
        chosen = [f._replace(mutation=replace(f.mutation, new=f.mutation.old)) for f in chosen]
    started, wanted, missed = time.monotonic(), "passed" if args.none else "failed", 0
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for fault, last in zip(chosen, pool.map(judge, chosen), strict=True):
            # A test that ends in errors, or without output, shows as little as one that passes.
            seen = re.match(rf"=*\s*\d+ {wanted}", last) is not None
            missed += not seen
            print(f"{fault.mutation.name:<72}{'' if seen else 'MISSED: '}{last:.100}", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)}, {time.monotonic() - started:.0f} s")
    return 1 if missed or not chosen else 0
