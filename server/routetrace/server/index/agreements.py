"""Agreement of trainers with replayed rows, by run and training step, in bounded memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import NamedTuple

from routetrace.stored import format5_pb2 as stored

#: Maximum steps of a run, bytes of its reports, and bytes of the reports of all runs. Beyond them,
#: the steps that were reported longest ago are forgotten, of the run that was.
MAX_STEPS = 2000
MAX_RUN_BYTES = 8 << 20
MAX_BYTES = 64 << 20

#: Maximum bytes of the reports of one step: they are sent in one message.
MAX_STEP_BYTES = 512 << 10

#: Bytes that a report takes beside its own.
_OVERHEAD = 300

#: Reports of one part of the stored form.
_DUMPED = 64


class Report(NamedTuple):
    """A stored report."""

    step: int
    reporter: str
    message: bytes
    """routetrace.v1.AgreementReport."""


class _Run:
    def __init__(self) -> None:
        self.steps: OrderedDict[int, dict[str, bytes]] = OrderedDict()  # reported last: at the end
        self.nbytes = 0


def _size(reports: dict[str, bytes]) -> int:
    return sum(len(message) + _OVERHEAD for message in reports.values())


class Agreements:
    """Reports of trainers."""

    def __init__(self) -> None:
        self._runs: OrderedDict[str, _Run] = OrderedDict()  # reported last: at the end
        self.nbytes = 0
        """Bytes of all reports."""

    @property
    def runs(self) -> list[str]:
        """Runs with reports."""
        return [*self._runs]

    def add(self, run: str, report: Report) -> None:
        """Add a report, in place of that of the same reporter for the same step."""
        held = self._runs.setdefault(run, _Run())
        self._runs.move_to_end(run)
        reports = held.steps.setdefault(report.step, {})
        held.steps.move_to_end(report.step)
        before = _size(reports)
        reports[report.reporter] = report.message
        self._count(held, _size(reports) - before)
        while len(held.steps) > MAX_STEPS or (held.nbytes > MAX_RUN_BYTES and len(held.steps) > 1):
            self._forget_step(held)
        while self.nbytes > MAX_BYTES and len(self._runs) > 1:
            oldest, least = next(iter(self._runs.items()))
            self._forget_step(least)
            if not least.steps:
                del self._runs[oldest]

    def _forget_step(self, held: _Run) -> None:
        _, reports = held.steps.popitem(last=False)
        self._count(held, -_size(reports))

    def _count(self, held: _Run, nbytes: int) -> None:
        held.nbytes += nbytes
        self.nbytes += nbytes

    def room(self, run: str, step: int, reporter: str) -> int:
        """Return the bytes that a report may have beside those of other reporters of its step."""
        held = self._runs.get(run)
        reports = held.steps.get(step, {}) if held else {}
        others = {name: message for name, message in reports.items() if name != reporter}
        return MAX_STEP_BYTES - _size(others) - _OVERHEAD

    def steps(self, run: str, start: int, stop: int) -> list[int]:
        """Return the reported steps in [start, stop), ascending."""
        held = self._runs.get(run)
        return sorted(step for step in held.steps if start <= step < stop) if held else []

    def of(self, run: str, step: int) -> list[Report]:
        """Return the reports of a step that has some, by reporter."""
        return [Report(step, *item) for item in sorted(self._runs[run].steps[step].items())]

    def newest(self) -> dict[str, list[Report]]:
        """Return the reports of the step of each run that was reported last."""
        return {run: self.of(run, next(reversed(held.steps))) for run, held in self._runs.items()}

    def dump(self) -> Iterator[stored.Piece]:
        """Yield the stored form in parts; nothing may be added meanwhile."""
        piece = stored.Piece()
        for run, held in self._runs.items():
            for step, reports in held.steps.items():
                for reporter, message in reports.items():
                    piece.agreements.add(run=run, step=step, reporter=reporter, report=message)
                    if len(piece.agreements) == _DUMPED:
                        yield piece
                        piece = stored.Piece()
        if piece.agreements:
            yield piece

    def load(self, piece: stored.Piece) -> None:
        """Add the reports of a piece of a snapshot."""
        for each in piece.agreements:
            self.add(each.run, Report(each.step, each.reporter, each.report))
