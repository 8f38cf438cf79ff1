"""Processes of honest tenants: they write traces, read them, and compare each row."""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

import numpy as np

from neighbours.place import Access
from routetrace.capture_agent import AgentConfig, CaptureAgent
from routetrace.client import RouteClient, TraceState
from routetrace.common.errors import NotFound, RouteTraceError
from routetrace.common.layout import ModelLayout
from support.servers.client_server import rows_of

LAYOUT = ModelLayout(tuple(range(16)), 16, 128, 8)
ROWS = 64

#: Traces that are there before anything is measured.
FIRST_TRACES = 30
#: Seconds between two traces of the writer, and between two messages to the parent process.
_WRITE_S = 0.1
_TELL_S = 0.1
#: Seconds until a tenant gives up to write or read its own rows: longer than any attack.
PATIENCE_S = 120.0


@dataclass
class Report:
    """Outcome of a tenant; `wrong` and `lost` name its traces."""

    traces: int = 0
    reads: int = 0
    wrong: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)
    """Reads that ended with an error, by its type."""


class _Tenant:
    def __init__(self, pipe: Connection, access: Access, run: str, number: int) -> None:
        self._pipe = pipe
        self._number = number
        self._run = run
        self._access = access
        self._stop = threading.Event()
        self._done: list[int] = []  # traces that the agent has finished
        self._reads: list[tuple[float, float]] = []  # (begin, seconds) not reported yet
        self._told = time.monotonic()
        self._rows: dict[int, np.ndarray] = {}  # of the traces that are read again and again
        self.report = Report()

    def run(self) -> None:
        config = AgentConfig(
            target=self._access.target, run=self._run, engine_id=f"engine-{self._number}",
            layout=LAYOUT, security=self._access.security, background="thread",
            linger_seconds=0.02, flush_interval_seconds=0.01,
        )  # fmt: skip
        with CaptureAgent(config) as agent, self._client() as client:
            for number in range(FIRST_TRACES):
                self._write(agent, number)
            if not agent.flush(PATIENCE_S):
                raise TimeoutError("the first traces were not acknowledged")
            self._pipe.send("ready")
            self._pipe.recv()
            threads = [
                threading.Thread(target=self._write_on, args=(agent,)),
                threading.Thread(target=self._read_on, args=(client,)),
            ]
            for thread in threads:
                thread.start()
            self._pipe.recv()
            self._stop.set()
            for thread in threads:
                thread.join()
            if not agent.flush(PATIENCE_S):
                self.report.lost.append(f"{agent.stats().in_flight_rows} rows not acknowledged")
            deadline = time.monotonic() + PATIENCE_S
            for number in list(self._done):
                self._compare(client, number, max(1.0, deadline - time.monotonic()))
        self._pipe.send(self.report)

    def _client(self) -> RouteClient:
        return RouteClient(
            self._access.target, run=self._run, security=self._access.security, timeout=60
        )

    def _write(self, agent: CaptureAgent, number: int) -> None:
        handle = agent.begin(self._name(number), prompt_len=ROWS)
        agent.step(self._truth(number), [(handle, 0, ROWS)])
        agent.finish(handle, ROWS + 1)
        self._done.append(number)
        self.report.traces += 1

    def _write_on(self, agent: CaptureAgent) -> None:
        number = FIRST_TRACES
        while not self._stop.wait(_WRITE_S):
            self._write(agent, number)
            number += 1

    def _read_on(self, client: RouteClient) -> None:
        rng = np.random.default_rng(self._number)
        while not self._stop.is_set():
            # Traces that the server has for sure: the newest ones may be on their way.
            number = int(rng.integers(FIRST_TRACES))
            begun = time.monotonic()
            if self._compare(client, number, 60.0):
                self._reads.append((begun, time.monotonic() - begun))
            if time.monotonic() - self._told > _TELL_S:
                self._pipe.send(self._reads)
                self._reads, self._told = [], time.monotonic()

    def _compare(self, client: RouteClient, number: int, seconds: float) -> bool:
        """Read a trace and compare all of it; return whether it was read."""
        name, deadline = self._name(number), time.monotonic() + seconds
        try:
            trace = client.get(name, wait_for="end", timeout=deadline - time.monotonic())
        except NotFound as error:
            self.report.lost.append(f"{name}: {error}")
            return False
        except RouteTraceError as error:
            self.report.refused[type(error).__name__] += 1
            if self._stop.is_set():
                self.report.lost.append(f"{name}: {error!r}")
            return False
        self.report.reads += 1
        whole = trace.valid.all() and trace.state is TraceState.COMPLETE
        if not whole:
            self.report.lost.append(f"{name}: {trace!r}")
        elif not np.array_equal(trace.topk_ids, self._truth(number)):
            self.report.wrong.append(name)
        return True

    def _name(self, number: int) -> str:
        return f"{self._number}-{number}"

    def _truth(self, number: int) -> np.ndarray:
        if number in self._rows:
            return self._rows[number]
        rows = rows_of(LAYOUT, ROWS, self._number * 1_000_003 + number)
        if number < FIRST_TRACES:
            self._rows[number] = rows
        return rows


def tenant(pipe: Connection, access: Access, run: str, number: int) -> None:
    """Write FIRST_TRACES; send "ready"; then write and read between two messages from the parent.

    Sends lists of (begin, seconds) of reads, and a Report at the end.
    """
    _Tenant(pipe, access, run, number).run()
