"""Output: lines, tables and progress for users, lines of JSON for programs."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from datetime import datetime, timedelta
from typing import Any

from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

#: Which labels a trace is found by, for searches that find none.
LABELS_OF = "a trace has the labels of its newest complete incarnation, else of its newest"

# Maximum length of a word that a column is kept wide enough for.
_WORD = 10
# Tables in pipes are not cut to a width.
_PIPED_WIDTH = 10_000
# Columns of text between two columns of a table.
_GAP = 2


def note(text: object) -> None:
    """Print a line on stderr."""
    print(plain(str(text)), file=sys.stderr)


def write_json(value: Any, *, error: bool = False) -> None:
    """Print a line of JSON on stdout, or on stderr; readers of a pipe have it at once."""
    line = json.dumps(value, default=as_json)  # ASCII: one line in any encoding
    print(line, file=sys.stderr if error else sys.stdout, flush=True)


def as_json(value: object) -> str:
    """Return the JSON of a value that JSON has no type for: a time in ISO 8601."""
    return iso(value) if isinstance(value, datetime) else str(value)


def write_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    fold: Collection[str] | None = None,
    optional: Sequence[str] = (),
) -> None:
    """Print a table; see `table_of`."""
    console = console_of_stdout()
    print_table(console, table_of(columns, rows, fold, optional, console.width))


def print_table(console: Console, table: RenderableType) -> None:
    """Print a table, or text between tables; a console that would cut it becomes wider."""
    console.width = max(console.width, least_width(table))
    console.print(table)


def least_width(table: RenderableType) -> int:
    """Return the width below which a table would be cut; 0 for text."""
    columns = table.columns if isinstance(table, Table) else ()
    return max(0, sum((column.min_width or 0) + _GAP for column in columns) - _GAP)


def console_of_stdout() -> Console:
    """Return a console as wide as the terminal, or without a width in pipes."""
    return Console(file=sys.stdout, width=None if sys.stdout.isatty() else _PIPED_WIDTH)


def table_of(
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    fold: Collection[str] | None = None,
    optional: Sequence[str] = (),
    width: int = _PIPED_WIDTH,
) -> Table:
    """Return a table; columns with a name that ends in a space are right-aligned.

    Nothing is cut off: where a terminal is narrower than the numbers and the words of headers, the
    lines are longer than it.

    Args:
        columns: names.
        rows: cells.
        fold: columns that break where the terminal is too narrow; None: all. Those that are
            right-aligned break between words alone.
        optional: columns that are left out, in this order, where the terminal has no room for the
            words of the others.
        width: characters of a line.
    """
    cells = [[Text(plain(str(cell))) for cell in row] for row in rows]  # no markup, no emoji
    table = Table(box=None, pad_edge=False, header_style="bold", show_header=any(columns))
    shown = _fitting(columns, cells, fold, optional, width)
    for at in shown:
        name = columns[at]
        right, whole = name.endswith(" "), fold is not None and name not in fold
        parts = name.split()  # headers break between words alone
        for text in (row[at].plain for row in cells if right or whole):
            parts += [text] if whole else text.split()
        table.add_column(
            name.strip(),
            justify="right" if right else "left",
            overflow="fold",
            no_wrap=whole,
            min_width=max(map(cell_len, parts), default=0),
        )
    for row in cells:
        table.add_row(*(row[at] for at in shown))
    return table


def _fitting(
    columns: Sequence[str],
    cells: Sequence[Sequence[Text]],
    fold: Collection[str] | None,
    optional: Sequence[str],
    width: int,
) -> list[int]:
    """Return the numbers of the columns that fit, where those that fold break long words alone."""
    needs = [
        max([cell_len(name.strip()), *(row[at].cell_len for row in cells)])
        for at, name in enumerate(columns)
    ]
    for at, name in enumerate(columns):
        if fold is None or name in fold:
            needs[at] = min(needs[at], max(_WORD, len(name.strip())))
    shown = [*range(len(columns))]
    for name in optional:
        if sum(needs[at] + _GAP for at in shown) - _GAP <= width:
            break
        shown.remove(columns.index(name))
    return shown


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
