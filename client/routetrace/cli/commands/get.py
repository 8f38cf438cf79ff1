"""`routetrace get`: rows of traces as files."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from routetrace.cli.arguments import (
    AsJson,
    Ids,
    Incarnation,
    Labels,
    Layers,
    PolicyChoice,
    PolicyOption,
    PrefixChoice,
    PrefixOption,
    Tokens,
    labels_of,
    layers_of,
    tokens_of,
)
from routetrace.cli.connection import Connection
from routetrace.cli.errors import report_error
from routetrace.cli.files import writer_for
from routetrace.cli.help import choices
from routetrace.cli.output import LABELS_OF, plain, progress, write_json
from routetrace.client import Trace
from routetrace.common.errors import InvalidArgument, NotFound, RouteTraceError, counted


class MissingChoice(str, Enum):
    """Treatment of missing rows."""

    raise_ = "raise"
    mask = "mask"


class WaitChoice(str, Enum):
    """Event that a read waits for."""

    rows = "rows"
    end = "end"


_MISSING = (("raise", "fail, and write none of their rows"), ("mask", "mark missing cells"))
_EVENTS = (("rows", "the rows that are asked for"), ("end", "the end of the trace"))


def get(
    connection: Connection,
    ids: Ids = None,
    output: Annotated[
        str,
        typer.Option("--output", "-o", help="File .npz or .parquet, or directory/ (required)."),
    ] = "",
    force: Annotated[
        bool, typer.Option("--force", help="Replace files that exist, without a question.")
    ] = False,
    label: Labels = None,
    layers: Layers = None,
    tokens: Tokens = None,
    policy: PolicyOption = PolicyChoice.as_sampled,
    prefix_rows: PrefixOption = PrefixChoice.never,
    missing: Annotated[
        MissingChoice, typer.Option(help=choices("Incomplete traces", _MISSING))
    ] = MissingChoice.raise_,
    wait_for: Annotated[
        WaitChoice | None,
        typer.Option(help=choices("Wait, up to --timeout, for", _EVENTS)),
    ] = None,
    weight_version: Annotated[
        int | None, typer.Option(help="Only rows computed with this weight version.")
    ] = None,
    incarnation: Incarnation = None,
    as_json: AsJson = False,
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
                connection.known_run(client)
                raise NotFound(
                    f"no trace of run {connection.run!r} has the labels {' '.join(label)}"
                    f"; {LABELS_OF}"
                )
        failed = 0
        unfinished: list[dict[str, Any]] = []  # of a file that exists once all are in it
        writer = writer_for(
            output, names, lambda there: force or (not as_json and _confirms(there))
        )
        answers: Iterable[Trace | RouteTraceError] = (
            client.get_many(names, errors="return", **options)
            if incarnation is None
            else iter([client.get(names[0], incarnation=incarnation, **options)])
        )
        with writer, progress("get", len(names)) as done:
            for name, answer in zip(names, answers, strict=True):
                if isinstance(answer, RouteTraceError):
                    failed += 1
                    report_error(answer, as_json=as_json, trace_id=name)
                elif not failed or writer.keeps_parts:
                    written = _written(answer, writer.add(answer))
                    if as_json and writer.keeps_parts:
                        _print_written(written)
                    elif as_json:
                        unfinished.append(written)
                done()
            if failed and not writer.keeps_parts:
                raise RouteTraceError(
                    f"{failed} of {counted(len(names), 'trace')} failed; {output} is not written"
                )
    for written in unfinished:
        _print_written(written)
    if failed:
        raise RouteTraceError(
            f"{failed} of {counted(len(names), 'trace')} failed; the others are in {output}"
        )


def _confirms(there: Sequence[Path]) -> bool:
    """Ask at a terminal whether files are to be replaced; elsewhere they are not."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return False
    more = f" and {counted(len(there) - 1, 'other file')}" if len(there) > 1 else ""
    return typer.confirm(plain(f"replace {there[0]}{more}?"), err=True)


def _written(trace: Trace, path: Path) -> dict[str, Any]:
    return {
        "trace_id": trace.trace_id,
        "path": str(path),
        "rows": len(trace),
        "state": trace.state.value,
    }


def _print_written(written: Mapping[str, Any]) -> None:
    write_json({**written, "bytes": Path(written["path"]).stat().st_size})
