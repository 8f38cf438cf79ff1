"""`routetrace agents` and `forget-engine`: the agents of a run, as the server sees them now."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from operator import attrgetter
from typing import Annotated, Any

import typer

from routetrace.cli.arguments import AsJson
from routetrace.cli.connection import Connection
from routetrace.cli.output import age, none_found, note, plain, short, write_json, write_table
from routetrace.client import AgentStat

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
#: Columns that break within words where the terminal is too narrow.
_FOLD = ("engine", "shard", "version", "host")


def agents(connection: Connection, as_json: AsJson = False) -> None:
    """List the agents of the run: those that are connected, and those that were.

    An agent is listed until it has been silent for the server's default lease.
    """
    with connection.client() as client:
        found = sorted(client.agents(), key=attrgetter("engine_id", "shard"))
        info = client.server_info()
    if not found:
        note(none_found("agent", connection.run, info.runs))
    if as_json:
        for agent in found:
            write_json(agent.to_dict())
    if as_json or not found:
        return
    write_table(_COLUMNS, (_row(agent, info.now) for agent in found), _FOLD)
    dropped = [*_dropped(found)]
    if dropped:
        print()
        write_table(("engine", "shard", "dropped because", "rows "), dropped, _FOLD)
    note(_totals(found))


def forget_engine(
    connection: Connection,
    engine: Annotated[
        str, typer.Argument(metavar="ENGINE", help="Engine id, as `routetrace agents` shows it.")
    ],
    as_json: AsJson = False,
) -> None:
    """Forget an engine whose agents are gone, so that it counts against no limit; traces stay."""
    with connection.client() as client:
        count = client.forget_engine(engine)
    if as_json:
        write_json({"engine_id": engine, "num_forgotten": count})
    else:
        print(f"{count} shards of engine {plain(engine)} forgotten")


def _row(agent: AgentStat, now: datetime) -> tuple[Any, ...]:
    seen = "?" if agent.seen_at is None else age(now - agent.seen_at)
    since = "gone"
    if agent.connected and agent.connected_at is not None:
        since = age(now - agent.connected_at)
    weights = "" if agent.weight_version is None else str(agent.weight_version)
    if agent.weight_version_lag:
        weights += f" (-{agent.weight_version_lag})"
    return (
        agent.engine_id,
        agent.shard,
        since,
        seen,
        short(agent.offered_rows),
        short(sum(agent.dropped_rows.values())),
        weights,
        agent.attributes.get("routetrace", ""),
        agent.attributes.get("host", ""),
    )


def _dropped(found: Sequence[AgentStat]) -> Iterator[tuple[Any, ...]]:
    for agent in found:
        for reason, rows in sorted(agent.dropped_rows.items()):
            if rows:
                yield agent.engine_id, agent.shard, reason, f"{rows:,}"


def _totals(found: Sequence[AgentStat]) -> str:
    connected = [agent for agent in found if agent.connected]
    text = f"{len(found)} agents, {len(connected)} connected"
    versions = [a.weight_version for a in connected if a.weight_version is not None]
    return f"{text}; newest weight version {max(versions)}" if versions else text
