"""Routed experts as engines return them, and as routetrace serves them, in the same runs.

`make rivals-exact` runs scenarios of `vllm_runs` and `sglang_runs`, in which each engine returns
its own rows while routetrace captures, and compares the cells of both with Transformers in float32.
It prints a table, and writes it to docs/rivals.md and its figures to benchmarks/rivals_exact.json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from support.models.routed_cells import ABSENT, RIGHT, WRONG

ROOT = Path(__file__).parent.parent
FIGURES, PAGE = ROOT / "benchmarks" / "rivals_exact.json", ROOT / "docs" / "rivals.md"
MARK = "<!-- written by make rivals-exact -->\n"
#: Rows of each of SGLang's scenarios, about.
ROWS = 4_000
#: How routetrace is attached to a version of vLLM so that its own return can be on as well.
WAYS = {"0.30.0": "plugin", "0.32.0": "connector"}
#: Runs with another KV connector, in which vLLM's own rows are asked for apart.
BESIDE = ("offloading", "prefill_and_decode")

_NO_OWN = "its own return needs model runner V2, which Triton's interpreter cannot compile"
_NO_COMPILE = "not run: its compiled decoding on a CPU needs AMX kernels"


@dataclass(frozen=True)
class Scenario:
    """A line of the table for each engine."""

    title: str
    sglang: str = ""
    """Name in `sglang_runs`."""
    vllm: tuple[str, ...] = ()
    """Run, and scenarios of it, in `vllm_runs`."""
    no_sglang: str = ""
    """Reason why it is not run in SGLang."""


SCENARIOS = (
    Scenario("concurrent requests", "no prefix cache", ("engine", "concurrent")),
    Scenario("prefix hits", "overlap", ("engine", "prefix")),
    Scenario("preemption, retraction", "retraction", ("small_cache", "preemption")),
    Scenario("new weights, KV kept", "new weights in place", ("engine", "weights")),
    Scenario("new weights, KV computed again", "new weights", ("engine", "reset")),
    Scenario("KV loaded from host memory or disk", "host memory", ("offloading", "restored")),
    Scenario("aborted requests", "normal", ("engine", "abort")),
    Scenario("torch.compile", "", ("compiled", "concurrent", "prefix"), _NO_COMPILE),
    Scenario("prefill and decode pair", "prefill and decode", ("prefill_and_decode", "handover")),
)


@dataclass
class Line:
    """One scenario in one engine."""

    scenario: str
    engine: str
    own: dict[str, int] = field(default_factory=dict)
    """Cells of the engine's own return by fate; empty if there are none."""
    ours: dict[str, int] = field(default_factory=dict)
    """Cells of routetrace by fate."""
    note: str = ""
    """Reason why one of them is empty."""

    @property
    def faults(self) -> list[str]:
        """Faults of routetrace."""
        names = {WRONG: "wrong", ABSENT: "missing without a reason"}
        return [
            f"{self.engine}, {self.scenario}: {self.ours[fate]} cells {text}"
            for fate, text in names.items()
            if self.ours.get(fate)
        ]


def counted(fates: Mapping[str, int]) -> tuple[int, int, dict[str, int]]:
    """Return the number of cells compared, of those wrong, and of the missing by reason."""
    missing = {reason: n for reason, n in fates.items() if reason not in (RIGHT, WRONG) and n}
    return fates.get(RIGHT, 0) + fates.get(WRONG, 0), fates.get(WRONG, 0), missing


def vllm_line(
    scenario: Scenario,
    version: str,
    results: Iterable[Mapping[str, Any]],
    demanded: Iterable[Mapping[str, Any]],
) -> Line:
    """Add up the results of a scenario in a version; `demanded` are those of `--native`."""
    run, *names = scenario.vllm
    mine = [r for r in results if (r["version"], r["run"]) == (version, run)]
    some = [r for r in mine if r["scenario"] in names]
    own, ours = Counter[str](), Counter[str]()
    for result in some:
        own.update(result["native_cells"])
        ours.update(result["cells"])
    note = "" if own else _NO_OWN
    for result in demanded:
        if (result["version"], result["run"]) == (version, run):
            own.update(result["native_cells"])
            note = "; ".join(result["faults"])
    return Line(scenario.title, f"vLLM {version}", dict(own), dict(ours), note)


def table(lines: Iterable[Line]) -> str:
    """Return the table of cells, in Markdown."""
    head = ("scenario", "engine", "its own: compared", "wrong", "missing")
    head += ("routetrace: compared", "wrong", "missing, reason")
    rows, notes, before = [head, ("---",) * len(head)], list[str](), ""
    for line in lines:
        mark = ""
        if line.note:
            notes += [] if line.note in notes else [line.note]
            mark = f"[{notes.index(line.note) + 1}]"
        compared, wrong, missing = counted(line.own)
        cells = (f"{compared:,}", _bad(wrong), _bad(sum(missing.values())))
        own = cells if line.own else (mark, "", "")
        compared, wrong, missing = counted(line.ours)
        reasons = ", ".join(f"{n:,} {reason}" for reason, n in sorted(missing.items()))
        ours = (f"{compared:,}", _bad(wrong), reasons or "0") if line.ours else (mark, "", "")
        rows.append(("" if line.scenario == before else line.scenario, line.engine, *own, *ours))
        before = line.scenario
    text = "".join(f"| {' | '.join(row)} |\n" for row in rows)
    return text + "".join(f"\n[{i}] {note}\n" for i, note in enumerate(notes, 1))


def _bad(count: int) -> str:
    return f"**{count:,}**" if count else "0"


def bytes_table(http: Mapping[str, Mapping[str, int]]) -> str:
    """Return the table of bytes over HTTP, in Markdown.

    Args:
        http: engine -> bytes of its answers: with all ("answers"), of its own rows ("own"), of
            routetrace's handles ("handles"); and their number of tokens ("tokens").
    """
    text = "| engine | answer tokens | bytes a token, rows apart | its own rows | routetrace |\n"
    text += "|---|---|---|---|---|\n"
    for engine, count in http.items():
        own, ours = count["own"], count.get("handles", 0)
        each = (f"{n / count['tokens']:.0f}" for n in (count["answers"] - own - ours, own, ours))
        text += f"| {engine} | {count['tokens']} | {' | '.join(each)} |\n"
    return text


def report(lines: Iterable[Line], http: Mapping[str, Mapping[str, int]]) -> str:
    """Return both tables."""
    return f"{table(lines)}\n{bytes_table(http)}"


def vllm_bytes(results: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Return the bytes of the answers of a version's HTTP server."""
    (notes,) = (r["notes"] for r in results if r["scenario"] == "completions")
    return {
        "tokens": notes["answer tokens"],
        "answers": notes["bytes of answers"],
        "own": notes["bytes of answers"] - notes["bytes without vLLM's own rows"],
        "handles": notes.get("bytes of routetrace's handles", 0),
    }


def run_vllm(venv: Path, version: str, directory: Path) -> tuple[list[Line], dict[str, int]]:
    """Run the scenarios in a version of vLLM."""
    command = ["vllm_runs", "--installed", str(venv), "--version", version]
    command += ["--way", WAYS[version], "--jobs", "1"]
    runs, names = {s.vllm[0] for s in SCENARIOS}, {n for s in SCENARIOS for n in s.vllm[1:]}
    path = [ROOT / "tests"]
    usual = [*_each("--run", {*runs, "http"}), *_each("--scenario", {*names, "completions"})]
    results = _run(venv, path, [*command, *usual], directory / f"usual-{version}.json")
    command += [*_each("--run", BESIDE), "--native"]
    demanded = _run(venv, path, command, directory / f"beside-{version}.json", may_fail=True)
    lines = [vllm_line(scenario, version, results, demanded) for scenario in SCENARIOS]
    return lines, vllm_bytes(results)


def run_sglang(venv: Path, version: str, directory: Path) -> tuple[list[Line], dict[str, int]]:
    """Run the scenarios in a version of SGLang."""
    path = [venv / version, ROOT / "tests", ROOT / "tests/sglang_runs/shim"]
    names = [s.sglang for s in SCENARIOS if s.sglang]
    command = ["sglang_runs", "--rows", str(ROWS * len(names)), *_each("--scenario", names)]
    results = _run(venv, path, command, directory / "sglang.json")
    http = _run(venv, path, ["sglang_runs.serving"], directory / "sglang-http.json")
    lines = []
    for scenario in SCENARIOS:
        found = results.get(scenario.sglang, {"cells": {}, "native_cells": {}})
        fates = (found["native_cells"], found["cells"])
        lines.append(Line(scenario.title, f"SGLang {version}", *fates, scenario.no_sglang))
    return lines, http


def _each(flag: str, values: Iterable[str]) -> list[str]:
    return [word for value in sorted(values) for word in (flag, value)]


def _run(
    venv: Path, path: Iterable[Path], module: list[str], out: Path, may_fail: bool = False
) -> Any:
    """Run a module in an environment; return the JSON that it writes."""
    command = [str(venv / "bin/python"), "-m", *module, "--json", str(out)]
    print("+", *command[1:], file=sys.stderr, flush=True)
    env = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(map(str, path))}
    done = subprocess.run(command, env={**os.environ, **env}, stdout=sys.stderr, check=False)
    if not out.exists() or (done.returncode and not may_fail):
        raise SystemExit(f"{module[0]} failed with code {done.returncode}; see its output above")
    return json.loads(out.read_text())


def main() -> int:
    """Return 1 if a cell of routetrace is wrong, or missing without a reason."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vllm", type=Path, required=True, help="environment with vLLM")
    parser.add_argument("--sglang", type=Path, required=True, help="environment with SGLang")
    parser.add_argument("--sglang-version", required=True)
    args = parser.parse_args()
    started = time.monotonic()
    jobs = [("SGLang", run_sglang, args.sglang.resolve(), args.sglang_version)]
    jobs += [("vLLM", run_vllm, args.vllm.resolve(), version) for version in WAYS]
    with TemporaryDirectory(prefix="rivals-") as folder, ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(run, venv, v, Path(folder)) for _, run, venv, v in jobs]
        found = [job.result() for job in waiting]
    lines = [line for same in zip(*(f[0] for f in found), strict=True) for line in same]
    http = {f"{name} {v}": count for (name, _, _, v), (_, count) in zip(jobs, found, strict=True)}
    figures = {"lines": [asdict(line) for line in lines], "http": http}
    FIGURES.write_text(json.dumps(figures, indent=1) + "\n")
    before, _, after = PAGE.read_text().split(MARK)
    PAGE.write_text(f"{before}{MARK}\n{report(lines, http)}\n{MARK}{after}")
    print(report(lines, http))
    faults = [fault for line in lines for fault in line.faults]
    print(*faults, f"{time.monotonic() - started:.0f} s", sep="\n")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
