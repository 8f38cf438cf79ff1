"""SGLang's scheduler with a fake model: each row compared with what the model chose.

SGLang's own Scheduler, radix caches, pools and allocators decide what happens: prefix hits, chunks,
retractions, aborts, pauses, flushes, loads from host memory, drafts. A fake model draws the experts
of every row and every token at random. All of routetrace is real: its plug-in, found by its entry
point, an agent process, a server process, a client.

    python -m sglang_runs.scheduler --rows 100000 --seed 1

Each case runs in a process of its own, since SGLang keeps one scheduler a process.

* scheduler_engine.py: the model, and clients
* scheduler_truth.py: what must come out, and the comparison
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from importlib.metadata import version
from pathlib import Path

from routetrace.capture_agent.engines.sglang import seams
from routetrace.client import ReadOptions, RouteClient
from routetrace.common.errors import NotFound
from routetrace.server.testing import run_server
from sglang_runs.engine import DRAFTS, prepare
from sglang_runs.scheduler.engine import Case, Clients, FakeModel, make
from sglang_runs.scheduler.truth import Rows, Tally, compare, config

_WAIT_S = 60.0
_READ_AT_ONCE = 64
_TOLD = 6

_HOST = {
    "enable_hierarchical_cache": True,
    "hicache_ratio": 4.0,
    "hicache_io_backend": "direct",
    "hicache_mem_layout": "layer_first",
}

CASES = (
    Case("overlap"),
    Case("overlap page 16", {"page_size": 16}),
    Case("normal", {"disable_overlap_schedule": True}),
    Case("normal page 16", {"disable_overlap_schedule": True, "page_size": 16}),
    Case("overlap mixed chunks", {"enable_mixed_chunk": True, "chunked_prefill_size": 32}),
    Case("overlap mixed page 16", {"enable_mixed_chunk": True, "page_size": 16}),
    Case("overlap host memory", _HOST),
    Case("overlap host memory page 16", {**_HOST, "page_size": 16}),
    Case("overlap no cache", {"disable_radix_cache": True}),
    Case("overlap drafts", DRAFTS),
    Case("overlap drafts page 16", {**DRAFTS, "page_size": 16}),
)


def play(case: Case, seed: int, num_rows: int) -> Tally:
    """Run an engine until it has computed so many rows, and all its requests have ended."""
    tally, rng = Tally(), random.Random(f"{case.name} {seed}")
    with (
        tempfile.TemporaryDirectory() as folder,
        run_server(agent_timeout_seconds=3600) as server,
    ):
        Path(folder, "config.json").write_text(json.dumps(config()))
        # Beside those for want of memory: SGLang's own switch, read when it is imported.
        os.environ.update(SGLANG_TEST_RETRACT="1", SGLANG_TEST_RETRACT_INTERVAL="23")
        prepare(server.target, run="scheduler", linger_seconds=0.05)
        engine = make(Path(folder), case)
        model = FakeModel(engine, Rows(seed), rng)
        clients = Clients(engine, model, case, rng)
        clients.watch()
        from routetrace.capture_agent.engines.sglang.plugin import current

        with RouteClient(server.target, run="scheduler", timeout=_WAIT_S) as client:

            def read() -> None:
                lives, clients.ended[:-8] = clients.ended[:-8], []
                _read(client, lives, model.rows, tally)

            def each() -> bool:
                clients.settle()
                if len(clients.ended) > _READ_AT_ONCE:
                    read()
                if model.rows.size < num_rows and not tally.faults:
                    clients.act()
                    return False
                clients.finish()
                return not clients.busy and engine.idle

            engine.run(each)
            clients.settle()
            _read(client, clients.ended, model.rows, tally)
        tally.counts = model.counts
        if "speculative_algorithm" in case.arguments and not model.counts["off the front"]:
            tally.faults.append("no accepted path left the front of its tree")
        capture = current()
        if capture is None or capture.faults:
            tally.faults.append("capture broke down")
        else:
            capture.close()
    return tally


def _read(client: RouteClient, lives: list[object], rows: Rows, tally: Tally) -> None:
    options = ReadOptions(missing="mask", prefix_rows="never", wait_for="end", timeout=_WAIT_S)
    for life in lives:
        if not life.captured:
            try:
                tally.faults.append(f"{client.get(life.rid, missing='mask')!r}")
            except NotFound:
                tally.counts["not captured"] += 1
            continue
        compare(tally, rows, life, client.get(life.rid, options=options))
        tally.counts["traces"] += 1
        client.delete(life.rid)


def _alone(case: str, seed: int, rows: int) -> int:
    """Run one case in this process; write what came of it as the last line."""
    started = time.monotonic()
    tally = play(next(c for c in CASES if c.name == case), seed, rows)
    facts = dict(tally.counts) | {"seconds": round(time.monotonic() - started)}
    missing = dict(tally.missing)
    result = [tally.rows, tally.wrong, tally.lost, missing, facts, tally.faults[:_TOLD]]
    print(f"\nRESULT {json.dumps(result)}", flush=True)
    os._exit(0)  # threads of SGLang do not end


def main() -> int:
    """Return 1 if a row is wrong or lost, or a case does not end."""
    parser = argparse.ArgumentParser("python -m sglang_runs.scheduler", description=__doc__)
    parser.add_argument("--rows", type=int, default=100_000, help="computed, at least so many")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--case", default="", help="only the case of this name")
    parser.add_argument("--alone", action="store_true", help="in this process")
    args = parser.parse_args()
    if args.alone:
        return _alone(args.case, args.seed, args.rows)
    drafts = version("sglang") not in seams.TESTED[:2]  # which draft on a GPU alone
    able = [case for case in CASES if drafts or "speculative_algorithm" not in case.arguments]
    cases = [case.name for case in able if args.case in (case.name, "")]
    total, failed = Counter[str](), 0
    for case in cases:
        name, share = f"{case}, seed {args.seed}", -(-args.rows // len(cases))
        command = ["--alone", "--case", case, "--seed", str(args.seed), "--rows", str(share)]
        done = subprocess.run(
            [sys.executable, "-m", "sglang_runs.scheduler", *command],
            capture_output=True,
            text=True,
            check=False,
        )
        lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
        if not lines:
            print(f"{name}: FAULT no result\n{done.stderr[-3000:]}", flush=True)
            failed += 1
            continue
        rows, wrong, lost, missing, facts, faults = json.loads(lines[-1].removeprefix("RESULT "))
        found = f"{rows} rows, {wrong} wrong, {lost} lost, missing {missing}"
        print(f"{name}: {found}; {facts}", flush=True)
        for fault in faults:
            print(f"    FAULT {fault}", flush=True)
        failed += bool(faults)
        total.update(rows=rows, wrong=wrong, lost=lost)
    print(f"\ntotal: {dict(total)}, {failed} cases failed")
    return 1 if failed or total["wrong"] or total["lost"] else 0


if __name__ == "__main__":
    sys.exit(main())
