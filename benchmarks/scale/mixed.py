"""A mixed load: all that a server is asked for, at the same time, beside 100,000 small traces.

Engines of 5,000 tokens/s with real agents, a trainer that waits for their traces and a follower
(`routetrace bench load`, which checks every row); and here: reads of finished traces, one and many,
look-ups by label, leases of all traces, retirements, deletions, status and metrics, and sweeps in
which a fifth of the traces expire together.
"""

from __future__ import annotations

import itertools
import json
import random
import subprocess
import sys
import threading
import time
import urllib.request
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from ingest.load import load, send_all
from measure import PEER_CORE, QWEN3, Shape, pin
from routetrace.client import RouteClient
from routetrace.common.layout import ModelLayout
from routetrace.server.testing import ServerProcess

#: One layer: the indexes are what they are for a large model, and payloads take little disk.
SMALL = Shape("one layer", "", ModelLayout((0,), 1, 64, 4))
_HERE = Path(__file__).parent
_SWEEP_SECONDS = 5
_names = itertools.count()


class Hold(NamedTuple):
    """A callback of the event loop; times in seconds."""

    begun: float
    cpu: float
    wall: float
    name: str


def fill(
    target: str, run: str, count: int, *, tokens: int = 33, shape: Shape = SMALL, ttl: int = 0
) -> list[str]:
    """Store some `count` finished traces; return their ids."""
    # Small ones, many in a chunk, as an engine with short answers has them.
    name, each = f"f{next(_names)}", 12_800 if shape is SMALL else 1 << 20
    one = load(shape, 1, message_bytes=each, tokens=tokens)
    per_message = one.tokens // (tokens - 1)
    messages = -(-count // per_message)
    one = load(
        shape, messages, message_bytes=each, tokens=tokens, name=name, num_blocks=1 << 12, ttl=ttl
    )
    send_all(target, shape, run, one.messages)
    return [f"{name}-{i}" for i in range(messages * per_message)]


def holds(directory: Path, *, traces: int, seconds: float) -> list[Hold]:
    """Return what held the loop of a server for a millisecond or more under this load."""
    notes = directory / "notes"
    command = [
        *(sys.executable, str(_HERE / "watched.py"), str(notes)),
        *("--listen=127.0.0.1:0", f"--data-dir={directory / 'data'}", "--log-level=error"),
        *("--metrics-listen=127.0.0.1:0", f"--sweep-interval-seconds={_SWEEP_SECONDS}"),
    ]
    with ServerProcess(command, 60) as server:
        pin(PEER_CORE, server.pid)
        mixed = _Mixed(server, traces)
        mixed.warm()
        begun = time.monotonic()
        mixed.run(seconds)
        stop = time.monotonic()
    found = [Hold(*json.loads(line)) for line in notes.read_text().splitlines()]
    return [hold for hold in found if begun <= hold.begun < stop]


class _Mixed:
    def __init__(self, server: ServerProcess, traces: int) -> None:
        self._target = server.target
        self._metrics = f"http://{server.metrics_target}/metrics"
        self._traces = traces
        self._stop = threading.Event()

    def warm(self) -> None:
        """Fill the store, and ask for everything once."""
        self._bulk = fill(self._target, "bulk", self._traces)[: self._traces]
        self._read = fill(self._target, "read", 256, tokens=513, shape=QWEN3)
        for ask, _ in self._asked():
            ask()

    def run(self, seconds: float) -> None:
        """Run the load for so long."""
        asked = self._asked()
        command = [
            *(sys.executable, "-m", "routetrace.cli", "--target", self._target, "--run"),
            *("bench-mixed", "bench", "load", "--agents=3", "--batch=64", "--steps=40"),
            *("--mix=chat", "--readers=1", "--followers=1", f"--seconds={seconds:.0f}"),
        ]
        with ThreadPoolExecutor(len(asked)) as pool:
            asking = [pool.submit(self._repeat, *each) for each in asked]
            try:
                subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            finally:
                self._stop.set()
            for each in asking:
                each.result()

    def _repeat(self, ask: Callable[[], object], pause: float) -> None:
        while not self._stop.is_set():
            ask()
            self._stop.wait(pause)

    def _asked(self) -> list[tuple[Callable[[], object], float]]:
        """What is asked for, and the seconds between two times."""
        bulk = RouteClient(self._target, run="bulk")
        read = RouteClient(self._target, run="read")
        return [
            (lambda: read.get(random.choice(self._read)), 0.05),
            (lambda: _spend(read.get_many(random.sample(self._read, 64))), 0.5),
            (lambda: _spend(bulk.get_many(random.sample(self._bulk, 512))), 1),
            (lambda: _spend(bulk.find(labels={"group": "f0-99"}, limit=500)), 1),
            (lambda: _spend(bulk.find(labels={"group": "none"})), 1),
            (lambda: bulk.renew(self._bulk, ttl_seconds=3600), 2),
            (lambda: bulk.retire_through(0), 2),
            (self._retire, 2),
            (self._delete, 0.5),
            (self._expire, 1.5 * _SWEEP_SECONDS),
            (bulk.server_info, 0.1),
            (lambda: urllib.request.urlopen(self._metrics).read(), 1),
        ]

    def _retire(self) -> None:
        fill(self._target, "retired", self._traces // 20)
        with RouteClient(self._target, run="retired") as client:
            client.retire_through(1)

    def _delete(self) -> None:
        with RouteClient(self._target, run="deleted") as client:
            client.delete(*fill(self._target, "deleted", 84)[:20])

    def _expire(self) -> None:
        # The sweep that finds them writes a snapshot of the rest.
        fill(self._target, "gone", self._traces // 5, ttl=_SWEEP_SECONDS)


def _spend(answers: Iterable[object]) -> None:
    deque(answers, maxlen=0)
