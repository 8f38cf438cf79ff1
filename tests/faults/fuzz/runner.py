"""Fuzzing of every decoder: PYTHONPATH=tests python -m faults.fuzz --seconds 60 --seed 1.

Inputs are valid ones that were mutated by someone who knows their structure and repairs their
checksums (or, with --engine atheris, by libFuzzer on top of that). Each target runs in a process of
its own: an end of the interpreter, a hang, and memory beyond the limit count as findings too. What
was found is printed with a file; `--replay FILE --target NAME` runs that input alone.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
import traceback
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

#: Seconds of CPU that one input may take, and seconds without any progress that are a hang.
SLOW, HANG = 1.0, 60.0
#: Address space that a child may have beyond what it starts with.
ROOM = 3 << 30


def main(argv: list[str] | None = None) -> int:
    """Return the number of findings, at most 99."""
    parser = argparse.ArgumentParser("faults.fuzz", description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="of all targets together")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--target", action="append", default=[])
    parser.add_argument("--engine", choices=("own", "atheris"), default="own")
    parser.add_argument("--inputs", type=int, default=0, help="stop after as many of each target")
    parser.add_argument("--replay", type=Path)
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    seed = random.SystemRandom().randrange(1 << 32) if args.seed is None else args.seed
    if args.child:
        return _child(args.target[0], seed, args.seconds, args.inputs, args.child, args.engine)
    from faults.fuzz.targets import targets

    names = args.target or list(targets())
    if args.replay:
        print("taken" if targets()[names[0]]().one_input(args.replay.read_bytes()) else "refused")
        return 0
    print(f"seed {seed}, engine {args.engine}, {len(names)} targets", flush=True)
    total = 0
    for name in names:
        report = run_target(name, seed, args.seconds / len(names), args.inputs, args.engine)
        total += len(report["findings"])
        rate = report["inputs"] / max(report["seconds"], 1e-9)
        print(
            f"{name:9} {report['inputs']:9,} inputs {rate:8,.0f}/s, {report['taken']:8,} taken, "
            f"slowest {report['slowest']:.2f} s, grew by {report['grown'] >> 20} MiB "
            f"(limit 2 x {report['limit'] >> 20}), {len(report['findings'])} findings",
            flush=True,
        )
        for finding in report["findings"]:
            print(f"  {finding['what']}\n    {finding['file']}", flush=True)
    print(f"{total} findings; seed {seed}")
    return min(total, 99)


def run_target(
    name: str, seed: int, seconds: float, inputs: int = 0, engine: str = "own"
) -> dict[str, Any]:
    """Run one target in processes of its own until its time, or its number of inputs, is over."""
    directory = Path(tempfile.mkdtemp(prefix=f"routetrace-fuzz-{name}-"))
    total: dict[str, Any] = {
        "inputs": 0, "taken": 0, "seconds": 0.0, "slowest": 0.0, "grown": 0, "limit": 0,
        "findings": [],
    }  # fmt: skip
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0 and len(total["findings"]) < 10:
        how_it_ended = _run_child(name, seed, left, inputs, directory, engine)
        report = _read(directory / "report.json")
        for key in ("inputs", "taken", "seconds"):
            total[key] += report.get(key, 0)
        for key in ("slowest", "grown", "limit"):
            total[key] = max(total[key], report.get(key, 0))
        known = {finding["what"] for finding in total["findings"]}
        total["findings"] += [f for f in report.get("findings", ()) if f["what"] not in known]
        if how_it_ended:
            kept = directory / f"crash-{total['inputs']}"
            with suppress(OSError):
                kept.write_bytes((directory / "input").read_bytes())
            total["findings"].append({"what": how_it_ended, "file": str(kept)})
        if not how_it_ended and (inputs or not report):
            break
        seed += 1_000_003
    if not total["findings"]:
        for file in directory.iterdir():
            file.unlink()
        directory.rmdir()
    return total


def _run_child(
    name: str, seed: int, seconds: float, inputs: int, directory: Path, engine: str
) -> str:
    """Return how it ended, if that is a finding."""
    (directory / "report.json").unlink(missing_ok=True)
    command = [
        sys.executable, "-m", "faults.fuzz", "--child", str(directory), "--target", name,
        "--seed", str(seed), "--seconds", str(seconds), "--inputs", str(inputs),
        "--engine", engine,
    ]  # fmt: skip
    path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(command, env=env, stdout=log, stderr=log)
        progress, since = None, time.monotonic()
        while True:
            with suppress(subprocess.TimeoutExpired):
                code = process.wait(0.5)
                break
            now = _stamp(directory / "input")
            if now != progress:
                progress, since = now, time.monotonic()
            elif time.monotonic() - since > HANG:
                process.kill()
                process.wait()
                return f"hang: no end of one input within {HANG:g} s"
    if code == 0:
        return ""
    tail = (directory / "log").read_text(errors="replace")[-2000:]
    return f"the process ended with {code}: {tail}"


def _stamp(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _read(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found


class Runner:
    """Runs inputs of one target and keeps count."""

    def __init__(self, target: Any, directory: Path) -> None:
        self._target = target
        self._directory = directory
        self._file = (directory / "input").open("wb", buffering=0)
        self._started = time.monotonic()
        self._written = 0.0
        self._peak = self._memory()
        self.report: dict[str, Any] = {
            "inputs": 0, "taken": 0, "slowest": 0.0, "grown": 0, "limit": target.limit,
            "findings": [],
        }  # fmt: skip

    def _memory(self) -> int:
        """Most bytes that the process, or the server that it asks, has had."""
        pid = getattr(self._target, "pid", "self")
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) << 10
        return 0

    def run(self, data: bytes) -> None:
        """One input."""
        # Before it runs: it may well be the last.
        self._file.seek(0)
        self._file.truncate()
        self._file.write(data)
        before = time.process_time()
        try:
            self.report["taken"] += bool(self._target.one_input(data))
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            self._found(describe(error), data)
        took = time.process_time() - before
        self.report["slowest"] = max(self.report["slowest"], took)
        self.report["inputs"] += 1
        if took > SLOW:
            self._found(f"slow: {took:.1f} s of CPU for {len(data)} bytes", data, "slow")
        if self.report["inputs"] % 16 == 0 or took > 0.1:
            grown = self._memory() - self._peak
            self.report["grown"] = max(self.report["grown"], grown)
            if grown > 2 * self._target.limit:
                self._found(f"memory: grew by {grown >> 20} MiB", data, "memory")
                self._target.limit = grown  # once is enough
        if time.monotonic() - self._written > 1:
            self.write()

    def _found(self, what: str, data: bytes, kind: str = "") -> None:
        findings = self.report["findings"]
        same = [f for f in findings if f["what"] == what or (kind and f["kind"] == kind)]
        if len(same) < 1 + 2 * bool(kind) and len(findings) < 10:
            file = self._directory / f"finding-{self.report['inputs']}"
            file.write_bytes(data)
            findings.append({"what": what, "file": str(file), "kind": kind})
            self.write()

    def write(self) -> None:
        """Say how it stands, so that it is known after a crash."""
        self._written = time.monotonic()
        self.report["seconds"] = self._written - self._started
        part = self._directory / "report.part"
        part.write_text(json.dumps(self.report))
        part.replace(self._directory / "report.json")


def describe(error: BaseException) -> str:
    """An error and the innermost place in routetrace that it came from."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [f for f in frames if "routetrace" in f.filename or "fuzz" in f.filename]
    where = f"{Path(ours[-1].filename).name}:{ours[-1].lineno}" if ours else "?"
    return f"{type(error).__name__} at {where}: {str(error)[:200]}"


def _child(name: str, seed: int, seconds: float, count: int, directory: Path, engine: str) -> int:
    with _instrumented(engine):
        from faults.fuzz.targets import inputs, targets

        target = targets()[name]()
    rng = random.Random(seed)
    for _ in range(3):  # what is made once is not what an input costs
        target.one_input(target.samples(rng))
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, used + ROOM))
    runner = Runner(target, directory)
    try:
        if engine == "atheris":
            _atheris(target, runner, seed, seconds, count)
            return 0
        deadline = time.monotonic() + seconds
        for data in inputs(target, rng):
            runner.run(data)
            if time.monotonic() >= deadline or runner.report["inputs"] == count:
                break
    finally:
        runner.write()
        if close := getattr(target, "close", None):
            close()
    return 0


def _instrumented(engine: str) -> Any:
    """Modules imported inside it report reached lines to libFuzzer."""
    if engine != "atheris":
        return nullcontext()
    import atheris

    return atheris.instrument_imports(include=["routetrace"])


def _atheris(target: Any, runner: Runner, seed: int, seconds: float, count: int) -> None:
    """libFuzzer chooses what to mutate by the lines that it reaches; the mutations are ours."""
    import atexit

    import atheris

    def mutated(data: bytes, max_size: int, seed: int) -> bytes:
        rng = random.Random(seed)
        data = data if len(data) > 8 and rng.random() < 0.95 else target.samples(rng)
        return target.mutate(rng, data)[:max_size]

    atexit.register(runner.write)  # Fuzz() does not return
    flags = [
        f"-seed={seed & 0x7FFFFFFF}", f"-max_total_time={int(max(seconds, 1))}", "-max_len=65536",
        "-rss_limit_mb=0", f"-runs={count or -1}",
    ]  # fmt: skip
    atheris.Setup(["fuzz", *flags], runner.run, custom_mutator=mutated)
    atheris.Fuzz()
