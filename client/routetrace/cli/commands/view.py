"""`routetrace view`: a trace as one HTML file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from routetrace.cli.arguments import AsJson, Incarnation, OneId
from routetrace.cli.connection import Connection
from routetrace.cli.files import atomically
from routetrace.cli.output import note, write_json
from routetrace.client import RouteClient, Trace
from routetrace.client.options import Policy
from routetrace.common.errors import InvalidArgument
from routetrace.page.comparing import SideName, report_of
from routetrace.page.one_file import Other, document

_MIB = 1 << 20


def view(
    connection: Connection,
    trace_id: OneId,
    output: Annotated[
        str, typer.Option("--output", "-o", help="File that ends in .html (required).")
    ] = "",
    max_size: Annotated[
        int, typer.Option(min=1, max=1024, metavar="MIB", help="Maximum size of the file in MiB.")
    ] = 32,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that exists.")] = False,
    incarnation: Incarnation = None,
    against: Annotated[
        str,
        typer.Option(
            metavar="SIDE",
            help="Side to compare with: report:NAME (a trainer's report), #N (an incarnation) or "
            "latest (the last attempt).",
        ),
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Write a trace to one HTML file, which shows it in a browser without a server.

    It is the view of the page: which cells are there, which are missing and why, their weights, and
    the experts of all tokens if they fit into --max-size, else of those around holes. With
    --against, also where another side differs.
    """
    path = _path(output, force=force)
    side = SideName.of(against, "--against") if against else None
    with connection.client() as client:
        trace = client.get(trace_id, incarnation=incarnation, missing="mask")
        description = client.describe(trace_id, incarnation=trace.incarnation)
        other = _other(client, trace, side) if side else None
    text, content = document(trace, description, connection.target, max_size * _MIB, other)
    with atomically(path) as part:
        part.write_text(text, "utf-8")
    rows = sum(stop - start for start, stop in content.ranges)
    if as_json:
        written = {"rows": len(trace), "rows_with_ids": rows, "state": trace.state.value}
        write_json(
            {"trace_id": trace_id, "path": str(path), "bytes": len(text.encode()), **written}
        )
    elif rows < len(trace):
        note(f"with the experts of {rows:,} of {len(trace):,} tokens; all need a larger --max-size")


def _other(client: RouteClient, trace: Trace, side: SideName) -> Other:
    """Read another side of a trace."""
    if side.reporter is None:
        policy: Policy = "latest" if side.latest else "as_sampled"
        number = side.number or trace.incarnation
        read = client.get(trace.trace_id, incarnation=number, policy=policy, missing="mask")
        return Other("latest" if side.latest else f"#{read.incarnation}", read)
    with client.reports(side.reporter) as reports:
        read = reports.get(trace.trace_id, missing="mask")
    return Other(f"report:{side.reporter}", read, report_of(read, side.reporter))


def _path(output: str, *, force: bool) -> Path:
    path = Path(output)
    if not output:
        raise InvalidArgument("-o is required: FILE.html", field="-o")
    if path.suffix not in (".html", ".htm") or not path.parent.is_dir() or path.is_dir():
        raise InvalidArgument(
            field="--output", value=output, expected="a path that ends in .html, in a directory"
        )
    if path.exists() and not force:
        raise InvalidArgument(
            field="--output", value=output, expected="no such file yet, or --force"
        )
    return path
