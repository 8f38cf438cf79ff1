"""The commands of `routetrace`."""

from __future__ import annotations

# Over 400 lines: one short function for each command.
from collections.abc import Iterable
from dataclasses import asdict
from enum import Enum
from itertools import islice
from typing import Annotated, Any

import typer

from routetrace.cli import doctor as doctor_checks
from routetrace.cli import tail as following
from routetrace.cli import verify as verifying
from routetrace.cli.agents import agents
from routetrace.cli.arguments import (
    AsJson,
    Command,
    Group,
    Version,
    labels_of,
    layers_of,
    tokens_of,
)
from routetrace.cli.bench import command as bench
from routetrace.cli.connection import Connection, connected
from routetrace.cli.experts.command import experts
from routetrace.cli.facts import (
    COLUMNS,
    FOLD,
    facts_json,
    facts_table,
    layers_text,
    table_row,
    totals,
)
from routetrace.cli.files import writer_for
from routetrace.cli.limits import limits
from routetrace.cli.output import (
    describe,
    fail,
    none_found,
    note,
    plain,
    progress,
    write_json,
    write_table,
)
from routetrace.client import Trace, TraceStat, TraceState
from routetrace.common.errors import InvalidArgument, NotFound, RouteTraceError

app = typer.Typer(
    name="routetrace",
    cls=Group,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Read, list, check and delete the traces of a routetrace-server.",
)

app.add_typer(bench.app, name="bench")
app.command(cls=Command)(connected(experts))
app.command(cls=Command)(connected(agents))
app.command(cls=Command)(connected(limits))

# Maximum ranges that `stat` prints.
_MAX_RANGES = 50


class PolicyChoice(str, Enum):
    """Rows of tokens that were computed more than once."""

    as_sampled = "as_sampled"
    latest = "latest"


class PrefixChoice(str, Enum):
    """Which rows of other traces stand in where KV was restored from elsewhere."""

    same_version = "same_version"
    any_version = "any_version"
    never = "never"


class MissingChoice(str, Enum):
    """Treatment of missing rows."""

    raise_ = "raise"
    mask = "mask"


class WaitChoice(str, Enum):
    """Event that a read waits for."""

    rows = "rows"
    end = "end"


Ids = Annotated[list[str] | None, typer.Argument(metavar="ID", help="Trace ids.")]
SomeIds = Annotated[list[str], typer.Argument(metavar="ID", help="Trace ids.")]
OneId = Annotated[str, typer.Argument(metavar="ID", help="Trace id.")]
Labels = Annotated[
    list[str] | None,
    typer.Option("--label", "-l", metavar="KEY=VALUE", help="Only traces with all these labels."),
]
Incarnation = Annotated[
    int | None, typer.Option(help="Number of the incarnation, if a trace has several.")
]
Layers = Annotated[str | None, typer.Option(help="Absolute layer ids, such as 12-23,30.")]
Tokens = Annotated[
    str | None, typer.Option(metavar="START:STOP", help="Positions; either may be omitted.")
]
PolicyOption = Annotated[
    PolicyChoice, typer.Option(help="Choice of rows for tokens that were computed more than once.")
]

PrefixOption = Annotated[
    PrefixChoice, typer.Option(help="Which rows of other traces stand in for KV from elsewhere.")
]


DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Print the traces that would be deleted; delete none.")
]


@app.callback()
def top(version: Version = False) -> None:
    """Accept --version without a command."""


@app.command(cls=Command)
@connected
def get(
    connection: Connection,
    ids: Ids = None,
    output: Annotated[
        str, typer.Option("--output", "-o", help="Output: out.npz, out.parquet, or a directory/.")
    ] = "",
    force: Annotated[bool, typer.Option("--force", help="Replace files that exist.")] = False,
    label: Labels = None,
    layers: Layers = None,
    tokens: Tokens = None,
    policy: PolicyOption = PolicyChoice.as_sampled,
    prefix_rows: PrefixOption = PrefixChoice.same_version,
    missing: Annotated[
        MissingChoice, typer.Option(help="Refuse incomplete traces, or mask missing cells.")
    ] = MissingChoice.raise_,
    wait_for: Annotated[
        WaitChoice | None,
        typer.Option(help="Wait for the rows, or the end of the trace, up to --timeout."),
    ] = None,
    weight_version: Annotated[
        int | None, typer.Option(help="Only rows computed with this weight version.")
    ] = None,
    incarnation: Incarnation = None,
) -> None:
    """Write the rows of traces to a file, whole or not at all.

    out.npz holds one trace, directory/ one .npz per trace, out.parquet one row per token and layer.
    """
    if not output:
        raise InvalidArgument("-o is required: FILE.npz, FILE.parquet or DIR/", field="-o")
    if bool(ids) == bool(label):
        raise typer.BadParameter("expected trace ids, or --label")
    if incarnation is not None and len(ids or ()) != 1:
        raise typer.BadParameter("expected one trace id with --incarnation")
    start, stop = tokens_of(tokens)
    layer_ids = layers_of(layers)
    options: dict[str, Any] = {
        "layer_ids": layer_ids,
        "token_start": start,
        "token_stop": stop,
        "missing": missing.value,
        "wait_for": wait_for and wait_for.value,
        "policy": policy.value,
        "prefix_rows": prefix_rows.value,
        "weight_version": weight_version,
    }
    with connection.client() as client:
        names = list(dict.fromkeys(ids or ()))
        if label:
            names = [stat.trace_id for stat in client.find(labels=labels_of(label))]
            if not names:
                fail(f"no trace of run {connection.run!r} has the labels {' '.join(label)}")
        failed = 0
        writer = writer_for(output, names, force=force)
        answers: Iterable[Trace | RouteTraceError] = (
            client.get_many(names, errors="return", **options)
            if incarnation is None
            else iter([client.get(names[0], incarnation=incarnation, **options)])
        )
        with writer, progress("get", len(names)) as done:
            for name, answer in zip(names, answers, strict=True):
                if isinstance(answer, RouteTraceError):
                    failed += 1
                    note(f"routetrace: {name}: {describe(answer)}")
                elif not failed or writer.keeps_parts:
                    writer.add(answer)
                done()
            if failed and not writer.keeps_parts:
                fail(f"{failed} of {len(names)} traces failed; {output} is not written")
    if failed:
        fail(f"{failed} of {len(names)} traces failed; the others are in {output}")


@app.command(cls=Command)
@connected
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
    write_table(("", ""), facts_table(found))
    ranges = found.missing or ()
    if ranges:
        print()
        shown = ((f"{m.start}:{m.stop}", layers_text(m.layer_ids), m.reason) for m in ranges)
        write_table(("positions", "layers", "missing because"), islice(shown, _MAX_RANGES))
    if len(ranges) > _MAX_RANGES:
        note(f"{len(ranges) - _MAX_RANGES} more ranges; --json has all")


@app.command("list", cls=Command)
@connected
def list_traces(
    connection: Connection,
    label: Labels = None,
    state: Annotated[
        list[TraceState] | None, typer.Option(help="Only traces in one of these states.")
    ] = None,
    limit: Annotated[int, typer.Option(min=0, help="Maximum number of traces; 0: all.")] = 100,
    as_json: AsJson = False,
) -> None:
    """List the traces of the run, newest first, by the age of their first report."""
    with connection.client() as client:
        found = client.find(labels=labels_of(label or ()), states=state or ())
        first = islice(found, limit or None)
        if as_json:
            for one in first:
                write_json(facts_json(one))
            return
        shown = list(first)
        server = client.server_info()
        if not shown:
            note(none_found("trace", connection.run, server.runs))
            return
        write_table(COLUMNS, (table_row(one, server.now) for one in shown), FOLD)
        for line in totals(shown):
            note(line)
        if limit and next(found, None) is not None:
            note(f"the run has more than {limit}; --limit 0 lists all")


@app.command(cls=Command)
@connected
def runs(connection: Connection, as_json: AsJson = False) -> None:
    """List the runs that have traces or agents, as far as the token covers them."""
    with connection.client() as client:
        for name in client.server_info().runs:
            if as_json:
                write_json({"run": name})
            else:
                print(plain(name))


@app.command(cls=Command)
@connected
def tail(
    connection: Connection,
    trace_id: OneId,
    rows: Annotated[bool, typer.Option("--rows", help="Print each row as a line of JSON.")] = False,
    layers: Layers = None,
    tokens: Tokens = None,
    policy: PolicyOption = PolicyChoice.as_sampled,
    prefix_rows: PrefixOption = PrefixChoice.same_version,
    incarnation: Incarnation = None,
) -> None:
    """Follow a trace to its end and print its parts; exit with 1 if rows are missing."""
    start, stop = tokens_of(tokens)
    with connection.client() as client:
        parts = client.follow(
            trace_id,
            layer_ids=layers_of(layers),
            token_start=start,
            token_stop=stop,
            missing="mask",
            policy=policy.value,
            prefix_rows=prefix_rows.value,
            incarnation=incarnation,
        )
        whole = following.print_parts(parts, rows)
    if not whole:
        raise typer.Exit(1)


@app.command(cls=Command)
@connected
def verify(
    connection: Connection,
    ids: Ids = None,
    everything: Annotated[bool, typer.Option("--all", help="All traces of the run.")] = False,
    as_json: AsJson = False,
) -> None:
    """Read traces whole and check checksums, ids, coverage and digests.

    Exits with 1 if anything is wrong or permanently missing. Rows that a running trace lacks are
    neither.
    """
    if bool(ids) == everything:
        raise typer.BadParameter("expected trace ids, or --all")
    with connection.client() as client:
        report = verifying.verify(client, ids)
    if as_json:
        for finding in report.findings:
            write_json(finding._asdict())
    elif report.findings:
        write_table(("trace", "wrong", "details"), report.findings)
    note(report.summary)
    if report.findings:
        raise typer.Exit(1)


@app.command(cls=Command)
@connected
def delete(
    connection: Connection,
    ids: SomeIds,
    missing_ok: Annotated[
        bool, typer.Option("--missing-ok", help="Unknown ids are no error.")
    ] = False,
    dry_run: DryRun = False,
) -> None:
    """Delete traces at once."""
    failed = 0
    with connection.client() as client:
        for name in ids:
            try:
                if dry_run:
                    _would_delete(client.stat(name))
                else:
                    client.delete(name)
            except NotFound as error:  # noqa: PERF203
                if missing_ok:
                    continue
                failed += 1
                note(f"routetrace: {name}: {describe(error)}")
    if failed:
        raise typer.Exit(1)


@app.command(cls=Command)
@connected
def forget_engine(
    connection: Connection,
    engine: Annotated[str, typer.Argument(help="Engine id, as `routetrace agents` shows it.")],
) -> None:
    """Forget an engine whose agents are gone, so that it counts against no limit; traces stay."""
    with connection.client() as client:
        print(f"{client.forget_engine(engine)} shards of engine {plain(engine)} forgotten")


@app.command(cls=Command)
@connected
def retire(
    connection: Connection,
    through: Annotated[int, typer.Option(help="Newest weight version to delete.")],
    dry_run: DryRun = False,
) -> None:
    """Delete ended traces without rows newer than a weight version."""
    with connection.client() as client:
        if dry_run:
            for found in client.find(retirable_through=through):
                _would_delete(found)
            return
        print(f"{client.retire_through(through)} traces deleted")


def _would_delete(found: TraceStat) -> None:
    print(plain(f"would delete {found.trace_id}: {found.state.value}, {found.num_rows:,} rows"))


@app.command(cls=Command)
@connected
def renew(
    connection: Connection,
    ids: SomeIds,
    ttl: Annotated[int, typer.Option(min=0, help="Seconds from now; 0: server default.")] = 0,
) -> None:
    """Renew the lease of traces."""
    with connection.client() as client:
        found = client.renew(ids, ttl_seconds=ttl)
    print(f"{found} of {len(ids)} traces renewed")
    if found != len(ids):
        raise typer.Exit(1)


@app.command(cls=Command)
@connected
def doctor(connection: Connection, as_json: AsJson = False) -> None:
    """Check the connection from this machine to the server, and suggest remedies."""
    problems = 0
    for check in doctor_checks.checks(connection):
        problems += check.verdict == "problem"
        if as_json:
            write_json(asdict(check))
        else:
            print(f"{check.verdict:8} {check}")
    if problems:
        raise typer.Exit(1)
