"""One engine, in a process of its own: `python -m gpu_runs.job`; its result is a line of JSON."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from gpu_runs.load import MUST_COUNT, add, waves
from gpu_runs.runs import MODEL, RUNS, faults_of, not_as_asked
from routetrace.client import RouteClient
from routetrace.server.testing import run_server
from vllm_runs.compare import Comparison
from vllm_runs.engine import Attachment, Engine, Setup
from vllm_runs.job import _agent_faults as agent_faults
from vllm_runs.models import MODELS
from vllm_runs.report import Tally

_NAMESPACE = "gpu-runs"


def main() -> None:
    """Run waves of requests until enough cells are compared."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", required=True, choices=[run.name for run in RUNS])
    parser.add_argument("--device", required=True, choices=["cpu", "cuda"])
    parser.add_argument("--cells", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--engine", type=json.loads, default={})
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    run = next(run for run in RUNS if run.name == args.run)
    layers = MODELS[MODEL][2]
    total, cells = Tally(), 0
    with (
        run_server(agent_timeout_seconds=10) as server,
        RouteClient(server.target, run=_NAMESPACE) as client,
    ):
        attachment = Attachment(run.way, server.target, _NAMESPACE)
        more = {**run.engine(args.device), **args.engine}
        setup = Setup(args.checkpoint, attachment, run.native, args.directory, more)
        engine = Engine(setup)
        if args.device == "cuda":
            total.faults += not_as_asked(run, engine.llm.llm_engine.vllm_config, args.engine)
        handles = _NAMESPACE if run.way == "connector" else None
        comparison = Comparison(client, None, layers, run.native, handles)
        try:
            for answers in waves(engine, args.seed):
                wave = comparison.compare(answers)
                add(total, wave)
                rows = wave.native if run.native else sum(len(a.tokens) - 1 for a in answers)
                cells += rows * len(layers)
                if cells >= args.cells or total.faults:
                    break
            counted = {name: engine.count(name) for name in MUST_COUNT}
            total.faults += faults_of(run, cells, args.cells, counted) + agent_faults(engine)
            total.notes |= {"cells": cells, **counted}
        finally:
            engine.close()
    args.out.write_text(json.dumps(asdict(total)))


if __name__ == "__main__":
    main()
