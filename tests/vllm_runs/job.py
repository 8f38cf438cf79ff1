"""One run, in a process of its own: `python -m vllm_runs.job`; writes a JSON line per scenario."""

from __future__ import annotations

import argparse
import json
import time
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any

from routetrace.client import RouteClient
from routetrace.server.testing import run_server
from vllm_runs import patches
from vllm_runs.compare import Comparison
from vllm_runs.engine import Attachment, Setup
from vllm_runs.models import MODELS
from vllm_runs.reference import Reference
from vllm_runs.report import Tally
from vllm_runs.runs import CHOOSE_INSIDE, RUNS, Run

_NAMESPACE = "vllm-runs"


def main() -> None:
    """Run the scenarios of one run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", required=True)
    parser.add_argument("--version", required=True)
    parser.add_argument("--way", required=True)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--scenario", action="append", required=True)
    parser.add_argument("--native", action="store_true")
    args = parser.parse_args()
    run = next(r for r in RUNS if r.name == args.run)
    if args.version in CHOOSE_INSIDE:
        patches.route_apart()
    if run.prepare:
        run.prepare()
    usual = run.has_native(args.version, args.way)
    native = usual or args.native
    reference = Reference(args.checkpoint) if run.exact else None
    # A trace whose rows may still come from another engine is given up after these seconds.
    with (
        run_server(agent_timeout_seconds=10) as server,
        RouteClient(server.target, run=_NAMESPACE) as client,
    ):
        attachment = Attachment(args.way, server.target, _NAMESPACE)
        more = dict(run.more)
        if run.draft:
            drafter = str(args.checkpoint.with_name(run.draft))
            more["speculative_config"] = {"model": drafter, **more["speculative_config"]}
        subject = run.build(Setup(args.checkpoint, attachment, native, args.directory, more))
        handles = _NAMESPACE if args.way == "connector" else None
        layers = MODELS[run.model][2]
        right = usual and run.trusted
        comparison = Comparison(client, reference, layers, right, handles, native)
        try:
            with args.out.open("a") as out:
                for name in args.scenario:
                    tally, seconds = _scenario(run, name, subject, comparison)
                    line = {"scenario": name, "seconds": round(seconds, 1), **asdict(tally)}
                    out.write(json.dumps(line) + "\n")
                    out.flush()
        finally:
            subject.close()


def _scenario(run: Run, name: str, subject: Any, comparison: Comparison) -> tuple[Tally, float]:
    started = time.monotonic()
    try:
        tally = comparison.compare(run.scenarios[name](subject))
        if not run.faults:
            tally.faults += _agent_faults(subject)
    except Exception as error:  # the others go on
        traceback.print_exc()
        tally = Tally(faults=[f"{type(error).__name__}: {error}"])
    notes = getattr(subject, "notes", {})
    tally.notes.update(notes)
    notes.clear()
    return tally, time.monotonic() - started


def _agent_faults(subject: Any) -> list[str]:
    """Return the faults that agents report, which no trace need show."""
    faults = []
    for stats in subject.agents():
        # Taken back by the engine, or computed for a request that had ended by then.
        lost = {k: n for k, n in stats["dropped_rows"].items() if k not in ("rewound", "late")}
        if lost or stats["faults"] or stats["in_flight_rows"]:
            faults.append(f"the agent tells of {stats}")
    return faults


if __name__ == "__main__":
    main()
