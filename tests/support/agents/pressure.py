"""An agent under pressure: load as of an engine that decodes, and a server that is absent.

`python -m support.agents.pressure` (in tests/) plays ten minutes without a server and prints what
became of the rows and of the memory.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from faults.serving import free_port
from routetrace.capture_agent import AgentConfig, AgentStats, CaptureAgent
from routetrace.client import RouteClient
from routetrace.common.layout import ModelLayout
from routetrace.server.testing import run_server

#: A row is 384 bytes, as of a model with 48 MoE layers and a top-8 of 128.
LAYOUT = ModelLayout(tuple(range(48)), 48, 128, 8)

_TABLE = 4096


@dataclass
class Request:
    """A request that was handed to an agent."""

    number: int
    num_tokens: int
    handle: int = 0
    done: int = 0  # rows

    @property
    def name(self) -> str:
        """Its id."""
        return f"r{self.number}"


class Load:
    """Steps of a batch that is always full; rows follow from request and position.

    Args:
        agent: what the rows go to.
        batch: requests that decode at the same time.
        seed: of the lengths of the requests.
    """

    def __init__(self, agent: CaptureAgent, batch: int = 64, seed: int = 0) -> None:
        self._agent = agent
        self._rng = random.Random(seed)
        keys = np.random.default_rng(seed).random((_TABLE, 48, 128), np.float32)
        self._rows = np.argpartition(keys, 8, axis=2)[..., :8].astype(np.uint8)
        self.requests: list[Request] = []
        self.offered = 0
        self._running = [self._begin() for _ in range(batch)]

    def rows(self, request: Request) -> np.ndarray:
        """All rows of a request, [num_tokens - 1, 48, 8]."""
        return self._rows[self._index(request.number, np.arange(request.num_tokens - 1))]

    def step(self) -> None:
        """Each request decodes a token; those that end make room for new ones."""
        numbers = np.array([r.number for r in self._running])
        positions = np.array([r.done for r in self._running])
        runs = [(r.handle, r.done, 1) for r in self._running]
        self._agent.step(self._rows[self._index(numbers, positions)], runs)
        self.offered += len(runs)
        for i, request in enumerate(self._running):
            request.done += 1
            if request.done == request.num_tokens - 1:
                self._end(request)
                self._running[i] = self._begin()

    def steps(self, count: int) -> None:
        """So many, as fast as the background takes them in."""
        ring = self._agent._link.ring
        for _ in range(count):
            while ring.written - ring._cursors[8] > ring.size // 2:
                time.sleep(0.001)
            self.step()

    def finish(self) -> None:
        """All requests end where they are."""
        for request in self._running:
            request.num_tokens = request.done + 1
            self._end(request)

    def _begin(self) -> Request:
        request = Request(len(self.requests), self._rng.randint(100, 1500))
        request.handle = self._agent.begin(request.name, labels={"group": f"g{request.number}"})
        self.requests.append(request)
        return request

    def _end(self, request: Request) -> None:
        self._agent.finish(request.handle, request.num_tokens, reason="length")

    def _index(self, numbers: np.ndarray | int, positions: np.ndarray) -> np.ndarray:
        return (numbers * 7919 + positions * 104729) % _TABLE


def memory_of(pid: int) -> dict[str, int]:
    """Resident bytes of a process: RssAnon, its own; RssShmem, the ring."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    pairs = (line.split(":", 1) for line in lines if line.startswith("Rss"))
    return {name: int(value.split()[0]) << 10 for name, value in pairs}


def check_sample(stats: AgentStats, offered: int) -> None:
    """Law 12, at any moment."""
    dropped = sum(stats.dropped_rows.values())
    assert stats.offered_rows == offered
    assert stats.offered_rows == stats.acknowledged_rows + dropped + stats.in_flight_rows
    assert min(stats.acknowledged_rows, dropped, stats.in_flight_rows) >= 0


def read_back(target: str, load: Load) -> Counter[str]:
    """Read all requests, compare them cell by cell, and return the rows or the reasons."""
    found: Counter[str] = Counter()
    by_name = {request.name: request for request in load.requests}
    with RouteClient(target) as client:
        for trace in client.get_many(by_name, missing="mask", concurrency=16):
            request = by_name[trace.trace_id]
            truth, there = load.rows(request), trace.valid.all(axis=1)
            assert (trace.valid == there[:, None]).all(), "rows come whole"
            assert trace.num_tokens == request.num_tokens
            assert (trace.topk_ids[there] == truth[there]).all(), request
            found["stored"] += int(there.sum())
            for gap in trace.missing:
                found[gap.reason] += gap.stop - gap.start
    return found


def without_server(steps: int, batch: int, queue_bytes: int, **settings: Any) -> dict[str, Any]:
    """Play so many steps without a server, which then comes; raise if anything is wrong."""
    port = free_port()
    # Time flies: of ten minutes some ten seconds are left.
    config = AgentConfig(
        f"127.0.0.1:{port}",
        "e0",
        LAYOUT,
        queue_bytes=queue_bytes,
        ring_bytes=8 << 20,
        linger_seconds=0.02,
        flush_interval_seconds=0.02,
        **settings,
    )
    with CaptureAgent(config) as agent:
        load = Load(agent, batch)
        agent.flush(1)  # it has tried to connect by now, and is as large as it is without load
        before = memory_of(agent.worker_pid)["RssAnon"]
        peak = 0
        for _ in range(steps // 100):
            load.steps(100)
            check_sample(agent.stats(), load.offered)
            peak = max(peak, memory_of(agent.worker_pid)["RssAnon"] - before)
        away = agent.stats()
        with run_server(port=port) as server:
            load.steps(batch)  # the server is there again, and these have room
            load.finish()
            assert agent.flush(100)
            stats = agent.stats()
            check_sample(stats, load.offered)
            found = read_back(server.target, load)
    assert stats.in_flight_rows == stats.unreported_requests == 0
    assert found.pop("stored") == stats.acknowledged_rows
    assert found == stats.dropped_rows, "what a reader is told is what was counted"
    return {
        "requests": len(load.requests),
        "offered": stats.offered_rows,
        "acknowledged": stats.acknowledged_rows,
        "dropped": stats.dropped_rows,
        "queued_bytes": away.queued_bytes,
        "spilled_bytes": away.spilled_bytes,
        "grown_bytes": peak,
    }


def main() -> None:
    """Print one line for each figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30_000, help="ten minutes of 50 a second")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--queue-mib", type=int, default=64)
    parser.add_argument("--spill-mib", type=int, default=0)
    args = parser.parse_args()
    settings: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as directory:
        if args.spill_mib:
            settings = {"spill_dir": directory, "spill_bytes": args.spill_mib << 20}
        figures = without_server(args.steps, args.batch, args.queue_mib << 20, **settings)
    for name, value in figures.items():
        print(f"{name:14} {value}")


if __name__ == "__main__":
    main()
