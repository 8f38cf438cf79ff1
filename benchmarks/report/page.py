"""The tables of docs/performance.md, from results.json and the costs of cli/bench/capacity.py."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from routetrace.cli.bench.capacity import MEASURED, Job, need_of
from routetrace.simulation.models import MODELS

PAGE = Path(__file__).parents[2] / "docs/performance.md"
#: Around each table, with its name.
_BEGIN, _END = "<!-- table: {} -->\n", "<!-- end -->\n"
#: Settings of areas/rates.py, and their columns.
_SETTINGS = {
    "1 engine, short": "1 engine, 64 requests of 512 tokens",
    "1 engine, long": "1 engine, 16 requests of 2,048 tokens",
    "8 engines, short": "8 engines, requests of 512 tokens",
}
_RATES = (5_000, 20_000, 40_000)


def write(results: Mapping[str, Any], areas: Mapping[str, str]) -> None:
    """Replace the tables of the page.

    Args:
        results: content of results.json.
        areas: titles, by area.
    """
    PAGE.write_text(rendered(PAGE.read_text("utf-8"), results, areas), "utf-8")


def rendered(text: str, results: Mapping[str, Any], areas: Mapping[str, str]) -> str:
    """Return the text of the page with the tables of these results.

    Raises:
        ValueError: if the page has no place for a table.
    """
    tables = {
        "nodes": _nodes(),
        "ways": _ways(results["rows"]),
        "goals": _goals(results["rows"], areas),
        "origin": _origin(results),
    }
    for name, lines in tables.items():
        head, found, rest = text.partition(_BEGIN.format(name))
        _, closed, tail = rest.partition(_END)
        if not found or not closed:
            raise ValueError(f"{PAGE.name}: expected {_BEGIN.format(name)!r} and {_END!r}")
        text = head + found + "".join(f"{line}\n" for line in lines) + _END + tail
    return text


def _nodes() -> Iterator[str]:
    """Yield cores and bytes of one node of eight engines, by model and rate."""
    yield "| model | tokens/s of a node | engines | agents | server | trainers | to the server |"
    yield "|---|---|---|---|---|---|---|"
    for model in MEASURED:
        for rate in _RATES:
            need = need_of(Job(MODELS[model], rate))
            cores = (8 * need.engine_core, 8 * need.worker_cores, need.server_cores)
            figures = [*(f"{value:.2f}" for value in (*cores, need.trainer_cores))]
            figures = [f"{rate:,}", *figures, f"{rate * need.sent / 1e6:.1f} MB/s"]
            yield f"| {model} | {' | '.join(figures)} |"


def _ways(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield CPU of all processes, in microseconds a token, by way and setting."""
    found: dict[str, dict[str, str]] = {}
    for row in rows:
        for setting in _SETTINGS:
            if row["area"] == "rates" and row["name"].startswith(f"{setting}, CPU: "):
                way = row["name"].removeprefix(f"{setting}, CPU: ")
                found.setdefault(way, {})[setting] = f"{row['value']:.1f}"
    yield f"| CPU, us a token | {' | '.join(_SETTINGS.values())} |"
    yield f"|---|{'---|' * len(_SETTINGS)}"
    for way in sorted(found, key=lambda way: not way.startswith("ours")):
        figures = found[way]
        yield f"| {way} | {' | '.join(figures.get(name, '') for name in _SETTINGS)} |"


def _goals(rows: list[dict[str, Any]], areas: Mapping[str, str]) -> Iterator[str]:
    """Yield each goal with its value and quartiles."""
    judged = [row for row in rows if row["goal"]]
    yield f"{sum(row['met'] for row in judged)} of {len(judged)} goals are met."
    for area, title in areas.items():
        mine = [row for row in judged if row["area"] == area]
        if not mine:
            continue
        yield from ("", f"**{title}**", "")
        yield "| measured | value | quartiles | 0.7.0 | against | goal | |"
        yield "|---|---|---|---|---|---|---|"
        for row in mine:
            unit = "" if row["unit"] == "x" else f" {row['unit']}"
            spread = f"{_short(row['low'])} to {_short(row['high'])}"
            before = "" if row["before"] is None else f"{_short(row['before'])}{unit}"
            verdict = "met" if row["met"] else "**missed**"
            yield (
                f"| {row['name']} | {_short(row['value'])}{unit} | {spread} | {before} "
                f"| {row['against']} | {row['goal']} | {verdict} |"
            )


def _origin(results: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence on version, date and machine."""
    machine = results["machine"]
    yield (
        f"Routetrace {results['version']}, {results['date']}, in one run: {machine['cpus']} cores, "
        f"{machine['memory_gib']} GiB, Linux {machine['kernel'].partition('-')[0]}, "
        f"Python {machine['python']}, grpcio {machine['grpcio']}, protobuf {machine['protobuf']}."
    )


def _short(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
