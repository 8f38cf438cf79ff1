"""Readers: thousands at once, slow ones beside fast ones, and ones that die in mid-stream."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from faults.check import check, temporary
from faults.proxy import Proxy
from faults.script import RUN
from faults.serving import Server
from routetrace.client import RouteClient
from routetrace.common.layout import ModelLayout
from support.agents.feeder import Feeder
from support.servers.client_server import rows_of

#: Other interpreters, with other versions of grpcio, that take a part: `name=path`, by comma.
PYTHONS = "FAULTS_PYTHONS"

LAYOUT = ModelLayout(tuple(range(16)), 16, 128, 8)

_ROOT = Path(__file__).parents[3]
_PATH = os.pathsep.join(
    str(_ROOT / part) for part in ("proto", "server", "client", "capture_agent", "tests")
)
_SMALL, _LARGE = 64, 20_000  # rows


def pythons() -> dict[str, list[str]]:
    """Interpreters by name; this one, and those that PYTHONS names."""
    found = {"this": [sys.executable]}
    for item in filter(None, os.environ.get(PYTHONS, "").split(",")):
        name, _, path = item.partition("=")
        # Below their own packages, this checkout's sources.
        found[name] = ["env", f"PYTHONPATH={_PATH}", path]
    return found


def fill(server: Server, traces: int, *, large: bool = False) -> list[str]:
    """Store traces; return their names. The large one comes last."""
    feeder = Feeder(server.target, LAYOUT, run=RUN)
    names = [f"t{i}" for i in range(traces)] + ["large"] * large
    for i, name in enumerate(names):
        count = _LARGE if name == "large" else _SMALL
        handle = feeder.begin(name, prompt_len=count)
        for at in range(0, count, 1000):
            rows = rows_of(LAYOUT, min(1000, count - at), i * 100 + at // 1000)
            for part in range(0, len(rows), 250):
                piece = rows[part : part + 250]
                feeder.step(piece, np.array([[handle, at + part, len(piece)]]))
            feeder.flush()
        feeder.finish(handle, count + 1)
        feeder.flush()
    feeder.close()
    return names


def _start(python: Sequence[str], job: dict[str, Any]) -> subprocess.Popen[str]:
    env = {**os.environ, "PYTHONPATH": _PATH}
    process = subprocess.Popen(
        [*python, "-m", "faults.reading"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env,
    )  # fmt: skip
    assert process.stdin is not None
    process.stdin.write(json.dumps({"run": RUN, **job}) + "\n")
    process.stdin.close()
    return process


def _finish(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    text = process.stdout.read()
    check(process.wait(300) == 0, "a reading process failed")
    answer: dict[str, Any] = json.loads(text)
    return answer


class _Peak:
    """The most memory that a process has, while this is open."""

    def __init__(self, process: psutil.Process) -> None:
        self._process = process
        self._over = threading.Event()
        self.before = self.most = process.memory_info().rss
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._over.wait(0.05):
            self.most = max(self.most, self._process.memory_info().rss)

    @property
    def growth_mib(self) -> float:
        return (self.most - self.before) / (1 << 20)

    def __enter__(self) -> _Peak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def many(
    seed: int, reads: int, processes: int, server_python: list[str], python: list[str]
) -> dict[str, float]:
    """All reads at once: each is answered, or refused by type and answered when it comes again."""
    with temporary() as path, Server(Path(path), python=server_python) as server:
        names = fill(server, 50)
        job = {
            "target": server.target,
            "traces": names,
            "count": reads // processes,
            "at_once": reads,
        }
        with _Peak(server.process) as peak:
            readers = [_start(python, {**job, "seed": seed + i}) for i in range(processes)]
            answers = [_finish(process) for process in readers]
        counts: Counter[str] = Counter()
        for answer in answers:
            counts.update(answer["counts"])
        expected = reads // processes * processes
        check(counts["ok"] == expected, f"{counts['ok']} of {expected} answered: {dict(counts)}")
        bad = set(counts) - {"ok", "RESOURCE_EXHAUSTED"}
        check(not bad, f"{dict(counts)}")
        check(server.stop() == 0, "no clean end")
    return {
        "answered": counts["ok"],
        "overloaded": counts["RESOURCE_EXHAUSTED"],
        "cancelled": counts["CANCELLED"],
        "p99_s": max(a["p99"] for a in answers),
        "server_growth_mib": peak.growth_mib,
    }


def default_client(reads: int) -> dict[str, float]:
    """The client as it comes, in many threads' stead: one asyncio loop."""
    import asyncio

    from routetrace.client import AsyncRouteClient

    with temporary() as path, Server(Path(path), max_reads=8) as server:
        names = fill(server, 50)

        async def read() -> int:
            async with AsyncRouteClient(server.target, run=RUN) as client:
                answers = await asyncio.gather(
                    *(client.get(names[i % len(names)]) for i in range(reads))
                )
                return sum(len(a) == _SMALL for a in answers)

        answered = asyncio.run(read())
        check(answered == reads, f"{answered} of {reads} answered")
        refused = server.metrics().get('routetrace_overloaded_total{what="reads"}', 0.0)
        check(server.stop() == 0, "no clean end")
    return {"client_answered": answered, "client_refused_first": refused}


def slow(seed: int, slow_readers: int, fast_reads: int) -> dict[str, float]:
    """Readers that take 1 kB/s beside fast ones."""
    with ExitStack() as stack:
        path = stack.enter_context(temporary())
        server = stack.enter_context(Server(Path(path)))
        proxy = stack.enter_context(Proxy(server.target))
        names = fill(server, 50, large=True)
        job = {
            "target": server.target,
            "traces": names[:-1],
            "count": fast_reads,
            "at_once": 8,
            "seed": seed,
        }
        alone = _finish(_start([sys.executable], job))
        proxy.slow("down", bytes_per_s=1000)
        peak = stack.enter_context(_Peak(server.process))
        hanging = _start(
            [sys.executable],
            {
                "target": proxy.target,
                "traces": ["large"],
                "count": slow_readers,
                "follow": False,
                "hang": True,
            },
        )
        stack.callback(hanging.wait)
        stack.callback(hanging.kill)
        reads = 'grpc_server_started_total{grpc_method="GetTrace"'
        deadline = time.monotonic() + 60
        while _sum(server, reads) < fast_reads + slow_readers:
            check(time.monotonic() < deadline, "the slow readers did not get there")
            time.sleep(0.05)
        beside = _finish(_start([sys.executable], job))
        check(beside["counts"]["ok"] == fast_reads, f"{beside['counts']}")
        growth = peak.growth_mib
    return {
        "slow_readers": slow_readers,
        "fast_p99_ratio": beside["p99"] / alone["p99"],
        "slow_server_growth_mib": growth,
    }


def killed(kills: int, streams: int) -> dict[str, float]:
    """Clients that are killed in mid-stream leave nothing behind."""
    with temporary() as path, Server(Path(path)) as server:
        names = fill(server, 10, large=True)
        feeder = Feeder(server.target, LAYOUT, run=RUN, engine_id="open")
        handle = feeder.begin("running", prompt_len=4)
        feeder.step(rows_of(LAYOUT, 4, 1), np.array([[handle, 0, 4]]))
        feeder.flush()
        # What there is from the first call on, such as threads, belongs to the baseline.
        _hang_and_kill(server, ["running", "large"], 2)
        _settled(server, 1 << 30)
        baseline = server.process.num_fds()
        for _ in range(max(1, kills // streams)):
            _hang_and_kill(server, ["running", "large"], streams)
        took = _settled(server, baseline)
        left = _open_streams(server)
        check(left <= 1, f"{left:.0f} streams are still open")  # the feeder's
        fds = server.process.num_fds()
        with RouteClient(server.target, run=RUN) as client:
            check(len(client.get(names[0])) == _SMALL, "a read after it all")
        feeder.close()
        check(server.stop() == 0, "no clean end")
    return {
        "killed_streams": max(1, kills // streams) * streams,
        "descriptors_before": baseline,
        "descriptors_after": fds,
        "settled_s": took,
    }


def _hang_and_kill(server: Server, traces: list[str], streams: int) -> None:
    job = {"target": server.target, "traces": traces, "count": streams, "follow": True}
    process = _start([sys.executable], {**job, "hang": True})
    assert process.stdout is not None
    check(process.stdout.readline() == "open\n", "streams did not open")
    process.kill()
    process.wait()
    process.stdout.close()


def _sum(server: Server, prefix: str) -> float:
    return sum(
        v
        for k, v in server.metrics().items()
        if k.startswith(prefix.partition("{")[0]) and all(p in k for p in _labels(prefix))
    )


def _labels(prefix: str) -> list[str]:
    return [p for p in prefix.partition("{")[2].rstrip("}").split(",") if p]


def _open_streams(server: Server) -> float:
    return _sum(server, "grpc_server_started_total") - _sum(server, "grpc_server_handled_total")


def _settled(server: Server, most_fds: int) -> float:
    begun = time.monotonic()
    while server.process.num_fds() > most_fds or _open_streams(server) > 1:
        took = time.monotonic() - begun
        check(
            took < 10,
            f"{server.process.num_fds()} descriptors, {_open_streams(server):.0f} open streams",
        )
        time.sleep(0.05)
    return time.monotonic() - begun


def run(
    seed: int,
    *,
    reads: int = 1000,
    processes: int = 2,
    client_reads: int = 300,
    slow_readers: int = 10,
    fast_reads: int = 300,
    kills: int = 40,
    streams: int = 20,
) -> dict[str, float]:
    """Figures of all four; many at once also with each other interpreter, as server and client."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    figures: dict[str, float] = {}
    try:
        if reads:
            this = [sys.executable]
            for name, other in pythons().items():
                for role, pair in (("server", (other, this)), ("client", (this, other))):
                    if name == "this" and role == "client":
                        continue
                    found = many(seed, reads, processes, *pair)
                    label = "" if name == "this" else f"{name}_{role}_"
                    figures.update({f"{label}{k}": v for k, v in found.items()})
        if client_reads:
            figures.update(default_client(client_reads))
        if slow_readers:
            figures.update(slow(seed, slow_readers, fast_reads))
        if kills:
            figures.update(killed(kills, streams))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return figures
