"""Bytes on the wire and peak memory of one trainer rank of many, against the whole.

A real server, a real agent, 32k-token requests of the shape of Qwen3-30B-A3B, and a TCP relay
between client and server that counts every byte. Prints a table and writes rank_wire.json.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from measure import QWEN3
from relay import Relay
from routetrace.capture_agent import AgentConfig, CaptureAgent
from routetrace.client import FetchPlan, MicroBatch, Rank, RouteClient, Rows, Sample
from routetrace.server.testing import run_server

HERE = Path(__file__).parent
LAYOUT = QWEN3.layout
TOKENS = 32768
PROMPT = 1500
SAMPLES = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--measure", help="only the memory of one get, from this server")
    parser.add_argument("--concurrency", type=int, default=1)
    args = parser.parse_args()
    if args.measure:
        print(memory(args.measure, args.concurrency))
        return
    rows: list[dict[str, Any]] = []
    with run_server() as server:
        fill(server.target)
        relay = Relay(server.target)
        whole = wire(relay, [rank()])[0]
        cases = [
            ("PP4 CP2, TP4 with sequence parallelism", 32, 1.15, ranks(4, 2, 4)),
            ("PP4 CP2", 8, 1.05, ranks(4, 2, 1)),
            ("PP8", 8, 1.05, ranks(8, 1, 1)),
        ]
        for name, count, goal, each in cases:
            got = wire(relay, each)
            for what, value in (("mean", sum(got) / len(got)), ("largest", max(got))):
                add(rows, f"{name}: {what} rank", value / whole * count, f"1/{count} of all", goal)
        relay.close()
        # An arena of malloc for each thread keeps what the thread has freed.
        for concurrency, arenas in ((1, ""), (2, ""), (2, "2")):
            command = [sys.executable, __file__, "--measure", server.target]
            command += ["--concurrency", str(concurrency)]
            environment = {**os.environ, **({"MALLOC_ARENA_MAX": arenas} if arenas else {})}
            ratios = [
                float(
                    subprocess.run(
                        command, capture_output=True, check=True, timeout=300, env=environment
                    ).stdout
                )
                for _ in range(5)
            ]
            what = f"PP4 CP2, 16 samples: peak memory, {concurrency} at a time"
            what += f", {arenas} arenas" if arenas else ""
            add(rows, what, statistics.median(ratios), "its buffer + one frame", 1.2)
    (HERE / "rank_wire.json").write_text(json.dumps({"rows": rows}, indent=1) + "\n")


def add(rows: list[dict[str, Any]], name: str, value: float, against: str, goal: float) -> None:
    met = value <= goal
    rows.append(
        {"name": name, "value": value, "unit": "x", "against": against, "goal": goal, "met": met}
    )
    print(f"{name:<60} {value:6.3f} x {against:<24} goal {goal:5.2f} {'' if met else 'NOT MET'}")


def fill(target: str) -> None:
    """Requests that decode side by side, as in an engine."""
    ids = QWEN3.rows(TOKENS)
    config = AgentConfig(target=target, engine_id="e", layout=LAYOUT, ring_bytes=256 << 20)
    with CaptureAgent(config) as agent:
        handles = [agent.begin(f"r{i}", prompt_len=PROMPT) for i in range(SAMPLES)]
        for handle in handles:
            agent.step(ids[:PROMPT], [(handle, 0, PROMPT)])
        for at in range(PROMPT, TOKENS - 1):
            agent.step(
                ids[[(at + 101 * i) % TOKENS for i in range(SAMPLES)]],
                [(handle, at, 1) for handle in handles],
            )
            if at % 2048 == 0:
                agent.flush(60)
        for handle in handles:
            agent.finish(handle, TOKENS)
        assert agent.flush(60)
        assert not agent.stats().dropped_rows


def rank(**split: Any) -> Rank:
    return Rank(**{"layer_ids": LAYOUT.layer_ids, **split})


def ranks(pp: int, cp: int, tp: int) -> list[Rank]:
    layers = len(LAYOUT.layer_ids) // pp
    return [
        rank(
            layer_ids=LAYOUT.layer_ids[p * layers : (p + 1) * layers],
            cp_size=cp,
            cp_rank=c,
            sp_size=tp,
            sp_rank=t,
        )
        for p in range(pp)
        for c in range(cp)
        for t in range(tp)
    ]


def plan_of(rank: Rank, samples: int = SAMPLES) -> FetchPlan:
    batch = [Sample.of(f"r{i % SAMPLES}", TOKENS) for i in range(samples)]
    # Padded, so that each sample is split as if alone; packed, a rank may have parts of two.
    return FetchPlan.make(LAYOUT, MicroBatch.padded(batch, TOKENS), rank)


def wire(relay: Relay, each: list[Rank]) -> list[int]:
    """Bytes that the server sends to each rank, with all that gRPC adds."""
    sent = []
    for one in each:
        before = relay.to_clients
        with RouteClient(relay.target) as client:
            rows = client.fetch(plan_of(one))
        assert rows.coverage == 1
        sent.append(relay.to_clients - before)
    return sent


def memory(target: str, concurrency: int) -> float:
    """By how much the peak memory of this process grows in one get / (its buffer + one frame)."""
    part = rank(layer_ids=LAYOUT.layer_ids[12:24], cp_size=2)
    plan = plan_of(part, 16)
    with RouteClient(target) as client:
        client.fetch(plan_of(part, 1), concurrency=concurrency)  # what is allocated once
        grown = peak(lambda: client.fetch(plan, concurrency=concurrency))
    return grown / (plan.nbytes + 512 * LAYOUT.row_bytes // 4)


def peak(get: Callable[[], Rows]) -> float:
    """Return the growth of peak memory over resident memory, in bytes."""
    before = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    Path("/proc/self/clear_refs").write_text("5")  # the peak is now
    assert get().coverage == 1
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmHWM"].split()[0]) * 1024 - before


if __name__ == "__main__":
    main()
