"""The network: cuts, resets at any byte, replies that get lost. Each chunk is stored once."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from faults.check import Violation, audit, check, read_all, temporary
from faults.proxy import Cut, Proxy
from faults.scenarios.kill import scripts
from faults.scenarios.torn import Load
from faults.serving import Server
from faults.writers import Job, Report, Run, Writers, no_violations
from routetrace.client import RouteClient

RUN_FOREVER = 1 << 30
RECONNECT_S = 5.0

_CUTS_TRIED = 5


def _compare(server: Server, reports: list[Report]) -> int:
    from faults.script import RUN

    no_violations(reports)
    pairs = list(zip(scripts(reports), (r.known for r in reports), strict=True))
    with RouteClient(server.target, run=RUN) as client:
        return read_all(client, pairs).rows


def _finish(writers: Writers, target: str, reports: list[Report], more: int) -> list[Report]:
    limit = max(r.known.sent for r in reports) + more
    writers.run(Run(target, limit, again=True))
    reports = writers.reports()
    check(all(r.known.acked >= limit for r in reports), "writers did not get through")
    return reports


def resets(seed: int, count: int, processes: Writers) -> dict[str, int]:
    """Connections reset at random bytes, again and again."""
    with temporary() as path, Server(Path(path)) as server, Proxy(server.target) as proxy:
        proxy.reset_randomly(seed, 60_000)
        processes.jobs([Job(seed, f"e{i}", window=30, distrusts=i % 2 == 1) for i in range(3)])
        processes.run(Run(proxy.target, RUN_FOREVER, again=True))
        deadline = time.monotonic() + 60 + count
        while proxy.resets < count:
            check(time.monotonic() < deadline, f"{proxy.resets} resets in the time of {count}")
            time.sleep(0.05)
        proxy.reset_randomly(seed, 0)
        reports = _finish(processes, server.target, processes.stop(), 20)
        rows = _compare(server, reports)
        check(server.stop() == 0, "no clean end")
        audit(Path(path))
        return {
            "resets": proxy.resets,
            "chunks_over_resets": sum(r.known.acked for r in reports),
            "rows_compared": rows,
        }


def lost_replies(seed: int, rounds: int, processes: Writers) -> dict[str, int]:
    """Lose the server's acknowledgements after a commit: repeated chunks are known and counted."""
    with temporary() as path, Server(Path(path)) as server, Proxy(server.target) as proxy:
        processes.jobs([Job(seed, f"e{i}", window=30, distrusts=True) for i in range(2)])
        reports: list[Report] = []
        for _ in range(rounds):
            processes.run(Run(proxy.target, RUN_FOREVER))
            _until(lambda: proxy.open >= 2)
            # A resend without an answer would count as sent, and not as known.
            _until_still(lambda: server.metrics()["routetrace_ingest_duplicates_total"], 0.5)
            lost = proxy.eaten["down"]
            proxy.cut("down", how="drop")
            # Acknowledgements get lost, until windows are full and committed.
            _until(lambda since=lost: proxy.eaten["down"] > since)
            _until_still(lambda: server.metrics()["routetrace_ingest_chunks_total"], 0.5)
            proxy.heal()
            reports = processes.reports()
        reports = _finish(processes, server.target, reports, 1)
        resent = sum(r.resent_stored for r in reports)
        duplicates = sum(r.duplicates for r in reports)
        check(resent, "nothing was resent: this shows nothing")
        check(duplicates == resent, f"{resent} resends, {duplicates} acknowledged as duplicates")
        counted = server.metrics()["routetrace_ingest_duplicates_total"]
        check(counted == resent, f"{resent} resends, the server counted {counted:.0f}")
        stored = server.metrics()["routetrace_ingest_bytes_total"]
        said = sum(
            len(chunk.header) + len(chunk.payload)
            for script, report in zip(scripts(reports), reports, strict=True)
            for chunk in map(script.chunk, range(1, report.known.acked + 1))
        )
        check(stored == said, f"{said} bytes were said, {stored:.0f} counted as stored")
        rows = _compare(server, reports)
        check(server.stop() == 0, "no clean end")
        audit(Path(path))
        return {"resends": resent, "counted_duplicates": int(counted), "rows_compared": rows}


def cuts(seed: int, seconds: float, processes: Writers) -> dict[str, float]:
    """The network is gone for a while, in both directions and in each alone."""
    figures: dict[str, float] = {}
    slowest = 0.0
    with (
        temporary() as path,
        Server(Path(path), agent_timeout_seconds=1.0) as server,
        Proxy(server.target) as proxy,
    ):
        with Load(seed, proxy.target, step_s=0.03) as load:
            processes.jobs([Job(seed, f"w{i}", window=16) for i in range(2)])
            processes.run(Run(proxy.target, RUN_FOREVER, again=True, pace_s=0.01))
            how: Cut
            for how in ("stall", "drop"):
                for directions in (("up", "down"), ("up",), ("down",)):
                    took = _recovery(load, proxy, how, directions, seconds)
                    name = f"{how}_{'_'.join(directions)}_s"
                    figures[name] = round(took, 2)
                    slowest = max(slowest, took)
            reports = _finish(processes, server.target, processes.stop(), 20)
            figures["rows_compared"] = load.finish(server.target) + _compare(server, reports)
        check(server.stop() == 0, "no clean end")
        audit(Path(path))
    if slowest > RECONNECT_S:
        raise Violation(f"acknowledged again {slowest:.1f} s after the network was back: {figures}")
    return figures


def _recovery(
    load: Load, proxy: Proxy, how: Cut, directions: tuple[str, ...], seconds: float
) -> float:
    """Cut the network and heal it; return the seconds until the rows that waited are acknowledged.

    A cut that no row met, as between two requests of the engines, shows nothing: it is made again.
    """
    for _ in range(_CUTS_TRIED):
        time.sleep(0.7)
        proxy.cut(*directions, how=how)
        time.sleep(seconds)
        met = load.on_their_way()
        proxy.heal()
        healed = time.monotonic()
        if met:
            return load.until_acknowledged(met, 60) - healed
    raise Violation(f"no row was on its way during {_CUTS_TRIED} cuts of {how} {directions}")


def _until_still(value: Callable[[], float], seconds: float) -> None:
    """Wait until a counter stands still."""
    last, since = value(), time.monotonic()
    deadline = since + 30
    while time.monotonic() < since + seconds:
        check(time.monotonic() < deadline, "no standstill in 30 s")
        time.sleep(0.05)
        if (now := value()) != last:
            last, since = now, time.monotonic()


def _until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        check(time.monotonic() < deadline, "waited in vain")
        time.sleep(0.01)


def run(seed: int, *, count: int = 50, rounds: int = 2, seconds: float = 2.0) -> dict[str, float]:
    """Figures of all three."""
    with Writers(2) as processes:
        figures: dict[str, float] = dict(resets(seed, count, processes)) if count else {}
        if rounds:
            figures.update(lost_replies(seed, rounds, processes))
        if seconds:
            figures.update(cuts(seed, seconds, processes))
    return figures
