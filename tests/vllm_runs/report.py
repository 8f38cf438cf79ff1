"""Report of the runs: a line for each scenario, and the faults."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

_HEAD = ("vLLM", "attached", "engine", "scenario", "requests", "native", "transf.", "wrong", "s")
_WIDTHS = (7, 10, 19, 15, 9, 8, 8, 6, 7)


@dataclass(kw_only=True)
class Tally:
    """Counts of comparisons and findings."""

    requests: int = 0
    native: int = 0
    """Rows compared with vLLM's own."""
    reference: int = 0
    """Rows compared with Transformers'."""
    wrong: int = 0
    """Rows that differ from either."""
    ties: int = 0
    """Cells that Transformers chose otherwise, among scores that are all but equal."""
    native_wrong: int = 0
    """Rows of vLLM's own that differ from Transformers'."""
    missing: dict[str, int] = field(default_factory=dict)
    """Reason -> rows."""
    faults: list[str] = field(default_factory=list)
    """What is not as it must be; a wrong row is always among them."""
    cells: dict[str, int] = field(default_factory=dict)
    """Cells by fate (`routed_cells`), where Transformers' choices are known."""
    native_cells: dict[str, int] = field(default_factory=dict)
    """The same for vLLM's own, where they were asked for."""
    notes: dict[str, float] = field(default_factory=dict)
    """What else was measured."""


@dataclass
class Result(Tally):
    """One scenario, in one version of vLLM, attached in one way."""

    version: str
    way: str
    run: str
    scenario: str
    seconds: float = 0.0


def head() -> str:
    """The first line of the table."""
    return _line(_HEAD) + "  missing rows, why"


def line(result: Result) -> str:
    """A line of the table."""
    r = result
    counts = (r.requests, r.native, r.reference, r.wrong, f"{r.seconds:.1f}")
    text = _line((r.version, r.way, r.run, r.scenario, *counts))
    missing = ", ".join(f"{n} {reason}" for reason, n in r.missing.items())
    return f"{text}  {missing}{'  FAULTS' if r.faults else ''}".rstrip()


def details(result: Result) -> list[str]:
    """Return the lines below the table: faults and notes."""
    r = result
    where = f"{r.version} {r.way}, {r.run}, {r.scenario}"
    lines = [f"FAULT {where}: {fault}" for fault in r.faults]
    if r.native_wrong:
        lines.append(f"note  {where}: {r.native_wrong} of vLLM's own rows unlike Transformers'")
    if r.ties:
        lines.append(f"note  {where}: {r.ties} cells were chosen otherwise among equal scores")
    if r.notes:
        told = ", ".join(f"{value:,} {name}" for name, value in r.notes.items())
        lines.append(f"note  {where}: {told}")
    return lines


def totals(results: list[Result]) -> list[str]:
    """A line for each version."""
    lines = []
    for version in sorted({r.version for r in results}):
        some = [r for r in results if r.version == version]
        compared = f"{sum(r.native for r in some):,} rows compared with vLLM's own, "
        compared += f"{sum(r.reference for r in some):,} with Transformers'"
        missing = sum(sum(r.missing.values()) for r in some)
        lines.append(
            f"{version}: {sum(r.requests for r in some)} requests, {compared}, "
            f"{sum(r.wrong for r in some)} wrong, {missing} missing with reason, "
            f"{sum(len(r.faults) for r in some)} faults"
        )
    return lines


def _line(cells: tuple[Any, ...]) -> str:
    words = [f"{c:<{w}}" for c, w in zip(cells[:4], _WIDTHS[:4], strict=True)]
    numbers = [f"{c:>{w}}" for c, w in zip(cells[4:], _WIDTHS[4:], strict=True)]
    return " ".join(words) + "".join(numbers)
