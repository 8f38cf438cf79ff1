"""`make test-gpu`: tests marked cuda, then real vLLM on CUDA with every cell compared.

Fails where there is no CUDA device: what was not run has not passed. `--dry` runs the same drivers
on the CPU, eagerly and with few cells, which shows that they work and nothing about a device.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from xml.etree import ElementTree

import torch

from gpu_runs.runs import MODEL, RUNS, Run
from vllm_runs.models import write_checkpoint

_TESTS = Path(__file__).parents[1]
_TIMEOUT_S = 1800
_LOG_LINES = 40


def main(arguments: list[str] | None = None) -> int:
    """Return 0 if all is well, 1 if anything is wrong, 2 if it cannot run here."""
    parser = argparse.ArgumentParser("python -m gpu_runs", description=__doc__)
    parser.add_argument("--cells", type=int, help="cells to compare (1,000,000; dry: 20,000)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--part", action="append", choices=["tests", *(r.name for r in RUNS)], help="all by default"
    )
    parser.add_argument(
        "--engine", type=json.loads, default={}, help="more arguments of vLLM's engine, as JSON"
    )
    parser.add_argument("--dry", action="store_true", help="on the CPU, to see that it runs")
    args = parser.parse_args(arguments)
    parts = args.part or ["tests", *(run.name for run in RUNS)]
    if problem := cannot_run(args.dry, parts):
        print(f"test-gpu: {problem}", file=sys.stderr)
        return 2
    print(where(args.dry))
    cells = args.cells or (20_000 if args.dry else 1_000_000)
    faults = []
    if "tests" in parts:
        faults += marked_tests(args.dry)
    with TemporaryDirectory(prefix="gpu-runs-") as temporary:
        directory = Path(temporary)
        runs = [run for run in RUNS if run.name in parts]
        if runs:
            write_checkpoint(MODEL, directory / "model")
        for run in runs:
            faults += engine_run(run, args, int(cells * run.share), directory)
    for fault in faults:
        print(f"FAULT {fault}")
    print(f"{'dry run on the CPU: ' if args.dry else ''}{len(faults)} faults")
    return 1 if faults else 0


def where(dry: bool) -> str:
    """Return the device and the versions of torch and vLLM."""
    device = "CPU" if dry else torch.cuda.get_device_name()
    vllm = importlib.util.find_spec("vllm") and importlib.import_module("vllm").__version__
    return f"{device}; torch {torch.__version__}, vLLM {vllm or 'not installed'}"


def cannot_run(dry: bool, parts: list[str]) -> str:
    """Why not; "" if it can."""
    if not dry and not torch.cuda.is_available():
        return (
            "needs a CUDA device, and torch sees none; nothing was tested. Run it in an environment"
            " whose torch is built with CUDA, on a machine with a GPU"
        )
    if set(parts) - {"tests"} and importlib.util.find_spec("vllm") is None:
        return "needs vLLM, which is not installed; --part tests leaves it out"
    return ""


def marked_tests(dry: bool) -> list[str]:
    """Run the tests marked cuda; a dry run only collects them."""
    with TemporaryDirectory() as directory:
        report = Path(directory, "report.xml")
        command = [sys.executable, "-m", "pytest", "-q", "-m", "cuda", f"--junitxml={report}"]
        command += [*map(str, marked_files()), *(["--collect-only"] if dry else [])]
        ended = subprocess.run(command, cwd=_TESTS.parent, check=False)
        if ended.returncode or dry:
            return [f"tests marked cuda: pytest ended with {ended.returncode}"] * bool(
                ended.returncode
            )
        return skipped(report)


def marked_files() -> list[Path]:
    """Files with tests marked cuda.

    Others may need what is not installed here, and would be skipped as a whole.
    """
    files = sorted(_TESTS.rglob("test_*.py"))
    return [file for file in files if "pytest.mark.cuda" in file.read_text("utf-8")]


def skipped(report: Path) -> list[str]:
    """Tests of a JUnit report that did not run; all of them, if there are none."""
    cases = list(ElementTree.parse(report).iter("testcase"))
    if not cases:
        return ["tests marked cuda: none was found"]
    return [
        f"{case.get('classname')}.{case.get('name')} was skipped"
        for case in cases
        if case.find("skipped") is not None
    ]


def engine_run(run: Run, args: argparse.Namespace, cells: int, directory: Path) -> list[str]:
    """Run one engine in a process of its own; print what came of it, return the faults."""
    device = "cpu" if args.dry else "cuda"
    own = directory / run.name
    own.mkdir()
    out, log = own / "result.json", own / "log"
    command = [sys.executable, "-m", "gpu_runs.job", "--run", run.name, "--device", device]
    command += ["--cells", str(cells), "--seed", str(args.seed)]
    command += ["--engine", json.dumps(args.engine)]
    command += ["--checkpoint", str(directory / "model"), "--directory", str(own)]
    command += ["--out", str(out)]
    env = {**os.environ, "VLLM_CACHE_ROOT": str(own), **run.environment(device)}
    env["PYTHONPATH"] = os.pathsep.join([str(_TESTS), os.environ.get("PYTHONPATH", "")])
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=env, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with contextlib.suppress(ProcessLookupError):  # whatever it left behind, too
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if code != 0 or not out.exists():
        print(*log.read_text(errors="replace").splitlines()[-_LOG_LINES:], sep="\n")
        how = f"still ran after {_TIMEOUT_S} s" if code is None else f"ended with {code}"
        return [f"{run.name}: the engine's process {how}"]
    result = json.loads(out.read_text())
    notes = ", ".join(f"{value:,.0f} {name}" for name, value in result["notes"].items())
    print(
        f"{run.name}: {result['requests']} requests, {result['wrong']} rows wrong, "
        f"{sum(result['missing'].values())} missing; {notes}",
        flush=True,
    )
    return [f"{run.name}: {fault}" for fault in result["faults"]]


if __name__ == "__main__":
    sys.exit(main())
