"""The memory between engine and background: nothing of it is left, whoever is killed, and when."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from routetrace.capture_agent import AgentConfig, CaptureAgent
from routetrace.common.layout import ModelLayout
from routetrace.v1 import routetrace_pb2 as pb
from support.servers.ingest_server import IngestServer, Model
from support.shared_names import left_behind, shared_names
from support.waiting import wait_for

pytestmark = pytest.mark.skipif(not Path("/proc/self").exists(), reason="looks at processes")

LAYOUT = ModelLayout((1, 2, 4), 6, 300, 3)

# Steps without an end, one row each, and tells of every one that has returned.
ENGINE = """
import json, logging, os, signal, sys, time
import numpy as np
target, memory, end = sys.argv[1:]
if memory == "file":
    del os.memfd_create  # as where there are no anonymous files
from routetrace.capture_agent import AgentConfig, CaptureAgent
from routetrace.common.layout import ModelLayout
logging.basicConfig(handlers=[logging.NullHandler()])
layout = ModelLayout((1, 2, 4), 6, 300, 3)
delays = {"linger_seconds": 0.01, "flush_interval_seconds": 0.005}
agent = CaptureAgent(AgentConfig(target, "e0", layout, **delays))
handle = agent.begin("a")
ended = []
signal.signal(signal.SIGTERM, lambda *_: ended.append(True))
print(agent.worker_pid, flush=True)
step = 0
while not ended:
    row = (np.arange(9).reshape(1, 3, 3) * 31 + step) % 300
    agent.step(row.astype(np.uint16), [(handle, step, 1)])
    os.write(2, b".")
    step += 1
    if end == "in a step" and step == 200:
        # Where most is half done: room is taken, and what is in it was never published.
        ring = agent._link.ring
        at = ring.reserve(1000)
        ring.memory[at : at + 1000] = bytes([255]) * 1000
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.0005)
report = agent.close()
stats = agent.stats()
dropped = sum(report.dropped_rows.values()) + report.unsent_rows
print(json.dumps([step, stats.offered_rows, report.acknowledged_rows, dropped]))
"""


def row(step: int) -> bytes:
    return ((np.arange(9) * 31 + step) % 300).astype("<u2").tobytes()


class Engine:
    """An engine in a process and a session of its own, with a directory for temporary files."""

    def __init__(self, server: IngestServer, directory: Path, memory: str, end: str = "") -> None:
        self._server = server
        self._names = shared_names()
        self._directory = directory / "temporary"
        self._directory.mkdir()
        self._told = directory / "told"
        with self._told.open("wb") as told:
            self.process = subprocess.Popen(
                [sys.executable, "-c", ENGINE, server.target, memory, end],
                stdout=subprocess.PIPE,
                stderr=told,
                text=True,
                start_new_session=True,
                env={**os.environ, "TMPDIR": str(self._directory)},
            )
        self.pid = self.process.pid
        assert self.process.stdout is not None
        self.background = int(self.process.stdout.readline())

    def told(self) -> int:
        """Steps that have returned."""
        told = self._told.read_bytes()
        assert set(told) <= {ord(".")}, told.replace(b".", b"").decode()
        return len(told)

    def run(self, steps: int) -> None:
        """Let it go on for that many steps."""
        until = self.told() + steps
        wait_for(lambda: self.told() >= until)

    def send(self, rows: int) -> None:
        """Let it go on until the server has got that many rows."""
        self._server.wait_for(lambda: self._server.rows >= rows, 30)

    def kill(self, *pids: int) -> None:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        if self.pid in pids:
            assert self.process.wait(30) == -signal.SIGKILL

    def assert_nothing_is_named(self) -> None:
        """Neither while it runs nor after."""
        assert list(self._directory.iterdir()) == []
        wait_for(lambda: not left_behind(self._names, processes_of(self.pid)))

    def assert_gone(self) -> None:
        wait_for(lambda: not processes_of(self.pid))
        self.assert_nothing_is_named()

    def assert_served(self, least: int, most: int, model: Model | None = None) -> int:
        """All rows that the server has are right, are the first ones, and that many."""
        rows = (model or self._server.model).requests[0].attempts[0].rows
        assert least <= len(rows) <= most
        assert {p: data for p, (data, _) in rows.items()} == {p: row(p) for p in range(len(rows))}
        return len(rows)


def processes_of(session: int, states: str = "RSDTtI") -> list[int]:
    """Processes of a session that are in one of these states; by default those that live."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[3]) == session and fields[0] in states:
            found.append(int(path.parent.name))
    return found


@pytest.fixture
def server() -> Iterator[IngestServer]:
    with IngestServer() as ingest:
        yield ingest


Start = Callable[..., Engine]


@pytest.fixture
def start(server: IngestServer, tmp_path: Path) -> Iterator[Start]:
    engines: list[Engine] = []

    def start(*arguments: str) -> Engine:
        engines.append(Engine(server, tmp_path, *arguments))
        return engines[-1]

    yield start
    for engine in engines:
        for pid in processes_of(engine.pid):
            os.kill(pid, signal.SIGKILL)
        engine.process.communicate()


@pytest.mark.parametrize("memory", ["memory", "file"])
def test_a_killed_engine_leaves_nothing_and_all_its_steps_arrive(
    server: IngestServer, start: Start, memory: str
) -> None:
    engine = start(memory)
    engine.run(100)
    assert set(processes_of(engine.pid)) == {engine.pid, engine.background}
    engine.assert_nothing_is_named()
    engine.kill(engine.pid)
    engine.assert_gone()
    # One step may have been handed over and not yet told of.
    served = engine.assert_served(engine.told(), engine.told() + 1)
    assert server.model.requests[0].lost == [(served, 0, pb.MISSING_REASON_AGENT_LOST)]


def test_an_engine_that_is_killed_in_a_step_publishes_nothing_of_it(
    server: IngestServer, start: Start
) -> None:
    engine = start("memory", "in a step")
    assert engine.process.wait(60) == -signal.SIGKILL
    engine.assert_gone()
    engine.assert_served(200, 200)
    assert server.model.requests[0].lost == [(200, 0, pb.MISSING_REASON_AGENT_LOST)]


@pytest.mark.parametrize("memory", ["memory", "file"])
def test_the_engine_goes_on_when_its_background_is_killed(
    server: IngestServer, start: Start, memory: str
) -> None:
    engine = start(memory)
    engine.send(100)
    before = server.model
    engine.kill(engine.background)
    engine.run(200)

    def others() -> set[int]:
        return set(processes_of(engine.pid, "RSDTtIZX")) - {engine.pid}

    # Reaped, not left as a zombie, and followed by another one.
    wait_for(lambda: len(others() - {engine.background}) == len(others()) == 1)
    engine.assert_nothing_is_named()
    engine.process.send_signal(signal.SIGTERM)
    output, _ = engine.process.communicate(timeout=60)
    assert engine.process.returncode == 0
    step, offered, acknowledged, dropped = json.loads(output)
    assert step == offered == engine.told()
    assert offered == acknowledged + dropped
    assert dropped >= 200  # of the request that ran
    engine.assert_gone()
    # What was stored just before may not have been acknowledged any more.
    engine.assert_served(acknowledged, offered, before)


def test_nothing_is_left_when_both_are_killed(start: Start) -> None:
    engine = start("memory")
    engine.send(100)
    engine.kill(engine.background, engine.pid)
    engine.assert_gone()
    engine.assert_served(100, engine.told() + 1)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["process", "thread"])
def test_closed_agents_hold_nothing(server: IngestServer, mode: str) -> None:
    """Neither memory nor descriptors, threads or processes; engines may come and go in one host."""

    def held() -> dict[str, int]:
        gc.collect()
        process = psutil.Process()
        return {
            "memory": Path("/proc/self/maps").read_text().count("/memfd:routetrace"),
            "sockets": len(process.net_connections("unix")),
            "threads": sum(t.name.startswith("routetrace-") for t in threading.enumerate()),
            "processes": len(process.children()),
        }

    before = held()
    for _ in range(3):
        with CaptureAgent(AgentConfig(server.target, "e0", LAYOUT, background=mode)) as agent:
            agent.finish(agent.begin("a"), 1)
            assert agent.flush(20)
            grown = {what for what, count in held().items() if count > before[what]}
        shared = {"memory", "processes"} if mode == "process" else set()
        assert grown == {"sockets", "threads", *shared}
    del agent
    wait_for(lambda: all(count <= before[what] for what, count in held().items()))
