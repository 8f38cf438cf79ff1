"""`routetrace delete`, `retire` and `renew`: lifetimes of traces."""

from __future__ import annotations

from typing import Annotated

import typer

from routetrace.cli.arguments import AsJson, SomeIds
from routetrace.cli.connection import Connection
from routetrace.cli.errors import report_error
from routetrace.cli.output import plain, write_json
from routetrace.client import TraceStat
from routetrace.common.errors import NotFound

DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Print the traces that would be deleted; delete none.")
]


def delete(
    connection: Connection,
    ids: SomeIds,
    missing_ok: Annotated[
        bool, typer.Option("--missing-ok", help="Unknown ids are no error.")
    ] = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Delete traces at once."""
    failed = 0
    with connection.client() as client:
        for name in ids:
            try:
                if dry_run:
                    _would_delete(client.stat(name), as_json)
                    continue
                client.delete(name)
                deleted = True
            except NotFound as error:
                deleted = False
                if not missing_ok:
                    failed += 1
                    report_error(error, as_json=as_json, trace_id=name)
                    continue
            if as_json:
                write_json({"trace_id": name, "would_delete" if dry_run else "deleted": deleted})
    if failed:
        raise typer.Exit(1)


def retire(
    connection: Connection,
    through: Annotated[int, typer.Option(help="Newest weight version whose rows are deleted.")],
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Delete ended traces without rows newer than a weight version."""
    with connection.client() as client:
        if dry_run:
            for found in client.find(retirable_through=through):
                _would_delete(found, as_json)
            return
        count = client.retire_through(through)
    if as_json:
        write_json({"through": through, "num_deleted": count})
    else:
        print(f"{count} traces deleted")


def _would_delete(found: TraceStat, as_json: bool) -> None:
    state, rows = found.state.value, found.num_rows
    if as_json:
        facts = {"trace_id": found.trace_id, "would_delete": True, "state": state, "rows": rows}
        write_json(facts)
    else:
        print(plain(f"would delete {found.trace_id}: {state}, {rows:,} rows"))


def renew(
    connection: Connection,
    ids: SomeIds,
    ttl: Annotated[
        int | None, typer.Option(min=1, help="Lease from now on (default: that of the server).")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Renew the lease of traces."""
    with connection.client() as client:
        found = client.renew(ids, ttl_seconds=ttl)
    if as_json:
        write_json({"num_requested": len(ids), "num_renewed": found})
    else:
        print(f"{found} of {len(ids)} traces renewed")
    if found != len(ids):
        raise typer.Exit(1)
