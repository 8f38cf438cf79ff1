"""`routetrace limits`: limits of the server, and the part that the caller's token or run holds."""

from __future__ import annotations

from routetrace.cli.arguments import AsJson
from routetrace.cli.connection import Connection
from routetrace.cli.output import note, size, write_json, write_table
from routetrace.client import Limit, RouteTraceError

#: Columns of the table; those that end in a space are right-aligned.
_COLUMNS = ("limit", "of all ", "used ", "held ", "may hold ")

#: Limits that count bytes.
_IN_BYTES = ("max_ingest_bytes", "store_capacity", "run_quota", "token_quota")


def limits(connection: Connection, as_json: AsJson = False) -> None:
    """Show the limits that the run shares: parts of all, its own part, and how much it may hold.

    Parts are those of the token, over all its runs, or of the run on a server without tokens.
    """
    with connection.client() as client:
        info = connection.known_run(client)
    if not info.limits:
        raise RouteTraceError(
            f"server {info.version} reports no limits; expected version 0.8.0 or newer"
        )
    if as_json:
        for limit in info.limits:
            write_json({"owner": info.owner, **limit.to_dict()})
        return
    write_table(_COLUMNS, map(_row, info.limits), ("limit",))
    note(f"held by {info.owner}")


def _row(limit: Limit) -> tuple[str, ...]:
    show = size if limit.name in _IN_BYTES else "{:,}".format
    return limit.name, *map(show, (limit.limit, limit.used, limit.held, limit.share))
