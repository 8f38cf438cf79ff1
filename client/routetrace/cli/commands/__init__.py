"""The commands of `routetrace`; each module has those of one concern."""

from __future__ import annotations

from collections.abc import Callable

import typer

from routetrace.cli.arguments import Group
from routetrace.cli.bench import command as bench
from routetrace.cli.commands.agents import agents, forget_engine
from routetrace.cli.commands.diff import diff
from routetrace.cli.commands.doctor import doctor
from routetrace.cli.commands.explain import explain
from routetrace.cli.commands.get import get
from routetrace.cli.commands.limits import limits
from routetrace.cli.commands.page import page
from routetrace.cli.commands.removal import delete, renew, retire
from routetrace.cli.commands.stat import list_traces, runs, stat
from routetrace.cli.commands.tail import tail
from routetrace.cli.commands.verify import verify
from routetrace.cli.commands.view import view
from routetrace.cli.connection import connected, describing_connection
from routetrace.cli.experts.command import experts
from routetrace.cli.help import Command

app = typer.Typer(
    name="routetrace",
    cls=Group,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    help="Read, list, check and delete the traces of a routetrace-server.\n\n"
    "--json and the options of the connection, such as --target, may stand before or after the "
    "command.",
)


@app.callback()
@describing_connection
def top() -> None:
    """Accept --version without a command."""


_COMMANDS: dict[str, Callable[..., None]] = {
    "get": get,
    "stat": stat,
    "explain": explain,
    "list": list_traces,
    "tail": tail,
    "verify": verify,
    "diff": diff,
    "view": view,
    "runs": runs,
    "agents": agents,
    "limits": limits,
    "experts": experts,
    "delete": delete,
    "retire": retire,
    "renew": renew,
    "forget-engine": forget_engine,
    "page": page,
    "doctor": doctor,
}
for _name, _command in _COMMANDS.items():
    app.command(_name, cls=Command)(connected(_command))
app.add_typer(bench.app, name="bench")
