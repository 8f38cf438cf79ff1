"""What people see: lines, tables, progress; what programs see: lines of JSON."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from typing import Any, NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from routetrace.v1.errors import RouteTraceError

# No table that is piped somewhere is cut to a width.
_PIPED_WIDTH = 10_000


def say(text: object) -> None:
    """A line on stderr."""
    print(plain(str(text)), file=sys.stderr)


def fail(error: object, code: int = 1) -> NoReturn:
    """Ends the command with a line that says why."""
    say(f"routetrace: {describe(error)}")
    raise typer.Exit(code)


def describe(error: object) -> str:
    """An error in one line."""
    if isinstance(error, RouteTraceError):
        return " ".join(error.message.split()) or type(error).__name__
    return " ".join(str(error).split())


def write_json(value: Any) -> None:
    """A line of JSON on stdout."""
    print(json.dumps(value, ensure_ascii=False, default=str))


def write_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """A table on stdout; columns whose name ends in a space are aligned to the right."""
    table = Table(box=None, pad_edge=False, header_style="bold", show_header=any(columns))
    for name in columns:
        right = name.endswith(" ")
        table.add_column(name.strip(), justify="right" if right else "left", overflow="fold")
    for row in rows:
        # As text, which rich does not read for markup or emoji.
        table.add_row(*(Text(plain(str(cell))) for cell in row))
    width = None if sys.stdout.isatty() else _PIPED_WIDTH
    Console(file=sys.stdout, width=width).print(table)


@contextlib.contextmanager
def progress(what: str, total: int | None) -> Iterator[Callable[[], None]]:
    """A bar on stderr if that is a terminal; call what it gives for each thing that is done."""
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
        task = bar.add_task(what, total=total)
        yield lambda: bar.advance(task)


def plain(text: str) -> str:
    """Text without what a terminal would obey."""
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text)


def size(count: int) -> str:
    """Bytes, for people."""
    value, units = float(count), iter(("B", "KiB", "MiB", "GiB", "TiB"))
    unit = next(units)
    while value >= 1024 and unit != "TiB":
        value, unit = value / 1024, next(units)
    return f"{count} B" if unit == "B" else f"{value:.1f} {unit}"


def moment(seconds: float) -> str:
    """Unix seconds as local time."""
    return datetime.fromtimestamp(seconds).astimezone().isoformat(" ", "seconds")
