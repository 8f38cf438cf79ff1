"""Measurement in one run, on pinned cores, in turns, as medians with their spread.

An area of the table (areas/) is a module with one function, `measure(table)`. bench.py runs each in
a process of its own, and each can be run alone: `python benchmarks/run.py areas.codec --quick`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil

from routetrace.common.layout import ModelLayout

HERE = Path(__file__).parent
DATA = HERE.parent.parent / "shared" / "data"

#: The core of whoever drives a measurement, and that of the server or rival that it drives. The
#: same one where there is only one.
_CORES = sorted(os.sched_getaffinity(0))
OWN_CORE, PEER_CORE = _CORES[-1], _CORES[0]


@dataclass(frozen=True)
class Shape:
    """A model's routing.

    Attributes:
        name: of the model.
        recorded: file in DATA with rows of this shape.
        layout: its columns.
    """

    name: str
    recorded: str
    layout: ModelLayout

    @property
    def row_bytes(self) -> int:
        """Of one token, as narrow as its ids are."""
        layout = self.layout
        return len(layout.layer_ids) * layout.top_k * layout.dtype.itemsize

    def rows(self, n: int, seed: int = 0) -> npt.NDArray[Any]:
        """[n, L, K] of the layout's dtype: recorded rows, else rows drawn with a published skew.

        Recorded rows come again and again where there are fewer than n; `seed` says with which one
        they begin.
        """
        if self.recorded and (DATA / self.recorded).exists():
            ids = np.load(DATA / self.recorded)["ids"]
            return np.asarray(ids[(seed * 331 + np.arange(n)) % len(ids)])
        rng = np.random.default_rng(seed)
        layers, experts, k = len(self.layout.layer_ids), self.layout.num_experts, self.layout.top_k
        skew = np.random.default_rng(0).normal(0, 1, (layers, experts))
        some = rng.gumbel(0, 1, (min(n, 4096), layers, experts)) + skew
        drawn = np.argsort(-some, axis=-1)[..., :k].astype(self.layout.dtype)
        return np.asarray(drawn[np.arange(n) % len(drawn)])


def _shape(name: str, recorded: str, layers: int, dense: int, experts: int) -> Shape:
    layer_ids = tuple(range(dense, dense + layers))
    return Shape(name, recorded, ModelLayout(layer_ids, dense + layers, experts, 8))


QWEN3 = _shape("Qwen3-30B-A3B", "syn_qwen3_30b_1k.npz", 48, 0, 128)
DEEPSEEK = _shape("DeepSeek-V3", "syn_dsv3_1k.npz", 58, 3, 256)
KIMI = _shape("Kimi-K2", "syn_kimi_k2_1k.npz", 60, 1, 384)


# ---------------------------------------------------------------------------- the table


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        name: what was measured.
        value: the median of the rounds.
        low, high: their quartiles.
        unit: "x" for a ratio.
        against: what it is a ratio to, or what else bounds it.
        goal: "<= 1.3" or ">= 0.9"; "" where there is none.
        met: whether the value reaches the goal; None without one.
        before: the value of 0.7.0; None where it was not measured.
    """

    name: str
    value: float
    low: float
    high: float
    unit: str
    against: str
    goal: str
    met: bool | None
    before: float | None = None

    def __str__(self) -> str:
        verdict = {True: "met", False: "MISSED", None: ""}[self.met]
        if self.before is not None:
            verdict = f"{verdict:<7} 0.7.0: {_short(self.before)}"
        figures = (
            f"{_short(self.value):>9} {self.unit:<7} [{_short(self.low)}, {_short(self.high)}]"
        )
        return f"{self.name:<58} {figures:<36} {self.against:<52} {self.goal:<10} {verdict}"


class Table:
    """Rows as they are measured.

    Args:
        quick: for a run that only shows that everything runs.
        checkouts: other versions of routetrace, which some areas measure beside this one: "0.7.0",
            and any one as "beside".
    """

    def __init__(self, quick: bool = False, checkouts: Mapping[str, Path] = MappingProxyType({})):
        self.quick = quick
        self.checkouts = checkouts
        self.rows: list[Row] = []

    def add(
        self,
        name: str,
        values: float | Sequence[float],
        unit: str,
        against: str,
        goal: str = "",
        before: Sequence[float] | None = None,
    ) -> float:
        """Add a line from the values of the rounds, and those of 0.7.0; return their median."""
        rounds = [values] if isinstance(values, (int, float)) else list(values)
        value = statistics.median(rounds)
        low, high = (np.percentile(rounds, q) for q in (25, 75))
        met = None
        if goal:
            sign, limit = goal.split()
            met = value <= float(limit) if sign == "<=" else value >= float(limit)
        was = statistics.median(before) if before else None
        row = Row(name, value, float(low), float(high), unit, against, goal, met, was)
        self.rows.append(row)
        print(row, flush=True)
        return value


def _short(value: float) -> str:
    if 0.9 <= abs(value) < 1.1:  # most goals of ratios lie there
        return f"{value:.3f}"
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


# ---------------------------------------------------------------------------- in turns


def rounds(
    cells: Mapping[str, Callable[[], float]],
    count: int,
    between: Callable[[], Any] = lambda: None,
) -> dict[str, list[float]]:
    """Return the values of each cell by round, in rotating order, without the first round.

    Args:
        cells: each measures once and returns its figure: seconds, CPU seconds, bytes.
        count: rounds that are kept.
        between: runs after each round, unmeasured.
    """
    found: dict[str, list[float]] = {name: [] for name in cells}
    names = list(cells)
    for number in range(count + 1):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            value = cells[name]()
            if number:
                found[name].append(value)
        between()
    return found


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Round by round: both met the same noise."""
    return [a / b for a, b in zip(ours, theirs, strict=True)]


def seconds(function: Callable[[], Any], repeat: int = 1) -> Callable[[], float]:
    """A cell: wall-clock seconds of one call, from `repeat` of them."""

    def cell() -> float:
        start = time.perf_counter()
        for _ in range(repeat):
            function()
        return (time.perf_counter() - start) / repeat

    return cell


# ---------------------------------------------------------------------------- processes


def pin(core: int, pid: int = 0) -> None:
    """Keep a process, its threads that exist and those that it will start, on one core."""
    for thread in psutil.Process(pid or None).threads():
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(thread.id, {core})
    os.sched_setaffinity(pid, {core})


def cpu_seconds(pid: int = 0) -> float:
    """Return the CPU time of a process and its live children.

    Read from each process' CPU clock, in nanoseconds: user and system times come in ticks of 10 ms,
    which a short measurement does not reach.
    """
    process = psutil.Process(pid or None)
    total = 0.0
    for one in [process, *process.children(recursive=True)]:
        with contextlib.suppress(OSError, psutil.NoSuchProcess):
            total += time.clock_gettime(~one.pid << 3 | 2)  # clock_getcpuclockid(3)
    return total


def rss(pid: int = 0) -> int:
    """Resident bytes of a process."""
    return int(psutil.Process(pid or None).memory_info().rss)


def program(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module of benchmarks/ in a process of its own."""
    return [sys.executable, str(HERE / "run.py"), module, *arguments]


# ---------------------------------------------------------------------------- an area


def area(measure: Callable[[Table], None]) -> None:
    """The main program of an area: prints its lines; `--json FILE` writes them too.

    `--previous DIR` and `--beside DIR` measure 0.7.0 and another checkout in the same run, where
    the area can (areas/rates.py).
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="only that everything runs")
    parser.add_argument("--json", type=Path, help="file for the rows")
    parser.add_argument("--previous", type=Path, help="a checkout of 0.7.0 to measure")
    parser.add_argument("--beside", type=Path, help="another checkout of routetrace to measure")
    args = parser.parse_args()
    both = {"0.7.0": args.previous, "beside": args.beside}
    table = Table(args.quick, {name: path for name, path in both.items() if path})
    measure(table)
    if args.json:
        args.json.write_text(json.dumps([asdict(row) for row in table.rows]))


@contextlib.contextmanager
def progress(text: str) -> Iterator[None]:
    """Say on stderr what is going on, with its duration."""
    start = time.perf_counter()
    print(f"... {text}", end="", file=sys.stderr, flush=True)
    yield
    print(f" {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)
