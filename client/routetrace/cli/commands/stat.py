"""`routetrace stat`, `list` and `runs`: facts of traces, without rows."""

from __future__ import annotations

from itertools import islice
from typing import Annotated

import typer

from routetrace.cli.arguments import AsJson, Incarnation, Labels, OneId, labels_of
from routetrace.cli.connection import Connection
from routetrace.cli.facts import (
    COLUMNS,
    FOLD,
    facts_json,
    facts_table,
    layers_text,
    table_row,
    totals,
)
from routetrace.cli.help import choices
from routetrace.cli.output import LABELS_OF, note, plain, write_json, write_table
from routetrace.client import RouteClient, TraceState
from routetrace.common.errors import RouteTraceError, counted

# Maximum ranges that `stat` prints.
_MAX_RANGES = 50

_STATES = (
    ("running", "no end is reported yet"),
    ("complete", "ended, and no row is missing"),
    ("incomplete", "ended, and rows are missing or its end is unknown"),
)


def stat(
    connection: Connection,
    trace_id: OneId,
    incarnation: Incarnation = None,
    as_json: AsJson = False,
) -> None:
    """Show the facts of a trace, and its missing ranges with reasons."""
    with connection.client() as client:
        found = client.stat(trace_id, incarnation=incarnation)
        if as_json:
            write_json(facts_json(found))
            return
        newest = _newest_weight_version(client)
    write_table(("", ""), facts_table(found, newest))
    ranges = found.missing or ()
    if ranges:
        print()
        shown = ((f"{m.start}:{m.stop}", layers_text(m.layer_ids), m.reason) for m in ranges)
        write_table(("positions", "layers", "missing because"), islice(shown, _MAX_RANGES))
    if len(ranges) > _MAX_RANGES:
        note(f"{counted(len(ranges) - _MAX_RANGES, 'more range')}; --json has all")


def _newest_weight_version(client: RouteClient) -> int | None:
    """Return the newest weight version of the run's connected agents; None if unknown."""
    try:
        agents = [agent for agent in client.agents() if agent.connected]
    except RouteTraceError:  # the facts of the trace are known without it
        return None
    return max((a.weight_version for a in agents if a.weight_version is not None), default=None)


def list_traces(
    connection: Connection,
    label: Labels = None,
    state: Annotated[
        list[TraceState] | None,
        typer.Option(help=choices("Only traces in this state; several: in one of them", _STATES)),
    ] = None,
    limit: Annotated[int, typer.Option(min=0, help="Maximum number of traces; 0: all.")] = 100,
    as_json: AsJson = False,
) -> None:
    """List the traces of the run, newest first, by the age of their first report."""
    none = f"run {connection.run!r} has no traces"
    if label or state:
        none = f"no such trace in run {connection.run!r}" + f"; {LABELS_OF}" * bool(label)
    with connection.client() as client:
        found = client.find(
            labels=labels_of(label or ()), states=state or (), limit=limit + 1 if limit else None
        )
        first = islice(found, limit or None)
        if as_json:
            number = 0
            for number, one in enumerate(first, 1):  # noqa: B007
                write_json(facts_json(one))
            if not number:
                connection.known_run(client)
                note(none)
            return
        shown = list(first)
        server = client.server_info()
        if not shown:
            connection.known_run(client, server)
            note(none)
            return
        write_table(COLUMNS, (table_row(one, server.now) for one in shown), FOLD)
        for line in totals(shown):
            note(line)
        if limit and next(found, None) is not None:
            note(f"the run has more than {limit}; --limit 0 lists all")


def runs(connection: Connection, as_json: AsJson = False) -> None:
    """List the runs that have traces or agents, as far as the token covers them."""
    with connection.client() as client:
        for name in client.server_info().runs:
            if as_json:
                write_json({"run": name})
            else:
                print(plain(name))
