"""Ways of rows from engines to a trainer, ours and rivals': processes, rounds and costs."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from measure import program, progress, rounds
from routetrace.server.testing import run_server
from ways.load import Load

TITLES = {
    "ours": "ours",
    "packed": "ours packed by compiled loops",
    "0.7.0": "routetrace 0.7.0",
    "beside": "the other checkout of ours",
    "vllm": "vLLM's way: uint8 .npy, base64, fast JSON",
    "vllm-shipped": "vLLM's way as it ships: the standard JSON",
    "sglang": "SGLang's way: int32, base64, JSON",
    "ray int32": "Ray put and get, int32",
    "ray uint8": "Ray put and get, uint8",
}

#: Ways of ours: as pip installs it, without numba; with codec="pack" and loops that are compiled
#: before the first round; and other versions.
OURS = ("ours", "packed", "0.7.0", "beside")
RIVALS = tuple(name for name in TITLES if name not in OURS)


@dataclass(frozen=True)
class Setting:
    """Conditions under which ways are measured.

    Attributes:
        load: of each engine.
        rate: tokens a second of each engine.
        engines: side by side, for one trainer.
        together: whether our trainer reads all traces of a round in one `get_many` when the last
            request has ended, in place of one `get` for each request that ends.
        checkouts: other versions of routetrace, by way.
    """

    load: Load
    rate: float
    engines: int = 1
    together: bool = False
    checkouts: Mapping[str, Path] = field(default_factory=dict)

    @property
    def our_ways(self) -> list[str]:
        """Our ways; loops of many engines would compile for longer than a round takes."""
        return ["ours", *(["packed"] if self.engines == 1 else []), *self.checkouts]

    @property
    def tokens(self) -> int:
        """Rows of a round, each once."""
        return self.engines * self.load.tokens


def cpu_clock(pid: int) -> float:
    """CPU time of a process, finer than the ticks of /proc."""
    return time.clock_gettime(~pid << 3 | 2)


class Child:
    """A process that reads and writes lines."""

    def __init__(self, module: str, *arguments: str) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            program(module, *arguments),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=environment,
            text=True,
        )
        self.pid = self._process.pid

    def tell(self, line: str) -> None:
        """Send a line."""
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
        """End it, and whatever it started."""
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
    """Cost of a round.

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
    """One way from engines to a trainer: its processes."""

    def __init__(self, name: str, setting: Setting) -> None:
        self.name = name
        self.setting = setting
        #: By part and number, as "engine 0"; by part alone where there is one.
        self.pids: dict[str, int] = {}
        #: Parts whose memory counts.
        self.sides: tuple[str, ...] = ("engine", "trainer")
        self._number = 0
        self._stack = contextlib.ExitStack()

    def _run(self, kind: str, name: str) -> tuple[int, float, int]:
        """Run a round; return rows, seconds of the check, and bytes."""
        raise NotImplementedError

    def _processes(self) -> dict[str, int]:
        return self.pids

    def round(self, kind: str = "way") -> Round:
        """Run a round; one of kind "idle" carries no rows."""
        self._number += 1
        before = {name: cpu_clock(pid) for name, pid in self._processes().items()}
        rows, check, sent = self._run(kind, f"{kind}{self._number}")
        each = {}
        for name, pid in self._processes().items():
            with contextlib.suppress(OSError):  # it has ended
                each[name] = cpu_clock(pid) - before.get(name, 0.0)
        each["trainer"] -= check
        if kind == "way" and rows != self.setting.tokens:
            raise RuntimeError(f"{self.name}: {rows} rows came of {self.setting.tokens}")
        return Round(sum(each.values()), each, rows, sent)

    def close(self) -> None:
        """End its processes."""
        self._stack.close()

    def _child(self, script: str, *arguments: str) -> Child:
        child = Child(script, *arguments)
        self._stack.callback(child.close)
        return child


class Direct(Way):
    """Engines and a trainer; and ours with a server between them."""

    def __init__(self, name: str, setting: Setting) -> None:
        super().__init__(name, setting)
        load, target = json.dumps(asdict(setting.load)), ""
        self._is_ours = name in OURS
        kind = "ours" if self._is_ours else name
        adapter = ["ways.previous"] if name == "0.7.0" else []
        codec = "/pack" if name == "packed" else "/auto"
        try:
            if self._is_ours:
                directory = self._stack.enter_context(tempfile.TemporaryDirectory())
                # 0.7.0 has no page, and so no such setting.
                page: dict[str, Any] = {"page_listen": None} if name == "0.7.0" else {}
                server = self._stack.enter_context(run_server(data_dir=Path(directory), **page))
                self.pids["server"], target = server.pid, server.target
                self.sides = ("engine", "agent", "trainer")
            self._engines = [
                self._child(
                    *adapter, "ways.engine", kind + codec, load, str(setting.rate), target, f"e{i}"
                )
                for i in range(setting.engines)
            ]
            said = [engine.hear()[1] for engine in self._engines]
            for i, (engine, port) in enumerate(zip(self._engines, said, strict=True)):
                self.pids[f"engine {i}"] = engine.pid
                if self._is_ours:
                    self.pids[f"agent {i}"] = int(port)
            how = "together" if setting.together else "each"
            self._trainer = self._child(
                *adapter, "ways.trainer", kind, load, ",".join(said), target, how
            )
            self._trainer.hear()
            self.pids["trainer"] = self._trainer.pid
        except BaseException:
            self.close()
            raise
        self._sent = 0

    def _run(self, kind: str, name: str) -> tuple[int, float, int]:
        if kind != "idle":
            self._trainer.tell(f"round {name}")
        for i, engine in enumerate(self._engines):
            engine.tell(f"{kind} {name}-{i}")
        sent = 0
        for engine in self._engines:
            while (line := engine.hear())[0] == "done":
                self._trainer.tell(" ".join(line))
            sent += int(line[1])
        if kind == "idle":
            return 0, 0.0, 0
        before, self._sent = self._sent, sent
        if self._is_ours:
            self._trainer.tell("over")
        _, rows, check, received = self._trainer.hear()
        return int(rows), float(check), int(received) or self._sent - before


class Ray(Way):
    """An actor for each engine and one for the trainer, and all that Ray runs beside them."""

    def __init__(self, name: str, setting: Setting) -> None:
        super().__init__(name, setting)
        try:
            dtype = name.removeprefix("ray ")
            load = json.dumps(asdict(setting.load))
            self._child_ = self._child(
                "ways.ray_actors", dtype, load, str(setting.rate), str(setting.engines)
            )
            *engines, trainer = map(int, self._child_.hear()[1:])
        except BaseException:
            self.close()
            raise
        self.pids = {f"engine {i}": pid for i, pid in enumerate(engines)} | {"trainer": trainer}

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


def _code_of(checkout: Path) -> dict[str, str]:
    """The environment of processes that import routetrace from there."""
    parts = ("proto", "server", "client", "capture_agent")
    return {"PYTHONPATH": os.pathsep.join(str(checkout.absolute() / part) for part in parts)}


@contextlib.contextmanager
def _environment(changes: dict[str, str]) -> Iterator[None]:
    """Have processes that start meanwhile find these variables."""
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def make(name: str, setting: Setting) -> Way:
    """A way, by its name."""
    return Ray(name, setting) if name.startswith("ray") else Direct(name, setting)


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


# ---------------------------------------------------------------------------- rounds


@dataclass
class Found:
    """Measurements of one way.

    Attributes:
        idle: rounds that carry no rows, warm, in turns with those of the other ways.
        rounds: the others.
        peak: bytes of memory, beyond what there was before the first round.
    """

    idle: list[Round]
    rounds: list[Round]
    peak: int

    def parts(self) -> list[str]:
        """Kinds of processes."""
        return list(dict.fromkeys(name.split()[0] for name in self.idle[0].each))

    def costs(self, tokens: int, *parts: str) -> list[float]:
        """CPU seconds a million tokens beyond idle rounds, of all processes or of some parts."""
        idle = self.idle_seconds(*parts)
        return [(_used(one, parts) - idle) / tokens * 1e6 for one in self.rounds]

    def idle_seconds(self, *parts: str) -> float:
        """Median CPU time of an idle round, of all processes or of some parts."""
        return statistics.median(_used(one, parts) for one in self.idle)


def _used(one: Round, parts: Sequence[str]) -> float:
    some = [cost for name, cost in one.each.items() if name.split()[0] in parts]
    return sum(some) if parts else one.seconds


def there(name: str) -> bool:
    """Whether what a way needs is installed."""
    needs = ["torch", "numba"] if name == "packed" else ["torch"]
    if name not in OURS:
        needs += ["ray"] if name.startswith("ray") else ["aiohttp", "orjson", "pybase64", "uvloop"]
    lacking = [module for module in needs if importlib.util.find_spec(module) is None]
    if lacking:
        print(f"skipped: {TITLES[name]}: needs {', '.join(lacking)}", file=sys.stderr)
    return not lacking


def run(setting: Setting, names: Sequence[str], count: int) -> dict[str, Found]:
    """Run `count` rounds of each way that is there, in turns."""
    found: dict[str, Found] = {}
    names = [name for name in names if there(name)]
    with contextlib.ExitStack() as stack:
        ways: dict[str, Way] = {}

        def start(name: str) -> None:
            ways[name] = make(name, setting)
            stack.callback(ways[name].close)

        with progress("processes"):
            # Variables are those of all of this process. Loops that compile during some round would
            # be counted as its cost.
            if "packed" in names:
                with _environment({"ROUTETRACE_NATIVE": "on"}):
                    start("packed")
            with _environment({"ROUTETRACE_NATIVE": "off"}):
                for name, checkout in setting.checkouts.items():
                    if name in names:
                        with _environment(_code_of(checkout)):
                            start(name)
                if "ours" in names:
                    start("ours")
            with ThreadPoolExecutor(2) as starters:
                list(starters.map(start, [name for name in names if name not in ways]))
        for name in names:
            with progress(TITLES[name]):
                way = ways[name]
                way.round("idle")
                sides = [pid for part, pid in way.pids.items() if part.split()[0] in way.sides]
                with peaks({name: sides}) as most:
                    way.round()
            found[name] = Found([], [], most[name])

        def cell(name: str, kind: str, to: list[Round]) -> float:
            to.append(ways[name].round(kind))
            return to[-1].seconds

        with progress("idle rounds"):
            rounds({name: partial(cell, name, "idle", found[name].idle) for name in names}, count)
        with progress("rounds"):
            rounds({name: partial(cell, name, "way", found[name].rounds) for name in names}, count)
    for each in found.values():
        del each.idle[0], each.rounds[0]  # which rounds() throws away, too
    return found
