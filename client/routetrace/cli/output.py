"""Output: lines, tables and progress for users, lines of JSON for programs."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from datetime import datetime, timedelta
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from routetrace.common.errors import RouteTraceError

# Tables in pipes are not cut to a width.
_PIPED_WIDTH = 10_000


def note(text: object) -> None:
    """Print a line on stderr."""
    print(plain(str(text)), file=sys.stderr)


def describe(error: object) -> str:
    """Return an error as one line."""
    if isinstance(error, RouteTraceError):
        return " ".join(error.message.split()) or type(error).__name__
    return " ".join(str(error).split())


def write_json(value: Any, *, error: bool = False) -> None:
    """Print a line of JSON on stdout, or on stderr; readers of a pipe have it at once."""
    line = json.dumps(value, default=as_json)  # ASCII: one line in any encoding
    print(line, file=sys.stderr if error else sys.stdout, flush=True)


def as_json(value: object) -> str:
    """Return the JSON of a value that JSON has no type for: a time in ISO 8601."""
    return iso(value) if isinstance(value, datetime) else str(value)


def write_table(
    columns: Sequence[str], rows: Iterable[Sequence[object]], fold: Collection[str] | None = None
) -> None:
    """Print a table; columns with a name that ends in a space are right-aligned.

    Args:
        columns: names.
        rows: cells.
        fold: columns that break where the terminal is too narrow; None: all.
    """
    table = Table(box=None, pad_edge=False, header_style="bold", show_header=any(columns))
    for name in columns:
        right = name.endswith(" ")
        table.add_column(
            name.strip(),
            justify="right" if right else "left",
            overflow="fold",
            no_wrap=fold is not None and name not in fold,
            min_width=max(map(len, name.split()), default=0),  # headers break between words alone
        )
    for row in rows:
        # rich interprets no markup or emoji in Text.
        table.add_row(*(Text(plain(str(cell))) for cell in row))
    width = None if sys.stdout.isatty() else _PIPED_WIDTH
    Console(file=sys.stdout, width=width).print(table)


@contextlib.contextmanager
def progress(title: str, total: int | None) -> Iterator[Callable[[], None]]:
    """Show a bar on terminals; yield a function that advances it by one."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    console = Console(file=sys.stderr)
    with Progress(
        *columns, console=console, transient=True, disable=not sys.stderr.isatty()
    ) as bar:
        task = bar.add_task(title, total=total)
        yield lambda: bar.advance(task)


def plain(text: str) -> str:
    """Escape control characters."""
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text)


def size(count: int) -> str:
    """Format a number of bytes."""
    value, units = float(count), iter(("B", "KiB", "MiB", "GiB", "TiB"))
    unit = next(units)
    while value >= 1024 and unit != "TiB":
        value, unit = value / 1024, next(units)
    return f"{count} B" if unit == "B" else f"{value:.1f} {unit}"


def none_found(kind: str, run: str, runs: Sequence[str]) -> str:
    """Return the message for an empty result; `runs` are those that exist."""
    if run in runs:
        return f"no such {kind} in run {run!r}"
    return f"no run {run!r}; runs: {', '.join(runs) or 'none yet'}"


def age(duration: timedelta) -> str:
    """Format a duration in at most 6 characters: "9 s", "59 min", "23 h", "400 d"."""
    count = int(max(0.0, duration.total_seconds()))
    if count < 60:
        return f"{count} s"
    if count < 3600:
        return f"{count // 60} min"
    return f"{count // 3600} h" if count < 48 * 3600 else f"{count // 86400} d"


def short(count: int) -> str:
    """Format a count in at most 5 characters: "9999", "123k", "4.56M"."""
    if count < 10_000:
        return str(count)
    value, units = float(count), iter("kMGTPE")
    while True:
        value, unit = value / 1000, next(units)
        if value < 999.5 or unit == "E":
            return f"{value:.3g}{unit}"


def moment(time: datetime) -> str:
    """Format a time as local time."""
    return time.astimezone().isoformat(" ", "seconds")


def iso(time: datetime) -> str:
    """Format a time for JSON: ISO 8601, UTC, milliseconds."""
    return time.isoformat(timespec="milliseconds")
