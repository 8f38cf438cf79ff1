"""The commands: what each takes, asks and prints."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from importlib.metadata import version
from itertools import islice
from typing import Annotated, Any

import typer

from routetrace.cli import bench
from routetrace.cli import doctor as doctor_checks
from routetrace.cli import tail as following
from routetrace.cli import verify as verifying
from routetrace.cli.arguments import labels_of, layers_of, tokens_of
from routetrace.cli.connection import Connection, connected
from routetrace.cli.experts import experts
from routetrace.cli.facts import COLUMNS, facts_json, facts_table, layers_text, table_row
from routetrace.cli.files import writer_for
from routetrace.cli.output import (
    describe,
    fail,
    progress,
    say,
    write_json,
    write_table,
)
from routetrace.client import RoutingTrace, TraceState
from routetrace.v1.errors import NotFound, RouteTraceError

app = typer.Typer(
    name="routetrace",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Gets, lists, checks and forgets the traces of a routetrace-server.",
)

app.add_typer(bench.app, name="bench")
app.command()(connected(experts))

# Ranges of a trace that `stat` prints.
_MOST_RANGES = 50


class PolicyChoice(str, Enum):
    """Which rows, of tokens that were computed more than once."""

    as_sampled = "as_sampled"
    latest = "latest"


class MissingChoice(str, Enum):
    """What to do where rows are missing."""

    raise_ = "raise"
    mask = "mask"
    wait = "wait"


Ids = Annotated[list[str] | None, typer.Argument(metavar="ID", help="trace ids")]
SomeIds = Annotated[list[str], typer.Argument(metavar="ID", help="trace ids")]
OneId = Annotated[str, typer.Argument(metavar="ID", help="a trace id")]
Labels = Annotated[
    list[str] | None,
    typer.Option("--label", "-l", metavar="KEY=VALUE", help="only traces with all these labels"),
]
AsJson = Annotated[bool, typer.Option("--json", help="print a line of JSON each")]
Incarnation = Annotated[
    int | None, typer.Option(help="which one, of a trace with several incarnations")
]
Layers = Annotated[str | None, typer.Option(help="absolute layer ids, such as 12-23,30")]
Tokens = Annotated[
    str | None, typer.Option(metavar="START:STOP", help="positions; either may be left out")
]
PolicyOption = Annotated[
    PolicyChoice, typer.Option(help="which rows of tokens that were computed more than once")
]


@app.callback(invoke_without_command=True)
def top(
    show_version: Annotated[bool, typer.Option("--version", help="print the version")] = False,
) -> None:
    """Runs before every command."""
    if show_version:
        print(version("routetrace"))
        raise typer.Exit


@app.command()
@connected
def get(
    connection: Connection,
    ids: Ids = None,
    output: Annotated[
        str, typer.Option("--output", "-o", help="out.npz, out.parquet, or a directory/")
    ] = "",
    label: Labels = None,
    layers: Layers = None,
    tokens: Tokens = None,
    policy: PolicyOption = PolicyChoice.as_sampled,
    missing: Annotated[
        MissingChoice, typer.Option(help="refuse incomplete traces, mask their holes, or wait")
    ] = MissingChoice.raise_,
    wait: Annotated[
        float | None, typer.Option(help="seconds to wait for the end (with --missing wait: rows)")
    ] = None,
    weight_version: Annotated[
        int | None, typer.Option(help="only rows that this version computed")
    ] = None,
    incarnation: Incarnation = None,
) -> None:
    """Writes the rows of traces to a file, which is there whole or not at all.

    out.npz holds one trace, directory/ a .npz for each, out.parquet a row for each token and layer.
    """
    if not output:
        raise typer.BadParameter("expected out.npz, out.parquet or a directory/", param_hint="-o")
    if bool(ids) == bool(label):
        raise typer.BadParameter("expected trace ids, or --label")
    if incarnation is not None and len(ids or ()) != 1:
        raise typer.BadParameter("expected one trace id with --incarnation")
    start, stop = tokens_of(tokens)
    layer_ids = layers_of(layers)
    asked: dict[str, Any] = {
        "layer_ids": layer_ids,
        "token_start": start,
        "token_stop": stop,
        "missing": missing.value,
        "wait": wait,
        "policy": policy.value,
        "weight_version": weight_version,
    }
    with connection.client() as client:
        names = list(dict.fromkeys(ids or ()))
        if label:
            names = [stat.request_id for stat in client.find(labels=labels_of(label))]
            if not names:
                fail(f"no trace of run {connection.run!r} has the labels {' '.join(label)}")
        failed = 0
        writer = writer_for(output, len(names))
        answers: Iterable[RoutingTrace | RouteTraceError] = (
            client.get_many(names, errors="return", **asked)
            if incarnation is None
            else iter([client.get(names[0], incarnation=incarnation, **asked)])
        )
        with writer, progress("get", len(names)) as done:
            for name, answer in zip(names, answers, strict=True):
                if isinstance(answer, RouteTraceError):
                    failed += 1
                    say(f"routetrace: {name}: {describe(answer)}")
                elif not failed or writer.keeps_parts:
                    writer.add(answer)
                done()
            if failed and not writer.keeps_parts:
                fail(f"{failed} of {len(names)} traces failed; {output} is not written")
    if failed:
        fail(f"{failed} of {len(names)} traces failed; the others are in {output}")


@app.command()
@connected
def stat(
    connection: Connection,
    trace_id: OneId,
    incarnation: Incarnation = None,
    as_json: AsJson = False,
) -> None:
    """Tells what is known of a trace, and what of it is missing and why."""
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
        write_table(("positions", "layers", "missing because"), islice(shown, _MOST_RANGES))
    if len(ranges) > _MOST_RANGES:
        say(f"{len(ranges) - _MOST_RANGES} more ranges; --json has all")


@app.command("list")
@connected
def list_traces(
    connection: Connection,
    label: Labels = None,
    state: Annotated[
        list[TraceState] | None, typer.Option(help="only traces in one of these states")
    ] = None,
    limit: Annotated[int, typer.Option(min=0, help="most traces; 0: all")] = 100,
    as_json: AsJson = False,
) -> None:
    """Lists the traces of the run, newest first."""
    with connection.client() as client:
        found = client.find(labels=labels_of(label or ()), states=state or ())
        first = islice(found, limit or None)
        if as_json:
            for one in first:
                write_json(facts_json(one))
            return
        write_table(COLUMNS, (table_row(one) for one in first))
        if limit and next(found, None) is not None:
            say(f"there are more than {limit}: --limit 0 lists all")


@app.command()
@connected
def tail(
    connection: Connection,
    trace_id: OneId,
    rows: Annotated[bool, typer.Option("--rows", help="print each row, as a line of JSON")] = False,
    layers: Layers = None,
    tokens: Tokens = None,
    policy: PolicyOption = PolicyChoice.as_sampled,
    incarnation: Incarnation = None,
) -> None:
    """Follows a trace until it ends; prints what comes, and exits with 1 if that is not all."""
    start, stop = tokens_of(tokens)
    with connection.client() as client:
        parts = client.follow(
            trace_id,
            layer_ids=layers_of(layers),
            token_start=start,
            token_stop=stop,
            missing="mask",
            policy=policy.value,
            incarnation=incarnation,
        )
        whole = following.print_parts(parts, rows)
    if not whole:
        raise typer.Exit(1)


@app.command()
@connected
def verify(
    connection: Connection,
    ids: Ids = None,
    everything: Annotated[bool, typer.Option("--all", help="all traces of the run")] = False,
    as_json: AsJson = False,
) -> None:
    """Reads traces whole and checks them: checksums, ids, coverage, digests.

    Exits with 1 if something of them is wrong or missing for good; what is still running is not.
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
    say(report.summary)
    if report.findings:
        raise typer.Exit(1)


@app.command()
@connected
def delete(connection: Connection, ids: SomeIds) -> None:
    """Forgets traces at once."""
    failed = 0
    with connection.client() as client:
        for name in ids:
            try:
                client.delete(name)
            except NotFound as error:  # noqa: PERF203
                failed += 1
                say(f"routetrace: {name}: {describe(error)}")
    if failed:
        raise typer.Exit(1)


@app.command()
@connected
def retire(
    connection: Connection,
    through: Annotated[int, typer.Option(help="the newest weight version that is to go")],
) -> None:
    """Forgets the ended traces that hold nothing newer than a weight version."""
    with connection.client() as client:
        print(f"{client.retire_through(through)} traces forgotten")


@app.command()
@connected
def renew(
    connection: Connection,
    ids: SomeIds,
    ttl: Annotated[int, typer.Option(min=0, help="seconds from now; 0: the server's default")] = 0,
) -> None:
    """Gives traces another time to live."""
    with connection.client() as client:
        found = client.renew(ids, ttl)
    print(f"{found} of {len(ids)} traces renewed")
    if found != len(ids):
        raise typer.Exit(1)


@app.command()
@connected
def doctor(connection: Connection) -> None:
    """Checks what stands between this machine and the server, and says what to do."""
    problems = 0
    for check in doctor_checks.checks(connection):
        problems += check.verdict == "problem"
        print(f"{check.verdict:8} {check}")
    if problems:
        raise typer.Exit(1)
