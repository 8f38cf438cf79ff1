"""Time from the end of a request until its trace can be read, while others of its engine run on."""

from __future__ import annotations

import tempfile
import threading
import time
from pathlib import Path

import numpy as np

from measure import QWEN3, Table
from routetrace.capture_agent import AgentConfig, CaptureAgent
from routetrace.client import NotFound, RouteClient
from routetrace.server.testing import run_server

_LANES, _TOKENS, _RATE = 64, 512, 5_000


def readable(table: Table) -> None:
    """Add two lines: without a reader, and with one that waits for the end."""
    # Of requests that began with a reader, those count that end while the engine runs.
    seconds, life = (2.0, 0.0) if table.quick else (20.0, _LANES * _TOKENS / _RATE)
    with tempfile.TemporaryDirectory() as directory, run_server(data_dir=Path(directory)) as server:
        for awaited in (False, True):
            with RouteClient(server.target, run=f"awaited {awaited}") as client:
                found = [
                    1e3 * delay for delay in _delays(client, server.target, awaited, seconds, life)
                ]
            who = "with a reader that waits" if awaited else "without a reader that waits"
            for name, share in (("p50", 50), ("p99", 99)):
                value = float(np.percentile(found, share))
                table.add(f"finished trace readable, {who}, {name}", value, "ms", "after finish()")


def _delays(
    client: RouteClient, target: str, awaited: bool, seconds: float, life: float
) -> list[float]:
    """Run an engine for some time; return the delays of every eighth request.

    Args:
        client: of the readers.
        target: server of the agent.
        awaited: whether readers wait from the begin of a request on.
        seconds: time that the engine runs.
        life: of a request that gets such a reader; it must end within that time.
    """
    delays: list[float] = []
    ends: dict[str, float] = {}
    readers: list[threading.Thread] = []

    def read(name: str) -> None:
        if awaited:
            client.get(name, wait_for="end", timeout=60)
        else:
            while not _has(client, name):
                time.sleep(0.01)
        delays.append(time.monotonic() - ends[name])

    config = AgentConfig(
        target=target, run=f"awaited {awaited}", engine_id="engine", layout=QWEN3.layout
    )
    rows = QWEN3.rows(_LANES)
    with CaptureAgent(config) as agent:
        names = [f"first-{lane}" for lane in range(_LANES)]
        handles = [agent.begin(name, prompt_len=1) for name in names]
        # Ends are spread over time.
        at, left = np.zeros(_LANES, np.int64), _TOKENS * (1 + np.arange(_LANES)) // _LANES
        due = stop = time.monotonic()
        stop += seconds
        number = 0
        while time.monotonic() < stop:
            agent.step(rows, np.stack([handles, at, np.ones_like(at)], axis=1))
            at += 1
            for lane in np.flatnonzero(at == left).tolist():
                ends[names[lane]] = time.monotonic()
                agent.finish(handles[lane], int(at[lane]) + 1)
                if not awaited and lane % 8 == 0:
                    readers.append(threading.Thread(target=read, args=(names[lane],)))
                    readers[-1].start()
                number += 1
                names[lane] = f"{number}"
                handles[lane] = agent.begin(names[lane], prompt_len=1)
                at[lane], left[lane] = 0, _TOKENS
                if awaited and lane % 8 == 0 and time.monotonic() + life < stop:
                    readers.append(threading.Thread(target=read, args=(names[lane],)))
                    readers[-1].start()
            due += _LANES / _RATE
            time.sleep(max(0.0, due - time.monotonic()))
        for lane, handle in enumerate(handles):
            ends[names[lane]] = time.monotonic()
            agent.finish(handle, int(at[lane]) + 1)
    for reader in readers:
        reader.join()
    return delays


def _has(client: RouteClient, name: str) -> bool:
    """Whether the server has the whole trace; no read that waits."""
    try:
        return client.stat(name).state == "complete"
    except NotFound:
        return False
