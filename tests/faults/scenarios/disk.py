"""A disk that gets full under load, and has room again; also across kill -9, and at the start."""

from __future__ import annotations

import re
import resource
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Protocol

from faults.check import audit, check, read_all, temporary
from faults.scenarios.kill import scripts
from faults.script import RUN
from faults.serving import Server
from faults.writers import Job, Report, Run, Writers, no_violations
from routetrace.client import RouteClient

RESUME_S = 15.0

_SIZE = 48 << 20
_FOREVER = 1 << 30
_CHUNKS = "routetrace_ingest_chunks_total"


class Disk(Protocol):
    """Data directory of a server."""

    path: Path

    def fill(self, server: Server) -> None: ...

    def free(self, server: Server) -> None: ...


class Tmpfs:
    """A small file system of its own, and a file that takes what is left of it."""

    survives = True
    """Whether it stays full when the process ends."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._ballast = path / "ballast"

    def fill(self, server: Server) -> None:
        with self._ballast.open("ab", buffering=0) as file:
            for size in (1 << 20, 4096):
                with suppress(OSError):
                    while True:
                        file.write(b"\1" * size)

    def free(self, server: Server) -> None:
        self._ballast.unlink()


class Limit:
    """No file of the process may grow: where mounting is not allowed."""

    survives = False

    def __init__(self, path: Path) -> None:
        self.path = path

    def fill(self, server: Server) -> None:
        sizes = (f.stat().st_size for f in server.data_dir.rglob("*") if f.is_file())
        self._limit(server, max(sizes))

    def free(self, server: Server) -> None:
        self._limit(server, resource.RLIM_INFINITY)

    @staticmethod
    def _limit(server: Server, size: int) -> None:
        hard = resource.RLIM_INFINITY
        resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (size, hard))


@contextmanager
def small_disk() -> Iterator[Tmpfs | Limit]:
    """A tmpfs if the user may mount one."""
    with ExitStack() as stack:
        path = Path(stack.enter_context(temporary()))
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={_SIZE}", "tmpfs", str(path)],
            capture_output=True, check=False,
        ).returncode == 0  # fmt: skip
        if mounted:
            stack.callback(subprocess.run, ["umount", "-l", str(path)], check=True)
        yield Tmpfs(path) if mounted else Limit(path)


def _refused(server: Server) -> float:
    name = "routetrace_ingest_rejected_total"
    return sum(
        value
        for sample, value in server.metrics().items()
        if sample.startswith(name) and re.search("overloaded|unavailable", sample, re.IGNORECASE)
    )


def _answered(server: Server) -> float:
    """Reads that ended."""
    return sum(
        value
        for sample, value in server.metrics().items()
        if sample.startswith("grpc_server_handled_total") and "GetTrace" in sample
    )


def _wait(what: str, condition: object, seconds: float) -> float:
    begun = time.monotonic()
    while not condition():  # type: ignore[operator]
        check(time.monotonic() - begun < seconds, f"{what}: not in {seconds} s")
        time.sleep(0.02)
    return time.monotonic() - begun


def _compare(server: Server, reports: list[Report]) -> int:
    no_violations(reports)
    pairs = list(zip(scripts(reports), (r.known for r in reports), strict=True))
    with RouteClient(server.target, run=RUN) as client:
        return read_all(client, pairs).rows


def once(seed: int, processes: Writers, kill_while_full: bool) -> dict[str, float]:
    """One disk: full, and free again."""
    with small_disk() as disk:
        server = Server(disk.path / "data", sweep_interval_seconds=0.5, store_capacity=1 << 30)
        with server:
            processes.jobs([Job(seed, f"e{i}", longest=200, reads=i == 0) for i in range(2)])
            processes.run(Run(server.target, _FOREVER, again=True))
            _wait("chunks", lambda: server.metrics()[_CHUNKS] > 50, 60)
            # They may all be the other writer's; the one that reads needs a request that has ended.
            _wait("reads", lambda: _answered(server) > 0, 60)
            disk.fill(server)
            _wait("refusals", lambda: _refused(server) > 0, 60)
            answered, refusals = _answered(server), _refused(server)
            # Refused and tried again, and nothing is taken; reads go on.
            _wait("more refusals", lambda: _refused(server) > refusals + 2, 60)
            _wait("reads while the disk is full", lambda: _answered(server) > answered, 60)
            read_on = _answered(server) - answered
            full_starts = 0
            if kill_while_full:
                server.kill()
                if disk.survives:
                    server.start()  # on a full disk
                    full_starts = 1
                    disk.free(server)
                else:
                    server.start()
            else:
                disk.free(server)
            freed = server.metrics()[_CHUNKS]
            resumed = _wait("resumes", lambda: server.metrics()[_CHUNKS] > freed, RESUME_S)
            reports = processes.stop()
            limit = max(r.known.sent for r in reports) + 10
            processes.run(Run(server.target, limit, again=True))
            reports = processes.reports()
            rows = _compare(server, reports)
            kinds = {kind for r in reports for kind in r.rejects}
            check(kinds <= {"OVERLOADED", "UNAVAILABLE", "OUT_OF_SEQUENCE"}, f"refused by {kinds}")
            check(server.stop() == 0, "no clean end")
        audit(server.data_dir, failed=True)
    return {
        "disks": 1,
        "tmpfs": int(disk.survives),
        "refused": sum(sum(r.rejects.values()) for r in reports),
        "reads_while_full": read_on,
        "starts_while_full": full_starts,
        "slowest_resume_s": resumed,
        "chunks": sum(r.known.acked for r in reports),
        "rows_compared": rows,
    }


def run(seed: int, *, disks: int = 2) -> dict[str, float]:
    """Figures of several disks; every other one is killed while it is full."""
    total: dict[str, float] = {}
    with Writers(2) as processes:
        for i in range(disks):
            for name, value in once(seed + i, processes, i % 2 == 1).items():
                slowest = name.startswith("slowest")
                old = total.get(name, 0)
                total[name] = max(old, value) if slowest else old + value
    return total
