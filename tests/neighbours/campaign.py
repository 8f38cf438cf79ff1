"""A campaign: a victim, honest neighbours beside it, then attackers; and the verdict."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from faults.check import check, temporary
from neighbours.attacking import attacker
from neighbours.place import HONEST, VICTIM, Place
from neighbours.processors import Part, used_since_now
from neighbours.shares import SCENARIOS, Scenario, Share
from neighbours.stepping import Step
from neighbours.tenants import LAYOUT, Report, tenant
from neighbours.watching import Child, Watch
from routetrace.capture_agent import AgentConfig, CaptureAgent
from routetrace.client import RouteClient
from support.scrape import Scraped
from support.servers.client_server import rows_of

#: Of every server of a campaign, beside what a scenario sets.
_SETTINGS = {"memory_limit": 512 << 20, "stalled_read_seconds": 10, "max_agents": 64}
_SLACK_MIB = 64

#: Longest time without a read of the victim, and until a new engine of it is let in.
_BOUND_S = 60.0
#: Seconds that attackers have to leave, before they are killed.
_LEAVE_S = 3.0
#: Reads that follow each other within five times the idle p99, when the server is back to normal.
_NORMAL_READS = 5

_EVICTIONS = ("quota", "capacity", "memory")

#: Ends of calls that are neither served nor refused by type, and allowed: the attacker's own doing,
#: or refused by gRPC before the server sees them.
_UNTYPED = ("CANCELLED", "UNAVAILABLE", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED")


@dataclass
class Figures:
    """Reads of the victim in one span of time."""

    seconds: float
    latencies: Sequence[float]

    @property
    def rate(self) -> float:
        """Reads in a second."""
        return len(self.latencies) / self.seconds

    @property
    def p99_ms(self) -> float:
        """99th percentile of their time."""
        return float(np.percentile(self.latencies, 99)) * 1000 if self.latencies else np.inf


@dataclass
class Row:
    """Figures of one scenario."""

    name: str
    idle: Figures
    honest: Figures
    attacked: Figures
    before_mib: float
    peak_mib: float
    longest_idle_ms: float
    longest_ms: float
    recovery_s: float
    steps: list[Step]
    """Long steps of the server's event loop beside the attack."""
    new_engine_s: float = np.inf
    evicted: int = 0
    """Traces that the server evicted beside the attack."""
    outcomes: Counter[str] = field(default_factory=Counter)
    cores: dict[str, float] = field(default_factory=dict)
    """Processors that each process used during the attack."""

    @property
    def share(self) -> float:
        """Reads beside the attack, by reads beside the honest load."""
        return self.attacked.rate / self.honest.rate

    @property
    def longest_step_ms(self) -> float:
        """Processor time of the longest step of the server's event loop beside the attack."""
        return max((step.computed for step in self.steps), default=0.0) * 1000

    @property
    def slower(self) -> float:
        """p99 beside the attack, by that of an idle server."""
        return self.attacked.p99_ms / self.idle.p99_ms


def groups(names: Iterable[str], share: Share) -> list[list[str]]:
    """Scenarios by the server that they run on, one after the other."""
    if share.alone:
        return [[name] for name in names]
    by_settings: dict[str, list[str]] = {}
    for name in names:
        scenario = SCENARIOS[name]
        by_settings.setdefault(repr((scenario.settings, scenario.proxied)), []).append(name)
    return list(by_settings.values())


def run(names: list[str], share: Share) -> tuple[list[Row], int, list[str]]:
    """Run scenarios on one server, until one breaks a promise.

    Returns:
        Figures of those that were measured, the number of those that ran, and the promises that
        were broken.
    """
    settings = {**_SETTINGS, **SCENARIOS[names[0]].settings}
    proxied = SCENARIOS[names[0]].proxied
    limit = (settings["memory_limit"] >> 20) + _SLACK_MIB
    broken: list[str] = []
    rows, ran = [], 0
    with temporary() as folder, Place(Path(folder), proxied=proxied, **settings) as place:
        victim = Child(Part.VICTIM, tenant, place.access(VICTIM), VICTIM, 1)
        try:
            victim.wait_ready()
            with Watch(place.access(VICTIM)) as watch:
                victim.go()
                campaign = _Campaign(place, victim, watch, share)
                campaign.calm()
                for name in names:
                    ran += 1
                    try:
                        row = campaign.attack(name, SCENARIOS[name])
                        rows.append(row)
                        check(row.peak_mib <= limit, f"{row.peak_mib:.0f} MiB, limit {limit}")
                        evicted = 0 if SCENARIOS[name].tenant else row.evicted
                        check(not evicted, f"evicted {evicted} traces without a token")
                    except Exception as error:
                        broken.append(f"{name}: {error or error!r}")
                        break
                victim.stop()
                victim.wait(300)
        finally:
            victim.end()
        broken += _judge_victim(victim.result)
        broken += _judge_server(place)
    return rows, ran, broken


class _Campaign:
    def __init__(self, place: Place, victim: Child, watch: Watch, share: Share) -> None:
        self._place = place
        self._victim = victim
        self._watch = watch
        self._share = share
        self._number = 0

    def calm(self) -> None:
        """Measure the victim on an idle server, then beside an honest neighbour."""
        self._await_reads(time.monotonic(), 20)  # connections, caches
        start = time.monotonic()
        time.sleep(self._share.calm_s)
        self._idle = self._figures(start, time.monotonic())
        self._longest_idle = self._watch.longest_ms(start, time.monotonic())
        neighbour = Child(Part.NEIGHBOUR, tenant, self._place.access(HONEST), HONEST, 2)
        try:
            neighbour.wait_ready()
            neighbour.go()
            start = time.monotonic()
            time.sleep(self._share.calm_s)
            self._honest = self._figures(start, time.monotonic())
            neighbour.stop()
            check(neighbour.wait(120), "the honest neighbour does not end")
        finally:
            neighbour.end()
        check(not _judge_victim(neighbour.result), "the honest neighbour lost rows")

    def attack(self, name: str, scenario: Scenario) -> Row:
        """Measure the victim beside an attack, and after it."""
        sizes = (scenario.ci or {}) if self._share.small else {}
        access = self._place.access(scenario.tenant)
        if scenario.source:
            sizes = {**sizes, "source": scenario.source}
        evicted = self._evicted()
        child = Child(Part.NEIGHBOUR, attacker, scenario.attack, access, 0, sizes)
        try:
            child.wait_ready()
            before = self._watch.peak_mib(time.monotonic() - 0.5, time.monotonic())
            start = time.monotonic()
            used = used_since_now(self._pids(child), 0.1)
            child.go()
            child.wait(self._share.attack_s)
            stop, processors = time.monotonic(), used()
            child.stop()
        finally:
            child.end(_LEAVE_S)
        left = time.monotonic()
        recovery = self._recovery(left)
        self._number += 1
        row = Row(
            name,
            self._idle,
            self._honest,
            self._figures(start, stop),
            before,
            self._watch.peak_mib(start, time.monotonic()),
            self._longest_idle,
            self._watch.longest_ms(start, left),
            recovery,
            [step for step in self._place.steps if start <= step.begun <= left],
        )
        check(not child.failed, "the attacker failed, and said why on standard error")
        row.outcomes.update(child.result or {"killed": 1})
        row.cores.update(processors)
        row.new_engine_s = self._open_engine(f"fresh-{self._number}")
        row.evicted = self._evicted() - evicted
        for outcome in row.outcomes:
            code, _, untyped = outcome.partition(" ")
            check(code not in ("UNKNOWN", "INTERNAL"), f"a call ended with {outcome}")
            check(untyped != "untyped" or code in _UNTYPED, f"a call ended with {outcome}")
        return row

    def _evicted(self) -> int:
        metrics = Scraped(f"127.0.0.1:{self._place.server.metrics_port}")
        name = "routetrace_forgotten_traces_total"
        return int(sum(metrics.value(name, reason=why) for why in _EVICTIONS))

    def _pids(self, other: Child) -> dict[str, int]:
        server = self._place.access(VICTIM).pid
        return {"server": server, "victim": self._victim.pid, "other": other.pid}

    def _figures(self, start: float, stop: float) -> Figures:
        """Reads that ended in a span of time, and those that were still waiting at its end."""
        found = [s for t, s in list(self._victim.samples) if start <= t + s <= stop]
        return Figures(stop - start, found)

    def _await_reads(self, since: float, count: int) -> None:
        """Wait until so many reads that began after a moment have ended."""
        deadline = time.monotonic() + _BOUND_S
        while sum(t >= since for t, _ in list(self._victim.samples)) < count:
            check(time.monotonic() < deadline, f"the victim's reads stopped for {_BOUND_S} s")
            check(not self._victim.wait(0.05), "the victim ended")

    def _recovery(self, left: float) -> float:
        """Seconds from when the attackers have left until reads are as fast as before."""
        most = 5 * self._idle.p99_ms / 1000
        deadline = left + _BOUND_S
        self._await_reads(left, 1)
        while time.monotonic() < deadline:
            quick = 0
            for begun, seconds in list(self._victim.samples):
                if begun + seconds < left:
                    continue
                quick = quick + 1 if seconds <= most else 0
                if quick == 1:
                    first = begun
                if quick == _NORMAL_READS:
                    return max(0.0, first - left)
            time.sleep(0.05)
        return np.inf

    def _open_engine(self, engine_id: str) -> float:
        """Write and read a trace of a new engine of the victim; return the seconds that it took."""
        access = self._place.access(VICTIM)
        rows = rows_of(LAYOUT, 8, 7)
        config = AgentConfig(
            target=access.target, run=VICTIM, engine_id=engine_id, layout=LAYOUT,
            security=access.security, background="thread", linger_seconds=0.02,
            flush_interval_seconds=0.01,
        )  # fmt: skip
        begun = time.monotonic()
        with CaptureAgent(config) as agent:
            handle = agent.begin(engine_id, prompt_len=8)
            agent.step(rows, [(handle, 0, 8)])
            agent.finish(handle, 9)
            check(agent.flush(_BOUND_S), f"no new engine was let in for {_BOUND_S:.0f} s")
        took = time.monotonic() - begun
        with RouteClient(access.target, run=VICTIM, security=access.security) as client:
            trace = client.get(engine_id, wait_for="end", timeout=_BOUND_S)
        check(np.array_equal(trace.topk_ids, rows), f"{engine_id}: other rows")
        return took


def _judge_victim(report: Report | None) -> list[str]:
    if report is None:
        return ["a tenant ended without a report"]
    return [
        f"{len(found)} of {report.traces} traces {what}, such as {found[0]}"
        for what, found in (("wrong", report.wrong), ("lost", report.lost))
        if found
    ]


def _judge_server(place: Place) -> list[str]:
    """End the server, and judge how it ended."""
    log, code = place.server.log, place.server.stop(120)
    broken = [] if code == 0 else [f"the server ended with code {code}: {log[-2000:]}"]
    if "Traceback" in log:
        broken.append(f"the server's log: {log[log.index('Traceback') :][:2000]}")
    return broken
