"""`routetrace delete`, `retire` and `renew`: lifetimes of traces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from routetrace.cli.arguments import AsJson, SomeIds
from routetrace.cli.connection import Connection
from routetrace.cli.errors import report_error
from routetrace.cli.output import note, plain, size, write_json
from routetrace.client import Retired, RouteClient, TraceStat
from routetrace.common.errors import (
    DeadlineExceeded,
    NotFound,
    RouteTraceError,
    Unavailable,
    counted,
)

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
    found: list[TraceStat] = []
    with connection.client() as client:
        for name in ids:
            try:
                if dry_run:
                    found.append(_would_delete(client.stat(name), as_json))
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
    if dry_run:
        _note_total(found)
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
        found = client.find(retirable_through=through) if dry_run else ()
        listed = [_would_delete(one, as_json) for one in found]
        retired = Retired(len(listed), 0) if dry_run else client.retire_through(through)
        if not retired.traces:
            connection.known_run(client)
    if dry_run:
        _note_total(listed, f": no ended trace has only rows of weight versions up to {through}")
    elif as_json:
        write_json(
            {"through": through, "num_deleted": retired.traces, "num_unknown": retired.unknown}
        )
    else:
        unknown = f", {retired.unknown} of an unknown weight version" if retired.unknown else ""
        print(f"{counted(retired.traces, 'trace')} deleted{unknown}")


def _would_delete(found: TraceStat, as_json: bool) -> TraceStat:
    state, rows = found.state.value, found.num_rows
    if as_json:
        facts = {"trace_id": found.trace_id, "would_delete": True, "state": state, "rows": rows}
        write_json(facts)
    else:
        print(plain(f"would delete {found.trace_id}: {state}, {counted(rows, 'row')}"))
    return found


def _note_total(found: Sequence[TraceStat], otherwise: str = "") -> None:
    """Print what would be deleted in all, or `otherwise`, why nothing would."""
    if found:
        rows = counted(sum(one.num_rows for one in found), "row")
        stored = size(sum(one.stored_bytes for one in found))
        note(f"would delete {counted(len(found), 'trace')}: {rows}, {stored}")
    else:
        note(f"would delete nothing{otherwise}")


def renew(
    connection: Connection,
    ids: SomeIds,
    ttl: Annotated[
        int | None, typer.Option(min=1, help="Lease from now on (default: that of the server).")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Renew the lease of traces."""
    ids = list(dict.fromkeys(ids))
    with connection.client() as client:
        found = client.renew(ids, ttl_seconds=ttl)
        absent = _absent(client, ids, len(ids) - found)
    for name, error in absent.items():
        report_error(error, as_json=as_json, trace_id=name)
    if as_json:
        write_json({"num_requested": len(ids), "num_renewed": found})
    else:
        print(f"{found} of {counted(len(ids), 'trace')} renewed")
    if found < len(ids):
        raise typer.Exit(1)


def _absent(client: RouteClient, ids: Sequence[str], number: int) -> dict[str, RouteTraceError]:
    """Return the first `number` traces that are not there, with the reason.

    Traces for which that cannot be found out are among them: what was renewed is to be reported.

    Raises:
        NotFound: if the run is not there.
    """
    errors: dict[str, RouteTraceError] = {}
    for name in ids:
        if not number:
            break
        try:
            client.stat(name)
        except NotFound as error:
            if error.kind == "run":
                raise
            errors[name] = error
            number -= 1
        except RouteTraceError as error:
            errors[name] = error
            if isinstance(error, (Unavailable, DeadlineExceeded)):
                break  # each further call would wait as long
    return errors
