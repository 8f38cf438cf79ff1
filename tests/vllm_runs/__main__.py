"""`make test-vllm`: real vLLM engines with routetrace attached, and every row compared."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from vllm_runs import report
from vllm_runs.engine import Way
from vllm_runs.models import write_checkpoint
from vllm_runs.report import Result
from vllm_runs.runs import RUNNERS, RUNS, WAYS, Run

_HERE = Path(__file__).parent
_TIMEOUT_S = 420
_LOG_LINES = 30
#: Errors in a log, without what pydantic adds.
_ERROR = re.compile(r"^ *((?:\S*Error:|Value error,) .+?)(?: \[type=.*)?$", re.MULTILINE)

#: Seconds after which what a run has left behind counts as left: vLLM's workers end some time after
#: its engine.
_GRACE_S = 15.0


#: Sessions of the runs that are under way, and whether no more are to start.
_sessions: set[int] = set()
_stopping = threading.Event()


@dataclass(frozen=True)
class Job:
    """A run in one version, attached in one way."""

    run: Run
    version: str
    way: Way
    scenarios: tuple[str, ...]

    @property
    def name(self) -> str:
        """A word for files."""
        return f"{self.version}-{self.way}-{self.run.name}".replace(" ", "-")


def main() -> int:
    """Return 1 if anything is wrong."""
    parser = argparse.ArgumentParser("python -m vllm_runs", description=__doc__)
    parser.add_argument("--installed", type=Path, required=True, help="holds a folder per version")
    parser.add_argument("--version", action="append", choices=RUNNERS, help="all if none is named")
    parser.add_argument("--way", action="append", choices=WAYS, help="all if none is named")
    parser.add_argument("--run", action="append", help="only of these runs")
    parser.add_argument("--scenario", action="append", help="of a scenario or a run; or all")
    parser.add_argument("--share", action="store_true", help="only what CI has time for")
    parser.add_argument("--native", action="store_true", help="demand vLLM's own rows everywhere")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="runs at a time")
    parser.add_argument("--json", type=Path, help="also writes the results there")
    parser.add_argument("--logs", type=Path, help="keeps what the engines print there")
    args = parser.parse_args()
    jobs = list(_choose(args))
    if not jobs:
        parser.error("nothing fits")

    signal.signal(signal.SIGTERM, _stop)
    signal.signal(signal.SIGINT, _stop)
    started = time.monotonic()
    installed = args.installed.resolve()  # runs have a working directory of their own
    print(report.head(), flush=True)
    results: list[Result] = []
    with (
        TemporaryDirectory(prefix="vllm-runs-") as temporary,
        ThreadPoolExecutor(args.jobs) as pool,
    ):
        directory = Path(temporary)
        logs = args.logs or directory / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        for model in {name for job in jobs for name in (job.run.model, job.run.draft) if name}:
            write_checkpoint(model, directory / "models" / model)
        waiting = [pool.submit(_run, job, args.native, installed, directory, logs) for job in jobs]
        for future in as_completed(waiting):
            for result in future.result():
                results.append(result)
                print(report.line(result), flush=True)

    print()
    for result in results:
        print(*report.details(result), sep="\n", end="\n" if report.details(result) else "")
    print(*report.totals(results), sep="\n")
    print(f"{time.monotonic() - started:.0f} s")
    if args.json:
        args.json.write_text(json.dumps([asdict(r) for r in results], indent=1))
    return 1 if any(r.faults for r in results) else 0


def _stop(*_: object) -> None:
    """Asked to end: ends what was started."""
    _stopping.set()
    for session in list(_sessions):
        _end_session(session, 0.0)
    raise SystemExit(1)


def _choose(args: argparse.Namespace) -> Iterator[Job]:
    """The longest ones come first, so that none is left alone at the end."""
    versions, wanted = args.version or RUNNERS, args.scenario
    for run in RUNS:
        if args.run and run.name not in args.run:
            continue
        names = [n for n in run.scenarios if not wanted or n in wanted or run.name in wanted]
        for version in sorted(versions, reverse=True):
            for way in args.way or WAYS:
                if args.share and not run.shared(version, way):
                    continue
                if names and run.fits(version, way):
                    yield Job(run, version, way, tuple(names))


def _run(job: Job, native: bool, installed: Path, directory: Path, logs: Path) -> list[Result]:
    """Run a job, and end whatever it leaves behind."""
    if _stopping.is_set():
        return []
    out, log = directory / f"{job.name}.json", logs / f"{job.name}.log"
    own = directory / job.name
    own.mkdir()
    command = [sys.executable, "-m", "vllm_runs.job"]
    command += ["--run", job.run.name, "--version", job.version, "--way", job.way]
    command += ["--checkpoint", str(directory / "models" / job.run.model)]
    command += ["--directory", str(own), "--out", str(out)]
    for name in job.scenarios:
        command += ["--scenario", name]
    command += ["--native"] if native else []
    faults = []
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env=_environment(job, installed, own),
            cwd=own,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        _sessions.add(process.pid)
        grace = _GRACE_S
        try:
            if code := process.wait(_TIMEOUT_S):
                errors = _ERROR.findall(log.read_text(errors="replace")) or [""]
                faults.append(f"the engine's process ended with code {code}. {errors[-1]}".strip())
        except subprocess.TimeoutExpired:
            faults.append(f"still running after {_TIMEOUT_S} s")
            grace = 0.0
        if left := _end_session(process.pid, grace):
            faults.append(f"left behind: {', '.join(left)}")
        process.wait()
        _sessions.discard(process.pid)
    lines = out.read_text().splitlines() if out.exists() else []
    where = (job.version, job.way, job.run.name)
    results = [Result(*where, **json.loads(line)) for line in lines]
    if any(not r.requests for r in results) or faults:
        text = log.read_text(errors="replace").splitlines()
        print(f"--- {job.name}", *text[-_LOG_LINES:], sep="\n", file=sys.stderr, flush=True)
    if faults:
        results.append(Result(*where, "process", faults=faults))
    return results


def _environment(job: Job, installed: Path, own: Path) -> dict[str, str]:
    paths = [installed / job.version, _HERE.parent, _HERE / "plugins"]
    env = {
        **{k: v for k, v in os.environ.items() if not k.startswith(("VLLM_", "ROUTETRACE_"))},
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CACHE_ROOT": str(own),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_HOST_IP": "127.0.0.1",
    }
    if job.run.runner(job.version) == 2:
        env |= {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}
        env["TORCHDYNAMO_DISABLE"] = "1"  # would ask the interpreter for a compiler
    elif RUNNERS[job.version] == 2:
        env["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    return {**env, **job.run.env}


def _end_session(session: int, grace: float) -> list[str]:
    """Kill the processes of a session that do not end by themselves; return their commands."""
    deadline = time.monotonic() + grace
    while (left := _members(session)) and time.monotonic() < deadline:
        time.sleep(0.2)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return [f"{pid} {command:.80}" for pid, command in left.items()]


def _members(session: int) -> dict[int, str]:
    """Processes of a session that run: pid -> command line."""
    found = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(ValueError, OSError):
            pid = int(entry.name)
            if os.getsid(pid) == session:
                found[pid] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    # One without a command line has ended, and nobody has asked how.
    return {pid: command for pid, command in found.items() if command}


if __name__ == "__main__":
    sys.exit(main())
