"""From the engine's output to the trainer's tensor: ours beside what engines and trainers do today.

All processes of a way live at once, and the ways take turns. The CPU time of a round is that of all
of a way's processes, less what the same processes take for a round in which nobody gets the rows,
and less what comparing the tensors with the truth takes.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import psutil
from measure import HERE, Table, area, progress, ratios, rounds
from rival_load import Load

from routetrace.server.testing import run_server

WHOLE = Load(sessions=64, prompt=512, answer=1536)
QUICK = Load(sessions=16, prompt=256, answer=512)
TURNS = Load(sessions=32, prompt=256, answer=128, turns=10, more=64)
QUICK_TURNS = Load(sessions=8, prompt=128, answer=64, turns=10, more=32)
RATE = 100_000  # tokens a second of the engine


def cpu_clock(pid: int) -> float:
    """CPU time of a process, finer than the ticks of /proc."""
    return time.clock_gettime(~pid << 3 | 2)


class Child:
    """A process that is told and tells lines."""

    def __init__(self, script: str, *arguments: str) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / script), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=environment,
            text=True,
        )
        self.pid = self._process.pid

    def tell(self, line: str) -> None:
        """Sends a line."""
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def hear(self) -> list[str]:
        """The words of the next line."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(self.log())
        return line.split()

    def log(self) -> str:
        """The end of what it complained about."""
        self._log.seek(0)
        return self._log.read()[-3000:].decode(errors="replace")

    def close(self) -> None:
        """Ends it, and whatever it started."""
        started = psutil.Process(self.pid).children(recursive=True)
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            code = self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        _, alive = psutil.wait_procs(started, 10)
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        if code:
            raise RuntimeError(self.log())


@dataclass
class Round:
    """What a round took.

    Attributes:
        seconds: CPU time of all processes, without that of the check.
        each: the CPU time of each process, by its name.
        rows: that the trainer got, and that were as they should be.
        sent: bytes, as far as they are counted.
    """

    seconds: float
    each: dict[str, float]
    rows: int
    sent: int


class Way:
    """One way from an engine to a trainer: its processes."""

    def __init__(self, name: str, load: Load) -> None:
        self.name = name
        self.load = load
        self.pids: dict[str, int] = {}
        #: Those whose memory counts.
        self.sides: tuple[str, ...] = ("engine", "trainer")
        self._number = 0
        self._stack = contextlib.ExitStack()

    def _run(self, kind: str, name: str) -> tuple[int, float, int]:
        """Runs a round; returns rows, seconds of the check, and bytes."""
        raise NotImplementedError

    def _processes(self) -> dict[str, int]:
        return self.pids

    def round(self, kind: str = "way") -> Round:
        """Runs a round; of kind "nobody", one in which nobody gets rows."""
        self._number += 1
        before = {name: cpu_clock(pid) for name, pid in self._processes().items()}
        rows, check, sent = self._run(kind, f"{kind}{self._number}")
        each = {}
        for name, pid in self._processes().items():
            with contextlib.suppress(OSError):  # it has ended
                each[name] = cpu_clock(pid) - before.get(name, 0.0)
        each["trainer"] -= check
        if kind == "way" and rows != self.load.tokens:
            raise RuntimeError(f"{self.name}: {rows} rows came of {self.load.tokens}")
        return Round(sum(each.values()), each, rows, sent)

    def close(self) -> None:
        """Ends its processes."""
        self._stack.close()

    def _child(self, script: str, *arguments: str) -> Child:
        child = Child(script, *arguments)
        self._stack.callback(child.close)
        return child


class Pair(Way):
    """An engine and a trainer; and ours with a server between them."""

    def __init__(self, name: str, load: Load, rate: float) -> None:
        super().__init__(name, load)
        told, target = json.dumps(asdict(load)), ""
        try:
            if name == "ours":
                directory = self._stack.enter_context(tempfile.TemporaryDirectory())
                server = self._stack.enter_context(run_server(data_dir=Path(directory)))
                self.pids["server"], target = server.pid, server.target
            self._engine = self._child("rival_engine.py", name, told, str(rate), target)
            port = self._engine.hear()[1]
            self.pids["engine"] = self._engine.pid
            if name == "ours":
                self.pids["agent"] = int(port)
                self.sides = ("engine", "agent", "trainer")
            self._trainer = self._child("rival_trainer.py", name, told, port, target)
            self._trainer.hear()
            self.pids["trainer"] = self._trainer.pid
        except BaseException:
            self.close()
            raise
        self._sent = 0

    def _run(self, kind: str, name: str) -> tuple[int, float, int]:
        if kind != "nobody":
            self._trainer.tell(f"round {name}")
        self._engine.tell(f"{kind} {name}")
        while (line := self._engine.hear())[0] == "done":
            self._trainer.tell(" ".join(line))
        if kind == "nobody":
            return 0, 0.0, 0
        before, self._sent = self._sent, int(line[1])
        if self.name == "ours":
            self._trainer.tell("over")
        _, rows, check, received = self._trainer.hear()
        return int(rows), float(check), int(received) or self._sent - before


class Ray(Way):
    """Two actors, and all that Ray runs beside them."""

    def __init__(self, name: str, load: Load, rate: float) -> None:
        super().__init__(name, load)
        try:
            directory = self._stack.enter_context(
                tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True)
            )
            dtype = name.removeprefix("ray ")
            told = json.dumps(asdict(load))
            self._child_ = self._child("rival_ray.py", dtype, told, str(rate), directory)
            engine, trainer = self._child_.hear()[1:]
        except BaseException:
            self.close()
            raise
        self.pids = {"engine": int(engine), "trainer": int(trainer)}

    def _processes(self) -> dict[str, int]:
        mine = {pid: name for name, pid in self.pids.items()}
        mine[self._child_.pid] = "driver"
        for process in psutil.Process(self._child_.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                mine.setdefault(process.pid, f"{process.name()} {process.pid}")
        return {name: pid for pid, name in mine.items()}

    def _run(self, kind: str, name: str) -> tuple[int, float, int]:
        self._child_.tell(f"{kind} {name}")
        _, rows, check = self._child_.hear()
        return int(rows), float(check), 0


def make(name: str, load: Load, rate: float = RATE) -> Way:
    """A way, by its name."""
    return Ray(name, load, rate) if name.startswith("ray") else Pair(name, load, rate)


# ---------------------------------------------------------------------------- memory


def memory(pids: Sequence[int]) -> int:
    """Resident bytes of processes, without files; what they share counts once."""
    own = shared = 0
    for pid in pids:
        with open(f"/proc/{pid}/status") as status:
            for line in status:
                if line.startswith("RssAnon"):
                    own += int(line.split()[1])
                elif line.startswith("RssShmem"):
                    shared = max(shared, int(line.split()[1]))
    return own + shared << 10


@contextlib.contextmanager
def peaks(pids: dict[str, Sequence[int]]) -> Iterator[dict[str, int]]:
    """The most memory, by name, beyond what there was at first; looks a hundred times a second."""
    first = {name: memory(each) for name, each in pids.items()}
    most = dict.fromkeys(pids, 0)
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.01):
            for name, each in pids.items():
                most[name] = max(most[name], memory(each) - first[name])

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield most
    finally:
        over.set()
        thread.join()


# ---------------------------------------------------------------------------- the table

TITLES = {
    "ours": "ours",
    "vllm": "vLLM's way: uint8 .npy, base64, fast JSON",
    "vllm-shipped": "vLLM's way as it ships: the standard JSON",
    "sglang": "SGLang's way: int32, base64, JSON",
    "ray int32": "Ray put and get, int32",
    "ray uint8": "Ray put and get, uint8",
}
GOALS = {
    "vllm": "<= 0.1",
    "vllm-shipped": "<= 0.1",
    "sglang": "<= 0.1",
    "ray int32": "<= 0.333",
    "ray uint8": "",
}


@dataclass
class Found:
    """What was measured of one way.

    Attributes:
        idle: a round in which nobody gets the rows.
        rounds: the others.
        peak: bytes of memory, beyond what there was before the first round.
    """

    idle: Round
    rounds: list[Round]
    peak: int

    def costs(self, tokens: int, part: str = "") -> list[float]:
        """CPU seconds a million tokens, of all processes or of one."""
        each = [
            one.each[part] - self.idle.each[part] if part else one.seconds - self.idle.seconds
            for one in self.rounds
        ]
        return [cost / tokens * 1e6 for cost in each]


def there(name: str) -> bool:
    """Whether what a way needs is installed."""
    needs = ["torch"]
    if name != "ours":
        needs += ["ray"] if name.startswith("ray") else ["aiohttp", "orjson", "pybase64", "uvloop"]
    lacking = [module for module in needs if importlib.util.find_spec(module) is None]
    if lacking:
        print(f"skipped: {TITLES[name]}: needs {', '.join(lacking)}", file=sys.stderr)
    return not lacking


def run(load: Load, names: Sequence[str], count: int) -> dict[str, Found]:
    """Runs `count` rounds of each way that is there, in turns."""
    found: dict[str, Found] = {}
    names = [name for name in names if there(name)]
    with contextlib.ExitStack() as stack:
        ways: dict[str, Way] = {}

        def start(name: str) -> None:
            ways[name] = make(name, load)
            stack.callback(ways[name].close)

        with progress("processes"), ThreadPoolExecutor(2) as starters:
            list(starters.map(start, names))
        for name in names:
            with progress(TITLES[name]):
                way = ways[name]
                idle = way.round("nobody")
                with peaks({name: [way.pids[side] for side in way.sides]}) as most:
                    way.round()
            found[name] = Found(idle, [], most[name])

        def cell(name: str) -> float:
            one = ways[name].round()
            found[name].rounds.append(one)
            return one.seconds

        with progress("rounds"):
            rounds({name: partial(cell, name) for name in names}, count)
    for each in found.values():
        del each.rounds[0]  # which rounds() throws away, too
    return found


def measure(table: Table) -> None:
    """See the module."""
    load = QUICK if table.quick else WHOLE
    names = [name for name in TITLES if name != "ray uint8" or not table.quick]
    found = run(load, names, 1 if table.quick else 4)
    for name, each in found.items():
        idle = f"beside {each.idle.seconds:.2f} s without a way"
        table.add(f"CPU: {TITLES[name]}", each.costs(load.tokens), "s/Mtok", idle)
    for part in found["ours"].idle.each if "ours" in found else ():
        table.add(f"CPU: ours, {part}", found["ours"].costs(load.tokens, part), "s/Mtok", "")
    for name, each in found.items():
        table.add(f"peak memory: {TITLES[name]}", each.peak / 2**20, "MiB", "beyond idle")
    for name, each in found.items():
        if name != "ours" and "ours" in found:
            ours = found["ours"]
            cost = ratios(ours.costs(load.tokens), each.costs(load.tokens))
            table.add("CPU, engine to tensor", cost, "x", TITLES[name], GOALS[name])
            memory = ours.peak / each.peak
            table.add("peak memory, engine to tensor", memory, "x", TITLES[name], GOALS[name])
    turns(table, QUICK_TURNS if table.quick else TURNS)


def turns(table: Table, load: Load) -> None:
    """Sessions of ten turns, each of whose answers repeats all that came before."""
    names, count = (["ours"], 1) if table.quick else (["ours", "vllm", "sglang"], 2)
    for name, each in run(load, names, count).items():
        note = "of them each once" if name == "ours" else "of them each answer the whole"
        table.add(f"10 turns, CPU: {TITLES[name]}", each.costs(load.tokens), "s/Mtok", note)
        sent = [one.sent / load.tokens for one in each.rounds]
        table.add(f"10 turns, bytes: {TITLES[name]}", sent, "B/token", "from engine to trainer")


if __name__ == "__main__":
    area(measure)
