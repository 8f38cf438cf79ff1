"""Options for the connection to the server, which commands share."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from routetrace.cli.arguments import Version
from routetrace.cli.errors import MAX_NAMED_RUNS, PARAMETERS
from routetrace.cli.help import CONNECTION
from routetrace.cli.output import plain
from routetrace.client import RouteClient, ServerInfo
from routetrace.common.errors import NotFound
from routetrace.common.security import Security

DEFAULT_TARGET = "127.0.0.1:7411"


@dataclass(frozen=True)
class Connection:
    """Server, run and credentials of a command."""

    target: str
    run: str
    timeout: float
    security: Security

    def client(self) -> RouteClient:
        """Return a new client."""
        return RouteClient(self.target, run=self.run, timeout=self.timeout, security=self.security)

    def known_run(self, client: RouteClient, info: ServerInfo | None = None) -> ServerInfo:
        """Return the state of the server, for a command that found nothing.

        Args:
            client: client of this connection.
            info: state of the server, if known.

        Raises:
            NotFound: if the server has no such run, as reads of it do.
        """
        info = info or client.server_info()
        if not has_run(info, self.run):
            names = runs_of(info)
            text = f"no run {self.run!r}; runs: {names}"
            raise NotFound(text, field="run", value=self.run, expected=f"one of {names}")
        return info


def has_run(info: ServerInfo, run: str) -> bool:
    """Return whether the server has a run; an answer names 1,000 of them at most."""
    return run in info.runs or bool(info.num_traces or info.num_agents)


def runs_of(info: ServerInfo) -> str:
    """Return the names of the first runs."""
    return ", ".join(map(plain, info.runs[:MAX_NAMED_RUNS])) or "none yet"


def connected(command: Callable[..., None]) -> Callable[..., None]:
    """Add the connection options to a command whose first parameter is a `Connection`.

    A parameter of the command that is called as one of them takes its place.
    """
    # typer derives the options from the signature.
    own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]
    replaced = {parameter.name for parameter in own}
    shared = {name: option for name, option in _OPTIONS.items() if name not in replaced}

    @functools.wraps(command)
    def run(**arguments: Any) -> None:
        arguments.pop("version")
        given = {name: arguments.pop(name) for name in shared}
        PARAMETERS.set({*given, *arguments})
        command(_connection(**given), **arguments)

    run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [p.replace(kind=p.KEYWORD_ONLY) for p in (*own, _VERSION, *shared.values())]
    )
    return run


def describing_connection(top: Callable[..., None]) -> Callable[..., None]:
    """Add the connection options to the help of a group, which moves them behind its command."""

    @functools.wraps(top)
    def run(**_: Any) -> None:
        top()

    run.__signature__ = inspect.Signature([_VERSION, *_OPTIONS.values()])  # type: ignore[attr-defined]
    return run


def _connection(
    target: str, timeout: float, tls: bool, run: str = "default", **files: Path | str | None
) -> Connection:
    security = Security.from_environment()
    given: dict[str, Any] = {name: str(file) for name, file in files.items() if file is not None}
    if "token_file" in given:
        given["token"] = ""
    return Connection(target, run, timeout, replace(security, tls=tls or security.tls, **given))


def _option(
    name: str,
    kind: Any,
    default: Any,
    help_text: str,
    *,
    env: str | None = None,
    show_default: bool | str = True,
) -> inspect.Parameter:
    flag = "--" + name.replace("_", "-")
    option = typer.Option(
        flag, help=help_text, envvar=env, show_default=show_default, rich_help_panel=CONNECTION
    )
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[kind, option],
    )


_VERSION = inspect.Parameter(
    "version", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Version
)
# `Security` takes defaults from the environment. A token is no flag: other users of the machine
# could read it.
_OPTIONS = {
    option.name: option
    for option in (
        _option("target", str, DEFAULT_TARGET, "Server.", env="ROUTETRACE_TARGET"),
        _option(
            "run",
            str,
            "default",
            "Run of the traces.",
            env="ROUTETRACE_RUN",
            show_default='the run "default"',
        ),
        _option(
            "timeout",
            float,
            60.0,
            "Time for a call, with all attempts to connect; of tail, for the first answer alone.",
        ),
        _option("tls", bool, False, "Use TLS (env: ROUTETRACE_TLS)."),
        _option("ca_file", Path | None, None, "PEM file of authorities (env: ROUTETRACE_CA_FILE)."),
        _option(
            "cert_file",
            Path | None,
            None,
            "PEM file of a certificate (env: ROUTETRACE_CERT_FILE).",
        ),
        _option("key_file", Path | None, None, "PEM file of its key (env: ROUTETRACE_KEY_FILE)."),
        _option(
            "server_name",
            str | None,
            None,
            "Name in the certificate of the server (env: ROUTETRACE_SERVER_NAME).",
        ),
        _option(
            "token_file",
            Path | None,
            None,
            "File of the bearer token (env: ROUTETRACE_TOKEN_FILE; token: ROUTETRACE_TOKEN).",
        ),
    )
}
