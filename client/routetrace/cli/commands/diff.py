"""`routetrace diff`: two reads of the same tokens, cell by cell."""

from __future__ import annotations

import re
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer

from routetrace.cli.arguments import AsJson
from routetrace.cli.connection import Connection
from routetrace.cli.output import note, plain, write_json, write_table
from routetrace.client import RouteClient, Trace
from routetrace.client.options import Policy
from routetrace.common.errors import InvalidArgument, counted
from routetrace.trainers.comparison import MAX_WORST, Comparison, compare_ids, compare_traces

_SIDE = re.compile(
    r"(?P<id>.+?)(?:#(?P<number>[1-9]\d*))?"
    r"(?:@(?:(?P<policy>latest|as_sampled)|report:(?P<reporter>.+)))?",
    re.S,
)

# Layers of the table, those that differ most.
_MAX_LAYERS = 8

Side = Annotated[
    str,
    typer.Argument(
        metavar="SIDE",
        help="ID; ID#2: of incarnation 2; ID@latest: with the rows of the last attempt; "
        "ID@report:NAME: of a trainer's report; or a .npz.",
    ),
]


class _Named(NamedTuple):
    """A side that the server has."""

    trace_id: str
    incarnation: int | None
    policy: Policy
    reporter: str | None


def diff(
    connection: Connection,
    a: Side,
    b: Side,
    worst: Annotated[
        int, typer.Option(min=0, max=MAX_WORST, help="Maximum number of the worst tokens.")
    ] = 10,
    as_json: AsJson = False,
) -> None:
    """Compare the choices of two sides in the cells that both have.

    The .npz of `get` holds a side, or an array topk_ids [tokens, layers, top_k] of a trainer, with
    valid, layer_ids and token_start if they are not those of the whole trace. Exits with 1 if the
    rows fit other tokens or layers better, or nothing.
    """
    if a.endswith(".npz"):
        raise InvalidArgument(
            field="A", value=a, expected="a trace of the server; the .npz comes second"
        )
    with connection.client() as client:
        first = _read(client, a)
        if b.endswith(".npz"):
            found = _against_file(first, Path(b), worst)
        else:
            found = compare_traces(first, _read(client, b), worst=worst)
    if as_json:
        write_json({"a": a, "b": b, **found.to_dict()})
    else:
        _show(found)
    if found.diagnosis:
        raise typer.Exit(1)


def _read(client: RouteClient, text: str) -> Trace:
    side = _named(text)
    with nullcontext(client) if side.reporter is None else client.reports(side.reporter) as source:
        return source.get(
            side.trace_id, incarnation=side.incarnation, policy=side.policy, missing="mask"
        )


def _named(text: str) -> _Named:
    found = _SIDE.fullmatch(text)
    if not found:
        raise InvalidArgument(
            field="SIDE", value=text, expected="ID, ID#2, ID@latest or ID@report:NAME"
        )
    number = found["number"]
    policy: Policy = "latest" if found["policy"] == "latest" else "as_sampled"
    return _Named(found["id"], int(number) if number else None, policy, found["reporter"])


def _against_file(trace: Trace, path: Path, worst: int) -> Comparison:
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays: dict[str, Any] = {
                name: file[name]
                for name in ("topk_ids", "valid", "layer_ids", "token_start")
                if name in file.files
            }
    except (OSError, ValueError) as error:
        raise InvalidArgument(
            field="B", value=str(path), expected=f"a .npz that can be read: {error}"
        ) from error
    if "topk_ids" not in arrays:
        raise InvalidArgument(field="B", value=str(path), expected="a .npz with topk_ids")
    ids = arrays.pop("topk_ids")
    if "layer_ids" in arrays:
        arrays["layer_ids"] = arrays["layer_ids"].tolist()
    if "token_start" in arrays:
        arrays["token_start"] = int(arrays["token_start"])
    return compare_ids(trace, ids, worst=worst, **arrays)


def _show(found: Comparison) -> None:
    print(plain(found.diagnosis or found.cause or _verdict(found)))
    tokens = found.differing_tokens / found.tokens if found.tokens else None
    print()
    write_table(
        ("", ""),
        (
            ("cells that differ", f"{_percent(found.disagreement)} of {found.cells:,}"),
            ("tokens with any", f"{_percent(tokens)} of {found.tokens:,}"),
            ("experts in common", _percent(found.overlap)),
            ("positions, layers", f"{found.start}:{found.stop}, {len(found.layer_ids)}"),
            ("cells of one side alone", f"{found.missing:,}"),
        ),
    )
    layers = sorted(found.by_layer.items(), key=lambda item: -_share(item[1]))
    rows = [
        (str(layer), f"{choices.cells:,}", _percent(_share(choices)))
        for layer, choices in layers[:_MAX_LAYERS]
        if choices.differing
    ]
    if rows:
        print()
        write_table(("layer ", "cells ", "differ "), rows)
    if found.worst:
        print()
        write_table(
            ("position ", "layers that differ ", "in common ", "weights "),
            (
                (
                    str(token.position),
                    f"{token.differing} of {token.layers}",
                    _percent(token.overlap),
                    "" if token.weight_version is None else str(token.weight_version),
                )
                for token in found.worst
            ),
        )
    if found.other_tokens_from is not None:
        note(
            f"from position {found.other_tokens_from} on the tokens are not the same, as their "
            "digests say; nothing is compared there"
        )


def _verdict(found: Comparison) -> str:
    if not found.cells:
        return "no cell is there on both sides"
    if not found.differing:
        return f"the same in {counted(found.cells, 'cell')}"
    return "rows match in order; the differences show no pattern with a known cause"


def _share(choices: Any) -> float:
    return choices.differing / choices.cells if choices.cells else 0.0


def _percent(share: float | None) -> str:
    """Return a share in percent; 0 % and 100 % are none and all."""
    if share is None:
        return "-"
    text = f"{100 * share:.2f} %"
    if share > 0 and text == "0.00 %":
        return "< 0.01 %"
    return "> 99.99 %" if share < 1 and text == "100.00 %" else text
