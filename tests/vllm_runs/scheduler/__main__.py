"""vLLM's scheduler without a model: a million rows, each compared with what a fake model chose.

vLLM's own Scheduler, KVCacheManager and BlockPool decide what happens: prefix hits, chunks,
preemptions, blocks handed on. A fake model draws the experts of every row at random and samples
tokens at random. All of routetrace is real: its scheduler half in vLLM's scheduler, plans that are
pickled as an executor would, the worker half with a capturer, an agent process, a server process,
a client.

What must come out is worked out without any of that. A row of another step, request or position is
another one in all but one of some millions of cases.

    python -m vllm_runs.scheduler --rows 1000000 --seed 1

* scheduler_engine.py: the scheduler, the model, and routetrace around them
* scheduler_clients.py: what is done to them
* scheduler_truth.py: what must come out, and the comparison
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from routetrace.client import ReadOptions, RouteClient, Trace
from routetrace.common.errors import NotFound
from routetrace.server.testing import run_server
from vllm_runs.scheduler.clients import Clients
from vllm_runs.scheduler.engine import BrokenOnPurposeError, Case, Engine, refused
from vllm_runs.scheduler.truth import LAYOUT, Tally, compare

#: Requests that are read at a time, and seconds in which they must have come to their end.
_READ_AT_ONCE = 192
_WAIT_S = 20.0

#: Rows of one engine before the next one is made.
_ROWS_PER_ROUND = 40_000

#: Faults that are told in words.
_TOLD = 6

CASES = (
    Case("V1"),
    Case("V2", protocol=2, late=True),
    Case("V1 asynchronous", asynchronous=True, late=True),
    Case("V2 asynchronous", protocol=2, asynchronous=True, role="kv_producer"),
    Case("V1 drafts", drafts=3),
    Case("V2 drafts", protocol=2, drafts=4, late=True),
    Case("V1 asynchronous drafts", drafts=3, asynchronous=True, late=True),
    Case("V2 asynchronous drafts", protocol=2, drafts=4, asynchronous=True, way="plugin"),
    Case("V2 asynchronous drafts pipeline", protocol=2, drafts=2, asynchronous=True, stages=2),
    Case("V1 asynchronous drafts loads", drafts=3, asynchronous=True, loads=True, way="plugin"),
    Case("V2 asynchronous drafts faults", protocol=2, drafts=3, asynchronous=True, faults=True),
    Case("V1 plugin", way="plugin"),
    Case("V2 plugin asynchronous", protocol=2, way="plugin", asynchronous=True, late=True),
    Case("V1 priorities", policy="priority"),
    Case("V2 priorities drafts", protocol=2, policy="priority", drafts=2, way="plugin"),
    Case("V1 pipeline", stages=2, late=True),
    Case("V2 pipeline asynchronous", protocol=2, stages=2, asynchronous=True, role="kv_producer"),
    Case("V1 context parallel", context=2),
    Case("V2 context parallel asynchronous", protocol=2, context=4, asynchronous=True, late=True),
    Case("V1 sessions", sessions=True),
    Case("V2 sessions drafts", protocol=2, sessions=True, drafts=3),
    Case("V1 loads", loads=True),
    Case("V2 loads plugin asynchronous", protocol=2, loads=True, way="plugin", asynchronous=True),
    Case("V1 loads plugin priorities", loads=True, way="plugin", policy="priority"),
    Case("V1 faults", faults=True, late=True),
    Case("V2 faults plugin asynchronous", protocol=2, faults=True, way="plugin", asynchronous=True),
)


def play(case: Case, seed: int, target: str, model: Path, num_rows: int) -> Tally:
    """Run an engine until it has computed so many rows, and all its requests have ended."""
    tally = Tally()
    started = time.monotonic()
    engine = Engine(case, seed, target, model)
    clients = Clients(engine)

    def before_outcome() -> None:
        if clients.rng.random() < 0.01:
            clients.abort()

    with RouteClient(target, run=engine.run, timeout=_WAIT_S) as client:
        while engine.rows.size < num_rows and not tally.faults:
            clients.act()
            engine.step(before_outcome)
            if sum(map(len, clients.ready)) > _READ_AT_ONCE:
                _read(client, clients, engine, tally)
        while engine.busy:
            for life in [x for x in engine.lives.values() if x.session]:
                if not life.inputs or life.inputs[-1] is not None:
                    engine.extend(life, None)
            engine.step()
        clients.settle()
        clients.hang_up()
        clients.leave()
        if case.stages > 1:
            engine.step()  # nothing to do but to tell of the last end
        clients.settle()
        engine.steps += 1
        if not tally.faults:
            _read(client, clients, engine, tally)
        if not tally.faults:
            hurt = {life.trace_id for life in engine.ended if life.hurt}
            left = {trace.trace_id for trace in client.find()} - hurt
            tally.faults += [f"there is a trace {trace_id!r}" for trace_id in left]
    engine.close()
    tally.counts = engine.counts
    tally.counts["not kept"] = len(clients.absent)
    tally.faults += engine.faults
    tally.faults = [f"{case.name}, seed {seed}: {fault}" for fault in tally.faults]
    tally.seconds = time.monotonic() - started
    return tally


def _read(client: RouteClient, clients: Clients, engine: Engine, tally: Tally) -> None:
    """Read and forget traces whose end the worker knows."""
    told = [lives for lives in clients.ready if lives[-1].ended_at < engine.steps]
    clients.ready = [lives for lives in clients.ready if lives[-1].ended_at >= engine.steps]
    ids = [lives[-1].trace_id for lives in told]
    # Who loaded KV may hear more from elsewhere, and who was hurt may never end.
    # The truth knows the rows of a request alone, not those of others that may stand in.
    options = ReadOptions(missing="mask", prefix_rows="never", wait_for="end", timeout=_WAIT_S)
    if engine.case.loads or engine.case.faults:
        options = ReadOptions(missing="mask", prefix_rows="never")
    # Between two turns a conversation has ended: who asks before the next turn has arrived is
    # answered at once.
    if options.wait_for is None or any(len(lives) > 1 for lives in told):
        engine.flush()
    with closing(client.get_many(ids, options=options, concurrency=16, errors="return")) as traces:
        for lives, trace in zip(told, traces, strict=True):
            if lives[-1].hurt and isinstance(trace, NotFound):
                continue
            if not isinstance(trace, Trace):
                tally.faults.append(f"{lives[-1].trace_id!r}: {type(trace).__name__}: {trace}")
                return
            compare(tally, engine.rows, lives, trace)
            client.delete(lives[-1].trace_id)


def _write_model(folder: Path) -> Path:
    """Configuration of a model for vLLM."""
    facts = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 64,
        "moe_intermediate_size": 32,
        "num_hidden_layers": LAYOUT.num_hidden_layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_experts": LAYOUT.num_experts,
        "num_experts_per_tok": LAYOUT.top_k,
        "max_position_embeddings": 4096,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(facts))
    return folder


def _is_news(record: logging.LogRecord) -> bool:
    """Whether a message tells what the run did not ask for; tracebacks of its own hide others."""
    return not (record.exc_info and isinstance(record.exc_info[1], BrokenOnPurposeError))


def main() -> int:
    """Return 1 if a row is wrong or lost, or a trace does not end."""
    parser = argparse.ArgumentParser("python -m vllm_runs.scheduler", description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000, help="compared, at least so many")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--case", default="", help="only the case of this name")
    parser.add_argument("--rounds", type=int, default=1 << 30, help="most engines of each case")
    parser.add_argument("--round-rows", type=int, default=_ROWS_PER_ROUND, help="of an engine")
    args = parser.parse_args()
    if logging.lastResort:
        logging.lastResort.addFilter(_is_news)
    cases = [case for case in CASES if args.case in (case.name, "")]
    total = Tally()
    # However slow the machine, no trace is given up before it is read.
    with (
        tempfile.TemporaryDirectory() as folder,
        run_server(agent_timeout_seconds=3600) as server,
    ):
        model = _write_model(Path(folder))
        for case in cases:
            if refusal := refused(case, model):
                print(f"{case.name}: refused: {refusal}", flush=True)
        cases = [case for case in cases if not refused(case, model)]
        for case in cases:
            tally = Tally()
            for i in range(args.rounds):
                if tally.rows >= args.rows / len(cases) or tally.faults:
                    break
                tally += play(case, args.seed + i, server.target, model, args.round_rows)
            print(f"{case.name}: {tally}", flush=True)
            for fault in tally.faults[:_TOLD]:
                print(f"    FAULT {fault}", flush=True)
            total += tally
    print(f"\ntotal: {total}\n{len(total.faults)} faults")
    return 1 if total.faults or total.wrong or total.lost else 0


if __name__ == "__main__":
    sys.exit(main())
