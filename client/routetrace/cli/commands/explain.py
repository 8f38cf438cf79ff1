"""`routetrace explain`: where the row of one cell comes from, or why there is none."""

from __future__ import annotations

from typing import Annotated

import typer

from routetrace.cli.arguments import AsJson, Incarnation, OneId, PolicyChoice, PolicyOption
from routetrace.cli.connection import Connection
from routetrace.cli.output import write_json, write_table


def explain(
    connection: Connection,
    trace_id: OneId,
    position: Annotated[int, typer.Option(min=0, help="Position of the token.")],
    layer: Annotated[
        int | None,
        typer.Option(min=0, help="Absolute layer id.", show_default="the first MoE layer"),
    ] = None,
    policy: PolicyOption = PolicyChoice.as_sampled,
    weight_version: Annotated[
        int | None, typer.Option(help="Only rows computed with this weight version.")
    ] = None,
    incarnation: Incarnation = None,
    as_json: AsJson = False,
) -> None:
    """Explain one cell: who owns its position, where its row comes from, and what was refused."""
    with connection.client() as client:
        found = client.explain(
            trace_id,
            position,
            layer_id=layer,
            incarnation=incarnation,
            policy=policy.value,
            weight_version=weight_version,
        )
    if as_json:
        write_json(found.to_dict())
    else:
        write_table(("", ""), found.lines())
