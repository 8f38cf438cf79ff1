"""`routetrace agents` and `forget-engine`: the agents of a run, as the server sees them now."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from operator import attrgetter
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from routetrace.cli.arguments import AsJson
from routetrace.cli.connection import Connection
from routetrace.cli.output import (
    age,
    console_of_stdout,
    least_width,
    note,
    plain,
    print_table,
    short,
    table_of,
    write_json,
)
from routetrace.cli.rates import Rates
from routetrace.client import AgentStat, AgentState
from routetrace.common.errors import NotFound, counted

#: Columns of the table; those that end in a space are right-aligned.
_COLUMNS = (
    "engine",
    "shard",
    "since ",
    "seen ",
    "rows ",
    "dropped ",
    "weights ",
    "version",
    "host",
)
#: Column after "rows" of a table that is repeated.
_RATE = "rows/s "
#: Columns that break within words where the terminal is too narrow.
_FOLD = ("engine", "shard", "version", "host")


def agents(
    connection: Connection,
    watch: Annotated[
        float | None,
        typer.Option(
            min=0.1,
            metavar="SECONDS",
            help="Refresh every SECONDS until Ctrl-C; adds rows/s.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the agents of the run: those that are connected, and those that were.

    An agent is listed until it has been silent for the server's default lease.
    """
    rates = None if watch is None else Rates()
    with connection.client() as client, _display(live=bool(watch and not as_json)) as show:
        known = False
        while True:
            found = sorted(client.agents(), key=attrgetter("engine_id", "shard"))
            info = client.server_info()
            if not (found or known):
                connection.known_run(client, info)
            known = True
            if as_json:
                _write_lines(found, info.now, rates)
            else:
                show(found, info.now, rates, connection.run)
            if watch is None:
                return
            time.sleep(watch)


def forget_engine(
    connection: Connection,
    engine: Annotated[
        str, typer.Argument(metavar="ENGINE", help="Engine id, as `routetrace agents` shows it.")
    ],
    as_json: AsJson = False,
) -> None:
    """Forget an engine whose agents are gone, so that it counts against no limit; traces stay."""
    with connection.client() as client:
        try:
            count = client.forget_engine(engine)
        except NotFound:
            connection.known_run(client)
            raise
    if as_json:
        write_json({"engine_id": engine, "num_forgotten": count})
    else:
        print(f"{counted(count, 'shard')} of engine {plain(engine)} forgotten")


_Show = Callable[[Sequence[AgentStat], datetime, Rates | None, str], None]


@contextmanager
def _display(*, live: bool) -> Iterator[_Show]:
    """Yield a function that shows agents, in place of those shown before if `live`.

    Tables follow one another where stdout is no terminal, or one that is too narrow for them.
    """
    if live and sys.stdout.isatty():
        console = console_of_stdout()
        with Live(console=console, auto_refresh=False) as shown:

            def replace(
                found: Sequence[AgentStat], now: datetime, rates: Rates | None, run: str
            ) -> None:
                console.width = console_of_stdout().width  # it may have another size by now
                tables = [*_tables(found, now, rates, console.width)]
                # First: rows beyond the height of the terminal are hidden.
                parts = [Text(_totals(found, run)), *tables]
                if all(least_width(table) <= console.width for table in tables):
                    shown.update(Group(*parts), refresh=True)
                    return
                # The terminal breaks longer lines, and Live cannot replace those.
                shown.update("", refresh=True)
                for part in parts:
                    print_table(console, part)

            yield replace
    else:
        first = True

        def follow(
            found: Sequence[AgentStat], now: datetime, rates: Rates | None, run: str
        ) -> None:
            nonlocal first
            console = console_of_stdout()
            if not first:
                console.print()
            first = False
            for table in _tables(found, now, rates, console.width):
                print_table(console, table)
            note(_totals(found, run))

        yield follow


def _write_lines(found: Sequence[AgentStat], now: datetime, rates: Rates | None) -> None:
    for agent in found:
        more = {}
        if rates is not None:
            more = {"now": now, "rows_per_second": _rate(agent, now, rates)}
        write_json(agent.to_dict() | more)


def _tables(
    found: Sequence[AgentStat], now: datetime, rates: Rates | None, width: int
) -> Iterator[RenderableType]:
    """Yield the agents, and the rows that they dropped by reason; nothing if there are none."""
    if not found:
        return
    # The least useful first; a column of nothing is of no use at all.
    empty = [] if any(agent.shard for agent in found) else ["shard"]
    optional = [*empty, "version", "host"]
    columns, rows = list(_COLUMNS), [_row(agent, now) for agent in found]
    if rates is not None:
        at = columns.index("rows ") + 1
        columns.insert(at, _RATE)
        for agent, row in zip(found, rows, strict=True):
            rate = _rate(agent, now, rates)
            row.insert(at, "" if rate is None else short(round(rate)))
    yield table_of(columns, rows, _FOLD, optional, width)
    dropped = [*_dropped(found)]
    if dropped:
        yield ""
        columns = ["engine", "shard", "dropped because", "rows "]
        yield table_of(columns, dropped, _FOLD, empty, width)


def _rate(agent: AgentStat, now: datetime, rates: Rates) -> float | None:
    """Return the rows per second that an engine offers; None if unknown."""
    key = agent.engine_id, agent.shard, agent.epoch
    rate = rates.add(key, agent.offered_rows, now.timestamp())
    return rate if agent.connected else None


def _row(agent: AgentStat, now: datetime) -> list[Any]:
    seen = "?" if agent.seen_at is None else age(now - agent.seen_at)
    since: str = agent.state.value
    if agent.connected and agent.connected_at is not None:
        since = age(now - agent.connected_at)
    weights = "" if agent.weight_version is None else str(agent.weight_version)
    if agent.weight_version_lag:
        weights += f" (-{agent.weight_version_lag})"
    return [
        agent.engine_id,
        agent.shard,
        since,
        seen,
        short(agent.offered_rows),
        short(sum(agent.dropped_rows.values())),
        weights,
        agent.attributes.get("routetrace", ""),
        agent.attributes.get("host", ""),
    ]


def _dropped(found: Sequence[AgentStat]) -> Iterator[tuple[Any, ...]]:
    for agent in found:
        for reason, rows in sorted(agent.dropped_rows.items()):
            if rows:
                yield agent.engine_id, agent.shard, reason, f"{rows:,}"


def _totals(found: Sequence[AgentStat], run: str) -> str:
    if not found:
        return f"run {run!r} has no agents"
    connected = [agent for agent in found if agent.connected]
    text = f"{counted(len(found), 'agent')}, {len(connected)} connected"
    if closed := sum(agent.state is AgentState.CLOSED for agent in found):
        text += f", {closed} closed"
    versions = [a.weight_version for a in connected if a.weight_version is not None]
    return f"{text}; newest weight version {max(versions)}" if versions else text
