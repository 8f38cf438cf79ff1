"""The agents' whole path while the server is killed: simulated engines, agents, comparison."""

from __future__ import annotations

import random
import threading
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from faults.check import audit, check, temporary
from faults.serving import Server
from oracle.cluster import Cluster, random_specs
from oracle.compare import Comparer
from oracle.engine import Chances
from oracle.harness import RUN, BaseWorld, SocketWorld, _no_errors
from oracle.runs import LAYOUTS
from routetrace.capture_agent import AgentStats
from routetrace.client import RouteClient

SETTINGS = {"sweep_interval_seconds": 0.2, "agent_timeout_seconds": 1.0}

_REQUESTS = 20


class AgentWorld(SocketWorld):
    """Agents of a server that somebody else looks after."""

    def __init__(self, seed: int, target: str, client_target: str) -> None:
        BaseWorld.__init__(self, LAYOUTS[seed % len(LAYOUTS)], seed)
        self._stack = ExitStack()
        self._stack.enter_context(_no_errors())
        self._workers = {}
        self.target = target
        self.client = self._stack.enter_context(RouteClient(client_target, run=RUN, timeout=120))

    def _serve(self) -> None:
        """Not ours to do."""

    def disturb(self) -> None:
        """Whoever breaks things does so beside us."""


class Load:
    """Simulated engines at work; a context manager.

    Args:
        seed: of all that they do.
        target: what the agents connect to.
        client_target: what is asked in the end; the agents' if empty.
        step_s: pause between two steps of the engines.
    """

    def __init__(
        self, seed: int, target: str, client_target: str = "", step_s: float = 0.003
    ) -> None:
        self._seed = seed
        self._step_s = step_s
        self.world = AgentWorld(seed, target, client_target or target)
        rng = random.Random(f"load {seed}")
        # A bind is not repeated when the server is away: it may have been done.
        specs = [replace(s, slot_only_twin=False) for s in random_specs(rng, self.world.layout)]
        chances = Chances(crash=0.0)
        self.cluster = Cluster(self.world.layout, seed, self.world, specs, chances)
        self._over = threading.Event()
        self._failure: BaseException | None = None
        # In a thread, as engines now and then wait until all is stored: that may take a cut's time.
        self._thread = threading.Thread(target=self._run, name="load")

    def _run(self) -> None:
        try:
            while not self._over.is_set():
                if not self.cluster.step():
                    self.cluster.submit_workload(_REQUESTS)
                time.sleep(self._step_s)
        except BaseException as error:
            self._failure = error

    def on_their_way(self) -> dict[tuple[str, str], AgentStats]:
        """Return the agents that have rows which are not acknowledged, and how far each is."""
        if self._failure:
            raise self._failure
        agents = {key: agent.stats() for key, agent in list(self.world.agents.items())}
        return {key: stats for key, stats in agents.items() if stats.in_flight_rows}

    def until_acknowledged(
        self, marked: dict[tuple[str, str], AgentStats], timeout: float
    ) -> float:
        """Wait until rows of each agent in `marked` are acknowledged; return the time."""
        deadline = time.monotonic() + timeout
        waiting = set(marked)
        while waiting:
            check(time.monotonic() < deadline, f"no acknowledgement in {timeout} s: {waiting}")
            time.sleep(0.005)
            for key in list(waiting):
                if self.world.agents[key].stats().chunks > marked[key].chunks:
                    waiting.discard(key)
        return time.monotonic()

    def finish(self, client_target: str = "") -> int:
        """Let everything end and arrive, and compare all of it; return the cells."""
        self._over.set()
        self._thread.join()
        if self._failure:
            raise self._failure
        while self.cluster.step():
            pass
        self.cluster.barrier()
        self.world.settle()
        client = self.world.client
        if client_target:
            client = self.world._stack.enter_context(RouteClient(client_target, run=RUN))
        for key, agent in self.world.agents.items():
            stats = agent.stats()
            left = stats.offered_rows - stats.acknowledged_rows - sum(stats.dropped_rows.values())
            check(left == stats.in_flight_rows == 0, f"agent {key}: rows are missing: {stats}")
            bad = set(stats.dropped_rows) - {"rewound", "late"}
            check(not bad, f"agent {key}: dropped {stats.dropped_rows}")
        rng = random.Random(f"compare {self._seed}")
        return Comparer(client, self.cluster, rng, settled=True).all().cells

    def __enter__(self) -> Load:
        self.cluster.submit_workload(_REQUESTS)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(90)
        self.world.close()


def once(seed: int, kills: int) -> dict[str, int]:
    """One server, killed several times while agents send."""
    rng = random.Random(f"torn {seed}")
    with temporary() as path, Server(Path(path), **SETTINGS) as server:
        with Load(seed, server.target) as load:
            for _ in range(kills):
                time.sleep(rng.uniform(0.2, 1.5))  # the moment is what is drawn
                server.kill()
                if rng.random() < 0.3:
                    server.start_and_kill(rng.uniform(0.2, 1.5))
                server.start()
            cells = load.finish()
            agents = len(load.world.agents)
            reconnects = sum(a.stats().reconnects for a in load.world.agents.values())
        check(server.stop() == 0, "no clean end")
        audit(Path(path))
    return {
        "kills": kills,
        "agents": agents,
        "reconnects": reconnects,
        "requests": load.cluster.counts["requests"],
        "cells_compared": cells,
    }


def run(seed: int, *, seeds: int = 1, kills: int = 2) -> dict[str, int]:
    """Figures of several servers."""
    total: dict[str, int] = {}
    for i in range(seeds):
        try:
            figures = once(seed + i, kills)
        except BaseException as error:
            error.args = (f"seed {seed + i}: {error}",)
            raise
        for name, value in figures.items():
            total[name] = total.get(name, 0) + value
    return total
